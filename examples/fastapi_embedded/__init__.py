"""A FastAPI service that computes its own metrics; see app.py."""
