"""What a pipeline reads: segments of a spool, messages of a topic."""
