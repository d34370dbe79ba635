"""What a model says about itself, once, for the planner and for every parallelism to read.

A model is single-device code. It knows nothing of ranks, but it does know its own anatomy: which submodules repeat,
where it may be cut, which linears may be split by columns and which by rows. It says so in one `Description`;
parallelism reads it, so no parallelism ever has to know a model's attribute names. A module of the user's own carries
the same declaration, as a method `describe()`, or none at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum


class Split(Enum):
    """How the weight of one submodule may be divided over a tensor-parallel group."""

    COLUMN = "column"  # a linear split by output features; what follows sees a part of the features
    ROW = "row"  # a linear split by input features; its outputs are partial sums
    VOCABULARY = "vocabulary"  # an embedding or output head split by tokens of the vocabulary
    SEQUENCE = "sequence"  # not split; works on each position alone, so positions may be divided (norms)
    HEADS = "heads"  # not split; works on each head alone, inside attention (norms of queries and keys)
    EXPERTS = "experts"  # divided over ep along dim 0; tp leaves them whole, and each position is worked on alone


@dataclass(frozen=True, kw_only=True)
class Description:
    """The anatomy of a model. Names are fully qualified names of submodules; `*` stands for one component of a name.

    `before_blocks`, `blocks` and `after_blocks` together own every parameter, and each of them may be taken out: with a
    module in its place that returns a tensor like the one that runs from block to block, the rest of the model still
    runs. What is left is a stage.
    """

    blocks: tuple[str, ...] = ()
    """The repeated blocks in the order of the forward: units of sharding and of recompute, and where a pipeline is
    cut."""

    before_blocks: tuple[str, ...] = ()
    """Submodules that run before the first block; they live on the first stage of a pipeline."""

    after_blocks: tuple[str, ...] = ()
    """Submodules that run after the last block; they live on the last stage of a pipeline."""

    splits: Mapping[str, Split] = field(default_factory=dict)
    """Pattern of submodule names → how tensor parallelism may split it."""

    tied: tuple[tuple[str, str], ...] = ()
    """Pairs of parameter names that are one and the same tensor; the first one of a pair names it."""

    head: str | None = None
    """The linear layer without a bias whose output `forward` returns as it is: logits. The loss can then be computed
    in its place, and never needs the logits of all tokens at once. None: there is no such layer."""

    num_heads: int | None = None
    """Attention heads, which a tensor-parallel degree must divide."""

    num_kv_heads: int | None = None
    """Key/value heads, likewise."""

    num_outputs: int | None = None
    """How many different labels the model can tell apart: its vocabulary or its classes. None: not known."""

    max_tokens: int | None = None
    """The longest sequence that it takes. None: any."""

    num_experts: int | None = None
    """Experts in every layer that has some, which an expert-parallel degree must divide. None: there are none."""

    active_experts: int | None = None
    """How many of them compute a token."""

    positions: str | None = None
    """The argument of `forward` that says where in its sequence each token is (B, T). With context parallelism a rank
    has tokens from several places, and shoal passes it. None: the model has no such argument, and cp cannot be used."""

    documents: str | None = None
    """The argument of `forward` that numbers the document of each token (B, T) where samples are packed. A rank of
    context parallelism is given all of it, since its tokens see those of others."""

    positions_restart: bool = False
    """Whether positions count from the start of each document, not of the sample."""

    training_flops: Callable[[tuple[int, ...]], float] | None = None
    """Floating-point operations of forward and backward, nothing recomputed, for one batch. Its argument is the shape
    of the first argument of `forward`, batch first: (batch, tokens) of a language model, (batch, channels, height,
    width) of an image model. None: not known, and no MFU is shown."""


def matches(pattern: str, name: str) -> bool:
    """Whether a name fits a pattern in which `*` stands for exactly one component.

    >>> matches("model.layers.*.mlp", "model.layers.3.mlp"), matches("model.*", "model.layers.3")
    (True, False)
    """
    wanted, parts = pattern.split("."), name.split(".")
    return len(wanted) == len(parts) and all(w in ("*", part) for w, part in zip(wanted, parts, strict=True))


def supports_sequence_parallel(description: Description) -> bool:
    """Whether sequence parallelism can be on.

    It needs an embedding that divides the tokens, a module that works on each token alone, and a head that gathers
    them.
    """
    embeds = any(
        split is Split.VOCABULARY and matches(pattern, name)
        for name in description.before_blocks
        for pattern, split in description.splits.items()
    )
    gathers = any(
        split in (Split.VOCABULARY, Split.COLUMN) and _may_match_inside(pattern, description.after_blocks)
        for pattern, split in description.splits.items()
    )
    return embeds and gathers and Split.SEQUENCE in description.splits.values()


def _may_match_inside(pattern: str, names: Sequence[str]) -> bool:
    """Whether a pattern may match one of these submodules, or one inside them."""
    return any(matches(".".join(pattern.split(".")[: name.count(".") + 1]), name) for name in names)
