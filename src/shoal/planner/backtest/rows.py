"""Tables of measured runs, read: one row is one run, or one attempt that ran out of memory.

Empty cells were not published. What a table prints in its own words (`FP8-CS`, `A100-80GB`) stays a word here; what it
means is decided in `predict`.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ShoalError
from shoal.files import opened

_MODEL = ("params_b", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq")
_PLAN = ("n_gpus", "tp", "pp", "vpp", "cp", "ep", "dp", "zero_stage", "micro_batch", "global_batch")
_MEASURED = ("tflops_per_gpu", "mfu", "tokens_per_s_per_gpu", "iter_time_s", "mem_gib")
COLUMNS = ("source", "model", *_MODEL, "gpu", *_PLAN, "recompute", "precision", *_MEASURED, "notes")
"""That a table has to have. A column `status` may say `oom_or_crash`; others are passed over."""

OWN_COLUMNS = ("plan", "cluster", "predicted_s", "predicted_gib")
"""That a table of shoal's own runs has as well: the plan in words, and the cluster by preset or file."""

PAPER_FIGURES = Path(__file__).with_name("paper_figures.csv")
"""Figures of papers and release notes, each with its source: the repository tests its planner with them."""


class Unpredictable(Exception):
    """Why a row cannot be predicted."""


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    cells: Mapping[str, str]
    place: str
    """File and line, to name it in a message."""

    def text(self, column: str) -> str:
        """A cell, or nothing."""
        return (self.cells.get(column) or "").strip()

    def number(self, column: str) -> float | None:
        """A cell as a number; None where it is empty."""
        text = self.text(column)
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ShoalError(
                f"{self.place}: {column} is {text!r}, not a number", fix="a number, or an empty cell", code="Q028"
            )
        return value

    def whole(self, column: str) -> int | None:
        """A cell as a whole number."""
        value = self.number(column)
        return None if value is None else int(value)

    @property
    def failed(self) -> bool:
        """Whether it ran out of memory, or crashed for a reason that the table does not distinguish from that."""
        return "oom" in self.text("status").lower() or self.text("notes").startswith("OOM")

    @property
    def family(self) -> str:
        """The source without section, version and line: what errors are summed up by."""
        name = self.text("source").split("[")[0].strip()
        head = name.split(" ")[0].split("@")[0]
        if "llm-foundry" in name:
            gpu = self.text("gpu").split("-")[0]
            return f"{head} {gpu}"
        return head or "unknown"


def read(paths: Iterable[Path]) -> list[Row]:
    """All rows of some tables. A folder stands for the tables in it."""
    files = [file for path in paths for file in (sorted(path.glob("*.csv")) if path.is_dir() else [path])]
    if not files:
        raise ShoalError("there is no table to read", fix="shoal backtest RUNS.csv", code="Q026")
    return [row for file in files for row in _read(file)]


def _read(path: Path) -> list[Row]:
    try:
        with opened(path, "r", newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                what = f"{path} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}"
                raise ShoalError(what, fix=f"a first line with {','.join(COLUMNS)}; cells may be empty", code="Q027")
            rows = [Row(dict(cells), f"{path.name}:{line}") for line, cells in enumerate(reader, 2)]
    except OSError as error:
        raise ShoalError(
            f"{path} cannot be read: {error.strerror}", fix="shoal backtest RUNS.csv", code="Q026"
        ) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ShoalError(
            f"{path} is not a CSV table: {error}",
            fix="shoal backtest RUNS.csv, a text in UTF-8 with one run a line",
            code="Q026",
        ) from error
    if not rows:
        raise ShoalError(f"{path} has no rows", fix="shoal backtest RUNS.csv, a text with one run a line", code="Q026")
    return rows


def append(path: Path, cells: Mapping[str, object]) -> None:
    """Write down one run, with what was predicted and what was measured, at the end of a table that `read` reads.

    Cells that are not given stay empty. Beyond the columns of every table there are `OWN_COLUMNS`.
    """
    unknown = [name for name in cells if name not in (*COLUMNS, *OWN_COLUMNS)]
    if unknown:
        raise ShoalError(
            f"a table of runs has no column {unknown[0]!r}", fix=", ".join((*COLUMNS, *OWN_COLUMNS)), code="Q027"
        )
    is_new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with opened(path, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=(*COLUMNS, *OWN_COLUMNS), restval="")
        if is_new:
            writer.writeheader()
        writer.writerow({name: value for name, value in cells.items() if value is not None})
