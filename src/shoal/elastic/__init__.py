"""Resume after a failure: restarts of the workers, and checkpoints in memory for them."""
