"""`shoal backtest [RUNS.csv ...]`: compare the planner's predictions with tables of measured runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from shoal.cli.options import parse_options
from shoal.cli.reports.console import WIDTH, show


@dataclass(frozen=True, kw_only=True)
class Backtest:
    """Predict every run of some tables and compare with the measurements. The report has the error of time and memory
    by source, the regret of the plan that the planner would pick, the predicted failures, and the coverage of
    intervals. Nothing is run.

    shoal backtest RUNS.csv
    """

    tables: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """CSV files, or folders of them. None: the figures from papers that shoal includes."""

    json: bool = False
    """Print one JSON object and nothing else on stdout."""

    leave_out: bool = False
    """Predict each source without the constants that were fitted to runs of its system."""

    strict: bool = False
    """Exit with code 1 if an accuracy target is missed."""


def main(arguments: Sequence[str]) -> int:
    """Backtest; 0 when done, 1 with --strict when an accuracy target is missed."""
    options = parse_options(Backtest, arguments, prog="shoal backtest")
    from shoal.planner.backtest.report import backtest, render, to_mapping
    from shoal.planner.backtest.rows import PAPER_FIGURES, read

    report = backtest(read(options.tables or (PAPER_FIGURES,)), leave_out=options.leave_out)
    if options.json:
        print(json.dumps(to_mapping(report)))
    else:
        show(lambda console: render(console, report), sys.stdout, width=WIDTH)
    return 1 if options.strict and not all(bar.holds for bar in report.bars) else 0
