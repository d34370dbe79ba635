"""`shoal launch slurm` on a real Slurm of two virtual nodes. Run by `make test-slurm`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.jobs.slurm.script import SlurmSite, render
from shoal.jobs.spec import JobSpec
from tests.cli.test_lost_host import SLOW as QUICK
from tests.services.slurm_cluster import Cluster, missing, slurm_cluster

pytestmark = [
    pytest.mark.skipif(not os.environ.get("SHOAL_SERVICES"), reason="needs slurm-wlm and munge: make test-slurm"),
    pytest.mark.timeout(300),
]

SOURCE = Path(__file__).parents[2] / "src"
NUM_STEPS = 300
RECIPE = f"""
model: {{name: "own.py:Bigram"}}
data: {{source: synthetic, synthetic_samples: 4096, validation: 0, seq_len: 16, global_batch: 4, workers: 0}}
launch: {{device: cpu, threads: 1}}
checkpoint: {{every: 1000step}}
run: {{name: small, duration: {NUM_STEPS}step}}
plan: fp64
"""
SLOW = QUICK.replace("0.05", "0.4")  # a step takes longer than a command
OF_TWO = ["--nodes", "2", "--env", "MASTER_ADDR=127.0.0.1"]  # n1 and n2 have no addresses of their own


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if os.geteuid() != 0 or missing():
        pytest.skip(f"needs root, and apt-get install slurm-wlm munge ({', '.join(missing())} is missing)")
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as found:
        yield found


@pytest.fixture
def folder(cluster: Cluster, tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "own.py").write_text(SLOW)
    (tmp_path / "small.yaml").write_text(RECIPE)
    yield tmp_path
    cluster.call("scancel", "--user=root")  # what a test that has failed has left
    until(lambda: not cluster.call("squeue", "--noheader"), 60, lambda: cluster.call("squeue"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of the same recipe on two processes of one launcher."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "own.py").write_text(SLOW)
    (folder / "fast").touch()
    (folder / "small.yaml").write_text(RECIPE)
    shoal("train", "small.yaml", "--nproc", "2", "--run.dir", "run", cwd=folder)
    return losses(folder / "run")


def shoal(*words: str, cwd: Path, env: dict[str, str] | None = None, code: int = 0) -> dict[str, Any]:
    ended = subprocess.run(
        [sys.executable, "-m", "shoal", *words, "--json"], cwd=cwd, text=True, capture_output=True, check=False,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "CUDA_VISIBLE_DEVICES": "", **(env or {})}, timeout=200,
    )  # fmt: skip
    assert ended.returncode == code, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def losses(run: Path) -> dict[int, float]:
    path = run / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {record["step"]: record["loss"] for record in records}


def until(condition: Callable[[], bool], seconds: float, said: Callable[[], object]) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + seconds, said()
        time.sleep(0.1)
    return time.monotonic() - began


def said(cluster: Cluster, log: Path) -> str:
    return cluster.call("squeue", "--states=all") + (log.read_text() if log.exists() else "there is no log")


def field(cluster: Cluster, job: str, name: str) -> str:
    found = re.search(rf"\b{name}=(\S+)", cluster.call("scontrol", "show", "job", job))
    assert found is not None
    return found[1]


def submitted(cluster: Cluster, folder: Path, *words: str) -> str:
    job = shoal(
        "launch", "slurm", "small.yaml", *OF_TWO, "--submit", "--unchecked", *words, cwd=folder, env=cluster.env
    )["job"]
    return str(job)


def test_a_preempted_job_is_requeued_and_ends_with_the_same_losses(
    cluster: Cluster, folder: Path, undisturbed: dict[int, float]
) -> None:
    job = submitted(cluster, folder, "--time", "10")
    log, run = folder / "jobs" / f"small-{job}.log", folder / "runs" / "small"
    until(lambda: len(losses(run)) >= 5, 60, lambda: said(cluster, log))
    again = shoal(
        "launch",
        "slurm",
        "small.yaml",
        *OF_TWO,
        "--submit",
        "--unchecked",
        "--time",
        "10",
        cwd=folder,
        env=cluster.env,
        code=2,
    )
    assert again["error"]["problems"][0]["code"] == "J012"
    assert f"{job} is running" in again["error"]["problems"][0]["what"]
    urgent = cluster.call(
        "sbatch", "--parsable", "-p", "urgent", "-N2", "--exclusive", "-o", "/dev/null", "--wrap=sleep 1"
    )
    began = time.monotonic()
    until(lambda: field(cluster, job, "JobState") == "PENDING", 60, lambda: said(cluster, log))
    saved = time.monotonic() - began
    known = losses(run)
    assert 5 <= max(known) < NUM_STEPS
    until(lambda: max(losses(run)) > max(known), 90, lambda: said(cluster, log))
    resumed = time.monotonic() - began
    (folder / "fast").touch()
    until(lambda: field(cluster, job, "JobState") == "COMPLETED", 90, lambda: said(cluster, log))
    assert field(cluster, urgent.strip(), "JobState") == "COMPLETED"
    assert field(cluster, job, "Restarts") == "1"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["ranks"], summary["restarts"], summary["resumed_from"]) == (2, 1, max(known))
    assert losses(run) == undisturbed
    print(f"saved and requeued after {saved:.1f} s, next step after {resumed:.1f} s, from step {max(known)}")


def num_tasks(job: str) -> int:
    """Processes of Python that srun has started for a job."""
    found = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            variables = (folder / "environ").read_bytes().split(b"\0")
            is_task = f"SLURM_JOB_ID={job}".encode() in variables and any(
                x.startswith(b"SLURM_PROCID=") for x in variables
            )
            found += is_task and b"python" in words[0] and b"train" in words
    return found


def test_a_job_whose_time_is_nearly_over_saves_and_is_requeued(
    cluster: Cluster, folder: Path, undisturbed: dict[int, float]
) -> None:
    """By the signal of --signal=USR1@300. The first one comes while Python is still loading, the second one later."""
    job = submitted(cluster, folder)
    log, run = folder / "jobs" / f"small-{job}.log", folder / "runs" / "small"
    until(lambda: field(cluster, job, "JobState") == "RUNNING", 30, lambda: job)
    until(lambda: num_tasks(job) == 2, 60, lambda: job)  # Slurm loses a signal to a step without tasks
    cluster.call("scancel", "--signal=USR1", job)
    until(lambda: field(cluster, job, "Restarts") == "1", 60, lambda: said(cluster, log))
    until(lambda: len(losses(run)) >= 5, 90, lambda: said(cluster, log))
    cluster.call("scancel", "--signal=USR1", job)
    until(lambda: field(cluster, job, "Restarts") == "2", 60, lambda: said(cluster, log))
    (folder / "fast").touch()
    until(lambda: field(cluster, job, "JobState") in ("COMPLETED", "FAILED"), 90, lambda: said(cluster, log))
    assert field(cluster, job, "JobState") == "COMPLETED", log.read_text()
    assert losses(run) == undisturbed


def test_a_job_that_loses_a_node_is_requeued(cluster: Cluster, folder: Path, undisturbed: dict[int, float]) -> None:
    job = submitted(cluster, folder, "--checkpoint.every", "10step")
    log, run = folder / "jobs" / f"small-{job}.log", folder / "runs" / "small"
    until(lambda: len(losses(run)) >= 15, 60, lambda: said(cluster, log))
    cluster.kill_node("n2")
    began = time.monotonic()
    until(lambda: field(cluster, job, "Restarts") == "1", 90, lambda: said(cluster, log))
    requeued = time.monotonic() - began
    cluster.start_node("n2")
    (folder / "fast").touch()
    until(lambda: field(cluster, job, "JobState") in ("COMPLETED", "FAILED"), 120, lambda: said(cluster, log))
    assert field(cluster, job, "JobState") == "COMPLETED", log.read_text()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["restarts"] == 1
    assert summary["resumed_from"] >= 10
    assert losses(run) == undisturbed
    print(f"requeued after {requeued:.1f} s, resumed from step {summary['resumed_from']}")


def test_a_cancelled_job_saves_and_is_not_requeued(cluster: Cluster, folder: Path) -> None:
    job = submitted(cluster, folder)
    log, run = folder / "jobs" / f"small-{job}.log", folder / "runs" / "small"
    until(lambda: len(losses(run)) >= 3, 60, lambda: said(cluster, log))
    assert "step" in "".join(shoal("launch", "logs", job, cwd=folder, env=cluster.env)["logs"].values())
    assert shoal("launch", "status", job, cwd=folder, env=cluster.env)["jobs"][0]["state"] == "RUNNING"
    shoal("launch", "cancel", job, cwd=folder, env=cluster.env)
    until(lambda: field(cluster, job, "JobState") == "CANCELLED", 60, lambda: said(cluster, log))
    until(lambda: (run / "summary.json").exists(), 60, lambda: said(cluster, log))
    summary = json.loads((run / "summary.json").read_text())
    assert summary["was_stopped"]
    assert summary["saved_step"] == summary["steps"]
    time.sleep(7)  # longer than a requeued job would wait
    assert (field(cluster, job, "JobState"), field(cluster, job, "Restarts")) == ("CANCELLED", "0")


def test_an_array_is_a_sweep(cluster: Cluster, folder: Path) -> None:
    (folder / "fast").touch()
    words = ["--array", "optim.lr=1e-3,1e-2", "--at-once", "1", "--run.duration", "5step"]
    job = submitted(cluster, folder, *words)
    runs = [folder / "runs" / "small-array" / str(number) for number in range(2)]
    for run in runs:  # one after the other; each starts Python on both nodes
        until((run / "summary.json").exists, 90, lambda: shoal("launch", "logs", job, cwd=folder, env=cluster.env))
    first, second = map(losses, runs)
    assert len(first) == len(second) == 5
    assert first[1] == second[1]
    assert first[5] != second[5]


def test_variables_reach_ranks_of_a_job_that_is_submitted_without_an_environment(
    cluster: Cluster, folder: Path
) -> None:
    (folder / "saying").write_text('#!/bin/bash\necho "$A ${#SHOAL_KEY}" > "$SLURM_PROCID.said"\n')
    (folder / "saying").chmod(0o755)
    (folder / "jobs").mkdir()
    spec = JobSpec(name="small", words=(), program=("./saying",), nodes=2, env={"A": "one two"})
    site = SlurmSite(extra=("--export=NONE",))
    (folder / "job").write_text(render(spec, site, directory=str(folder), command="", mark="shoal:0"))
    cluster.call("sbatch", "--parsable", str(folder / "job"))
    until(lambda: not cluster.call("squeue", "--noheader"), 60, lambda: cluster.call("squeue"))
    assert [(folder / f"{rank}.said").read_text() for rank in range(2)] == ["one two 64\n"] * 2


def test_a_job_of_an_array_that_requeues_itself_leaves_the_others_alone(cluster: Cluster, folder: Path) -> None:
    """The rendered script, with a program in the place of shoal: the job with the number of the array stops once."""
    stopping = (
        "#!/bin/bash\n"
        'echo start >> "$SLURM_ARRAY_TASK_ID.starts"\n'
        "until [ -e both ]; do sleep 0.1; done\n"
        '[ "$SLURM_JOB_ID" != "$SLURM_ARRAY_JOB_ID" ] || [ -e stopped ] || { touch stopped; exit 130; }\n'
        "until [ -e fast ]; do sleep 0.1; done\n"
    )
    (folder / "stopping").write_text(stopping)
    (folder / "stopping").chmod(0o755)
    (folder / "jobs").mkdir()
    spec = JobSpec(name="small", words=(), program=("./stopping",), variants=((), ()))
    (folder / "job").write_text(render(spec, SlurmSite(), directory=str(folder), command="", mark="shoal:0"))
    job = cluster.call("sbatch", "--parsable", str(folder / "job")).strip()
    starts = lambda: sorted(len(path.read_text().split()) for path in folder.glob("*.starts"))  # noqa: E731
    until(lambda: starts() == [1, 1], 30, lambda: cluster.call("squeue"))
    (folder / "both").touch()
    until(lambda: sum(starts()) > 2, 60, lambda: cluster.call("squeue"))
    (folder / "fast").touch()
    until(lambda: not cluster.call("squeue", "--noheader"), 60, lambda: cluster.call("squeue"))
    assert starts() == [1, 2]
    states = re.findall(r"Restarts=(\d)|JobState=(\w+)", cluster.call("scontrol", "show", "job", job))
    assert sorted("".join(each) for each in states) == ["0", "1", "COMPLETED", "COMPLETED"]


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["--partition", "no-such"], "sinfo -s"),
        (["--nodes", "3", "--data.global_batch", "6"], "sinfo"),
        (["--time", "9-0"], "--time"),
        (["--gpus", "8", "--launch.device", "cuda", "--data.global_batch", "16"], "--gpus"),
    ],
)
def test_a_rejected_job(words: list[str], fix: str, cluster: Cluster, folder: Path) -> None:
    before = cluster.call("squeue", "--noheader")
    found = shoal(
        "launch", "slurm", "small.yaml", *OF_TWO, *words, "--submit", "--unchecked", cwd=folder, env=cluster.env, code=2
    )
    (problem,) = found["error"]["problems"]
    assert problem["code"] == "J013"
    assert fix in problem["fix"]
    assert cluster.call("squeue", "--noheader") == before


def test_a_full_cluster_is_reported_and_nothing_is_submitted_twice(cluster: Cluster, folder: Path) -> None:
    other = cluster.call("sbatch", "--parsable", "-N2", "--exclusive", "-o", "/dev/null", "--wrap=sleep 60").strip()
    until(lambda: field(cluster, other, "JobState") == "RUNNING", 30, lambda: other)
    try:
        job = submitted(cluster, folder)
        until(lambda: field(cluster, job, "Reason") in ("Resources", "Priority"), 30, lambda: job)
        again = shoal(
            "launch", "slurm", "small.yaml", *OF_TWO, "--submit", "--unchecked", cwd=folder, env=cluster.env, code=2
        )
        assert f"{job} is pending (" in again["error"]["problems"][0]["what"]
        cluster.call("scancel", job)
    finally:
        cluster.call("scancel", other)
