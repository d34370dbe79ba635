"""A trained model on one device: loaded from a checkpoint, merged, and continuing a text."""
