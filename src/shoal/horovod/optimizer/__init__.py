"""`DistributedOptimizer`, for gradients and for Adasum."""
