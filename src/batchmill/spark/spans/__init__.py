"""Spans to rows of sources."""
