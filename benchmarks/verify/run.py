"""Does every layout compute the same as one process, and how large are the differences?

python benchmarks/verify/run.py --device cuda --precisions fp32,bf16
python benchmarks/verify/run.py --matrix 1,2,4,8   # on CPU: every valid layout of 1 to 8 ranks, in float64: some hours
python benchmarks/verify/run.py --matrix 8 --part 0/4 --rows rows-0.json   # a quarter of them; then: --join rows-*.json

Matrix: a dense llama, tied and untied by turns, and a mixture of experts, with two kinds of routers by turns. With 16
and 32 ranks not every layout is tried, but those in which five and six axes are in use.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import arguments, heading, table, write

SHAPE = {"preset": "tiny", "num_layers": 9, "num_heads": 24, "num_kv_heads": 12, "hidden": 96}
MODELS = {
    "llama": [{**SHAPE, "tied": True}, {**SHAPE, "tied": False}],
    "moe": [
        {**SHAPE, "num_heads": 16, "num_kv_heads": 8, "num_dense_layers": 1, "z_coefficient": 0.001},
        {**SHAPE, "num_heads": 16, "num_kv_heads": 8, "score": "sigmoid", "bias_rate": 0.01, "num_shared_experts": 1},
    ],
}
"""Model → the two settings that are tried by turns."""

LARGE = {
    16: [
        "dp_shard=2 cp=2 tp=2 pp=2 ep=2 zero=3 1f1b mb=1",
        "dp_shard=2 cp=2 tp=2 pp=2 ep=4 zero=1 zbv mb=1",
        "dp_replicate=2 dp_shard=2 cp=2 tp=2 ep=4 zero=2 ulysses mb=1",
        "dp_replicate=2 dp_shard=2 tp=2 pp=2 ep=2 zero=3 interleaved mb=1",
    ],
    32: ["dp_replicate=2 dp_shard=2 cp=2 tp=2 pp=2 ep=4 zero=3 1f1b mb=1"],
}
"""Too many to try all: those in which the most axes are in use, with the mixture of experts."""

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
        result: dict[str, Any] = json.loads(found.stdout)
    except json.JSONDecodeError:
        result = {"error": {"problems": [{"what": found.stderr[-300:]}]}}
    return result


def row(plan: str, ranks: int, precision: str, result: dict[str, Any]) -> dict[str, str]:
    if "error" in result:
        what = " ".join(result["error"]["problems"][0]["what"].split())[:200]
        return {"plan": plan, "ranks": str(ranks), "precision": precision, "equal": f"failed: {what}"} | dict.fromkeys(
            ("loss", "gradient", "weight", "tolerance", "seconds"), "-"
        )
    worst = result["worst"]
    return {
        "plan": plan,
        "ranks": str(ranks),
        "precision": precision,
        "equal": "yes" if result["equal"] else "NO",
        "loss": f"{float(worst['loss']):.1e}",
        "gradient": f"{float(worst['grad']):.1e}",
        "weight": f"{float(worst['weight']):.1e}",
        "tolerance": f"{result['tolerance']:.0e}",
        "seconds": f"{result['seconds']:.1f}",
    }


def matrix(sizes: list[int], models: list[str], part: str, keep: Path | None, seconds: float) -> list[dict[str, str]]:
    """Every legal layout; `part` i/n: every n-th, from i; none is begun after so many seconds."""
    from shoal.verification.api import verify_case
    from shoal.verification.report import to_mapping

    first, step = map(int, part.split("/"))
    end = time.monotonic() + seconds
    rows: list[dict[str, str]] = []
    for name in models:
        for ranks in sizes:
            for number, case in enumerate(cases(name, ranks)):
                if number % step != first or time.monotonic() > end:
                    continue
                result = to_mapping(verify_case(replace(case, threads=1)))
                fits = all(count["predicted"] in (count["counted"], None) for count in result["bytes"].values())
                more = {"model": f"{name} {number % 2 + 1}", "bytes as predicted": "yes" if fits else "NO"}
                rows.append(row(result["plan"], ranks, "fp64", result) | more)
                print(rows[-1], flush=True)
                if keep:
                    keep.write_text(json.dumps(rows))
    return rows


def cases(name: str, ranks: int) -> Iterator[Any]:
    """All cases of a model on so many ranks, its two settings by turns."""
    from shoal.blueprint.plan import Plan
    from shoal.config.load import build_recipe
    from shoal.verification.options import RecipeSettings
    from shoal.verification.recipe.cases import case_of, legal_cases

    recipes = [
        build_recipe({"model": {"name": name, **of}, "data": {"global_batch": 24}}, title="matrix")
        for of in MODELS[name]
    ]
    if ranks in LARGE:
        plans = LARGE[ranks] if name == "moe" else []
        for number, words in enumerate(plans):
            recipe = recipes[number % 2].model_copy(update={"plan": Plan.parse(words)})
            yield case_of(recipe, ranks, RecipeSettings())
        return
    pairs = zip(*(legal_cases(recipe, ranks, RecipeSettings()) for recipe in recipes), strict=True)
    yield from (pair[number % 2] for number, pair in enumerate(pairs))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precisions", default="fp64")
    parser.add_argument("--matrix", default="", help="numbers of ranks: 1,2,4")
    parser.add_argument("--models", default="llama,moe")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing after so long")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--rows", type=Path, help="keep the rows in this file, and write no result")
    parser.add_argument("--join", type=Path, nargs="*", default=[], help="make the result of these files of rows")
    asked = arguments(parser, precisions="fp64")
    rows = [result for path in asked.join for result in json.loads(path.read_text())]
    rows.sort(key=lambda result: (result.get("model", "")[:3], int(result["ranks"])))
    if asked.matrix:
        sizes, models = [int(size) for size in asked.matrix.split(",")], asked.models.split(",")
        rows = matrix(sizes, models, asked.part, asked.rows, asked.seconds)
    for precision in asked.precisions.split(",") if not rows else ():
        for ranks, plans in ({2: ["zero=3 mb=2"]} if asked.smoke else PLANS).items():
            for plan in plans:
                words = ["--nproc", str(ranks), "--plan", plan, "--device", asked.device, "--precision", precision]
                result = verify(words)
                rows.append(row(plan, ranks, precision, result))
                print(json.dumps(rows[-1]), flush=True)
    if asked.rows:
        return
    is_matrix = bool(asked.matrix or asked.join)
    equal = sum(result["equal"] == "yes" for result in rows)
    question = (
        "Largest relative difference from one device of the loss, of any gradient and of any weight over three steps"
        " with accumulation and clipping (`shoal verify`; small copies of the models on random tokens)."
        f" {equal} of {len(rows)} layouts are equal."
    )
    theme = "verify-matrix" if is_matrix else "verify"
    print(write(theme, heading("Layouts against one device", question) + "\n" + table(rows)))


if __name__ == "__main__":
    main()
