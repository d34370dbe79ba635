"""Measure this machine for the planner, and compare collectives and compression methods."""
