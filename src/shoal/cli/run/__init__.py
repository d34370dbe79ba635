"""`shoal run -np N python train.py`: start a script on several ranks of this machine, as `horovodrun` does."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.affinity import num_cores
from shoal.cli.options import parse_options
from shoal.cli.run.processes import run_processes
from shoal.comm.rendezvous.launcher_environment import LOOPBACK
from shoal.errors import Problem, RunFailed, raise_if

SHORT = {"-np": "--np", "-H": "--hosts", "--num-proc": "--np", "--nproc": "--np"}
"""The spellings of horovodrun and torchrun."""
SWITCHES = ("--json", "--help", "-h")


@dataclass(frozen=True, kw_only=True)
class Run:
    """Start a command on several ranks of this machine, with the variables that shoal, torch.distributed and scripts
    for Horovod read. If a rank fails, the others are ended.

    shoal run -np 2 python train.py --epochs 3
    """

    np: int = 1
    """The number of ranks; also -np."""

    hosts: str | None = None
    """Where they run; also -H. This machine alone: localhost:4."""

    restarts: int = 0
    """How often a rank that failed is replaced while the others live on; for scripts with `hvd.elastic.run`."""

    json: bool = False
    """Print one JSON object when all ranks have ended."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    own, command = split_words(arguments)
    options = parse_options(Run, own, prog="shoal run")
    raise_if(_problems(options, command))
    ended = run_processes(command, options.np, environment, options.restarts)
    if options.json:
        answer = {"np": options.np, "command": command, "exit_codes": ended.exit_codes, "restarts": ended.restarts}
        print(json.dumps(answer))
    if ended.failed_rank is not None:
        rank = ended.failed_rank
        what = f"rank {rank} of {options.np} {ended.how(rank)}; the others were ended"
        raise RunFailed(what, fix="look at the output of that rank, which is above", code="N123")
    return ended.signal_code


def split_words(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide the words into options of this verb and the command.

    >>> split_words(["-np", "2", "python", "train.py", "--lr", "1"])
    (['--np', '2'], ['python', 'train.py', '--lr', '1'])
    """
    own: list[str] = []
    words = list(arguments)
    while words and words[0].startswith("-") and words[0] != "--":
        word = words.pop(0)
        own.append(SHORT.get(word, word))
        if word not in SWITCHES and "=" not in word and words:
            own.append(words.pop(0))
    return own, words[1:] if words[:1] == ["--"] else words


def environment(rank: int, slot: int, size: int) -> dict[str, str]:
    """The variables of one rank. `slot` is its place on this machine, and so its GPU; it keeps it when ranks change."""
    names = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": slot, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0}
    horovod = {"RANK": rank, "SIZE": size, "LOCAL_RANK": slot, "LOCAL_SIZE": size, "CROSS_RANK": 0, "CROSS_SIZE": 1}
    found = {name: str(value) for name, value in names.items()}
    found |= {f"HOROVOD_{name}": str(value) for name, value in horovod.items()}
    found["MASTER_ADDR"] = LOOPBACK
    if "OMP_NUM_THREADS" not in os.environ:
        found["OMP_NUM_THREADS"] = str(max(1, num_cores() // size))
    return found


def _problems(options: Run, command: Sequence[str]) -> list[Problem]:
    problems = []
    if options.np < 1:
        problems.append(Problem("N120", f"-np must be 1 or more, got {options.np}", "shoal run -np 2 python train.py"))
    if options.restarts < 0:
        problems.append(Problem("N120", f"--restarts must be 0 or more, got {options.restarts}", "--restarts 1"))
    if not command:
        problems.append(Problem("N121", "there is no command to run", "shoal run -np 2 python train.py"))
    elif shutil.which(command[0]) is None:
        what = f"the command {command[0]!r} is not on the path"
        problems.append(Problem("N121", what, f"shoal run -np {options.np} python {command[0]}"))
    if options.hosts is not None:
        problems += _host_problems(options)
    return problems


def _host_problems(options: Run) -> list[Problem]:
    """All ranks are on this machine: other hosts need a launcher on each of them."""
    parts = [part.partition(":") for part in (options.hosts or "").split(",")]
    here = ("localhost", LOOPBACK, socket.gethostname(), "")
    away = [host for host, _, _ in parts if host not in here]
    if away:
        what = f"shoal run starts ranks on this machine alone, got -H {options.hosts}"
        fix = f"torchrun --nnodes {len(parts)} --nproc-per-node N --rdzv-endpoint {parts[0][0]}:29500 ..., on each host"
        return [Problem("N122", what, fix)]
    slots = sum(int(count) if count.isdecimal() else 1 for _, _, count in parts)
    if slots < options.np:
        what = f"-H {options.hosts} has {slots} slots, and -np is {options.np}"
        return [Problem("N122", what, f"-H localhost:{options.np}")]
    return []
