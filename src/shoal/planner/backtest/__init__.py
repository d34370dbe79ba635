"""Predictions compared with measured runs of papers and other systems."""
