"""Faults inside a rank, for tests and for `shoal chaos`. Nothing happens without a variable that switches it on."""
