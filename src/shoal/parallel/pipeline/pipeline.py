"""`pp`: the blocks of a model divided over ranks, through which microbatches travel one behind the other.

torch gives stages and schedules (`torch.distributed.pipelining`), but a stage is a module that the user has cut, its
input is what the stage before sent and nothing else, and the loss exists on one rank. What this file adds:

*Cut.* A stage is the whole model in which every block that is not its own is a stand-in without parameters. Each
stage's forward is called as on one device, with the whole input, so masks, positions and whatever else a model
computes from its input are there on every stage:

    one device   tokens ── embed ── block 0 ── block 1 ── block 2 ── block 3 ── norm ── head ── loss
    stage 0      tokens ── embed ── block 0 ── block 1 ── (end) ──▶ x
    stage 1      tokens ──  (x)  ──   (x)   ──   (x)   ── block 2 ── block 3 ── norm ── head ── loss
                              stand-ins before the stage's own blocks return what was received;
                              the first one after them ends the forward with what it is given

*Feed.* torch hands the schedule's microbatches on by number. Data, labels and weights are looked up by that number
here, so a batch may be anything that the user's loss and model understand.

*Loss.* The last stage returns its loss; there is no tensor of all outputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.blueprint.plan import Schedule
from shoal.blueprint.schedules.generate import check_schedule
from shoal.errors import ShoalError, raise_if

ONE_STAGE_PER_RANK = ("gpipe", "1f1b")
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments with which the model is called for one microbatch."""


class StageInput(nn.Module):
    """In place of a module before the stage's own: returns what the stage has received."""

    def __init__(self) -> None:
        super().__init__()
        self.value: Tensor | None = None

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        """Whatever it is called with."""
        assert self.value is not None
        return self.value


class StopForward(Exception):
    """A stage has come to the first block that is not its own; carries what that block was given."""


