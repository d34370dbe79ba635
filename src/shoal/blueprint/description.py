"""What a model says about itself, once, for the planner and for every parallelism to read.

A model is single-device code. It knows nothing of ranks, but it does know its own anatomy: which submodules repeat,
where it may be cut, which linears may be split by columns and which by rows. It says so in one `Description`;
parallelism reads it, so no parallelism ever has to know a model's attribute names. A module of the user's own carries
the same declaration, as a method `describe()`, or none at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property


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

    def split_of(self, module: str) -> Split | None:
        """How a submodule may be split; None: not at all."""
        key = self.kind_of(module)
        if key not in self._known_splits:
            found = (how for pattern, how in self.splits.items() if matches(pattern, module))
            self._known_splits[key] = next(found, None)
        return self._known_splits[key]

    def kind_of(self, name: str) -> str:
        """The same for the same thing in every layer, where no pattern names a layer by its number."""
        return _without_numbers(name) if self._are_layers_alike else name

    @cached_property
    def has_experts(self) -> bool:
        """Whether some submodules are experts, which ep divides."""
        return Split.EXPERTS in self.splits.values()

    @cached_property
    def _known_splits(self) -> dict[str, Split | None]:
        """What `split_of` has found: predictions ask for thousands of names."""
        return {}

    @cached_property
    def _are_layers_alike(self) -> bool:
        """Whether no pattern names one layer by its number: then a name is as good as that of another layer."""
        return not any(part.isdigit() for pattern in self.splits for part in pattern.split("."))


def _without_numbers(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def matches(pattern: str, name: str) -> bool:
    """Whether a name fits a pattern in which `*` stands for exactly one component.

    >>> matches("model.layers.*.mlp", "model.layers.3.mlp"), matches("model.*", "model.layers.3")
    (True, False)
    """
    wanted, parts = pattern.split("."), name.split(".")
    return len(wanted) == len(parts) and all(w in ("*", part) for w, part in zip(wanted, parts, strict=True))
