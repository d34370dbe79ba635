"""A model laid over the ranks, as one of them holds it: what it computes with, and what its gradients still need.

Between the last backward and the optimizer, gradients of five kinds are made whole:

experts     (ep) of the tokens of all ep ranks already: divided by as many, since FSDP2 averages over the others alone
partial     (tp) a weight that each tp rank used for its own tokens or heads: summed over tp
replicated  (dp_replicate and cp, in a pipeline) averaged; elsewhere DDP and FSDP2 do it during the backward
tied        (pp) two stages that hold one parameter, each its own copy: both get the sum, and so both copies stay equal
norm        over all pieces of all ranks, each counted once
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.blueprint.layout import AXES
from shoal.blueprint.model_shapes import chunk
from shoal.blueprint.plan import Plan
from shoal.comm.collectives import all_gather_plain, all_reduce_together, join
from shoal.comm.mesh import Mesh
from shoal.comm.replicas.overlap import Overlap
from shoal.errors import ShoalError
from shoal.numerics.gradients import global_norm, gradients_of, norms_of
from shoal.numerics.local_tensor import gradient_of, to_local
from shoal.numerics.precision import wide
from shoal.parallel.batch_norm import RunningStatistics, Sharing, statistics_of
from shoal.parallel.context.attention import ContextParallel
from shoal.parallel.data import ddp, fsdp
from shoal.parallel.data.bucket_averager import CommThreads
from shoal.parallel.data.ddp import average_gradients
from shoal.parallel.data.gradient_reducer import GradientReducer
from shoal.parallel.data.local_sgd import LocalSGD
from shoal.parallel.expert.aux_loss import AuxLoss
from shoal.parallel.expert.router import biases, routers, update_bias
from shoal.parallel.fused_loss_head import LossHead
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
    reducer: GradientReducer | None
    """What averages gradients over replicas; None: there are none, or torch does it."""
    islands: LocalSGD | None
    """What lets replicas meet every so many steps."""
    statistics: RunningStatistics | None
    """Averages running statistics of batch norm over ranks; None: there are none, or one rank sees all samples."""
    batch_norm: Sharing | None
    """The ranks whose samples batch norm normalises together; None: each rank its own."""
    is_sharded: bool
    is_split_by_hand: bool
    originals: dict[str, nn.Parameter]
    """The parameters as they were given, whole, by name; forgotten once it is known what became of them."""
    shapes: dict[str, tuple[int, ...]]
    """Every parameter's whole shape, by name; one that has two names is there twice."""
    num_parameters: int
    """Elements of all parameters of the whole model; a shared one counts once."""
    tied: tuple[tuple[str, str], ...]
    bucket_chosen: str = ""
    """The size of buckets of gradients, and why so; empty: nobody left it open."""
    named: dict[str, nn.Parameter] = field(init=False)
    """The parameters of this rank, by the names that they have on one device; a tied one under its first name only,
    unless its second is on another stage."""

    norms: dict[str, Tensor] = field(default_factory=dict)
    """Those of the gradients of this rank's parameters, pieces as they are, in the last step."""

    _step: int = 0
    """The one whose gradients were made whole last."""
    _boxes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    _replaced: dict[int, tuple[weakref.ref[nn.Parameter], list[nn.Parameter]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.named = {name: p for part in self.parts for name, p in part.model.named_parameters()}
        self._match(self.originals)
        self.originals = {}
        self._copies = {second for _, second in self.tied if self.pipeline is not None}
        own = self.meeting_axes if self.islands is not None else ()
        self._counted = [name for name in self.named if self.is_owner(name, besides=own)]
        self._routers = {name: r for part in self.parts for name, r in routers(part.model).items()}

    @property
    def meeting_axes(self) -> tuple[str, ...]:
        """The directions along which `reducer` or `islands` let ranks meet."""
        is_alone = self.is_sharded or self.islands is not None or self.plan.layout.cp == 1
        return ("dp_replicate",) if is_alone else ("dp_replicate", "dp_shard", "cp")

    @property
    def has_collective_forward(self) -> bool:
        """Whether ranks meet in a forward, so that all must run as many."""
        return self.is_sharded or self.pipeline is not None or self.tensor.group is not None or self.context is not None

    @property
    def has_collective_training_forward(self) -> bool:
        """The same of a forward in training."""
        return self.has_collective_forward or self.batch_norm is not None

    @contextmanager
    def synchronised(self, is_last: bool) -> Iterator[None]:
        """Backward inside reduces gradients as the plan says for this microbatch, the step's last or not."""
        if self.reducer is not None:
            self.reducer.is_armed = is_last
        with (
            ddp.synchronised(self.model, is_last),
            fsdp.synchronised(self.model, is_last, zero=self.plan.zero or 0),
        ):
            yield

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

    # ---- gradients ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def finish_gradients(self, step: int) -> None:
        """Make every gradient whole, once a step; steps count from 0."""
        self._step = step
        if self.reducer is not None:
            self.reducer.finish()
        gradients = {name: to_local(p.grad) for name, p in self.named.items() if p.grad is not None}
        if own := [gradient for name, gradient in gradients.items() if name in self.experts]:
            torch._foreach_div_(own, self.plan.layout.ep)
        if self.tensor.partial:
            partial = [gradient for name, gradient in gradients.items() if name in self.tensor.partial]
            all_reduce_together(partial, self.tensor.group)
        if self.pipeline is not None:
            is_done = self.is_sharded or self.reducer is not None or self.islands is not None
            replicas = None if is_done else self.mesh.group_of_several(self.plan.gradient_axis)
            if replicas is not None:
                for name, parameter in self.named.items():  # every replica brings as many, used or not
                    if parameter.requires_grad and name not in gradients:
                        parameter.grad = gradients[name] = torch.zeros_like(parameter)
                average_gradients([gradients[name] for name in self.named if name in gradients], replicas)
            for first, second in self.tied:
                self._sum_tied(gradients.get(first), gradients.get(second))
        if self.islands is not None:
            self.islands.share_gradients(step)

    def _sum_tied(self, first: Tensor | None, second: Tensor | None) -> None:
        """Both copies of a tied parameter get the sum of their gradients, whether here or on two ranks."""
        assert self.pipeline is not None
        ends = self.pipeline.owners[0], self.pipeline.owners[-1]
        if first is not None and second is not None:
            second += first
            first.copy_(second)
        elif first is not None or second is not None:
            mine = first if first is not None else second
            assert mine is not None
            other = ends[1] if first is not None else ends[0]
            theirs = torch.empty_like(mine, device=self.mesh.wire)
            own = mine.to(self.mesh.wire).contiguous()
            send = dist.P2POp(dist.isend, own, group=self.pipeline.group, group_peer=other)
            receive = dist.P2POp(dist.irecv, theirs, group=self.pipeline.group, group_peer=other)
            for work in dist.batch_isend_irecv([send, receive]):
                work.wait()
            mine += theirs.to(mine.device)

    def norm(self, parameters: list[nn.Parameter], *, scale: float = 1.0, clip: float | None = None) -> Tensor:
        """The global norm of their gradients: every piece of every rank, each counted once. Islands have their own; but
        where one's is not finite, no island's is: whatever is decided by that, all decide alike. `scale` is what they
        were multiplied by, and `clip` what they will be clipped to: islands compare what an optimizer sees."""
        norm = self._own_norm(parameters)
        if self.islands is None:
            return norm
        bad = (~norm.isfinite()).to(norm.dtype)
        between = self.mesh.group("dp_replicate")
        if self.islands.spread is None:
            dist.all_reduce(bad, group=between)
        else:
            own = [gradient_of(parameter) for parameter in self.named.values() if parameter.requires_grad]
            seen = torch.full_like(norm, 1 / scale)
            if clip is not None:
                seen *= (clip * scale / (norm + 1e-6)).clamp_max(1.0)
            bad = self.islands.spread.tell(
                bad, own, self._step, times=seen, islands=between, own=self.mesh.group("replica")
            )
        return torch.where(bad > 0, torch.full_like(norm, torch.nan), norm)

    def _own_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        chosen = set(parameters)
        found = {name: to_local(p.grad) for name, p in self.named.items() if p in chosen and p.grad is not None}
        self.norms = dict(zip(found, norms_of(list(found.values())), strict=True))
        is_everything_here = not self.is_sharded and self.pipeline is None and self.tensor.group is None
        if is_everything_here:
            own = set(self.named.values())
            norms = [*self.norms.values(), *norms_of(gradients_of(p for p in parameters if p not in own))]
            return global_norm(norms) if norms else self._zero()
        counted = [self.norms[name] for name in self._counted if name in self.norms]
        square = global_norm(counted).to(self.mesh.device) ** 2 if counted else self._zero()
        dist.all_reduce(square, group=self.mesh.group("replica") if self.islands is not None else None)
        return square.sqrt()

    def _zero(self) -> Tensor:
        dtype = wide(next(iter(self.named.values())).dtype)
        return torch.zeros((), dtype=dtype, device=self.mesh.device)

    def is_replicated(self, name: str, axis: str) -> bool:
        """Whether all ranks along an axis hold the same piece of a parameter."""
        if axis in ("dp_shard", "cp"):
            return not self.is_sharded
        return {"tp": name not in self.tensor.cuts, "pp": False}.get(axis, True)

    def box(self, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Where this rank's piece of a parameter begins in the whole, and its shape."""
        if name not in self._boxes:
            self._boxes[name] = self._box(name)
        return self._boxes[name]

    def _box(self, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        layout, rank, whole = self.plan.layout, self.mesh.rank, self.shapes[name]
        begin, shape = [0] * len(whole), list(whole)

        def cut(dim: int, index: int, degree: int) -> None:
            size = shape[dim]
            begin[dim] += min(size, -(-size // degree) * index)
            shape[dim] = chunk(size, index=index, degree=degree)

        if (dim := self.tensor.cuts.get(name)) is not None:
            cut(dim, self.tensor.index, self.tensor.degree)
        if name in self.experts:
            cut(0, layout.place(rank, "ep"), layout.ep)
        if self.is_sharded:
            axis = "edp" if name in self.experts else self.plan.shard_axis
            cut(0, layout.place(rank, axis), layout.degree(axis))
        return tuple(begin), tuple(shape)

    def is_owner(self, name: str, besides: Sequence[str] = (), *, and_copies: bool = False) -> bool:
        """Whether this rank is the one, of all that hold this very piece of a parameter, that counts and tells it.
        `besides`: axes along which it differs nevertheless; `and_copies`: second copies of tied ones differ, too."""
        axes = (axis for axis in AXES if axis not in besides)
        others = [axis for axis in axes if self.mesh.coordinate[axis] and self.is_replicated(name, axis)]
        return not others and (and_copies or name not in self._copies)

    # ---- experts -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def balance_experts(self, *, is_applied: Tensor | bool) -> Tensor | None:
        """Once a step: the loads of all routers of the model over the global batch; and let each favour those experts
        that had too little. A row for each router, in the order of the model: how often each expert was chosen, how
        many choices were dropped, and the auxiliary loss, summed over sequences. None: there are no routers."""
        if self.balance is None:
            return None
        self._refuse_unsettled()
        width = max(self.routed.values()) + 2
        totals = torch.zeros(len(self.routed), width, dtype=torch.float64, device=self.mesh.device)
        for row, (name, num_experts) in zip(totals, self.routed.items(), strict=True):
            if name in self.balance.loads:  # a router of this rank, and a microbatch that counted
                row[:num_experts] = self.balance.loads[name]
                row[-2] = self.balance.dropped[name]
                row[-1] = self.balance.auxiliary.get(name, 0.0)
        self.balance.clear()
        if self.mesh.layout.world_size > 1:
            dist.all_reduce(totals)
            totals /= 1 if self.tensor.splits_tokens else self.tensor.degree  # whose ranks told the same
        for place, (name, num_experts) in enumerate(self.routed.items()):
            if name in self._routers:
                update_bias(self._routers[name], totals[place, :num_experts], is_applied)
        return totals

    def _refuse_unsettled(self) -> None:
        if forgotten := [name for name, router in self._routers.items() if not router.was_settled]:
            raise ShoalError(
                f"nobody has heard what {forgotten[0]} has chosen: its losses and loads are lost",
                fix="routing, *facts = router(x); y = experts(x.flatten(0, 1), routing).view_as(x);"
                " y = router.settle(y, *facts)",
            )

    def biases(self) -> dict[str, Tensor]:
        """The bias of every router that has one, on the CPU; every rank has to ask."""
        return self._of_all_stages({name: b for part in self.parts for name, b in biases(part.model).items()})

    def running_statistics(self) -> dict[str, Tensor]:
        """The running statistics of batch norm, on the CPU; every rank has to ask."""
        return self._of_all_stages({name: b for part in self.parts for name, b in statistics_of(part.model).items()})

    def _of_all_stages(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        mine = {name: bias.to("cpu", copy=True) for name, bias in own.items()}  # the next step changes them
        if self.pipeline is None:
            return mine
        every = all_gather_plain(mine, self.pipeline.group)
        return {name: bias for stage in every for name, bias in stage.items()}

    # ---- whole tensors -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def whole(self, what: str) -> Iterator[tuple[str, Tensor | None]]:
        """Every parameter ("weight") or its gradient ("gradient") under its name, whole and on the CPU of rank 0; None
        on the other ranks, which all have to go through it too."""
        owners = self._owners()
        for name in self.shapes:
            if name in owners:
                yield name, self._gathered(name, owners[name], what)

    def _owners(self) -> dict[str, int]:
        """Name → the place on the pp axis that gathers it. A tied parameter goes by its first name alone."""
        mine = [name for name in self.named if name not in self._copies]
        if self.pipeline is None:
            return dict.fromkeys(mine, 0)
        gathered = all_gather_plain(mine, self.pipeline.group)
        return {name: place for place, names in enumerate(gathered) for name in names}

    def _gathered(self, name: str, owner: int, what: str) -> Tensor | None:
        is_mine = self.mesh.coordinate["pp"] == owner
        full = self._joined(name, what) if is_mine else None
        if self.pipeline is None or owner == 0:
            return full if self.mesh.rank == 0 else None
        source = self.mesh.layout.rank(pp=owner)
        if self.mesh.rank == source:
            assert full is not None
            dist.send(full.to(self.mesh.wire), 0)
        elif self.mesh.rank == 0:
            example = next(iter(self.named.values()))
            full = torch.empty(self.shapes[name], dtype=example.dtype, device=self.mesh.wire)
            dist.recv(full, source)
            return full.cpu()
        return None

    def _joined(self, name: str, what: str) -> Tensor:
        """The pieces of the dp_shard, ep and tp ranks put together; a parameter without a gradient has a zero one."""
        parameter = self.named[name]
        piece = parameter.detach() if what == "weight" else parameter.grad
        plain = to_local(torch.zeros_like(parameter) if piece is None else piece)
        shape, mesh, tensor = self.shapes[name], self.mesh, self.tensor
        dim = tensor.cuts.get(name)
        is_expert = name in self.experts
        if self.is_sharded:
            num_rows = shape[0] // (self.plan.layout.ep if is_expert else 1)
            num_rows = chunk(num_rows, index=tensor.index, degree=tensor.degree) if dim == 0 else num_rows
            group = mesh.groups["edp" if is_expert else self.plan.shard_axis]
            plain = join(plain.to(mesh.device), 0, group, num_rows)
        if is_expert:
            plain = join(plain, 0, mesh.groups["ep"], shape[0])
        if dim is not None:
            plain = join(plain, dim, tensor.group, shape[dim])
        return plain.to("cpu", copy=True)

    @property
    def lanes(self) -> CommThreads | None:
        """The ways between replicas; None: there are none, or torch has its own."""
        if self.islands is not None:
            return self.islands.lanes
        return None if self.reducer is None else self.reducer.averager.lanes

    def hidden(self) -> Overlap | None:
        """How long replicas sent each other something in the last step, and how much of it was hidden; None: it was not
        measured."""
        meeting = self.reducer or self.islands
        return meeting.hidden if meeting is not None else ddp.hidden_of(self.model, self._step)

    def shared_weights(self) -> AbstractContextManager[None]:
        """Inside, the model has the weights that all ranks agree on; which it always has, unless there are islands."""
        return nullcontext() if self.islands is None else self.islands.shared_weights()

    def close(self) -> None:
        """End the threads by which replicas meet."""
        for one in (self.reducer, self.islands):
            if one is not None:
                one.close()

    # ---- evaluation --------------------------------------------------------------------------------------------------

    def before_evaluation(self) -> None:
        """Make the running statistics of batch norm the same everywhere: they are after each step, but for islands and
        for forwards outside of a step."""
        if self.statistics is not None:
            self.statistics.agree()

    def after_evaluation(self) -> None:
        """Let go of what a forward without a backward has left gathered."""
        if self.is_sharded:
            for part in self.parts:
                fsdp.reshard(part.model)
