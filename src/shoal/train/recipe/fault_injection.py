"""Inject the faults of SHOAL_FAULTS (`shoal.blueprint.faults`) between backward and update, where peers wait."""

from __future__ import annotations

import os
import signal

from shoal.blueprint.faults import GENERATION, Faults
from shoal.train.run import Run


def inject_faults(run: Run, generation: int) -> None:
    """Make the steps of a run fail as the environment says."""
    os.environ[GENERATION] = str(generation)  # read by the faults of the disk
    faults = Faults.here(run.world.rank)
    if not faults.ordered:
        return

    def fail() -> None:
        step = run.steps_done + 1
        if faults.due("kill_at", step=step):
            os.kill(os.getpid(), signal.SIGKILL)
        if faults.due("fail_allreduce_at", step=step):
            raise RuntimeError(f"the exchange of step {step} fails, as SHOAL_FAULTS orders")

    run.on_gradients = fail
