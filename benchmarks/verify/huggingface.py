"""Which architectures of transformers compute the same under which layout as in one process?

python benchmarks/verify/huggingface.py              # all, in ten minutes; writes the table of docs/huggingface.md
python benchmarks/verify/huggingface.py llama bert   # some, and prints

Every model is tiny, unmodified and without a description of its own. A row is compared with plain torch and
transformers' own attention: the largest relative difference of a loss, gradient or weight of two steps.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks are forked then, and need not load transformers again

import transformers

import shoal
from tests import huggingface

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


def cell(kind: str, words: str, reasons: dict[str, str]) -> str:
    """`1e-15`, or the letter of the reason for which it is rejected."""
    build = functools.partial(huggingface.build, kind)
    try:
        result = shoal.verify(build, huggingface.batch(kind), words, nproc=2, steps=2)
    except shoal.ShoalError as error:
        said = re.search(r"cannot divide this model: (.*)", str(error)) or re.search(r"\n  (.*)", str(error))
        why = re.sub(r"^[A-Z]\w+:? | \[[A-Z]\d+\]$", "", said[1] if said else str(error).splitlines()[0])
        return reasons.setdefault(why, chr(ord("a") + len(reasons)))
    worst = result.verdict.worst
    largest = max(worst.loss, worst.grad, worst.weight, worst.grad_norm)
    return f"{largest:.0e}" if result.verdict.equal else f"**{largest:.0e}**"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="ARCHITECTURE", help=", ".join(huggingface.ALL))
    parser.add_argument("--smoke", action="store_true", help="one architecture under two layouts")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    layouts = dict(list(LAYOUTS.items())[:2]) if given.smoke else LAYOUTS
    chosen = ["llama"] if given.smoke else given.kinds
    text = table_of(chosen or list(huggingface.ALL), layouts)
    if chosen:
        print(text)
        return
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + text + END + rest.partition(END)[2])


def table_of(kinds: list[str], layouts: dict[str, str]) -> str:
    reasons: dict[str, str] = {}
    lines = [f"| | {' | '.join(layouts)} |", f"|---|{'---|' * len(layouts)}"]
    for kind in kinds:
        cells = [cell(kind, words, reasons) for words in layouts.values()]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
        print(lines[-1], file=sys.stderr, flush=True)
    notes = [f"- **{letter}**: {why}" for why, letter in reasons.items()]
    made = f"transformers {transformers.__version__}, float64, two ranks. A letter: rejected, for the reason below.\n\n"
    return made + "\n".join([*lines, "", *notes]) + "\n"


if __name__ == "__main__":
    main()
