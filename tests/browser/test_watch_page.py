"""The live page in a real browser: a step counter that moves, curves that grow, and an end that is said.

`make test-browser` runs it. It needs Chromium and the package playwright, and is skipped without them.
"""

from __future__ import annotations

import fcntl
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.pages.live import watcher
from shoal.pages.live.server import WatchServer
from tests.run_directories import make_run, record

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    context = browser.new_context()
    yield context.new_page()
    context.close()


def served(path: Path) -> WatchServer:
    server = WatchServer(path)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return server


def until(page: Any, reached: Callable[[], bool], seconds: float = 60) -> None:
    ends = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < ends, page.inner_text("body")
        page.wait_for_timeout(100)


def test_a_running_step_counter_moves(page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a directory without a run, through its first steps, to its end; no message on the console."""
    monkeypatch.setattr(watcher, "SHARE", 0)
    monkeypatch.setattr(watcher, "REFRESH_EVERY", 1.0)
    path = tmp_path / "run"
    server, said = served(path), []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto(server.url)
    assert server.access.token not in page.url
    assert "waiting for the run to begin" in page.inner_text("#live")
    path.mkdir()
    with open(path / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (make_run(tmp_path / "made", 3) / "metrics.jsonl").rename(path / "metrics.jsonl")
        for name in ("events.jsonl", "recipe.yaml", "environment.json"):
            (tmp_path / "made" / name).rename(path / name)
        until(page, lambda: page.locator(".uplot canvas").count() == 5)
        seen = [_step(page)]
        for step in (40, 80):
            with open(path / "metrics.jsonl", "a") as file:
                file.writelines(f"{json.dumps(record(each))}\n" for each in range(step - 36, step + 1))
            until(page, lambda step=step: _step(page) == step)
            seen.append(_step(page))
        assert seen == [3, 40, 80]
        assert page.evaluate("shoalPage.found.runs[0].curves.loss[0].length") == 77
        assert page.evaluate("shoalPage.found.runs[0].axis.step.at(-1)") == 80
        until(page, lambda: "Running, at step 80 of 400" in page.inner_text(".verdict"))  # a refresh of the sections
    (path / "summary.json").write_text(json.dumps({"steps": 80, "saved_step": 80}))
    until(page, lambda: "the run has ended" in page.inner_text("#live"))
    assert "Ended after 80 steps" in page.inner_text(".verdict")
    assert said == []
    assert {url.split("/")[2] for url in requests if not url.startswith("data:")} == {f"127.0.0.1:{server.server_port}"}
    server.ends.set()
    server.shutdown()
    server.server_close()
    until(page, lambda: "this page no longer changes" in page.inner_text("#live"))


def test_sections_that_come_later_appear_in_their_order(
    page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile, and the metrics of every rank, of a run whose page was opened before."""
    monkeypatch.setattr(watcher, "SHARE", 0)
    monkeypatch.setattr(watcher, "REFRESH_EVERY", 1.0)
    path = make_run(tmp_path / "run", 8)
    server = served(path)
    with open(path / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        page.goto(server.url)
        page.evaluate("window.isSamePage = true")
        above, below = ["live", "next", "curves", "time"], ["history", "layout", "reproduce"]
        assert _sections(page) == [*above, *below]
        (path / "profile.json").write_text(json.dumps({"parts": [{"part": "forward", "seconds": 0.2}]}))
        for rank in make_run(tmp_path / "other", 9, ranks=2).glob("metrics.rank*.jsonl"):
            rank.rename(path / rank.name)
        with open(path / "metrics.jsonl", "a") as file:
            file.write(f"{json.dumps(record(9))}\n")
        until(page, lambda: page.locator("#profile").count() == 1)
        assert _sections(page) == [*above, "profile", "ranks", *below]
        assert "forward" in page.inner_text("#profile")
        assert page.evaluate("window.isSamePage")
    server.ends.set()
    server.shutdown()
    server.server_close()


def _sections(page: Any) -> list[str]:
    found: list[str] = page.evaluate("[...document.querySelectorAll('section[id]')].map((each) => each.id)")
    return found


def _step(page: Any) -> int:
    return int(page.inner_text("#live .fact dd").replace(",", ""))
