"""Checks of settings that need neither a model nor data."""
