"""The screen of ``batchmill top``."""
