"""Predict memory, messages and time of a plan, without torch."""
