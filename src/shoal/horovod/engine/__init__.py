"""Collectives that are matched by name: negotiation over a small control plane, execution by torch.distributed."""
