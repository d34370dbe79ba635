"""A model laid over the ranks, as one of them holds it: what it computes with, and what its gradients still need.

One step, as `train.step.engine` makes it:

    begin_step ─ begin_microbatch (with: forward, backward) x m ─ finish_gradients ─ norm ─ commit ─ end_step

`finish_gradients` makes gradients of four kinds whole:

experts     (ep) of the tokens of all ep ranks already: divided by as many, since FSDP2 averages over the others alone
partial     (tp) a weight that each tp rank used for its own tokens or heads: summed over tp
replicated  (dp_replicate and cp) averaged by a `GradientSync`, during the backward or here
tied        (pp) two stages that hold one parameter, each its own copy: both get the sum, and so both copies stay equal
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoal.blueprint.plan import Plan
from shoal.comm.collectives import all_reduce_together
from shoal.comm.mesh import Mesh
from shoal.comm.replicas.overlap import Overlap
from shoal.parallel.batch_norm import RunningStatistics, Sharing, statistics_of
from shoal.parallel.context.attention import ContextParallel
from shoal.parallel.data.bucket_averager import CommThreads
from shoal.parallel.data.diloco import LocalSGD
from shoal.parallel.data.frozen_parameters import FrozenParameters
from shoal.parallel.data.gradient_reducer import GradientReducer
from shoal.parallel.data.gradient_sync import GradientSync
from shoal.parallel.expert.aux_loss import AuxLoss
from shoal.parallel.expert.loads import balance_routers, reject_unattached, sum_loads
from shoal.parallel.expert.router import biases, routers
from shoal.parallel.full_tensors import TensorPlacement, from_all_stages, full_tensors
from shoal.parallel.fused_loss_head import LossHead
from shoal.parallel.gradients import local_gradients, norm_of_pieces, norm_of_whole, own_norms, sum_tied
from shoal.parallel.lora.layers import is_adapter
from shoal.parallel.pipeline.pipeline import Pipeline, Stage
from shoal.parallel.tensor import TensorParallel


@dataclass(frozen=True, slots=True)
class StageModule:
    """The model, or what of it belongs to one stage; its parameters have the names that they have on one device."""

    model: nn.Module
    stage: Stage | None = None


@dataclass(kw_only=True)
class ParallelModel:
    """This rank's part of a model. Made by `compose`."""

    plan: Plan
    mesh: Mesh
    parts: list[StageModule]
    model: nn.Module
    """What a forward calls; in a pipeline, the first of this rank's parts."""
    tensor: TensorParallel
    context: ContextParallel | None
    head: LossHead | None
    """The last layer, where it can compute the loss in place of logits."""
    balance: AuxLoss | None
    """What the routers of experts share; None: there are none."""
    routed: dict[str, int]
    """Routers of the whole model → how many experts each chooses from."""
    experts: frozenset[str]
    """Parameters that are divided over ep."""
    pipeline: Pipeline | None
    shards: GradientSync
    """What reduces gradients inside a replica that is sharded."""
    replicas: GradientSync
    """What keeps replicas equal."""
    statistics: RunningStatistics | None
    """Averages running statistics of batch norm over ranks; None: there are none, or one rank sees all samples."""
    batch_norm: Sharing | None
    """The ranks whose samples batch norm normalises together; None: each rank its own."""
    frozen: FrozenParameters
    """Those whose gradients replicas would not average."""
    is_sharded: bool
    is_split_by_hand: bool
    originals: dict[str, nn.Parameter]
    """The parameters as they were given, whole, by name; forgotten once it is known what became of them."""
    shapes: dict[str, tuple[int, ...]]
    """Every parameter's whole shape, by name; one that has two names is there twice."""
    num_parameters: int
    """Elements of all parameters of the whole model; a shared one counts once."""
    tied: tuple[tuple[str, str], ...]
    peft_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of PEFT that follow from the whole model."""
    bucket_chosen: str = ""
    """The bucket size that `auto` chose, and the reason; empty: it was set."""
    base_fingerprint: str = ""
    """That of the frozen parameters below adapters, once it is known."""
    named: dict[str, nn.Parameter] = field(init=False)
    """The parameters of this rank, by the names that they have on one device; a tied one under its first name only,
    unless its second is on another stage."""

    norms: dict[str, Tensor] = field(default_factory=dict)
    """Those of the gradients of this rank's parameters, pieces as they are, in the last step."""

    _step: int = 0
    """The one whose gradients were made whole last."""
    _replaced: dict[int, tuple[weakref.ref[nn.Parameter], list[nn.Parameter]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.named = {name: p for part in self.parts for name, p in part.model.named_parameters()}
        self._match(self.originals)
        self.originals = {}
        copies = {second for _, second in self.tied if self.pipeline is not None}
        self.placement = TensorPlacement(
            self.plan, self.mesh, self.tensor, self.is_sharded, self.experts, self.shapes, copies
        )
        own = self.sync_axes if self.local_sgd is not None else ()
        self._counted = [name for name in self.named if self.is_owner(name, besides=own)]
        self._holds_all = not self.is_sharded and self.pipeline is None and self.tensor.group is None
        self._routers = {name: r for part in self.parts for name, r in routers(part.model).items()}
        self._stages = self.pipeline.group if self.pipeline is not None else None

    @property
    def base(self) -> frozenset[str]:
        """Frozen parameters of this rank below adapters, which checkpoints leave out. An adapter that is frozen itself,
        as A in LoRA-FA, is none of them."""
        if not self.has_adapters:
            return frozenset()
        frozen = (name for name, parameter in self.named.items() if not parameter.requires_grad)
        return frozenset(name for name in frozen if not is_adapter(name))

    @property
    def has_adapters(self) -> bool:
        """Whether the model has LoRA, beside weights that no checkpoint has."""
        return any(map(is_adapter, self.shapes))

    @property
    def reducer(self) -> GradientReducer | None:
        """Our own buckets of gradients; None: replicas are kept equal by other means, or there are none."""
        return self.replicas if isinstance(self.replicas, GradientReducer) else None

    @property
    def local_sgd(self) -> LocalSGD | None:
        """The exchange of weights under `sync=`; None: there is none."""
        return self.replicas if isinstance(self.replicas, LocalSGD) else None

    @property
    def sync_axes(self) -> tuple[str, ...]:
        """The axes along which `reducer` or `local_sgd` exchange."""
        is_alone = self.is_sharded or self.local_sgd is not None or self.plan.layout.cp == 1
        return ("dp_replicate",) if is_alone else ("dp_replicate", "dp_shard", "cp")

    @property
    def has_collective_forward(self) -> bool:
        """Whether a forward has collectives, so that all ranks must run as many."""
        return self.is_sharded or self.pipeline is not None or self.tensor.group is not None or self.context is not None

    @property
    def has_collective_training_forward(self) -> bool:
        """The same of a forward in training."""
        return self.has_collective_forward or self.batch_norm is not None

    def replacements(self, parameter: nn.Parameter) -> list[nn.Parameter]:
        """What became of a parameter of the model as it was given: itself, pieces, or nothing on this rank."""
        original, pieces = self._replaced.get(id(parameter), (None, []))
        if original is not None and original() is parameter:
            return pieces
        return [parameter]  # a piece already, or none of the model's

    def _match(self, originals: dict[str, nn.Parameter]) -> None:
        """Note what became of every parameter, without keeping the whole ones alive."""
        for part in self.parts:
            for name, parameter in part.model.named_parameters(remove_duplicate=False):
                pieces = self._replaced.setdefault(id(originals[name]), (weakref.ref(originals[name]), []))[1]
                if all(parameter is not one for one in pieces):
                    pieces.append(parameter)
        for original in originals.values():
            self._replaced.setdefault(id(original), (weakref.ref(original), []))

    # ---- one step ----------------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Before the forwards of a step; steps count from 0."""
        if self.mesh.degree("dp_cp") > 1:
            self.frozen.reject_unfrozen()
        self.replicas.begin_step(step)
        self.shards.begin_step(step)

    @contextmanager
    def begin_microbatch(self, *, is_last: bool) -> Iterator[None]:
        """Backward inside reduces gradients as the plan says for this microbatch, the step's last or not."""
        with self.replicas.microbatch(is_last), self.shards.microbatch(is_last):
            yield

    @torch.no_grad()
    def finish_gradients(self, step: int) -> None:
        """Make every gradient whole, once a step."""
        self._step = step
        self.replicas.finish_backward()
        if self.experts and (own := self._gradients_of(self.experts)):
            torch._foreach_div_(own, self.plan.layout.ep)
        if self.tensor.partial:
            all_reduce_together(self._gradients_of(self.tensor.partial), self.tensor.group)
        self.shards.finish_gradients(step)
        self.replicas.finish_gradients(step)
        if self.pipeline is not None:
            for first, second in self.tied:
                sum_tied(self.named.get(first), self.named.get(second), self.pipeline, self.mesh.comm_device)

    def _gradients_of(self, names: Collection[str]) -> list[Tensor]:
        """Of this rank's pieces, in the order of the model."""
        return list(local_gradients({name: p for name, p in self.named.items() if name in names}).values())

    def norm(self, parameters: list[nn.Parameter], *, scale: float = 1.0, clip: float | None = None) -> Tensor:
        """The global norm of their gradients: every piece of every rank, each counted once. Under local SGD each
        replica has its own. `scale` is the factor of the gradients, and `clip` the norm that they are clipped to."""
        self.norms = own_norms(self.named, parameters)
        if self._holds_all:
            norm = norm_of_whole(self.norms, self.named, parameters, self.mesh)
        else:
            counted = [self.norms[name] for name in self._counted if name in self.norms]
            group = self.replicas.norm_group(self.mesh)
            norm, is_same = norm_of_pieces(counted, self.named, self.mesh, group, self._weighted_use())
            if self.shards.use is not None and is_same is False:
                self.shards.use.reject(self.named, self.plan.zero or 0)
            if self.shards.use is not None:
                self.shards.use.drop_zeros()
        return self.replicas.agree_on_norm(norm, self.mesh, step=self._step, scale=scale, clip=clip)

    def _weighted_use(self) -> float | None:
        """This rank's digest of the parameters that had gradients, times a weight: over ranks that have to use the same
        ones, weights sum to 0, and so do equal digests times them. None: ranks need not use the same."""
        if self.shards.use is None:
            return None
        layout, at = self.plan.layout, self.mesh.coordinate
        axes = ["dp_shard", "cp", *(["dp_replicate"] if self.local_sgd is None else [])]
        others = math.prod(getattr(layout, axis) for axis in axes) - 1
        is_first = all(at[axis] == 0 for axis in axes)
        scale = 1 + at["tp"] + layout.tp * at["pp"]  # else differences of two stages could cancel
        return float(self.shards.use.digest * scale * (others if is_first else -1))

    def commit(self, is_applied: Tensor | bool) -> None:
        """The update was made, or dropped."""
        self.replicas.commit(is_applied)

    def end_step(self, steps_done: int) -> Overlap | None:
        """Clear the gradients, and let replicas exchange what is due. Returns how much of the exchange was hidden."""
        for parameter in self.named.values():  # of those that no optimizer has, too
            parameter.grad = None
        self.replicas.end_step(steps_done)
        return self.overlap()

    def overlap(self) -> Overlap | None:
        """How long replicas sent each other something in the last step, and how much of it was hidden; None: it was not
        measured."""
        return self.replicas.measured_overlap(self._step)

    @torch.no_grad()
    def balance_experts(self, *, is_applied: Tensor | bool) -> Tensor | None:
        """Once a step: the loads of all routers of the model over the global batch (`sum_loads`); and let each favour
        those experts that had too little. None: there are no routers."""
        if self.balance is None:
            return None
        reject_unattached(self._routers)
        copies = 1 if self.tensor.splits_tokens else self.tensor.degree  # tp ranks that saw the same tokens
        totals = sum_loads(self.balance, self.routed, self.mesh, copies=copies)
        balance_routers(self._routers, self.routed, totals, is_applied=is_applied)
        return totals

    # ---- pieces and whole tensors ------------------------------------------------------------------------------------

    def is_replicated(self, name: str, axis: str) -> bool:
        """Whether all ranks along an axis hold the same piece of a parameter."""
        return self.placement.is_replicated(name, axis)

    def is_owner(self, name: str, besides: Sequence[str] = (), *, and_copies: bool = False) -> bool:
        """Whether this rank is the first that holds this very piece of a parameter; see `TensorPlacement`."""
        return self.placement.is_owner(name, besides, and_copies=and_copies)

    def boxes_of(self, name: str, piece: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """A piece of a parameter, or a tensor of its shape, box by box of the whole; see `TensorPlacement`."""
        return self.placement.boxes_of(name, piece)

    def shard_boxes(self, name: str) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """Where this rank's piece of a parameter begins in the whole, and its shape, box by box."""
        return self.placement.shard_boxes(name)

    @torch.no_grad()
    def full_tensors(self, what: str) -> Iterator[tuple[str, Tensor | None]]:
        """Every parameter ("weight") or its gradient ("gradient") under its name, whole and on the CPU of rank 0; None
        on the other ranks, which all have to go through it too."""
        yield from full_tensors(self.placement, self.named, what, self._stages)

    def biases(self) -> dict[str, Tensor]:
        """The bias of every router that has one, on the CPU; every rank has to call it."""
        return from_all_stages({n: b for part in self.parts for n, b in biases(part.model).items()}, self._stages)

    def running_statistics(self) -> dict[str, Tensor]:
        """The running statistics of batch norm, on the CPU; every rank has to call it."""
        own = {name: b for part in self.parts for name, b in statistics_of(part.model).items()}
        return from_all_stages(own, self._stages)

    # ---- evaluation and the end --------------------------------------------------------------------------------------

    @property
    def comm_threads(self) -> CommThreads | None:
        """The ways between replicas; None: there are none, or torch has its own."""
        return self.replicas.threads()

    def shared_weights(self) -> AbstractContextManager[None]:
        """Inside, the model has the weights that all ranks agree on; without local SGD, it always has."""
        return self.replicas.shared_weights()

    def before_evaluation(self) -> None:
        """Make the running statistics of batch norm the same everywhere: they are after each step, except
        under local SGD and after forwards outside of a step."""
        if self.statistics is not None:
            self.statistics.agree()

    def after_evaluation(self) -> None:
        """Let go of what a forward without a backward has left gathered."""
        self.shards.release()

    def close(self) -> None:
        """End the threads by which replicas exchange."""
        self.replicas.close()
