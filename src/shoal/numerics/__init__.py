"""Rules that make every layout start and step alike."""
