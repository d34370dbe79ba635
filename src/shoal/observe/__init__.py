"""The outputs of a run: its directory, its metrics, its progress line. Nothing here changes its numbers."""
