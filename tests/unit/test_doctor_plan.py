"""`shoal doctor RECIPE`, `--hosts` and RUN: what a plan needs, links between hosts, and ranks that wait."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import main
from shoal.cli.doctor import Doctor, _check, _not_covered
from shoal.cli.overrides import parse
from shoal.comm.heartbeat import slowest
from shoal.comm.heartbeat.arrivals import Straggler
from shoal.comm.heartbeat.board import HeartbeatBoard
from shoal.comm.heartbeat.ticket import Ticket
from shoal.config.load import load_recipe
from shoal.doctor import hosts, link, live, needs
from shoal.doctor.bounded import run_checks
from shoal.doctor.checks import gpu
from shoal.doctor.checks.nvml import Driver, Gpu
from shoal.doctor.dry_run import Answer, DryRun, parse_answer
from shoal.doctor.finding import GIB, Finding, Level, hint, ok
from shoal.doctor.needs import Needs
from shoal.errors import ShoalError
from shoal.launch.hosts.hostlist import HostSpec
from shoal.launch.hosts.ssh import Command
from tests.rejects import rejects
from tests.unit.test_doctor import (
    NEW_NETWORK,
    SOUND,
    after,
    called,
    driver,
    is_root,
    mount,
    only,
    open_for_all,
    own_mounts,
)

PREDICTED = {"parameters": 10**9, "trained_parameters": 10**9, "memory": {"context": GIB, "total": 21 * GIB}}


def of(*, ranks: int = 2, predicted: Mapping[str, Any] = PREDICTED, **settings: str) -> Needs:
    recipe = load_recipe(None, [(key.replace("__", "."), value) for key, value in settings.items()])
    return Needs(recipe=recipe, ranks=ranks, world_size=ranks, predicted=predicted)


# ── what a recipe needs ──────────────────────────────────────────────────────────────────────────────────────────────


def test_host_memory_of_the_ranks() -> None:
    def found(available: int) -> list[Finding]:
        return list(needs.host_memory(of(launch__device="cpu"), lambda: (available, "64 GiB of this host")))

    only(found(40 * GIB), Level.FAIL, "40.7 GiB predicted (2 ranks of 20.3 GiB)", "40.0 GiB available", "--plan auto")
    only(found(42 * GIB), Level.WARNING, "42.0 GiB available")
    assert [each.level for each in found(64 * GIB)] == [Level.OK]


def test_the_memory_of_a_pipeline_is_that_of_its_fullest_stage_alone() -> None:
    """The prediction is of the fullest rank. Ranks of other stages may need less, so that no failure is certain."""

    def found(available: int, ranks: int = 2) -> list[Finding]:
        wanted = of(ranks=ranks, launch__device="cpu", plan="pp=2 1f1b mb=1")
        return list(needs.host_memory(wanted, lambda: (available, "64 GiB of this host")))

    only(found(30 * GIB), Level.WARNING, "40.7 GiB predicted (2 ranks of at most 20.3 GiB)", "30.0 GiB available")
    only(found(20 * GIB), Level.FAIL, "20.0 GiB available")
    only(found(41 * GIB, ranks=4), Level.FAIL, "41.0 GiB available")  # two of four ranks are of the fullest stage
    assert [each.level for each in found(64 * GIB)] == [Level.OK]


def test_gpus_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = list(needs.gpu_memory(of(ranks=2), driver(free=20 * GIB)))
    assert [each.level for each in found] == [Level.FAIL, Level.FAIL]
    assert "2 ranks, but 1 GPU here" in found[0].evidence
    assert "21.0 GiB predicted on the fullest rank; 20.0 GiB free" in found[1].evidence
    assert [each.level for each in needs.gpu_memory(of(ranks=1), driver())] == [Level.OK]
    only(list(needs.gpu_memory(of(launch__device="cuda"), missing)), Level.FAIL, "no GPU", "--launch.device cpu")


def missing() -> Any:
    raise OSError("no library")


def test_the_gpus_of_the_plan_are_those_that_cuda_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [Gpu(**{**SOUND, "free": free * GIB}) for free in (1, 139, 1)]
    read = lambda: Driver(version="570.1", cuda=(99, 0), gpus=tuple(gpus))  # noqa: E731
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [each.level for each in needs.gpu_memory(of(ranks=1), read)] == [Level.OK]
    few = next(iter(needs.gpu_memory(of(ranks=2), read)))
    assert (few.level, few.evidence) == (Level.FAIL, "2 ranks, but 1 GPU in CUDA_VISIBLE_DEVICES='1'")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    only(list(needs.gpu_memory(of(ranks=2), read)), Level.FAIL, "1.0 GiB free on the fullest GPU")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-44dd")
    assert list(needs.gpu_memory(of(ranks=1), read)) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert list(needs.gpu_memory(of(ranks=1), read)) == []
    only(list(needs.gpu_memory(of(launch__device="cuda"), read)), Level.FAIL, "no GPU in CUDA_VISIBLE_DEVICES=''")


def test_a_gpu_with_another_number_than_0_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def evidence() -> str:
        return next(iter(needs.host_memory(of(ranks=1), lambda: (64 * GIB, "64 GiB of this host")))).evidence

    monkeypatch.setattr(gpu, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "1 rank of 20.3 GiB" in evidence()  # of the CPU
    (tmp_path / "nvidia3").touch()
    assert "1 rank of 3.0 GiB, and a copy of what is saved" in evidence()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert "1 rank of 20.3 GiB" in evidence()


@is_root
def test_loaders_need_shared_memory() -> None:
    def small() -> None:
        own_mounts()
        mount("tmpfs", Path("/dev/shm"), "tmpfs", 0, "size=64m")

    large = of(data__workers="8", data__prefetch="4", data__seq_len="65536", data__global_batch="32")
    words = ("1.2 GiB needed (2 ranks × 8 loaders × 5 batches of 16 MiB)", "64 MiB free", "shm-size=3g")
    only(after(small, lambda: needs.shared_memory(large)), Level.FAIL, *words)
    saves = of(checkpoint__memory_every="1step", data__workers="0")
    only(after(small, lambda: needs.shared_memory(saves)), Level.FAIL, "saves of 33.5 GiB")


def test_threads_of_the_ranks() -> None:
    pinned = lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # noqa: E731
    many = of(ranks=3, launch__threads="4", launch__device="cpu")
    only(after(pinned, lambda: needs.threads(many)), Level.WARNING, "3 ranks × 4 threads; 1 of ", "--nproc 1")
    one = of(ranks=1, launch__threads="4", launch__device="cpu")
    only(after(pinned, lambda: needs.threads(one)), Level.WARNING, "1 rank × 4 threads", "--launch.threads 1")


def test_directories_and_data_of_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    settings = {"run__dir": f"{tmp_path}/run", "checkpoint__dir": f"{tmp_path}/file/checkpoints"}
    wanted = of(data__source=str(tmp_path / "none.bin"), **settings)
    found = {each.check: each for each in run_checks(list(needs.checks(wanted))) if each.level is Level.FAIL}
    assert found["checkpoints"].evidence.endswith("Not a directory")
    assert found["data"].evidence.endswith("No such file or directory")
    # Three checkpoints of 12 bytes a parameter: the two that are kept, and the one that is written.
    huge = of(run__dir=str(tmp_path), predicted={"parameters": 10**13, "trained_parameters": 10**13})
    found = {each.check: each for each in run_checks(list(needs.checks(huge)))}
    assert f"{36 * 10**13 / GIB:,.1f} GiB are needed" in found["checkpoints"].evidence
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_problems_of_a_recipe_are_findings() -> None:
    problem = {"code": "P011", "what": "batch 10 is not divisible by 4 ranks", "fix": "--data.global_batch 12"}
    answer = parse_answer("noise\n" + json.dumps({"error": {"problems": [problem]}, "exit_code": 2}))
    only(list(answer.findings), Level.FAIL, "not divisible by 4 ranks [P011]", "--data.global_batch 12")
    only(list(parse_answer("Killed").findings), Level.FAIL, "without an answer")


# ── between hosts ────────────────────────────────────────────────────────────────────────────────────────────────────


def in_own_network(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run in a network of one interface with the address 10.1.0.1."""

    def breaking() -> None:
        called("unshare", NEW_NETWORK)
        lines = [
            "link add w0 type veth peer name w1",
            "link set w0 up",
            "link set lo up",
            "address add 10.1.0.1/24 dev w0",
        ]
        subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), text=True, check=True)

    [found] = after(breaking, lambda: [ok("link", json.dumps(work()))])
    result: dict[str, Any] = json.loads(found.evidence)
    return result


