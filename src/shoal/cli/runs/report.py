"""`shoal report RUN [RUN ...]`: write one HTML page of a run, or of several side by side."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from shoal.cli.options import parse_options
from shoal.errors import ShoalError
from shoal.pages.report import make_report, write_page
from shoal.pages.run.find_runs import newest_run
from shoal.pages.run.findings import findings
from shoal.pages.run.read_run import read_run
from shoal.pages.run.verdict import verdict_of

RUNS = Path("runs")
MOST_RUNS = 12


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write the page of a run, also of one that is dead or still running: one HTML file that needs no network. Several
    runs are compared: curves in one chart, and the settings that differ.

    shoal report runs/tiny --open
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[RUN ...]")] = ()
    """Directories of runs. None: the newest run below runs/."""

    output: Path | None = None
    """The file to write; also -o. None: report.html in the directory of the run, of several comparison.html in that of
    the first."""

    open: bool = False
    """Open the page in a browser."""

    json: bool = False
    """Print one JSON object and nothing else on stdout."""


def main(arguments: Sequence[str]) -> int:
    """Write the page; returns 0."""
    words = ["--output" if word == "-o" else word for word in arguments]
    options = parse_options(Report, words, prog="shoal report")
    if len(options.runs) > MOST_RUNS:
        what = f"one page compares at most {MOST_RUNS} runs, got {len(options.runs)}"
        raise ShoalError(what, fix=f"shoal report {' '.join(map(str, options.runs[:MOST_RUNS]))}", code="R062")
    paths = options.runs or (newest_run(RUNS, fix="shoal ls FOLDER, which lists the runs below it"),)
    runs = [read_run(path) for path in paths]
    name = "report.html" if len(runs) == 1 else "comparison.html"
    path = options.output or paths[0] / name
    page = make_report(runs)
    write_page(path, page)
    if options.json:
        found = [
            {
                "run": str(run.path), "state": run.state, "step": run.step, "verdict": verdict_of(run).headline,
                "reason": verdict_of(run).reason, "findings": [f"{each.what}: {each.evidence}" for each in findings(run)],
            }
            for run in runs
        ]  # fmt: skip
        print(json.dumps({"path": str(path), "bytes": len(page.encode(errors="replace")), "runs": found}))
    else:
        for run in runs:
            print(f"{run.path}: {verdict_of(run).headline}", file=sys.stderr)
        print(path)
    if options.open:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())
    return 0
