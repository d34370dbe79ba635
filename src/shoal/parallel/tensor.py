"""`tp`: the weights of each layer divided over ranks that all see the same samples.

torch gives DTensor styles (`ColwiseParallel`, ...), which send every operation of a split layer through DTensor's
dispatch, and with which torch's split backward of zero-bubble pipelines does not work. Here a rank holds plain tensors,
its own pieces, and the collectives stand where one can see them. One block, two ranks (x: full, x/2: half the tokens,
w|: half the columns, w-: half the rows; sums are over tp):

    sp=off   x ──[enter]── q| k| v| ── attention over half the heads ── o- ──[leave]── x
                enter: the backward sums;   leave: the forward sums
    sp=on    x/2 ─[enter]─ q| k| v| ── attention over half the heads ── o- ──[leave]── x/2
                enter: the forward gathers tokens, the backward sums and cuts;   leave: the other way round

With `sp` everything between two such regions (norms, residual stream) sees half the tokens. Weights that are used there
get the gradient of those tokens only. They are called *partial* and are summed over tp once a step, all together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.blueprint.description import Split, matches
from shoal.blueprint.layout import divisors
from shoal.comm.autograd_function import differentiable_once
from shoal.comm.collectives import Group, all_reduce, my_part, part
from shoal.comm.differentiable_collectives import TOKENS, enter, gather_last, gather_tokens, leave, scatter_tokens
from shoal.errors import ShoalError, listed
from shoal.numerics.precision import in_autocast_dtype


class TensorParallel:
    """The tp group of a rank and what its split layers share. Without a group it is the identity."""

    def __init__(self, group: Group = None, *, splits_tokens: bool = False) -> None:
        self.group = group
        self.splits_tokens = splits_tokens and group is not None
        """Whether sequence parallelism is on; a composed model's description may turn it on."""
        self.degree = 1 if group is None else group.size()
        self.index = 0 if group is None else dist.get_rank(group)
        self.cuts: dict[str, int] = {}
        """Full name of a parameter that is cut → the dim along which it is cut."""
        self.partial: set[str] = set()
        """Full names of parameters whose gradients have to be summed over tp."""
        self.num_logits = 0
        """The full vocabulary of a vocabulary-parallel head; 0: there is no such head."""
        self.keeps_logits_split = False
        self._outside: Tensor | None = None
        self._inside: Tensor | None = None

    def enter(self, x: Tensor) -> Tensor:
        """From what all ranks share into a split region. Queries, keys and values read one x: it enters once."""
        if self.group is None:
            return x
        if self._outside is not x or self._inside is None:
            self._outside = x
            wide = in_autocast_dtype(x)  # what the product would cast anyway, before it travels
            if self.splits_tokens:
                _check_tokens(wide)
                self._inside = gather_tokens(wide, self.group)
            else:
                self._inside = enter(wide, self.group)
        return self._inside

    def leave(self, x: Tensor) -> Tensor:
        """From the partial sums of a split region to what all ranks share."""
        self._outside = self._inside = None  # the region is over: let go of what it read
        if self.group is None:
            return x
        if self.splits_tokens:
            self._check_divisible(x)
            return scatter_tokens(x, self.group)
        return leave(x, self.group)

    def leave_logits(self, x: Tensor) -> Tensor:
        """Logits over this rank's part of the vocabulary; joined, unless a loss asked to have them split."""
        self._outside = self._inside = None
        if self.group is None or self.keeps_logits_split:
            return x
        return gather_last(x, self.group, self.num_logits)

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallel:
        """One for all parts of a model: groups are not copied."""
        return self

    def first_of(self, size: int) -> int:
        """Where this rank's part of `size` things begins."""
        return self.index * -(-size // self.degree)

    @contextmanager
    def split_logits(self) -> Iterator[None]:
        """Inside, a vocabulary-parallel head returns this rank's part of the logits."""
        before, self.keeps_logits_split = self.keeps_logits_split, True
        try:
            yield
        finally:
            self.keeps_logits_split = before

    def _check_divisible(self, x: Tensor) -> None:
        if x.shape[TOKENS] % self.degree:
            raise ShoalError(
                f"{x.shape[TOKENS]} tokens cannot be divided evenly over tp={self.degree} ranks",
                fix=f"sp=off in the plan, or a sequence length that {self.degree} divides",
            )


def _check_tokens(x: Tensor) -> None:
    if x.dim() < 3:
        raise ShoalError(
            f"sequence parallelism divides tokens, but an activation of shape {tuple(x.shape)} has none (samples,"
            " tokens, features), as after a mean over tokens",
            fix="sp=off in the plan",
        )


# ---- layers ---------------------------------------------------------------------------------------------------------


class ColumnParallelLinear(nn.Linear):
    """A linear layer of which this rank has some of the output features."""

    cut: ClassVar[dict[str, int]] = {"weight": 0, "bias": 0}
    """Parameter → the dim along which tp cuts it."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, tensor: TensorParallel) -> None:
        super().__init__(in_features, out_features, bias)
        _become(self, type(self), tensor, {})

    tensor: TensorParallel

    def forward(self, x: Tensor) -> Tensor:
        """What all ranks share → this rank's features."""
        _check_features(self, x, "all")
        return F.linear(self.tensor.enter(x), self.weight, self.bias)


class RowParallelLinear(nn.Linear):
    """A linear layer of which this rank has some of the input features, and sees only those."""

    cut: ClassVar[dict[str, int]] = {"weight": 1}

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, tensor: TensorParallel) -> None:
        super().__init__(in_features, out_features, bias)
        _become(self, type(self), tensor, {})

    tensor: TensorParallel

    def forward(self, x: Tensor) -> Tensor:
        """This rank's features → what all ranks share. The bias is added once, after the sum."""
        _check_features(self, x, "this rank's part of the")
        total = self.tensor.leave(F.linear(x, self.weight))
        return total if self.bias is None else total + self.bias.to(total.dtype)


