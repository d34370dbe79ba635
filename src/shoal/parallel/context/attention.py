"""`cp`: the tokens of every sequence divided over ranks, which attend to each other's.

All that a model does between two attentions, it does for each token alone, so a rank can do it for its own. What it
takes to divide tokens is done here, and never by the user:

    batch    tokens, labels, ... of a sample are cut alike: (B, T) → (B, T/c), in the order that balances the work
    model    is told at which places of its sequence its tokens are, by the argument that its description names
    attention  `Attention`, which a model calls in place of torch's `scaled_dot_product_attention`, asks the other ranks
    loss     is a sum over tokens already (`train.objective`), and gradients are summed over cp as over samples

torch gives `context_parallel`, under which labels have to be shifted, buffers listed and outputs put in order by hand.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from shoal.blueprint.context_parallel import contiguous, zigzag
from shoal.blueprint.description import Description
from shoal.comm.collectives import all_gather
from shoal.errors import ShoalError
from shoal.numerics.ops.attention import for_every_head
from shoal.parallel.context.ring import ring_attention
from shoal.parallel.context.ulysses import ulysses_attention

Backend = Literal["auto", "cudnn", "flash", "efficient", "math"]
_FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Of those that take a given shape. On an H200, cuDNN needs 0.64 of the time of flash attention."""
BACKENDS: Mapping[Backend, list[SDPBackend]] = {
    "auto": _FASTEST_FIRST,
    **dict(zip(("cudnn", "flash", "efficient", "math"), ([one] for one in _FASTEST_FIRST), strict=True)),
}


