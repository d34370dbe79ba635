"""Drills with several seeds: does the run end by itself, is anything lost, and how much of the time is useful?

python benchmarks/faults/drills.py [--seeds 1 2 3] [--faults 30] [--minutes 10]

Each is a `shoal chaos --hosts 2 --nproc 2` (needs root): every kind of fault, 4 ranks on two network namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import arguments, heading, table, write


def measured(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """The report of one drill."""
    words = ["--faults", str(options.faults), "--minutes", str(options.minutes), "--seed", str(seed), "--json"]
    words += ["--hosts", str(options.hosts), "--nproc", "2", "--kinds", options.kinds]
    drill = subprocess.run([sys.executable, "-m", "shoal", "chaos", *words], stdout=subprocess.PIPE, text=True)
    if not drill.stdout:
        raise SystemExit(f"the drill with seed {seed} ended with code {drill.returncode} and printed nothing")
    found: dict[str, Any] = json.loads(drill.stdout)
    return found


def row(seed: int, found: dict[str, Any]) -> dict[str, str]:
    """One row of the table."""
    goodput = found["goodput"] or {"ettr": float("nan"), "ettr_predicted": float("nan"), "wall_s": float("nan")}
    return {
        "seed": str(seed),
        "faults": f"{found['faults']['made']} of {found['faults']['scheduled']}",
        "restarts": str(found["restarts"]),
        "commands": str(found["commands"]),
        "steps": str(found["steps"]),
        "seconds": f"{goodput['wall_s']:.0f}",
        "committed steps lost": str(found["committed_steps_lost"]),
        "samples lost, doubled": f"{found['samples_lost']}, {found['samples_doubled']}",
        "other losses, tensors": f"{found['steps_with_another_loss']}, {found['tensors_different']}",
        "ETTR measured": f"{goodput['ettr']:.3f}",
        "predicted": f"{goodput['ettr_predicted']:.3f}",
        "off by": f"{abs(goodput['ettr_predicted'] / goodput['ettr'] - 1):.0%}",
        "broken promises": "; ".join(found["broken"]) or "none",
    }


def main() -> None:
    """Run a drill with each seed, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--kinds", default="all")
    options = arguments(parser, seeds=[1], faults=1, minutes=0.2, hosts=1, kinds="kill")
    rows = [row(seed, measured(seed, options)) for seed in options.seeds]
    question = (
        f"{__doc__.splitlines()[0]} {options.faults} faults in about {options.minutes:g} minutes on {options.hosts}"
        f" hosts with 2 ranks each; the load average was {os.getloadavg()[0]:.1f} in the end."
    )
    print(table(rows))
    print(write("drills", f"{heading('Drills', question)}\n{table(rows)}"))


if __name__ == "__main__":
    main()
