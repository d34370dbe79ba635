"""Conversations and instructions: rows of JSONL, their tokens, and samples that are packed or padded."""
