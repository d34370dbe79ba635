"""Starting processes. A launcher decides nothing about the run; it hands every worker its place and watches over it."""
