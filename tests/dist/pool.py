"""Worlds of gloo workers that live as long as the pytest run, so that a test on eight ranks costs milliseconds.

    @on_ranks(2, 4)                 # the body runs on every rank of a world of 2, then of 4
    def test_sum(world: World) -> None: ...

    values = pool.run(function, 4, *args)      # function(world, *args) on four ranks; what they returned, by rank

Workers are forked by a server that has torch loaded and has never computed anything, because the pytest process itself
has threads by then (see `fork_is_safe`). Every world size has its own workers and one process group, started when first
needed. A world in which anything went wrong is ended, and the next test gets a fresh one.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import inspect
import multiprocessing
import multiprocessing.spawn
import os
import pickle
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from shoal.launch.failure import Failure, failure_of, first_failure
from tests.dist.loading import load_function
from tests.warm import warm_python

CALL_TIMEOUT = 60.0  # seconds
# gloo's groups live as long as their process, and each has threads that look around a hundred times a second. So a crew
# is stopped between two calls, and ended after some.
CALLS_OF_A_CREW = 12
SETTLE = 1.0  # seconds that the other ranks get to finish or fail, once one has failed
# What every rank of every crew would otherwise import, a second or two each.
PRELOAD = ["pytest", "transformers.modeling_utils", "tests.dist.pool", "tests.preload"]


class RankFailed(AssertionError):
    """A rank of a test raised, died or did not answer; the text names it and shows its traceback or stack."""


def on_ranks(*world_sizes: Any, timeout: float = CALL_TIMEOUT) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test's body on every rank of worlds of these sizes (or of `wide` ones). Its first parameter is the world;
    others are fixtures or parameters."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def test(pool: Pool, world_size: int, **others: Any) -> None:
            try:
                pool.run(test, world_size, *others.values(), timeout=timeout)
            except RankFailed as failure:
                pytest.fail(str(failure), pytrace=False)

        _, *own = inspect.signature(body).parameters.values()
        added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("pool", "world_size")]
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # what pytest asks fixtures for
            [*added, *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own)]
        )
        test.on_rank = body  # type: ignore[attr-defined]
        test.pytestmark = [*getattr(body, "pytestmark", []), pytest.mark.parametrize("world_size", world_sizes).mark]  # type: ignore[attr-defined]
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(test, name, getattr(body, name))
        return test

    return decorate


@dataclass(slots=True)
class Pool:
    """All worlds of a pytest run."""

    crews: dict[int, Crew] = field(default_factory=dict)

    def __post_init__(self) -> None:
        atexit.register(self.close)  # before multiprocessing's own, which waits for workers without ending them

    @staticmethod
    def warm_up() -> None:
        """Begin to load torch in the background; the first world then starts sooner."""
        multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
        with quiet_in_a_part(), a_warm_executable():
            forkserver.ensure_running()

    def run(
        self, function: Callable[..., Any], world_size: int, *args: Any, timeout: float = CALL_TIMEOUT
    ) -> list[Any]:
        """What `function(world, *args)` returned on every rank. It is sent by name; arguments and values by pickle."""
        if world_size not in self.crews:
            self.warm_up()
            self.crews[world_size] = Crew.start(world_size)
        crew = self.crews[world_size]
        try:
            returned = crew.call(function, args, timeout=timeout)
        except BaseException:  # also KeyboardInterrupt: some rank may be anywhere
            self.crews.pop(world_size).end()
            raise
        crew.num_calls += 1
        if crew.num_calls >= CALLS_OF_A_CREW:
            self.crews.pop(world_size).end()
        return returned

    def close(self) -> None:
        """End every worker."""
        while self.crews:
            self.crews.popitem()[1].end()


@contextlib.contextmanager
def quiet_in_a_part() -> Iterator[None]:
    """What torch writes to stderr while ranks fail on purpose is captured by pytest, but not in one of its parts."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    yield
    os.dup2(kept, 2)
    os.close(kept)


@contextlib.contextmanager
def a_warm_executable() -> Iterator[None]:
    """What multiprocessing starts is a fork of a process that has loaded all this already, in `make test`."""
    kept = multiprocessing.spawn.get_executable()
    multiprocessing.set_executable(warm_python())
    yield
    multiprocessing.set_executable(kept)


@dataclass(frozen=True, slots=True)
class Answer:
    """What one rank has to say about one call."""

    value: Any = None
    failure: Failure | None = None
    skipped: str | None = None


