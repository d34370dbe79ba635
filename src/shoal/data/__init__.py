"""Samples: where they come from, in which order they are seen, and how they reach a rank in time.

A source opens to a `Dataset` (open.py), the order says which sample stands where (order.py), and a `Loader` brings each
rank its share of every step (loading.py). Nothing is imported here, so that `shoal.data.order` stays free of torch.
"""
