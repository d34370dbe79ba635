"""Estimates: step time, peak memory, synchronisation of replicas."""
