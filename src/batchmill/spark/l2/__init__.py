"""L2: makes the batches of a stream and commits them to the store.

:mod:`.batch` makes one batch of segments, :mod:`.deltas` turns L1's results into what the store
merges, :mod:`.writer` commits the batches of a stream, and :mod:`.report` says what became of them.
"""
