"""`cp`: the tokens of every sample divided over ranks."""
