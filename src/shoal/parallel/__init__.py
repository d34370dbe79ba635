"""Parallelism: one file for each axis, strangers to each other, and `compose`, which states their order."""
