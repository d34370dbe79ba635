"""Collective algorithms as lists of messages."""
