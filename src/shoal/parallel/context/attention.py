"""`cp`: the tokens of every sequence divided over ranks, which attend to each other's tokens.

Between two attentions a model computes each token on its own, so a rank can do so for its tokens. This file does
everything that the division needs, and nothing is left to the user:

    batch      tokens, labels, ... of a sample are cut alike: (B, T) → (B, T/c), in the order that balances the work
    model      gets the positions of its tokens, in the argument that its description names
    attention  `Attention`, which a model calls in place of torch's `scaled_dot_product_attention`, attends over ranks
    loss       is a sum over tokens already (`train.loss`), and gradients are summed over cp as over samples

torch has `context_parallel`, which needs shifted labels, listed buffers and outputs reordered by hand.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.blueprint.context_parallel import contiguous, zigzag
from shoal.blueprint.description import Description
from shoal.comm.collectives import all_gather
from shoal.errors import ShoalError
from shoal.numerics.ops.attention import PLAIN, AttentionRule
from shoal.numerics.ops.attention_kernels import Backend, attended
from shoal.parallel.context.ring import ring_attention
from shoal.parallel.context.ulysses import ulysses_attention


class ContextParallel:
    """The cp group of a rank, and the tokens of a sequence that each of its ranks has."""

    def __init__(
        self, group: dist.ProcessGroup, *, kind: Literal["ring", "ulysses"], comm_device: torch.device
    ) -> None:
        self.group, self.kind, self.comm_device = group, kind, comm_device
        self.degree, self.index = group.size(), dist.get_rank(group)
        self.num_tokens: int | None = None
        """The length of the full sequences that were cut last."""

    def indices(self, num_tokens: int, index: int | None = None, device: torch.device | str = "cpu") -> Tensor:
        """Return the positions of a rank's tokens in a sequence of `num_tokens`; `index` None: of this rank."""
        order = zigzag if self.kind == "ring" else contiguous
        ranges = order(num_tokens, self.index if index is None else index, self.degree)
        return torch.cat([torch.arange(start, stop, device=device) for start, stop in ranges])

    def part(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return my tokens of full sequences."""
        self._check(x.shape[dim])
        return x.index_select(dim, self.indices(x.shape[dim], device=x.device))

    def join(self, x: Tensor, dim: int = 1) -> Tensor:
        """Invert `part`: join the tokens of all ranks to full sequences."""
        joined = all_gather(x, dim, self.group)
        order = torch.cat([self.indices(joined.shape[dim], index, x.device) for index in range(self.degree)])
        return joined.index_select(dim, order.argsort())

    def _check(self, num_tokens: int) -> None:
        chunks = 2 * self.degree if self.kind == "ring" else self.degree
        if num_tokens % chunks:
            around = sorted({max(1, num_tokens // chunks) * chunks, -(-num_tokens // chunks) * chunks})
            raise ShoalError(
                f"the sequence length must be divisible by {chunks} for cp={self.degree}, got {num_tokens}",
                fix=f"--data.seq_len {' or '.join(map(str, around))}, or another cp",
                code="P036",
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallel:
        """Return the same object: all parts of a model share it, and groups cannot be copied."""
        return self


# ---- what a model calls ---------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Softmax attention that also works under context parallelism (`cp`).

    On one device it is `scaled_dot_product_attention`, with query heads that share key/value heads. Under `cp` a rank's
    tokens attend to the tokens of all ranks. `causal`: a token sees no later one.

    >>> q, k, v = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16), torch.randn(2, 2, 8, 16)  # 4 heads share 2
    >>> tuple(Attention()(q, k, v).shape)
    (2, 4, 8, 16)
    """

    def __init__(self, *, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.backend: Backend = "auto"
        self.context: ContextParallel | None = None

    def forward(
        self,
        q_BNTH: Tensor,
        k_BKTH: Tensor,
        v_BKTH: Tensor,
        mask: Tensor | None = None,
        *,
        rule: AttentionRule = PLAIN,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """(B, N, T, H) → (B, N, T, H). `mask` is the result of a `DocumentMask`; or (B, T) booleans, whether a key may
        be seen, of the full sequence; or None. `rule` has the scale of scores, a window and the like. `sinks` (N,): the
        score of a key without a value, which every query of a head sees."""
        context = self.context
        if context is not None:
            _check_attention(q_BNTH, v_BKTH, mask, context)
            _check_rule(rule, context)
        elif mask is not None and not (mask.dtype == torch.bool or mask.is_floating_point()):
            raise ShoalError(
                f"a mask must be of booleans or floating-point scores, got {mask.dtype}, as of document numbers",
                fix="self.mask = shoal.DocumentMask(), and self.attention(q, k, v, self.mask(documents))",
                code="M027",
            )
        on_one_device = partial(attended, causal=self.causal, backend=self.backend, rule=rule)
        if context is None or q_BNTH.is_meta:  # meta tensors have one rank's shapes and no values
            return on_one_device(q_BNTH, k_BKTH, v_BKTH, mask if context is None else None, sinks=sinks)
        if context.kind == "ring":
            return ring_attention(  # type: ignore[no-any-return]
                q_BNTH, k_BKTH, v_BKTH, mask, context, causal=self.causal, rule=rule, sinks=sinks
            )
        own_sinks = None if sinks is None else sinks.view(context.degree, -1)[context.index]
        with_mask = partial(on_one_device, mask=mask, sinks=own_sinks)
        out: Tensor = ulysses_attention(q_BNTH, k_BKTH, v_BKTH, with_mask, context.group, context.comm_device)
        return out


class DocumentMask(nn.Module):
    """The mask of `Attention` for packed samples: a token sees its own document only.

    >>> documents = torch.tensor([[0, 0, 1]])  # three tokens: two of the first document, one of the second
    >>> DocumentMask()(documents).int().tolist()
    [[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]
    """

    def __init__(self, *, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.context: ContextParallel | None = None

    def forward(self, documents_BT: Tensor | None) -> Tensor | None:
        """Compute the mask once for all layers. A ring masks block by block, and never allocates a full mask."""
        if documents_BT is None or (self.context is not None and self.context.kind == "ring"):
            return documents_BT
        return same_document(documents_BT, causal=self.causal)


def _check_attention(q_BNTH: Tensor, v_BKTH: Tensor, mask: Tensor | None, context: ContextParallel) -> None:
    """Reject what works on one device, but not with divided tokens."""
    own = None if context.num_tokens is None else context.num_tokens // context.degree
    if own is not None and q_BNTH.shape[2] != own and q_BNTH.shape[1] == own and not q_BNTH.is_meta:
        raise ShoalError(
            f"attention must be called with (samples, heads, tokens, features), got queries of shape"
            f" {tuple(q_BNTH.shape)}, with {own} tokens in the place of heads",
            fix="q, k, v = (x.transpose(1, 2) for x in (q, k, v))",
            code="M028",
        )
    if v_BKTH.shape[-1] != q_BNTH.shape[-1]:
        raise ShoalError(
            f"values and queries must have equally many features under cp={context.degree}, got {v_BKTH.shape[-1]} and"
            f" {q_BNTH.shape[-1]}",
            fix="cp=1, or as many features in both",
            code="M029",
        )
    if context.kind == "ulysses" and q_BNTH.shape[1] % context.degree:
        raise ShoalError(
            f"the number of heads must be divisible by cp={context.degree} under ulysses, got {q_BNTH.shape[1]}",
            fix="ring instead of ulysses, or a cp that divides the heads",
            code="P037",
        )
    full = (q_BNTH.shape[0], q_BNTH.shape[2] * context.degree)
    is_of_tokens = mask is not None and tuple(mask.shape) == full and not mask.is_floating_point()
    if context.kind == "ring" and mask is not None and not is_of_tokens:
        raise ShoalError(
            f"ring attention builds its masks from documents, got a mask of shape {tuple(mask.shape)}",
            fix="shoal.DocumentMask, or ulysses instead of ring",
            code="M030",
        )


def _check_rule(rule: AttentionRule, context: ContextParallel) -> None:
    if rule.dropout:
        raise ShoalError(
            f"attention weights cannot be dropped under cp={context.degree}, got a dropout of {rule.dropout}",
            fix="a dropout of attention of 0, or cp=1",
            code="P066",
        )


def same_document(documents_BT: Tensor, *, causal: bool = True) -> Tensor:
    """Return mask_BTT: whether the token of a row may see the token of a column, which is in the same document and, if
    causal, not later."""
    mask_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
    return mask_BTT.tril() if causal else mask_BTT


def positions_in_documents(documents_BT: Tensor) -> Tensor:
    """Return how many tokens of its own document precede each token. A document is contiguous."""
    places_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    begins_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    begins_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    return places_T - (places_T * begins_BT).cummax(dim=1).values


# ---- from a description to a divided model --------------------------------------------------------------------------


def divide(model: nn.Module, description: Description, context: ContextParallel, *, is_compiled: bool = False) -> None:
    """Make the attentions of a model attend over ranks, and pass the model the positions of its tokens."""
    modules = [module for module in model.modules() if isinstance(module, Attention | DocumentMask)]
    if len({module.causal for module in modules}) > 1:
        raise ShoalError(
            "Attention and DocumentMask of a model must all be causal or all not under ring attention, got both",
            fix="the same causal= for all of them",
            code="M031",
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
        if name not in signature.parameters:  # it is part of **options
            return arguments, {**options, name: places}
        bound.arguments[name] = places
        return bound.args, bound.kwargs

    model.register_forward_pre_hook(tell, with_kwargs=True)
    if not is_compiled:  # a compiler recompiles whenever a hook is added or removed
        _expect_calls(model, [module for module in modules if isinstance(module, Attention)])


def _expect_calls(model: nn.Module, attentions: list[Attention]) -> None:
    """Reject a model whose first forward calls none of them: its tokens would see only their own rank's."""
    calls: list[int] = []
    hooks = [attention.register_forward_pre_hook(lambda *_: calls.append(1)) for attention in attentions]

    def look(_model: nn.Module, *_: Any) -> None:
        while hooks:
            hooks.pop().remove()
        if attentions and not calls:
            raise ShoalError(
                "the model must call its shoal.Attention, got a forward without a call: under cp a token would see only"
                " its own rank's tokens",
                fix="self.attention(q, k, v) in place of scaled_dot_product_attention(q, k, v)",
                code="M032",
            )

    hooks.append(model.register_forward_hook(look))


def _places(tokens_BT: Tensor, documents_BT: Tensor | None, context: ContextParallel) -> Tensor:
    """Return the position of each of this rank's tokens in its sequence, or in its document."""
    if documents_BT is not None:
        return context.part(positions_in_documents(documents_BT))
    return context.indices(tokens_BT.shape[1] * context.degree, device=tokens_BT.device)[None]


def _check_call(tokens: Tensor, documents: Any, context: ContextParallel) -> None:
    num_total = context.num_tokens
    if num_total is None and not tokens.is_meta:
        raise ShoalError(
            f"under cp={context.degree} the model must be called with this rank's tokens, but no batch was cut yet",
            fix="model(run.own_tokens(batch)), or a batch of run.batches or run.microbatches",
            code="M033",
        )
    if num_total is not None and tokens.shape[1] * context.degree != num_total:
        raise ShoalError(
            f"under cp={context.degree} the model must be called with {num_total // context.degree} of the last batch's"
            f" {num_total} tokens, got {tokens.shape[1]}",
            fix="model(run.own_tokens(batch)), or a batch of run.batches or run.microbatches",
            code="M033",
        )
    if isinstance(documents, Tensor) and num_total is not None and documents.shape[1] != num_total:
        raise ShoalError(
            f"documents must cover all {num_total} tokens, got {documents.shape[1]}",
            fix="batches that are mappings, with the documents under the name of the model's argument",
            code="M034",
        )


CUT = "_is_cut_for_shoal"
"""Marks a tensor as a rank's own tokens, so that it is not cut again."""


def cut_batch(batch: Any, description: Description, context: ContextParallel) -> Any:
    """Return a rank's tokens of every tensor in a batch whose second dim is tokens. Documents stay full: a token's mask
    depends on other tokens'. Tensors that were cut already stay unchanged."""
    if is_cut(batch):
        return batch
    num_tokens = _num_tokens(batch)
    if description.max_tokens is not None and num_tokens > description.max_tokens:
        raise ShoalError(
            f"a sequence must have at most the model's {description.max_tokens} tokens, got {num_tokens}",
            fix=f"max_sequence: {num_tokens} for the model, or shorter sequences",
            code="D034",
        )
    context.num_tokens = num_tokens
    return _cut(batch, num_tokens, description.documents, context)


def is_cut(batch: Any) -> bool:
    """Whether a batch has a rank's own tokens only."""
    return any(hasattr(x, CUT) for x in _tensors(batch))


def mark_cut(batch: Any, context: ContextParallel) -> None:
    """Mark a batch that was derived from one that had been cut, such as its copy on a device, by its token counts."""
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
    """Return the second dim of the labels if there are any, else of the first tensor with two dims."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    candidates = [x for x in (labels, *_tensors(batch)) if isinstance(x, Tensor) and x.dim() > 1]
    if not candidates:
        raise ShoalError(
            "context parallelism needs a tensor of (samples, tokens, ...) in the batch, got none",
            fix="batches of (samples, tokens, ...), or cp=1",
            code="M035",
        )
    return int(candidates[0].shape[1])


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from (x for one in value.values() for x in _tensors(one))
    elif isinstance(value, tuple | list):
        yield from (x for one in value for x in _tensors(one))
