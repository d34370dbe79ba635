"""Two hosts with a network between them (namespaces of the kernel): torchrun on each, one run over both."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.host import Host

SETTINGS = """
    --model.num_layers 1 --model.hidden 32 --model.ffn 48 --data.seq_len 32 --data.global_batch 4 --data.validation 0
    --run.duration 3step --plan fp64 --device cpu --launch.threads 1 --json
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[tuple[str, str]]]:
    """Names and addresses of two hosts that reach each other over a cable."""
    names = [f"shoal-test-{os.getpid()}-{number}" for number in range(2)]  # another checkout may test, too
    if shutil.which("ip") is None:
        pytest.skip("needs the program ip (package iproute2)")
    try:
        for name in names:
            ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"needs the right to make network namespaces: {error.stderr.decode().strip()}")
    try:
        ip("link", "add", "cable0", "netns", names[0], "type", "veth", "peer", "name", "cable1", "netns", names[1])
        for number, name in enumerate(names):
            ip("-n", name, "address", "add", f"10.77.0.{number + 1}/24", "dev", f"cable{number}")
            ip("-n", name, "link", "set", f"cable{number}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield [(name, f"10.77.0.{number + 1}") for number, name in enumerate(names)]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.fixture
def stranger(hosts: list[tuple[str, str]]) -> Iterator[str]:
    """The name of a third host, which has a cable to the first one, and the address 10.78.0.9."""
    (first, _), name = hosts[0], f"shoal-test-{os.getpid()}-stranger"
    ip("netns", "add", name)
    try:
        ip("link", "add", "cable2", "netns", first, "type", "veth", "peer", "name", "cable3", "netns", name)
        for network, address, cable in ((first, "10.78.0.1", "cable2"), (name, "10.78.0.9", "cable3")):
            ip("-n", network, "address", "add", f"{address}/24", "dev", cable)
            ip("-n", network, "link", "set", cable, "up")
        ip("-n", name, "route", "add", "10.77.0.0/24", "via", "10.78.0.1")
        yield name
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def train(directory: Path, words: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def losses(file: Path) -> list[float]:
    records: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    return [record["loss"] for record in records]


def places_of(hosts: list[tuple[str, str]]) -> list[dict[str, str]]:
    """The variables that torchrun would set for one rank on each of two hosts."""
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    job |= {"MASTER_ADDR": hosts[0][1], "MASTER_PORT": "29577"}
    return [{**job, "RANK": str(rank)} for rank in range(2)]


def test_two_hosts_compute_what_one_does(host: Host, hosts: list[tuple[str, str]], tmp_path: Path) -> None:
    words = ["train", *SETTINGS.split(), "--run.dir"]
    ranks = [
        host.start(*words, str(tmp_path / "two"), cwd=tmp_path, env=place, network=name)
        for (name, _), place in zip(hosts, places_of(hosts), strict=True)
    ]
    alone = host.start(*words, str(tmp_path / "one"), cwd=tmp_path)
    for run in (*ranks, alone):
        assert run.wait() == 0, run.said
    assert_same_losses(tmp_path)


def assert_same_losses(folder: Path) -> None:
    one, two = (losses(folder / name / "metrics.jsonl") for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-12)


@pytest.mark.wide
def test_two_hosts_of_torchrun_compute_what_one_does(host: Host, hosts: list[tuple[str, str]], tmp_path: Path) -> None:
    runs = []
    for number, (name, _) in enumerate(hosts):
        torchrun = f"-m torch.distributed.run --nnodes 2 --nproc-per-node 1 --node-rank {number} --master-port 29577"
        command = [
            sys.executable,
            *torchrun.split(),
            "--master-addr",
            hosts[0][1],
            "-m",
            "shoal",
            "train",
            *SETTINGS.split(),
        ]
        command = ["ip", "netns", "exec", name, *command, "--run.dir", str(tmp_path / "two")]
        runs.append(train(tmp_path, command))
    alone = host.start("train", *SETTINGS.split(), "--run.dir", str(tmp_path / "one"), cwd=tmp_path)
    try:
        for run in runs:
            _, text = run.communicate(timeout=60)
            assert run.returncode == 0, text
        assert alone.wait() == 0, alone.said
    finally:
        for run in runs:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
    assert_same_losses(tmp_path)


@pytest.mark.wide
def test_doctor_finds_a_closed_direction(hosts: list[tuple[str, str]], tmp_path: Path) -> None:
    names = {address: name for name, address in hosts}
    ssh = tmp_path / "enter"
    cases = " ".join(f"{address}) name={name};;" for address, name in names.items())
    ssh.write_text(f'#!/bin/sh\nhost=$1; shift\ncase $host in {cases} esac\nexec ip netns exec $name "$@"\n')
    ssh.chmod(0o700)
    addresses = [address for _, address in hosts]
    command = [
        sys.executable,
        "-m",
        "shoal",
        "doctor",
        "--hosts",
        ",".join(addresses),
        "--ssh",
        f"{ssh} {{host}}",
        "--json",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    found = {each["check"]: each for each in json.loads(done.stdout)["findings"] if not each["host"]}
    assert found["connections"]["evidence"].startswith("all 2 open at free ports"), done.stdout
    assert found["shared directory"]["level"] == "ok"
    ip("-n", hosts[0][0], "route", "add", "prohibit", f"{addresses[1]}/32")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    broken = [each for each in json.loads(done.stdout)["findings"] if each["check"] == "connections"]
    assert done.returncode == 1
    assert f"{addresses[0]} → {addresses[1]} cannot connect" in broken[0]["evidence"], broken
