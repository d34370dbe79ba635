"""`dp_replicate`, and `cp` where nothing is sharded: every rank holds the whole model and sees its own samples (or its
tokens of them); gradients are averaged once per step.

torch gives `DistributedDataParallel`. It averages over ranks and synchronises at every backward. The loss law wants a
sum over the *global* batch, and accumulation wants one synchronisation per step: `shoal.train.run` scales the loss of
each microbatch for the first, `synchronised` below does the second.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shoal.blueprint.traffic import BUCKET_BYTES
from shoal.comm.collectives import all_reduce_together
from shoal.comm.hidden import Hidden
from shoal.comm.mesh import Mesh
from shoal.errors import ShoalError


def replicate(
    module: nn.Module,
    peers: dist.ProcessGroup | None,
    *,
    device: torch.device,
    bucket_mb: float | None,
    find_unused: bool,
) -> nn.Module:
    """The module with its gradients averaged over its replicas; with one, or nothing to train, the module itself."""
    if peers is None or not any(parameter.requires_grad for parameter in module.parameters()):
        return module
    replicas = DistributedDataParallel(
        module,
        device_ids=[device] if device.type == "cuda" else None,
        process_group=peers,
        bucket_cap_mb=bucket_mb,
        find_unused_parameters=find_unused,
        gradient_as_bucket_view=True,  # no second copy of the gradients
        **_buffers_stay_local(),
    )
    if device.type == "cpu":  # a GPU works on after it was asked: a clock of the host would not see when
        times = Times(peers)
        replicas.register_comm_hook(times, _timed)
        setattr(replicas, "_times", times)  # noqa: B010  (an attribute of ours on a module of torch)
    return replicas


@dataclass
class Times:
    """When each bucket of a step was ready, and when it had arrived."""

    group: dist.ProcessGroup
    ready: list[float] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)
    bytes: int = 0

    def take(self) -> Hidden:
        """Of the step that has just ended; the next one begins with nothing."""
        times = list(zip(self.ready, self.arrived, strict=False))
        degree = self.group.size()
        found = Hidden.of(times, 2 * (degree - 1) * self.bytes // degree, ready=max(self.ready, default=0.0))
        self.ready, self.arrived, self.bytes = [], [], 0
        return found


def _timed(times: Times, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """What DDP does by itself, and the time."""
    flat = bucket.buffer()
    flat.div_(times.group.size())
    times.bytes += flat.nbytes
    times.ready.append(time.perf_counter())
    work = dist.all_reduce(flat, group=times.group, async_op=True)
    assert work is not None

    def arrived(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        times.arrived.append(time.perf_counter())
        return future.value()[0]

    mean: torch.futures.Future[Tensor] = work.get_future().then(arrived)
    return mean


# torch compares the types that a hook names, and would see strings.
_timed.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}


def hidden_of(module: nn.Module) -> Hidden | None:
    """How much of what DDP has sent in the last step the backward has hidden; None: not known."""
    times = getattr(module, "_times", None)
    return times.take() if isinstance(times, Times) else None


def _buffers_stay_local() -> dict[str, Any]:
    """No collective for buffers in every forward: `average_buffers` makes them equal when they are used.

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
            fix="find_unused=True (--run.find_unused true), or requires_grad_(False) for what is never used",
        ) from error


def average_buffers(module: nn.Module, mesh: Mesh) -> None:
    """Make the running statistics of batch norm the mean over the ranks, each of which saw other samples.

    Other buffers (masks, tables) are constants that every rank has made for itself, and stay as they are.
    """
    for axis in ("dp_replicate", "dp_shard"):
        if axis in mesh.groups:
            for name, buffer in module.named_buffers():
                if name.rpartition(".")[2] in ("running_mean", "running_var"):
                    buffer /= mesh.degree(axis)
                    dist.all_reduce(buffer, group=mesh.groups[axis])
