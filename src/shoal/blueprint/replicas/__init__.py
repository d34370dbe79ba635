"""What replicas exchange: compressed gradients, local SGD."""
