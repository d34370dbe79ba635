"""Checks of a plan against a model, before any process starts."""
