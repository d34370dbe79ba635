"""Profile a few steps of a recipe's run: `run.profile` and `shoal profile`.

step   1   2 │ 3 │ 4   5   6   7   8 │ 9   10
             │   └ timed by part      └ top operators, with torch's profiler, whose own cost is in no part
             └ the timer runs, and its first step is left out
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.comm.heartbeat.heart import phase
from shoal.config.recipe import Recipe
from shoal.observe.profile.kernels import Kernel, gpu_use
from shoal.observe.profile.profile import Profile
from shoal.train.profile.advice import Advice
from shoal.train.profile.operators import OperatorTrace
from shoal.train.profile.profiler import Profiler, reject_device
from shoal.train.profile.sensors import Sensors
from shoal.train.run import Run

FIRST, WARMUP, TRACED = 2, 1, 2
"""Steps before the timer, steps that it leaves out, and steps of torch's profiler."""


def steps_needed(steps: int) -> int:
    """The steps of a run that is profiled for `steps` steps."""
    return FIRST + WARMUP + steps + TRACED


class RecipeProfile:
    """The profile of a run, which begins and ends by itself; of no steps, it does nothing."""

    def __init__(
        self,
        run: Run,
        recipe: Recipe,
        steps: int,
        directory: Path | None,
        note: Callable[[str], None],
        *,
        is_only: bool = False,
        mfu: Callable[[float], float | None] = lambda seconds: None,
        leave_out: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.mfu = mfu
        """Seconds of a step → the utilization of its FLOPs; None: not known."""
        self.leave_out = leave_out
        """Called with the seconds that the profile itself has taken, which are no part of a step."""
        self.loader_processes: Callable[[], int] = lambda: 0
        """The processes that prepare batches of this rank."""
        self.run, self.recipe, self.steps, self.directory, self.note = run, recipe, steps, directory, note
        self.is_only = is_only
        """Whether the run exists for its profile."""
        self._made = 0
        self._profiler: Profiler | None = None
        self._operators: OperatorTrace | None = None
        self._result: dict[str, Any] | None = None
        self._sensors: Sensors | None = None

    def begin(self) -> None:
        """Count the steps of the run from now on."""
        if self.steps:
            reject_device(self.run)
            self.run.after_update = self._after_update
            if self.run.device.type == "cuda" and self.run.is_main:
                self._sensors = Sensors(self.run.device)

    def finish(self) -> None:
        """End a profile that the end of the run has cut short. Every rank calls it."""
        if self._profiler is not None and self._result is None:
            if self._profiler.steps_timed:
                with self._own_time():
                    self._report()
            else:
                self._profiler.stop()
                self.note("profile: the run ended before a step was timed")

    def close(self) -> None:
        """Stop all timers, also after a failure: the process may train on in the place of another run."""
        if self._profiler is not None:
            self._profiler.stop()
        if self._operators is not None:
            self._operators.stop()
        if self._sensors is not None:
            self._sensors.stop()

    def summary(self) -> dict[str, Any]:
        """The profile, for the summary of the run; empty: there was none."""
        return {} if self._result is None else {"profile": self._result}

    def _after_update(self) -> None:
        self._made += 1
        if self._made == FIRST:
            self._profiler = Profiler(self.run, warmup=WARMUP)
            self._profiler.start(then=self._after_update)
        elif self._made == FIRST + WARMUP + self.steps:
            assert self._profiler is not None
            self._profiler.stop()
            with self._own_time():
                self._operators = OperatorTrace.begin(self.run.device) if self.run.is_main else None
                self.run.world.barrier()
        elif self._made == steps_needed(self.steps):
            with self._own_time():
                self._report()
            self.run.after_update = None

    @contextmanager
    def _own_time(self) -> Iterator[None]:
        """Work of the profile between two steps. The others wait for rank 0, which reads its trace for seconds."""
        begin = time.perf_counter()
        with phase("profile"):
            yield
        self.leave_out(time.perf_counter() - begin)

    def _report(self) -> None:
        """Gather, judge and write."""
        assert self._profiler is not None
        if not self.run.is_main:
            self._result = self._profiler.finish().to_mapping()
            return
        advice = Advice(self.recipe, self.run.world.local_size, workers=self.loader_processes())
        trace = self._operators
        memory = {**advice.memory(self.run), "over_time": self._profiler.memory.readings}
        operators = trace.operators() if trace is not None else {}
        more = {"is_calibrated": advice.is_calibrated, "memory": memory, **operators}
        is_traced = trace is not None and self._sensors is not None and self._traced > 0
        kernels = trace.kernels() if trace is not None and is_traced else []
        found = self._profiler.finish(
            fix=advice.fix,
            predicted=advice.predicted,
            more=more,
            kernels=kernels,
            gpu=(lambda seconds: self._gpu(seconds, kernels)) if kernels else None,
        )
        self._result = found.to_mapping()
        self._write(found)
        if not self.is_only:  # else the command prints it
            self.note(f"profile: {found.verdict.title}: {found.verdict.evidence}\n         next: {found.verdict.next}")

    @property
    def _traced(self) -> int:
        """Steps of torch's profiler so far; a run may end in the midst of them."""
        return self._made - FIRST - WARMUP - self.steps

    def _gpu(self, seconds: float, kernels: Sequence[Kernel]) -> dict[str, Any]:
        """How the GPU of this rank is used in a step of some seconds."""
        assert self._operators is not None
        assert self._sensors is not None
        return {
            **gpu_use(kernels, steps=self._traced, step_seconds=seconds),
            "mfu": self.mfu(seconds),
            "traced_step_seconds": self._operators.seconds / self._traced,
            **self._sensors.medians(*self._window),
        }

    @property
    def _window(self) -> tuple[int, int]:
        """When the first profiled step began and the last one ended, in ns of CLOCK_MONOTONIC."""
        assert self._profiler is not None
        assert self._profiler.timer is not None
        steps = self._profiler.timer.steps[WARMUP:]  # of which the last span is the step itself
        return steps[0].spans[-1].begin, steps[-1].spans[-1].end

    def _write(self, found: Profile) -> None:
        """Write both files, or report why not: a full disk does not end a run."""
        if self.directory is None:
            return
        try:
            found.write(self.directory / "profile.json")
            found.write_trace(self.directory / "trace.json")
        except OSError as error:
            self.note(f"profile: {self.directory / 'profile.json'} cannot be written: {error.strerror}")
