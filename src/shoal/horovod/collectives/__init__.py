"""The collectives: each waits or returns a handle, on one tensor or on a list, and the waiting ones have gradients."""
