"""A model as the planner sees it: parameters, FLOPs and bytes of each of its layers.

A transformer is given by its dimensions: everything else follows from them. Any other model is given by its blocks,
each with the result of a trace. Both come as a `Workload`, from the name of a preset, a Hugging Face `config.json`,
plain dimensions, or a trace.

FLOPs are those of training a token, forward and backward, a multiplication and an addition counting two. Attention is
counted as the kernels compute it, half of the square if it is causal.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from shoal.blueprint.validation.bounds import check_bounds
from shoal.errors import Problem, ShoalError, nearest, raise_if


@dataclass(frozen=True, kw_only=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek): queries, keys and values come out of narrow vectors."""

    query_rank: int
    """Features of the vector that queries come from. 0: they come from the residual stream itself."""
    key_rank: int
    """Features of the vector that keys and values come from."""
    rope_dim: int
    """Features of a head that are rotated, beside `head_dim` that are not."""
    value_dim: int
    """Features of a head's values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One part of a traced model, in the order in which it runs."""

    name: str
    parameters: int
    flops: float
    """Of its forward, for one sample."""
    saved: float
    """Bytes that autograd keeps of one sample."""
    saved_anyway: float = 0.0
    """Bytes that it keeps beside those whatever the number of samples, such as weights in lower precision."""
    working: float = 0.0
    """Bytes that it needs for a moment beyond those."""
    output: float = 0.0
    """Bytes of what it hands to the next block, for one sample."""
    traffic: float = 0.0
    """Bytes that its forward reads and writes in element-wise work, for one sample."""
    kernels: int = 10
    """That its forward launches."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model on paper. `blocks` is empty for a transformer, and all there is for anything else.

    >>> Workload(name="tiny", hidden=8, layers=2, heads=2, vocabulary=10).parameters
    2248
    """

    name: str
    hidden: int = 0
    layers: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    """Features of a head. 0: hidden / heads."""
    ffn: int = 0
    gated: bool = True
    """Whether the feed-forward has a gate: three matrices instead of two."""
    vocabulary: int = 0
    tied: bool = False
    """Whether the head is the embedding."""
    biases: bool = False
    """Whether its linear layers have biases, and its norms too."""
    positions: int = 0
    """Rows of a learned embedding of positions."""
    experts: int = 0
    """Experts of a sparse layer. 0: there are none."""
    top_k: int = 0
    """Experts that compute a token."""
    expert_ffn: int = 0
    shared_ffn: int = 0
    """Features of the experts that every token visits, together."""
    dense_layers: int = 0
    """Layers that have a plain feed-forward although there are experts."""
    has_auxiliary_loss: bool = True
    """Whether a loss balances the experts, which counts tokens over all ranks."""
    routes_by_sequence: bool = False
    """Whether routers compare the tokens of a sequence: capacity, expert choice."""
    lora: int = 0
    """Rank of the adapters on every linear layer of the blocks, whose weights and all others are frozen, in the
    precision of compute. 0: all weights are trained."""
    latent: Latent | None = None
    causal: bool = True
    window: int = 0
    """Tokens that a token attends to at most. 0: all."""
    blocks: tuple[Block, ...] = ()
    sequence: int = 0
    """The usual length of a sequence, where the model says one."""
    left_out: tuple[tuple[str, str], ...] = ()
    """Axes that a run of this architecture would reject, each with the reason."""

    def __post_init__(self) -> None:
        if self.blocks:
            return
        counts = ("hidden", "layers", "heads", "vocabulary")
        raise_if(
            [Problem("Q024", f"{k}={getattr(self, k)}", f"{k}=1 or more") for k in counts if getattr(self, k) < 1],
            self.name,
        )
        raise_if(check_bounds((each.name, getattr(self, each.name)) for each in fields(self)), self.name)
        if not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.heads)
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.hidden // self.heads)
        if not self.ffn:
            object.__setattr__(self, "ffn", 4 * self.hidden)
        if self.experts and not self.expert_ffn:
            object.__setattr__(self, "expert_ffn", self.ffn)
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise ShoalError(f"top_k={self.top_k} of {self.experts} experts", fix=f"1 to {self.experts}", code="Q024")
        if self.lora and (self.experts or self.latent):
            kind = "experts" if self.experts else "latent attention"
            what = f"{self.name} has {kind}; LoRA is predicted for plain attention and feed-forwards"
            raise ShoalError(what, fix="leave --lora out: what full training takes is more", code="Q024")

    def __hash__(self) -> int:
        return hash((self.name, self.hidden, self.layers))

    def resized(self, **changes: Any) -> Workload:
        """The same with other dimensions."""
        known = [entry.name for entry in fields(self)]
        for key in changes:
            if key not in known:
                raise ShoalError(f"a model has no {key!r}", fix=nearest(key, known) or ", ".join(known), code="Q024")
        derived = {}
        if self.head_dim == self.hidden // max(1, self.heads):  # follows hidden and heads
            derived["head_dim"] = 0
        if self.kv_heads == self.heads:
            derived["kv_heads"] = 0
        return replace(self, **{**derived, **changes})

    # ---- parameters -------------------------------------------------------------------------------------------------

    @property
    def is_transformer(self) -> bool:
        """Whether it is given by dimensions."""
        return not self.blocks

    def is_left_out(self, axis: str) -> bool:
        """Whether a run would reject more than one rank of an axis."""
        return any(axis == name for name, _ in self.left_out)

    @cached_property
    def sparse_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @cached_property
    def attention_parameters(self) -> int:
        """Of the matrices of one layer's attention."""
        if self.latent is None:
            return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        low, rope = self.latent, self.latent.rope_dim
        wide = self.heads * (self.head_dim + rope)
        queries = self.hidden * low.query_rank + low.query_rank * wide if low.query_rank else self.hidden * wide
        keys = self.hidden * (low.key_rank + rope) + low.key_rank * self.heads * (self.head_dim + low.value_dim)
        return queries + keys + self.heads * low.value_dim * self.hidden

    @cached_property
    def matrices(self) -> int:
        """That a feed-forward is made of."""
        return 3 if self.gated else 2

    @cached_property
    def ffn_parameters(self) -> int:
        """Of the matrices of a plain feed-forward."""
        return self.matrices * self.hidden * self.ffn

    @cached_property
    def expert_parameters(self) -> int:
        """Of all experts of one layer: what ep divides."""
        return self.experts * self.matrices * self.hidden * self.expert_ffn

    @cached_property
    def shared_parameters(self) -> int:
        """Of one sparse layer beside its attention and its experts: shared experts and the router."""
        return self.matrices * self.hidden * self.shared_ffn + self.hidden * self.experts

    @cached_property
    def adapter_features(self) -> int:
        """Inputs and outputs of the linear layers of one block, all together: what the adapters of rank 1 have."""
        inside, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * (self.hidden + inside) + 2 * (self.hidden + narrow)
        return attention + self.matrices * (self.hidden + self.ffn)

    @cached_property
    def trained_parameters(self) -> int:
        """Those that get a gradient."""
        return self.layers * self.lora * self.adapter_features if self.lora else self.parameters

    @cached_property
    def trained_part(self) -> float:
        """Of all parameters, adapters included."""
        return self.trained_parameters / (self.parameters + self.trained_parameters) if self.lora else 1.0

    @cached_property
    def small_parameters(self) -> int:
        """Norms and biases of one layer."""
        norms = 2 * self.hidden * (2 if self.biases else 1)
        if not self.biases:
            return norms
        return (
            norms + (self.heads + 2 * self.kv_heads) * self.head_dim + 2 * self.hidden + self.ffn * (self.matrices - 1)
        )

    @cached_property
    def embedding_parameters(self) -> int:
        """Of the embedding, and of positions that are learned."""
        return (self.vocabulary + self.positions) * self.hidden

    @cached_property
    def head_parameters(self) -> int:
        """Of the last linear layer, whether it is tied or not."""
        return self.vocabulary * self.hidden

    @cached_property
    def parameters(self) -> int:
        """All of them; a tied head counts once."""
        if self.blocks:
            return sum(block.parameters for block in self.blocks)
        layers = self.layers * (self.attention_parameters + self.small_parameters)
        layers += (self.layers - self.sparse_layers) * self.ffn_parameters
        layers += self.sparse_layers * (self.expert_parameters + self.shared_parameters)
        ends = self.embedding_parameters + (0 if self.tied else self.head_parameters)
        return layers + ends + self.hidden * (2 if self.biases else 1)

    @cached_property
    def active_parameters(self) -> int:
        """Of matrices that a token is multiplied with; looking up an embedding is free."""
        if self.blocks:
            return self.parameters
        experts = self.top_k * self.matrices * self.hidden * self.expert_ffn + self.shared_parameters
        plain = self.layers - self.sparse_layers
        feed_forwards = plain * self.ffn_parameters + self.sparse_layers * experts
        return self.layers * self.attention_parameters + feed_forwards + self.head_parameters

    # ---- FLOPs ------------------------------------------------------------------------------------------------------

    def attended(self, sequence: int) -> float:
        """Tokens that a token attends to, on average."""
        reach = min(sequence, self.window) if self.window else sequence
        if not self.causal:
            return reach
        return reach * (1 - reach / (2 * sequence))

    def attention_flops(self, sequence: int) -> float:
        """Of one token in one layer's attention, forward: two products with every token that it attends to."""
        value_dim = self.latent.value_dim if self.latent else self.head_dim
        query_dim = self.head_dim + (self.latent.rope_dim if self.latent else 0)
        return 2 * self.heads * (query_dim + value_dim) * self.attended(sequence)

    def flops_per_token(self, sequence: int) -> float:
        """Of training one token: forward and backward, nothing twice. Frozen weights need no gradient."""
        if self.blocks:
            return 3 * sum(block.flops for block in self.blocks) / max(1, sequence)
        products = 4 * self.active_parameters + 6 * self.trained_parameters if self.lora else 6 * self.active_parameters
        return products + 3 * self.layers * self.attention_flops(sequence)
