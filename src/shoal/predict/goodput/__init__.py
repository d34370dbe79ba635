"""How much of its time a cluster trains, although machines fail."""
