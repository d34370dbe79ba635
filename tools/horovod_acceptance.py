"""Run Horovod's own public tests and examples for torch against `shoal.horovod`, on two ranks of this machine.

    git clone https://github.com/horovod/horovod /tmp/horovod
    python tools/horovod_acceptance.py /tmp/horovod [--json FILE] [--logs FOLDER] [--only TEXT]
    python tools/horovod_acceptance.py /tmp/horovod --examples      # needs torchvision

Nothing of theirs is copied or changed. Their files import `horovod.torch`; `shoal.horovod.install()` answers. A plugin
makes up for what has nothing to do with the module under test:

- cloudpickle, mock, horovod.runner: imported by their helpers and not used by these tests; empty modules if missing.
- horovod.tensorflow: the tests of process sets import it for what all frameworks share, so it is the torch module.
- `mpi_enabled()` says yes, because Adasum's tests skip themselves without MPI.
- torch.optim.Muon, younger than the tests, rejects biases: their loops over all optimizers leave it out.

Tests of `test/single` run on one rank, as in Horovod's own CI, the others on two. A failed test is tried once more,
because some of them compare the clocks of two processes; the report counts those. The examples are started as they are;
MNIST's files are made (a bright square for each digit, with noise), because a test must not depend on a download.
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

import numpy as np

ROOT = Path(__file__).parents[1]
FILES = {
    "test/parallel/test_torch.py": 2,
    "test/parallel/test_adasum_pytorch.py": 2,
    "test/parallel/test_process_sets_static.py": 2,
    "test/parallel/test_process_sets_multi_comm.py": 2,
    "test/single/test_torch_elastic.py": 1,
}
"""The file, and on how many ranks it runs."""
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
horovod.torch.mpi_enabled = lambda: True
import torch
if hasattr(torch.optim, "Muon"):
    torch.optim.Muon.__module__ = "younger." + torch.optim.Muon.__module__
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", type=Path, help="a clone of Horovod's repository")
    parser.add_argument("--json", type=Path, help="write the outcome of every test")
    parser.add_argument("--logs", type=Path, help="keep the output of the ranks in this folder")
    parser.add_argument("--examples", action="store_true", help="run two of its examples in place of its tests")
    parser.add_argument("--only", default="", help="run only tests whose name contains this")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = options.logs or folder
        Path(folder).mkdir(exist_ok=True)
        (Path(folder) / "acceptance_plugin.py").write_text(PLUGIN)
        if options.examples:
            return examples(options.sources, Path(folder))
        outcomes = {}
        for name, num_ranks in FILES.items():
            outcomes |= twice(options.sources / name, num_ranks, Path(folder), options.only)
    report(outcomes)
    if options.json:
        options.json.write_text(json.dumps(outcomes, indent=1))
    return 0 if share_passed(outcomes) >= 0.95 else 1


# ---- tests ----------------------------------------------------------------------------------------------------------


def twice(path: Path, num_ranks: int, folder: Path, only: str) -> dict[str, dict[str, str]]:
    """Run a file, and what failed once more."""
    outcomes = run_file(path, num_ranks, folder, only)
    failed = [name.partition("::")[2] for name, each in outcomes.items() if each["outcome"] == "failed"]
    if failed and "(file)" not in failed:
        again = run_file(path, num_ranks, folder, " or ".join(failed))
        for name, each in again.items():
            if each["outcome"] == "passed" and outcomes[name]["outcome"] == "failed":
                outcomes[name] = {"outcome": "passed", "why": f"on the second attempt; {outcomes[name]['why']}"}
    return outcomes


def run_file(path: Path, num_ranks: int, folder: Path, only: str) -> dict[str, dict[str, str]]:
    """Run a file on all ranks; return what each test came to, the worst of the ranks."""
    began = time.monotonic()
    results = [folder / f"{path.stem}-{rank}.xml" for rank in range(num_ranks)]
    for each in results:
        each.unlink(missing_ok=True)
    inner = (
        "import os, sys, pytest; sys.exit(pytest.main([*sys.argv[1:],"
        f" '--junitxml={folder}/{path.stem}-' + os.environ['RANK'] + '.xml']))"
    )
    words = [sys.executable, "-c", inner, str(path), "-q", "-p", "acceptance_plugin", "-p", "no:cacheprovider"]
    words += ["-c", os.devnull, "--rootdir", str(path.parent), "--timeout", "120", "-o", "timeout_method=thread"]
    words += ["-k", only] if only else []
    ended = launched(words, num_ranks, folder, log=folder / f"{path.stem}.log")
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


def launched(words: list[str], num_ranks: int, folder: Path, *, log: Path) -> int:
    """Run a command on all ranks by `shoal run`."""
    paths = [str(folder), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "shoal", "run", "-np", str(num_ranks), *words]
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


def needs_cuda(name: str, outcome: dict[str, str]) -> bool:
    return outcome["outcome"] == "skipped" and ("GPU" in outcome["why"] or "_gpu" in name)


def counted(outcomes: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """The tests that need no CUDA."""
    return {name: each for name, each in outcomes.items() if not needs_cuda(name, each)}


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
        if each["outcome"] != "passed" or each["why"]:
            print(f"- `{name}`: {each['outcome']}: {each['why']}")


# ---- examples -------------------------------------------------------------------------------------------------------

EXAMPLES = {
    "pytorch_mnist.py": "--no-cuda --epochs 2 --batch-size 16 --test-batch-size 64 --lr 0.05",
    "pytorch_synthetic_benchmark.py": "--no-cuda --model resnet18 --batch-size 2 --num-warmup-batches 1"
    " --num-batches-per-iter 1 --num-iters 2",
}
STARTER = """
import runpy, sys, types
import acceptance_plugin
try:
    import torchvision
except RuntimeError:  # a build for CUDA on a machine without: its compiled operators are missing, and not needed
    for name in [name for name in sys.modules if name.startswith("torchvision")]:
        del sys.modules[name]
    sys.modules["torchvision._meta_registrations"] = types.ModuleType("torchvision._meta_registrations")
    import torchvision
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def examples(sources: Path, folder: Path) -> int:
    """Run two examples on two ranks; print the end of their output."""
    (folder / "starter.py").write_text(STARTER)
    made_digits(folder / "data" / "MNIST" / "raw")
    codes = []
    for name, words in EXAMPLES.items():
        options = [*words.split(), *(["--data-dir", str(folder / "data")] if "mnist" in name else [])]
        log = folder / f"{name}.log"
        script = str(sources / "examples" / "pytorch" / name)
        codes.append(launched([sys.executable, str(folder / "starter.py"), script, *options], 2, folder, log=log))
        shown = [line for line in log.read_text().splitlines() if line.strip() and "Warning" not in line]
        print(f"{name} {words}: exit code {codes[-1]}", *shown[-6:], sep="\n  ")
    return max(codes)


def made_digits(folder: Path) -> None:
    """Write the four files of MNIST in its format."""
    generator = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in {"train": 1024, "t10k": 128}.items():
        labels = generator.integers(0, 10, count).astype(np.uint8)
        images = generator.integers(0, 60, (count, 28, 28)).astype(np.uint8)
        for image, label in zip(images, labels, strict=True):
            row, column = 4 + 10 * (label // 5), 2 + 5 * (label % 5)
            image[row : row + 5, column : column + 4] = 250
        head = b"".join(number.to_bytes(4, "big") for number in (0x803, count, 28, 28))
        (folder / f"{name}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        head = b"".join(number.to_bytes(4, "big") for number in (0x801, count))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(head + labels.tobytes())


if __name__ == "__main__":
    sys.exit(main())
