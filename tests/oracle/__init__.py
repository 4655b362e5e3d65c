"""An independent oracle of the metrics: plain Python, written from the reference page alone.

Nothing here imports batchmill. What the pipeline computes in merged states over many files, the
oracle computes from the whole list of rows at once.
"""
