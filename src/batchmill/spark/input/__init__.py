"""What a pipeline reads: segments of a spool, messages of a Kafka topic, and the quarantine.

:mod:`.base` defines what an input offers, :mod:`.spool` and :mod:`.kafka` are the two inputs;
:mod:`.segments` inspects files, :mod:`.reader` reads them as rows of an event type, and
:mod:`.quarantine` keeps what cannot be read.
"""
