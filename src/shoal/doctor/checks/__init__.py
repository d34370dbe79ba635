"""Checks of one host, by subject. Each returns findings; none changes anything."""
