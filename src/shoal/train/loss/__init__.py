"""The loss of a global batch, and the number of labels in its mean."""
