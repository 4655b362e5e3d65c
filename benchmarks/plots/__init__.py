"""Plots of the committed results: ``python -m benchmarks.plots``."""
