"""Which architectures of transformers compute the same under which layout as in one process?

python benchmarks/verify/huggingface.py              # all, in half an hour; writes the table of docs/huggingface.md
python benchmarks/verify/huggingface.py llama bert   # these rows of it

Every model is tiny, unmodified and without a description of its own. A row is compared with plain torch and
transformers' own attention: the largest relative difference of a loss, gradient or weight of two steps.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks are forked then, and need not load transformers again

import transformers

from tests import huggingface
from tests.dist.huggingface_cell import cell
from tests.dist.pool import Pool

ROOT = Path(__file__).parents[2]
LAYOUTS = {
    "`zero=3`": "zero=3 mb=1",
    "`tp=2 sp=off`": "tp=2 sp=off mb=2",
    "`tp=2 sp=on`": "tp=2 sp=on mb=2",
    "`pp=2 1f1b`": "pp=2 1f1b mb=2",
    "`cp=2 ring`": "cp=2 mb=2",
    "`cp=2 ulysses`": "cp=2 ulysses mb=2",
    "`ep=2`": "ep=2 zero=3 mb=1",
}
PAGE, BEGIN, END = ROOT / "docs" / "huggingface.md", "<!-- table: begin -->\n", "<!-- table: end -->"


Rows = dict[str, list[str]]
"""Architecture → for every layout a number, or the reason for which it is rejected."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="ARCHITECTURE", help=", ".join(huggingface.ALL))
    parser.add_argument("--smoke", action="store_true", help="one architecture under two layouts, printed")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.smoke:
        print(written(rows_of(["llama"], dict(list(LAYOUTS.items())[:2]))))
        return
    for kind in given.kinds or huggingface.ALL:  # a row at a time, so that a run may be interrupted
        found = rows_of([kind], LAYOUTS)
        before, _, rest = PAGE.read_text().partition(BEGIN)
        table, _, after = rest.partition(END)
        rows = read(table) | found
        ordered = {one: rows[one] for one in huggingface.ALL if one in rows}
        PAGE.write_text(before + BEGIN + written(ordered) + END + after)


def rows_of(kinds: list[str], layouts: dict[str, str]) -> Rows:
    """Verify architectures on two ranks."""
    found: Rows = {}
    for kind in kinds:
        found[kind] = [POOL.run(cell, 2, kind, words)[0] for words in layouts.values()]
        print(kind, *found[kind], sep=" | ", file=sys.stderr, flush=True)
    return found


def read(table: str) -> Rows:
    """The rows of a written table."""
    why = dict(re.findall(r"^- \*\*(\w+)\*\*: (.*)$", table, re.MULTILINE))
    lines = [[one.strip() for one in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")]
    return {kind: [why.get(one, one) for one in cells] for kind, *cells in lines[2:]}


def written(rows: Rows) -> str:
    """A table in which letters stand for reasons."""
    reasons: dict[str, str] = {}
    number = len(next(iter(rows.values())))
    lines = [f"| | {' | '.join(list(LAYOUTS)[:number])} |", f"|---|{'---|' * number}"]
    for kind, cells in rows.items():
        shown = [one if is_number(one) else reasons.setdefault(one, letters(len(reasons))) for one in cells]
        lines.append(f"| {kind} | {' | '.join(shown)} |")
    notes = [f"- **{letter}**: {why}" for why, letter in reasons.items()]
    made = f"transformers {transformers.__version__}, float64, two ranks. Letters: rejected, for the reason below.\n\n"
    return made + "\n".join([*lines, "", *notes]) + "\n"


def is_number(text: str) -> bool:
    """Whether a cell is a difference, and no reason."""
    return re.fullmatch(r"\**[0-9]e[+-][0-9]+\**", text) is not None


def letters(number: int) -> str:
    """a, b, ..., z, aa, ab, ...

    >>> letters(1), letters(26)
    ('b', 'aa')
    """
    return (letters(number // 26 - 1) if number >= 26 else "") + chr(ord("a") + number % 26)


if __name__ == "__main__":
    POOL = Pool()
    main()
    POOL.close()
