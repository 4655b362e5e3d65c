"""``batchmill top``: draws the status of a run in the terminal, each second."""
