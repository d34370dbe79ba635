"""Checkpoints of Megatron-LM in the format `torch_dist`, read without running their pickles.

    latest_checkpointed_iteration.txt
    iter_0001000/
        .metadata            every tensor and its pieces, of torch.distributed.checkpoint
        __0_0.distcp ...     the pieces
        common.pt            arguments, iteration, numbers of the optimizer
        metadata.json        the format

Tensors are whole whatever parallelism has written them: pieces of tensor and pipeline parallelism have their place in
one tensor, and the layers lie one after the other in its first dim.
"""
