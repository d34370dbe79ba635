"""Parquet files: rows of text, of token ids, or of conversations."""
