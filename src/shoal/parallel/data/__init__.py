"""`dp_replicate` and `dp_shard`: DDP, FSDP2, gradient buckets of our own, local SGD."""
