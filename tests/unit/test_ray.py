"""`shoal.ray` without Ray: its modules are stood in for. `make test-ray` has the real one."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import shoal.ray
from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.config.load import build_recipe
from shoal.config.recipe import Recipe
from shoal.errors import ShoalError
from shoal.ray import worker
from shoal.ray.reporting import Reporter
from shoal.ray.scaling import with_plan_for
from shoal.ray.worker import call_function, train_recipe
from tests.rejects import rejects

SMALL = {
    "model": {"name": "llama", "preset": "tiny", "num_layers": 1},
    "data": {"source": "python", "seq_len": 16, "global_batch": 4, "validation": 0.00001},
    "launch": {"device": "cpu"},
    "run": {"duration": "2step"},
}


@dataclass
class FailureConfig:
    max_failures: int = 0


@dataclass
class CheckpointConfig:
    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None


@dataclass
class RunConfig:
    name: str = "given"
    storage_path: str = "storage"
    storage_filesystem: Any = None
    failure_config: FailureConfig = field(default_factory=FailureConfig)
    checkpoint_config: CheckpointConfig = field(default_factory=CheckpointConfig)


@dataclass
class ScalingConfig:
    num_workers: int | tuple[int, int] = 1
    use_gpu: bool = False

    @property
    def min_workers(self) -> int:
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[0]

    @property
    def max_workers(self) -> int:
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[1]


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Stand in for Ray with one worker; what is reported to it."""
    found: list[dict[str, Any]] = []

    def report(metrics: dict[str, Any], **more: Any) -> None:
        found.append({**metrics, **more})

    train = ModuleType("ray.train")
    train.__dict__.update(
        FailureConfig=FailureConfig, RunConfig=RunConfig, ScalingConfig=ScalingConfig, report=report,
        Checkpoint=str, CheckpointUploadMode=SimpleNamespace(NO_UPLOAD="no"),
        get_context=lambda: SimpleNamespace(get_node_rank=lambda: 0),
    )  # fmt: skip
    collective = ModuleType("ray.train.collective")
    collective.__dict__["broadcast_from_rank_zero"] = lambda value: value
    ray = ModuleType("ray")
    ray.__path__ = []
    for module in (ray, train, collective):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    return found


def test_neither_ray_nor_torch_is_imported_with_the_package() -> None:
    check = "import sys, shoal.ray; assert {'torch', 'ray'}.isdisjoint(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


def test_a_missing_ray_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with rejects("R027", "shoal.ray needs the package ray[train]", "[ray]"):
        shoal.ray.Trainer(SMALL)


# ── what a trainer rejects ───────────────────────────────────────────────────────────────────────────────────────────


def other(**sections: dict[str, Any]) -> dict[str, Any]:
    return {**SMALL, **{name: {**SMALL.get(name, {}), **section} for name, section in sections.items()}}


@pytest.mark.parametrize(
    ("code", "work", "options"),
    [
        ("Y002", 3, {}),
        ("Y003", print, {"settings": {"optim.lr": 1}}),
        ("Y003", SMALL, {"settings": {"optim.lr": 1}}),
        ("Y003", SMALL, {"config": {}}),
        ("Y004", {**SMALL, "plan": "tp=2"}, {"scaling_config": (1, 4)}),
        ("Y005", SMALL, {"run_config": RunConfig(storage_filesystem=object())}),
        ("Y006", SMALL, {"resume": "fresh"}),
        ("Y007", SMALL, {"scaling_config": 0}),
        ("Y008", other(run={"dir": "runs/a"}), {}),
        ("Y008", other(checkpoint={"dir": "s3://a/b"}), {}),
        ("Y009", other(run={"overwrite": True}), {}),
        ("Y011", SMALL, {"scaling_config": [1, 2]}),
        ("Y011", SMALL, {"run_config": {"name": "a"}}),
        ("Y010", other(launch={"device": "cuda"}), {}),
    ],
)
def test_a_trainer_rejects(code: str, work: Any, options: dict[str, Any], reports: list[Any]) -> None:
    with rejects(code):
        shoal.ray.Trainer(work, **options)


