"""L2: deltas to what the store commits."""
