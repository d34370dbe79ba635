"""Whether a plan fits a model."""