def test_all_problems_are_reported_at_once(reports: list[Any]) -> None:
    with pytest.raises(ShoalError) as caught:
        shoal.ray.Trainer(other(run={"dir": "a", "overwrite": True}), (1, 4), resume="3")
    assert caught.value.codes == ("Y006", "Y004", "Y008", "Y009")


def test_defaults_come_from_the_recipe(reports: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(other(launch={"max_restarts": 7}, run={"name": "mine"})))
    trainer = shoal.ray.Trainer(path, settings={"optim.lr": 0.5})
    assert trainer.recipe is not None
    assert trainer.recipe.optim.lr == 0.5
    assert trainer.run_config.name == "mine"
    assert trainer.run_config.failure_config.max_failures == 7
    given = RunConfig()
    assert shoal.ray.Trainer(path, run_config=given).run_config.failure_config.max_failures == 7
    assert given.failure_config.max_failures == 0
    kept = shoal.ray.Trainer(path, run_config=RunConfig(failure_config=FailureConfig(2)))
    assert kept.run_config.failure_config.max_failures == 2


def test_settings_of_ray_for_checkpoints_are_not_ignored(reports: list[Any]) -> None:
    with rejects("Y012", "num_to_keep=2", "'checkpoint.keep': 2"):
        shoal.ray.Trainer(SMALL, run_config=RunConfig(checkpoint_config=CheckpointConfig(num_to_keep=2)))
    with rejects("Y012", "checkpoint_score_attribute='loss'"):
        shoal.ray.Trainer(SMALL, run_config=RunConfig(checkpoint_config=CheckpointConfig(None, "loss")))
    shoal.ray.Trainer(lambda: None, run_config=RunConfig(checkpoint_config=CheckpointConfig(num_to_keep=2)))


def test_a_run_is_below_the_storage_path(reports: list[Any], tmp_path: Path) -> None:
    local = shoal.ray.Trainer(SMALL, run_config=RunConfig(storage_path=str(tmp_path)))
    order = local._order()
    assert order["recipe"]["run"]["dir"] == order["directory"] == f"{tmp_path}/given/shoal"
    assert (
        shoal.ray.Trainer(SMALL, run_config=RunConfig(storage_path=f"file://{tmp_path}")).directory
        == order["directory"]
    )
    far = shoal.ray.Trainer(SMALL, run_config=RunConfig(storage_path="s3://bucket/all"))
    order = far._order()
    assert order["recipe"]["checkpoint"]["dir"] == "s3://bucket/all/given/shoal/checkpoints"
    assert order["recipe"]["run"]["dir"] is None


# ── the plan for the size that came ──────────────────────────────────────────────────────────────────────────────────


def test_an_explicit_plan_follows_the_number_of_workers() -> None:
    recipe = build_recipe({**SMALL, "plan": "tp=2 dp_shard=2"}, title="")
    plans = {size: with_plan_for(recipe, size, size).plan.layout for size in (2, 4, 8)}
    assert [(layout.tp, layout.dp_shard) for layout in plans.values()] == [(2, 1), (2, 2), (2, 4)]


def test_auto_is_planned_again() -> None:
    recipe = build_recipe({**SMALL, "plan": "auto fp64"}, title="")
    for size in (1, 2):
        found = with_plan_for(recipe, size, size)
        assert (found.plan.layout.world_size, found.plan.precision, found.run.planned) == (size, "fp64", False)