@is_root
def test_a_link_and_links_that_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    token = bytes(16)
    monkeypatch.setattr(link, "SECONDS", 0.3)

    def closed() -> dict[str, Any]:
        return link.reach("10.1.0.1", 9, token)

    def loses_large_packets() -> dict[str, Any]:
        server = socket.create_server(("10.1.0.1", 0))

        def answer() -> None:
            connection = server.accept()[0]
            connection.recv(20)
            connection.sendall(b"s")
            time.sleep(2)

        threading.Thread(target=answer, daemon=True).start()
        return link.reach("10.1.0.1", server.getsockname()[1], token)

    sound = in_own_network(lambda: link.reach("10.1.0.1", link.listen(token), token))
    assert (sound["failed"], sound["rate"] > 1e6) == ("", True)
    stranger = in_own_network(lambda: link.reach("10.1.0.1", link.listen(token), b"x" * 16))
    assert (stranger["failed"], stranger["rate"]) == ("small", 0)
    for work, failed, words in (
        (closed, "connect", ("a → b cannot connect to a free port of 10.1.0.1: Connection refused", "ufw allow")),
        (loses_large_packets, "large", ("4 MiB do not arrive", "mtu 1500")),
        (lambda: link.reach("localhost", 9, token), "name", ("a does not find b (127.0.0.1)", "/etc/hosts")),
        (lambda: link.reach("no-such-host.invalid", 9, token), "name", ("a does not find b",)),
    ):
        found = in_own_network(work)
        assert found["failed"] == failed, found
        only([hosts._broken("a", "b", found)], Level.FAIL, *words)


