"""The simulated shop that ``batchmill demo`` runs."""
