"""Layers and losses that keep less memory or launch fewer kernels than torch's."""