# ── reports ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Ranks:
    """Barriers of two ranks in place of Ray's, with rank 0's value."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=30)
        self.value: Any = None

    def agree(self, rank: int, value: Any) -> Any:
        if rank == 0:
            self.value = value
        self.barrier.wait()
        found = self.value
        self.barrier.wait()
        return found


def test_every_record_is_sent_once_and_ranks_report_equally_often() -> None:
    ranks, sent = Ranks(), ([], [])

    def reporter(rank: int) -> Reporter:
        def send(metrics: dict[str, Any]) -> None:
            ranks.barrier.wait()
            sent[rank].append(metrics)

        return Reporter(send, lambda value: ranks.agree(rank, value))

    both = [reporter(0), reporter(1)]
    for step in range(50):
        both[1].write({"step": step})
    both[0].write({"step": 0})
    while not sent[1]:  # rank 0 has one record, and rank 1 reports as many
        time.sleep(0.001)
    assert sent[1][0]["records"] == [{"step": 0}]
    for step in range(1, 50):
        both[0].write({"step": step})
    both[0].write({"eval_loss": 2.0})
    both[1].write({"eval_loss": 2.0})
    finishing = threading.Thread(target=both[1].finish)
    finishing.start()
    assert both[0].finish() == {"step": 49, "eval_loss": 2.0}
    finishing.join()
    for found in sent:
        assert [one for metrics in found for one in metrics["records"]] == [
            *({"step": step} for step in range(50)),
            {"eval_loss": 2.0},
        ]
    assert [len(one["records"]) for one in sent[0]] == [len(one["records"]) for one in sent[1]]
    assert sent[0][-1]["step"] == 49


def test_an_error_of_ray_is_raised_at_the_end() -> None:
    def send(metrics: dict[str, Any]) -> None:
        raise RuntimeError("the cluster is gone")

    reporter = Reporter(send, lambda value: value)
    reporter.write({"step": 1})
    with pytest.raises(RuntimeError, match="is gone"):
        reporter.finish()


# ── a worker ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def in_thread(order: dict[str, Any]) -> Any:
    """Train as Ray does: not in the main thread, where alone Python handles signals."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(train_recipe(order)))
    thread.start()
    thread.join()
    return found[0]


def test_a_worker_trains_reports_and_resumes(
    reports: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig(storage_path=str(tmp_path))
    first = in_thread(shoal.ray.Trainer(SMALL, run_config=config, quiet=True)._order())
    records = [record for metrics in reports for record in metrics.get("records", [])]
    run = tmp_path / "given" / "shoal"
    written = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 2]
    assert [record.get("loss") for record in records] == [record.get("loss") for record in written]
    assert reports[-1]["checkpoint"] == str(run / "checkpoints" / "step-00000002")
    assert reports[-1]["loss_last"] == first["loss_last"]
    assert json.loads((run / "summary.json").read_text())["steps"] == 2

    with rejects("C025"):  # before anything is started
        shoal.ray.Trainer(SMALL, run_config=config)._order()
    longer = shoal.ray.Trainer(other(run={"duration": "3step"}), run_config=config, resume="latest", quiet=True)
    again = in_thread(longer._order())
    assert (again["resumed_from"], again["steps"]) == (2, 3)

    wrong = Recipe.model_validate(other(model={"num_layers": 1, "num_heads": 3})).model_dump(mode="json")
    found = in_thread({**longer._order(), "recipe": wrong})
    assert isinstance(found, ShoalError)


def test_rank_0_plans_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines may have different numbers of workers, and so each rank would choose a plan of its own."""
    sent: list[Any] = []

    def broadcast(value: Any) -> Any:
        sent.append(value)
        return sent[0]

    monkeypatch.setattr(worker, "_broadcast", broadcast)
    recipe = build_recipe({**SMALL, "plan": "auto fp64"}, title="")
    places = [Placement(rank=rank, world_size=2, local_rank=0, local_world_size=2 - rank) for rank in (0, 1)]
    jobs = [worker._agreed_job(recipe, place) for place in places]
    assert [job.recipe.plan for job in jobs if not isinstance(job, ShoalError)] == [sent[0]] * 2
    sent.clear()
    wrong = build_recipe({**SMALL, "data": {"source": "/nowhere.txt"}}, title="")
    for place in places:
        found = worker._agreed_job(wrong, place)
        assert isinstance(found, ShoalError)
        assert found.codes == ("D001",)


def test_a_function_reports_and_saves(reports: list[dict[str, Any]]) -> None:
    def function(config: dict[str, int]) -> str:
        shoal.ray.report({"loss": config["loss"]})
        return shoal.ray.checkpoint_directory()

    order = {"function": function, "config": {"loss": 3}, "directory": "/somewhere/shoal"}
    assert call_function(order) == "/somewhere/shoal/checkpoints"
    assert [one["loss"] for one in reports] == [3, 3]
    with rejects("Y001"):
        shoal.ray.report({})
