"""The queue demonstration."""
