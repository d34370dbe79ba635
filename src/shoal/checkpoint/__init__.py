"""Checkpoints: a directory of safetensors and one manifest, which says what is in it and what every byte has to be."""
