"""Files of SkyPilot and dstack, which rent machines and start one command on each of them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from shoal.errors import Problem
from shoal.jobs.spec import PORT, JobSpec
from shoal.jobs.yaml_text import dump

_MEMORY = re.compile(r"(\d{1,6})([GT])(i?B)?", re.IGNORECASE)


def check_memory(memory: str | None) -> Iterator[Problem]:
    """Find a size that cannot be said in whole gigabytes, as both tools read it."""
    if memory is not None and not _MEMORY.fullmatch(memory):
        yield Problem("J021", f"--memory must be a size such as 200G, got {memory[:80]!r}", "--memory 200G")


def gigabytes(memory: str) -> int:
    """A size in gigabytes.

    >>> gigabytes("200G"), gigabytes("2TiB")
    (200, 2048)
    """
    found = _MEMORY.fullmatch(memory)
    return 0 if found is None else int(found[1]) * (1024 if found[2].upper() == "T" else 1)


def skypilot(spec: JobSpec, accelerator: str | None) -> str:
    """A task of SkyPilot: `SHOAL_KEY=$(openssl rand -hex 32) sky jobs launch FILE --secret SHOAL_KEY`."""
    resources: dict[str, Any] = {}
    if spec.gpus:
        resources["accelerators"] = f"{accelerator}:{spec.gpus}"
    if spec.cpus is not None:
        resources["cpus"] = f"{spec.cpus * spec.ranks_per_node}+"
    if spec.memory is not None:
        resources["memory"] = f"{gigabytes(spec.memory)}+"
    if spec.image is not None:
        resources["image_id"] = f"docker:{spec.image}"
    # SkyPilot starts a job of `sky jobs launch` again after its machines were lost, and after these exit codes.
    resources["job_recovery"] = {"max_restarts_on_errors": spec.max_failures, "recover_on_exit_codes": [130]}
    run = _node(spec, "$SKYPILOT_NODE_RANK", '"$(head -n 1 <<< "$SKYPILOT_NODE_IPS")"')
    file: dict[str, Any] = {
        "name": spec.name,
        "num_nodes": spec.nodes,
        "workdir": ".",
        "resources": resources,
        "secrets": {"SHOAL_KEY": None},
        "envs": dict(spec.env),
        "setup": "\n".join([*spec.setup, ""]),
        "run": f"{run}\n",
    }
    return _spelled(file, "SHOAL_KEY=$(openssl rand -hex 32) sky jobs launch FILE --secret SHOAL_KEY")


def dstack(spec: JobSpec, accelerator: str | None) -> str:
    """A task of dstack: `SHOAL_KEY=$(openssl rand -hex 32) dstack apply -f FILE`."""
    resources: dict[str, Any] = {"shm_size": "16GB"}
    if spec.gpus:
        resources["gpu"] = f"{accelerator}:{spec.gpus}"
    if spec.memory is not None:
        resources["memory"] = f"{gigabytes(spec.memory)}GB.."
    if spec.cpus is not None:
        resources["cpu"] = f"{spec.cpus * spec.ranks_per_node}.."
    file: dict[str, Any] = {
        "type": "task",
        "name": spec.name,
        "nodes": spec.nodes,
        "image": spec.image,
        "env": ["SHOAL_KEY", *(f"{name}={value}" for name, value in spec.env.items())],
        "files": [spec.words[0]],
        "commands": [*spec.setup, _node(spec, "$DSTACK_NODE_RANK", '"$DSTACK_MASTER_NODE_IP"')],
        "resources": resources,
        "max_duration": f"{spec.seconds // 60}m" if spec.seconds else None,
        "retry": {"on_events": ["no-capacity", "interruption", "error"], "duration": "2h"},
    }
    return _spelled(file, "SHOAL_KEY=$(openssl rand -hex 32) dstack apply -f FILE")


def _node(spec: JobSpec, rank: str, master: str) -> str:
    """The command of one machine. `rank` and `master` are for the shell."""
    words = shlex.join([*spec.program, "launch", "node", *spec.words])
    return f"{words} --nodes {spec.nodes} --slots {spec.ranks_per_node} --port {PORT} --rank {rank} --master {master}"


def _spelled(file: Mapping[str, Any], submit: str) -> str:
    present = {key: value for key, value in file.items() if value not in (None, {}, "", "\n")}
    return f"# To submit: {submit}\n{dump([present])}"
