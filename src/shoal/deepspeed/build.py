"""From the translation of a config to a `Run`, an optimizer, a schedule and a loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from shoal.comm.world import World
from shoal.config.deepspeed.translation import OptimizerChoice, Translation
from shoal.deepspeed.schedules import SCHEDULES
from shoal.numerics.optim.lion import Lion
from shoal.parallel.policies import Settings
from shoal.train.run import Run

OF_RUN = {
    "optim.clip": "clip",
    "optim.loss_scale": "loss_scale",
    "optim.loss_scale_window": "loss_scale_window",
    "run.compile": "compile",
    "run.on_nan": "on_nan",
}
"""Settings of a translation → arguments of a `Run`; the rest of them is for recipes."""


def build_run(found: Translation, world: World, device: str) -> Run:
    """The run of a config. DeepSpeed drops the update of a step that is not finite, except in fp32, where it
    continues with NaN and shoal stops."""
    plan = {key: value for key, value in found.plan.items() if value is not None}
    is_low = plan.get("precision", "fp32") != "fp32"
    settings: Settings = {"on_nan": "skip" if is_low else "stop", "loss_mean": "microbatch"}
    for key, name in OF_RUN.items():
        if key in found.settings:
            settings[name] = found.settings[key]  # type: ignore[literal-required]
    return Run(plan, world=world, device=device, **settings)


def build_optimizer(choice: OptimizerChoice, parameters: Iterable[Any]) -> Optimizer:
    """The optimizer of a config, over parameters or groups of them."""
    groups = list(parameters)
    arguments = dict(choice.arguments)
    if "betas" in arguments:
        arguments["betas"] = tuple(arguments["betas"])
    kinds: dict[str, Callable[..., Optimizer]] = {"adamw": AdamW, "adam": Adam, "sgd": SGD, "lion": Lion}
    return kinds[choice.name](groups, **arguments)


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that have a gradient."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def build_schedule(found: Translation, optimizer: Optimizer) -> Any:
    """The schedule of a config; None: it has none."""
    if found.schedule is None:
        return None
    return SCHEDULES[found.schedule.name](optimizer, **found.schedule.arguments)


def build_loader(
    data: Dataset[Any],
    run: Run,
    *,
    micro: int,
    collate_fn: Callable[[list[Any]], Any] | None,
    drop_last: bool,
    sampler: Sampler[Any] | None = None,
    shuffle: bool = True,
) -> DataLoader[Any]:
    """The microbatches of this rank, shuffled as DeepSpeed does: by torch's DistributedSampler."""
    if sampler is None:
        sampler = DistributedSampler(data, num_replicas=run.degree, rank=run.coordinate, shuffle=shuffle)
    return DataLoader(data, batch_size=micro, sampler=sampler, collate_fn=collate_fn, drop_last=drop_last)


@torch.no_grad()
def broadcast_model(model: nn.Module, world: World) -> None:
    """Give every rank the weights and buffers of rank 0, as DeepSpeed does: a script need not seed its ranks."""
    if world.size == 1:
        return
    seen: set[int] = set()
    for tensor in [*model.parameters(), *model.buffers()]:
        if id(tensor) not in seen and not tensor.is_meta:
            seen.add(id(tensor))
            there = tensor.detach().cpu().contiguous()
            dist.broadcast(there, src=0, group=world.control_group)
            tensor.copy_(there)
