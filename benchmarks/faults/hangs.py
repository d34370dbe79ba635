"""Which rank hangs, and where? Seeded faults in `shoal train`, and what it says of them."""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import report

KINDS = {
    "kill": ("kill_at", "N024", "was killed by signal 9"),
    "stop": ("stop_at", "N025", "was stopped by a signal (SIGSTOP)"),
    "GIL hold": ("hold_gil_at", "N031", "holds the GIL"),
    "sleep before a collective": ("sleep_at", "N030", "never entered"),
    "blocked read": ("block_read_at", "N030", "never entered"),
    "other operation": ("other_op_at", "N033", "called broadcast of float32[1000]"),
    "other shape": ("other_shape_at", "N033", "called all_reduce of float32[700]"),
}
"""Name → the fault, the code of its verdict, and the words that name it."""
PLANS = {
    2: ("dp_replicate=2", "dp_shard=2 zero=3"),
    3: ("dp_replicate=3", "dp_shard=3 zero=3"),
    4: ("dp_replicate=4", "dp_shard=4 zero=3", "dp_replicate=2 tp=2"),
}
MODEL = [
    *["--model.num_layers", "1", "--model.hidden", "32", "--model.ffn", "48", "--data.source", "synthetic"],
    *["--data.synthetic_samples", "64", "--data.validation", "0", "--data.seq_len", "32", "--data.global_batch", "12"],
    *["--data.workers", "0", "--device", "cpu", "--launch.threads", "1", "--run.duration", "60step"],
    *["--run.fast_dev_run", "false", "--checkpoint.every", "1000step", "--launch.max_restarts", "0", "--quiet"],
]
VERDICT = r"rank \d+ of \d+ .*\[N0\d\d\]"
LIMIT = {"kill": 0.5}
"""Seconds in which a fault has to be named; others: 5."""


@dataclass(frozen=True)
class Case:
    """One fault."""

    kind: str
    ranks: int
    rank: int
    step: int
    plan: str
    hosts: int = 1
    """Agents, each with as many ranks, at addresses of this machine."""


@dataclass(frozen=True)
class Outcome:
    """What came of it."""

    kind: str
    ranks: int
    seconds: float
    """From the fault to the message."""
    is_right: bool
    said: str


def cases(seed: int, count: int, ranks: list[int], hosts: int = 1) -> Iterator[Case]:
    """The same cases for the same seed."""
    for size in ranks:
        for kind in KINDS:
            chosen = random.Random(f"{seed} {size} {kind}")
            for _ in range(count):
                yield Case(kind, size, chosen.randrange(size), chosen.randint(6, 30), chosen.choice(PLANS[size]), hosts)


def run(case: Case) -> Outcome:
    """Run one case in a fork of this process, in which torch is loaded."""
    fault, code, words = KINDS[case.kind]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "faults.jsonl"
        os.environ["SHOAL_FAULTS"] = f"{fault}=rank:{case.rank},step:{case.step}"
        os.environ["SHOAL_FAULTS_LOG"] = str(log)
        read, write = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            _train(case, folder, write)
        os.close(write)
        said, at = _heard(read, child)
        os.close(read)
        os.waitpid(child, 0)
        if not log.exists():
            return Outcome(case.kind, case.ranks, float("inf"), False, f"{case}: there was no fault\n{said}")
        happened = json.loads(log.read_text().splitlines()[0])
    is_right = _is_right(said, case, code, words, happened["counters"])
    return Outcome(case.kind, case.ranks, at - happened["at"], is_right, said)


def _train(case: Case, folder: str, write: int) -> None:
    """Be the command; never returns."""
    os.setsid()
    os.dup2(write, 1)
    os.dup2(write, 2)
    from shoal.cli import main as shoal

    code = 1
    try:
        hosts = ",".join(f"127.0.0.{host}:{case.ranks // case.hosts}" for host in range(1, case.hosts + 1))
        where = ["--nproc", str(case.ranks)] if case.hosts == 1 else ["--hosts", hosts]
        code = shoal(["train", *MODEL, *where, "--plan", case.plan, "--run.dir", f"{folder}/run"])
    finally:
        sys.stderr.flush()
        os._exit(code)


