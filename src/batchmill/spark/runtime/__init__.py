"""Runs a pipeline: its Spark session, its streaming query, its checkpoint and its progress.

:mod:`.pipeline` is the public class. :mod:`.stream` runs its streaming query and :mod:`.backfill`
its backfills; :mod:`.progress` does the upkeep beside them. :mod:`.session` and :mod:`.java` start
Spark, :mod:`.checkpoint` is the folder that a stream continues from.
"""
