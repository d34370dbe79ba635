"""`shoal launch node` on two hosts, with the environment and arguments of a Kubernetes job: `make test-k8s`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from shoal.cli import main
from tests.cli.test_hosts import hosts
from tests.cli.test_lost_host import SLOW

__all__ = ["hosts"]  # a fixture

pytestmark = [
    pytest.mark.skipif(not os.environ.get("SHOAL_SERVICES"), reason="two network namespaces: make test-k8s"),
    pytest.mark.timeout(300),
]

SOURCE = Path(__file__).parents[2] / "src"
NUM_STEPS = 60
RECIPE = f"""
model: {{name: "own.py:Bigram"}}
data: {{source: synthetic, synthetic_samples: 4096, validation: 0, seq_len: 16, global_batch: 4, workers: 0}}
launch: {{device: cpu, threads: 1}}
checkpoint: {{every: 5step}}
run: {{name: small, duration: {NUM_STEPS}step}}
plan: fp64
"""


class Pods:
    """The pods of a job: each runs the command of its container in a network of its own."""

    def __init__(self, job: dict[str, object], hosts: list[tuple[str, str]], folder: Path) -> None:
        spec = job["spec"]["template"]["spec"]  # type: ignore[index]
        (self.container,) = spec["containers"]
        self.name, self.hosts, self.folder = str(job["metadata"]["name"]), hosts, folder  # type: ignore[index]
        self.grace = int(spec["terminationGracePeriodSeconds"])
        self.pods: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, index: int) -> None:
        """Start a pod with the environment of the kubelet; `$(NAME)` in arguments is its value."""
        network, _ = self.hosts[index]
        given = {each["name"]: each.get("value", "a key for a test of pods") for each in self.container["env"]}
        given["JOB_COMPLETION_INDEX"] = str(index)
        words = [*self.container["command"], *self.container.get("args", [])]
        for name, value in given.items():
            words = [word.replace(f"$({name})", value) for word in words]
        assert words[0] == "shoal"
        command = ["ip", "netns", "exec", network, sys.executable, "-m", *words]
        environ = {**os.environ, **given, "PYTHONPATH": str(SOURCE), "CUDA_VISIBLE_DEVICES": ""}
        with (self.folder / f"pod-{index}.log").open("ab") as log:
            self.pods[index] = subprocess.Popen(command, cwd=self.folder, env=environ, stdout=log, stderr=log)

    def logs(self) -> str:
        return "".join(path.read_text()[-3000:] for path in sorted(self.folder.glob("pod-*.log")))

    def kill(self, index: int) -> None:
        """Kill a pod with all its processes."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.hosts[index][0]], check=True, capture_output=True, text=True
        )
        for pid in found.stdout.split():
            os.kill(int(pid), signal.SIGKILL)
        self.pods[index].wait()

    def codes(self) -> list[int]:
        return [self.pods[index].wait(120) for index in sorted(self.pods)]


@pytest.fixture
def pods(
    hosts: list[tuple[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Pods]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(SLOW.replace("0.05", "0.2"))
    (tmp_path / "small.yaml").write_text(RECIPE)
    assert main(["launch", "k8s", "small.yaml", "--nodes", "2", "--image", "shoal:1"]) == 0
    objects = {each["kind"]: each for each in yaml.safe_load_all(capsys.readouterr().out)}
    # What the cluster would provide: the mounted recipe, and the names of pods.
    names = "".join(f"{address} small-{index}.small\n" for index, (_, address) in enumerate(hosts))
    job = objects["Job"]
    container = job["spec"]["template"]["spec"]["containers"][0]
    container["command"] = [word.replace("/etc/shoal", str(tmp_path)) for word in container["command"]]
    (tmp_path / "recipe.yaml").write_text(objects["ConfigMap"]["data"]["recipe.yaml"])
    for network, _ in hosts:
        folder = Path("/etc/netns") / network
        folder.mkdir(parents=True)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
    found = Pods(job, hosts, tmp_path)
    try:
        yield found
    finally:
        for index, pod in found.pods.items():
            if pod.poll() is None:
                found.kill(index)
        for network, _ in hosts:
            (Path("/etc/netns") / network / "hosts").unlink()
            (Path("/etc/netns") / network).rmdir()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "own.py").write_text(SLOW)
    (folder / "fast").touch()
    (folder / "small.yaml").write_text(RECIPE)
    words = [sys.executable, "-m", "shoal", "train", "small.yaml", "--nproc", "2", "--run.dir", "run"]
    subprocess.run(words, cwd=folder, check=True, env={**os.environ, "PYTHONPATH": str(SOURCE)}, capture_output=True)
    return losses(folder / "run")


def losses(run: Path) -> dict[int, float]:
    path = run / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {record["step"]: record["loss"] for record in records}


def until_step(count: int, pods: Pods, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while max(losses(pods.folder / "runs" / "small"), default=0) < count:
        assert time.monotonic() < deadline, pods.logs()
        time.sleep(0.1)


@pytest.mark.parametrize("evicted", [[1], [0, 1]])
def test_a_pod_is_evicted_and_all_pods_start_again(
    pods: Pods, undisturbed: dict[int, float], evicted: list[int]
) -> None:
    """The pods end with the exit code 130, which the job's podFailurePolicy does not count."""
    for index in (1, 0):
        pods.start(index)
    until_step(5, pods)
    began = time.monotonic()
    for index in evicted:
        pods.pods[index].send_signal(signal.SIGTERM)
    assert pods.codes() == [130, 130], pods.logs()
    assert time.monotonic() - began < pods.grace
    known = max(losses(pods.folder / "runs" / "small"))
    assert known < NUM_STEPS
    (pods.folder / "fast").touch()
    for index in (0, 1):
        pods.start(index)
    assert pods.codes() == [0, 0], pods.logs()
    assert losses(pods.folder / "runs" / "small") == undisturbed


@pytest.mark.parametrize("lost", [1, 0])
def test_a_lost_pod_is_replaced_while_the_other_one_waits(pods: Pods, undisturbed: dict[int, float], lost: int) -> None:
    """The first pod has the coordinator. Without it, the agent of the other one waits for the next coordinator."""
    for index in (0, 1):
        pods.start(index)
    until_step(7, pods)
    pods.kill(lost)
    pods.start(lost)
    (pods.folder / "fast").touch()
    assert pods.codes() == [0, 0], pods.logs()
    assert losses(pods.folder / "runs" / "small") == pytest.approx(undisturbed, rel=1e-12)
