"""Checkpoints of DeepSpeed: ZeRO 1 to 3 and universal ones, read without running their pickles; written for it to
load."""
