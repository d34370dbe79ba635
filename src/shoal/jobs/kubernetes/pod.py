"""The pod of one machine of a job: its container, command, volumes and secrets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shoal.errors import Problem
from shoal.jobs.spec import PORT, JobSpec

RECIPE = "/etc/shoal/recipe.yaml"
"""Where the recipe is in a container."""
CONTAINER = "node"
Tree = dict[str, Any]
_LABEL = re.compile(r"[a-z]([a-z0-9-]{0,46}[a-z0-9])?")
_QUANTITY = re.compile(r"\d+(\.\d+)?[kMGTP]i?")
"""With a unit: `64` alone would be 64 bytes."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Options of this scheduler alone."""

    namespace: str | None = None
    queue: str | None = None
    """The local queue of Kueue."""
    pvc: str | None = None
    """CLAIM or CLAIM:/PATH: a volume that all machines share. The command runs in it."""
    shm: str | None = None
    """The size of /dev/shm. None: as much as the memory of the pod."""
    runtime: str = "torch-distributed"
    """The training runtime of a TrainJob."""
    grace: int = 360
    """Seconds that a pod has to save after it was signalled."""

    @property
    def claim(self) -> tuple[str, str] | None:
        """The name of the volume's claim, and its path in the container."""
        if self.pvc is None:
            return None
        name, _, path = self.pvc.partition(":")
        return name, path or "/workspace"

    def check(self) -> Iterator[Problem]:
        """Find names that Kubernetes does not accept."""
        for flag in ("namespace", "queue", "runtime"):
            value = getattr(self, flag)
            if value is not None and not _LABEL.fullmatch(value):
                yield wrong_name(f"--{flag}", value)
        if self.claim is not None:
            name, path = self.claim
            if not _LABEL.fullmatch(name) or not re.fullmatch(r"/[\w./-]*", path):
                what = f"--pvc must be CLAIM or CLAIM:/PATH, got {(self.pvc or '')[:80]!r}"
                yield Problem("J021", what, "--pvc my-claim:/workspace")
        if self.shm is not None and not _QUANTITY.fullmatch(self.shm):
            yield Problem("J021", f"--shm must be a size such as 16Gi, got {self.shm[:80]!r}", "--shm 16Gi")


def wrong_name(what: str, value: str) -> Problem:
    """The problem of a name that Kubernetes does not accept."""
    text = f"{what} must be up to 48 lower-case letters, digits and dashes, got {value[:80]!r}"
    return Problem("J020", text, f"{what if what.startswith('--') else '--job-name'} my-run")


def _with_unit(memory: str) -> str:
    return f"--memory {memory}Gi" if memory.isdigit() else "--memory 200Gi"


def check_spec(spec: JobSpec) -> Iterator[Problem]:
    """Find what a pod cannot be made of."""
    if not _LABEL.fullmatch(spec.name):
        yield wrong_name("the name of a job", spec.name)
    if spec.memory is not None and not _QUANTITY.fullmatch(spec.memory):
        what = f"--memory must be a size such as 200Gi, got {spec.memory[:80]!r}"
        yield Problem("J021", what, _with_unit(spec.memory))


def labels(spec: JobSpec) -> Tree:
    """Labels by which the objects of a job are found."""
    return {"app.kubernetes.io/managed-by": "shoal", "app.kubernetes.io/instance": spec.name}


def command(spec: JobSpec, rank: str, master: str, *, directory: str | None = None) -> list[str]:
    """The command of a container. `directory`: change to it first."""
    words = [*spec.program, "launch", "node", RECIPE, "--nodes", str(spec.nodes), "--rank", rank, "--master", master]
    words += ["--port", str(PORT), "--slots", str(spec.ranks_per_node), *map(_literal, spec.words[1:])]
    if not spec.setup and directory is None:
        return words
    lines = [*([f"cd {shlex.quote(directory)}"] if directory else []), *map(_literal, spec.setup)]
    # bash never sees the $(NAME) of rank and master: Kubernetes replaces them before.
    return ["/bin/bash", "-ec", "\n".join([*lines, f"exec {' '.join(_quoted(word) for word in words)}"])]


def _literal(text: str) -> str:
    """A text in which Kubernetes replaces nothing: it reads `$$` as `$`, and `$(NAME)` as a variable."""
    return text.replace("$", "$$")


def _quoted(word: str) -> str:
    return word if re.fullmatch(r"\$\(\w+\)", word) else shlex.quote(word)


def env(spec: JobSpec) -> list[Tree]:
    """The variables of a container: the key of the run, from a secret, and those of the job."""
    key = {"secretKeyRef": {"name": f"{spec.name}-key", "key": "SHOAL_KEY"}}
    return [{"name": "SHOAL_KEY", "valueFrom": key}, *({"name": k, "value": _literal(v)} for k, v in spec.env.items())]


def resources(spec: JobSpec) -> Tree:
    """CPU cores, memory and GPUs of a pod."""
    found: Tree = {}
    if spec.cpus is not None:
        found["cpu"] = str(spec.cpus * spec.ranks_per_node)
    if spec.memory is not None:
        found["memory"] = spec.memory
    limits = {**found, **({"nvidia.com/gpu": str(spec.gpus)} if spec.gpus else {})}
    return {key: value for key, value in (("requests", found), ("limits", limits)) if value}


def volumes(spec: JobSpec, cluster: Cluster) -> tuple[list[Tree], list[Tree]]:
    """Volumes of the pod, and where the container mounts them."""
    memory = {"medium": "Memory", **({"sizeLimit": cluster.shm} if cluster.shm else {})}
    found: list[Tree] = [
        {"name": "shm", "emptyDir": memory},  # the default of 64 MB is too small for data workers and NCCL
        {"name": "recipe", "configMap": {"name": f"{spec.name}-recipe"}},
    ]
    mounts: list[Tree] = [
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "recipe", "mountPath": RECIPE.rpartition("/")[0], "readOnly": True},
    ]
    if cluster.claim is not None:
        name, path = cluster.claim
        found.append({"name": "shared", "persistentVolumeClaim": {"claimName": name}})
        mounts.append({"name": "shared", "mountPath": path})
    return found, mounts


def pod_template(spec: JobSpec, cluster: Cluster, master: str, *, subdomain: str | None) -> Tree:
    """The template of the pods of an indexed job."""
    found, mounts = volumes(spec, cluster)
    container: Tree = {
        "name": CONTAINER,
        "image": spec.image,
        "command": command(spec, "$(JOB_COMPLETION_INDEX)", master),
        "env": env(spec),
        "resources": resources(spec),
        "volumeMounts": mounts,
    }
    if cluster.claim is not None:
        container["workingDir"] = cluster.claim[1]
    pod: Tree = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": cluster.grace,
        "containers": [container],
        "volumes": found,
    }
    if subdomain is not None:
        pod["subdomain"] = subdomain
    return {"metadata": {"labels": labels(spec)}, "spec": pod}
