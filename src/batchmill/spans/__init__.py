"""What spans mean: their plain columns, the rows of event types they give, who called whom.

Pure functions on Arrow tables, with NumPy; no Spark and no store.
"""
