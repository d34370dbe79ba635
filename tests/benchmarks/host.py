"""Runs benchmarks, each in a fork of a process that has torch loaded and has computed nothing; so can its ranks be.

As a script it reads a JSON list of commands (each a script and its words) and writes what became of them.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict

from tests.readme.fork_host import ROOT, Ran, in_a_fork
from tests.warm import warm_python


def run_scripts(commands: Sequence[Sequence[str]], *, timeout: float) -> list[Ran]:
    """Run them one after the other in the root of the repository, as on a machine without a GPU."""
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    host = subprocess.run(
        [warm_python(), "-m", "tests.benchmarks.host"], input=json.dumps([list(words) for words in commands]),
        capture_output=True, text=True, cwd=ROOT, env=environ, timeout=timeout, check=False,
    )  # fmt: skip
    assert host.returncode == 0, host.stderr
    return [Ran(**ran) for ran in json.loads(host.stdout)]


def main() -> None:
    """Be the host."""
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp  # noqa: F401

    import shoal.train.recipe.loop
    import shoal.verification.rank  # noqa: F401

    print(json.dumps([asdict(in_a_fork(words, exit_code_of)) for words in json.load(sys.stdin)]))


def exit_code_of(words: list[str]) -> int:
    script, *_ = sys.argv = words
    sys.path.insert(0, str((ROOT / script).parent))  # as for a script that is started by its path
    code = 0
    try:
        importlib.import_module(script.removesuffix(".py").replace("/", ".")).main()
    except SystemExit as end:
        code = int(bool(end.code))
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    main()
