"""`tp`: the weights of each layer divided over ranks that all see the same samples.

torch has DTensor styles (`ColwiseParallel`, ...), which send every operation of a split layer through DTensor's
dispatch, and do not work with torch's split backward of zero-bubble pipelines. Here a rank has plain tensors, its own
pieces, and the collectives are explicit. One block, two ranks (x: full, x/2: half the tokens, w|: half the columns,
w-: half the rows; sums are over tp):

    sp=off   x ──[enter]── q| k| v| ── attention over half the heads ── o- ──[leave]── x
                enter: the backward sums;   leave: the forward sums
    sp=on    x/2 ─[enter]─ q| k| v| ── attention over half the heads ── o- ──[leave]── x/2
                enter: the forward gathers tokens, the backward sums and cuts;   leave: the inverse

With `sp` everything between two such regions (norms, residual stream) sees half the tokens. Weights that are used there
get the gradient of those tokens only. They are called *partial* and are summed over tp once a step, all together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.blueprint.layout import divisors
from shoal.comm.collectives import Group, my_part
from shoal.comm.differentiable_collectives import (
    TOKENS,
    enter,
    gather_last,
    gather_tokens,
    leave,
    scatter_last,
    scatter_tokens,
)
from shoal.errors import ShoalError, listed
from shoal.numerics.precision import in_autocast_dtype
from shoal.parallel.tensor_parts.packed import cut

ATTENTION_FLAGS = ("is_causal", "causal")
"""What attentions of transformers, and `shoal.Attention`, say of themselves."""


MOST_NODES = 64
"""Steps of a computation that are followed back to the input of a region."""


class TensorParallel:
    """The tp group of a rank and the state that its split layers share. Without a group it is the identity."""

    def __init__(self, group: Group = None, *, splits_tokens: bool = False) -> None:
        self.group = group
        self.splits_tokens = splits_tokens and group is not None
        """Whether sequence parallelism is on; a composed model's description may turn it on."""
        self.degree = 1 if group is None else group.size()
        self.index = 0 if group is None else dist.get_rank(group)
        self.cuts: dict[str, int] = {}
        """Full name of a parameter that is cut → the dim along which it is cut."""
        self.parts: dict[str, tuple[int, ...]] = {}
        """Full name of a parameter of which each part is cut → the sizes of its parts along that dim."""
        self.partial: set[str] = set()
        """Full names of parameters whose gradients must be summed over tp."""
        self.num_logits = 0
        """The full vocabulary of a vocabulary-parallel head; 0: there is none."""
        self.keeps_logits_split = False
        self._outside: Tensor | None = None
        self._inside: Tensor | None = None
        self._region: Tensor | None = None
        """The input of the region that is running, if it entered before the region's first layer."""
        self._is_deep = False
        """Whether layers of that region may read what whole layers inside of it compute."""
        self._takes_rows = False
        """Whether a region may read samples and tokens as one dim: it is no attention, and computes each row alone."""

    def enter(self, x: Tensor, *, all_tokens: bool = False, takes_rows: bool = False) -> Tensor:
        """Pass a replicated tensor into a split region. Queries, keys and values read one x: it enters once.
        `all_tokens`: `sp` does not divide those of x. `takes_rows`: samples and tokens may be one dim of it."""
        if self.group is None:
            return x
        if self._region is not None and not all_tokens:
            if x is not self._region and not self._is_deep and not _is_computed_of(x, self._region):
                raise ShoalError(
                    "a layer that is split by COLUMN must read the input of its region, got another tensor",
                    fix="tp=1, or a description without Split.REGION for it",
                    code="M060",
                )
            return x
        if self._outside is not x or self._inside is None:
            self._outside = x
            wide = in_autocast_dtype(x)  # cast before it is sent, as the product would
            if self.splits_tokens and not all_tokens:
                if not (self._takes_rows or takes_rows):
                    _check_tokens(wide)
                self._inside = gather_tokens(wide, self.group)
            else:
                self._inside = enter(wide, self.group)
        return self._inside

    def enter_layer(self, layer: Any, x: Tensor) -> Tensor:
        """Pass a replicated tensor into a layer that is split by COLUMN, as its description says."""
        all_tokens, takes_rows = (bool(getattr(layer, name, False)) for name in ("sees_all_tokens", "takes_rows"))
        return self.enter(x, all_tokens=all_tokens, takes_rows=takes_rows)

    def enter_region(
        self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], *, is_deep: bool = False
    ) -> Any:
        """A hook before a region: its input, the first argument or `hidden_states`, enters. Code inside that reads the
        shape of its input then sees all tokens, as its layers do."""
        self._is_deep = is_deep
        self._region = None  # a recomputation ends inside of a region, as soon as it has all that was saved
        self._takes_rows = not _has_attention(module)
        if arguments and isinstance(arguments[0], Tensor):
            self._region = self.enter(arguments[0])
            return (self._region, *arguments[1:]), options
        self._region = self.enter(options["hidden_states"])
        return arguments, {**options, "hidden_states": self._region}

    def leave_region(self, *_: Any) -> None:
        """A hook after a region."""
        self._region, self._takes_rows = None, False

    def leave(self, x: Tensor, *, all_tokens: bool = False) -> Tensor:
        """Sum the partial results of a split region into a replicated tensor; `all_tokens`: without dividing it."""
        self._outside = self._inside = None  # the region has ended: release what it read
        if self.group is None:
            return x
        if self.splits_tokens and not all_tokens:
            self.check_divisible(x)
            return scatter_tokens(x, self.group)
        return leave(x, self.group)

    def leave_logits(self, x: Tensor) -> Tensor:
        """Join the logits of all ranks' parts of the vocabulary, unless a loss takes them split."""
        self._outside = self._inside = None
        if self.group is None or self.keeps_logits_split:
            return x
        return gather_last(x, self.group, self.num_logits)

    def leave_features(self, x: Tensor, size: int) -> Tensor:
        """Join the features of all ranks, `size` in all."""
        self._outside = self._inside = None
        return x if self.group is None else gather_last(x, self.group, size)

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallel:
        """Return the same object: all parts of a model share it, and groups cannot be copied."""
        return self

    def first_of(self, size: int) -> int:
        """Return where this rank's part of `size` things begins."""
        return self.index * -(-size // self.degree)

    @contextmanager
    def split_logits(self) -> Iterator[None]:
        """Make a vocabulary-parallel head return this rank's part of the logits inside."""
        before, self.keeps_logits_split = self.keeps_logits_split, True
        try:
            yield
        finally:
            self.keeps_logits_split = before

    def check_divisible(self, x: Tensor) -> None:
        """Reject tokens that tp does not divide."""
        if x.shape[TOKENS] % self.degree:
            raise ShoalError(
                f"the sequence length must be divisible by tp={self.degree}, got {x.shape[TOKENS]} tokens",
                fix=f"sp=off in the plan, or a sequence length that {self.degree} divides",
                code="P032",
            )


def _is_computed_of(x: Tensor, region: Tensor) -> bool:
    """Whether a tensor is computed of the input of a region, without parameters: then its gradient goes through that
    input, where it is summed. LFM2 sets padded tokens to zero there."""
    seen: set[Any] = set()
    nodes: list[Any] = [x.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node is region.grad_fn or node in seen:
            continue
        if hasattr(node, "variable") or len(seen) > MOST_NODES:  # a parameter, or a computation of many steps
            return False
        seen.add(node)
        nodes += [before for before, _ in node.next_functions]
    return True


def _has_attention(region: nn.Module) -> bool:
    """Whether a region may need to know which rows are tokens of one sample."""
    return any(isinstance(getattr(one, name, None), bool) for one in region.modules() for name in ATTENTION_FLAGS)


def _check_tokens(x: Tensor) -> None:
    if x.dim() < 3:
        raise ShoalError(
            f"sequence parallelism needs activations of shape (samples, tokens, features), got {tuple(x.shape)}",
            fix="sp=off in the plan",
            code="M046",
        )


# ---- layers ---------------------------------------------------------------------------------------------------------


class ColumnParallelLinear(nn.Linear):
    """A linear layer whose output features are split over the tensor-parallel ranks.

    It takes all input features and returns this rank's part of the output features, for a `RowParallelLinear`; with
    `gather_output=True` all of them. `in_features` and `out_features` are those of the full layer; `tensor` is
    `run.tensor`.

        self.up = shoal.ColumnParallelLinear(hidden, ffn, tensor=run.tensor)
        self.down = shoal.RowParallelLinear(ffn, hidden, tensor=run.tensor)
        y = self.down(F.silu(self.up(x)))
    """

    cut: ClassVar[dict[str, int]] = {"weight": 0, "bias": 0}
    """Parameter → the dim along which tp cuts it."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        tensor: TensorParallel,
        gather_output: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias)
        self.gather_output = gather_output
        become(self, type(self), tensor, {})

    tensor: TensorParallel
    gather_output = False

    def forward(self, x: Tensor) -> Tensor:
        """Map a replicated tensor to this rank's features."""
        check_features(self, x, "all")
        y = F.linear(self.tensor.enter_layer(self, x), self.weight, self.bias)
        return self.tensor.leave_features(y, self.out_features) if self.gather_output else y


class RowParallelLinear(nn.Linear):
    """A linear layer whose input features are split over the tensor-parallel ranks.

    It takes this rank's part of the input features, as a `ColumnParallelLinear` returns them; with
    `input_is_parallel=False` all of them, and reads its part. It returns the sum over all ranks. Arguments as there.
    """

    cut: ClassVar[dict[str, int]] = {"weight": 1}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        tensor: TensorParallel,
        input_is_parallel: bool = True,
    ) -> None:
        super().__init__(in_features, out_features, bias)
        self.input_is_parallel = input_is_parallel
        become(self, type(self), tensor, {})

    tensor: TensorParallel
    input_is_parallel = True

    def forward(self, x: Tensor) -> Tensor:
        """Map this rank's features to a replicated tensor. The bias is added once, after the sum."""
        if not self.input_is_parallel and self.tensor.group is not None and x.shape[-1] == self.in_features:
            x = scatter_last(x, self.tensor.group)
        check_features(self, x, "this rank's part of the" if self.input_is_parallel else "all, then this rank's,")
        total = self.tensor.leave(F.linear(x, self.weight))
        return total if self.bias is None else total + self.bias.to(total.dtype)


class VocabularyParallelEmbedding(nn.Embedding):
    """An embedding of which this rank has the rows of some tokens."""

    cut: ClassVar[dict[str, int]] = {"weight": 0}
    tensor: TensorParallel

    sees_all_tokens = False
    """Whether `sp` divides no tokens here."""
    was_read: bool

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up rows; those of other ranks are zero here, and the sum adds them."""
        self.was_read = True
        first = self.tensor.first_of(self.num_embeddings)
        local = tokens - first
        is_token = (tokens >= 0) & (tokens < self.num_embeddings)  # any other token raises, as on one device
        elsewhere = ((local < 0) | (local >= self.weight.shape[0])) & is_token
        padding = None if self.padding_idx is None else self.padding_idx - first
        if padding is not None and not 0 <= padding < self.weight.shape[0]:
            padding = None  # another rank has it
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight, padding)
        summed = rows.masked_fill(elsewhere[..., None], 0.0)
        return self.tensor.leave(summed, all_tokens=self.sees_all_tokens)


@cache
def vocabulary_parallel(kind: Any) -> type[nn.Embedding]:
    """The split form of a class that changes the rows which nn.Embedding looks up, as by a scale: its `super()` becomes
    the split embedding."""

    class Changed(kind, VocabularyParallelEmbedding):  # type: ignore[misc]
        def forward(self, tokens: Tensor) -> Tensor:
            self.was_read = False
            rows: Tensor = super().forward(tokens)
            if not self.was_read:
                raise ShoalError(
                    f"{kind.__name__} looks rows up by itself, and tp has only some of them here",
                    fix="super().forward(tokens) in its forward, or tp=1",
                    code="M061",
                )
            return rows

    return Changed


class VocabularyParallelHead(nn.Linear):
    """The last layer, of which this rank has the logits of some tokens."""

    cut: ClassVar[dict[str, int]] = {"weight": 0, "bias": 0}
    tensor: TensorParallel
    sees_all_tokens = False

    def forward(self, x: Tensor) -> Tensor:
        """Map a replicated tensor to logits."""
        inside = self.tensor.enter(x, all_tokens=self.sees_all_tokens)
        return self.tensor.leave_logits(F.linear(inside, self.weight, self.bias))


class PositionEmbedding(nn.Embedding):
    """A full embedding that looks up this rank's tokens only; for positions, under sequence parallelism."""

    cut: ClassVar[dict[str, int]] = {}
    tensor: TensorParallel

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up the rows of my tokens, given the ids of all."""
        return super().forward(my_part(tokens, -1, self.tensor.group))


def check_features(layer: nn.Linear, x: Tensor, which: str) -> None:
    """Reject an input with other features than a split layer has here."""
    check_inputs(layer, x, layer.weight.shape[1], which)


def check_inputs(layer: nn.Module, x: Tensor, size: int, which: str) -> None:
    """The same for a number of features."""
    if x.shape[-1] != size:
        kind = "COLUMN" if isinstance(layer, ColumnParallelLinear) else "ROW"
        name = getattr(layer, "full_name", type(layer).__name__)
        raise ShoalError(
            f"{name}, split by {kind}, must get {which} input features, {size}, got {x.shape[-1]}",
            fix="in splits: COLUMN for a layer that reads from outside of a split region, ROW after a COLUMN layer",
            code="M047",
        )


def become(
    module: Any,
    kind: Any,
    tensor: TensorParallel,
    pieces: dict[nn.Parameter, nn.Parameter],
    parts: Sequence[int] = (),
) -> None:
    """Convert a full layer into its split form, in place: names, attributes and hooks stay.

    `pieces` maps full parameters to their pieces, so that two layers which share a parameter share its piece.
    """
    module.__class__ = kind
    module.tensor = tensor
    for name, dim in kind.cut.items():
        full = getattr(module, name)
        if full is None:
            continue
        if full not in pieces:
            _check_enough(module, name, full.shape[dim], tensor)
            own = cut(full.detach(), dim, parts, index=tensor.index, degree=tensor.degree)
            pieces[full] = nn.Parameter(own, requires_grad=full.requires_grad)
        setattr(module, name, pieces[full])


def _check_enough(module: nn.Module, name: str, size: int, tensor: TensorParallel) -> None:
    """Reject an uneven division of features, since the next layer expects equally many; a vocabulary may be uneven."""
    is_vocabulary = isinstance(module, VocabularyParallelEmbedding | VocabularyParallelHead)
    first_of_last = (tensor.degree - 1) * -(-size // tensor.degree)
    if first_of_last >= size or (size % tensor.degree and not is_vocabulary):
        raise ShoalError(
            f"the {size} {'rows' if is_vocabulary else 'features'} of {type(module).__name__}.{name} cannot be divided"
            f" over tp={tensor.degree} ranks",
            fix=f"tp={listed(divisors(size)[:8])}",
            code="P067",
        )
