"""`shoal train`: a run that a recipe describes, from its checks to its summary."""
