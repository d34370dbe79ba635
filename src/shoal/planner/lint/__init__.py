"""Rules that point out what is odd about a plan."""