class ContextParallel:
    """The cp group of a rank, and which tokens of a sequence each of its ranks has."""

    def __init__(
        self, group: dist.ProcessGroup, *, kind: Literal["ring", "ulysses"], comm_device: torch.device
    ) -> None:
        self.group, self.kind, self.comm_device = group, kind, comm_device
        self.degree, self.index = group.size(), dist.get_rank(group)
        self.num_tokens: int | None = None
        """Of the whole sequences that were cut last."""

    def indices(self, num_tokens: int, index: int | None = None, device: torch.device | str = "cpu") -> Tensor:
        """Where in a sequence of `num_tokens` the tokens of a rank are; of this one, unless another is asked for."""
        order = zigzag if self.kind == "ring" else contiguous
        ranges = order(num_tokens, self.index if index is None else index, self.degree)
        return torch.cat([torch.arange(start, stop, device=device) for start, stop in ranges])

    def part(self, x: Tensor, dim: int = 1) -> Tensor:
        """My tokens of whole sequences."""
        self._check(x.shape[dim])
        return x.index_select(dim, self.indices(x.shape[dim], device=x.device))

    def join(self, x: Tensor, dim: int = 1) -> Tensor:
        """The inverse of `part`: whole sequences, from the tokens of all ranks."""
        joined = all_gather(x, dim, self.group)
        order = torch.cat([self.indices(joined.shape[dim], index, x.device) for index in range(self.degree)])
        return joined.index_select(dim, order.argsort())

    def _check(self, num_tokens: int) -> None:
        chunks = 2 * self.degree if self.kind == "ring" else self.degree
        if num_tokens % chunks:
            around = sorted({max(1, num_tokens // chunks) * chunks, -(-num_tokens // chunks) * chunks})
            raise ShoalError(
                f"a sequence of {num_tokens} tokens cannot be cut into {chunks} chunks for cp={self.degree}",
                fix=f"sequences of {' or '.join(map(str, around))} tokens (--data.seq_len), or another cp",
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallel:
        """One for all parts of a model: groups are not copied."""
        return self


# ---- what a model calls ---------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Softmax attention of query heads to the key/value heads that they share: `scaled_dot_product_attention` on one
    device; under context parallelism, to the tokens of all ranks."""

    def __init__(self, *, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.backend: Backend = "auto"
        self.context: ContextParallel | None = None

    def forward(self, q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, N, T, H) → (B, N, T, H). `mask` is what a `DocumentMask` has returned, or None."""
        context = self.context
        if context is not None:
            _check_attention(q_BNTH, v_BKTH, mask, context)
        elif mask is not None and not (mask.dtype == torch.bool or mask.is_floating_point()):
            raise ShoalError(
                f"a mask of {mask.dtype} says which document a token is of, not what it may see",
                fix="self.mask = shoal.DocumentMask(), and self.attention(q, k, v, self.mask(documents))",
            )
        if context is None or q_BNTH.is_meta:  # without values there are only shapes, and those are of one rank
            own_mask = mask if context is None else None
            return attended(q_BNTH, k_BKTH, v_BKTH, own_mask, causal=self.causal, backend=self.backend)
        if context.kind == "ring":
            out: Tensor = ring_attention(q_BNTH, k_BKTH, v_BKTH, mask, context, causal=self.causal)
        else:
            on_one_device = partial(attended, mask_BTT=mask, causal=self.causal, backend=self.backend)
            out = ulysses_attention(q_BNTH, k_BKTH, v_BKTH, on_one_device, context.group, context.comm_device)
        return out


class DocumentMask(nn.Module):
    """From the document of each token to what `Attention` takes as a mask: a token sees its own document only."""

    def __init__(self, *, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.context: ContextParallel | None = None

    def forward(self, documents_BT: Tensor | None) -> Tensor | None:
        """Once for all layers. A ring makes its masks block by block, and none is of the size of a whole sequence."""
        if documents_BT is None or (self.context is not None and self.context.kind == "ring"):
            return documents_BT
        return same_document(documents_BT, causal=self.causal)


def _check_attention(q_BNTH: Tensor, v_BKTH: Tensor, mask: Tensor | None, context: ContextParallel) -> None:
    """What one device can do, and ranks that divide the tokens cannot."""
    own = None if context.num_tokens is None else context.num_tokens // context.degree
    if own is not None and q_BNTH.shape[2] != own and q_BNTH.shape[1] == own and not q_BNTH.is_meta:
        raise ShoalError(
            f"attention takes (samples, heads, tokens, features), and queries of shape {tuple(q_BNTH.shape)} have their"
            f" {own} tokens where heads belong",
            fix="q, k, v = (x.transpose(1, 2) for x in (q, k, v))",
        )
    if v_BKTH.shape[-1] != q_BNTH.shape[-1]:
        raise ShoalError(
            f"values of {v_BKTH.shape[-1]} features and queries of {q_BNTH.shape[-1]} cannot travel in one message",
            fix=f"as many features in both, or cp=1 instead of cp={context.degree}",
        )
    if context.kind == "ulysses" and q_BNTH.shape[1] % context.degree:
        raise ShoalError(
            f"ulysses deals {q_BNTH.shape[1]} heads to cp={context.degree} ranks, which does not come out even",
            fix="ring instead of ulysses, or a cp that divides the heads",
        )
    is_documents = mask is not None and mask.dim() == 2 and mask.dtype != torch.bool and not mask.is_floating_point()
    if context.kind == "ring" and mask is not None and not is_documents:
        raise ShoalError(
            f"a ring makes its masks from documents, and cannot use a mask of shape {tuple(mask.shape)}",
            fix="shoal.DocumentMask, or ulysses instead of ring",
        )


def attended(
    q_BNTH: Tensor,
    k_BKTH: Tensor,
    v_BKTH: Tensor,
    mask_BTT: Tensor | None,
    *,
    causal: bool,
    backend: Backend = "auto",
) -> Tensor:
    """Softmax attention of every query head to the key/value head that it shares with its neighbours."""
    if q_BNTH.is_cuda and q_BNTH.dtype == torch.float32:
        # torch's float32 kernel for CUDA knows no shared heads; asked for them, torch writes down all T x T scores.
        k_BKTH, v_BKTH = (for_every_head(x, q_BNTH.shape[1]) for x in (k_BKTH, v_BKTH))
    mask_B1TT = None if mask_BTT is None else mask_BTT[:, None]
    is_half = q_BNTH.dtype in (torch.bfloat16, torch.float16)
    if not q_BNTH.is_cuda or (backend == "auto" and not (is_half and mask_BTT is None)):
        return F.scaled_dot_product_attention(
            q_BNTH, k_BKTH, v_BKTH, attn_mask=mask_B1TT, is_causal=causal and mask_BTT is None, enable_gqa=True
        )
    with sdpa_kernel(BACKENDS[backend], set_priority=True):
        return F.scaled_dot_product_attention(
            q_BNTH, k_BKTH, v_BKTH, attn_mask=mask_B1TT, is_causal=causal and mask_BTT is None, enable_gqa=True
        )


def same_document(documents_BT: Tensor, *, causal: bool = True) -> Tensor:
    """mask_BTT: whether the token of a row may see the token of a column, which is in the same document and, if
    causal, not later."""
    mask_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
    return mask_BTT.tril() if causal else mask_BTT


def positions_in_documents(documents_BT: Tensor) -> Tensor:
    """How many tokens of its own document come before each token. A document is in one piece."""
    places_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    begins_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    begins_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    return places_T - (places_T * begins_BT).cummax(dim=1).values


# ---- from a description to a divided model --------------------------------------------------------------------------


def divide(model: nn.Module, description: Description, context: ContextParallel, *, is_compiled: bool = False) -> None:
    """Let the attentions of a model ask the other ranks, and tell the model where its tokens are."""
    modules = [module for module in model.modules() if isinstance(module, Attention | DocumentMask)]
    if len({module.causal for module in modules}) > 1:
        raise ShoalError(
            "some of the model's Attention and DocumentMask are causal and some are not: a ring could not obey both",
            fix="the same causal= for all of them",
        )
    for module in modules:
        module.context = context
    signature = inspect.signature(model.forward)

    def tell(_model: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        bound = signature.bind(*arguments, **options)
        given = {**bound.arguments, **bound.kwargs}
        first = next((x for x in (*bound.args, *bound.kwargs.values()) if isinstance(x, Tensor)), None)
        name, documents = description.positions, given.get(description.documents or "")
        assert name is not None
        if first is None or given.get(name) is not None:
            return arguments, options
        _check_call(first, documents, context)
        places = _places(first, documents if description.positions_restart else None, context)
        if name not in signature.parameters:  # it is one of **options
            return arguments, {**options, name: places}
        bound.arguments[name] = places
        return bound.args, bound.kwargs

    model.register_forward_pre_hook(tell, with_kwargs=True)
    if not is_compiled:  # for which every hook that comes and goes is another model
        _expect_calls(model, [module for module in modules if isinstance(module, Attention)])


def _expect_calls(model: nn.Module, attentions: list[Attention]) -> None:
    """Refuse a model whose first forward went by all of them: its tokens have seen only those of their own rank."""
    calls: list[int] = []
    hooks = [attention.register_forward_pre_hook(lambda *_: calls.append(1)) for attention in attentions]

    def look(_model: nn.Module, *_: Any) -> None:
        while hooks:
            hooks.pop().remove()
        if attentions and not calls:
            raise ShoalError(
                "the model has a shoal.Attention and did not call it: under cp a token would see its own rank's only",
                fix="self.attention(q, k, v) in place of scaled_dot_product_attention(q, k, v)",
            )

    hooks.append(model.register_forward_hook(look))


def _places(tokens_BT: Tensor, documents_BT: Tensor | None, context: ContextParallel) -> Tensor:
    """Where in its sequence, or in its document, each of this rank's tokens is."""
    if documents_BT is not None:
        return context.part(positions_in_documents(documents_BT))
    return context.indices(tokens_BT.shape[1] * context.degree, device=tokens_BT.device)[None]


def _check_call(tokens: Tensor, documents: Any, context: ContextParallel) -> None:
    num_total = context.num_tokens
    if num_total is None and not tokens.is_meta:
        raise ShoalError(
            f"under cp={context.degree} the model is called with the rank's own tokens, and no batch was cut yet",
            fix="call it with what run.batches, run.microbatches or run.own_tokens(batch) has given",
        )
    if num_total is not None and tokens.shape[1] * context.degree != num_total:
        raise ShoalError(
            f"under cp={context.degree} the model must be called with {num_total // context.degree} of the last batch's"
            f" {num_total} tokens, got {tokens.shape[1]}",
            fix="call it with what run.batches, run.microbatches or run.own_tokens(batch) has given",
        )
    if isinstance(documents, Tensor) and num_total is not None and documents.shape[1] != num_total:
        raise ShoalError(
            f"documents have to be whole, for all {num_total} tokens, and these are for {documents.shape[1]}",
            fix="batches that are mappings, with the documents under the name of the model's argument",
        )


CUT = "_is_cut_for_shoal"
"""Marks a tensor as a rank's own tokens, so that nobody cuts it again."""


def cut_batch(batch: Any, description: Description, context: ContextParallel) -> Any:
    """A rank's tokens of every tensor in a batch whose second dim are tokens. Documents stay whole: every token's mask
    is made of others'. What has been cut stays as it is."""
    if any(hasattr(x, CUT) for x in _tensors(batch)):
        return batch
    num_tokens = _num_tokens(batch)
    if description.max_tokens is not None and num_tokens > description.max_tokens:
        raise ShoalError(
            f"a sequence of {num_tokens} tokens is longer than the {description.max_tokens} that the model takes",
            fix=f"max_sequence: {num_tokens} for the model, or shorter sequences",
        )
    context.num_tokens = num_tokens
    return _cut(batch, num_tokens, description.documents, context)


def mark_cut(batch: Any, context: ContextParallel) -> None:
    """Of a batch that was made of one that had been cut: copied to a device, say. What has as many tokens is cut."""
    for x in _tensors(batch):
        if x.dim() > 1 and x.shape[1] * context.degree == context.num_tokens:
            setattr(x, CUT, True)


def _cut(value: Any, num_tokens: int, documents: str | None, context: ContextParallel) -> Any:
    if isinstance(value, Mapping):
        return {name: x if name == documents else _cut(x, num_tokens, documents, context) for name, x in value.items()}
    if isinstance(value, tuple | list):
        parts = [_cut(x, num_tokens, documents, context) for x in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != num_tokens:
        return value
    own = context.part(value)
    setattr(own, CUT, True)
    return own


def _num_tokens(batch: Any) -> int:
    """The second dim of the labels, if there are such; else of the first tensor that has two."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    candidates = [x for x in (labels, *_tensors(batch)) if isinstance(x, Tensor) and x.dim() > 1]
    if not candidates:
        raise ShoalError(
            "context parallelism divides the tokens of a batch, and no tensor of this one has any",
            fix="batches of (samples, tokens, ...), or cp=1",
        )
    return int(candidates[0].shape[1])


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from (x for one in value.values() for x in _tensors(one))
    elif isinstance(value, tuple | list):
        yield from (x for one in value for x in _tensors(one))
