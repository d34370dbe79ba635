"""The command line: `shoal VERB ...`. One table of verbs, one short file for each; nothing here imports torch."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module

from shoal.errors import BAD_INPUT, ShoalError, nearest
from shoal.launch.shutdown import leave_in_time
from shoal.version import __version__

VERBS = {
    "plan": "rank all plans of a model on a cluster: what fits, how fast it would be, and why",
    "train": "train a recipe on this machine, or as one rank under torchrun, Slurm or mpirun",
    "verify": "prove that a plan computes what one device computes: every gradient, every weight, every byte",
    "calibrate": "measure this machine in about a minute, as a cluster for the planner",
    "bench": "measure collectives between ranks, by every algorithm: latency, bandwidth, and what predicts them",
    "backtest": "hold the planner against tables of measured runs: error, regret, failures foretold",
    "checkpoint": "look at checkpoints, prove them, compare them, and take them to other formats and back",
    "schema": "print the JSON schema of a recipe, for editors",
}

_LOCAL_RANK = re.compile(r"--local[-_]rank=\d+")
"""`python -m torch.distributed.launch` adds this word to every command. It also sets LOCAL_RANK, which is read."""

HELP = """\
usage: shoal VERB [options]

shoal trains any PyTorch model on whatever machines you have.

{verbs}

`shoal VERB --help` lists the options of a verb. Every verb takes --json: one JSON object on stdout, nothing else.
exit codes: 0 done, 1 the answer is no, 2 bad input, 3 the run failed, 130 interrupted
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    if arguments is None:  # the process is for this command alone, and ends with it
        ended_with = main(sys.argv[1:])
        leave_in_time(ended_with, name=f"shoal {' '.join(sys.argv[1:2])}")
        return ended_with
    words = [word for word in arguments if not _LOCAL_RANK.fullmatch(word)]
    verb = words[0] if words else "--help"
    if verb in ("-h", "--help", "help"):
        width = max(map(len, VERBS))
        print(HELP.format(verbs="\n".join(f"  {name:<{width}}  {about}" for name, about in VERBS.items())), end="")
        return 0
    if verb in ("-V", "--version", "version"):
        print(f"shoal {__version__}")
        return 0
    try:
        if verb not in VERBS:
            near = nearest(verb, VERBS)
            raise ShoalError(f"there is no verb {verb!r}", fix=f"shoal {near}" if near else "shoal --help lists them")
        code: int = import_module(f"shoal.cli.{verb}").main(words[1:])
        return code
    except ShoalError as error:
        _report(error, as_json="--json" in words)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `shoal schema | head`: whoever read has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as ended:  # after --help, or when a signal ended the workers
        return ended.code if isinstance(ended.code, int) else 0


def _report(error: ShoalError, *, as_json: bool) -> None:
    if as_json:
        problems = [{"what": problem.what, "fix": problem.fix} for problem in error.problems]
        print(json.dumps({"error": {"title": error.title, "problems": problems}, "exit_code": error.exit_code}))
    kind = "bad input" if error.exit_code == BAD_INPUT else "the run failed"
    print(f"shoal: {kind}: {error}", file=sys.stderr)
