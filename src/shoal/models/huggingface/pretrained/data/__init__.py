"""The data of pretrained models: batches of recipes and random ones, their checks, and trials on random tokens."""
