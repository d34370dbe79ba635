"""`dp_replicate`, and `cp` where nothing is sharded: every rank holds the whole model and sees its own samples (or its
tokens of them); gradients are averaged once per step.

torch gives `DistributedDataParallel`. It averages over ranks and synchronises at every backward. The loss law wants a
sum over the *global* batch, and accumulation wants one synchronisation per step: `shoal.train.run` scales the loss of
each microbatch for the first, `synchronised` below does the second.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shoal.comm.collectives import all_reduce_together
from shoal.comm.replicas.overlap import Overlap
from shoal.errors import ShoalError
from shoal.predict.exact.traffic import BUCKET_BYTES


def replicate(
    module: nn.Module,
    peers: dist.ProcessGroup | None,
    *,
    device: torch.device,
    bucket_mb: float | None,
    find_unused_parameters: bool,
) -> nn.Module:
    """The module with its gradients averaged over its replicas; with one, or nothing to train, the module itself."""
    if peers is None or not any(parameter.requires_grad for parameter in module.parameters()):
        return module
    return DistributedDataParallel(
        module,
        device_ids=[device] if device.type == "cuda" else None,
        process_group=peers,
        bucket_cap_mb=bucket_mb,
        find_unused_parameters=find_unused_parameters,
        gradient_as_bucket_view=True,  # no second copy of the gradients
        **_buffers_stay_local(),
    )


TIMED_EVERY = 10
"""Steps. To take the times of each of them took 2 % of a step of 30 ms, and a hook in Python, which takes the
interpreter's lock from the backward, 4 % (measured, Intel Xeon, two ranks)."""
_NEVER = 2**31 - 1


def overlap_of(module: nn.Module, step: int) -> Overlap | None:
    """The gradients that DDP sent in this step, counted from 0: how long, and how much the backward hid. None: not
    measured. Call it after every step: it also switches the timers of torch's reducer for the next one."""
    if not isinstance(module, DistributedDataParallel) or module.device_type != "cpu":
        return None  # the timers of a GPU would have to be waited for
    numbers = _timers(module) if _is_timed(step) else None  # before the rate changes: torch asks it here, too
    module._set_ddp_runtime_logging_sample_rate(1 if _is_timed(step + 1) else _NEVER)  # the first ten it times anyway
    if numbers is None:
        return None
    seconds = numbers.get("backward_comm_time", 0) * 1e-9
    degree = module.process_group.size()
    sent = 2 * (degree - 1) * numbers["total_parameter_size_bytes"] // degree
    return Overlap(seconds, seconds - numbers.get("backward_compute_comm_overlap_time", 0) * 1e-9, sent)


def _is_timed(step: int) -> bool:
    """The first step, and every tenth: 1, 10, 20, ... as metrics count them."""
    return step == 0 or (step + 1) % TIMED_EVERY == 0


def _timers(module: DistributedDataParallel) -> dict[str, int]:
    assert module.logger is not None
    module.logger.set_runtime_stats_and_log()  # reads the timers now; DDP itself does so in the next forward
    numbers: dict[str, int] = module.logger._get_ddp_logging_data().ints_map
    return numbers


def _buffers_stay_local() -> dict[str, Any]:
    """No collective for buffers in every forward: `batch_norm.RunningStatistics` makes them equal.

    torch 2.13 has a new word for it, and the same word does not exist in 2.11.
    """
    words = inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in words else "broadcast_buffers": False}


@contextmanager
def synchronised(module: nn.Module, is_last: bool) -> Iterator[None]:
    """Forward and backward inside synchronise gradients only if this microbatch is the step's last."""
    if is_last or not isinstance(module, DistributedDataParallel):
        yield
    else:
        with module.no_sync():
            yield


@torch.no_grad()
def average_gradients(gradients: list[Tensor], group: dist.ProcessGroup) -> None:
    """Average gradients over replicas, in place, in buckets: for a pipeline, whose backwards DDP cannot follow."""
    bucket: list[Tensor] = []
    for place, gradient in enumerate(gradients):
        bucket.append(gradient)
        is_full = sum(one.nbytes for one in bucket) >= BUCKET_BYTES
        if is_full or place == len(gradients) - 1 or gradients[place + 1].dtype != gradient.dtype:
            all_reduce_together(bucket, group)
            torch._foreach_div_(bucket, group.size())
            bucket = []


def explain_unused(error: RuntimeError) -> None:
    """torch's words about parameters without a gradient name an argument that a user of shoal cannot reach."""
    if "find_unused_parameters" in str(error):
        raise ShoalError(
            "some parameters had no part in the loss of the last step, and the ranks wait for their gradients",
            fix="find_unused_parameters=True (--run.find_unused_parameters true),"
            " or requires_grad_(False) for what is never used",
        ) from error
