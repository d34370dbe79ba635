"""From a description to split layers: convert the layers of a model into the forms of `shoal.parallel.tensor`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from torch import nn

from shoal.blueprint.description import Description, Split, matches
from shoal.blueprint.placement import cut_dim, divides_tokens_of, is_inside
from shoal.errors import ShoalError
from shoal.parallel.tensor import (
    ColumnParallelLinear,
    PositionEmbedding,
    RowParallelLinear,
    TensorParallel,
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
    become,
    vocabulary_parallel,
)
from shoal.parallel.tensor_parts.all_tokens import gather_around
from shoal.parallel.tensor_parts.attributes import divide_attributes
from shoal.parallel.tensor_parts.between_blocks import divide_between
from shoal.parallel.tensor_parts.linear_dims import PLAIN, linear_dims
from shoal.parallel.tensor_parts.shared_pieces import share_pieces
from shoal.parallel.tensor_parts.single_parameters import cut_parameters
from shoal.parallel.tensor_parts.transposed import TRANSPOSED_LAYERS, RowParallelTransposed

SPLIT_LAYERS: Mapping[tuple[Split, type[nn.Module]], type[nn.Module]] = {
    (Split.COLUMN, nn.Linear): ColumnParallelLinear,
    (Split.ROW, nn.Linear): RowParallelLinear,
    (Split.VOCABULARY, nn.Embedding): VocabularyParallelEmbedding,
    (Split.VOCABULARY, nn.Linear): VocabularyParallelHead,
}


WHOLE = (Split.SEQUENCE, Split.HEADS, Split.LATENT, Split.ALL_TOKENS, Split.EXPERTS)
"""Layers that tp does not cut; with sequence parallelism each rank uses them for its own tokens."""


def split(model: nn.Module, names: Iterable[str], description: Description, tensor: TensorParallel) -> None:
    """Convert the layers inside some submodules of a model into the forms that its description allows, in place."""
    if tensor.group is None:
        return
    pieces: dict[nn.Parameter, nn.Parameter] = {}
    for name in names:
        for inner, layer in list(model.get_submodule(name).named_modules(prefix=name)):
            how = description.split_of(inner)
            parts = next((sizes for pattern, sizes in description.parts.items() if matches(pattern, inner)), ())
            if parts:
                tensor.parts |= {f"{inner}.{own}": parts for own, _ in layer.named_parameters(recurse=False)}
            if how is Split.REGION:
                splits = (description.split_of(one) for one, _ in layer.named_modules(prefix=inner))
                _hook_region(layer, tensor, is_deep=Split.LATENT in splits)
            elif how is not None:
                divides = tensor.splits_tokens and divides_tokens_of(description, inner)
                _note_partial(layer, inner, how, description, tensor, divides_tokens=divides)
                _split_layer(layer, inner, how, tensor, pieces, divides_tokens=divides)
                _note_arguments(layer, inner, how, description, tensor, divides_tokens=divides)
                _check_cut(layer, inner, description, tensor)
            if tensor.splits_tokens and inner in description.token_blocks:
                divide_between(layer, inner, description, tensor)
            for pattern, numbers in description.per_rank.items():
                if matches(pattern, inner):
                    divide_attributes(layer, numbers, tensor.degree)
        cut_parameters(model.get_submodule(name), name, description, tensor)
    share_pieces(model, names, pieces, tensor.cuts)


def _note_partial(
    layer: nn.Module, name: str, how: Split, description: Description, tensor: TensorParallel, *, divides_tokens: bool
) -> None:
    """Note the parameters of a whole layer whose gradients are shares. A layer inside of it may be split by itself, as
    the shared experts of a mixture whose router has a bias."""
    if not (how in (Split.HEADS, Split.LATENT) or (how in WHOLE and divides_tokens)):
        return
    inside = [inner for inner, _ in layer.named_modules(prefix=name) if inner != name]
    others = [inner for inner in inside if description.split_of(inner) not in (None, *WHOLE)]
    every = (f"{name}.{own}" for own, _ in layer.named_parameters())
    tensor.partial.update(parameter for parameter in every if not is_inside(parameter, others))


def _split_layer(
    layer: Any,
    name: str,
    how: Split,
    tensor: TensorParallel,
    pieces: dict[nn.Parameter, nn.Parameter],
    *,
    divides_tokens: bool,
) -> None:
    if how in WHOLE or (how is Split.VOCABULARY and next(layer.children(), None) is not None):
        return
    if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
        return  # split by the model's author
    if isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse):
        raise ShoalError(
            f"{name} has max_norm, scale_grad_by_freq or sparse, which need the full embedding on one rank",
            fix="leave them out of that nn.Embedding, or tp=1",
            code="M048",
        )
    own: Any = type(layer)
    kind: Any = SPLIT_LAYERS.get((how, own)) or getattr(own, "split_forms", {}).get(how)
    if kind is None and how in (Split.COLUMN, Split.ROW) and (dims := linear_dims(layer)) is not None:
        kind = SPLIT_LAYERS[how, nn.Linear] if dims is PLAIN else TRANSPOSED_LAYERS[how]
    if kind is None and how is Split.VOCABULARY and isinstance(layer, nn.Embedding):
        kind = vocabulary_parallel(own)
    if kind is None:
        able = " or ".join(sorted({f"nn.{of.__name__}" for split_how, of in SPLIT_LAYERS if split_how is how}))
        raise ShoalError(
            f"{name} is a {type(layer).__name__}, which tensor parallelism cannot split by {how.value}",
            fix=f"make it an {able}, or write it with shoal.parallel.tensor.ColumnParallelLinear and RowParallelLinear",
            code="M049",
        )
    parts = tensor.parts.get(f"{name}.lora_B", ()) or tensor.parts.get(f"{name}.weight", ())
    become(layer, kind, tensor, pieces, parts)
    if callable(cut_rest := getattr(layer, "cut_rest", None)):  # of a weight that is no parameter
        cut_rest(name, parts)
    _note(layer, name, tensor)
    layer.sees_all_tokens = tensor.splits_tokens and not divides_tokens
    if kind is VocabularyParallelHead:
        tensor.num_logits = layer.out_features


def _note_arguments(
    layer: Any, name: str, how: Split, description: Description, tensor: TensorParallel, *, divides_tokens: bool
) -> None:
    """Let a layer see the tokens that it needs."""
    assert tensor.group is not None
    ways = description.sp_arguments_of(name)
    is_position = how is Split.SEQUENCE and type(layer) is nn.Embedding
    if is_position and divides_tokens and not description.token_blocks:  # between blocks it reads what a block has
        become(layer, PositionEmbedding, tensor, {})
    if how is Split.ALL_TOKENS and divides_tokens:
        gather_around(layer, tensor.group, ways)
    if how is Split.COLUMN and ways:  # of an encoder's output, also without `sp`
        layer.sees_all_tokens = "enter" in ways.values()
        layer.takes_rows = "gather" in ways.values()


def _hook_region(layer: nn.Module, tensor: TensorParallel, *, is_deep: bool) -> None:
    layer.register_forward_pre_hook(partial(tensor.enter_region, is_deep=is_deep), with_kwargs=True)
    layer.register_forward_hook(tensor.leave_region, always_call=True)  # recompute stops inside of a region


def _check_cut(layer: Any, name: str, description: Description, tensor: TensorParallel) -> None:
    """Reject a description that cuts a weight along another dim than the layer needs: predictions count by it."""
    weight = f"{name}.weight"
    said, cut = cut_dim(description, weight), tensor.cuts.get(weight)
    if cut is not None and said != cut:
        raise ShoalError(
            f"{weight} of a {type(layer).__name__} is cut along dim {cut}, but the description says {said}",
            fix=f'Description(cuts={{"{weight}": {cut}}})',
            code="M140",
        )


def note_split_layers(model: nn.Module, tensor: TensorParallel) -> dict[str, tuple[int, ...]]:
    """Record layers that the model's author has split; return their full shapes."""
    full_shapes: dict[str, tuple[int, ...]] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            if layer.weight.is_meta:
                raise ShoalError(
                    f"{name} is a {type(layer).__name__} on the meta device: it was cut before it had values",
                    fix="build it on the CPU, after the same torch.manual_seed on every rank",
                    code="M050",
                )
            _check_features_only(layer, name, tensor)
            _note(layer, name, tensor)
            full = (layer.out_features, layer.in_features)
            full_shapes |= {f"{name}.{own}": full[: p.dim()] for own, p in layer.named_parameters(recurse=False)}
    return full_shapes


def _check_features_only(layer: Any, name: str, tensor: TensorParallel) -> None:
    """Reject a layer that gathers or cuts features under sp, where a rank has only its tokens outside of the layer."""
    used = [word for word in ("gather_output=True", "input_is_parallel=False") if _is_set(layer, word)]
    if tensor.splits_tokens and used:
        raise ShoalError(
            f"{name} has {used[0]}, which needs all tokens on every rank, and sp=on divides them",
            fix=f"sp=off in the plan, or {name} without {used[0]}",
            code="T050",
        )


def _is_set(layer: Any, word: str) -> bool:
    name, value = word.split("=")
    return str(getattr(layer, name, None)) == value


def _note(layer: Any, name: str, tensor: TensorParallel) -> None:
    layer.full_name = name
    tensor.cuts |= {f"{name}.{own}": dim for own, dim in layer.cut.items() if getattr(layer, own, None) is not None}
    tensor.partial |= {f"{name}.{own}" for own in getattr(layer, "partial", ())}
    is_row = isinstance(layer, RowParallelLinear | RowParallelTransposed)
    if is_row and tensor.splits_tokens and layer.bias is not None:
        tensor.partial.add(f"{name}.bias")
