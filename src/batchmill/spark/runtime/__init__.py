"""Runs a pipeline: its Spark session, its stream of batches, its checkpoint and its progress.

:mod:`.pipeline` is the public class. :mod:`.stream` runs the batches of its stream and
:mod:`.backfill` its backfills; :mod:`.progress` does the upkeep beside them. :mod:`.session` and
:mod:`.java` start Spark. :mod:`.checkpoint` is the folder that a stream continues from;
:mod:`.takeover` reads the books of version 1.
"""
