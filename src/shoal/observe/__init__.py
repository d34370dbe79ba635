"""Looking at a run: its directory, its metrics, the line on the terminal. Nothing here changes what is computed."""
