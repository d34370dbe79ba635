"""A run to a checkpoint and back: what a run knows beside its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.checkpoint.load import load
from shoal.checkpoint.save import save
from shoal.checkpoint.store import Store
from shoal.checkpoint.together import together
from shoal.errors import ShoalError

if TYPE_CHECKING:
    from shoal.train.run import Run


def save_run(run: Run, directory: Path) -> None:
    """All of a run between two steps."""
    _refuse_offloaded(run)
    run.settle()
    run.composed.before_evaluation()  # statistics of batch norm: those of all ranks
    state = {
        "seed": run.seed,
        "plan": str(run.plan),
        "loss_scale": {"scale": run.loss_scale.scale, "good_steps": run.loss_scale.good_steps},
        "num_calls": run.optimizer.param_groups[0].get("num_calls", 0),
    }
    save(Store(directory), run.world, run.composed, run.optimizer, step=run.steps_done, state=state)


def load_run(run: Run, directory: Path, step: int | None) -> int:
    """Returns how many steps the run had made."""
    _refuse_offloaded(run)
    how = {"failed": f"{directory} was not loaded", "fix": "load another step: run.load(directory, step=...)"}
    manifest = together(run.world, lambda: load(Store(directory), run.composed, run.optimizer, step=step), **how)[
        0
    ]  # and nobody trains, or saves, while another one reads
    scale = manifest.state.get("loss_scale", {})
    run.loss_scale.scale = float(scale.get("scale", run.loss_scale.scale))
    run.loss_scale.good_steps = int(scale.get("good_steps", 0))
    if calls := manifest.state.get("num_calls", 0):
        run.optimizer.param_groups[0]["num_calls"] = int(calls)
    run.steps_done = manifest.step
    return manifest.step


def _refuse_offloaded(run: Run) -> None:
    if run.plan.offload != "none":
        raise ShoalError(f"offload={run.plan.offload} cannot be saved yet", fix="a plan without offload")
