"""From the tensors of Megatron Core's GPT to those of shoal's llama.

    embedding.word_embeddings.weight                   model.embed_tokens.weight
    decoder.layers.self_attention
        .linear_qkv.layer_norm_weight    [L, D]        input_layernorm.weight
        .linear_qkv.weight               [L, ., D]     self_attn.q_proj, k_proj, v_proj   cut by query groups
        .linear_proj.weight              [L, D, .]     self_attn.o_proj.weight
    decoder.layers.mlp
        .linear_fc1.layer_norm_weight    [L, D]        post_attention_layernorm.weight
        .linear_fc1.weight               [L, 2F, D]    mlp.gate_proj, up_proj             gate above up
        .linear_fc2.weight               [L, D, F]     mlp.down_proj.weight
    decoder.final_layernorm.weight                     model.norm.weight
    output_layer.weight                                lm_head.weight

L layers lie in the first dim; some versions have each by itself, `decoder.layers.0.self_attention...`. The rows of
`linear_qkv` are, for each group of query heads: the queries of the group, one key head, one value head. Rotary pairs
are the same on both sides, so no row moves within a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from shoal.checkpoint.formats.lazy_tensor import LazyTensor, derived, part_of
from shoal.checkpoint.storage.manifest import Shape
from shoal.errors import ShoalError

Tensors = dict[str, LazyTensor]
LAYERS = "decoder.layers."
OTHER_NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Norms of a layer → their names where a norm is a module of its own."""


@dataclass
class Source:
    """Tensors of Megatron under one prefix, such as those of the model or of one state of Adam."""

    tensors: Mapping[str, LazyTensor]
    prefix: str = ""
    used: set[str] = field(default_factory=set)
    """Full names of the tensors that were taken."""

    def take(self, name: str, shape: Shape) -> LazyTensor:
        """The tensor with a name and a shape."""
        found = self.tensors.get(self.prefix + name)
        if found is None or found.shape != shape:
            raise _unfit(self.prefix + name, shape, found)
        self.used.add(self.prefix + name)
        return found

    def layer(self, name: str, number: int, shape: Shape, num_layers: int) -> LazyTensor:
        """The tensor of a layer, by itself or one of those in the first dim."""
        for one in (name, OTHER_NAMES.get(name, name)):
            if self.prefix + f"{LAYERS}{number}.{one}" in self.tensors:
                return self.take(f"{LAYERS}{number}.{one}", shape)
            if self.prefix + LAYERS + one in self.tensors:
                stacked = self.take(LAYERS + one, (num_layers, *shape))
                return part_of(stacked, (number, *(0 for _ in shape)), (1, *shape))
        raise _unfit(f"{self.prefix}{LAYERS}{number}.{name}", shape, None)


def _unfit(name: str, shape: Shape, found: LazyTensor | None) -> ShoalError:
    what = f"has {list(found.shape)}" if found is not None else "is not there"
    return ShoalError(
        f"{name} must have the shape {list(shape)} by the arguments of the checkpoint, and {what}",
        fix="the folder as it was saved; or --format dcp, which imports the tensors under Megatron's names",
        code="E066",
    )


def to_llama(source: Source, section: Mapping[str, Any], padded: int) -> Tensors:
    """The tensors under the names of a llama of this section. `padded`: the size of the vocabulary in the files."""
    hidden, vocabulary = section["hidden"], section["vocabulary"]
    found = {"model.embed_tokens.weight": source.take("embedding.word_embeddings.weight", (padded, hidden))}
    if not section["tied"]:
        found["lm_head.weight"] = source.take("output_layer.weight", (padded, hidden))
    if vocabulary < padded:
        cut: Callable[[Tensor], Tensor] = partial(_rows, count=vocabulary)
        found = {name: derived(tensor, (vocabulary, hidden), cut) for name, tensor in found.items()}
    for number in range(section["num_layers"]):
        found |= {f"model.layers.{number}.{name}": one for name, one in _layer(source, number, section)}
    found["model.norm.weight"] = source.take("decoder.final_layernorm.weight", (hidden,))
    return found


def _layer(source: Source, number: int, section: Mapping[str, Any]) -> Iterator[tuple[str, LazyTensor]]:
    hidden, ffn, head = section["hidden"], section["ffn"], section["head_dim"]
    groups, heads, layers = section["num_kv_heads"], section["num_heads"], section["num_layers"]
    take = partial(source.layer, number=number, num_layers=layers)
    yield "input_layernorm.weight", take("self_attention.linear_qkv.layer_norm_weight", shape=(hidden,))
    each = heads // groups
    joint = take("self_attention.linear_qkv.weight", shape=(groups * (each + 2) * head, hidden))
    for name, first, count in (("q_proj", 0, each), ("k_proj", each, 1), ("v_proj", each + 1, 1)):
        cut = partial(_of_groups, groups=groups, head=head, first=first, count=count)
        yield f"self_attn.{name}.weight", derived(joint, (groups * count * head, hidden), cut)
    yield "self_attn.o_proj.weight", take("self_attention.linear_proj.weight", shape=(hidden, heads * head))
    yield "post_attention_layernorm.weight", take("mlp.linear_fc1.layer_norm_weight", shape=(hidden,))
    both = take("mlp.linear_fc1.weight", shape=(2 * ffn, hidden))
    for name, half in (("gate_proj", 0), ("up_proj", 1)):
        yield f"mlp.{name}.weight", derived(both, (ffn, hidden), partial(_half, which=half))
    yield "mlp.down_proj.weight", take("mlp.linear_fc2.weight", shape=(hidden, ffn))


def _rows(whole: Tensor, *, count: int) -> Tensor:
    return whole[:count]


def _half(whole: Tensor, *, which: int) -> Tensor:
    return whole.chunk(2)[which]


def _of_groups(whole: Tensor, *, groups: int, head: int, first: int, count: int) -> Tensor:
    """The same heads of every group, one below the other."""
    by_head = whole.view(groups, -1, head, whole.shape[1])  # -1: query heads of a group, a key and a value head
    return by_head[:, first : first + count].flatten(0, 2)
