"""What OpenTelemetry spans mean, as pure functions on Arrow tables.

Spans are reduced to plain columns; from these come the rows of event types, the relations between
services, the slowest statements, and the ids by which a span that is delivered twice counts once.
NumPy and Arrow, no Spark.
"""
