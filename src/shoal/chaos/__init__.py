"""Disturb a real run with a seeded schedule of faults, and compare it with an undisturbed one."""
