"""L1: aggregates rows of event types to mergeable deltas, one per entity and minute.

:mod:`.plan` compiles the metrics of an event type to Spark SQL when a pipeline starts;
:mod:`.fusion` runs the plans for a batch, with one of the :mod:`.aggregators`. :mod:`.expressions`
is the SQL of rows, :mod:`.states` the arithmetic on columns with Arrow and NumPy.
"""
