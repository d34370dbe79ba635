"""Record the runs whose pages `make docs` shows: real ones of this machine, each by its command, in about five minutes.

    python tools/record_examples.py [NAME ...]    run, profile, verify, scale, step, memory, comm; all without a name

`make docs` makes the pages from tools/examples, without torch and in a second. A page says where and when its figures
were measured.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

FOLDER = Path(__file__).parent / "examples"
RUN_FILES = ("environment.json", "events.jsonl", "metrics.jsonl", "prediction.json", "profile.json", "recipe.yaml")
RUN_FILES += ("summary.json",)
RECIPE = "recipes/tiny.yaml"
TRAIN = f"train {RECIPE} --nproc 2 --plan 'pp=2 1f1b mb=2' --run.duration 120step --checkpoint.every 40step"
PROFILE = f"profile {RECIPE} --nproc 2 --plan zero=3 --steps 10"
VERIFIED = "tp=2 pp=2 1f1b mb=1"
PLANS = "--plans 'ddp,zero=3,pp=2'"
BENCHES = {
    "scale": f"bench scale {RECIPE} --nproc 1,2 {PLANS} --steps 12 --data.global_batch 8 --data.seq_len 64",
    "step": f"bench step {RECIPE} --settings microbatch,recompute --steps 9 --data.seq_len 64",
    "memory": f"bench memory {RECIPE} {PLANS}",
    "comm": "bench comm --nproc 2 --sizes 1KB..4MB --kinds all_reduce all_gather --algorithms ring builtin --seconds 9",
}


def shoal(words: str) -> str:
    """Run a command, and return what it prints."""
    command = f"{sys.executable} -m shoal {words}"
    print(command, file=sys.stderr)
    return subprocess.run(
        ["bash", "-c", command], cwd=FOLDER.parents[1], stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def record_run(name: str, words: str, folder: Path, made: str) -> None:
    """The directory of a run, without its checkpoints and without the name of this host."""
    shoal(f"{words} --run.dir {folder / 'tiny'}")
    target = FOLDER / name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for file in RUN_FILES:
        if (folder / made / file).exists():
            text = (folder / made / file).read_text().replace(str(folder), "runs")
            (target / file).write_text(text)
    environment = json.loads((target / "environment.json").read_text())
    environment |= {"command": ["shoal", *environment["command"][1:]], "host": "example"}
    (target / "environment.json").write_text(f"{json.dumps(environment, indent=1)}\n")


def record_verification(folder: Path) -> None:
    """The result of `shoal verify`, and the difference of every tensor, which its page has."""
    from shoal.config.load import load_recipe
    from shoal.verification.api import verify_case
    from shoal.verification.options import RecipeSettings
    from shoal.verification.recipe.cases import case_of
    from shoal.verification.report import to_mapping

    result = verify_case(case_of(load_recipe(None, [("plan", VERIFIED)]), 4, RecipeSettings()))
    found = {"result": to_mapping(result), "tensors": [list(each) for each in result.tensors]}
    (FOLDER / "verify.json").write_text(f"{json.dumps(found, indent=1)}\n")


def record_bench(name: str, folder: Path) -> None:
    """The JSON of a benchmark."""
    found = json.loads(shoal(f"{BENCHES[name]} --json"))
    found |= {"host": "example"} if "host" in found else {}
    (FOLDER / f"{name}.json").write_text(f"{json.dumps(found, indent=1)}\n")


RECORDERS: dict[str, Callable[[Path], None]] = {
    "run": lambda folder: record_run("run", f"{TRAIN} --run.per_rank_metrics true", folder, "tiny"),
    "profile": lambda folder: record_run("profile", PROFILE, folder, "tiny-profile"),
    "verify": record_verification,
    **{name: (lambda folder, name=name: record_bench(name, folder)) for name in BENCHES},
}


def main(names: list[str]) -> int:
    if unknown := set(names) - set(RECORDERS):
        print(f"no example {', '.join(unknown)}; there are {', '.join(RECORDERS)}", file=sys.stderr)
        return 2
    for name in names or RECORDERS:
        with tempfile.TemporaryDirectory() as folder:
            RECORDERS[name](Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
