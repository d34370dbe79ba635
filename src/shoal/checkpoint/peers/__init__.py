"""Checkpoints of several hosts that share no disk: each host has a store, and a copy of its neighbour's shards."""
