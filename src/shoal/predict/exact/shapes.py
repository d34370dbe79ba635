"""From the dimensions of a transformer to its `ModelShapes`: what the exact predictions count.

A built model gives its shapes by a trace (`shoal.parallel.inspect.trace_shapes`). The planner has only dimensions,
and makes the same value from them here, so that the same functions count the bytes of both. A test compares the two for
every kind of model that shoal has.

    embedding ─▶ layers: [norm, q k v, attention, o, norm, gate up, down  or  router, experts, shared] ─▶ norm ─▶ head
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from shoal.blueprint.description import Description, Split
from shoal.blueprint.model_shapes import AttentionSite, DispatchSite, ModelShapes, RouterSite, Shape, TPBoundary
from shoal.predict.workload import Workload

EMBEDDING, HEAD, NORM = "model.embed_tokens", "lm_head", "model.norm"
POSITIONS = "model.embed_positions"
ADAPTERS = (".lora_A", ".lora_B")


@lru_cache(maxsize=64)
def shapes_of(model: Workload, sequence: int) -> ModelShapes:
    """The shapes of a transformer that is called with `sequence` tokens a sample."""
    assert model.is_transformer, "a traced model has no dimensions"
    stream = (sequence, model.hidden)
    layers = range(model.layers)
    sparse = [number for number in layers if _is_sparse(model, number)]
    parameters = dict(_parameters(model))
    return ModelShapes(
        description=_description(model),
        parameters=parameters,
        stream=stream,
        tp_boundaries=tuple(_tp_boundaries(model, stream)),
        attentions=tuple(_attention(model, number, sequence) for number in layers) if model.latent is None else (),
        dispatches=tuple(
            DispatchSite(
                module=f"model.layers.{number}.mlp.experts",
                num_experts=model.experts,
                rows=model.top_k * sequence,
                dim=model.hidden,
                is_predicted=not model.routes_by_sequence,
            )
            for number in sparse
        ),
        routers=tuple(
            RouterSite(
                module=f"model.layers.{number}.mlp.router",
                num_experts=model.experts,
                has_auxiliary=model.has_auxiliary_loss,
                gathers_scores=model.routes_by_sequence,
            )
            for number in sparse
        ),
        frozen=frozenset(name for name in parameters if not name.endswith(ADAPTERS)) if model.lora else frozenset(),
        lookups=frozenset(f"{name}.weight" for name in _before(model)),
    )


def _is_sparse(model: Workload, layer: int) -> bool:
    return model.experts > 0 and layer >= model.dense_layers


def _before(model: Workload) -> tuple[str, ...]:
    return (EMBEDDING, POSITIONS) if model.positions else (EMBEDDING,)


# ---- parameters -----------------------------------------------------------------------------------------------------


def _parameters(model: Workload) -> Iterator[tuple[str, Shape]]:
    """Name and shape of every parameter, in the order of the model."""
    yield f"{EMBEDDING}.weight", (model.vocabulary, model.hidden)
    if model.positions:
        yield f"{POSITIONS}.weight", (model.positions, model.hidden)
    for layer in range(model.layers):
        block = f"model.layers.{layer}"
        yield from _norm(f"{block}.input_layernorm", model)
        for name, shape in _projections(model):
            yield from _linear(f"{block}.self_attn.{name}", shape, model)
        yield from _norm(f"{block}.post_attention_layernorm", model)
        if _is_sparse(model, layer):
            yield from _sparse_feed_forward(f"{block}.mlp", model)
        else:
            yield from _feed_forward(f"{block}.mlp", model.ffn, model)
    yield from _norm(NORM, model)
    if not model.tied:
        yield f"{HEAD}.weight", (model.vocabulary, model.hidden)


def _linear(name: str, shape: Shape, model: Workload) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", shape
    if model.biases:
        yield f"{name}.bias", shape[:1]
    if model.lora:
        outputs, inputs = shape
        yield from zip((f"{name}{end}" for end in ADAPTERS), ((model.lora, inputs), (outputs, model.lora)), strict=True)


def _norm(name: str, model: Workload) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (model.hidden,)
    if model.biases:
        yield f"{name}.bias", (model.hidden,)


def _projections(model: Workload) -> Iterator[tuple[str, Shape]]:
    """The matrices of attention. A latent attention goes through a narrow vector, which every tp rank computes."""
    h, heads, dim = model.hidden, model.heads, model.head_dim
    if model.latent is None:
        yield "q_proj", (heads * dim, h)
        yield "k_proj", (model.kv_heads * dim, h)
        yield "v_proj", (model.kv_heads * dim, h)
        yield "o_proj", (h, heads * dim)
        return
    low = model.latent
    wide = heads * (dim + low.rope_dim)
    if low.query_rank:
        yield "q_a_proj", (low.query_rank, h)
    yield "q_proj", (wide, low.query_rank or h)
    yield "kv_a_proj", (low.key_rank + low.rope_dim, h)
    yield "k_proj", (heads * (dim + low.value_dim), low.key_rank)  # keys and values
    yield "o_proj", (h, heads * low.value_dim)


def _feed_forward(name: str, width: int, model: Workload) -> Iterator[tuple[str, Shape]]:
    for matrix in ("gate_proj", "up_proj") if model.gated else ("up_proj",):
        yield from _linear(f"{name}.{matrix}", (width, model.hidden), model)
    yield from _linear(f"{name}.down_proj", (model.hidden, width), model)


def _sparse_feed_forward(name: str, model: Workload) -> Iterator[tuple[str, Shape]]:
    """The router, experts whose matrices lie one below the other, and what every token visits."""
    h, experts, width = model.hidden, model.experts, model.expert_ffn
    yield f"{name}.router.weight", (experts, h)
    for matrix in ("gate_proj", "up_proj") if model.gated else ("up_proj",):
        yield f"{name}.experts.{matrix}", (experts * width, h)
    yield f"{name}.experts.down_proj", (experts * h, width)
    if model.shared_ffn:
        yield from _feed_forward(f"{name}.shared", model.shared_ffn, model)


# ---- places where ranks exchange something --------------------------------------------------------------------------


def _tp_boundaries(model: Workload, stream: Shape) -> Iterator[TPBoundary]:
    """Where an activation enters or leaves layers that tp splits, in the order of the forward."""
    is_trained = not model.lora  # with LoRA there is nothing to train before the first layer
    yield TPBoundary(module=EMBEDDING, way="leave", shape=stream, has_backward=is_trained)
    first = "gate_proj" if model.gated else "up_proj"
    for layer in range(model.layers):
        block = f"model.layers.{layer}"
        is_deep = is_trained or layer > 0
        yield TPBoundary(module=f"{block}.self_attn.q_proj", way="enter", shape=stream, has_backward=is_deep)
        yield TPBoundary(module=f"{block}.self_attn.o_proj", way="leave", shape=stream)
        is_sparse = _is_sparse(model, layer)
        if is_sparse and not model.shared_ffn:
            continue
        home = f"{block}.mlp.shared" if is_sparse else f"{block}.mlp"
        yield TPBoundary(module=f"{home}.{first}", way="enter", shape=stream)
        # A block that is recomputed stops after the last activation that its backward needs: before a plain down_proj.
        yield TPBoundary(module=f"{home}.down_proj", way="leave", shape=stream, is_repeated=is_sparse)
    yield TPBoundary(module=HEAD, way="enter", shape=stream)
    yield TPBoundary(module=HEAD, way="logits", shape=(stream[0], model.vocabulary), is_repeated=False)


def _attention(model: Workload, layer: int, sequence: int) -> AttentionSite:
    return AttentionSite(
        module=f"model.layers.{layer}.self_attn.attention",
        queries=(model.heads, sequence, model.head_dim),
        keys=(model.kv_heads, sequence, model.head_dim),
    )


# ---- the description ------------------------------------------------------------------------------------------------


def _description(model: Workload) -> Description:
    layers = "model.layers.*"
    splits = {
        EMBEDDING: Split.VOCABULARY,
        f"{layers}.input_layernorm": Split.SEQUENCE,
        **{f"{layers}.self_attn.{name}": Split.COLUMN for name in ("q_proj", "k_proj", "v_proj")},
        f"{layers}.self_attn.o_proj": Split.ROW,
        f"{layers}.post_attention_layernorm": Split.SEQUENCE,
        **{f"{layers}.mlp.{name}": Split.COLUMN for name in ("gate_proj", "up_proj")},
        f"{layers}.mlp.down_proj": Split.ROW,
        NORM: Split.SEQUENCE,
        HEAD: Split.VOCABULARY,
    }
    if model.experts:
        splits |= {f"{layers}.mlp.router": Split.SEQUENCE, f"{layers}.mlp.experts": Split.EXPERTS}
        splits |= {f"{layers}.mlp.shared.{name}": Split.COLUMN for name in ("gate_proj", "up_proj")}
        splits |= {f"{layers}.mlp.shared.down_proj": Split.ROW}
    return Description(
        blocks=tuple(f"model.layers.{layer}" for layer in range(model.layers)),
        before_blocks=_before(model),
        after_blocks=(NORM, HEAD),
        splits=splits,
        tied=((f"{EMBEDDING}.weight", f"{HEAD}.weight"),) if model.tied else (),
        head=HEAD,
        num_heads=model.heads,
        num_kv_heads=model.kv_heads,
        num_outputs=model.vocabulary,
        positions="positions",
        num_experts=model.experts or None,
        active_experts=model.top_k or None,
    )
