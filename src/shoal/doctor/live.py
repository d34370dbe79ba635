"""Checks of a run from its directory: is it alive, does it move, and which rank do the others wait for.

The process that holds the lock of the directory is rank 0. It has mapped the board on which all ranks of its host
write their heartbeats (`shoal.comm.heartbeat`), and each rank holds its file for stacks open. So the kernel's tables
lead from the directory to the board and to the process of each rank; nothing has to be registered by a run.

    runs/tiny/lock ──/proc/locks──► process of rank 0 ──/proc/PID/maps──► heartbeats
                                                    other processes ──/proc/PID/fd──► stacks-1.txt: rank 1
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shlex
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.doctor.checks.network import links_of
from shoal.doctor.finding import Finding, ok, warning, will_fail
from shoal.errors import ShoalError
from shoal.files import opened
from shoal.safe_parsing import parse_yaml, read_text

WINDOW = 1.5
"""Seconds for which ranks are observed."""
COSTLY = 0.1
"""Of the time: a rank that others wait for so long is named."""
LAST = 2**16
"""Bytes at the end of metrics.jsonl that are read."""


def check_run(path: Path) -> list[Finding]:
    """The findings of the run in a directory."""
    try:
        (path / "environment.json").stat()
    except OSError as error:
        what = f"{str(path)!r} holds no run of shoal: environment.json: {error.strerror}"
        fix = "shoal doctor runs/NAME   # as the user of the run; or: shoal doctor RECIPE"
        raise ShoalError(what, fix=fix, code="N100") from None
    return [*_processes(path), *_progress(path)]  # in this order: ranks are observed for a while, and move on


def _processes(path: Path) -> Iterable[Finding]:
    """Whether a process holds the run, and what its ranks do."""
    pid = holder_of(path / "lock")
    if pid is None:
        launcher = holder_of(path / "events.jsonl")
        return _ended(path) if launcher is None else _recovering(launcher)
    board = board_of(pid)
    if board is None:
        return [ok("process", f"process {pid} holds the run; it is one rank, or another launcher's")]
    return _ranks(path, board)


def _progress(path: Path) -> Iterator[Finding]:
    """The last step, its age, and its loss."""
    last = last_metrics(path)
    if last is None:
        yield ok("progress", "no step has been logged")
        return
    age = time.time() - (path / "metrics.jsonl").stat().st_mtime
    name, loss = ("loss", last["loss"]) if "loss" in last else ("validation loss", last.get("eval_loss"))
    evidence = f"step {last['step']} was logged {_ago(age)}; {name} {_short(loss)}"
    if isinstance(loss, str):  # as metrics write a number that is not finite
        yield will_fail("progress", evidence, "shoal explain T032   # a lower --optim.lr, or --run.on_nan skip")
    else:
        yield ok("progress", evidence)


def _ended(path: Path) -> Iterator[Finding]:
    """Why no process holds the run."""
    summary = path / "summary.json"
    if summary.is_file():
        said = _mapping(summary)
        if not said:
            evidence = "no process holds the run, and its summary.json is damaged"
            yield will_fail("process", evidence, f"shoal checkpoint verify {shlex.quote(str(path))}")
            return
        how = "was stopped by a signal" if said.get("was_stopped") else "reached its end"
        yield ok("process", f"the run {how} at step {said.get('steps')}")
        return
    host = _mapping(path / "environment.json").get("host")
    if host not in (None, platform.node()):
        evidence = f"no process of this host holds the run, which was started on {str(host)[:80]!r}"
        yield warning("process", f"{evidence}: whether it lives is seen there alone", f"shoal doctor {path}   # there")
        return
    evidence = "no process holds the run, and it has no summary: it was killed, or failed"
    yield will_fail(
        "process",
        evidence,
        f"shoal train {shlex.quote(str(path / 'recipe.yaml'))}   # resumes from the last checkpoint",
    )


def _recovering(launcher: int) -> Iterator[Finding]:
    evidence = f"no rank holds the run, but process {launcher}, its launcher, lives: it replaces or restarts ranks"
    yield warning("process", evidence, "wait, and look again; what has failed is in the output of the launcher")


def _ranks(path: Path, board_path: Path) -> Iterator[Finding]:
    """Observe all ranks for a moment, and name the one that holds up the others."""
    from shoal.comm.heartbeat.board import PARTS, SLOT, HeartbeatBoard

    size = board_path.stat().st_size // (PARTS * 2 * SLOT)
    board = HeartbeatBoard(board_path, size)
    pids = ranks_of(board_path.parent)
    before = {index: board.read(index) for index in range(size)}
    time.sleep(WINDOW)
    after = {index: board.read(index) for index in range(size)}
    silent = [index for index, beat in after.items() if beat is None]
    if silent:
        yield warning("ranks", f"ranks {_listed(silent)} of {size} have not started to beat", "wait, and look again")
        return
    beats = {index: beat for index, beat in after.items() if beat is not None}
    yield from _judged(path, before, beats, pids)


def _judged(
    path: Path, before: Mapping[int, Any], after: Mapping[int, dict[str, Any]], pids: Mapping[int, int]
) -> Iterator[Finding]:
    from shoal.launch.watch.reading import progress_of, read_state

    phases = ", ".join(sorted({f"{beat['phase']} {beat['step']}" for beat in after.values()}))
    moving = [rank for rank, beat in after.items() if before[rank] and progress_of(before[rank]) != progress_of(beat)]
    states = {rank: read_state(pid).letter for rank, pid in pids.items()}
    stopped = [rank for rank, letter in states.items() if letter == "T"]
    if stopped:
        processes = [pids[rank] for rank in stopped]
        which = f"ranks {_listed(stopped)} are" if len(stopped) > 1 else f"rank {stopped[0]} is"
        others = "; the others wait" if len(stopped) < len(after) else ""
        evidence = f"{which} stopped by a signal (process {_listed(processes)}){others}"
        yield will_fail("ranks", evidence, f"kill -CONT {' '.join(map(str, processes))}")
    elif moving:
        everywhere = {rank for beat in after.values() for _, ranks in beat["groups"].values() for rank in ranks}
        here = f" of this host, of {len(everywhere)} in all," if len(everywhere) > len(after) else ""
        yield ok("ranks", f"{len(moving)} of {len(after)} ranks{here} move ({phases})")
        yield from _straggler(path, pids)
    else:
        yield _verdict(path, after, pids, phases)


def _straggler(path: Path, pids: Mapping[int, int]) -> Iterator[Finding]:
    """The rank that the others wait for in a run that moves, as the run itself has measured it."""
    from shoal.comm.heartbeat import slowest

    last = next((each for each in records(path) if "straggler_rank" in each), {})
    found = slowest.of_metrics(last)
    if found is None or found.cost_fraction < COSTLY:
        return
    cost = f"{found.cost_fraction:.0%} of the time"
    if not found.stands_out:
        yield ok("slowest rank", f"ranks are late in turns; the one that costs most, {found.rank}, takes {cost}")
        return
    late = f"{found.late_seconds * 1e3:.0f} ms late (median)"
    evidence = f"the others wait {cost} for rank {found.rank}, which is {late}"
    where = f" -p {pids[found.rank]}" if found.rank in pids else ""
    yield warning("slowest rank", evidence, f"top -H{where}   # other programs, heat, a slow disk; or uneven batches")


def _verdict(path: Path, after: Mapping[int, dict[str, Any]], pids: Mapping[int, int], phases: str) -> Finding:
    """The verdict of the launcher's own rules, on ranks of which none has moved."""
    from shoal.launch.watch.hang_thresholds import Thresholds
    from shoal.launch.watch.reading import Reading, read_state
    from shoal.launch.watch.report import problem_of
    from shoal.launch.watch.verdict import verdict

    now = time.monotonic()
    still = _still(path, after.values())
    timeout = _setting(path, "launch", "timeout", 600.0)
    readings = {rank: Reading.parse(beat, age=now - float(beat["beat"]), still=still) for rank, beat in after.items()}
    states = {rank: read_state(pids[rank]) for rank in after if rank in pids}
    found = verdict(readings, states, Thresholds(timeout))
    where = next((f"py-spy dump --pid {pid}" for pid in pids.values()), "")
    if found is None:
        evidence = f"no rank moved for {WINDOW:g} s ({phases}), and no rank waits for another one"
        return warning("ranks", evidence, f"wait, and look again; or {where}")
    problem = problem_of(found, num_ranks=len(after), timeout=timeout)
    look = f"py-spy dump --pid {pids[found.rank]}   # " if found.rank in pids else ""
    kind = will_fail if found.is_final else warning  # one that is not may continue: rank 0 saves, a model compiles
    return kind("ranks", f"{problem.what} [{problem.code}]", f"{look}{problem.fix}")


