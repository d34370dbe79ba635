"""Find the blocks of a model that does not describe itself, for a pipeline: by one run without memory.

Blocks are the modules that `block_structure` finds and that have parameters, in the order in which the forward calls
them first. Each costs the FLOPs that were counted in it. A pipeline is cut between any two of them (`stage_io`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from shoal.blueprint.description import Description
from shoal.blueprint.placement import is_inside
from shoal.errors import ShoalError
from shoal.parallel.pipeline.calls import Forward, trace_calls
from shoal.parallel.pipeline.skeleton import Call, skeleton_of
from shoal.parallel.pipeline.stage_io import traced
from shoal.train.build_model import adapter_of
from shoal.train.loss.objective import uncallable
from shoal.train.trace.block_structure import found_blocks


def trace_blocks(model: nn.Module, *arguments: Any, **options: Any) -> Description:
    """Describe the blocks of a model for `pp`, from one call of it without memory. The model stays as it is.

    `arguments` and `options` are those of its forward, for two samples or more. Where it cannot be cut, the description
    says why.

        description = shoal.trace_blocks(model, images)
        model.describe = lambda: description
    """
    names = [name for name, module in found_blocks(model).items() if next(module.parameters(), None) is not None]
    skeleton, call = skeleton_of(model), (arguments, options)
    with FlopCounterMode(display=False) as counter:
        forward = trace_calls(skeleton, Description(blocks=tuple(names)), call)
    flops = counter.get_flop_counts()
    description = _in_order(model, forward, names)
    costs = {name: float(sum(flops.get(f"{type(model).__name__}.{name}", {}).values())) for name in names}
    why = _why_not(skeleton, description, call)
    return Description(why_not={"pp": f"{type(model).__name__}: {why}"}) if why else _with_costs(description, costs)


def _in_order(model: nn.Module, forward: Forward, names: list[str]) -> Description:
    """The modules that run, in their order. Others hold parameters, too: they are on the last stage."""
    run = [name for name in dict.fromkeys(call.module for call in forward.calls) if name in names]
    unrun = tuple(name for name in names if name not in run)
    tied = _tied(model, run)
    before, after = (run[:1], run[-1:]) if tied and len(run) > 2 else ([], [])
    blocks = run[1:-1] if before else run
    return Description(
        before_blocks=tuple(before),
        blocks=tuple(blocks),
        after_blocks=(*after, *unrun),
        tied=tuple(tied if before else ()),
    )


def _tied(model: nn.Module, run: list[str]) -> list[tuple[str, str]]:
    """Parameters that the first module shares with the last, as an embedding with the head."""
    first: dict[int, str] = {}
    pairs = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if is_inside(known, run[:1]) and is_inside(name, run[-1:]) and known != name:
            pairs.append((known, name))
    return pairs


def _with_costs(description: Description, costs: dict[str, float]) -> Description:
    return Description(
        before_blocks=description.before_blocks,
        blocks=description.blocks,
        after_blocks=description.after_blocks,
        tied=description.tied,
        costs=costs if any(costs.values()) else {},
    )


def _why_not(skeleton: nn.Module, description: Description, call: Call) -> str | None:
    """Why stages would not compute the same."""
    parts = (*description.before_blocks, *description.blocks, *description.after_blocks)
    outside = next((name for name, _ in skeleton.named_parameters() if not is_inside(name, parts)), None)
    if outside is not None:
        return f"{outside} is a parameter of no module that a stage could have"
    try:
        traced(skeleton, description, call)
    except ShoalError as error:
        return error.problems[0].what
    return None


# ---- where it is needed ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Described:
    """The method `describe` of a model that has none."""

    description: Description

    def __call__(self) -> Description:
        """Return the description."""
        return self.description


def _traced_or_why_not(model: nn.Module, call: Call) -> Description:
    try:
        return trace_blocks(model, *call[0], **call[1])
    except ShoalError:
        raise
    except Exception as error:  # the user's code, which may need values
        first_line = next(iter(str(error).splitlines()), "")
        why = f"{type(model).__name__} cannot be run without memory ({type(error).__name__}: {first_line})"
        return Description(why_not={"pp": why})


def attach_blocks(model: nn.Module, pp: int | None, call: Callable[[], Call | None]) -> None:
    """Give a model that does not describe itself a description of its blocks, if a pipeline is to cut it.

    `call` returns the arguments of its forward; None: they are not known, and only an `nn.Sequential` has an order.
    """
    is_needed = (pp or 1) > 1 and not callable(getattr(model, "describe", None)) and adapter_of(model) is None
    if not is_needed or next(model.parameters(), None) is None:
        return
    known = call()
    if known is not None and any(uncallable(model, known)):
        return  # reported where the model and the data are compared
    if known is not None:
        model.describe = Described(_traced_or_why_not(model, known))  # type: ignore[assignment]
    elif type(model) is nn.Sequential:
        names = [n for n, module in found_blocks(model).items() if next(module.parameters(), None) is not None]
        model.describe = Described(Description(blocks=tuple(names)))  # type: ignore[assignment]
