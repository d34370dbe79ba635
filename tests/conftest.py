"""What all tests share: the order of their parts, what runs beside the first of them, what is left out of a short run
or without a GPU, and how long each part took."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import PurePosixPath

import pytest

from tests.beside import Beside

FIRST_PARTS = ["unit", "dist"]  # seconds first, then processes, then everything that is built on both


def part_of(node_id: str) -> str:
    """`tests/unit/test_plan.py::test_x` → `unit`; `tests/test_readme.py::test_x` → `readme`."""
    folder_or_file = PurePosixPath(node_id.partition("::")[0]).parts[1:2] or ("other",)
    return folder_or_file[0].removeprefix("test_").removesuffix(".py")


def place(item: pytest.Item) -> int:
    """Where an item's part stands in the order; parts that are not named come last."""
    part = part_of(item.nodeid)
    return FIRST_PARTS.index(part) if part in FIRST_PARTS else len(FIRST_PARTS)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=place)  # stable: within a part the order stays
    if not os.environ.get("SHOAL_ALL"):  # set by `make test-all`
        wide = [item for item in items if item.get_closest_marker("wide")]
        items[:] = [item for item in items if not item.get_closest_marker("wide")]
        config.hook.pytest_deselected(items=wide)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not has_gpu():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


BESIDE = pytest.StashKey[Beside]()


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[BESIDE] = Beside()
    asking = [item for item in session.items if "beside" in getattr(item, "fixturenames", ())]
    jobs = {job: None for item in asking for job in getattr(getattr(item, "module", None), "BESIDE", ())}
    if jobs and any(part_of(item.nodeid) == "unit" for item in session.items) and not session.config.option.collectonly:
        session.config.stash[BESIDE].start(list(jobs))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if part_of(item.nodeid) != "unit":
        item.config.stash[BESIDE].stop()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if BESIDE in session.config.stash:  # else something was wrong with the tests before any could be run
        session.config.stash[BESIDE].close()


@pytest.fixture(scope="session")
def beside(pytestconfig: pytest.Config) -> Beside:
    return pytestconfig.stash[BESIDE]


def has_gpu() -> bool:
    import torch  # two seconds, which a run of unit tests alone need not spend

    return torch.cuda.is_available()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("time by part")
    if seconds := os.environ.get("ENVIRONMENT_SECONDS"):  # set by `make test` when it has just made the environment
        terminalreporter.line(f"{'environment':<16} {'':>10} {float(seconds):8.1f} s")
    for part, num_tests, seconds_spent in time_by_part(terminalreporter):
        terminalreporter.line(f"{part:<16} {num_tests:>4} tests {seconds_spent:8.1f} s")


def time_by_part(terminalreporter: pytest.TerminalReporter) -> Iterator[tuple[str, int, float]]:
    """Each part with the number of its tests and the seconds that their set-up, call and tear-down took."""
    seconds: dict[str, float] = defaultdict(float)
    tests: dict[str, set[str]] = defaultdict(set)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[part_of(report.nodeid)] += report.duration
                tests[part_of(report.nodeid)].add(report.nodeid)
    for part in seconds:
        yield part, len(tests[part]), seconds[part]
