"""Is a run slower while `shoal watch` shows it?

python benchmarks/watch/cost.py [--rounds 8] [--seconds 20]

One run trains `recipes/tiny.yaml` on two ranks. In turns nothing watches it, and a client follows the live page as a
browser does: it reads the stream, and fetches the page again when it is told to. The mean step of a watched turn is
compared with the mean of the two turns around it; the median over rounds counts. A median step would hide what a page
costs that is made every ten seconds. The processor time of the server bounds the cost where other programs make steps
uneven. The server has a core of its own only if one is free: two ranks of one thread each leave none on two cores,
which is the hard case.
"""

from __future__ import annotations

import argparse
import contextlib
import http.cookiejar
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import arguments, heading, table, write

ROOT = Path(__file__).parents[2]
SHOAL = [sys.executable, "-m", "shoal"]
MOST = 0.01
"""The bar."""


def steps_of(run: Path) -> list[tuple[int, float]]:
    """Step and seconds of every line so far."""
    with contextlib.suppress(OSError):
        lines = (run / "metrics.jsonl").read_text().splitlines()
        every = [json.loads(line) for line in lines if line.endswith("}")]
        return [(each["step"], each["step_seconds"]) for each in every if "step_seconds" in each]
    return []


@contextlib.contextmanager
def watched(run: Path) -> Iterator[dict[str, int]]:
    """A server, and a client that follows its page; counts what it has received."""
    server = subprocess.Popen([*SHOAL, "watch", str(run), "--no-browser"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = next(line.strip() for line in server.stdout if line.startswith("http://"))
    client = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()))
    counts = {"messages": 0, "pages": 0, "server": server.pid}

    def page() -> str:
        counts["pages"] += 1
        return str(client.open(address if counts["pages"] == 1 else origin, timeout=30).read().decode())

    def follow(cursor: str) -> None:
        with contextlib.suppress(OSError):  # the server has ended
            for line in client.open(f"{origin}stream?after={cursor}", timeout=60):
                counts["messages"] += line.startswith(b"data:")
                if line.strip() == b"event: refresh":
                    page()

    origin = address.partition("?")[0]
    found = re.search(r'"cursor":"([\d-]+)"', page())
    assert found is not None
    thread = threading.Thread(target=follow, args=(found[1],), daemon=True)
    thread.start()
    try:
        yield counts
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(20)
        thread.join(5)


@dataclass(frozen=True)
class Turn:
    """The steps of a turn without its first one, and what the client has received."""

    mean: float
    median: float
    processor: float = 0.0
    """Of a core, that the server takes."""
    received: str = ""


def turn(run: Path, seconds: float, *, is_watched: bool) -> Turn:
    """The steps that the run makes in some seconds."""
    with watched(run) if is_watched else contextlib.nullcontext({}) as counts:
        first, before = steps_of(run)[-1][0], processor_seconds(counts.get("server"))
        time.sleep(seconds)
        processor = (processor_seconds(counts.get("server")) - before) / seconds
        last = steps_of(run)[-1][0]
    taken = [length for step, length in steps_of(run) if first + 1 < step <= last]
    received = ", ".join(f"{counts[what]:,} {what}" for what in ("messages", "pages") if what in counts)
    return Turn(statistics.fmean(taken), statistics.median(taken), processor, received)


def processor_seconds(pid: int | None) -> float:
    """Processor time of a process so far; none without a process."""
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def compared(turns: Sequence[Turn], name: str) -> list[float]:
    """How much longer the steps of every second turn are than those of the two around it, by their mean or median."""
    lengths = [getattr(each, name) for each in turns]
    return [2 * lengths[at] / (lengths[at - 1] + lengths[at + 1]) - 1 for at in range(1, len(turns), 2)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0, help="of every turn")
    asked = arguments(parser, rounds=1, seconds=6.0)
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        words = ["train", str(ROOT / "recipes/tiny.yaml"), "--nproc", "2", "--run.duration", "1000000step", "--quiet"]
        words += ["--run.dir", str(run), "--launch.threads", "1", "--checkpoint.every", "0step"]
        words += ["--data.global_batch", "8", "--data.seq_len", "128"]
        training = subprocess.Popen([*SHOAL, *words], cwd=folder, stdout=subprocess.DEVNULL)
        try:
            while len(steps_of(run)) < 5:
                if training.poll() is not None:
                    raise SystemExit(f"the run ended with {training.returncode}")
                time.sleep(0.5)
            turns = [turn(run, asked.seconds, is_watched=number % 2 == 1) for number in range(2 * asked.rounds + 1)]
        finally:
            training.send_signal(signal.SIGINT)
            training.wait(60)
    costs, medians = compared(turns, "mean"), compared(turns, "median")
    rows = [
        {"alone": f"{(turns[at - 1].mean + turns[at + 1].mean) / 2 * 1e3:.1f} ms",
         "watched": f"{turns[at].mean * 1e3:.1f} ms", "cost": f"{costs[at // 2]:+.1%}",
         "of the median step": f"{medians[at // 2]:+.1%}", "server": f"{turns[at].processor:.1%} of a core",
         "received": turns[at].received}
        for at in range(1, len(turns), 2)
    ]  # fmt: skip
    cost = statistics.median(costs)
    said = f"A step takes {cost:+.1%} ({min(costs):+.1%} to {max(costs):+.1%}) while a page is open:"
    said += f" {statistics.median(each.processor for each in turns[1::2]):.1%} of a core for the server,"
    said += f" {'within' if cost <= MOST else 'NOT within'} the bar of {MOST:.0%}."
    said += f" The load of this machine was {before:.0f} before and {os.getloadavg()[0]:.0f} after it."
    text = f"{heading('The cost of a live page', said)}\n{table(rows)}"
    print(text)
    print(write("watch-cost", text))


if __name__ == "__main__":
    main()
