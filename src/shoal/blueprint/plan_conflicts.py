"""Combinations that no plan can have, whatever the model is, and degrees that do not fill the world."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Protocol

from shoal.blueprint.layout import Layout, divisors
from shoal.blueprint.plan_parser import DEGREES
from shoal.blueprint.replicas.sync_words import AUTO
from shoal.errors import Problem, ShoalError, listed

VIRTUAL_STAGES: Mapping[str, int] = {"gpipe": 1, "1f1b": 1, "zbv": 2, "dualpipev": 2}
"""The only `v` that a schedule can have; the others take any."""


class PlanFields(Protocol):
    """The fields of a plan that are checked here. A `Plan` has them and the degrees."""

    @property
    def context(self) -> str | None:
        """`Plan.context`."""

    @property
    def zero(self) -> int | None:
        """`Plan.zero`."""

    @property
    def schedule(self) -> str | None:
        """`Plan.schedule`."""

    @property
    def v(self) -> int | None:
        """`Plan.v`."""

    @property
    def sp(self) -> bool | None:
        """`Plan.sp`."""

    @property
    def offload(self) -> str:
        """`Plan.offload`."""

    @property
    def compress(self) -> str | None:
        """`Plan.compress`."""

    @property
    def sync(self) -> str | None:
        """`Plan.sync`."""


def check_world_size(plan: PlanFields, remainder_axis: str, world_size: int) -> Iterator[Problem]:
    """Check that the given degrees fill the world, or leave a whole number for `remainder_axis`."""
    given = {axis: degree for axis, degree in _degrees(plan).items() if degree is not None and axis != "ep"}
    claimed, has_rest = prod(given.values()), remainder_axis not in given
    if world_size >= 1 and (world_size % claimed == 0 if has_rest else world_size == claimed):
        return
    fixes = []
    for axis, degree in given.items():
        available, remainder = divmod(world_size, claimed // degree)
        if available >= 1 and not remainder:
            fixes.append(f"{axis}={listed(divisors(available) if has_rest else [available])}")
    if not has_rest and world_size > claimed and world_size % claimed == 0:
        other = "dp_replicate" if remainder_axis == "dp_shard" else "dp_shard"
        if other not in given and (other == "dp_replicate" or plan.zero is None):
            fixes.append(f"{other}={world_size // claimed}")
    starts = multiples_around(world_size, claimed) if has_rest else [claimed]
    fixes.append(f"--nproc {listed(starts)}")
    words = " x ".join(f"{axis}={degree}" for axis, degree in given.items()) or "one rank"
    total = f"{words} = {claimed}" if len(given) > 1 else words
    rule = "does not divide" if has_rest else "is not"
    yield Problem("P009", f"{total} {rule} the number of ranks, {world_size}", ", or ".join(fixes))


def check_conflicts(plan: PlanFields, *, unknown: str | None = None) -> Iterator[Problem]:
    """Problems of values that exclude each other, in a plan without open values.

    `unknown` is an axis whose degree is not known because the other degrees do not fit the number of ranks. Rules that
    read this degree are skipped.
    """
    degrees = {axis: degree or 1 for axis, degree in _degrees(plan).items()}
    yield from _check_sharding(plan, degrees)
    if plan.context and degrees["cp"] == 1:
        yield Problem(
            "P016", f"{plan.context} divides tokens among cp ranks, but cp=1", f"cp=2, or remove {plan.context}"
        )
    if unknown != "dp_replicate":
        yield from _check_replicas(plan, degrees)
    if plan.sync == AUTO and plan.compress:
        fix = f"sync=diloco:50 or sync=local:8, or remove compress={plan.compress}"
        yield Problem("P022", f"sync=auto chooses compress too, but compress={plan.compress} is set", fix)
    if plan.sp and degrees["tp"] == 1:
        yield Problem("P017", "sp divides tokens among tp ranks, but tp=1", "tp=2 or more, or remove sp")
    yield from _check_schedule(plan, degrees)
    if unknown != "dp_shard":
        try:
            Layout(**degrees)
        except ShoalError as error:
            yield from error.problems


def _check_sharding(plan: PlanFields, degrees: Mapping[str, int]) -> Iterator[Problem]:
    dp_shard, ep = degrees["dp_shard"], degrees["ep"]
    if plan.zero == 0 and dp_shard > 1:
        fix = f"zero=1, 2 or 3, or dp_replicate={dp_shard} instead of dp_shard={dp_shard}"
        yield Problem("P012", f"dp_shard={dp_shard} needs zero=1 or more, got zero=0", fix)
    if plan.offload == "parameters" and not plan.zero:
        yield Problem("P013", "offload=parameters moves shards to host memory, but zero=0 shards nothing", "zero=3")
    if not plan.zero and ep > 1:
        yield Problem("P014", f"ep={ep} shards the experts and needs zero=1 or more, got zero=0", "zero=1, 2 or 3")


def _check_schedule(plan: PlanFields, degrees: Mapping[str, int]) -> Iterator[Problem]:
    if degrees["pp"] == 1:
        if plan.schedule is not None or (plan.v or 1) > 1:
            word = plan.schedule or f"v={plan.v}"
            yield Problem(
                "P018", f"{word} orders the stages of a pipeline, but pp=1", f"pp=2 or more, or remove {word}"
            )
    elif plan.schedule and plan.v != (legal := VIRTUAL_STAGES.get(plan.schedule, plan.v)):
        yield Problem(
            "P019", f"{plan.schedule} must have v={legal} stages per rank, got v={plan.v}", f"v={legal}, or interleaved"
        )


def _check_replicas(plan: PlanFields, degrees: Mapping[str, int]) -> Iterator[Problem]:
    """Reject `compress` and `sync` where several ranks hold one replica and there is no other.

    One rank alone accepts them, so that the same recipe runs there too.
    """
    has_one_replica = degrees["dp_replicate"] == 1 and prod(degrees[axis] for axis in DEGREES if axis != "ep") > 1
    reduces_over_cp = degrees["cp"] > 1 and not plan.zero  # ranks of cp then exchange gradients too
    for key, value in (("compress", plan.compress), ("sync", plan.sync)):
        if has_one_replica and value and not (reduces_over_cp and key == "compress"):
            what = f"{key}={value} changes the traffic between replicas, but dp_replicate=1"
            yield Problem("P021", what, f"dp_replicate=2 or more, or remove {key}={value}")


def _degrees(plan: PlanFields) -> dict[str, int | None]:
    return {axis: getattr(plan, axis) for axis in DEGREES}


def multiples_around(number: int, divisor: int) -> list[int]:
    """The nearest positive multiples at or below a number and above it."""
    below = max(0, number) // divisor * divisor
    return [multiple for multiple in (below, below + divisor) if multiple]
