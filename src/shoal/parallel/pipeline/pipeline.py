"""`pp`: the blocks of a model divided over ranks, with microbatches pipelined through them.

torch has stages and schedules (`torch.distributed.pipelining`). But a stage is a module that the user has cut, it gets
only the tensor that the previous stage sent, and the loss exists on one rank. This file adds:

*Cut.* A stage is the full model in which every block of other stages is a stand-in without parameters. Each stage's
forward is called as on one device, with the full input. So masks, positions and whatever else a model computes from its
input exist on every stage:

    one device   tokens ── embed ── block 0 ── block 1 ── block 2 ── block 3 ── norm ── head ── loss
    stage 0      tokens ── embed ── block 0 ── block 1 ── (end) ──▶ x
    stage 1      tokens ──  ( )  ──   ( )   ──   (x)   ── block 2 ── block 3 ── norm ── head ── loss
                              stand-ins before the stage's own blocks return the received tensors;
                              the first one after them ends the forward

*Feed.* torch passes the numbers of microbatches through the schedule. Data, labels and weights are looked up by that
number here, so a batch may be anything that the user's loss and model accept.

*Loss.* The last stage returns its loss; there is no tensor of all outputs.

torch runs the order of forwards and backwards (1F1B and others). `shoal.blueprint.schedules.schedule_orders` has the
same order without torch, for the planner and the pages.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.blueprint.description import Description
from shoal.blueprint.plan import Schedule
from shoal.blueprint.schedules.schedule_orders import check_microbatches, check_schedule, legal_microbatches
from shoal.comm.profile.timer import part
from shoal.errors import ShoalError, raise_if
from shoal.parallel.pipeline.calls import positions, unplaced
from shoal.parallel.pipeline.skeleton import Call, results_in, skeleton_of
from shoal.parallel.pipeline.stage_io import Boundaries, StageRoutes, shapes_of
from shoal.parallel.pipeline.tape import OwnCall, StopForward, Tape

ONE_STAGE_PER_RANK = ("gpipe", "1f1b")


class _StandIn(nn.Module):
    """Replaces a module of another stage. Code around it may still read its attributes, as its kind or the dtype of its
    weights: a copy without memory has them."""

    def __init__(self, replaced: nn.Module, name: str, tape: Tape) -> None:
        super().__init__()
        self._replaced = [skeleton_of(replaced)]  # in a list: its parameters are none of the model's
        self.name, self.tape = name, tape

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_replaced":  # while it is copied
                raise
            return getattr(self._replaced[0], name)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Return what was received; or end the forward, if this stage needs nothing more."""
        return self.tape.stand_in(self.tape.next(self.name))


class _PerCall(_StandIn):
    """Replaces a module without parameters: some of its calls may be this stage's own."""

    def __init__(self, replaced: nn.Module, name: str, tape: Tape) -> None:
        super().__init__(replaced, name, tape)
        self.inner = copy.deepcopy(replaced)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Run the module, or stand in for it."""
        number = self.tape.next(self.name)
        if not self.tape.runs(number):
            return self.tape.stand_in(number)
        output = self.inner(*arguments, **options)
        self.tape.returned(number, output)
        return output


def cut(model: nn.Module, description: Description, own: Collection[str]) -> tuple[nn.Module, Tape]:
    """Copy the model with stand-ins for all described submodules but a stage's own. The rest shares its tensors with
    the model."""
    tape, modules, places = Tape(), dict(model.named_modules()), positions(description)
    memo: dict[int, Any] = {id(modules[n]): _StandIn(modules[n], n, tape) for n in places if n not in own}
    memo |= {id(modules[name]): _PerCall(modules[name], name, tape) for name in unplaced(model, places)}
    memo |= {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    memo |= {id(tensor): tensor.detach() for tensor in results_in(model)}
    part = copy.deepcopy(model, memo)
    for name in own:
        part.get_submodule(name).register_forward_hook(OwnCall(name, tape))
    return part, tape


@dataclass
class MicrobatchFeed:
    """The calls and weights of a step's microbatches, which the stages of a rank look up."""

    calls: Sequence[Call] = ()
    loss: Callable[[Any, int], Tensor] | None = None
    """(output of the model, number of the microbatch) → the loss that is differentiated."""
    begin: Callable[[int, int], None] | None = None
    """Called with (number of the microbatch, stage) before a stage computes a microbatch."""


