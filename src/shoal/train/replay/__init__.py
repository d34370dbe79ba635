"""Replay of steps on other ranks, to find one that computes wrong numbers."""
