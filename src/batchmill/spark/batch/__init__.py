"""One micro-batch: from the names of its segments to what the store commits.

    read ──► [shuffle by trace] ──► spans, L1 ──► [shuffle by entity] ──► L2 ──► commit

:mod:`.tasks` has the three steps, which run on the executors as plain functions on Arrow tables;
:mod:`.job` is the Spark job that they make up, and :mod:`.blobs` what travels between them.
:mod:`.state` are the files that one batch keeps for the next. :mod:`.maker` turns the results into
a batch of the store, :mod:`.writer` commits it, :mod:`.report` says what it brought.
"""
