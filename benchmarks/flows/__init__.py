"""Flow-ordered dispatch beside its peers: ``python -m benchmarks.flows``."""
