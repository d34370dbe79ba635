"""`dp_replicate` and `dp_shard`: DDP, FSDP2, bucketed gradient averaging, local SGD."""
