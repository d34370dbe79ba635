"""The evidence for a likely cause: both runs at the first step that differs, and the layout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from torch import Tensor

from shoal.blueprint.layout import Layout
from shoal.verification.compare import Difference, Observation, gaps, relative_difference, wrong

MICROBATCHES = "microbatches"
REDUCED = ("dp_replicate", "dp_shard", "data", "cp", "tp", "pp")


@dataclass(frozen=True, slots=True)
class Piece:
    """The place of a parameter in a layout: the dim along which tp cuts it (None: it is not cut), its pipeline stage,
    and its role, if ranks communicate there in the forward."""

    tp_dim: int | None = None
    stage: int = 0
    role: Literal["", "attention", "router", "expert"] = ""
    module: str = ""
    """The attention module that it belongs to, or the module with its router and its experts."""

    num_experts: int = 0
    """Of an expert's weight: the number of experts in it, along dim 0."""

    has_bias: bool = False
    """Of a router: whether a bias balances its experts."""

    has_loss: bool = False
    """Of a router: whether it adds an auxiliary loss."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """The layout and settings of the candidate."""

    layout: Layout
    num_microbatches: int = 1
    num_stages: int = 1
    pieces: Mapping[str, Piece] = field(default_factory=dict)
    """Parameter → its place; a parameter that is not listed is not cut, and on stage 0."""

    clip: float | None = None
    """The largest gradient norm. None: no clipping."""

    initial: Mapping[str, Tensor] = field(default_factory=dict)
    """The weights before the first step, where they are known."""

    tolerance: float
    """The tolerance of the comparison."""


@dataclass(frozen=True)
class Evidence:
    """Both runs at the first step that differs."""

    difference: Difference
    references: Sequence[Observation]
    candidates: Sequence[Observation]
    context: Context

    @property
    def reference(self) -> Observation:
        """The step of one device."""
        return self.references[self.difference.step]

    @property
    def candidate(self) -> Observation:
        """The same step of the plan."""
        return self.candidates[self.difference.step]

    @cached_property
    def wrong(self) -> list[str]:
        """The tensors that differ and can be compared: weights if it is weights that differ first, else gradients."""
        found = gaps(*self.tensors)
        return [name for name in wrong(found, self.context.tolerance) if not found[name].note]

    @property
    def tensors(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """Of the reference and of the candidate: weights if it is weights that differ first, else gradients."""
        if self.difference.kind == "weight":
            return self.reference.weights, self.candidate.weights
        return self.reference.gradients, self.candidate.gradients

    @property
    def is_about_gradients(self) -> bool:
        """Whether the loss or a gradient differs first, so that gradients can be compared."""
        return self.difference.kind in ("loss", "gradient")

    @property
    def loose(self) -> float:
        """The tolerance of a trace, somewhat above that of the comparison; a coincidence is not this close."""
        return min(max(1e-6, 10 * self.context.tolerance), 0.02)

    def piece(self, name: str) -> Piece:
        """The place of a tensor in the layout."""
        return self.context.pieces.get(name, Piece())

    def is_cut(self, name: str) -> bool:
        """Whether tp cuts it."""
        return self.piece(name).tp_dim is not None

    def of_role(self, role: str, module: str = "") -> list[str]:
        """The gradients of attentions, routers or experts; with `module`, of one module."""
        pieces = ((name, self.piece(name)) for name in self.reference.gradients)
        return [name for name, piece in pieces if piece.role == role and module in ("", piece.module)]

    def all_experts(self, names: Sequence[str]) -> bool:
        """Whether there are names, and all are weights of experts."""
        return bool(names) and all(self.piece(name).role == "expert" for name in names)

    def factors(self, names: Iterable[str]) -> float | None:
        """The one number k for which candidate = k x reference in all these tensors; None: there is none."""
        expected, got = self.tensors
        return common_factor([factor_between(expected[name], got[name], self.loose) for name in names], self.loose)

    def degrees(self) -> dict[str, int]:
        """Factors that a wrong scale may have: degrees of axes in use, and the number of microbatches."""
        layout = self.context.layout
        found = {axis: layout.degree(axis) for axis in REDUCED}
        if layout.dp_replicate == 1 or layout.dp_shard == 1:
            del found["data"]  # the same ranks as one of the two
        found[MICROBATCHES] = self.context.num_microbatches
        return {name: degree for name, degree in found.items() if degree > 1}

    def data_axes(self) -> list[str]:
        """The axes in use whose ranks see different samples or tokens."""
        return [axis for axis in ("dp_replicate", "dp_shard", "cp") if self.context.layout.degree(axis) > 1]

    def named(self, names: Sequence[str]) -> str:
        """Tensors in words, with a verb: `every gradient is`, `the gradients of a and 2 more are`."""
        expected, _ = self.tensors
        what = "weight" if self.difference.kind == "weight" else "gradient"
        if len(names) == len(expected):
            return f"Every {what} is"
        if len(names) == 1:
            return f"The {what} of {names[0]} is"
        others = f"{names[1]}" if len(names) == 2 else f"{len(names) - 1} more"
        return f"The {what}s of {names[0]} and {others} are"


def factor_between(reference: Tensor, candidate: Tensor, loose: float) -> float | None:
    """k with candidate = k x reference, by least squares; None if no k fits."""
    if reference.shape != candidate.shape:
        return None
    expected, got = reference.double().flatten(), candidate.double().flatten()
    size = expected.dot(expected).item()
    if not size or not got.any():
        return None
    k = expected.dot(got).item() / size
    return k if k and relative_difference(got, k * expected) <= loose else None


def factor_of_numbers(reference: float, candidate: float) -> float | None:
    """candidate / reference; None if that is not finite."""
    return candidate / reference if reference and candidate and math.isfinite(candidate / reference) else None


def common_factor(factors: Sequence[float | None], loose: float) -> float | None:
    """The common value of all factors; None if they differ, or one is not known."""
    known = [k for k in factors if k is not None]
    same = bool(known) and len(known) == len(factors) and all(math.isclose(k, known[0], rel_tol=loose) for k in known)
    return known[0] if same else None


def square_of_slice(e: Evidence, name: str, axis: str, index: int) -> float:
    """The squared norm of one rank's shard of a gradient along an axis."""
    gradient, piece = e.reference.gradients[name], e.piece(name)
    dim = {"tp": piece.tp_dim, "ep": 0 if piece.role == "expert" else None}.get(axis, 0)
    if dim is None or not gradient.dim():
        return gradient.double().square().sum().item()
    pieces = gradient.chunk(e.context.layout.degree(axis), dim)
    return pieces[index].double().square().sum().item() if index < len(pieces) else 0.0