def _heard(read: int, child: int, most: float = 90.0) -> tuple[str, float]:
    """All that the command printed, and when it first named a rank."""
    said, at, deadline = b"", 0.0, time.monotonic() + most
    while time.monotonic() < deadline:
        if not select.select([read], [], [], 1.0)[0]:
            continue
        part = os.read(read, 2**16)
        said += part
        if not at and re.search(VERDICT, said.decode(errors="replace")):
            at = time.monotonic()
        if not part:
            return said.decode(), at
    os.killpg(child, signal.SIGKILL)
    return said.decode(), at or float("inf")


def _is_right(said: str, case: Case, code: str, words: str, counters: dict[str, int]) -> bool:
    """Whether rank, verdict, axis, number and stack are those of the fault."""
    line = next((line for line in said.splitlines() if re.search(VERDICT, line)), "")
    line = re.sub(r" \(host [^)]*\)", "", line)
    named = f"rank {case.rank} of {case.ranks} {words}" in line and f"[{code}]" in line
    call = re.search(r"#(\d+) of (\w+)", line)
    operation = re.search(r"(\w+) #\d+ of|called (\w+) of", line)
    if not (named and call and operation):
        return False
    axis = "board" if call[2] == "the" else call[2]
    stack = code == "N024" or re.search(r"_hang \(|_mismatch \(|update \(|all_reduce \(", said)
    return bool(stack) and int(call[1]) == counters.get(axis, -2) + 1


def main() -> None:
    """Run all cases, in several processes, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20, help="of each kind and number of ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[3, 4])
    parser.add_argument("--hosts", type=int, default=1, help="agents, at addresses of this machine")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    options = report.arguments(parser, cases=1, ranks=[3], kinds=["other shape"])
    all_cases = cases(options.seed, options.cases, options.ranks, options.hosts)
    chosen = [case for case in all_cases if case.kind in options.kinds]
    if options.part is not None or options.jobs == 1:
        found = list(_outcomes(chosen[options.part or 0 :: options.jobs], prints=options.part is not None))
        if options.part is not None:
            return
    else:
        found = _in_parts(options.jobs)
    rows = list(_rows(found))
    print(report.table(rows))
    for outcome in found:
        if not outcome.is_right:
            print(f"WRONG: {outcome.kind}, {outcome.ranks} ranks, {outcome.seconds:.2f} s\n{outcome.said}")
    title = report.heading("Hangs", "How fast, and how rightly, is a rank named that dies, stops or hangs?")
    name = "hangs" if options.hosts == 1 else f"hangs-{options.hosts}-hosts"
    print(report.write(name, f"{title}\n{report.table(rows)}"))


def _outcomes(chosen: list[Case], *, prints: bool) -> Iterator[Outcome]:
    from shoal.numerics import lazy_dynamo

    lazy_dynamo.install()
    import shoal.train.recipe.dry_run
    import shoal.train.recipe.loop  # noqa: F401

    for case in chosen:
        outcome = run(case)
        if prints:
            print(json.dumps(asdict(outcome)), flush=True)
        yield outcome


def _in_parts(jobs: int) -> list[Outcome]:
    parts = [
        subprocess.Popen([sys.executable, *sys.argv, "--part", str(part)], stdout=subprocess.PIPE, text=True)
        for part in range(jobs)
    ]
    return [Outcome(**json.loads(line)) for part in parts for line in part.communicate()[0].splitlines()]


def _rows(found: list[Outcome]) -> Iterator[dict[str, str]]:
    for kind in KINDS:
        for ranks in sorted({outcome.ranks for outcome in found}):
            own = [outcome for outcome in found if (outcome.kind, outcome.ranks) == (kind, ranks)]
            if not own:
                continue
            seconds = [outcome.seconds for outcome in own]
            yield {
                "fault": kind,
                "ranks": str(ranks),
                "named rightly": f"{sum(outcome.is_right for outcome in own)} of {len(own)}",
                "seconds, median": f"{statistics.median(seconds):.2f}",
                "longest": f"{max(seconds):.2f}",
                "limit": f"{LIMIT.get(kind, 5.0):g}",
            }


if __name__ == "__main__":
    main()