class Stage(nn.Module):
    """A cut model that is called with the number of a microbatch."""

    def __init__(self, model: nn.Module, tape: Tape, index: int, num_stages: int) -> None:
        super().__init__()
        self.model, self.index, self.num_stages = model, index, num_stages
        self.feed = MicrobatchFeed()
        self.device, self.comm_device = torch.device("cpu"), torch.device("cpu")
        self.dtype: torch.dtype | None = None
        """The dtype in which activations are sent to the next stage."""
        self.wide: torch.dtype | None = None
        """The dtype in which they are computed: as on one device, where they are not sent."""
        self.boundaries: Boundaries | None = None
        self.message_shape: tuple[int, ...] | None = None
        """The shape in which it sends every microbatch of a step; None: that of each."""
        self._tape = tape

    @property
    def is_last(self) -> bool:
        """Whether this stage computes the loss."""
        return self.index == self.num_stages - 1

    def forward(self, x: Tensor | None = None, *, microbatch: Tensor) -> Tensor:
        """Map the received tensor to the one that is sent, or to the loss."""
        with part("forward"):
            return self._forward(x, int(microbatch[0]))

    def _forward(self, x: Tensor | None, number: int) -> Tensor:
        arguments, options = self.feed.calls[number]
        if self.feed.begin is not None:
            self.feed.begin(number, self.index)
        routes = self.routes(self.feed.calls[number])
        if x is not None and x.shape != routes.received:
            x = x[: prod(routes.received)].view(routes.received)
        self._tape.begin(routes, x, self.wide, self.device)
        try:
            output = self._call(arguments, options)
            if not self.is_last:
                sent = self._tape.packed(self.comm_device, self.dtype)
                return sent if self.message_shape in (None, sent.shape) else filled(sent, self.message_shape)
        finally:
            self._tape.end()
        assert self.feed.loss is not None
        return self.feed.loss(output, number)

    def routes(self, call: Call) -> StageRoutes:
        """What it receives and sends."""
        assert self.boundaries is not None
        return self.boundaries(call, is_training=self.model.training)[self.index]

    def _call(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        try:
            return self.model(*arguments, **options)
        except StopForward:
            return None


def filled(sent: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor as a flat one of another length, with zeros at its end."""
    return F.pad(sent.flatten(), (0, prod(shape) - sent.numel()))


def message_shapes(each: Sequence[Sequence[StageRoutes]]) -> list[tuple[int, ...]]:
    """The shape between every two stages, for all microbatches. torch's stages allocate it before the step, once. So
    where a microbatch has fewer samples, as the last one of a dataset, all travel flat in the length of the largest."""
    found = []
    for routes in zip(*(every[:-1] for every in each), strict=True):
        shapes = {one.sent for one in routes}
        found.append(shapes.pop() if len(shapes) == 1 else (max(map(prod, shapes)),))
    return found


@dataclass
class Pipeline:
    """The stages of one rank, and torch's schedule over them, rebuilt for each shape of microbatches."""

    stages: list[Stage]
    schedule: Schedule
    group: dist.ProcessGroup
    device: torch.device
    comm_device: torch.device
    """The device from which stages send and on which they receive."""
    num_stages: int
    boundaries: Boundaries
    """What stages receive and send."""
    dtype: torch.dtype
    """The dtype of the tensor between stages."""
    loss_dtype: torch.dtype
    owners: Sequence[int]
    """The index on the pp axis of every stage's rank."""
    _schedules: dict[Any, Any] = field(default_factory=dict)
    """By the number of microbatches and the shapes between stages."""
    _most: int = 0
    """Microbatches of the largest step so far."""
    _found: dict[Any, tuple[Any, list[tuple[int, ...]]]] = field(default_factory=dict)
    """By the shapes of a batch: one look-up in most steps."""

    def step(self, feed: MicrobatchFeed) -> None:
        """Run forward and backward of all microbatches; gradients are left in the parameters."""
        schedule, shapes = self._schedule_for(feed)
        self._give(feed, (*shapes, None))
        numbers = torch.arange(len(feed.calls))
        target = numbers if self.has_loss else None
        try:
            schedule.step(microbatch=numbers, target=target, return_outputs=False)
        except RuntimeError as error:  # torch wraps a stage's exception
            if isinstance(error.__cause__, ShoalError):
                raise error.__cause__ from None
            _explain_shapes(error)
            raise

    def filled_up(self, num_microbatches: int) -> int:
        """The number of microbatches of a step that has fewer than others: the next one that the schedule can run.

        So the shorter last batch of a dataset runs, where a plan that never fits is rejected."""
        degree = self.group.size()
        if num_microbatches >= self._most or not check_microbatches(self.schedule, degree, num_microbatches):
            return num_microbatches
        above = (m for m in legal_microbatches(self.schedule, degree, num_microbatches) if m > num_microbatches)
        return min(next(above), self._most)

    @property
    def has_loss(self) -> bool:
        """Whether one of this rank's stages is the last."""
        return any(stage.is_last for stage in self.stages)

    @torch.no_grad()
    def forward(self, feed: MicrobatchFeed) -> None:
        """Run the forward of all microbatches, one by one, without saved activations; for an evaluation."""
        self._give(feed, [None] * self.num_stages)
        mine = {stage.index: stage for stage in self.stages}
        me = dist.get_rank(self.group)
        sent: list[tuple[Tensor, list[dist.Work]]] = []
        for number, call in enumerate(feed.calls):
            x: Tensor | None = None
            for index, stage in mine.items():
                if index and self.owners[index - 1] != me:
                    routes = stage.routes(call)
                    x = torch.empty(routes.received, dtype=self.dtype, device=self.comm_device)
                    source = self.owners[index - 1]
                    receive = dist.P2POp(dist.irecv, x, group=self.group, group_peer=source)
                    for work in dist.batch_isend_irecv([receive]):  # batched as its send: NCCL separates the two kinds
                        work.wait()
                x = stage(*([x] if index else []), microbatch=torch.tensor([number]))
                if not stage.is_last and self.owners[index + 1] != me:
                    send = dist.P2POp(dist.isend, x.contiguous(), group=self.group, group_peer=self.owners[index + 1])
                    sent.append((x, dist.batch_isend_irecv([send])))
        for _, works in sent:
            for work in works:
                work.wait()

    def _give(self, feed: MicrobatchFeed, shapes: Sequence[Any]) -> None:
        for stage in self.stages:
            stage.message_shape = shapes[stage.index]
            stage.feed, stage.device, stage.comm_device = feed, self.device, self.comm_device
            stage.dtype, stage.wide, stage.boundaries = self.dtype, self.loss_dtype, self.boundaries

    def _schedule_for(self, feed: MicrobatchFeed) -> tuple[Any, list[tuple[int, ...]]]:
        is_training = self.stages[0].model.training
        given = is_training, tuple(shapes_of(call) for call in feed.calls)
        if given not in self._found:
            self._found[given] = self._find_schedule(feed, is_training)
        return self._found[given]

    def _find_schedule(self, feed: MicrobatchFeed, is_training: bool) -> tuple[Any, list[tuple[int, ...]]]:
        shapes = message_shapes([self.boundaries(call, is_training=is_training) for call in feed.calls])
        key = (len(feed.calls), tuple(shapes))
        if key not in self._schedules:
            degree = self.group.size()
            raise_if(
                check_schedule(self.schedule, num_ranks=degree, v=self.num_stages // degree, num_microbatches=key[0])
            )
            self._schedules[key] = self._make(*key)
            self._most = max(self._most, key[0])
        return self._schedules[key], shapes

    def _make(self, num_microbatches: int, shapes: Sequence[tuple[int, ...]]) -> Any:
        """Build torch's stages and schedule. Shapes are given, so that torch need not run the model to find them."""
        from shoal.parallel.pipeline.torch_stages import (  # takes a second: only where there is a pipeline
            SCHEDULES,
            TorchStage,
        )

        between = [torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=True) for shape in shapes]
        loss = torch.empty((), dtype=self.loss_dtype, device="meta")
        stages = [
            TorchStage(
                stage,
                stage.index,
                self.num_stages,
                self.comm_device,
                input_args=(between[stage.index - 1],) if stage.index else (),
                output_args=(loss,) if stage.is_last else (between[stage.index],),
                group=self.group,
            )
            for stage in self.stages
        ]
        # torch's 1F1B rejects one microbatch, for which it would equal GPipe: one rank after the other.
        word = "gpipe" if self.schedule == "1f1b" and num_microbatches == 1 else self.schedule
        return SCHEDULES[word](
            stages[0] if word in ONE_STAGE_PER_RANK else stages,
            num_microbatches,
            loss_fn=_loss_of_stage,
            scale_grads=False,
        )


def _loss_of_stage(output: Tensor, target: Tensor) -> Tensor:
    return output


def _explain_shapes(error: RuntimeError) -> None:
    """Explain an error of torch 2.11, which compares a stage's output with the shape between stages; later ones do
    not."""
    for one in (error, error.__cause__):
        if type(one).__name__ == "PipeliningShapeError":
            raise ShoalError(
                f"every stage must end where activations have the shape that stages exchange: {one}",
                fix="another pp or v; under tp, stages that end after a layer that is split by ROW",
                code="M043",
            ) from error
