"""`shoal.profile(run)`: time the parts of every step inside a `with`.

    with shoal.profile(run) as profile:
        for batch in itertools.islice(run.batches(loader), 6):
            run.step(batch)
    print(profile.result)

A step is all that happens from the end of one update to the end of the next one. The first step is left out: it begins
at the `with`, and fills caches.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from shoal.affinity import num_cores
from shoal.comm.profile.axis_overlap import by_axis
from shoal.comm.profile.stream_timer import StreamTimer
from shoal.comm.profile.timer import PartTimer, current, part
from shoal.comm.profile.waits import watch_waits
from shoal.comm.replicas.overlap import Overlap
from shoal.errors import ShoalError
from shoal.observe.profile.kernels import Kernel
from shoal.observe.profile.profile import Profile
from shoal.observe.profile.record import RankRecord
from shoal.observe.profile.verdict import Verdict
from shoal.parallel.inspect.live_memory import peak_bytes
from shoal.train.profile.fixes import to_change
from shoal.train.profile.memory_over_time import MemoryOverTime
from shoal.train.run import Run


class Profiler:
    """Times the steps of a run, on every rank. All ranks enter and leave it at the same step."""

    def __init__(self, run: Run, *, warmup: int = 1) -> None:
        self.run, self.warmup = run, warmup
        self.timer: PartTimer | None = None
        self._found: Profile | None = None
        self._peak = 0
        self._undo: list[Callable[[], None]] = []
        self._overlaps: list[Overlap] = []

    @property
    def result(self) -> Profile:
        """What was measured."""
        if self._found is None:
            raise ShoalError(
                "a profile has a result after its `with` block has ended", fix="print(profile.result) after it",
                code="T080",
            )  # fmt: skip
        return self._found

    @property
    def steps_timed(self) -> int:
        """Steps so far, without those that warm up."""
        return max(0, len(self.timer.steps) - self.warmup) if self.timer is not None else 0

    # ---- begin and end -----------------------------------------------------------------------------------------------

    def start(self, then: Callable[[], None] | None = None) -> None:
        """Begin to time. Every rank calls it, between two steps. `then` is called after every step."""
        reject_device(self.run)
        if current.timer is not None:
            raise ShoalError("this process is being profiled already", fix="one `with shoal.profile(run)`", code="T082")
        self.run.reject_open_step("to profile")
        self.run.world.barrier()  # else the first wait would be for the rank that starts last
        self.timer = current.timer = StreamTimer() if self.run.device.type == "cuda" else PartTimer()
        self.memory = MemoryOverTime(self.run, self.timer)
        self._undo = [watch_waits(), self._watch_forward(), self._watch_updates(then)]
        self.timer.begin_step()

    def stop(self) -> None:
        """End to time. A step that is not finished is left out."""
        current.timer = None
        if self._undo:  # the first time: what follows is not of the timed steps
            self._peak = peak_bytes(self.run.device)
        while self._undo:
            self._undo.pop()()

    def finish(
        self,
        *,
        fix: Callable[[Verdict], str] | None = None,
        predicted: Mapping[str, float] | None = None,
        more: Mapping[str, Any] | None = None,
        kernels: Sequence[Kernel] = (),
        gpu: Callable[[float], Mapping[str, Any]] | None = None,
    ) -> Profile:
        """Gather what all ranks have timed. Every rank calls it.

        `kernels` are those of further steps of this rank's GPU; `gpu` says how it is used in a step of some seconds.
        """
        self.stop()
        assert self.timer is not None
        self.timer.resolve()
        records = self.run.world.all_gather_object(self._record().to_mapping())
        if not all(record["steps"] for record in records):
            raise ShoalError(
                f"a profile needs at least {self.warmup + 1} steps, got {len(self.timer.steps)}",
                fix=f"{self.warmup + 5} steps inside of `with shoal.profile(run)`",
                code="T081",
            )
        plan = self.run.plan.brief()
        every = [RankRecord.from_mapping(record) for record in records]
        found = {**(more or {}), "overlap": self._overlap()}
        self._found = Profile.of(
            every,
            plan=plan,
            fix=fix or (lambda verdict: to_change(verdict, self.run.plan, self.run.policies)),
            predicted=predicted,
            more=found,
            kernels=kernels,
            gpu=gpu,
        )
        return self._found

    def __enter__(self) -> Profiler:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self.stop()

    # ---- what is timed -----------------------------------------------------------------------------------------------

    def _watch_updates(self, then: Callable[[], None] | None) -> Callable[[], None]:
        """End a step with every update."""
        timer, before = self.timer, self.run.after_update
        assert timer is not None

        def end_step() -> None:
            timer.end_step()
            if self.run.report is not None and self.run.report.overlap is not None:
                self._overlaps.append(self.run.report.overlap)
            if then is not None:
                then()

        self.run.after_update = end_step

        def undo() -> None:
            self.run.after_update = before

        return undo

    def _watch_forward(self) -> Callable[[], None]:
        """Time the forward in a loop that calls the model itself. Elsewhere the forward is a part already."""
        if self.run.composed.pipeline is not None:
            return lambda: None
        opened: list[Any] = []

        def begin(*_: Any) -> None:
            timer = current.timer
            if timer is not None and not timer.is_inside("forward") and not timer.is_inside("backward"):
                opened.append(part("forward"))
                opened[-1].__enter__()

        def end(*_: Any) -> None:
            if opened:
                opened.pop().__exit__(None, None, None)

        hooks = [
            self.run.model.register_forward_pre_hook(begin, prepend=True),
            self.run.model.register_forward_hook(end, always_call=True),
        ]

        def undo() -> None:
            for hook in hooks:
                hook.remove()

        return undo

    def _overlap(self) -> dict[str, float]:
        """Axis → the part of its communication that computation hides, on this rank; on a CPU alone."""
        assert self.timer is not None
        timer, timed = self.timer, self._overlaps[self.warmup :]
        found = by_axis(timer.steps[self.warmup :], timer.entered, timer.ended) if timer.is_of_host else {}
        hidden = {axis: each.hidden for axis, each in found.items() if each.seconds}
        seconds = sum(each.seconds for each in timed)
        if seconds:  # by the timers of DDP: Python sees only the end of its collectives
            hidden["dp_replicate"] = 1 - sum(each.exposed for each in timed) / seconds
        return hidden

    def _record(self) -> RankRecord:
        assert self.timer is not None
        layout, rank = self.run.plan.layout, self.run.world.rank
        place = {axis: index for axis, index in layout.coordinate(rank).items() if layout.degree(axis) > 1}
        cores = num_cores()
        steps = self.timer.steps[self.warmup :]
        device = self.run.device.type
        sent = max(self._overlaps[self.warmup :], key=lambda each: each.messages, default=None)
        return RankRecord(
            rank,
            _host(),
            place,
            torch.get_num_threads(),
            cores,
            steps,
            self.timer.entered,
            messages=0 if sent is None else sent.messages,
            bytes=0 if sent is None else sent.bytes,
            device=device,
            peak=self._peak,
        )


def profile(run: Run, *, warmup: int = 1) -> Profiler:
    """Time the parts of every step inside a `with`, and say what bounds them.

    run     all ranks enter and leave the block at the same step
    warmup  steps at its beginning that are left out
    """
    return Profiler(run, warmup=warmup)


def _host() -> str:
    """An id of the running kernel, whose processes share a clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def reject_device(run: Run) -> None:
    """Raise on a device whose time cannot be divided."""
    if run.device.type not in ("cpu", "cuda"):
        raise ShoalError(
            f"a profile times a CPU or a CUDA device, got {run.device.type}",
            fix="torch.profiler.profile(), or --device cpu",
            code="T083",
        )
