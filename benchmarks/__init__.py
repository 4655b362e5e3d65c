"""Benchmarks: batchmill and named peers, measured on the same work in the same run."""
