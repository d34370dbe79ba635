"""Triton kernels. Imported only where they run."""
