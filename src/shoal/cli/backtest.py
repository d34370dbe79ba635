"""`shoal backtest [RUNS.csv ...]`: hold the planner against tables of measured runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from shoal.cli.reports.console import WIDTH, show


@dataclass(frozen=True, kw_only=True)
class Backtest:
    """Predict every run of some tables and compare with what was measured: error of time and memory by source, regret
    of the plan that would have been picked, failures foretold, coverage of intervals. Nothing is run.

    shoal backtest RUNS.csv
    """

    tables: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """CSV files, or folders of them. None: figures of papers that come with shoal."""

    json: bool = False
    """Print one JSON object and nothing else on stdout."""

    leave_out: bool = False
    """Predict each source without anything that was learnt from runs of its system: how well an unknown one would be
    predicted."""

    strict: bool = False
    """Exit with 1 if a bar is missed."""


def main(arguments: Sequence[str]) -> int:
    """Backtest; 0 when done, 1 with --strict when a bar is missed."""
    options = tyro.cli(Backtest, args=list(arguments), prog="shoal backtest", config=(tyro.conf.FlagCreatePairsOff,))
    from shoal.planner.backtest.report import backtest, render, to_mapping
    from shoal.planner.backtest.rows import PAPER_FIGURES, read

    report = backtest(read(options.tables or (PAPER_FIGURES,)), leave_out=options.leave_out)
    if options.json:
        print(json.dumps(to_mapping(report)))
    else:
        show(lambda console: render(console, report), sys.stdout, width=WIDTH)
    return 1 if options.strict and not all(bar.holds for bar in report.bars) else 0
