"""Profile the steps of a run."""
