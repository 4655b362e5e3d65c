"""Spans: what is derived from the spans of a batch, and which of them wait for a later batch.

:mod:`.processor` runs the steps for a batch: :mod:`.dedup` drops spans that were delivered before,
:mod:`.columns` reduces spans to plain columns, :mod:`.sources` turns them into rows of event types,
:mod:`.links` finds calls between services, :mod:`.topn` the slowest statements, and :mod:`.pending`
manages the files of spans that wait.
"""
