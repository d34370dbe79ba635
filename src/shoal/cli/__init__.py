"""The command line, `shoal VERB ...`: one table of verbs, and one file for each. Nothing here imports torch."""

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
    "plan": "rank all plans for a model on a cluster by predicted speed and memory, with reasons",
    "train": "train a recipe on this machine, or as one rank under torchrun, Slurm or mpirun",
    "run": "start a script on several ranks of this machine, as horovodrun does",
    "launch": "write, submit and follow jobs of Slurm and Kubernetes",
    "agent": "be one host of `shoal train --hosts`, where ssh does not start it",
    "verify": "compare a plan with one process: every gradient and weight, communicated bytes and memory",
    "profile": "time a few steps by part, and say what bounds them and what to change",
    "chaos": "disturb a run with seeded faults, and compare it with an undisturbed one",
    "calibrate": "measure this machine for the planner, in about a minute",
    "bench": "measure scaling, settings and memory of a recipe, collectives, or gradient compression",
    "backtest": "compare the planner's predictions with tables of measured runs",
    "report": "write one HTML page of a run, or of several side by side: verdict, curves, time, layout",
    "watch": "show a run while it trains, live in a browser or in the terminal",
    "ls": "list the runs below a folder with state, step, loss and speed",
    "checkpoint": "list, verify and compare checkpoints; export them to other formats and import from them",
    "generate": "print how a trained language model continues a prompt",
    "doctor": "check this host, a recipe, several hosts or a run for the usual causes of failures",
    "presets": "list the models, clusters and recipes that other verbs accept",
    "schema": "print the JSON schema of a recipe, for editors",
    "explain": "print the page of an error code: the rule, why it holds, and the ways to fix it",
}

MODULES = {
    "launch": "jobs",
    "report": "runs.report",
    "watch": "runs.watch",
    "ls": "runs.ls",
    "generate": "runs.generate",
    "explain": "lookup.explain",
    "schema": "lookup.schema",
    "presets": "lookup.presets",
}
"""Verbs whose file is in a folder."""

_LOCAL_RANK = re.compile(r"--local[-_]rank=\d+")
"""`python -m torch.distributed.launch` adds this argument to every command. It also sets LOCAL_RANK, which is read."""

HELP = """\
usage: shoal VERB [options]

shoal plans, verifies and runs distributed training of PyTorch models.

{verbs}

`shoal VERB --help` lists the options of a verb. Every verb takes --json: one JSON object on stdout, nothing else.
exit codes: 0 success, 1 the check failed, 2 bad input, 3 the run failed, 130 interrupted
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    if arguments is None:  # the process runs this command alone and ends with it
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
            fix = f"shoal {near}" if near else "shoal --help"
            raise ShoalError(f"unknown verb {verb!r}", fix=fix, code="R001")
        code: int = import_module(f"shoal.cli.{MODULES.get(verb, verb)}").main(words[1:])
        return code
    except ShoalError as error:
        _report(error, as_json="--json" in words)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `shoal schema | head`: the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as ended:  # after --help, or when a signal ended the workers
        return ended.code if isinstance(ended.code, int) else 0


def _report(error: ShoalError, *, as_json: bool) -> None:
    if as_json:
        problems = [{"code": each.code, "what": each.what, "fix": each.fix} for each in error.problems]
        text = json.dumps({"error": {"title": error.title, "problems": problems}, "exit_code": error.exit_code})
        sys.stdout.write(f"{text}\n")  # in one write: ranks under torchrun share the stream, and `print` makes two
    kind = "bad input" if error.exit_code == BAD_INPUT else "the run failed"
    hint = f"shoal explain {' '.join(error.codes)} says more"
    if sys.stderr.isatty() and "NO_COLOR" not in os.environ:
        hint = f"\x1b[2m{hint}\x1b[0m"
    print(f"shoal: {kind}: {error.on_command_line()}\n{hint}", file=sys.stderr)