def peer(name: str, **facts: str) -> hosts.Peer:
    return hosts.Peer(HostSpec(name, 8), None, {"python": "3.12.3", "torch": "2.13.0", **facts}, port=1)  # type: ignore[arg-type]


def test_versions_that_differ_are_named_alone() -> None:
    found = list(hosts._compare_versions([peer("a"), peer("b"), peer("c", torch="2.11.0")]))
    only(found, Level.FAIL, "torch: a has 2.13.0, b has 2.13.0, c has 2.11.0", "ssh c", "'torch==2.13.0'")
    only(list(hosts._compare_versions([peer("a", driver="570"), peer("b")])), Level.WARNING, "b has none")
    assert [each.level for each in hosts._compare_versions([peer("a"), peer("b")])] == [Level.OK]


def test_a_host_that_cannot_be_reached() -> None:
    found = hosts.check_hosts([HostSpec("node7", 1)], "sh -c 'echo Permission denied; exit 255' {host}")
    only(found, Level.FAIL, "node7 cannot be started: exit code 255: Permission denied [N054]", "without a password")
    with rejects("N102", "--ssh none"):
        hosts.check_hosts([HostSpec("node7", 1)], "none")


SLOW_NAMES = """
import socket, time
def getaddrinfo(*_, **__):
    time.sleep(16)
    raise socket.gaierror(-3, "Temporary failure in name resolution")
socket.getaddrinfo = getaddrinfo
"""


