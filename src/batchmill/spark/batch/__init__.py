"""One micro-batch: from the names of its segments to what the store commits.

    read ──► [shuffle by trace] ──► spans, L1 ──► [shuffle by entity] ──► L2 ──► commit

The three steps run on the executors, as plain functions on Arrow tables: :mod:`.read_step`,
:mod:`.span_step` and :mod:`.merge`. They share a :mod:`.plan`; :mod:`batchmill.spark.shuffle` is
what travels between them, and :mod:`.job` the Spark job that they make up. :mod:`.maker` turns the
results into a batch of the store, :mod:`.writer` commits it, :mod:`.report` says what it brought.
What one batch keeps for the next is in :mod:`batchmill.spark.files.state`.

What a step returns depends on its input only, not on the order in which blobs arrive: a task that
runs again returns the same.
"""
