"""`DistributedOptimizer`: the user's optimizer, with gradients that are reduced over ranks during the backward pass.

A hook of every parameter begins the reduction as soon as its gradient is complete. `step` waits for all of them, and
then calls the optimizer's own `step`. Gradients of `backward_passes_per_step` passes are summed, not averaged.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from shoal.errors import Problem, ShoalError
from shoal.horovod.basics import size
from shoal.horovod.collectives.allreduce import allreduce_async_, grouped_allreduce_async_, sparse_allreduce_async
from shoal.horovod.collectives.waiting import synchronize
from shoal.horovod.compression import Compression
from shoal.horovod.objects import broadcast_object
from shoal.horovod.optimizer.names import checked_names
from shoal.horovod.process_sets import ProcessSet, global_process_set
from shoal.horovod.reduce_ops import Average


@dataclass(frozen=True, slots=True)
class ReduceOptions:
    """How gradients are reduced; the arguments of `DistributedOptimizer` after the first two, in their order."""

    compression: Any = Compression.none
    backward_passes_per_step: int = 1
    op: int = Average
    gradient_predivide_factor: float = 1.0
    num_groups: int = 0
    groups: int | list[list[Tensor]] | None = None
    sparse_as_dense: bool = False
    process_set: ProcessSet = global_process_set

    def __post_init__(self) -> None:
        if self.backward_passes_per_step <= 0:
            what = f"backward_passes_per_step must be 1 or more, got {self.backward_passes_per_step}"
            raise ShoalError(what, fix="backward_passes_per_step=1", code="H013")
        if self.gradient_predivide_factor != 1.0 and self.op != Average:
            what = f"gradient_predivide_factor={self.gradient_predivide_factor} needs op=Average, got op={self.op}"
            raise ShoalError(what, fix="gradient_predivide_factor=1.0", code="H013")


Key = Tensor | tuple[Tensor, ...]
Reduction = tuple[Any, Any]
"""A handle (or a function, for sparse gradients) with what the compressor needs; a handle of None: not begun."""


class DistributedMixin:
    """What a distributed optimizer adds to the class of the user's optimizer."""

    param_groups: list[dict[str, Any]]

    def _set_up(self, named: Iterable[tuple[str, Tensor]] | None, options: ReduceOptions) -> None:
        self._options = options
        self._parameter_names = checked_names(self.param_groups, named)
        self.backward_passes_per_step = options.backward_passes_per_step
        self.process_set, self.op = options.process_set, options.op
        self._passes_left = dict.fromkeys(self._parameter_names, self.backward_passes_per_step)
        self._handles: dict[Key, Reduction] = {}
        self._watched: list[Tensor] = []
        self._group_of: dict[Tensor, tuple[Tensor, ...]] = {}
        self._synchronized, self._should_synchronize = False, True
        if self.process_set.included() and size() > 1:
            self._watched = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
            self._form_groups()
            for parameter in self._watched:
                parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes a step has."""
        self.backward_passes_per_step = passes
        self._passes_left = dict.fromkeys(self._parameter_names, passes)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load the optimizer's state, and forget gradients under way."""
        self._handles.clear()
        self._synchronized, self._should_synchronize = False, True
        self.set_backward_passes_per_step(self.backward_passes_per_step)
        super().load_state_dict(*args, **kwargs)  # type: ignore[misc]

    # ---- during the backward pass -----------------------------------------------------------------------------------

    def _form_groups(self) -> None:
        """Parameters whose gradients travel together, in the order of the set's first rank."""
        wanted = self._options.groups if self._options.groups is not None else self._options.num_groups or None
        if wanted is None:
            return
        if isinstance(wanted, int) and wanted < 1:
            raise ShoalError(f"groups must be 1 or more, or a list of lists, got {wanted}", fix="groups=2", code="H013")
        root = self.process_set.ranks[0]
        order = broadcast_object([self._parameter_names[p] for p in self._watched], root, None, self.process_set)
        ordered = sorted(self._watched, key=lambda p: order.index(self._parameter_names[p]))
        for group in _cut(ordered, wanted) if isinstance(wanted, int) else _listed(ordered, wanted):
            self._group_of.update(dict.fromkeys(group, group))

    def _on_gradient(self, parameter: Tensor) -> None:
        if self._passes_left[parameter] <= 0:
            what = f"more than backward_passes_per_step={self.backward_passes_per_step} backward passes before step()"
            raise AssertionError(str(Problem("H013", what, "backward_passes_per_step=2")))
        self._passes_left[parameter] -= 1
        if self._passes_left[parameter] == 0:
            self._begin(parameter)

    def _begin(self, parameter: Tensor) -> None:
        group = self._group_of.get(parameter)
        if group is None:
            self._handles[parameter] = self._reduce(parameter)
        elif all(self._passes_left[each] == 0 for each in group):
            self._handles[group] = self._reduce_group(group)

    def _reduce(self, parameter: Tensor) -> Reduction:
        if parameter.grad is None:  # another rank may have one
            parameter.grad = torch.zeros_like(parameter)
        name, grad = self._parameter_names[parameter], parameter.grad
        if grad.is_sparse and not self._options.sparse_as_dense:
            return sparse_allreduce_async(grad, name, self.op, self.process_set), None
        dense = grad.to_dense() if grad.is_sparse else grad
        small, ctx = self._options.compression.compress(dense)
        before, after = self._factors()
        return allreduce_async_(small, None, name, self.op, before, after, self.process_set), ctx

    def _reduce_group(self, group: tuple[Tensor, ...]) -> Reduction:
        for parameter in group:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        compressed = [self._options.compression.compress(parameter.grad) for parameter in group]
        before, after = self._factors()
        name, small = f"group.{self._parameter_names[group[0]]}", [each for each, _ in compressed]
        handle = grouped_allreduce_async_(small, None, name, self.op, before, after, self.process_set)
        return handle, [ctx for _, ctx in compressed]

    def _factors(self) -> tuple[float, float]:
        factor = self._options.gradient_predivide_factor
        return (1.0 / factor, factor) if self.op == Average else (1.0, 1.0)

    # ---- step -------------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until every gradient is reduced; parameters without a gradient take part with zeros."""
        under_way = {p for key in self._handles for p in (key if isinstance(key, tuple) else (key,))}
        for parameter in self._watched:
            if parameter not in under_way:
                group = self._group_of.get(parameter)
                if group is None:
                    self._handles[parameter] = self._reduce(parameter)
                elif group not in self._handles:
                    self._handles[group] = self._reduce_group(group)
        for key, (handle, ctx) in self._handles.items():
            result = handle() if callable(handle) else synchronize(handle)
            if isinstance(key, tuple):
                for parameter, one, each in zip(key, result, ctx, strict=True):
                    self._finish(parameter, one, each)
            else:
                self._finish(key, result, ctx)
        self._handles.clear()
        self._synchronized = True

    def _finish(self, parameter: Tensor, reduced: Tensor, ctx: Any) -> None:
        self._passes_left[parameter] = self.backward_passes_per_step
        assert parameter.grad is not None
        whole = reduced if reduced.is_sparse else self._options.compression.decompress(reduced, ctx)
        if parameter.grad.is_sparse:
            parameter.grad = whole if whole.is_sparse else whole.to_sparse()
        elif whole is not parameter.grad:
            parameter.grad.copy_(whole)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` not reduce gradients again: after `synchronize`, for example to clip them."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the gradients, and update."""
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): gradients are reduced twice",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return super().step(closure)  # type: ignore[misc]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear gradients; not while they are being reduced."""
        if self._handles:
            what = "zero_grad() was called after backward() and before step() or synchronize()"
            raise AssertionError(str(Problem("H026", what, "optimizer.step(), then optimizer.zero_grad()")))
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]


def _cut(parameters: list[Tensor], count: int) -> list[tuple[Tensor, ...]]:
    base, more = divmod(len(parameters), count)
    starts = [index * base + min(index, more) for index in range(count + 1)]
    return [tuple(parameters[a:b]) for a, b in pairwise(starts) if b > a]


def _listed(parameters: list[Tensor], groups: list[list[Tensor]]) -> list[tuple[Tensor, ...]]:
    known = {id(parameter) for parameter in parameters}
    listed = [parameter for group in groups for parameter in group]
    if any(not isinstance(each, Tensor) for each in listed) or len({id(each) for each in listed}) < len(listed):
        what = "groups must be lists of parameters, each parameter at most once"
        raise ShoalError(what, fix="groups=[list(model.a.parameters())]", code="H013")
    chosen = {id(each) for each in listed}
    formed = [tuple(each for each in group if id(each) in known) for group in groups]
    return [group for group in formed if group] + [(each,) for each in parameters if id(each) not in chosen]
