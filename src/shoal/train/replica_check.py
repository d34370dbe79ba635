"""Find a replica that has drifted: compare checksums of whatever several ranks hold copies of.

One flipped bit in the weights of one rank changes every later step, and the loss goes down all the same. Which ranks
hold a copy of a tensor depends on the plan and on the tensor: all of them under plain data parallelism, the same shard
of each replica under `dp_replicate=2 zero=3`, the tp ranks for a norm but not for a split product.

    1. every rank computes a checksum of each of its tensors
    2. tensors with copies along the same axes are folded into one number; these numbers, 32 at most, are gathered
    3. only if they differ, all checksums are gathered, and the tensors and ranks are named
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.blueprint.layout import AXES, Layout
from shoal.checkpoint.state.model_state import Holder
from shoal.comm.collectives import all_gather
from shoal.errors import RunFailed
from shoal.numerics.checksum import checksums, fold, signed
from shoal.numerics.local_tensor import to_local
from shoal.parallel.batch_norm import statistics_of
from shoal.parallel.expert.router import biases
from shoal.train.run_checkpoint import holder_of
from shoal.train.run_state import RunState

SHOWN = 3
"""Tensors that a message names."""
Axes = tuple[str, ...]


class ReplicatedTensor(NamedTuple):
    """A tensor of this rank that other ranks hold a copy of."""

    name: str
    axes: Axes
    """The ranks along these axes hold the same."""
    value: Tensor


@dataclass
class ReplicaCheck:
    """Compare checksums of all copies every n steps."""

    every: int
    """Steps between two comparisons; 0: never."""

    def after(self, run: RunState, step: int) -> None:
        """Compare if it is time to. Every rank calls it after each step."""
        if self.every and step % self.every == 0:
            self.compare(run, step)

    def compare(self, run: RunState, step: int) -> None:
        """Raise on every rank if copies differ, and name tensors and ranks."""
        layout = run.plan.layout
        if layout.world_size == 1:
            return
        copies = list(copies_of(run))
        sums = dict(zip([(one.axes, one.name) for one in copies], checksums([c.value for c in copies]), strict=True))
        own = torch.tensor([signed(number) for number in _folded(sums)])
        every = all_gather(own[None], 0, run.world.control_group).tolist()
        if not any(_odd_groups(layout, axes, [row[_slot(axes)] for row in every]) for axes in _all_axes()):
            run.replicas_agreed_at = step
            return
        found = list(_differences(layout, run.world.all_gather_object(sums)))
        raise RunFailed(_message(found, step, run.replicas_agreed_at), fix=_fix(run.replicas_agreed_at), code="T033")


def copies_of(run: RunState) -> Iterator[ReplicatedTensor]:
    """The tensors of this rank that should be the same, bit for bit, on other ranks: parameters, optimizer states,
    running statistics of batch norm and biases of routers. Local SGD replicas share their shared weights alone."""
    composed, holder, local_sgd = run.composed, holder_of(run), run.composed.local_sgd
    degrees = {axis: composed.mesh.degree(axis) for axis in AXES}
    inside = [axis for axis in AXES if degrees[axis] > 1 and (local_sgd is None or axis != "dp_replicate")]
    for name, parameter in composed.named.items():
        axes = tuple(axis for axis in inside if composed.is_replicated(name, axis))
        if axes:
            yield ReplicatedTensor(name, axes, to_local(parameter))
            yield from (ReplicatedTensor(label, axes, state) for label, state in _states(holder, name))
        if local_sgd is not None and run.steps_done > local_sgd.warmup_steps and name in local_sgd.shared:
            between = ("dp_replicate", *axes)
            yield ReplicatedTensor(f"the shared {name}", between, local_sgd.shared[name])
            yield ReplicatedTensor(f"the outer momentum of {name}", between, local_sgd.momentum[name])
    axes = tuple(axis for axis in inside if axis != "pp")
    for part in composed.parts if axes else ():
        for name, buffer in {**statistics_of(part.model), **biases(part.model)}.items():
            yield ReplicatedTensor(name, axes, to_local(buffer))


def _states(holder: Holder, name: str) -> Iterator[tuple[str, Tensor]]:
    states = holder.states_of(holder.composed.named[name])
    for kind, state in states.items():
        if isinstance(state, Tensor):
            yield f"{kind} of {name}", to_local(state)


# ---- comparison ------------------------------------------------------------------------------------------------------


def _all_axes() -> list[Axes]:
    """Every set of axes, each at its slot."""
    return [tuple(axis for bit, axis in enumerate(AXES) if slot >> bit & 1) for slot in range(2 ** len(AXES))]


def _slot(axes: Axes) -> int:
    return sum(1 << AXES.index(axis) for axis in axes)


def _folded(sums: Mapping[tuple[Axes, str], int]) -> list[int]:
    """One number for the tensors of each set of axes, in the order of the model."""
    slots = [0] * 2 ** len(AXES)
    for (axes, _), number in sums.items():
        slots[_slot(axes)] = fold([slots[_slot(axes)], number])
    return slots


def _groups(layout: Layout, axes: Axes) -> list[list[int]]:
    """The ranks that differ in their places on these axes alone."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        place = layout.coordinate(rank)
        found.setdefault(tuple(place[axis] for axis in AXES if axis not in axes), []).append(rank)
    return list(found.values())


def _odd_groups(layout: Layout, axes: Axes, numbers: Sequence[int | None]) -> list[list[int]]:
    """Groups of ranks along these axes whose numbers are not the same."""
    return [group for group in _groups(layout, axes) if len({numbers[rank] for rank in group}) > 1]


def _differences(
    layout: Layout, every: Sequence[Mapping[tuple[Axes, str], int]]
) -> Iterator[tuple[str, list[int], list[int]]]:
    """Each tensor whose copies differ: its name, the ranks that differ, and the ranks that they differ from."""
    for axes, name in dict.fromkeys(key for sums in every for key in sums):
        numbers = [sums.get((axes, name)) for sums in every]
        for group in _odd_groups(layout, axes, numbers):
            yield name, *_minority(group, numbers)


def _minority(group: list[int], numbers: Sequence[int | None]) -> tuple[list[int], list[int]]:
    """The ranks that differ from most of their group, and those most; no majority: all ranks, and none.

    >>> _minority([0, 1, 2], [7, 7, 9]), _minority([0, 1], [7, 9])
    (([2], [0, 1]), ([0, 1], []))
    """
    (most, count), *_ = Counter(numbers[rank] for rank in group).most_common(1)
    if count * 2 <= len(group):
        return group, []
    return [rank for rank in group if numbers[rank] != most], [rank for rank in group if numbers[rank] == most]


def _message(found: Sequence[tuple[str, list[int], list[int]]], step: int, agreed_at: int | None) -> str:
    shown = []
    for name, odd, others in found[:SHOWN]:
        shown.append(f"{name}: {_ranks(odd)} {f'differs from {_ranks(others)}' if others else 'differ'}")
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    before = f"They were the same after step {agreed_at}" if agreed_at is not None else "They were not compared before"
    return f"after step {step}, copies of tensors are not the same on all ranks: {'; '.join(shown)}{more}. {before}"


def _fix(agreed_at: int | None) -> str:
    step = "an earlier step" if agreed_at is None else f"step {agreed_at} or before"
    return (
        f"resume from a checkpoint of {step}: run.load(directory, step=STEP), or shoal train --resume STEP; if the same"
        " rank differs again, replace its machine"
    )


def _ranks(ranks: list[int]) -> str:
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"
