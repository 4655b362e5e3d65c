"""What a pipeline reads: segments of a spool, and messages of a Kafka topic.

:mod:`.base` defines what an input offers, :mod:`.spool` and :mod:`.kafka` are the two inputs;
:mod:`.segments` opens files and says what is wrong with them, :mod:`.rows` reads rows of event
types and spans, :mod:`.deltas` reads what processes have aggregated themselves. The :mod:`.books`
say what was read.
"""