class VocabularyParallelEmbedding(nn.Embedding):
    """An embedding of which this rank has the rows of some tokens."""

    cut: ClassVar[dict[str, int]] = {"weight": 0}
    tensor: TensorParallel

    def forward(self, tokens: Tensor) -> Tensor:
        """Rows of tokens that other ranks have are zero here, and come in with the sum."""
        first = self.tensor.first_of(self.num_embeddings)
        local = tokens - first
        is_token = (tokens >= 0) & (tokens < self.num_embeddings)  # anything else fails, as it does on one device
        elsewhere = ((local < 0) | (local >= self.weight.shape[0])) & is_token
        padding = None if self.padding_idx is None else self.padding_idx - first
        if padding is not None and not 0 <= padding < self.weight.shape[0]:
            padding = None  # another rank has it
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight, padding)
        return self.tensor.leave(rows.masked_fill(elsewhere[..., None], 0.0))


class VocabularyParallelHead(nn.Linear):
    """The last layer, of which this rank has the logits of some tokens."""

    cut: ClassVar[dict[str, int]] = {"weight": 0, "bias": 0}
    tensor: TensorParallel

    def forward(self, x: Tensor) -> Tensor:
        """What all ranks share → logits."""
        return self.tensor.leave_logits(F.linear(self.tensor.enter(x), self.weight, self.bias))


class PositionEmbedding(nn.Embedding):
    """A full embedding that looks up this rank's tokens only; for positions, under sequence parallelism."""

    cut: ClassVar[dict[str, int]] = {}
    tensor: TensorParallel

    def forward(self, tokens: Tensor) -> Tensor:
        """Ids of all tokens → rows of mine."""
        return super().forward(my_part(tokens, -1, self.tensor.group))


def _check_features(layer: nn.Linear, x: Tensor, which: str) -> None:
    if x.shape[-1] != layer.weight.shape[1]:
        kind = "COLUMN" if isinstance(layer, ColumnParallelLinear) else "ROW"
        name = getattr(layer, "full_name", type(layer).__name__)
        raise ShoalError(
            f"{name} is split by {kind} and takes {which} input features, {layer.weight.shape[1]}, not {x.shape[-1]}",
            fix="in splits: COLUMN for what reads from outside of a split region, ROW for what reads a COLUMN layer",
        )


def _become(module: Any, kind: Any, tensor: TensorParallel, pieces: dict[nn.Parameter, nn.Parameter]) -> None:
    """Turn a full layer into its split form, in place: names, attributes and hooks stay.

    `pieces` remembers what became of which parameter, so that two layers which share one share its piece.
    """
    module.__class__ = kind
    module.tensor = tensor
    for name, dim in kind.cut.items():
        full = getattr(module, name)
        if full is None:
            continue
        if full not in pieces:
            _check_enough(module, name, full.shape[dim], tensor)
            own = part(full.detach(), dim, index=tensor.index, degree=tensor.degree).clone()
            pieces[full] = nn.Parameter(own, requires_grad=full.requires_grad)
        setattr(module, name, pieces[full])


