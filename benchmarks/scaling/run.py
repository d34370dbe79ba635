"""Are the predictions of `shoal bench scale` those that are measured beside them?

python benchmarks/scaling/run.py [--recipes recipes/tiny.yaml] [--nproc 1,2] [--steps 30] [--rounds 5]

Runs the command for each recipe, which measures this machine in every round, and compares every step and every
efficiency with its prediction. On a machine that is busy with other programs the result says little: look at its load.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import arguments, heading, table, write

ROOT = Path(__file__).parents[2]
MOST = 0.10
"""The bar, of every row."""
ERRORS = {"step_error": "steps", "efficiency_error": "efficiencies"}


def measured(recipe: str, asked: argparse.Namespace) -> dict[str, Any]:
    """What the command says of a recipe."""
    words = [recipe, "--nproc", asked.nproc, "--plans", asked.plans, "--mode", asked.mode, "--json"]
    words += ["--steps", str(asked.steps), "--rounds", str(asked.rounds), *asked.settings]
    command = [sys.executable, "-m", "shoal", "bench", "scale", *words]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if not ended.stdout.strip():
        raise SystemExit(f"shoal bench scale ended with {ended.returncode}")
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def row(recipe: str, each: Mapping[str, Any]) -> dict[str, str]:
    """One line of the table."""
    efficiency, predicted = each.get("efficiency"), each["predicted"] or {}
    return {
        "recipe": Path(recipe).stem, "mode": each["mode"], "plan": f"`{each['plan']}`", "ranks": str(each["ranks"]),
        "step": _ms(each["step_seconds"]["median"]), "predicted": _ms(predicted.get("seconds")),
        "error": _percent(each.get("step_error"), "+"),
        "efficiency": _percent(efficiency["median"] if efficiency else None),
        "predicted efficiency": _percent(each.get("predicted_efficiency")),
        "its error": _percent(each.get("efficiency_error"), "+"), "note": each["note"] or "",
    }  # fmt: skip


def verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """Whether all predictions are within the bar, and how many are not."""
    said = []
    for key, what in ERRORS.items():
        errors = [abs(each[key]) for each in rows if each.get(key) is not None and not each["note"]]
        beyond = sum(error > MOST for error in errors)
        how = f"NOT within the bar of {MOST:.0%}: {beyond} are beyond it" if beyond else f"within the bar of {MOST:.0%}"
        said.append(f"{len(errors)} {what} are off by {max(errors):.1%} at most, {how}" if errors else f"no {what}")
    return "; ".join(said)


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.1f} ms"


def _percent(value: float | None, sign: str = "") -> str:
    return "–" if value is None else f"{value:{sign}.1%}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipes", nargs="+", default=["recipes/tiny.yaml"])
    parser.add_argument("--nproc", default="1,2")
    parser.add_argument("--plans", default="ddp,zero=1,zero=2,zero=3,pp=2,tp=2")
    parser.add_argument("--mode", default="both")
    parser.add_argument("--steps", type=int, default=30, help="of each row, over all rounds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--settings", nargs=argparse.REMAINDER, default=[], help="more words of the command")
    small = ["--data.seq_len", "16", "--data.global_batch", "4", "--model.num_layers", "1"]
    asked = arguments(parser, plans="ddp", mode="strong", steps=2, rounds=1, settings=small)
    rows, lines, loads, are_equal = list[Any](), list[dict[str, str]](), list[str](), True
    for recipe in asked.recipes:
        found = measured(recipe, asked)
        known = [each for each in found["rows"] if "step_seconds" in each]
        rows += known
        lines += [row(recipe, each) for each in known]
        loads.append(f"{found['load_before']:.1f} before and {found['load_after']:.1f} after {Path(recipe).stem}")
        are_equal = are_equal and all(each["are_equal"] for each in found["losses"])
    losses = "All plans have the same losses" if are_equal else "Plans have DIFFERENT losses"
    said = f"{verdict(rows)}. {losses}. The load of this machine was {', '.join(loads)}."
    text = f"{heading('Predictions of scaling', said[0].upper() + said[1:])}\n{table(lines)}"
    print(text)
    print(write("scaling", text))


if __name__ == "__main__":
    main()