def _still(path: Path, beats: Collection[Mapping[str, Any]]) -> float:
    """Seconds for which nothing has moved, as far as is known: at least those of the observation.

    A rank that stands still writes when it entered its last collectives. One that has not ended is waited for since
    then. Otherwise the ranks may compute, or wait for messages, of which no time is written. Then they have stood still
    no longer than since the last collective, and since the next line of the metrics was due.
    """
    tickets = [ticket for beat in beats for ticket in beat["tickets"]]
    since_entered = time.time() - max((int(ticket["nanoseconds"]) for ticket in tickets), default=0) / 1e9
    if not all(ticket["is_done"] for ticket in tickets):
        return max(WINDOW, since_entered)
    steps = _setting(path, "run", "log_every", 1.0)
    overdue = _age(path / "metrics.jsonl") - steps * max(float(beat["median"]) for beat in beats)
    return max(WINDOW, min(since_entered, overdue))


def holder_of(lock: Path) -> int | None:
    """The process that has locked a file; None: none has, or it is not visible here."""
    try:
        inode = lock.stat().st_ino
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    pids = [int(words[4]) for words in map(str.split, lines) if words[1] == "FLOCK" and words[5].endswith(f":{inode}")]
    return next((pid for pid in pids if pid > 0 and Path(f"/proc/{pid}").exists()), None)