def other_host(folder: Path, customize: str) -> list[Finding]:
    """The findings about this host and another one, a real process that runs this first."""
    (folder / "sitecustomize.py").write_text(customize)
    enter = folder / "enter"
    enter.write_text(f'#!/bin/sh\nshift\nPYTHONPATH={folder}:$PYTHONPATH exec "$@"\n')
    enter.chmod(0o700)
    return hosts.check_hosts([HostSpec("localhost", 1), HostSpec("node7", 1)], f"{enter} {{host}}")


def test_a_name_server_that_does_not_answer_another_host(tmp_path: Path) -> None:
    """It was a traceback: the late answer about connections was read as that about the shared directory."""
    found = other_host(tmp_path, SLOW_NAMES)
    evidence = [each.evidence for each in found if each.check == "host name" and each.level is Level.FAIL]
    assert "node7 does not find localhost: no answer for 4 s" in evidence
    assert [each.level for each in found if each.check == "shared directory"] == [Level.OK]


LATE = """
import json, sys, time
for line in sys.stdin:
    asked = json.loads(line)
    time.sleep(0.3 * ("reach" in asked))
    print(json.dumps({"peer": {"answers": list(asked)[0], "number": asked["number"]}}), flush=True)
"""


def test_a_late_answer_is_not_that_of_the_next_request() -> None:
    command = [sys.executable, "-c", LATE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        one = hosts.Peer(HostSpec("node7", 1), Command(HostSpec("node7", 1), command, process))
        one.ask(clock=True)
        assert one.answer(20.0) == {"answers": "clock", "number": 1}
        one.ask(reach=[])
        assert one.answer(0.05) is None
        one.ask(see="/a/file", text="")
        assert one.answer(20.0) == {"answers": "see", "number": 3}
        process.kill()


def test_a_host_without_an_answer_is_not_said_to_see_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hosts.Peer, "ask", lambda *_, **__: None)
    monkeypatch.setattr(hosts.Peer, "answer", lambda *_: None)
    only(list(hosts._shared_directory([peer("node7")], tmp_path)), Level.WARNING, "node7 gave no answer for 4 s")


