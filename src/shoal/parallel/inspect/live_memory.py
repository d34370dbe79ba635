"""Count the bytes that a rank holds in parameters, gradients and optimizer state, from its live tensors.

torch reports the bytes that its allocator has handed out, on CUDA alone and without their purpose. Here every storage
is counted once, by purpose: parameters as the modules have them now (a gathered one as well as the shard that it was
gathered from), gradients of either, and the optimizer's state. `predict.exact.state_memory` predicts the same three
numbers.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.numerics.local_tensor import to_local
from shoal.parallel.data.parameter_use import parameter_groups
from shoal.parallel.parallel_model import ParallelModel
from shoal.predict.exact.state_memory import Memory


def live_memory(composed: ParallelModel, optimizer: Optimizer) -> Memory:
    """Count the bytes of parameters, gradients and optimizer state on this rank now."""
    modules = [part.model for part in composed.parts]
    parameters = [
        *(parameter for module in modules for parameter in module.parameters()),
        *composed.named.values(),
        *(parameter for group in optimizer.param_groups for parameter in group["params"]),
    ]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    states = [
        value
        for parameter, state in optimizer.state.items()
        for kind, value in state.items()
        if isinstance(value, Tensor)
        and (value.dim() or (not parameter.dim() and kind != "step"))  # without the counter of each parameter
    ]
    return Memory(
        parameters=num_bytes(parameters),
        gradients=num_bytes([*gradients, *_gradients_in_flight(modules)]),
        optimizer=num_bytes(states),
    )


@torch.no_grad()
def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of some tensors, each storage once."""
    plain = [to_local(tensor) for tensor in tensors]
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in plain)}
    return sum(storages.values())


def _gradients_in_flight(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Yield gradients that FSDP2 keeps between microbatches outside of `.grad`.

    These are unsharded ones in the precision in which they will be reduced, and shards that are not yet summed over
    replicas. torch has no public access to either; a test fails if the private one changes.
    """
    for group in parameter_groups(modules):
        waiting = (parameter.unsharded_accumulated_grad for parameter in group.fsdp_params)
        yield from (gradient for gradient in waiting if gradient is not None)
        if group._partial_reduce_output is not None:
            yield group._partial_reduce_output


def peak_bytes(device: torch.device) -> int:
    """Return the *measured* peak of this process: by torch's allocator on CUDA, by the system on a CPU (all memory of
    the process, not only tensors)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
