"""The objects of a job: an Indexed Job with its Service, a JobSet, or a TrainJob of Kubeflow.

kind       needs                     machine 0 is found by
job        nothing                   NAME-0.NAME, by a headless Service
jobset     JobSet                    NAME-node-0-0.NAME, by the Service of the JobSet
trainjob   Kubeflow Trainer 2.2      PET_MASTER_ADDR, which its runtime torch-distributed sets
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from shoal.jobs.kubernetes.pod import (
    CONTAINER,
    Cluster,
    Tree,
    command,
    env,
    labels,
    pod_template,
    resources,
    volumes,
)
from shoal.jobs.spec import PORT, JobSpec
from shoal.jobs.yaml_text import dump

Kind = Literal["job", "jobset", "trainjob"]
RESOURCES: Mapping[str, str] = {
    "job": "jobs.batch",
    "jobset": "jobsets.jobset.x-k8s.io",
    "trainjob": "trainjobs.trainer.kubeflow.org",
}
"""Kind → its name for kubectl."""
QUEUE = "kueue.x-k8s.io/queue-name"


def render(spec: JobSpec, cluster: Cluster, kind: Kind, *, recipe: str) -> list[Tree]:
    """All objects of a job; the first is the one that runs. The secret with the key is not among them."""
    make = {"job": _job, "jobset": _jobset, "trainjob": _trainjob}[kind]
    found = [make(spec, cluster), _recipe(spec, recipe)]
    if kind == "job":
        found.append(_service(spec))
    for each in found:
        if cluster.namespace is not None:
            each["metadata"]["namespace"] = cluster.namespace
    return found


def spell(objects: list[Tree], spec: JobSpec, submit: str) -> str:
    """The YAML of a job, with the command that makes its secret."""
    namespace = objects[0]["metadata"].get("namespace")
    of = f" --namespace {namespace}" if namespace else ""
    lines = [
        f"# Written by: {submit}" if submit.isprintable() else "# Written by: shoal launch k8s",
        "# The key of the run: other processes on the network cannot join it. Once, before this file:",
        f"# openssl rand -hex 32 | kubectl create secret generic {spec.name}-key{of} --from-file=SHOAL_KEY=/dev/stdin",
        dump(objects),
    ]
    return "\n".join(lines)


def secret(spec: JobSpec, cluster: Cluster, key: str) -> Tree:
    """The secret with the key of the run."""
    metadata = {
        **_metadata(spec, f"{spec.name}-key"),
        **({"namespace": cluster.namespace} if cluster.namespace else {}),
    }
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"SHOAL_KEY": key}}


def _metadata(spec: JobSpec, name: str, cluster: Cluster | None = None) -> Tree:
    queue = {QUEUE: cluster.queue} if cluster is not None and cluster.queue is not None else {}
    return {"name": name, "labels": {**labels(spec), **queue}}


def _recipe(spec: JobSpec, text: str) -> Tree:
    metadata = _metadata(spec, f"{spec.name}-recipe")
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"recipe.yaml": text}}


def _service(spec: JobSpec) -> Tree:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(spec, spec.name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # machines find each other while they start
            "selector": {"job-name": spec.name},
            "ports": [{"name": "coordinator", "port": PORT}],
        },
    }


def _job_spec(spec: JobSpec, cluster: Cluster, master: str, *, subdomain: str | None) -> Tree:
    rules: list[Tree] = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": _codes(130, 143)},  # saved and stopped; stopped with nothing to save
        {"action": "FailJob", "onExitCodes": _codes(2)},  # a mistake in the recipe
    ]
    found: Tree = {
        "completions": spec.nodes,
        "parallelism": spec.nodes,
        "completionMode": "Indexed",
        "backoffLimitPerIndex": spec.max_failures,
        "maxFailedIndexes": 0,
        "podFailurePolicy": {"rules": rules},
        "podReplacementPolicy": "Failed",  # two pods of one machine would write at once
    }
    if spec.seconds is not None:
        found["activeDeadlineSeconds"] = spec.seconds
    return {**found, "template": pod_template(spec, cluster, master, subdomain=subdomain)}


def _codes(*codes: int) -> Tree:
    return {"containerName": CONTAINER, "operator": "In", "values": list(codes)}


def _job(spec: JobSpec, cluster: Cluster) -> Tree:
    job = _job_spec(spec, cluster, f"{spec.name}-0.{spec.name}", subdomain=spec.name)
    if cluster.queue is not None:
        job = {"suspend": True, **job}  # Kueue starts it when there is room for all machines
    metadata = _metadata(spec, spec.name, cluster)
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job}


def _jobset(spec: JobSpec, cluster: Cluster) -> Tree:
    job = _job_spec(spec, cluster, f"{spec.name}-node-0-0.{spec.name}", subdomain=None)
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(spec, spec.name, cluster),
        "spec": {
            **({"suspend": True} if cluster.queue is not None else {}),
            "network": {"enableDNSHostnames": True, "subdomain": spec.name, "publishNotReadyAddresses": True},
            "failurePolicy": {
                "maxRestarts": spec.max_failures,
                "rules": [{"name": "badInput", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "replicatedJobs": [{"name": CONTAINER, "replicas": 1, "template": {"spec": job}}],
        },
    }


def _trainjob(spec: JobSpec, cluster: Cluster) -> Tree:
    directory = None if cluster.claim is None else cluster.claim[1]
    found, mounts = volumes(spec, cluster)
    patch = {
        "terminationGracePeriodSeconds": cluster.grace,
        "volumes": found,
        "containers": [{"name": CONTAINER, "volumeMounts": mounts}],
    }
    trainer: Tree = {
        "image": spec.image,
        "numNodes": spec.nodes,
        "command": command(spec, "$(PET_NODE_RANK)", "$(PET_MASTER_ADDR)", directory=directory),
        "env": env(spec),
        "resourcesPerNode": resources(spec),
    }
    jobs = [{"name": CONTAINER, "template": {"spec": {"template": {"spec": patch}}}}]
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(spec, spec.name, cluster),
        "spec": {
            **({"suspend": True} if cluster.queue is not None else {}),
            **({"activeDeadlineSeconds": spec.seconds} if spec.seconds is not None else {}),
            "runtimeRef": {"name": cluster.runtime},
            "trainer": trainer,
            "runtimePatches": [
                {"manager": "shoal.dev/launch", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}
            ],
        },
    }
