"""`initialize`, with the arguments of `deepspeed.initialize`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from shoal.comm.rendezvous.launcher_environment import Placement, read_environment
from shoal.comm.world import ALONE, World
from shoal.config.deepspeed.read import read_config
from shoal.config.deepspeed.translate import translate
from shoal.config.deepspeed.translation import Translation
from shoal.deepspeed import build
from shoal.deepspeed.engine import Engine
from shoal.deepspeed.rounded_gradients import RoundedGradients
from shoal.errors import Findings, Problem, ShoalError
from shoal.safe_parsing import short

_said: set[str] = set()
_worlds: list[World] = []
"""The ranks that `init_distributed` has gathered, for `initialize`."""


TIMEOUT = timedelta(minutes=10)
"""How long a collective may wait, if neither a script nor DEEPSPEED_TIMEOUT (minutes) says it; as in DeepSpeed."""


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    **others: Any,
) -> None:
    """Join the other ranks, as `deepspeed.init_distributed` does. `initialize` calls it.

    timeout            how long a collective may wait; the first call decides
    rank, world_size   must be those of the launcher, or of a process group that the script has made

    The other arguments (`dist_init_required` and `config`, too) have no effect: the device decides on the backend, and
    the launcher on the address.
    """
    known = ("dist_init_required", "config", "rank", "world_size")
    if unknown := [name for name in others if name not in known]:
        raise TypeError(f"init_distributed() got an unexpected keyword argument {unknown[0]!r}")
    _check_timeout(timeout)
    _check_ranks(others.get("rank", -1), others.get("world_size", -1), init_method)
    _world("auto", timeout)


def _check_timeout(timeout: Any) -> None:
    if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta()):
        what = f"timeout must be a positive timedelta, got {timeout!r:.80}"
        raise ShoalError(what, fix="timeout=datetime.timedelta(minutes=30)", code="E013")


def _check_ranks(rank: int, size: int, init_method: str | None) -> None:
    """Reject a place that is another than the launcher's: without one, each process would train alone."""
    own = (dist.get_rank() if dist.is_initialized() else _placement().rank), _num_ranks()
    asked = (own[0] if rank < 0 else rank), (own[1] if size < 1 else size)
    is_alone = init_method not in (None, "env://") and size < 1 and own[1] == 1
    if asked == own and not is_alone:
        return
    place = f"rank {own[0]} of {own[1]}"
    given = f"init_method={init_method!r}" if asked == own else f"rank {asked[0]} of {asked[1]}"
    raise ShoalError(
        f"init_distributed was given {given}, and this process is {place}",
        fix="torchrun script.py, without these arguments; or torch.distributed.init_process_group(...) before it",
        code="E013",
    )


