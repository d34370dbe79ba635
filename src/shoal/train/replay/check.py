"""Compute the share of another rank again, every n steps, and compare the gradients bit for bit.

A processor that computes a wrong product now and then raises no error. Its wrong gradient is averaged into the weights
of all ranks, so copies stay equal, and a comparison of copies finds nothing.

    rank 0   forward, backward of share 0 [1] ─┐            ┌─ share 1 again [2] ─┐
    rank 1   forward, backward of share 1 [1] ─┼─ exchange ─┼─ share 2 again [2] ─┼─ compare [3] ─ update
    rank 2   forward, backward of share 2 [1] ─┘   shares   └─ share 0 again [2] ─┘

[1] Checksums of this rank's own gradients are taken when a parameter's gradient is complete, before it is averaged.
[2] The weights are still those of the step. Random numbers belong to the samples, so they are the same; buffers are
    those of that rank from before the step. Gradients of the replay are not averaged.
[3] Only if two numbers differ, every rank computes its own share and its neighbour's once more, and a third rank's, and
    `verdict` names the rank. The update is not made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.collectives import all_gather
from shoal.data.batch import map_tensors
from shoal.errors import ShoalError
from shoal.numerics.checksum import checksums, fold, signed
from shoal.parallel.data.ddp import DDPSync
from shoal.train.replay.verdict import Computed, failure_of, judge
from shoal.train.run_state import RunState
from shoal.train.step.engine import StepEngine
from shoal.train.step.report import OpenStep

Sums = dict[str, int]


@dataclass
class ComputeCheck:
    """Compare gradients with those that another rank computes from the same samples, every n steps."""

    every: int
    """Steps between two comparisons; 0: never."""
    agreed_at: int | None = None
    """The last step whose gradients were compared and equal."""
    _own: Sums = field(default_factory=dict)
    _buffers: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Buffers of the model, and their values before the step."""

    def is_due(self, run: RunState) -> bool:
        """Whether the step to come is compared."""
        return bool(self.every) and run.world.size > 1 and (run.steps_done + 1) % self.every == 0

    @contextmanager
    def recording(self, run: RunState) -> Iterator[None]:
        """Inside, take a checksum of every gradient before it is averaged, if the step is to be compared."""
        if not self.is_due(run):
            yield
            return
        reject_other_layouts(run)
        self._own = {}
        self._buffers = [(each, each.detach().clone()) for each in run.module.buffers()]
        handles = [
            parameter.register_post_accumulate_grad_hook(self._note(name))
            for name, parameter in run.composed.named.items()
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, name: str) -> Any:
        def note(parameter: Tensor) -> None:
            assert parameter.grad is not None
            (self._own[name],) = checksums([parameter.grad])  # of several microbatches, the last has the sum

        return note

    def compare(self, engine: StepEngine) -> None:
        """Before the update: raise on every rank if two ranks differ, and name the one that computes wrong."""
        run = engine.state
        if not self.is_due(run):
            return
        rank, size, number = run.world.rank, run.world.size, run.steps_done + 1
        own = {name: self._own[name] for name in run.composed.named if name in self._own}
        shares = self._shares(run)
        neighbour = (rank + 1) % size
        first = self._replayed(engine, shares[neighbour])
        numbers = torch.tensor([[signed(fold(own.values())), signed(fold(first.values()))]])
        every = all_gather(numbers, 0, run.world.control_group).tolist()
        if all(every[(each + 1) % size][0] == every[each][1] for each in range(size)):
            self.agreed_at = number
            return
        again = {rank: [own], neighbour: [first]}
        for share in {rank, neighbour, (rank + 2) % size}:
            again.setdefault(share, []).append(self._replayed(engine, shares[share]))
        own_rows: list[Any] = [[share, sums] for share, tries in again.items() for sums in tries]
        found = run.world.all_gather_object(own_rows)
        computed = [Computed(share, each, sums) for each, rows in enumerate(found) for share, sums in rows]
        before = self.agreed_at if self.agreed_at is not None and self.agreed_at < number else None  # a load goes back
        raise failure_of(judge(computed), step=number, agreed_at=before, num_ranks=size)

    def _shares(self, run: RunState) -> list[dict[str, Any]]:
        """The samples of all ranks, and the buffers of the model before the step, where they differ between ranks."""
        values = [value for _, value in self._buffers]
        shares = run.world.all_gather_object({**_share_of(run), "buffers": signed(fold(checksums(values)))})
        if len({share.pop("buffers") for share in shares}) == 1:
            return [{**share, "buffers": values} for share in shares]
        every = run.world.all_gather_object([value.cpu() for value in values])
        return [{**share, "buffers": each} for share, each in zip(shares, every, strict=True)]

    def _replayed(self, engine: StepEngine, share: dict[str, Any]) -> Sums:
        """Checksums of the gradients of a share, computed on this rank. The run is left as it was."""
        run, named = engine.state, engine.state.composed.named
        step, generators = run.open_step, _random_states(run.device)
        gradients = {name: parameter.grad for name, parameter in named.items()}
        buffers = [(each, each.detach().clone()) for each, _ in self._buffers]
        try:
            values = share["buffers"]
            _put_back([(each, value) for (each, _), value in zip(self._buffers, values, strict=True)])
            for parameter in named.values():
                parameter.grad = None
            assert step is not None
            run.open_step = _step_of(step, share, run.device)
            engine.local_gradients(run.open_step)
            present = {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}
            return dict(zip(present, checksums(list(present.values())), strict=True))
        finally:
            run.open_step = step
            for name, parameter in named.items():
                parameter.grad = gradients[name]
            _put_back(buffers)
            _set_random_states(run.device, generators)


def reject_other_layouts(run: RunState) -> None:
    """Raise if a rank's gradients are not whole before they are averaged, or depend on other ranks."""
    normalises_together = any(isinstance(each, nn.SyncBatchNorm) for each in run.module.modules())
    if isinstance(run.composed.replicas, DDPSync) and not normalises_together and run.composed.balance is None:
        return
    raise ShoalError(
        f"check_compute needs ranks that compute alone and hold the whole model, and the plan is {run.plan.brief()}",
        fix="--run.check_compute 0step; --run.check_replicas 100step compares copies under every plan",
        code="T079",
    )


def _share_of(run: RunState) -> dict[str, Any]:
    """The samples of this rank's open step, for other ranks."""
    step = run.open_step
    assert step is not None
    return {
        "microbatches": [map_tensors(lambda tensor: tensor.cpu(), each) for each in step.microbatches],
        "weights": step.weights,
        "num_own": step.num_own,
        "counts": step.counts,
        "offset": step.offset,
    }


def _step_of(step: OpenStep, share: dict[str, Any], device: torch.device) -> OpenStep:
    """The open step with the samples of another rank; its loss is not sent."""
    microbatches = [map_tensors(lambda tensor: tensor.to(device), each) for each in share["microbatches"]]
    own = {name: share[name] for name in ("weights", "num_own", "counts", "offset")}
    fresh: dict[str, Any] = {"sums": [], "kinds": set(), "deferred_counts": {}, "seen_shifted": [], "message": None}
    return replace(step, **own, **fresh, microbatches=microbatches, index=-1, signals_with_loss=None)


def _put_back(values: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for tensor, value in values:
            tensor.copy_(value)


def _random_states(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _set_random_states(device: torch.device, states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
