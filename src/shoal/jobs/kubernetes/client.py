"""Submit, list and delete jobs by kubectl."""

from __future__ import annotations

import json
import re
import secrets
import shlex
from collections.abc import Iterator
from typing import Any

from shoal.errors import ShoalError
from shoal.jobs.kubernetes.objects import RESOURCES, secret
from shoal.jobs.kubernetes.pod import Cluster, Tree
from shoal.jobs.programs import Answer, checked, require, run
from shoal.jobs.spec import JobSpec

SELECTOR = "app.kubernetes.io/managed-by=shoal"


def submit(objects: list[Tree], spec: JobSpec, cluster: Cluster) -> str:
    """Create the objects of a job; returns its name. The API server rejects a second job of the same name."""
    require("kubectl", instead="leave --submit out: the file is printed")
    job, *others = objects
    answer = run("kubectl", "create", "-f", "-", stdin=json.dumps(job))
    if _exists(answer):
        raise ShoalError(
            f"the same job is submitted already: {job['kind']} {spec.name} exists",
            fix=f"shoal launch status {spec.name}; shoal launch cancel {spec.name}, or --job-name ANOTHER",
            code="J012",
        )
    if answer.code != 0:
        what = f"Kubernetes rejected the job, and nothing was submitted: {answer.reason}"
        raise ShoalError(what, fix=_fix(answer.reason), code="J022")
    _create_beside([*others, secret(spec, cluster, secrets.token_hex(32))], job, cluster)
    return spec.name


def _create_beside(others: list[Tree], job: Tree, cluster: Cluster) -> None:
    """Create what belongs to a job. An object of the same name is somebody's: it is left as it is, and what was created
    is deleted."""
    name, of = job["metadata"]["name"], _of(cluster.namespace)
    beside = {"apiVersion": "v1", "kind": "List", "items": others}
    answer = run("kubectl", "create", "--output", "name", "-f", "-", stdin=json.dumps(beside))
    if _exists(answer):
        created = [f"{RESOURCES[job['kind'].lower()]}/{name}", *answer.out.split()]
        words = ["kubectl", "delete", "--wait=false", *created, *of]
        checked(words, fix=f"{shlex.join(words)}; then --job-name ANOTHER")
        left = f"if `shoal launch status` has no job {name}: {shlex.join(_delete_beside(name, of))}"
        raise ShoalError(
            f"the job {name} was not submitted, because an object of its name exists: {answer.reason}",
            fix=f"--job-name ANOTHER; or, {left}",
            code="J032",
        )
    if answer.code != 0:
        raise ShoalError(
            f"the job {name} was created, and what belongs to it was not: {answer.reason}",
            fix=f"shoal launch cancel {name}, then the same command",
            code="J023",
        )


def _exists(answer: Answer) -> bool:
    return answer.code != 0 and re.search(r"AlreadyExists|already exists", answer.err) is not None


def _fix(reason: str) -> str:
    if "no matches for kind" in reason:
        return "--kind job, which every cluster has; or install JobSet or Kubeflow Trainer"
    if "orbidden" in reason:
        return "--namespace one in which you may create jobs (`kubectl auth can-i create jobs -n NAMESPACE`)"
    return "kubectl cluster-info; then the command with other options"


def list_jobs(namespace: str | None = None) -> Iterator[dict[str, str]]:
    """The jobs that shoal has submitted, in all kinds that this cluster knows."""
    require("kubectl", instead="`shoal launch slurm`")
    for kind, resource in RESOURCES.items():
        answer = run("kubectl", "get", resource, "--selector", SELECTOR, "--output", "json", *_of(namespace))
        if answer.code == 0:
            for item in json.loads(answer.out or "{}").get("items", []):
                name = item["metadata"]["name"]
                yield {"id": name, "kind": kind, "state": _state(item), "name": name}
        elif kind == "job":  # every cluster has these
            raise ShoalError(f"kubectl failed: {answer.reason}", fix="kubectl cluster-info", code="J011")


def _state(item: dict[str, Any]) -> str:
    status = item.get("status", {})
    met = [each["type"] for each in status.get("conditions", []) if each.get("status") == "True"]
    if met:
        return str(met[-1]).upper()
    return f"RUNNING ({status['active']} pods)" if status.get("active") else "PENDING"


def _of(namespace: str | None) -> list[str]:
    return [] if namespace is None else ["--namespace", namespace]


def find_job(name: str, namespace: str | None = None) -> list[dict[str, str]]:
    """The job of this name; raises if shoal has submitted none."""
    found = [job for job in list_jobs(namespace) if job["id"] == name]
    if not found:
        what = f"Kubernetes lists no job {name} that shoal has submitted"
        raise ShoalError(what, fix="shoal launch status", code="J024")
    return found


def cancel_job(name: str, namespace: str | None = None) -> None:
    """Delete a job with all its objects. Its pods save first, within their grace period."""
    of = _of(namespace)
    for job in find_job(name, namespace):
        checked(["kubectl", "delete", RESOURCES[job["kind"]], name, "--wait=false", *of], fix="kubectl get jobs")
    checked(_delete_beside(name, of), fix="kubectl get secrets")


def _delete_beside(name: str, of: list[str]) -> list[str]:
    """The command that deletes what belongs to a job, by its labels: no object of others."""
    selector = f"{SELECTOR},app.kubernetes.io/instance={name}"
    return ["kubectl", "delete", "service,configmap,secret", "--selector", selector, *of]


def logs_command(name: str, lines: int, namespace: str | None = None) -> list[str]:
    """The command that prints the last lines of all pods of a job; 0: all."""
    require("kubectl", instead="`shoal launch logs` there")
    selector = f"{SELECTOR},app.kubernetes.io/instance={name}"
    words = ["kubectl", "logs", "--selector", selector, "--prefix", f"--tail={lines or -1}", "--max-log-requests=100"]
    return [*words, *_of(namespace)]


def logs_of(name: str, lines: int, namespace: str | None = None) -> str:
    """The last lines of all pods of a job; 0: all."""
    return checked(logs_command(name, lines, namespace), fix=f"shoal launch status {name}")
