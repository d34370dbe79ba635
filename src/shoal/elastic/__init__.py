"""Going on after a failure: what starts workers again, and what is kept for them in the meantime."""