def _check_enough(module: nn.Module, name: str, size: int, tensor: TensorParallel) -> None:
    """Features are divided evenly, because the layer after them expects as many; a vocabulary need not be."""
    is_vocabulary = isinstance(module, VocabularyParallelEmbedding | VocabularyParallelHead)
    first_of_last = (tensor.degree - 1) * -(-size // tensor.degree)
    if first_of_last >= size or (size % tensor.degree and not is_vocabulary):
        raise ShoalError(
            f"the {size} {'rows' if is_vocabulary else 'features'} of {type(module).__name__}.{name} cannot be divided"
            f" over tp={tensor.degree} ranks",
            fix=f"tp={listed(divisors(size)[:8])}",
        )


def vocabulary_cross_entropy(logits: Tensor, labels: Tensor, tensor: TensorParallel, *, ignore: int) -> Tensor:
    """Cross-entropy, summed over labels that count, of logits over this rank's part of the vocabulary."""
    loss: Tensor = _VocabularyCrossEntropy.apply(logits, labels, tensor, ignore)  # type: ignore[no-untyped-call]
    return loss


class _VocabularyCrossEntropy(torch.autograd.Function):
    """loss = log Σ exp(l - m) + m - l[label], with the maximum m, the sum and l[label] taken over all ranks."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, tensor: TensorParallel, ignore: int) -> Tensor:
        counts = labels != ignore
        local = labels - tensor.first_of(tensor.num_logits)
        is_here = (local >= 0) & (local < logits.shape[-1]) & counts
        is_label = (labels >= 0) & (labels < tensor.num_logits)  # anything else fails, as it does on one device
        index = local.masked_fill((is_label & ~is_here) | ~counts, 0)[:, None]
        largest = all_reduce(logits.amax(-1), tensor.group, dist.ReduceOp.MAX)
        exponentials = (logits - largest[:, None]).exp_()
        target = logits.gather(-1, index)[:, 0].masked_fill(~is_here, 0.0)
        total, target = all_reduce(torch.stack([exponentials.sum(-1), target]), tensor.group)
        ctx.save_for_backward(exponentials.div_(total[:, None]), index, is_here, counts)
        loss: Tensor = ((total.log() + largest - target) * counts).sum()
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        differentiable_once()
        softmax, index, is_here, counts = ctx.saved_tensors
        grad = softmax * counts[:, None]
        grad.scatter_add_(-1, index, -is_here[:, None].to(grad.dtype))
        return grad.mul_(grads[0]), None, None, None


# ---- from a description to layers -----------------------------------------------------------------------------------

SPLIT_LAYERS: Mapping[tuple[Split, type[nn.Module]], type[nn.Module]] = {
    (Split.COLUMN, nn.Linear): ColumnParallelLinear,
    (Split.ROW, nn.Linear): RowParallelLinear,
    (Split.VOCABULARY, nn.Embedding): VocabularyParallelEmbedding,
    (Split.VOCABULARY, nn.Linear): VocabularyParallelHead,
}


WHOLE = (Split.SEQUENCE, Split.HEADS, Split.EXPERTS)
"""What tp does not cut; with sequence parallelism each rank uses it for its own tokens."""


def split(model: nn.Module, names: Iterable[str], splits: Mapping[str, Split], tensor: TensorParallel) -> None:
    """Turn the layers inside some submodules of a model into the forms that its description allows, in place."""
    if tensor.group is None:
        return
    pieces: dict[nn.Parameter, nn.Parameter] = {}
    for name in names:
        for inner, layer in list(model.get_submodule(name).named_modules(prefix=name)):
            how = next((kind for pattern, kind in splits.items() if matches(pattern, inner)), None)
            if how is not None:
                _split_layer(layer, inner, how, tensor, pieces)


def _split_layer(
    layer: Any, name: str, how: Split, tensor: TensorParallel, pieces: dict[nn.Parameter, nn.Parameter]
) -> None:
    names = [f"{name}.{own}" for own, _ in layer.named_parameters(recurse=how in WHOLE)]
    if how is Split.HEADS or (how in WHOLE and tensor.splits_tokens):
        tensor.partial.update(names)
    if how is Split.SEQUENCE and tensor.splits_tokens and type(layer) is nn.Embedding:
        _become(layer, PositionEmbedding, tensor, pieces)
    if how in WHOLE:
        return
    if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
        return  # the model's author has split it
    if type(layer) is nn.Embedding and (layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse):
        raise ShoalError(
            f"{name} has max_norm, scale_grad_by_freq or sparse, which no rank can carry out for its part alone",
            fix="leave them out of that nn.Embedding, or tp=1",
        )
    kind: Any = SPLIT_LAYERS.get((how, type(layer)))
    if kind is None:
        able = " or ".join(sorted({f"nn.{of.__name__}" for split_how, of in SPLIT_LAYERS if split_how is how}))
        raise ShoalError(
            f"{name} is a {type(layer).__name__}, which tensor parallelism cannot split by {how.value}",
            fix=f"make it an {able}, or write it with shoal.parallel.tensor.ColumnParallelLinear and RowParallelLinear",
        )
    _become(layer, kind, tensor, pieces)
    _note(layer, name, tensor)
    if kind is VocabularyParallelHead:
        tensor.num_logits = layer.out_features


def note_split_layers(model: nn.Module, tensor: TensorParallel) -> dict[str, tuple[int, ...]]:
    """Take note of layers that the model's author has split; returns the full shapes of what they hold."""
    full_shapes: dict[str, tuple[int, ...]] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            if layer.weight.is_meta:
                raise ShoalError(
                    f"{name} is a {type(layer).__name__} on the meta device: it has been cut before it has values",
                    fix="build it on the CPU, after the same torch.manual_seed on every rank",
                )
            _note(layer, name, tensor)
            full = (layer.out_features, layer.in_features)
            full_shapes |= {f"{name}.{own}": full[: p.dim()] for own, p in layer.named_parameters(recurse=False)}
    return full_shapes


def _note(layer: Any, name: str, tensor: TensorParallel) -> None:
    layer.full_name = name
    tensor.cuts |= {f"{name}.{own}": dim for own, dim in layer.cut.items() if getattr(layer, own, None) is not None}
    if isinstance(layer, RowParallelLinear) and tensor.splits_tokens and layer.bias is not None:
        tensor.partial.add(f"{name}.bias")
