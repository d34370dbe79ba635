"""Does every layout compute what one device computes, and how far off is it?

python benchmarks/verify/run.py --device cuda --precisions fp32,bf16
python benchmarks/verify/run.py --matrix 1,2,3,4,6,8   # on CPU: every legal layout of so many ranks, in float64
python benchmarks/verify/run.py --matrix 8 --part 0/4 --rows rows-0.json   # a quarter of them; then: --join rows-*.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import heading, table, write

MODEL = {"preset": "tiny", "num_layers": 9, "num_heads": 24, "num_kv_heads": 12, "hidden": 96, "tied": True}

PLANS = {
    2: [
        "dp_replicate=2 mb=2",
        "zero=1 mb=2",
        "zero=2 mb=2",
        "zero=3 mb=2",
        "tp=2 sp=off mb=2",
        "tp=2 sp=on mb=2",
        "pp=2 1f1b mb=1",
        "pp=2 zbv mb=1",
    ],
    4: ["dp_replicate=2 dp_shard=2 zero=3 mb=2", "tp=2 zero=3 mb=2", "tp=2 pp=2 1f1b mb=1", "pp=2 zero=3 1f1b mb=1"],
}


def verify(words: list[str]) -> dict[str, Any]:
    """One call of `shoal verify`; what it prints, or why it did not."""
    command = [sys.executable, "-m", "shoal", "verify", *words, "--json"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        told: dict[str, Any] = json.loads(found.stdout)
    except json.JSONDecodeError:
        told = {"error": {"problems": [{"what": found.stderr[-300:]}]}}
    return told


def row(plan: str, ranks: int, precision: str, told: dict[str, Any]) -> dict[str, str]:
    if "error" in told:
        what = " ".join(told["error"]["problems"][0]["what"].split())[:200]
        return {"plan": plan, "ranks": str(ranks), "precision": precision, "equal": f"failed: {what}"} | dict.fromkeys(
            ("loss", "gradient", "weight", "tolerance", "seconds"), "-"
        )
    worst = told["worst"]
    return {
        "plan": plan,
        "ranks": str(ranks),
        "precision": precision,
        "equal": "yes" if told["equal"] else "NO",
        "loss": f"{float(worst['loss']):.1e}",
        "gradient": f"{float(worst['grad']):.1e}",
        "weight": f"{float(worst['weight']):.1e}",
        "tolerance": f"{told['tolerance']:.0e}",
        "seconds": f"{told['seconds']:.1f}",
    }


def matrix(sizes: list[int], part: str, keep: Path | None) -> list[dict[str, str]]:
    """Every legal layout of a llama with uneven layers, tied and untied by turns; `part` i/n: every n-th, from i."""
    from shoal.blueprint.settings import build_recipe
    from shoal.proof.prove import How, legal_cases, prove
    from shoal.proof.report import to_mapping

    first, step = map(int, part.split("/"))
    rows: list[dict[str, str]] = []
    for ranks in sizes:
        recipe = build_recipe({"model": {"name": "llama", **MODEL}, "data": {"batch": 24}}, title="matrix")
        untied = build_recipe(
            {"model": {"name": "llama", **MODEL, "tied": False}, "data": {"batch": 24}}, title="matrix"
        )
        cases = zip(legal_cases(recipe, ranks, How()), legal_cases(untied, ranks, How()), strict=True)
        for number, pair in enumerate(cases):
            if number % step == first:
                told = to_mapping(prove(pair[number % 2]))
                fits = all(count["predicted"] == count["counted"] for count in told["bytes"].values())
                tied = {"tied": "no" if number % 2 else "yes", "bytes as predicted": "yes" if fits else "NO"}
                rows.append(row(told["plan"], ranks, "fp64", told) | tied)
                print(rows[-1], flush=True)
                if keep:
                    keep.write_text(json.dumps(rows))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precisions", default="fp64")
    parser.add_argument("--matrix", default="", help="numbers of ranks: 1,2,4")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--rows", type=Path, help="keep the rows in this file, and write no result")
    parser.add_argument("--join", type=Path, nargs="*", default=[], help="make the result of these files of rows")
    arguments = parser.parse_args()
    rows = [told for path in arguments.join for told in json.loads(path.read_text())]
    rows.sort(key=lambda told: int(told["ranks"]))
    if arguments.matrix:
        rows = matrix([int(size) for size in arguments.matrix.split(",")], arguments.part, arguments.rows)
    for precision in arguments.precisions.split(",") if not rows else ():
        for ranks, plans in PLANS.items():
            for plan in plans:
                words = ["--nproc", str(ranks), "--plan", plan, "--device", arguments.device, "--precision", precision]
                told = verify(words)
                rows.append(row(plan, ranks, precision, told))
                print(json.dumps(rows[-1]), flush=True)
    if arguments.rows:
        return
    is_matrix = bool(arguments.matrix or arguments.join)
    equal = sum(told["equal"] == "yes" for told in rows)
    question = (
        "Largest relative difference from one device of the loss, of any gradient and of any weight over three steps"
        " with accumulation and clipping (`shoal verify`; small copies of a llama on random tokens)."
        f" {equal} of {len(rows)} layouts are equal."
    )
    theme = "verify-matrix" if is_matrix else "verify"
    print(write(theme, heading("Layouts against one device", question) + "\n" + table(rows)))


if __name__ == "__main__":
    main()
