"""What OpenTelemetry spans mean: the rows of event types that they give, and which called which.

Pure functions on Arrow tables, with NumPy: no Spark, no store. :mod:`.columns` reduces spans to
plain columns, :mod:`.sources` turns these into rows of event types.
"""
