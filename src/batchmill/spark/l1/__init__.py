"""L1: rows of sources to mergeable deltas per entity and minute."""
