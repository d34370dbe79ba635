"""What all tests share: the order of their parts, how processes divide them, which are left out of a short run or
without a GPU, and how long each part took."""

from __future__ import annotations

import functools
import gc
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from tests.turns import turn
from tests.warm import VARIABLE, WarmPython

# Seconds first, then processes, then everything that is built on both. Of that, what takes a minute or more comes
# first, so that several processes end at about the same time.
ORDER = ["unit", "dist", "benchmarks", "readme", "examples", "cli/test_resume", "cli/test_verify", "cli", ""]


def part_of(node_id: str) -> str:
    """`tests/unit/test_plan.py::test_x` → `unit`; `tests/test_readme.py::test_x` → `readme`."""
    folder_or_file = PurePosixPath(node_id.partition("::")[0]).parts[1:2] or ("other",)
    return folder_or_file[0].removeprefix("test_").removesuffix(".py")


def place(item: pytest.Item) -> tuple[bool, int]:
    """Where an item stands in the order; after all others come those that run alone."""
    number = next((number for number, part in enumerate(ORDER) if item.nodeid.startswith(f"tests/{part}")), 0)
    return item.get_closest_marker("alone") is not None, number


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
    if folder := folder_of_turns(config):
        names = [item.nodeid for item in items if item.get_closest_marker("alone")]
        Path(folder, "alone").write_text("\n".join(names))  # each process writes the same


# ---- several processes: `make test` without ARGS, by pytest-xdist ---------------------------------------------------


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: much of a test is waiting, for a process to start or for a time to be out."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A process is given a file at a time, in our order, because the tests of a file share what they have started."""
    from xdist.scheduler import LoadScopeScheduling

    @functools.cache
    def those_alone() -> set[str]:
        return set((config.stash[TURNS] / "alone").read_text().splitlines())

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid in those_alone():  # at the end and in one process: nobody waits for them
                return "alone"
            return "examples" if part_of(nodeid) == "examples" else nodeid.partition("::")[0]

    config.option.loadscopereorder = False
    return ByFile(config, log)


WARM = pytest.StashKey[WarmPython]()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """All processes are forks of one that has torch loaded."""
    config.stash[WARM] = WarmPython()
    os.environ[VARIABLE] = config.stash[WARM].path
    for spec in specs:
        spec.python = config.stash[WARM].path


def pytest_collection_finish(session: pytest.Session) -> None:
    """Ranks that a test launches from here are forks of it too; and what is loaded is no garbage."""
    if VARIABLE in os.environ and hasattr(session.config, "workerinput"):
        from tests.dist.pool import Pool

        Pool.warm_up()
        gc.collect()
        gc.freeze()


TURNS = pytest.StashKey[Path]()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a process where the locks are."""
    if TURNS not in node.config.stash:
        node.config.stash[TURNS] = Path(tempfile.mkdtemp(prefix="shoal-tests-"))
    node.workerinput["turns"] = str(node.config.stash[TURNS])


def folder_of_turns(config: pytest.Config) -> str | None:
    """In a process of several, where the locks are."""
    folder: str | None = getattr(config, "workerinput", {}).get("turns")
    return folder


def pytest_unconfigure(config: pytest.Config) -> None:
    if TURNS in config.stash:
        shutil.rmtree(config.stash[TURNS])
    if WARM in config.stash:
        config.stash[WARM].close()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # first: nobody's time runs out while it waits for its turn
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    folder = folder_of_turns(item.config)
    if folder is None:
        return (yield)
    with turn(Path(folder), is_alone=item.get_closest_marker("alone") is not None):
        return (yield)


# ---- all ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def once() -> Callable[[Callable[[], Any]], Any]:
    """What a function returns, for all tests that ask; it is called when the first one does."""
    return functools.cache(lambda job: job())


def has_gpu() -> bool:
    import torch  # two seconds, which a run of unit tests alone need not spend

    return torch.cuda.is_available()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    processes = getattr(terminalreporter.config.option, "numprocesses", None)
    terminalreporter.section("time by part" + (f", added up over {processes} processes" if processes else ""))
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