def _placement() -> Placement:
    return read_environment(os.environ) or ALONE


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config` to a parser, as DeepSpeed does. `--local_rank` is the script's own."""
    group = parser.add_argument_group("DeepSpeed", "as deepspeed.add_config_arguments")
    group.add_argument("--deepspeed", default=False, action="store_true")
    group.add_argument("--deepspeed_config", default=None, type=str)
    return parser


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[..., Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    config: str | Path | Mapping[str, Any] | None = None,
    **others: Any,
) -> tuple[Engine, Optimizer | None, Any, Any]:
    """Return an engine, its optimizer, a loader of `training_data` and a schedule, as `deepspeed.initialize` does.

    model             the model, not wrapped
    optimizer         an optimizer of torch, or a function of the parameters that returns one; None: the config's
    model_parameters  parameters, or groups of them, for the config's optimizer; None: all that need a gradient
    training_data     a dataset, of which the loader gives this rank its microbatches
    lr_scheduler      a scheduler of torch, or a function of the optimizer that returns one; None: the config's
    config            a file or a mapping; None: `args.deepspeed_config`
    others            `collate_fn`, `config_params`, and `device` (auto, cpu or cuda)
    """
    source = (
        config if config is not None else others.pop("config_params", None) or getattr(args, "deepspeed_config", None)
    )
    _check(model, source, others)
    assert isinstance(model, nn.Module)
    assert source is not None
    found = _translated(source, _num_ranks())  # before ranks wait for each other
    _reject_lone_schedule(found, optimizer, lr_scheduler)
    world = _world(others.get("device", "auto"))
    if world.is_main:
        _say_without_effect(found)
    run = build.build_run(found, world, others.get("device", "auto"))
    build.broadcast_model(model, world)
    made = _optimizer(found, model, optimizer, model_parameters)
    rates = [] if made is None else [float(group["lr"]) for group in made.param_groups]
    schedule = _schedule(found, made, lr_scheduler)
    run.prepare(*(thing for thing in (model, made, schedule) if thing is not None))
    rounding = RoundedGradients(run, made, rates) if found.rounds_gradients and made is not None else None
    engine = Engine(run, found, made, schedule, rounding=rounding, config=read_config(source))
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data, collate_fn=others.get("collate_fn"))
    return engine, made, engine.training_dataloader, schedule


def _translated(source: Any, num_ranks: int) -> Translation:
    """The config in words of shoal; raises all of its problems."""
    found = translate(source, target="initialize", num_ranks=num_ranks)
    problems = Findings()
    problems += found.problems
    problems += (_open(line.key) for line in found.lines if line.value == "auto")
    problems.raise_all(title="the config of DeepSpeed")
    return found


def _say_without_effect(found: Translation) -> None:
    """Name the keys that change nothing here, each once in this process."""
    for line in found.lines:
        text = f"shoal.deepspeed: {line.key} {short(line.value, 60)}: {line.remark}"
        if line.remark.startswith("no effect here") and text not in _said:
            _said.add(text)
            print(text, file=sys.stderr, flush=True)


def _open(key: str) -> Problem:
    what = f"{key} is 'auto', which the Trainer of transformers fills in, and a script has none"
    return Problem("E014", what, f'a value in place of "auto" for "{key.rpartition(".")[2]}"; or remove the key')


def _check(model: Any, source: Any, others: Mapping[str, Any]) -> None:
    """Reject arguments that the engine cannot take."""
    found = Findings()
    found += _problems(model, source, others)
    found.raise_all(title="the arguments of initialize")


def _problems(model: Any, source: Any, others: Mapping[str, Any]) -> Iterator[Problem]:
    if not isinstance(model, nn.Module):
        yield Problem("E013", f"initialize needs a model, got {type(model).__name__}", "initialize(model=model, ...)")
    elif type(model).__name__ == "PipelineModule":
        fix = "shoal.Run('pp=2 mb=1') with run.step(batch), and the model as an nn.Module"
        yield Problem("E013", "a PipelineModule of DeepSpeed is cut already, and shoal cuts the model itself", fix)
    if source is None:
        yield Problem("E013", "initialize needs a config, got None", 'initialize(config="ds_config.json", ...)')
    known = ("collate_fn", "config_params", "device", "dist_init_required", "distributed_port")
    for name, value in others.items():
        if name not in known and value is not None:
            fix = f"leave {name} out; tensor_parallel and sequence_parallel_size of the config say the degrees"
            yield Problem("E013", f"initialize has no argument {name}", fix)


def _optimizer(found: Translation, model: nn.Module, given: Any, parameters: Iterable[Any] | None) -> Optimizer | None:
    """The optimizer that is given, or the config's; None: there is none, and the engine only computes."""
    groups = build.trained(model) if parameters is None else list(parameters)
    if given is not None:
        return given if isinstance(given, Optimizer) else given(groups)
    return None if found.optimizer is None else build.build_optimizer(found.optimizer, groups)


def _reject_lone_schedule(found: Translation, optimizer: Any, schedule: Any) -> None:
    """A schedule without an optimizer."""
    has_schedule = schedule is not None or found.schedule is not None
    if has_schedule and optimizer is None and found.optimizer is None:
        raise ShoalError(
            "a schedule needs an optimizer, and neither the config nor the script has one",
            fix='"optimizer": {"type": "AdamW", "params": {"lr": 3e-4}} in the config',
            code="E013",
        )


def _schedule(found: Translation, optimizer: Optimizer | None, given: Any) -> Any:
    """The schedule that is given, or the config's; None: there is none."""
    if optimizer is None:
        return None
    if given is None:
        return build.build_schedule(found, optimizer)
    is_schedule = hasattr(given, "step") and hasattr(given, "state_dict")
    return given if is_schedule else given(optimizer)


def _num_ranks() -> int:
    """The number of ranks, also before they are gathered."""
    return dist.get_world_size() if dist.is_initialized() else _placement().world_size


def _seconds(timeout: timedelta | None) -> float:
    """How long a collective may wait. DEEPSPEED_TIMEOUT is in minutes, and no number in it has no effect."""
    minutes = os.environ.get("DEEPSPEED_TIMEOUT", "")
    usual = timedelta(minutes=int(minutes)) if minutes.isdecimal() and 0 < int(minutes) < 10**6 else TIMEOUT
    return (usual if timeout is None else timeout).total_seconds()


def _world(device: str, timeout: timedelta | None = None) -> World:
    """The ranks, gathered once in this process."""
    if _worlds and not dist.is_initialized():  # `engine.destroy()` has left them
        _worlds.clear()
    if not _worlds:
        _worlds.append(World.start(read_environment(os.environ), device=device, timeout=_seconds(timeout)))
    return _worlds[0]
