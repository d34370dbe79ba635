"""The optimizer of a run: which ones a plan allows, and which parameters it updates how."""
