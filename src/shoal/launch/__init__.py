"""Start worker processes, give each its rank, and monitor them. A launcher decides nothing about the run."""