class StageBoundary(nn.Module):
    """In place of a module after the stage's own: ends the forward, so that what follows is computed only once."""

    def forward(self, x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """Never returns."""
        raise StopForward(x)


def cut(model: nn.Module, *, before: Sequence[str], after: Sequence[str]) -> tuple[nn.Module, StageInput]:
    """A copy of the model in which some submodules are stand-ins. What is left shares its tensors with the model."""
    received = StageInput()
    memo: dict[int, Any] = {id(model.get_submodule(name)): received for name in before}
    memo |= {id(model.get_submodule(name)): StageBoundary() for name in after}
    memo |= {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo), received


@dataclass
class MicrobatchFeed:
    """What the stages of a rank look up while a step runs: the calls and weights of its microbatches."""

    calls: Sequence[Call] = ()
    loss: Callable[[Any, int], Tensor] | None = None
    """(the model's output, number of the microbatch) → the loss that is differentiated."""
    begin: Callable[[int, int], None] | None = None
    """Called with (number of the microbatch, stage) before a stage computes a microbatch."""


class Stage(nn.Module):
    """A cut model that is called with the number of a microbatch."""

    def __init__(self, model: nn.Module, received: StageInput, index: int, num_stages: int) -> None:
        super().__init__()
        self.model, self.index, self.num_stages = model, index, num_stages
        self.feed = MicrobatchFeed()
        self.device, self.comm_device = torch.device("cpu"), torch.device("cpu")
        self.dtype: torch.dtype | None = None
        """In which activations travel to the next stage."""
        self.wide: torch.dtype | None = None
        """In which they are computed with: as on one device, where they do not travel."""
        self._received = [received]  # in a list: not a submodule of this module, but of the model

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.index == self.num_stages - 1

    def forward(self, x: Tensor | None = None, *, microbatch: Tensor) -> Tensor:
        """What was received → what is sent on, or the loss."""
        number = int(microbatch[0])
        arguments, options = self.feed.calls[number]
        if self.feed.begin is not None:
            self.feed.begin(number, self.index)
        self._received[0].value = x if x is None else x.to(self.device, self.wide)
        try:
            output = self.model(*arguments, **options)
        except StopForward as reached:
            activation: Tensor = reached.args[0]
            return activation.to(self.comm_device, self.dtype)
        finally:
            self._received[0].value = None
        assert self.feed.loss is not None
        return self.feed.loss(output, number)


@dataclass
class Pipeline:
    """The stages of one rank, and torch's schedule over them, made anew for each shape of microbatches."""

    stages: list[Stage]
    schedule: Schedule
    group: dist.ProcessGroup
    device: torch.device
    comm_device: torch.device
    """Where what travels between stages is sent from and received."""
    num_stages: int
    activation: Callable[[Call], tuple[int, ...]]
    """The arguments of the model → the shape of what travels between stages."""
    dtype: torch.dtype
    """What travels between stages is of this dtype."""
    loss_dtype: torch.dtype
    owners: Sequence[int]
    """The place on the pp axis of every stage."""
    _schedules: dict[Any, Any] = field(default_factory=dict)

    def step(self, feed: MicrobatchFeed) -> None:
        """Forward and backward of all microbatches; gradients are left in the parameters."""
        schedule = self._schedule_for(feed)
        self._give(feed)
        numbers = torch.arange(len(feed.calls))
        target = numbers if self.has_loss else None
        try:
            schedule.step(microbatch=numbers, target=target, return_outputs=False)
        except RuntimeError as error:  # torch wraps what a stage raises
            if isinstance(error.__cause__, ShoalError):
                raise error.__cause__ from None
            _explain_shapes(error)
            raise

    @property
    def has_loss(self) -> bool:
        """Whether one of this rank's stages is the last."""
        return any(stage.is_last for stage in self.stages)

    @torch.no_grad()
    def forward(self, feed: MicrobatchFeed) -> None:
        """Forward of all microbatches, one after the other, with nothing kept; for an evaluation."""
        self._give(feed)
        mine = {stage.index: stage for stage in self.stages}
        me = dist.get_rank(self.group)
        sent: list[tuple[Tensor, list[dist.Work]]] = []
        for number, call in enumerate(feed.calls):
            x: Tensor | None = None
            for index, stage in mine.items():
                if index and self.owners[index - 1] != me:
                    x = torch.empty(self.activation(call), dtype=self.dtype, device=self.comm_device)
                    source = self.owners[index - 1]
                    receive = dist.P2POp(dist.irecv, x, group=self.group, group_peer=source)
                    for work in dist.batch_isend_irecv([receive]):  # as it is sent: NCCL keeps the two kinds apart
                        work.wait()
                x = stage(*([x] if index else []), microbatch=torch.tensor([number]))
                if not stage.is_last and self.owners[index + 1] != me:
                    send = dist.P2POp(dist.isend, x.contiguous(), group=self.group, group_peer=self.owners[index + 1])
                    sent.append((x, dist.batch_isend_irecv([send])))
        for _, works in sent:
            for work in works:
                work.wait()

    def _give(self, feed: MicrobatchFeed) -> None:
        for stage in self.stages:
            stage.feed, stage.device, stage.comm_device = feed, self.device, self.comm_device
            stage.dtype, stage.wide = self.dtype, self.loss_dtype

    def _schedule_for(self, feed: MicrobatchFeed) -> Any:
        shapes = {self.activation(call) for call in feed.calls}
        if len(shapes) > 1:
            raise ShoalError(
                f"the microbatches of a pipeline must be of one shape, but theirs are {sorted(shapes)}",
                fix="a batch that mb divides on every rank (DataLoader(..., drop_last=True)), sequences of one length",
            )
        key = (len(feed.calls), shapes.pop())
        if key not in self._schedules:
            degree = self.group.size()
            raise_if(
                check_schedule(self.schedule, num_ranks=degree, v=self.num_stages // degree, num_microbatches=key[0])
            )
            self._schedules[key] = self._make(*key)
        return self._schedules[key]

    def _make(self, num_microbatches: int, shape: tuple[int, ...]) -> Any:
        """torch's stages and schedule. Shapes are given, so that it need not run the model to find them."""
        from shoal.parallel.pipeline.torch_stages import (  # takes a second: only where there is a pipeline
            SCHEDULES,
            TorchStage,
        )

        activation = torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=True)
        loss = torch.empty((), dtype=self.loss_dtype, device="meta")
        stages = [
            TorchStage(
                stage,
                stage.index,
                self.num_stages,
                self.comm_device,
                input_args=(activation,) if stage.index else (),
                output_args=(loss,) if stage.is_last else (activation,),
                group=self.group,
            )
            for stage in self.stages
        ]
        # torch's 1F1B refuses one microbatch, with which it would be GPipe: one rank after the other.
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
    """torch 2.11 compares what a stage returns with what is sent between stages; later ones do not."""
    for one in (error, error.__cause__):
        if type(one).__name__ == "PipeliningShapeError":
            raise ShoalError(
                f"a stage ends where activations have another shape than between other stages: {one}",
                fix="another pp or v; under tp, stages that end after a layer that is split by ROW",
            ) from error
