"""The stream that runs: session, checkpoint, progress, pipeline."""
