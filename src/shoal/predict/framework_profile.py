"""Profiles of training systems: how they differ, as far as memory and time depend on it.

A plan says how a model is laid out; it does not say whether gradients add up in fp32, whether attention ever holds its
scores, or whether the last gradients travel while others are computed. That depends on the system that
runs the plan. A profile is read off the system's documentation and code. Figures that no documentation has (`LEARNT`)
are fitted to its published runs: one number for the whole system, never for a run.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Literal

MS = 1e-3
Cut = Literal["even", "balanced", "thresholds"]
"""Stages of equally many layers; as equal in cost as can be, head included; or cut where the running cost passes equal
shares of the whole."""


@dataclass(frozen=True, kw_only=True)
class FrameworkProfile:
    """One system. Bytes are those of one element."""

    name: str
    source: str = ""
    is_known: bool = True
    """Whether measured runs of it are published."""
    is_known_together: bool = True
    """And on several devices."""
    is_exact: bool = False
    """Whether states and messages are those that `predict.exact` counts to the byte: shoal's."""

    # ---- states ----
    weight: float = 2
    """Bytes of a weight that layers compute with."""
    master: float = 4
    """Bytes of the copy that the optimizer steps. 0: it steps the weights themselves."""
    gradient: float = 4
    """Bytes that a gradient adds up in."""
    moments: float = 8
    """Bytes of Adam's two moments."""
    gradients_come_late: bool = False
    """Whether gradients are made in the backward and forgotten after the step: then those of a single microbatch never
    coexist with all of its activations. Else their buffers are always there."""
    gradient_copy: float = 0.0
    """Bytes of gradients that are held during the backward beside those that add up: in the precision of compute, and
    in buckets. They come when logits have gone."""
    bucket: float = 0.0
    """Bytes of communication buffers that stay."""
    keeps_buckets: bool = False
    """Whether buckets of replicated gradients stay beside the gradients of earlier microbatches, as those of DDP do."""
    receives_ahead: bool = False
    """Whether a stage of a pipeline has a buffer for every message that it receives in a step, as torch's have."""
    copies_of_messages: int = 0
    """Copies of what tp sends that are held for a while after it was sent, as gloo does."""
    gathers_ends_alone: bool = False
    """Whether embedding and head are gathered by themselves, each when it is about to compute."""

    # ---- activations ----
    attention: Literal["flash", "eager"] = "flash"
    """flash: scores never leave the chip. eager: they do, and are kept for the backward."""
    dropout: bool = False
    """Whether masks of dropout are kept."""
    keeps_normed: bool = True
    """Whether the outputs of norms are kept, beside their inputs."""
    keeps_product: bool = True
    """Whether a gated feed-forward keeps gate × up."""
    keeps_silu: bool = False
    """Whether it keeps silu(gate) too."""
    keeps_gathered: bool = False
    """Whether a layer that tp divides keeps its input of all tokens. Else it gathers that again in the backward."""
    is_memory_saving: bool = False
    """Whether layers that tp does not divide keep less than autograd would, by computing inputs again
    (`numerics.ops.memory_saving_linear`)."""
    copies_in_norm: bool = False
    """Whether a norm by itself keeps a scaled copy of its input: one that is computed by several kernels does."""
    backward_tensors: float = 0.0
    """Tensors of the feed-forward's width in float32 that its backward holds for a moment, where nothing is fused."""
    is_compiled: bool = False
    """Whether a compiler sees each layer as a whole. It keeps the casts of weights that the forward has made, all but
    the last one's, unless the layer recomputes; writes every gradient to memory of its own; and leaves the last norm in
    float32."""
    norm_input: float = 2
    """Bytes of what a norm keeps of its input."""
    sparse_norm_input: float = 2
    """The same in layers with experts: autocast sums up what those give in float32, and compiled layers leave it so."""
    fuses_experts: bool = False
    """Whether experts are one operator on a modern GPU without ep (`numerics.ops.experts.fused`). It keeps its tokens,
    gate and up, and no casts."""
    splits_experts: bool = False
    """Whether tp divides experts too."""
    splits_tokens: bool = True
    """Whether tp ranks divide the tokens between their layers, where the plan does not say."""
    selective: Literal["products", "half", "core"] = "products"
    """What recompute=selective keeps: all matrix products and attention; every other product; all but the core of
    attention."""
    logits: float = 8
    """Bytes of everything that is held of one logit at the fullest moment."""
    fused_loss: bool = False
    """Whether logits only ever exist in chunks (without tp and pp)."""
    copies_in_loss: int = 0
    """Copies of a chunk of logits in float32 that its softmax is computed in. 0: it is computed in place."""
    fragmentation: float = 0.04
    """Reserved beyond allocated, as a part of activations and transients."""
    pipeline_fragmentation: float = 0.0
    """The same on top in a pipeline, whose microbatches come and go in another order than they were allocated in."""

    # ---- time ----
    attention_part: float = 0.6
    """Part of the rate of large products that its attention kernels reach, up to Ampere."""
    modern_attention_part: float = 0.44
    """The same on Hopper and later, whose matrix units need kernels written for them."""
    fp8_casts: float = 0.0
    """Bytes read and written in each microbatch to find the scale of one weight and to cast it to fp8."""
    attention_ramp: float = 0.0
    """Tokens at which its attention kernels reach half of their rate; longer sequences are faster than usual ones."""
    attention_sustained: float = 1.0
    """The part of a measured rate of attention that a step sustains: clocks drop under load, and key/value heads are
    shared."""
    passes: float = 14
    """Times that the element-wise work of a layer's forward reads or writes a tensor of `hidden` features."""
    ffn_passes: float = 4
    """The same for tensors of the feed-forward's width."""
    row_passes: float = 6
    """The same for the rows of experts, which are as wide as tokens: there are `top_k` of a token."""
    fused_experts_start: float = 0.0
    """Seconds of each pass through a layer with fused experts, whatever its size: small kernels that route and sort."""
    accumulation: float = 0.0
    """Bytes read and written to add the gradient of one parameter to that of the microbatches before."""
    cast_passes: float = 0.0
    """What comes to `passes` in lower precision than float32, in which norms and sums are computed, and cast to it."""
    cast_ffn_passes: float = 0.0
    """The same for `ffn_passes`."""
    adapter_passes: float = 2.5
    """Times that the forward of LoRA reads or writes the inputs and outputs of layers; the backward does it 1.6 times
    as often."""
    host_forward: float = 0.4 * MS
    """Seconds that the host needs to launch the forward of a layer."""
    host_backward: float = 0.5 * MS
    host_part: float = 1.0
    """The part of what `shoal calibrate` measures, all kernels of a layer launched one by one, that the host needs: a
    compiler fuses some. On unmeasured machines the seconds above count as they are."""
    host_collective: float = 0.05 * MS
    """Seconds that the host needs to launch one collective."""
    host_scatter: float = 0.0
    """The same for each layer and each of the tp ranks, where those divide the tokens."""
    host_action: float = 0.0
    """Seconds that the host needs around one action of a pipeline, where it does not run ahead of a device."""
    crossing: float = 0.05 * MS
    """Seconds that a message of tp waits at each border of nodes, beside the latency of the link: hosts that are not in
    step with each other."""
    messages: float = 1
    """Into how many messages the parameters of a layer are divided, where they are sharded: as many as it has, where a
    system sends each by itself."""
    overlaps_gradients: bool = True
    """Whether gradients travel while earlier layers are still computed."""
    shadow: float = 0.8
    """The part of the last backward in whose shadow gradients travel."""
    bucket_size: float = 100e6
    """Bytes of gradients that travel in one message, where they are reduced."""
    overlaps_gathers: bool = True
    """Whether the next unit of sharded parameters travels while one is computed."""
    copies_in_traffic: float = 0.0
    """Times that gathered and scattered tensors are copied on their way, where memory is so slow that it matters."""
    tp_exposed: float = 1.0
    """The part of tp's traffic that nothing hides."""
    reduce: float = 4
    """Bytes in which gradients travel."""
    gather: float = 2
    """Bytes in which parameters travel."""
    optimizer_traffic: float = 34
    """Bytes read and written to update one parameter."""
    rounding: float = 0.0
    """Bytes in whose time the two moments of one parameter are rounded at random, where they are stored in less."""
    fixed: float = 10 * MS
    """Seconds of every step that nothing explains: data, logging, the host at the start."""
    cut: Cut = "even"
    """How stages are cut."""
    expert_efficiency: float = 0.75
    """Of that, what many small products of experts reach, some of them busier than others. Fused ones reach all of it,
    and their activation function costs nothing."""
    efficiency: float = 0.84
    """Of the achievable rate that its products sustain in a whole step: clocks drop under load, kernels follow each
    other with gaps."""
    product_traffic: float = 1.0
    """The part of the time to read and write the matrices of a product that its computing does not hide."""

    def with_bf16_moments(self) -> FrameworkProfile:
        """The same with Adam's moments in half the bytes."""
        moments = self.moments / 2
        traffic = self.optimizer_traffic - 2 * moments + self.rounding  # read and written
        return replace(self, name=f"{self.name}, bf16 states", moments=moments, optimizer_traffic=traffic)

    def with_bf16_weights(self) -> FrameworkProfile:
        """The same with weights and gradients in half the bytes, and no other copy of them."""
        name = f"{self.name}, bf16 weights"
        traffic = self.optimizer_traffic - self.weight - self.gradient  # both are read or written twice
        casts = max(0.0, self.fp8_casts - 3 * self.weight / 2)  # for which weights are read three times
        return replace(self, name=name, weight=2, gradient=2, optimizer_traffic=traffic, fp8_casts=casts)

    def as_documented(self) -> FrameworkProfile:
        """Without what was learnt from measured runs of the system: those figures become those of an unknown one."""
        learnt = {entry.name: entry.default for entry in fields(self) if entry.name in LEARNT}
        return replace(self, name=f"{self.name}, documented", is_known=False, **learnt)  # type: ignore[arg-type]

    @cached_property
    def on_host(self) -> FrameworkProfile:
        """The same on a CPU: no workspaces, an allocator that gives back; kernels that are not fused; and no
        other unit that could send while it computes."""
        return replace(
            self,
            name=f"{self.name} on the host",
            bucket=0.0,
            is_compiled=False,
            copies_of_messages=4,
            copies_in_norm=True,
            copies_in_loss=1,
            fragmentation=0.0,
            pipeline_fragmentation=0.0,
            attention_ramp=0.0,
            attention_sustained=0.92,
            row_passes=6,
            product_traffic=1.0,
            host_action=0.4 * MS,  # autograd and sends around an action: benchmarks/results/bubble_*
            overlaps_gradients=False,  # what sends computes, too
            overlaps_gathers=False,
            copies_in_traffic=1.5,  # into one message, out of it, and some by gloo
            optimizer_traffic=self.optimizer_traffic + 8,  # clipping is a pass of its own
        )

    @cached_property
    def without_fused_experts(self) -> FrameworkProfile:
        """The same where experts are several operators: with ep, in float32, and on other devices."""
        if not self.fuses_experts:
            return self
        sparse_norm_input = 4 if self.is_compiled else 2
        name = f"{self.name}, experts by steps"
        return replace(self, name=name, fuses_experts=False, sparse_norm_input=sparse_norm_input)

    @cached_property
    def where_split(self) -> FrameworkProfile:
        """The same where tp divides layers: they are called one by one, and keep what autograd keeps."""
        if not self.is_memory_saving:
            return self
        return replace(
            self,
            name=f"{self.name}, split",
            keeps_gathered=True,
            keeps_normed=self.copies_in_norm,
            keeps_product=True,
            keeps_silu=self.backward_tensors > 0,
            backward_tensors=min(self.backward_tensors, 4.0),
            logits=8,  # exponentials, and their gradient
        )

    @cached_property
    def with_adapters(self) -> FrameworkProfile:
        """The same where layers have LoRA: they are called one by one, and keep their inputs, which A reads."""
        if not self.is_memory_saving:
            return self
        return replace(
            self,
            name=f"{self.name}, LoRA",
            keeps_normed=True,
            keeps_product=True,
            keeps_silu=self.backward_tensors > 0,
        )

    def __hash__(self) -> int:
        return hash(self.name)


LEARNT = (
    "fragmentation",
    "pipeline_fragmentation",
    "attention_part",
    "modern_attention_part",
    "attention_sustained",
    "passes",
    "ffn_passes",
    "row_passes",
    "fused_experts_start",
    "adapter_passes",
    "host_forward",
    "host_backward",
    "host_part",
    "host_collective",
    "host_scatter",
    "crossing",
    "tp_exposed",
    "shadow",
    "fixed",
    "expert_efficiency",
    "efficiency",
    "product_traffic",
)
"""Figures that no documentation has, fitted to the measured runs of a system; none to a single run. The defaults above
are those of an unknown system: assumptions, which `shoal backtest RUNS.csv --leave-out` scores."""
