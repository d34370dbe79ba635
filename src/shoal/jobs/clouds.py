"""Files of SkyPilot and dstack, which rent machines and start one command on each of them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import yaml

from shoal.jobs.spec import JobSpec

PORT = 29400


def skypilot(spec: JobSpec, accelerator: str | None) -> str:
    """A task of SkyPilot: `SHOAL_KEY=$(openssl rand -hex 32) sky jobs launch FILE --secret SHOAL_KEY`."""
    resources: dict[str, Any] = {}
    if spec.gpus:
        resources["accelerators"] = f"{accelerator}:{spec.gpus}"
    if spec.cpus is not None:
        resources["cpus"] = f"{spec.cpus * spec.ranks_per_node}+"
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
        resources["memory"] = f"{spec.memory}.."
    file: dict[str, Any] = {
        "type": "task",
        "name": spec.name,
        "nodes": spec.nodes,
        "image": spec.image,
        "env": ["SHOAL_KEY", *(f"{name}={value}" for name, value in spec.env.items())],
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


class _Dumper(yaml.SafeDumper):
    """Texts of several lines are shown as such."""


_Dumper.add_representer(
    str,
    lambda dumper, value: dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None),
)


def _spelled(file: Mapping[str, Any], submit: str) -> str:
    present = {key: value for key, value in file.items() if value not in (None, {}, "", "\n")}
    return f"# To submit: {submit}\n{yaml.dump(present, Dumper=_Dumper, sort_keys=False, width=1000)}"
