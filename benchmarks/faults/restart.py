"""A rank is killed: how long until the run has committed a step that it had not committed before?

python benchmarks/faults/restart.py [--ranks 4] [--repeats 5]

The same recipe is started by `shoal train`, with checkpoints in host memory and on the disk, and by
`torchrun --max-restarts`. `shoal train` replaces the killed rank alone or restarts all. One rank kills itself (SIGKILL)
before the update of a step, which is then computed again. Another one may have written the line of that step into
`metrics.jsonl` already. The restarted run removes such a line, so the time is taken to the line that stays. The file is
read every few milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import arguments, heading, table, write

STEP = 20
"""The step before which a rank dies."""
RECIPE = [
    *["--model.num_layers", "2", "--model.hidden", "64", "--model.ffn", "128", "--data.source", "synthetic"],
    *["--data.synthetic_samples", "512", "--data.validation", "0", "--data.seq_len", "32", "--data.global_batch", "8"],
    *["--data.workers", "0", "--device", "cpu", "--launch.threads", "1", "--run.log_every", "1", "--quiet"],
]
LEAST_PAUSE = 0.002
MOST_SECONDS = 180.0


def commands(ranks: int, steps: int) -> dict[str, list[str]]:
    """Who starts the ranks, and where checkpoints are → the command."""
    recipe = [*RECIPE, "--run.duration", f"{steps}step", "--run.dir", "run"]
    shoal = [sys.executable, "-m", "shoal", "train", *recipe, "--nproc", str(ranks)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    on_disk = ["--checkpoint.every", "1step"]
    in_memory, all_workers = ["--checkpoint.memory_every", "1step"], ["--launch.recovery", "restart"]
    return {
        "`shoal train`, one rank replaced, memory": [*shoal, *in_memory],
        "`shoal train`, one rank replaced, disk": [*shoal, *on_disk],
        "`shoal train`, all restarted, memory": [*shoal, *in_memory, *all_workers],
        "`shoal train`, all restarted, disk": [*shoal, *on_disk, *all_workers],
        "`torchrun --max-restarts 1`, disk": [
            *torchrun,
            "--max-restarts",
            "1",
            "-m",
            "shoal",
            "train",
            *recipe,
            *on_disk,
        ],
    }


def measured(words: list[str], rank: int) -> tuple[float, float]:
    """Seconds from the fault to the step after the one that failed; and of a usual step."""
    folder = Path(tempfile.mkdtemp(prefix="shoal-restart-"))
    fault, log = f"kill_at=rank:{rank},step:{STEP}", folder / "faults.jsonl"
    environ = {**os.environ, "SHOAL_FAULTS": fault, "SHOAL_FAULTS_LOG": str(log), "CUDA_VISIBLE_DEVICES": ""}
    quiet = subprocess.DEVNULL
    try:
        with subprocess.Popen(words, cwd=folder, env=environ, stdout=quiet, stderr=quiet) as running:
            seen = times_of_lines(folder / "run" / "metrics.jsonl", running)
        if running.returncode:
            raise SystemExit(f"{' '.join(words)} ended with code {running.returncode}")
        killed = json.loads(log.read_text().splitlines()[0])["at"]
        after = min(at for step, at in seen.items() if step >= STEP)
        before = [seen[step] - seen[step - 1] for step in range(5, STEP) if step in seen and step - 1 in seen]
        return after - killed, statistics.median(before)
    finally:
        shutil.rmtree(folder)


def times_of_lines(path: Path, running: subprocess.Popen[bytes]) -> dict[int, float]:
    """Step → when its line appeared, on the monotonic clock; for the last time, if it was removed."""
    seen: dict[int, float] = {}
    here, last = set[int](), ""
    deadline = time.monotonic() + MOST_SECONDS
    while running.poll() is None:
        if time.monotonic() > deadline:
            running.kill()
        text = path.read_text() if path.exists() else ""
        if text != last:
            lines, now, last = text.splitlines(), time.monotonic(), text
            before, here = here, {json.loads(line)["step"] for line in lines if line.endswith("}")}
            seen.update(dict.fromkeys(here - before, now))
        time.sleep(LEAST_PAUSE)
    return seen


def main() -> None:
    """Run every command by turns, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", type=int, help="the number of the one command to run")
    options = arguments(parser, ranks=2, repeats=1, only=0)
    chosen = list(commands(options.ranks, STEP + 20).items())
    chosen = chosen if options.only is None else [chosen[options.only]]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name, _ in chosen}
    for repeat in range(options.repeats):
        for name, words in chosen:
            found[name].append(measured(words, rank=repeat % options.ranks))
    rows = [row(name, each) for name, each in found.items()]
    question = f"{__doc__.splitlines()[0]} {options.ranks} ranks; a rank after the other is the one that is killed."
    print(table(rows))
    print(write("restart", f"{heading('Restart', question)}\n{table(rows)}"))


def row(name: str, found: list[tuple[float, float]]) -> dict[str, str]:
    """One row of the table."""
    seconds, steps = zip(*found, strict=True)
    return {
        "started by, checkpoints in": name,
        "runs": str(len(found)),
        "seconds, median": f"{statistics.median(seconds):.2f}",
        "longest": f"{max(seconds):.2f}",
        "a step": f"{statistics.median(steps) * 1e3:.0f} ms",
    }


if __name__ == "__main__":
    main()