@dataclass(slots=True, kw_only=True)
class Crew:
    """The workers of one world size."""

    directory: Path
    processes: list[Any]
    connections: list[Connection]
    lifeline_end: Connection
    num_calls: int = 0

    @classmethod
    def start(cls, world_size: int) -> Crew:
        context = multiprocessing.get_context("forkserver")
        directory = Path(tempfile.mkdtemp(prefix="shoal-pool-"))
        lifeline, lifeline_end = context.Pipe(duplex=False)
        crew = cls(directory=directory, processes=[], connections=[], lifeline_end=lifeline_end)
        with lifeline:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                with theirs:
                    arguments = (rank, world_size, directory, theirs, lifeline)
                    process = context.Process(target=serve, args=arguments, name=f"rank {rank} of {world_size}")
                    process.start()
                crew.processes.append(process)
                crew.connections.append(ours)
        return crew

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], *, timeout: float) -> list[Any]:
        name = (
            function.__module__,
            inspect.getsourcefile(getattr(function, "on_rank", function)),
            function.__qualname__,
        )
        message = pickle.dumps((name, warnings.filters, pickle.dumps(args)))
        self._signal(signal.SIGCONT)
        for connection in self.connections:
            with contextlib.suppress(BrokenPipeError):  # a worker that is gone is found below
                connection.send_bytes(message)
        answers = self._collect(timeout)
        if skipped := [answer.skipped for answer in answers.values() if answer.skipped is not None]:
            pytest.skip(skipped[0])
        if len(answers) < len(self.processes) or any(answer.failure for answer in answers.values()):
            raise RankFailed(self._report(answers, timeout))
        self._signal(signal.SIGSTOP)
        return [answers[rank].value for rank in range(len(answers))]

    def _collect(self, timeout: float) -> dict[int, Answer]:
        """The answers by rank, as they come; of those that come in time."""
        answers: dict[int, Answer] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < len(self.processes):
            waited_for = {self.connections[rank]: rank for rank in self._silent(answers)}
            ends = {self.processes[rank].sentinel: rank for rank in self._silent(answers)}
            ready = wait([*waited_for, *ends], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in {(waited_for | ends)[one] for one in ready}:
                answers[rank] = self._answer_of(rank)
                if answers[rank].failure:
                    deadline = min(deadline, time.monotonic() + SETTLE)
        return answers

    def _answer_of(self, rank: int) -> Answer:
        with contextlib.suppress(EOFError, OSError):
            if self.connections[rank].poll():
                return pickle.loads(self.connections[rank].recv_bytes())
        self.processes[rank].join(timeout=5)
        code = self.processes[rank].exitcode or 0
        how = (
            f"was killed by signal {-code} ({signal.Signals(-code).name})"
            if code < 0
            else f"ended with exit code {code}"
        )
        return Answer(failure=Failure(code="N024", rank=rank, at=time.monotonic(), what=how, is_sudden=True))

    def _report(self, answers: dict[int, Answer], timeout: float) -> str:
        failures = [answer.failure for answer in answers.values() if answer.failure]
        silent = self._silent(answers)
        size = len(self.processes)
        lines = []
        if failures:
            first = first_failure(failures)
            lines.append(f"rank {first.rank} of {size}: {first.what}\n{first.details}".rstrip())
            lines += [f"rank {other.rank} also: {other.what}" for other in failures if other is not first]
            lines += [f"ranks still running, and ended: {', '.join(map(str, silent))}"] if silent else []
        else:
            lines.append(f"no answer within {timeout:g} s from rank {', '.join(map(str, silent))} of {size}")
            lines += [f"rank {rank} is at\n{stack}" for rank, stack in self._stacks(silent)]
        return "\n".join(lines)

    def _silent(self, answers: dict[int, Answer]) -> list[int]:
        return [rank for rank in range(len(self.processes)) if rank not in answers]

    def _stacks(self, ranks: list[int]) -> Iterator[tuple[int, str]]:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        deadline = time.monotonic() + 1
        for rank in ranks:
            path = stack_path(self.directory, rank)
            while not path.stat().st_size and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.05)  # for the rest of it
            yield rank, path.read_text() or "  unknown: the process does not run at all"

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to the workers and what they started."""
        for process in self.processes:
            for kill in (os.killpg, os.kill):  # the group, or the process alone if it has not made its group yet
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(process.pid, number)

    def end(self) -> None:
        """Kill the workers and what they started, and wait until they are gone."""
        self._signal(signal.SIGKILL)
        for process, connection in zip(self.processes, self.connections, strict=True):
            process.join()
            process.close()
            connection.close()
        self.lifeline_end.close()
        shutil.rmtree(self.directory, ignore_errors=True)


# ---- inside a worker -----------------------------------------------------------------------------------------------


def serve(rank: int, size: int, directory: Path, connection: Connection, lifeline: Connection) -> None:
    """The life of a worker: one process group, and one call after the other until it is killed."""
    import torch.distributed as dist

    from shoal.comm.rendezvous.launcher_environment import Placement
    from shoal.comm.world import World
    from shoal.launch.worker import end_with_parent, lead_own_group

    lead_own_group()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(lifeline, directory)
    stacks = stack_path(directory, rank).open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    place = Placement(rank=rank, world_size=size, local_rank=rank, local_world_size=size)
    store = dist.FileStore(str(directory / "store"), size)
    world = World.start(place, device="cpu", store=store, timeout=CALL_TIMEOUT, threads=1)
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(answer_to(message, world))


def answer_to(message: bytes, world: Any) -> bytes:
    import torch

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    try:
        (module, path, name), filters, args = pickle.loads(message)
        with warnings.catch_warnings():
            warnings.filters[:] = filters  # type: ignore[index]  # what is an error in the test is one on its ranks
            function = load_function(module, path, name)
            value = getattr(function, "on_rank", function)(world, *pickle.loads(args))
            return pickle.dumps(Answer(value=value))
    except pytest.skip.Exception as skipped:
        return pickle.dumps(Answer(skipped=str(skipped)))
    except BaseException as error:
        return pickle.dumps(Answer(failure=failure_of(world.rank, error)))


def stack_path(directory: Path, rank: int) -> Path:
    return directory / f"stack-{rank}.txt"
