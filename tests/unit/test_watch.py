"""`shoal watch`: who may read the live page, what it is told, and the run in a terminal."""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.cli import main
from shoal.cli.runs.terminal import picture
from shoal.cli.runs.watch import has_display, ssh_line
from shoal.comm.heartbeat import slowest
from shoal.comm.heartbeat.arrivals import Straggler
from shoal.observe.events import append_event
from shoal.pages.live.follow import Cursor, Follower
from shoal.pages.live.now import now_of
from shoal.pages.live.page import live_page
from shoal.pages.live.ranks import rank_states
from shoal.pages.live.server import WatchServer
from shoal.pages.live.watcher import Watcher
from shoal.pages.run.find_runs import newest_run
from shoal.pages.run.own_files import tail_records
from shoal.pages.run.read_run import read_run
from tests.rejects import rejects
from tests.run_directories import EVIL, make_hostile_run, make_run, record, write_lines

HEEDS_INTERRUPTS = """
import signal, sys
from shoal.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its jobs in the background ignore it
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WatchServer]:
    found = WatchServer(make_run(tmp_path / "run", 30))
    threading.Thread(target=found.serve_forever, args=(0.02,), daemon=True).start()
    yield found
    found.ends.set()
    found.shutdown()
    found.server_close()


def ask(
    server: WatchServer, path: str = "/", method: str = "GET", *, has_cookie: bool = True, **headers: str
) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    cookie = {"Cookie": f"other=1; {server.access.name}={server.access.key}"} if has_cookie else {}
    connection.request(method, path, headers=cookie | headers)
    return connection.getresponse()


def append(path: Path, *steps: int) -> None:
    with open(path / "metrics.jsonl", "a") as file:
        file.writelines(f"{json.dumps(record(step))}\n" for step in steps)


# ---- who may read ----------------------------------------------------------------------------------------------------


def test_a_token_is_exchanged_for_a_cookie_that_no_script_and_no_other_site_can_use(server: WatchServer) -> None:
    answer = ask(server, server.url.partition(f":{server.server_port}")[2], has_cookie=False)
    assert (answer.status, answer.headers["Location"]) == (303, "/")
    cookie = answer.headers["Set-Cookie"]
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= {part.strip() for part in cookie.split(";")}
    assert server.access.token not in cookie
    page = ask(server, "/", has_cookie=False, Cookie=cookie.partition(";")[0])
    body = page.read().decode()
    assert page.status == 200
    assert "Died at step 30 of 400" in body
    assert server.access.token not in body
    assert server.access.key not in body


@pytest.mark.parametrize(
    ("why", "request_"),
    {
        "no token": {"has_cookie": False},
        "a wrong token": {"path": "/?token=wrong", "has_cookie": False},
        "an empty token": {"path": "/?token=", "has_cookie": False},
        "a wrong cookie": {"has_cookie": False, "Cookie": "shoal_1=x"},
        "no token for the stream": {"path": "/stream", "has_cookie": False},
        "a foreign host": {"Host": "evil.example"},
        "a foreign host that looks like ours": {"Host": "127.0.0.1.evil.example:80"},
        "a post": {"method": "POST"},
        "a head": {"method": "HEAD"},
        "options": {"method": "OPTIONS"},
        "an unknown method": {"method": "PROPFIND"},
    }.items(),
)
def test_others_are_answered_403(server: WatchServer, why: str, request_: dict[str, object]) -> None:
    answer = ask(server, **request_)  # type: ignore[arg-type]
    assert answer.status == 403
    assert answer.headers["Set-Cookie"] is None
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]


def test_a_request_with_two_hosts_or_with_none_is_answered_403(server: WatchServer) -> None:
    for hosts in ([], ["127.0.0.1", "evil.example"]):
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
        connection.putrequest("GET", "/", skip_host=True)
        for host in hosts:
            connection.putheader("Host", host)
        connection.putheader("Cookie", f"{server.access.name}={server.access.key}")
        connection.endheaders()
        assert connection.getresponse().status == 403


def test_a_forwarded_port_is_our_own(server: WatchServer) -> None:
    assert ask(server, Host="localhost:9999").status == 200
    assert ask(server, "/recipe.yaml").status == 404


def test_the_page_allows_its_own_scripts_and_its_own_server_alone(server: WatchServer) -> None:
    page = ask(server)
    policy, body = page.headers["Content-Security-Policy"], page.read().decode()
    assert policy.count("sha256-") == 3
    assert "connect-src 'self'" in policy
    assert "unsafe-inline" not in policy.partition("script-src")[2].partition(";")[0]
    assert policy.removesuffix("; frame-ancestors 'none'") in body
    assert page.headers["Cache-Control"] == "no-store"


def test_a_hostile_run_stays_text(tmp_path: Path) -> None:
    path = make_hostile_run(tmp_path)
    assert EVIL not in live_page(path)
    with open(path / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 99, "loss": EVIL, EVIL: EVIL}) + "\n")
    (message,) = Watcher(path, Cursor.parse("0-0"), lambda: 0.0).poll()
    assert "pwned" not in json.dumps(message.data)
    assert "\x1b" not in str(picture(path))


def test_the_stream_sends_new_rows_once(server: WatchServer) -> None:
    cursor = Cursor.at_end(server.path / "metrics.jsonl")
    answer = ask(server, f"/stream?after={cursor}")
    assert answer.headers["Content-Type"] == "text/event-stream"
    append(server.path, 31, 32)
    lines = [answer.readline().decode().strip() for _ in range(5)]
    assert lines[:2] == ["retry: 2000", ""]
    assert lines[2] == f"id: {Cursor.at_end(server.path / 'metrics.jsonl')}"
    assert lines[3] == "event: rows"
    rows = json.loads(lines[4].removeprefix("data: "))
    assert rows["steps"] == [31, 32]
    assert rows["now"][0] == ["Step", "32", "of 400 · 8 %"]
    answer.close()


def test_a_run_that_vanishes_while_it_is_read_is_said(server: WatchServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.pages.live.page.is_run", lambda path: True)
    (server.path / "recipe.yaml").unlink()
    answer = ask(server)
    assert (answer.status, answer.read()[:37]) == (503, b"503: RUN must be the directory of a r")


def test_a_taken_port_is_reported(server: WatchServer, tmp_path: Path) -> None:
    with rejects("R070", "another process uses it"):
        WatchServer(tmp_path, server.server_port)
    with rejects("R070", "70000"):
        WatchServer(tmp_path, 70_000)


# ---- what changes ----------------------------------------------------------------------------------------------------


def test_a_file_that_grows_is_read_by_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    assert follower.new_records() == []  # not there yet
    path.write_text('{"step": 1}\n{"st')
    assert follower.new_records() == [{"step": 1}]
    assert Cursor.at_end(path) == follower.cursor == Cursor.parse(str(follower.cursor))
    with path.open("a") as file:
        file.write('ep": 2}\nnonsense\n')
    assert follower.new_records() == [{"step": 2}]
    assert follower.new_records() == []


@pytest.mark.parametrize("how", ["replaced", "replaced by as many bytes", "shortened", "removed"])
def test_a_file_that_is_not_the_same_is_noticed(tmp_path: Path, how: str) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [{"step": step} for step in range(9)])
    follower = Follower(path, Cursor.at_end(path))
    if how.startswith("replaced"):
        write_lines(tmp_path / "part", [{"step": step} for step in range(20 if how == "replaced" else 9)])
        (tmp_path / "part").replace(path)
    elif how == "shortened":
        write_lines(path, [{"step": 1}])
    else:
        path.unlink()
    assert follower.new_records() is None


def test_a_run_begins_steps_saves_and_ends(tmp_path: Path) -> None:
    clock = [0.0]
    path, later = tmp_path / "run", lambda: clock[0]
    assert "no run yet" in live_page(path)
    waiting = Watcher(path, Cursor(), lambda: 0.0, later)
    assert waiting.poll() == []
    make_run(path, 5)
    assert [each.event for each in waiting.poll()] == ["again"]
    with open(path / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        page = live_page(path)
        assert "running: this page follows it" in page
        watcher = Watcher(path, Cursor.at_end(path / "metrics.jsonl"), lambda: 0.1, later)
        append(path, 6)
        assert [each.event for each in watcher.poll()] == ["rows"]
        clock[0] = 11
        assert watcher.poll() == []  # a page that costs 0.1 s is made again after 20
        clock[0] = 21
        assert [each.event for each in watcher.poll()] == ["refresh"]
        clock[0] = 50
        assert watcher.poll() == []  # nothing has changed
        append_event(path, "saved", 6)
        clock[0] = 53
        assert [each.event for each in watcher.poll()] == ["refresh"]
    (path / "summary.json").write_text(json.dumps({"steps": 6}))
    clock[0] = 56
    assert [each.event for each in watcher.poll()] == ["again"]
    assert "the run has ended" in live_page(path)


def test_a_curve_without_a_finite_value_has_no_points(tmp_path: Path) -> None:
    """There is no chart for it, which the page would miss, and load itself again, forever."""
    path = make_run(tmp_path / "run", 1)
    write_lines(path / "metrics.jsonl", [record(step, loss="nan", lr=None) for step in (1, 2)])
    (message,) = Watcher(path, Cursor(), lambda: 0.0).poll()
    assert sorted(message.data["columns"]) == [
        "grad_norm", "memory_gib", "step_seconds", "tokens", "tokens_per_s",
    ]  # fmt: skip
    assert message.data["now"][1][:2] == ["Loss", "NaN"]


@pytest.mark.parametrize(
    ("duration", "left", "goal"),
    [("400step", 3.0 * 390, "of 400"), ("40960tok", 0.0, "of 40960tok"), ("2epoch", 3.0 * 10, "of 2epoch"),
     ("10min", None, "of 10min"), (EVIL, None, "")],
)  # fmt: skip
def test_the_time_that_is_left(duration: str, left: float | None, goal: str) -> None:
    records = [record(step, step_seconds=3.0, epoch=step / 10) for step in range(1, 11)]
    now = now_of(records, {"run": {"duration": duration}})
    assert (now.step, now.goal) == (10, goal)
    assert now.left_seconds == pytest.approx(left) if left is not None else now.left_seconds != now.left_seconds


def test_samples_are_no_tokens(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", 30)
    assert read_run(path).unit == "tokens"
    write_lines(path / "metrics.jsonl", [record(step, tokens=step * 16) for step in range(1, 31)])
    run = read_run(path)
    now = now_of(tail_records(path / "metrics.jsonl"), run.recipe)
    assert (run.unit, now.unit) == ("samples", "samples")


# ---- the command -----------------------------------------------------------------------------------------------------


def test_a_rank_whose_lines_stopped_is_late(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", 30, ranks=3)
    os.utime(path / "metrics.rank1.jsonl", (1, 1))
    assert [(each.rank, each.state) for each in rank_states(path)] == [(0, "steps"), (1, "late"), (2, "steps")]


def test_the_terminal_blames_a_rank_only_if_it_stands_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_run(tmp_path / "run", 30)
    with open(path / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for stands_out in (True, False):
            slow = slowest.to_metrics(Straggler(1, 0.5, 0.1, 0.4, 100, stands_out))
            write_lines(path / "metrics.jsonl", [record(1, **slow), record(2)])
            assert main(["watch", str(path), "--tui"]) == 0
            shown = capsys.readouterr().out
            assert ("the others wait for rank 1" in shown) is stands_out
            assert ("late in turns" in shown) is not stands_out


def test_the_terminal_shows_the_present_ranks_and_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_run(tmp_path / "run", 30, ranks=2)
    with open(path / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["watch", str(path), "--tui"]) == 0
        shown = capsys.readouterr().out
        assert main(["watch", str(path), "--tui", "--json"]) == 0
    for words in ("running", "of 400", "tokens/s", "GiB", "rank 1", "rank 1 of 2 was killed by signal 9"):
        assert words in shown
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["step"], len(found["ranks"])) == ("running", 30, 2)
    assert main(["watch", str(tmp_path / "none"), "--tui"]) == 0
    assert "waiting" in capsys.readouterr().out


def test_without_a_run_the_newest_is_taken(tmp_path: Path) -> None:
    with rejects("R071", "there is no run"):
        newest_run(tmp_path, fix="shoal ls")
    for name, when in (("a", 100), ("b", 300), ("c", 200)):
        for file in make_run(tmp_path / name, 2).iterdir():
            os.utime(file, (when, when))
    assert newest_run(tmp_path, fix="") == tmp_path / "b"


def test_a_host_reached_by_ssh_gets_the_line_to_type() -> None:
    reached = {"SSH_CONNECTION": "10.0.0.1 5000 10.0.0.2 2222", "USER": "ada", "DISPLAY": ":0"}
    assert ssh_line(8000, reached) == "ssh -N -L 8000:127.0.0.1:8000 -p 2222 ada@10.0.0.2"
    assert ssh_line(8000, {}) == ""
    assert not has_display(reached)
    assert has_display({"DISPLAY": ":0"})


def test_it_serves_until_interrupted(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", 30)
    command = [sys.executable, "-c", HEEDS_INTERRUPTS, "watch", str(path), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        connection = http.client.HTTPConnection(address.removeprefix("http://").partition("/")[0], timeout=20)
        connection.request("GET", "/")
        assert connection.getresponse().status == 403
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "the run is not affected" in said
    assert "Traceback" not in said
