"""Hugging Face datasets: a whole table in memory, or a stream of rows whose tokens are stored."""
