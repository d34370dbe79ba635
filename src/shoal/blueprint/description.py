"""The description of a model, declared once and read by the planner and by every parallelism.

A model is single-device code without ranks. Its `Description` declares its structure: the submodules that repeat, where
it may be cut, which linear layers may be split by columns and which by rows. So no parallelism needs attribute names
of a model. A user's own module has the same declaration, as a method `describe()`, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, lru_cache
from itertools import groupby


class Split(Enum):
    """How the weight of one submodule may be split over tensor-parallel or expert-parallel ranks.

    COLUMN      a linear layer, by output features: its output is a part of the features
    ROW         a linear layer, by input features: its outputs are partial sums
    VOCABULARY  an embedding or output head, by tokens of the vocabulary
    SEQUENCE    not split; it works on each position alone, so positions may be divided (norms)
    HEADS       not split; it works on each head alone, inside attention (norms of queries and keys)
    LATENT      not split; a layer of a region before its COLUMN layers, which read what it computes (low-rank queries)
    REGION      a module whose COLUMN layers all read its input, or LATENT layers; the input enters once, before it runs
    ALL_TOKENS  not split; it mixes positions, so positions that are divided are gathered before it, and cut after it
    EXPERTS     divided over ep along dim 0, not split by tp; it works on each position alone
    """

    COLUMN = "column"
    ROW = "row"
    VOCABULARY = "vocabulary"
    SEQUENCE = "sequence"
    HEADS = "heads"
    LATENT = "latent"
    REGION = "region"
    ALL_TOKENS = "all_tokens"
    EXPERTS = "experts"


@dataclass(frozen=True, kw_only=True)
class Description:
    """The structure of a model, which its method `describe()` returns. Every field is optional.

    Names are fully qualified names of submodules; in `splits`, `*` stands for one component of a name. `before_blocks`,
    `blocks` and `after_blocks` together hold every parameter. Each of their modules may be replaced by one that returns
    what it would return, and the rest of the model still runs: that is a stage of a pipeline.

    blocks, before_blocks, after_blocks       what sharding, recompute and pipelines cut (`zero=3`, `recompute`, `pp`)
    costs                                     what they cost to compute, where stages are to be balanced (`pp`)
    splits, parts, cuts, per_rank             how tensor parallelism splits layers (`tp`)
    token_blocks, sp_arguments                where sequence parallelism divides tokens (`sp`)
    num_heads, num_kv_heads                   what its degree must divide (`tp`)
    positions, documents, positions_restart   arguments of `forward` under context parallelism (`cp`)
    num_experts, active_experts               of a mixture of experts (`ep`)
    tied, head, num_outputs                   parameters with two names; the layer of the logits; its labels
    max_tokens, training_flops                the longest sequence; FLOPs of a batch, for the MFU

    >>> splits = {"layers.*.up": Split.COLUMN, "layers.*.down": Split.ROW}
    >>> described = Description(before_blocks=("embed",), blocks=("layers.0", "layers.1"), splits=splits)
    >>> described.split_of("layers.1.up").name
    'COLUMN'
    """

    blocks: tuple[str, ...] = ()
    """The repeated blocks in the order of the forward. They are the units of sharding and recompute, and a pipeline is
    cut between them."""

    before_blocks: tuple[str, ...] = ()
    """Submodules that run before the first block; they are on the first stage of a pipeline."""

    after_blocks: tuple[str, ...] = ()
    """Submodules that run after the last block; they are on the last stage of a pipeline."""

    costs: Mapping[str, float] = field(default_factory=dict)
    """Submodule of the above → what it costs to compute, in any unit: stages are balanced by it. Empty: the elements
    of its matrices, which is right if all of them see the same tokens, and wrong for convolutions."""

    splits: Mapping[str, Split] = field(default_factory=dict)
    """Pattern of submodule names → its tensor-parallel split."""

    per_rank: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Pattern of submodule names → its attributes that count heads or features and that its code reads: tp divides
    them. `config.num_heads` is divided in a copy of `module.config`."""

    parts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Pattern of a COLUMN layer that holds several in one, as queries, keys and values → the sizes of its parts, in the
    order of its output features. tp cuts each of them."""

    cuts: Mapping[str, int] = field(default_factory=dict)
    """Pattern of a parameter → the dim along which tp cuts it, where that is not what the split of its module says: the
    weight of a linear layer that has its inputs first, or a number for each head."""

    token_blocks: tuple[str, ...] = ()
    """Blocks, one after the other, between which alone `sp` divides the tokens: before the first and after the last of
    them every rank has all. Blocks of another list, as of a decoder after an encoder, start over. Empty: a VOCABULARY
    embedding divides tokens, and the head gathers them."""

    sp_arguments: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Pattern of a module inside `token_blocks` → what `sp` does with its arguments, by their names:

    divide   of a block, beside its activations: it has a row for each token, and every rank has all of them
    gather   of an ALL_TOKENS module, beside its first one: it has a row for each of the rank's tokens; and of a COLUMN
             layer: its rows may be those of all samples, in one dim, since each is computed alone
    enter    of an ALL_TOKENS module or a COLUMN layer: every rank has it whole, as the output of an encoder"""

    tied: tuple[tuple[str, str], ...] = ()
    """Pairs of names of one shared parameter; the first name of a pair is its key."""

    head: str | None = None
    """The linear layer without a bias that returns the logits, the unchanged output of `forward`. The loss can then be
    computed in its place, without the logits of all tokens at once. None: there is no such layer."""

    logit_scale: float = 1.0
    """The factor by which `forward` multiplies the output of the head."""

    logit_softcap: float | None = None
    """The bound c of logits c · tanh(l / c) that `forward` makes of the scaled output l of the head. None: no bound."""

    num_heads: int | None = None
    """Attention heads, which a tensor-parallel degree must divide."""

    num_kv_heads: int | None = None
    """Key/value heads, likewise."""

    num_outputs: int | None = None
    """The number of different labels: the vocabulary or the classes. None: not known."""

    max_tokens: int | None = None
    """The longest sequence that it takes. None: any."""

    num_experts: int | None = None
    """Experts in every MoE layer, which an expert-parallel degree must divide. None: there are none."""

    active_experts: int | None = None
    """Experts that compute each token."""

    positions: str | None = None
    """The argument of `forward` with the position of each token in its sequence (B, T). Context parallelism gives a
    rank tokens from several places, and shoal passes their positions. None: the model has no such argument, and cp
    cannot be used."""

    documents: str | None = None
    """The argument of `forward` with the document number of each token (B, T) in packed samples. A rank of context
    parallelism gets all of it, since its tokens attend to those of other ranks."""

    positions_restart: bool = False
    """Whether positions count from the start of each document, not of the sample."""

    why_not: Mapping[str, str] = field(default_factory=dict)
    """Axis of a plan (tp, sp, pp, cp, ep) → why this model cannot be divided along it, where that is known. A derived
    description says it."""

    training_flops: Callable[[tuple[int, ...]], float] | None = None
    """Floating-point operations of forward and backward for one batch, without recompute. Its argument is the shape of
    the first argument of `forward`: (batch, tokens) of a language model, (batch, channels, height, width) of an image
    model. None: not known, and no MFU is shown."""

    def split_of(self, module: str) -> Split | None:
        """How a submodule may be split; None: not at all."""
        key = self.kind_of(module)
        if key not in self._known_splits:
            found = (how for pattern, how in self.splits.items() if matches(pattern, module))
            self._known_splits[key] = next(found, None)
        return self._known_splits[key]

    def cut_of(self, parameter: str) -> int | None:
        """The dim of `cuts` for a parameter."""
        return next((dim for pattern, dim in self.cuts.items() if matches(pattern, parameter)), None)

    def sp_arguments_of(self, module: str) -> Mapping[str, str]:
        """What `sp` does with arguments of a submodule, by their names."""
        return next((ways for pattern, ways in self.sp_arguments.items() if matches(pattern, module)), {})

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


@lru_cache(maxsize=2**14)
def _without_numbers(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def chains(token_blocks: Sequence[str]) -> list[tuple[str, ...]]:
    """Blocks that hand divided tokens to one another: those of one list.

    >>> chains(["encoder.0", "encoder.1", "decoder.0"])
    [('encoder.0', 'encoder.1'), ('decoder.0',)]
    """
    return [tuple(found) for _, found in groupby(token_blocks, lambda name: name.rpartition(".")[0])]


def matches(pattern: str, name: str) -> bool:
    """Whether a name matches a pattern in which `*` stands for exactly one component.

    >>> matches("model.layers.*.mlp", "model.layers.3.mlp"), matches("model.*", "model.layers.3")
    (True, False)
    """
    patterns, parts = pattern.split("."), name.split(".")
    return len(patterns) == len(parts) and all(one in ("*", part) for one, part in zip(patterns, parts, strict=True))


def supports_sequence_parallel(description: Description) -> bool:
    """Whether sequence parallelism can be on.

    It needs an embedding that divides the tokens, a module that works on each token alone, and a head that gathers
    them.
    """
    if "sp" in description.why_not:
        return False
    if description.token_blocks:
        return True
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
