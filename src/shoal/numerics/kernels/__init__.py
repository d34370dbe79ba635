"""Triton kernels, imported only where they run."""
