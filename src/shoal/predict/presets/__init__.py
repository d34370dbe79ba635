"""Known models, clusters and devices."""
