"""Does every layout compute what one device computes, and how far off is it?

python benchmarks/verify/run.py --device cuda --precisions fp32,bf16
python benchmarks/verify/run.py --matrix 1,2,3,4,6,8         # on CPU: every legal layout of so many ranks, in float64
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precisions", default="fp64")
    parser.add_argument("--matrix", default="")
    arguments = parser.parse_args()
    rows = []
    for ranks in map(int, filter(None, arguments.matrix.split(","))):
        told = verify(["--matrix", "--nproc", str(ranks), "--device", arguments.device])
        rows += [row(proof["plan"], ranks, "fp64", proof) for proof in told["proofs"]]
    for precision in arguments.precisions.split(",") if not arguments.matrix else ():
        for ranks, plans in PLANS.items():
            for plan in plans:
                words = ["--nproc", str(ranks), "--plan", plan, "--device", arguments.device, "--precision", precision]
                told = verify(words)
                rows.append(row(plan, ranks, precision, told))
                print(json.dumps(rows[-1]), flush=True)
    question = (
        "Largest relative difference from one device of the loss, of any gradient and of any weight over three steps"
        " with accumulation and clipping (`shoal verify`; small copy of the tiny llama on random tokens)."
    )
    theme = "verify-matrix" if arguments.matrix else "verify"
    print(write(theme, heading("Layouts against one device", question) + "\n" + table(rows)))


if __name__ == "__main__":
    main()
