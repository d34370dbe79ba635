"""Measure steps of a recipe: over ranks and plans, with other settings, and their memory by cause."""
