"""Layers and losses that save less memory or launch fewer kernels than torch's."""
