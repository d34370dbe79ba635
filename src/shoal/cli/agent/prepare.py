"""Load and check the job of `shoal train` on one host of several, and make the work of its workers."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.process import import_for_workers
from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.errors import ShoalError

if TYPE_CHECKING:
    from shoal.launch.hosts.agent.runner import Work
    from shoal.launch.hosts.messages import Message


@dataclass(frozen=True, kw_only=True)
class TrainVerb:
    """The parts of `shoal train` that an agent needs."""

    parse: Callable[[Sequence[str]], tuple[Any, Any]]
    """The arguments of the command → its options and its recipe."""
    checked_job: Callable[..., Any]
    write_result: Callable[[Any, dict[str, Any]], bool]
    """Write the summary beside the run; whether that worked."""

    def prepare(self, order: Message) -> tuple[Message, Callable[[Message], Work]]:
        """Load and check the job of an order."""
        plan = [] if order["plan"] is None else ["--plan", str(order["plan"])]
        options, reading = self.parse([*order["words"], *plan])
        check_recipe(options.recipe, order)
        placement = Placement(
            rank=order["first_rank"], world_size=order["world_size"], local_rank=0, local_world_size=order["num_local"]
        )
        job = self.checked_job(options, reading, placement)
        import_for_workers(job.recipe.plan)
        facts = {
            "plan": str(job.recipe.plan),
            "recipe": recipe_hash(job.recipe),
            "device": device_there(job.recipe.launch.device, order),
            "saves_to": _saves_to(job.recipe),
            "has_copies": bool(job.recipe.checkpoint.memory_every.amount),
        }
        return facts, lambda start: self._work(job, options, start)

    def _work(self, job: Any, options: Any, start: Message) -> Work:
        from shoal.launch.hosts.agent.runner import Work
        from shoal.train.recipe.invocation import RunInvocation
        from shoal.train.recipe.loop import train
        from shoal.train.recipe.saving.host_storage import HostStorage

        launch = job.recipe.launch
        invocation = RunInvocation(
            save=not job.recipe.run.fast_dev_run,
            quiet=options.quiet or options.json,
            start_time=time.time() - float(start["age"]),
            resume=options.resume,
            generation=int(start["generation"]),
            saved_before=int(start["saved_before"]),
            command=str(start["job"]),
            host=HostStorage(name=str(start["host"]), shares_disk=bool(start["shares_disk"])),
        )

        def finish(summary: dict[str, Any]) -> dict[str, Any]:
            is_written = self.write_result(job, summary)
            return {"summary": summary, "is_written": is_written, "was_stopped": summary["was_stopped"]}

        times = {"grace_period": launch.grace_period, "timeout": launch.timeout}
        return Work(function=train, args=(job, invocation), finish=finish, **times)


def check_recipe(path: Path | None, order: Message) -> None:
    """Reject a recipe that is missing on this host, or is another file than the coordinator's."""
    if path is None or order["recipe"] is None:
        return
    where = f"{order['name']}:{Path.cwd()}/"
    if not path.exists():
        raise ShoalError(f"{str(path)!r} does not exist there", fix=f"scp {path} {where}", code="N059")
    if hashlib.sha256(path.read_bytes()).hexdigest() != order["recipe"]:
        what = f"{str(path)!r} is not the file that the coordinator has"
        raise ShoalError(what, fix=f"scp {path} {where}", code="N059")


def _saves_to(recipe: Any) -> str:
    """The folder that must be on all hosts; empty: nothing is saved, or an object store has the checkpoints."""
    if recipe.run.fast_dev_run or "://" in (recipe.checkpoint.dir or ""):
        return ""
    return str(recipe.checkpoint.dir or recipe.run.dir or "runs")


def recipe_hash(recipe: Any) -> str:
    """The start of a hash, by which hosts compare their recipes."""
    text = json.dumps(recipe.model_dump(mode="json"), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def device_there(device: str, order: Message) -> str:
    """The kind of device that ranks of this host will use; raises if there are fewer GPUs than ranks."""
    import torch

    from shoal.launch.local import default_nproc

    if device == "cpu" or not torch.cuda.is_available():
        return "cpu"
    count = default_nproc(device)
    if count < order["num_local"]:
        what = f"it has {count} GPUs, but --hosts gives it {order['num_local']} ranks"
        raise ShoalError(what, fix=f"--hosts {order['name']}:{count}, or --launch.device cpu", code="N061")
    return "cuda"
