"""Parallelism: one package or file per axis, independent of each other, and `compose`, which applies them in order."""
