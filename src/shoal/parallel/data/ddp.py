"""`dp_replicate`, and `cp` where nothing is sharded: every rank has the full model and its own samples (or its tokens
of them); gradients are averaged once per step.

torch gives `DistributedDataParallel`. It averages over ranks and synchronises at every backward. The loss is a sum
over the *global* batch, and accumulation needs one synchronisation per step: `shoal.train.loss.global_loss` scales
the loss of each microbatch for the first, `DDPSync` below does the second.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shoal.comm.collectives import all_reduce_together
from shoal.comm.profile.external_wait import note_wait
from shoal.comm.profile.timer import current
from shoal.comm.replicas.overlap import Overlap
from shoal.errors import ShoalError
from shoal.numerics.local_tensor import to_local
from shoal.parallel.data.gradient_sync import NOTHING, GradientSync
from shoal.predict.exact.data_traffic import BUCKET_BYTES

MOST_NAMED = 4
"""Parameters that a message lists."""


def replicate(
    module: nn.Module,
    peers: dist.ProcessGroup | None,
    *,
    device: torch.device,
    bucket_mb: float | None,
    find_unused_parameters: bool,
) -> tuple[nn.Module, GradientSync]:
    """The module with its gradients averaged over its replicas; with one, or nothing to train, the module itself."""
    if peers is None or not any(parameter.requires_grad for parameter in module.parameters()):
        return module, GradientSync()
    replicated = DistributedDataParallel(
        module,
        device_ids=[device] if device.type == "cuda" else None,
        process_group=peers,
        bucket_cap_mb=bucket_mb,
        find_unused_parameters=find_unused_parameters,
        gradient_as_bucket_view=True,  # no second copy of the gradients
        **_buffers_stay_local(),
    )
    if peers.size() > 2 and not find_unused_parameters:
        fix_buckets(replicated)
    return replicated, DDPSync(replicated)


def fix_buckets(replicated: DistributedDataParallel) -> None:
    """Let DDP decide its buckets now, by a backward without a model: they have the parameters in reverse order.

    DDP has one bucket in the first step of a process, and cuts buckets by the order of that step's gradients for all
    others. A ring adds three or more ranks in an order that depends on the place in a bucket. So the first step after
    a restart would differ in its last bits from the same step of an undisturbed run. Two ranks have one order.
    """
    module, parameters = replicated.module, [each for each in replicated.module.parameters() if each.requires_grad]
    replicated.module = _Zero(parameters)
    try:
        with torch.enable_grad():
            zero = torch.zeros((), device=parameters[0].device)  # DDP on a GPU needs an argument
            replicated(zero).backward()
            replicated(zero)  # the buckets are made in a forward
    finally:
        replicated.module = module
        for each in parameters:
            each.grad = None


class _Zero(nn.Module):
    """Nothing, as a function of all parameters; the gradient of the last one comes first."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self.used = parameters

    def forward(self, total: Tensor) -> Tensor:
        """Return 0."""
        for each in self.used:
            total = total + 0.0 * each.sum().float()
        return total


TIMED_EVERY = 10
"""Steps. Timing each step took 2 % of a step of 30 ms, and a hook in Python, which takes the GIL from the backward, 4 %
(measured, Intel Xeon, two ranks)."""
_NEVER = 2**31 - 1


@dataclass
class DDPSync(GradientSync):
    """torch's DDP averages gradients over replicas, once a step."""

    module: DistributedDataParallel

    def microbatch(self, is_last: bool) -> AbstractContextManager[None]:
        """Gradients are averaged only in the backward of the step's last microbatch."""
        return NOTHING if is_last else self.module.no_sync()

    def measured_overlap(self, step: int) -> Overlap | None:
        """The gradients that DDP sent in this step. Call it after every step: it also switches the timers of torch's
        reducer for the next one."""
        module = self.module
        if module.device_type != "cpu":
            return None  # the timers of a GPU would have to be waited for
        is_profiled = current.timer is not None and not current.timer.is_sample
        numbers = (
            _timers(module) if is_profiled or _is_timed(step) else None
        )  # before the rate: torch asks it here, too
        module._set_ddp_runtime_logging_sample_rate(
            1 if is_profiled or _is_timed(step + 1) else _NEVER
        )  # but for the first ten
        if numbers is None:
            return None
        if is_profiled:
            _note_wait(module, numbers)
        seconds = numbers.get("backward_comm_time", 0) * 1e-9
        degree = module.process_group.size()
        sent = 2 * (degree - 1) * numbers["total_parameter_size_bytes"] // degree
        exposed = seconds - numbers.get("backward_compute_comm_overlap_time", 0) * 1e-9
        return Overlap(seconds, exposed, sent, numbers.get("num_buckets_reduced", 0))


def _is_timed(step: int) -> bool:
    """Whether to time a step: the first and every tenth (1, 10, 20, ... as metrics count them)."""
    return step == 0 or (step + 1) % TIMED_EVERY == 0


def _note_wait(module: DistributedDataParallel, numbers: Mapping[str, int]) -> None:
    """Show a profile how long the backward has waited for gradients after the last one was computed."""
    begin, end = numbers.get("backward_compute_time_end", 0), numbers.get("backward_comm_time_end", 0)
    note_wait(module.process_group, begin, end, inside="backward")


def _timers(module: DistributedDataParallel) -> dict[str, int]:
    assert module.logger is not None
    module.logger.set_runtime_stats_and_log()  # reads the timers now; DDP itself does so in the next forward
    numbers: dict[str, int] = module.logger._get_ddp_logging_data().ints_map
    return numbers


def _buffers_stay_local() -> dict[str, Any]:
    """Disable DDP's collective for buffers in every forward: `batch_norm.RunningStatistics` makes them equal.

    torch 2.13 renamed the argument, and 2.11 does not have the new name.
    """
    words = inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in words else "broadcast_buffers": False}


@dataclass
class StageSync(GradientSync):
    """Gradients of a pipeline's stages, whose backwards DDP cannot follow, are averaged over replicas after them."""

    named: Mapping[str, nn.Parameter]
    group: dist.ProcessGroup

    @torch.no_grad()
    def finish_gradients(self, step: int) -> None:
        """Average all of them; every replica brings as many, used or not."""
        for parameter in self.named.values():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        average_gradients([to_local(p.grad) for p in self.named.values() if p.grad is not None], self.group)


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


def explain_unused(error: RuntimeError, model: nn.Module) -> None:
    """Replace torch's message about unused parameters, which has numbers of parameters, and names an argument that a
    user of shoal cannot reach."""
    if "find_unused_parameters" in str(error):
        which = _unused(str(error), model)
        raise ShoalError(
            f"every parameter must take part in the loss of a step, got {which} without a gradient in the last step",
            fix="--run.find_unused_parameters true, or requires_grad_(False) for what is never used",
            code="T034",
        ) from error


def _unused(message: str, model: nn.Module) -> str:
    """The names of the parameters whose numbers are in a message of torch."""
    module = model.module if isinstance(model, DistributedDataParallel) else model
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", message)
    unused = [names[number] for number in map(int, found[1].split()) if number < len(names)] if found else []
    more = f" and {len(unused) - MOST_NAMED} more" if len(unused) > MOST_NAMED else ""
    return f"{', '.join(unused[:MOST_NAMED])}{more}" if unused else "some"