# ── a run ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def beat(step: int, entered: int, done: int) -> dict[str, Any]:
    counters = {"gloo/0": (entered, done)}
    groups = {"0": ("dp_replicate", [0, 1])}
    moving = {"counters": counters, "phase": "step", "step": step, "total": entered + done}
    return {**moving, "groups": groups, "tickets": [], "median": 0.1, "beat": time.monotonic(), "uses_gpu": False}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, HeartbeatBoard, list[int]]]:
    """A directory as a run has it, which this process holds; its board, and the processes of two ranks."""
    monkeypatch.setattr(live, "WINDOW", 0.05)
    path, scratch = tmp_path / "run", tmp_path / "shoal-launch-test"
    path.mkdir()
    scratch.mkdir()
    (path / "environment.json").write_text("{}")
    (path / "metrics.jsonl").write_text('{"step": 41, "loss": 2.5}\n{"step": 42, "loss": 2.4}\n{"st')
    os.utime(path / "metrics.jsonl", (time.time() - 60,) * 2)
    board = HeartbeatBoard.create(scratch / "heartbeats", 2)
    assert board is not None
    workers = []
    for rank in range(2):
        with (scratch / f"stacks-{rank}.txt").open("w") as file:
            workers.append(subprocess.Popen(["sleep", "60"], stdout=file))
    with (path / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield path, board, [worker.pid for worker in workers]
    board._memory.close()  # the next test's board must be the only one that this process has mapped
    for worker in workers:
        worker.kill()
        worker.wait()


Live = tuple[Path, HeartbeatBoard, list[int]]


def test_the_rank_that_others_wait_for_is_named(run: Live) -> None:
    path, board, pids = run
    board.write(0, beat(42, 7, 6))
    board.write(1, beat(42, 6, 6))
    found = live.check_run(path)
    words = ("rank 1 of 2 never entered collective #7 of dp_replicate; rank 0 has waited ", "[N030]")
    only(found, Level.FAIL, *words, f"py-spy dump --pid {pids[1]}")
    assert found[-1].evidence == "step 42 was logged 60 s ago; loss 2.4"


def test_a_step_that_takes_longer_than_the_observation(run: Live) -> None:
    """100 steps of 2 s until the next line of the metrics: an old line does not show that the ranks hang."""
    path, board, _ = run
    (path / "recipe.yaml").write_text("run:\n  log_every: 100\n")
    os.utime(path / "metrics.jsonl", (time.time() - 100,) * 2)
    board.write(0, {**beat(42, 7, 6), "median": 2.0})
    board.write(1, {**beat(42, 6, 6), "median": 2.0})
    only(live.check_run(path), Level.WARNING, "no rank moved for 0.05 s")
    os.utime(path / "metrics.jsonl", (time.time() - 300,) * 2)
    only(live.check_run(path), Level.FAIL, "rank 1 of 2 never entered", "rank 0 has waited 100.")


def entered(seconds: float, *, is_done: bool) -> dict[str, Any]:
    """A collective that a rank entered so many seconds ago."""
    nanoseconds = time.time_ns() - int(seconds * 1e9)
    return asdict(Ticket("0", 7, "all_reduce", ("Float",), ((8,),), nanoseconds, is_done))


def test_ranks_have_waited_since_they_entered_their_last_collective(run: Live) -> None:
    path, board, _ = run
    (path / "recipe.yaml").write_text("run:\n  log_every: 100\n")
    for seconds, level, words in ((8, Level.WARNING, "no rank moved"), (30, Level.FAIL, "rank 0 has waited 30.")):
        board.write(0, {**beat(42, 7, 6), "median": 2.0, "tickets": [entered(seconds, is_done=False)]})
        board.write(1, {**beat(42, 6, 6), "median": 2.0})
        only(live.check_run(path), level, words)


def test_ranks_that_compute_do_not_hang_although_the_next_line_of_the_metrics_is_overdue(run: Live) -> None:
    """Numbers that they have put on their board are read one step later, so that each exchange waits for a step."""
    path, board, _ = run
    for rank in range(2):
        exchange = {"counters": {"gloo/0": (7, 7), "board": (3, 2)}, "median": 2.0}
        board.write(rank, {**beat(42, 7, 7), **exchange, "tickets": [entered(4, is_done=True)]})
    only(live.check_run(path), Level.WARNING, "no rank moved", "no rank waits for another one")


def test_a_rank_that_may_continue_is_a_warning(run: Live) -> None:
    """Rank 1 works alone for a minute, as one that saves does: it is named, and nothing will fail."""
    path, board, _ = run
    board.write(0, {**beat(42, 7, 6), "phase": "save"})
    board.write(1, {**beat(42, 6, 6), "phase": "save"})
    only(live.check_run(path), Level.WARNING, "rank 1 of 2 never entered", "(phase: save)")


def test_a_rank_that_a_signal_has_stopped(run: Live) -> None:
    path, board, pids = run
    for rank in range(2):
        board.write(rank, beat(42, 7, 6))
    os.kill(pids[0], signal.SIGSTOP)
    time.sleep(0.05)
    only(live.check_run(path), Level.FAIL, f"rank 0 is stopped by a signal (process {pids[0]})", "kill -CONT")
    os.kill(pids[1], signal.SIGSTOP)
    time.sleep(0.05)
    found = next(each for each in live.check_run(path) if each.check == "ranks")
    assert found.evidence == f"ranks 0, 1 are stopped by a signal (process {pids[0]}, {pids[1]})"
    assert found.fix == f"kill -CONT {pids[0]} {pids[1]}"


def log_straggler(path: Path, rank: int, late: float, cost: float, *, stands_out: bool) -> None:
    straggler = Straggler(rank, 1.0, late, cost, 100, stands_out)
    line = json.dumps({"step": 42, "loss": 2.4, **slowest.to_metrics(straggler)})
    (path / "metrics.jsonl").write_text(f'{line}\n{{"step": 43, "loss": 2.3}}\n')


def test_a_run_that_moves(run: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    path, board, pids = run
    board.write(0, beat(42, 7, 7))
    board.write(1, beat(42, 7, 7))
    monkeypatch.setattr(time, "sleep", lambda seconds: board.write(1, beat(43, 8, 8)))
    found = live.check_run(path)
    assert [(each.check, each.level) for each in found] == [("ranks", Level.OK), ("progress", Level.OK)]
    assert "1 of 2 ranks move" in found[0].evidence
    several = {"groups": {"0": ("dp_replicate", [0, 1, 2, 3])}}

    def go_on(seconds: float) -> None:
        board.write(1, {**beat(48, 8, 8), **several})
        (path / "metrics.jsonl").write_text('{"step": 48, "loss": 2.2}\n')

    monkeypatch.setattr(time, "sleep", go_on)
    found = live.check_run(path)
    assert found[0].evidence == "1 of 2 ranks of this host, of 4 in all, move (step 42, step 48)"
    assert found[1].evidence == "step 48 was logged 0 s ago; loss 2.2"  # of the same moment
    log_straggler(path, 1, 0.25, 0.61, stands_out=True)
    monkeypatch.setattr(time, "sleep", lambda seconds: board.write(1, beat(44, 9, 9)))
    words = ("the others wait 61% of the time for rank 1, which is 250 ms late", f"top -H -p {pids[1]}")
    only(live.check_run(path), Level.WARNING, *words)


def test_ranks_that_are_late_in_turns_are_not_blamed(run: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    path, board, _ = run
    board.write(0, beat(42, 7, 7))
    board.write(1, beat(42, 7, 7))
    monkeypatch.setattr(time, "sleep", lambda seconds: board.write(1, beat(43, 8, 8)))
    log_straggler(path, 1, 0.25, 0.31, stands_out=False)
    found = live.check_run(path)
    assert [(each.check, each.level) for each in found[:2]] == [("ranks", Level.OK), ("slowest rank", Level.OK)]
    assert "late in turns" in found[1].evidence
    assert "31%" in found[1].evidence


@is_root
def test_a_run_that_another_user_has_closed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    open_for_all(tmp_path)

    def check() -> Iterator[Finding]:
        try:
            yield from live.check_run(tmp_path / "run")
        except ShoalError as error:
            yield ok("run", str(error))

    (found,) = after(lambda: os.seteuid(65534), check)
    assert "holds no run of shoal: environment.json: Permission denied" in found.evidence
    assert "[N100]" in found.evidence


def test_runs_that_no_process_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with rejects("N100", "holds no run"):
        live.check_run(tmp_path)
    (tmp_path / "environment.json").write_text("{}")
    only(live.check_run(tmp_path), Level.FAIL, "it was killed, or failed", "shoal train")
    with (tmp_path / "events.jsonl").open("wb") as events:
        fcntl.flock(events, fcntl.LOCK_EX)
        words = f"process {os.getpid()}, its launcher, lives: it replaces or restarts ranks"
        only(live.check_run(tmp_path), Level.WARNING, words, "wait, and look again")
    (tmp_path / "environment.json").write_text('{"host": "node7"}')
    assert live.check_run(tmp_path)[0].level is Level.WARNING  # it may live there
    assert "started on 'node7'" in live.check_run(tmp_path)[0].evidence
    (tmp_path / "summary.json").write_text("[[[")
    only(live.check_run(tmp_path), Level.FAIL, "summary.json is damaged", "shoal checkpoint verify")
    (tmp_path / "summary.json").write_text('{"steps": 150, "was_stopped": false}')
    (tmp_path / "metrics.jsonl").write_text('{"step": 150, "loss": 2}\n{"step": 150, "eval_loss": 1.554345}\n')
    assert live.check_run(tmp_path)[-1].evidence == "step 150 was logged 0 s ago; validation loss 1.554"
    (tmp_path / "metrics.jsonl").write_text('{"step": "\\u001b[2J", "loss": 1}\n')
    assert main(["doctor", str(tmp_path)]) == 0
    assert "\x1b" not in capsys.readouterr().out
    (tmp_path / "metrics.jsonl").write_text('{"step": 150, "loss": "nan"}\n')
    only(live.check_run(tmp_path), Level.FAIL, "loss nan", "T0")
    assert main(["doctor", str(tmp_path), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["worst"], said["findings"][0]["check"]) == ("will fail", "progress")


# ── the verb ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_report_is_sorted_and_its_exit_code_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert main(["doctor", "--port", str(server.getsockname()[1])]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("✗ will fail  port") for line in lines)
    assert lines[2].startswith("✗ will fail")
    assert lines[-1].startswith("Runs will fail: fix the lines marked ✗ first. ")
    levels = [line[0] for line in lines[2:-2] if line[:1] in tuple("✗!·✓")]
    assert levels == sorted(levels, key="✗!·✓".index)


@pytest.mark.parametrize(
    ("words", "code"), [(["--port", "70000"], "N101"), (["--hosts", "a b"], "N050"), (["none.yaml"], "R0")]
)
def test_bad_input_of_the_doctor(words: list[str], code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    assert f"[{code}" in capsys.readouterr().err


@is_root
def test_a_recipe_hides_no_failure_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two checks are named shared memory. That of the recipe compares bytes, and that of the host tries to write."""
    answer = Answer(ranks=1, predicted=PREDICTED)
    monkeypatch.setattr(DryRun, "start", lambda _: type("Started", (), {"answer": lambda _: answer})())

    def breaking() -> None:
        own_mounts()
        mount("tmpfs", Path("/dev/shm"), "tmpfs", 0, "size=1g,mode=755")
        os.setuid(65534)

    def check() -> list[Finding]:
        words = ["--nproc", "1"]
        return _check(*parse(Doctor, words, prog="shoal doctor"), words)[1]

    found = [each for each in after(breaking, check) if each.check == "shared memory"]
    assert [each.level for each in found] == [Level.OK, Level.FAIL]
    assert "not writable for this user" in found[1].evidence
    covered = _not_covered([ok("a", ""), hint("b", "", "")], [hint("a", "", ""), hint("b", "", ""), ok("c", "")])
    assert covered == []


@pytest.mark.wide
def test_a_recipe_on_this_host(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "tiny.yaml"
    main(["doctor", str(recipe), "--nproc", "2", "--json"])
    found = {each["check"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    assert found["recipe"]["evidence"] == "855,168 parameters on 2 ranks; all settings are valid"
    assert found["host memory"]["level"] == found["checkpoints"]["level"] == "ok"
    assert main(["doctor", str(recipe), "--nproc", "3", "--json"]) == 1
    first = json.loads(capsys.readouterr().out)["findings"][0]
    assert (first["check"], first["level"]) == ("recipe", "will fail")


def test_presets_are_those_of_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    from shoal.models import llama, mlp, moe, resnet

    assert main(["presets", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    real = {module.__name__.rpartition(".")[2]: list(module.PRESETS) for module in (llama, moe, resnet, mlp)}
    assert {one["name"]: one["presets"] for one in found["trained"] if one["presets"]} == real
    models = {one["name"]: one for one in found["models"]}
    assert models["llama3-8b"]["billions"] == 8.03
    assert {"h200", "cpu"} <= {one["name"] for one in found["clusters"]}
    assert any(one["path"].endswith("tiny.yaml") and one["about"] for one in found["recipes"])
    assert main(["presets"]) == 0
    assert "mixtral-8x7b" in capsys.readouterr().out
