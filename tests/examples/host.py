"""Runs examples, each in a fork of a process that has torch loaded: its seconds are spent once, not for every rank.

As a script it reads a JSON list of runs (each the file and the environments of its ranks, which run at the same time)
and writes what became of the ranks.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

from tests.readme.fork_host import ROOT, Ran
from tests.warm import warm_python

Environment = dict[str, str]


def run_examples(runs: Sequence[tuple[Path, list[Environment]]], *, timeout: float = 110.0) -> list[list[Ran]]:
    """One run after the other in the root of the repository, as on a machine without a GPU; what each rank did."""
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    host = subprocess.run(
        [warm_python(), "-m", "tests.examples.host"], input=json.dumps([(str(path), ranks) for path, ranks in runs]),
        capture_output=True, text=True, cwd=ROOT, env=environ, timeout=timeout, check=False,
    )  # fmt: skip
    assert host.returncode == 0, host.stderr
    return [[Ran(*ran) for ran in ranks] for ranks in json.loads(host.stdout)]


def run_for_real(name: str, *words: str, timeout: float) -> Ran:
    """An example that starts its ranks itself, in a process of its own.

    That process has loaded what every rank would otherwise load for its first optimizer, for a second and a half each.
    """
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    path = str(ROOT / "examples" / name)
    script = f"import runpy, torch._dynamo, torch.distributed.fsdp; runpy.run_path({path!r}, run_name='__main__')"
    ended = subprocess.run(
        [warm_python(), "-c", script, *words], capture_output=True, text=True, cwd=ROOT, env=environ,
        timeout=timeout, check=False,
    )  # fmt: skip
    return Ran(ended.returncode, ended.stdout, ended.stderr)


def main() -> None:
    """Be the host."""
    # Loaded, and nothing computed: a fork of this process can compute. Dynamo is what the first optimizer would load.
    import torch._dynamo
    import torch.distributed.fsdp  # noqa: F401

    import shoal.train.run  # noqa: F401

    print(json.dumps([in_forks(path, ranks) for path, ranks in json.load(sys.stdin)]))


def in_forks(path: str, ranks: list[Environment]) -> list[tuple[int, str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        files = [(Path(folder, f"{rank}.out"), Path(folder, f"{rank}.err")) for rank in range(len(ranks))]
        children = []
        for environment, both in zip(ranks, files, strict=True):
            children.append(os.fork())
            if children[-1] == 0:
                for number, file in enumerate(both, 1):
                    os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600), number)
                os.environ.update(environment)
                os._exit(exit_code_of(path))
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        return [(code, out.read_text(), err.read_text()) for code, (out, err) in zip(codes, files, strict=True)]


def exit_code_of(path: str) -> int:
    code: int | str | None = 0
    sys.argv = [path]
    sys.path.insert(0, str(Path(path).parent))
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)


if __name__ == "__main__":
    main()
