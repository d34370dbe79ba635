"""The loss of a global batch: what it is called with, and how many labels its mean is over."""
