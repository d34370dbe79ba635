"""Verbs that print what shoal knows: codes of errors, settings of recipes, names of presets."""
