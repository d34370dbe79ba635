"""The models of recipes as cases of a verification, and random batches for them."""
