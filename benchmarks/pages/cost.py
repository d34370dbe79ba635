"""How large is the page of a long run on many ranks, and how long does it take to make and to draw?

python benchmarks/pages/cost.py [--steps 100000] [--ranks 64] [--rounds 3]

A run directory with metrics of every step and of every rank is made, without training. `shoal report` makes its page,
as a command of its own each time. Chromium draws it, where it and playwright are installed (`make test-browser`
installs playwright: PYTHONPATH=.venv/browser). The page measures that time itself.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))
from report import arguments, heading, table, write

from tests.run_directories import make_run

MOST_SECONDS, MOST_BYTES, MOST_DRAWING = 5.0, 3e6, 1.0
"""The bars."""


def made_run(path: Path, steps: int, ranks: int) -> Path:
    """A run of so many steps, of which each rank has written its own metrics. Ranks share a file: it is large."""
    run = make_run(path, steps, ranks=1)
    for rank in range(1, ranks):
        (run / f"metrics.rank{rank}.jsonl").hardlink_to(run / "metrics.rank0.jsonl")
    return run


def make_page(run: Path, page: Path) -> tuple[float, float]:
    """Seconds by the clock and of the processor that the command takes."""
    before, began = os.times(), time.perf_counter()
    command = [sys.executable, "-m", "shoal", "report", str(run), "-o", str(page)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(ended.stderr)
    seconds, after = time.perf_counter() - began, os.times()
    user, system = after.children_user - before.children_user, after.children_system - before.children_system
    return seconds, user + system


def drawing_seconds(page: Path) -> float | str:
    """Seconds that Chromium takes to draw a page; or why it does not."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return "playwright is not installed (make test-browser)"
    if chromium is None:
        return "there is no Chromium (apt-get install chromium)"
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        shown = browser.new_page(viewport={"width": 1280, "height": 900})
        shown.goto(page.as_uri())
        drawn = shown.wait_for_selector("html[data-drawn]", state="attached").get_attribute("data-drawn")
        browser.close()
    return float(drawn) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    asked = arguments(parser, steps=200, ranks=2, rounds=1)
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        run, page = made_run(Path(folder) / "run", asked.steps, asked.ranks), Path(folder) / "page.html"
        rounds = [make_page(run, page) for _ in range(asked.rounds)]
        size, drawn = page.stat().st_size, drawing_seconds(page)
    seconds, processor = (statistics.median(each) for each in zip(*rounds, strict=True))
    is_drawn = isinstance(drawn, float)
    is_met = seconds <= MOST_SECONDS and size <= MOST_BYTES and not (is_drawn and drawn > MOST_DRAWING)
    rows = [
        {
            "": "made in",
            "measured": f"{seconds:.2f} s ({processor:.2f} s of the processor)",
            "bar": f"{MOST_SECONDS:g} s",
        },
        {"": "size", "measured": f"{size / 1e6:.2f} MB", "bar": f"{MOST_BYTES / 1e6:g} MB"},
        {
            "": "drawn in",
            "measured": f"{drawn:.2f} s" if is_drawn else f"not measured: {drawn}",
            "bar": f"{MOST_DRAWING:g} s",
        },
    ]
    said = f"{asked.steps:,} steps, {asked.ranks} ranks: {'within' if is_met else 'NOT within'} the bars"
    said += "" if is_drawn else ", but for the drawing, which was not measured"
    said += f". The load of this machine was {before:.1f} before and {os.getloadavg()[0]:.1f} after it."
    text = f"{heading('The page of a long run', said)}\n{table(rows)}"
    print(text)
    print(write("report-cost", text))


if __name__ == "__main__":
    main()