def board_of(pid: int) -> Path | None:
    """The board that a process has mapped; None: it has none, or belongs to another user."""
    try:
        text = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return None
    found = re.search(r"(/\S*/shoal-launch-\S*/heartbeats)$", text, re.MULTILINE)
    return Path(found[1]) if found and os.path.isfile(found[1]) else None


def ranks_of(folder: Path) -> dict[int, int]:
    """Rank on this host → its process, by the file for its stacks."""
    found: dict[int, int] = {}
    for process in Path("/proc").glob("[0-9]*"):
        for link in links_of(process):
            if name := re.fullmatch(rf"{re.escape(str(folder))}/stacks-(\d+)\.txt", link):
                found[int(name[1])] = int(process.name)
    return dict(sorted(found.items()))


def last_metrics(path: Path) -> dict[str, Any] | None:
    """The last whole line of the metrics; None: there is none."""
    return next(records(path), None)


def records(path: Path) -> Iterator[dict[str, Any]]:
    """The last lines of the metrics, the newest first."""
    with contextlib.suppress(OSError), opened(path / "metrics.jsonl") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - LAST))
        for line in reversed(file.read().splitlines()):
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict) and "step" in found:
                    yield found


def _mapping(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_text(path, fix=""))
    except (OSError, ValueError):  # a `ShoalError` is a ValueError
        return {}
    return found if isinstance(found, dict) else {}


def _setting(path: Path, section: str, name: str, usual: float) -> float:
    """A number of the stored recipe."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return float(parse_yaml(read_text(path / "recipe.yaml", fix=""), "recipe.yaml", fix="")[section][name])
    return usual


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def _short(loss: Any) -> str:
    """A loss with a few digits; another value as it is.

    >>> _short(1.57055766582489), _short("nan")
    ('1.571', 'nan')
    """
    return f"{loss:.4g}" if isinstance(loss, float) else str(loss)[:20]


def _ago(seconds: float) -> str:
    return f"{seconds:.0f} s ago" if seconds < 120 else f"{seconds / 60:.0f} min ago"


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
