"""The section `comm:` of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shoal.config.fields import BelowOne, Number, PositiveFloat, PositiveInt, Section


class CommSection(Section):
    """Communication between replicas (`dp_replicate`): the collectives, compression and local SGD (`sync=`); and of
    shards (`zero=1` to `zero=3`): units, prefetch and reduction."""

    algorithm: Literal["builtin", "ring", "tree", "double_tree", "halving", "hierarchical", "naive", "auto"] = "builtin"
    """The all-reduce algorithm. builtin: torch's own collectives. auto: the fastest for the buckets of this run,
    measured before its first step. Else a list of messages of that name (docs/concepts/collectives.md)."""

    warmup_steps: Annotated[int, Number, Field(ge=0)] | None = None
    """The number of first steps that average uncompressed gradients, under `compress=` or `sync=`. Early gradients are
    the largest, and the moments of the optimizer start with them. None: 50 for `1bit`, `topk`, `randomk` and
    `powersgd`, else 0."""

    outer_lr: PositiveFloat = 0.7
    """Under `sync=diloco:H`, the learning rate of the outer optimizer, which updates the shared weights."""

    outer_momentum: BelowOne = 0.9
    """Its Nesterov momentum."""

    fragments: PositiveInt = 1
    """The number of parts of the shared weights, which are exchanged one after the other within H steps."""

    outer_delay: Annotated[int, Number, Field(ge=0)] = 0
    """The number of steps between sending and applying an exchange. Replicas train on while it travels."""

    rescale: bool = True
    """Under `sync=local:H` with Adam, scale the mean update of the replicas to the length of one model's step. A
    replica's gradients are noisier, and Adam divides by the noise (docs/concepts/slow-links.md)."""

    wrap_classes: tuple[str, ...] = ()
    """Names of classes of the model, such as `LlamaDecoderLayer`. Each module of one is a unit of `zero`, which is
    gathered at once; the rest of the model is one more. Empty: units are the blocks of the model."""

    wrap_min_params: PositiveInt | None = None
    """Units of `zero` by size: the smallest submodules with at least this many parameters not in a smaller one. None:
    units are the blocks of the model."""

    forward_prefetch: PositiveInt | None = None
    """Units that a forward gathers ahead, before it computes one. Each takes memory. None: the next one is gathered
    while a GPU computes, if the host runs ahead."""

    backward_prefetch: PositiveInt | None = None
    """Under `zero=3`, units that a backward gathers ahead. Each takes memory. None: one."""

    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """The dtype in which gradients are reduced over shards. fp32: under fp64, fp64. bf16: half the bytes; gradients are
    rounded before they are added up."""
