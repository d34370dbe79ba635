"""Train the same cases with DeepSpeed and with shoal on two ranks, and print the largest difference of their losses.

    python benchmarks/deepspeed/run.py .venv/deepspeed [docs/deepspeed.md]

The first argument is the folder that `make test-deepspeed` has installed DeepSpeed into. With the second, the table of
that page is replaced.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from cases import STEPS, cases

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
LIMIT = 1e-5


def environment(site: Path, engine: str) -> dict[str, str]:
    """The environment of the ranks: DeepSpeed is found by its own ranks alone."""
    path = os.pathsep.join([str(site / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    found = {"PATH": path, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **found, "PYTHONPATH": str(site if engine == "deepspeed" else ROOT / "src")}


def on_two_ranks(site: Path, engine: str, script: str, *words: str) -> None:
    """Run a script of this folder."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(HERE / script), *words],
        env=environment(site, engine),
        capture_output=True,
        text=True,
        timeout=800,
    )
    if done.returncode:
        raise SystemExit(f"{engine} failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")


def losses(site: Path) -> dict[str, dict[str, list[float]]]:
    """The losses of all cases, by engine."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        asked = Path(folder, "cases.json")
        asked.write_text(json.dumps(cases()))
        for engine in ("deepspeed", "shoal"):
            result = Path(folder, f"{engine}.json")
            on_two_ranks(site, engine, "worker.py", engine, str(asked), str(result))
            found[engine] = json.loads(result.read_text())
    return found


def differences(found: dict[str, dict[str, list[float]]]) -> dict[str, float]:
    """The largest difference of each case."""
    theirs, ours = found["deepspeed"], found["shoal"]
    return {name: max(abs(a - b) for a, b in zip(theirs[name], ours[name], strict=True)) for name in theirs}


def table(found: dict[str, dict[str, list[float]]]) -> str:
    """The table of the page."""
    rows = ["| case | first loss | last loss | largest difference |", "|---|---:|---:|---:|"]
    for name, difference in differences(found).items():
        ours = found["shoal"][name]
        rows.append(f"| {name} | {ours[0]:.5f} | {ours[-1]:.5f} | {difference:.1e} |")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    command = "python benchmarks/deepspeed/run.py .venv/deepspeed docs/deepspeed.md"
    day = datetime.datetime.now(datetime.UTC).date()
    end = f"Measured on {day}, {commit[:7]}, two CPU ranks, {STEPS} steps, DeepSpeed 0.19.8: `{command}`"
    return "\n".join([*rows, "", end])


def main() -> None:
    site = Path(sys.argv[1]).resolve()
    text = table(losses(site))
    print(text)
    if len(sys.argv) > 2:
        page = Path(sys.argv[2])
        marks = re.compile(r"(<!-- parity -->\n).*?(<!-- end -->)", re.DOTALL)
        page.write_text(marks.sub(lambda match: f"{match[1]}{text}\n{match[2]}", page.read_text()))


if __name__ == "__main__":
    main()
