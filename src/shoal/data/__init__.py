"""Training data: its sources, the order of its samples, and the loading of batches.

A source opens to a `Dataset` (sources/open.py), the order is a pure function (order.py), and a `Loader` gives each rank
its share of every step (loader.py). Nothing is imported here, so that `shoal.data.order` stays free of torch.
"""