def slices(e: Evidence) -> Iterator[tuple[str, str, int, tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """The wrong tensors in the shards of ranks: by tp along its dim, by dp_shard (experts: ep) along dim 0."""
    expected, got = e.tensors
    layout = e.context.layout
    shards = "dp_shard" if layout.cp == 1 else "dp_shard x cp"
    for name in e.wrong if e.difference.kind in ("gradient", "weight") else []:
        dim = e.piece(name).tp_dim
        if layout.tp > 1 and dim is not None:
            yield name, "tp", dim, expected[name].chunk(layout.tp, dim), got[name].chunk(layout.tp, dim)
        if layout.ep > 1 and e.piece(name).role == "expert":
            yield name, "ep", 0, expected[name].chunk(layout.ep), got[name].chunk(layout.ep)
        elif layout.dp_shard > 1 and expected[name].dim() and (layout.tp == 1 or dim != 0):
            # where tp cuts dim 0 too, the shards of dp_shard are no simple slices of the full tensor
            degree = layout.degree("dp_shard_cp")
            yield name, shards, 0, expected[name].chunk(degree), got[name].chunk(degree)


def by_expert(e: Evidence, name: str, tensors: Mapping[str, Tensor]) -> Sequence[Tensor]:
    """The slice of each expert in a tensor; none if it is missing or has another shape."""
    shape, count = e.reference.gradients[name].shape, e.piece(name).num_experts
    tensor = tensors.get(name)
    if tensor is None or tensor.shape != shape or not shape or shape[0] % count:
        return ()
    return tensor.chunk(count)


def nearest_slices(pieces: Sequence[Tensor], among: Sequence[Tensor]) -> list[int]:
    """For each piece, the index of its original slice: one that is much nearer than the slice at its own index, or else
    its own index."""
    order = []
    for place, piece in enumerate(pieces):
        distances = [(piece.double() - one.double()).norm().item() for one in among]
        nearest = min(range(len(among)), key=distances.__getitem__)
        order.append(nearest if distances[nearest] < 0.5 * distances[place] else place)
    return order


def find_slice(piece: Tensor, among: Sequence[Tensor], loose: float) -> int | None:
    """The index of the slice that a piece equals; None: it equals none."""
    return next((i for i, one in enumerate(among) if relative_difference(one, piece) <= loose), None)
