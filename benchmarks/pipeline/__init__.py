"""The pipeline beside other jobs on Spark: ``python -m benchmarks.pipeline``."""
