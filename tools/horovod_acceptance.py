"""Run Horovod's own public tests and examples for torch against `shoal.horovod`, on two ranks of this machine.

    git clone https://github.com/horovod/horovod /tmp/horovod
    python tools/horovod_acceptance.py /tmp/horovod [--json FILE] [--logs FOLDER] [--only TEXT]

Nothing of theirs is copied. Their files import `horovod.torch`; `shoal.horovod.install()` answers. What their helpers
import and these tests do not use is replaced by empty modules: cloudpickle, mock, horovod.runner. The tests of process
sets import `horovod.tensorflow` and use only what all frameworks share, so the name stands for the torch module there.
Adasum's tests skip themselves without MPI; `mpi_enabled()` says yes in that file, so that they run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = (
    "test/parallel/test_torch.py",
    "test/parallel/test_adasum_pytorch.py",
    "test/parallel/test_process_sets_static.py",
    "test/parallel/test_process_sets_multi_comm.py",
    "test/single/test_torch_elastic.py",
)
NUM_RANKS = 2
PLUGIN = """
import sys, types
import shoal.horovod
shoal.horovod.install()
import horovod, horovod.torch

def stand_in(name, **content):
    module = sys.modules.setdefault(name, types.ModuleType(name))
    module.__path__ = []
    module.__dict__.update(content)

for name in ("cloudpickle", "mock", "horovod.runner", "horovod.runner.util"):
    try:
        __import__(name)
    except ImportError:
        stand_in(name)
stand_in("horovod.runner.util.threads", in_thread=None)
sys.modules["horovod.tensorflow"] = horovod.torch
horovod.tensorflow = horovod.torch
if any("adasum" in word for word in sys.argv):
    horovod.torch.mpi_enabled = lambda: True
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", type=Path, help="a clone of Horovod's repository")
    parser.add_argument("--json", type=Path, help="write the outcome of every test")
    parser.add_argument("--logs", type=Path, help="keep the output of the ranks in this folder")
    parser.add_argument("--only", default="", help="run only tests whose name contains this")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = options.logs or folder
        Path(folder).mkdir(exist_ok=True)
        (Path(folder) / "acceptance_plugin.py").write_text(PLUGIN)
        outcomes = {}
        for name in FILES:
            outcomes |= run_file(options.sources / name, Path(folder), options.only)
    report(outcomes)
    if options.json:
        options.json.write_text(json.dumps(outcomes, indent=1))
    return 0 if share_passed(outcomes) >= 0.95 else 1


# ---- tests ----------------------------------------------------------------------------------------------------------


def run_file(path: Path, folder: Path, only: str) -> dict[str, dict[str, str]]:
    """Run a file on all ranks; return what each test came to, the worst of the ranks."""
    began = time.monotonic()
    results = [folder / f"{path.stem}-{rank}.xml" for rank in range(NUM_RANKS)]
    for each in results:
        each.unlink(missing_ok=True)
    inner = (
        "import os, sys, pytest; sys.exit(pytest.main([*sys.argv[1:],"
        f" '--junitxml={folder}/{path.stem}-' + os.environ['RANK'] + '.xml']))"
    )
    words = [sys.executable, "-c", inner, str(path), "-q", "-p", "acceptance_plugin", "-p", "no:cacheprovider"]
    words += ["-c", os.devnull, "--rootdir", str(path.parent), "--timeout", "120", "-o", "timeout_method=thread"]
    words += ["-k", only] if only else []
    ended = launched(words, folder, log=folder / f"{path.stem}.log")
    print(f"{path.name}: exit code {ended}, {time.monotonic() - began:.0f} s", file=sys.stderr)
    if not all(each.exists() for each in results):
        print((folder / f"{path.stem}.log").read_text()[-4000:], file=sys.stderr)
        return {f"{path.stem}::(file)": {"outcome": "failed", "why": "it ended before its tests did"}}
    by_rank = [dict(outcomes_of(each)) for each in results]
    order = ("failed", "skipped", "passed")
    return {
        f"{path.stem}::{name}": min(
            (rank.get(name, found) for rank in by_rank), key=lambda each: order.index(each["outcome"])
        )
        for name, found in by_rank[0].items()
    }


def launched(words: list[str], folder: Path, *, log: Path, extra: dict[str, str] | None = None) -> int:
    """Run a command on all ranks by `shoal run`."""
    paths = [str(folder), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **(extra or {})}
    command = [sys.executable, "-m", "shoal", "run", "-np", str(NUM_RANKS), *words]
    with log.open("w") as out:
        return subprocess.run(command, env=variables, stdout=out, stderr=subprocess.STDOUT, check=False).returncode


def outcomes_of(path: Path):
    for case in ElementTree.parse(path).iter("testcase"):
        found = {"outcome": "passed", "why": ""}
        for part in case:
            if part.tag in ("failure", "error"):
                found = {"outcome": "failed", "why": (part.get("message") or "").splitlines()[0][:200]}
            elif part.tag == "skipped" and found["outcome"] != "failed":
                found = {"outcome": "skipped", "why": part.get("message") or ""}
        yield case.get("name"), found


def needs_cuda(outcome: dict[str, str]) -> bool:
    return outcome["outcome"] == "skipped" and ("GPU" in outcome["why"] or "CUDA" in outcome["why"])


def counted(outcomes: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """The tests that need no CUDA."""
    return {name: each for name, each in outcomes.items() if not needs_cuda(each)}


def share_passed(outcomes: dict[str, dict[str, str]]) -> float:
    needed = counted(outcomes)
    return sum(each["outcome"] == "passed" for each in needed.values()) / max(1, len(needed))


def report(outcomes: dict[str, dict[str, str]]) -> None:
    print("| file | tests | need CUDA | passed | skipped | failed |\n|---|---:|---:|---:|---:|---:|")
    for stem in dict.fromkeys(name.partition("::")[0] for name in outcomes):
        of_file = {name: each for name, each in outcomes.items() if name.startswith(f"{stem}::")}
        found = Counter(each["outcome"] for each in counted(of_file).values())
        cuda = len(of_file) - len(counted(of_file))
        print(f"| `{stem}.py` | {len(of_file)} | {cuda} | {found['passed']} | {found['skipped']} | {found['failed']} |")
    total = counted(outcomes)
    passed = sum(each["outcome"] == "passed" for each in total.values())
    print(f"\n{passed} of {len(total)} tests that need no CUDA pass: {share_passed(outcomes):.1%}\n")
    for name, each in total.items():
        if each["outcome"] != "passed":
            print(f"- `{name}`: {each['outcome']}: {each['why']}")


if __name__ == "__main__":
    sys.exit(main())
