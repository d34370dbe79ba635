"""What a run may say about how its model is laid out, beside the plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

import torch

from shoal.comm.replicas.transport import Chosen
from shoal.errors import Problem, listed, raise_if
from shoal.numerics.fp8.convert import FromHead, Scaling
from shoal.parallel.context.attention import Backend
from shoal.parallel.data.local_sgd import DEFAULT_OUTER, OuterOptimizer

Wanted = Chosen | Literal["auto"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Settings that change how, not what, is computed; most of them are keys of a recipe."""

    seed: int = 0
    bucket_mb: float | Literal["auto"] | None = None
    find_unused_parameters: bool = False
    compile: bool | str = False
    """True: by torch's default backend; else by the one that is named."""
    attention: Backend = "auto"
    """Which of torch's kernels computes attention on a GPU. auto: the fastest that takes the shape."""
    fused_loss: bool | None = None
    """Whether the head computes the loss in place of logits. None: where it can."""
    fp8: Scaling = "tensorwise"
    """What of a tensor shares one scale under the precision fp8."""
    fp8_min_features: int | None = None
    """Layers with fewer features stay in bf16 then. None: as measured on a GPU."""
    fp8_head: FromHead = "gradients"
    """What a head that computes the loss computes in fp8 then; logits are always in bf16."""
    sync_batch_norm: bool = False
    """Whether batch norm normalises with the mean and variance of a microbatch over all ranks."""
    recompute_swiglu: bool = True
    """Whether feed-forwards that can do so make their gated values again in the backward, rather than keep them."""
    algorithm: Wanted = "builtin"
    """What carries what replicas send each other: torch's own collectives, or a list of messages; auto: measured."""
    warmup_steps: int | None = None
    """How many of the first steps send gradients as they are, whatever the plan says. None: as the method wants."""
    outer: OuterOptimizer = DEFAULT_OUTER
    """Under `sync=`, how islands meet."""

    def __post_init__(self) -> None:
        raise_if([*_wrong(self), *_wrong_between_replicas(self)], title="the options of a run")


_BOTH = (True, False)
_VALUES: dict[str, tuple[Any, ...]] = {
    "find_unused_parameters": _BOTH,
    "attention": get_args(Backend),
    "fused_loss": (None, *_BOTH),
    "fp8": get_args(Scaling),
    "fp8_head": get_args(FromHead),
    "sync_batch_norm": _BOTH,
    "recompute_swiglu": _BOTH,
    "algorithm": tuple(word for kind in get_args(Wanted) for word in get_args(kind)),
}


def _wrong_between_replicas(options: Options) -> Iterator[Problem]:
    """Of what one rank alone never looks at; it is told there too, where a script is tried first."""
    size: Any = options.bucket_mb
    if size not in (None, "auto") and not (isinstance(size, Real) and float(size) > 0):
        yield Problem(f"bucket_mb is {size!r}", "bucket_mb=25, or whatever size in MB; 'auto'; None")
    exact = options.warmup_steps
    if exact is not None and not (isinstance(exact, int) and exact >= 0):
        yield Problem(f"warmup_steps is {exact!r}", "warmup_steps=0, or whatever number of steps; None")
    outer: Any = options.outer
    if not isinstance(outer, OuterOptimizer):
        yield Problem(f"outer is {outer!r}", "outer=shoal.OuterOptimizer(lr=0.7, momentum=0.9)")


def _wrong(options: Options) -> Iterator[Problem]:
    """What a script has misspelt; a recipe was looked at before."""
    for name, allowed in _VALUES.items():
        value = getattr(options, name)
        if value not in allowed:
            yield Problem(f"{name} is {value!r}", f"{name}={', '.join(map(repr, allowed))}")
    narrow = options.fp8_min_features
    if narrow is not None and not (type(narrow) is int and narrow > 0):  # True is an int, too
        yield Problem(
            f"fp8_min_features is {narrow!r}", "fp8_min_features=512, or whatever number of features is the least"
        )
    compiles = options.compile
    is_backend = compiles in torch.compiler.list_backends(exclude_tags=()) if isinstance(compiles, str) else False
    if not (is_backend or compiles is None or isinstance(compiles, bool) or callable(compiles)):
        known = listed(map(repr, torch.compiler.list_backends()))  # but for those that are for debugging
        yield Problem(f"compile is {compiles!r}", f"compile=True; or a backend of torch.compile: {known}")
