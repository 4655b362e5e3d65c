"""A run: its supervised processes, their state on disk, and how it is shown."""
