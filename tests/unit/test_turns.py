"""Tests that run beside each other, and one that is to be alone."""

from __future__ import annotations

import threading
from pathlib import Path

from tests.turns import turn


class Other:
    """A test in another process; a thread will do, since each turn opens the files anew."""

    def __init__(self, folder: Path, *, is_alone: bool) -> None:
        self.runs, self.may_end = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, args=(folder, is_alone))
        self.thread.start()

    def _run(self, folder: Path, is_alone: bool) -> None:
        with turn(folder, is_alone=is_alone):
            self.runs.set()
            self.may_end.wait(30)

    def end(self) -> None:
        self.may_end.set()
        self.thread.join(30)
        assert not self.thread.is_alive()


def test_many_run_beside_each_other_and_one_that_is_alone_waits_for_all(tmp_path: Path) -> None:
    first, second = Other(tmp_path, is_alone=False), Other(tmp_path, is_alone=False)
    assert first.runs.wait(30)
    assert second.runs.wait(30)
    alone = Other(tmp_path, is_alone=True)
    first.end()
    assert not alone.runs.wait(0.1)
    late = Other(tmp_path, is_alone=False)  # it would run beside the second, but one waits that came before
    assert not late.runs.wait(0.1)
    second.end()
    assert alone.runs.wait(30)
    assert not late.runs.wait(0.1)
    alone.end()
    assert late.runs.wait(30)
    late.end()
