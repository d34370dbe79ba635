"""Optimizer states outside of the device: in host memory, or in files."""
