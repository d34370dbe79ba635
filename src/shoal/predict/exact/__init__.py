"""Exact counts, to the byte: `verify` proves them."""
