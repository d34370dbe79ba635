"""Mixtures of several sources: whether they fit together."""
