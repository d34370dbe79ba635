"""The microbatches of an open step, and which of them ends it.

    by the config      F B step   F B step       step() ends a microbatch, and each Nth one ends the step
    by the script      F B   F B   F B step      set_gradient_accumulation_boundary(False), or no_sync(): the backward
                                                 ends a microbatch, and a later step() the step

Gradients are averaged over ranks in the backward of the microbatch that ends the step. Whether it is that one must be
known in its forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from shoal.errors import ShoalError
from shoal.train.run import Run
from shoal.train.step.report import OpenStep


class Accumulation:
    """Enters and leaves the microbatches of a step."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.number = 1
        """Microbatches of a step, on one rank, by which each loss is divided."""
        self.num_ended = 0
        """Microbatches of the open step that `step` has ended."""
        self.boundary: bool | None = None
        """Whether the microbatch at hand ends the step, as the script says; None: the config says it."""
        self.is_unsynced = False
        """Whether the script is inside of `no_sync`."""
        self.has_backward = False
        """Whether there was a backward since the last `step`."""
        self.is_used = False
        """Whether there was a backward in the microbatch at hand."""
        self._step: OpenStep | None = None
        self._inside = ExitStack()
        self._is_inside = self._is_last = False

    @property
    def is_boundary(self) -> bool:
        """Whether the next `step` updates the model."""
        return (self.num_ended + 1) % self.number == 0 if self.boundary is None else self.boundary

    @property
    def is_open(self) -> bool:
        """Whether a step has begun, and not ended."""
        return self._step is not None

    @property
    def has_gradients(self) -> bool:
        """Whether the step that has begun has had a backward."""
        return self._step is not None and self._step.has_begun

    @property
    def ends_by_backward(self) -> bool:
        """Whether a backward ends its microbatch, in place of `step`."""
        return self.is_unsynced or self.boundary is False

    def enter(self) -> None:
        """Enter a microbatch, unless this rank is in one."""
        is_last = self.is_boundary and not self.is_unsynced
        if self._is_inside and self._is_last != is_last:
            raise ShoalError(
                "the forward and the backward of a microbatch differ in whether it ends the step",
                fix="engine.set_gradient_accumulation_boundary(True) before the forward, or both inside of no_sync()",
                code="E015",
            )
        if self._is_inside:
            return
        if self._step is None:
            self._step = self.run.engine.open_equal(self.number)
        self._inside.enter_context(self.run.engine.equal_microbatch(self._step, is_last=is_last))
        self._is_inside, self._is_last = True, is_last
        self.is_used = False

    def after_backward(self) -> None:
        """Note a backward, which ends the microbatch if `step` does not."""
        self.has_backward = self.is_used = True
        if self.ends_by_backward:
            self._leave()

    def end_microbatch(self) -> bool:
        """End the microbatch, for `step`; returns whether the step ends with it."""
        is_last = self.is_boundary
        self._leave()
        self.has_backward = False
        self.num_ended += 1
        if is_last:
            self._end_step()
        return is_last

    @contextmanager
    def without_sync(self) -> Iterator[None]:
        """Inside, no backward ends a step."""
        self.is_unsynced = True
        try:
            yield
        finally:
            self.is_unsynced = False

    def _leave(self) -> None:
        self._inside.close()
        self._is_inside = self.is_used = False

    def _end_step(self) -> None:
        """A script with boundaries of its own may have had fewer backwards than the config says."""
        if not self._is_last:
            raise ShoalError(
                "the last backward of the step was inside of no_sync(), or before a boundary was set",
                fix="engine.set_gradient_accumulation_boundary(True) before the last forward; or it outside of no_sync",
                code="E015",
            )
        assert self._step is not None
        del self._step.microbatches[len(self._step.sums) :]
        self._step, self.num_ended = None, 0
