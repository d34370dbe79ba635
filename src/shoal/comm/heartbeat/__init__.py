"""Heartbeats: what each rank does now, in shared memory that its supervisor reads."""
