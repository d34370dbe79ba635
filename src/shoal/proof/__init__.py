"""Proof that a plan computes what one device computes."""
