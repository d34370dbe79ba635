"""Checkpoints: a directory of safetensors files and one manifest, which lists the tensors and the hash of every
byte."""
