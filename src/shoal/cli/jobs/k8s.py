"""`shoal launch k8s RECIPE`: print the objects of a Kubernetes job, or submit them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shoal.cli.jobs.request import JobOptions, check_no_requeues, checked_request, read_options
from shoal.config.recipe import Recipe
from shoal.errors import Problem
from shoal.jobs.kubernetes.client import submit
from shoal.jobs.kubernetes.objects import render, spell
from shoal.jobs.kubernetes.pod import Cluster, check_spec
from shoal.jobs.spec import JobSpec

PROG = "shoal launch k8s"
GRACE = 60
"""Seconds of the grace period beyond that of shoal itself, in which a pod saves."""


@dataclass(frozen=True, kw_only=True)
class Kubernetes(JobOptions):
    """Write the objects of a Kubernetes job that trains a recipe, a pod on each machine. Pods that are evicted save
    first, and all of them start again. Settings of the recipe may follow.

    shoal launch k8s recipes/tiny.yaml --nodes 4 --gpus 8 --image registry/shoal:1 --pvc runs
    """

    image: str | None = None
    """The image of the container, which has shoal."""

    kind: Literal["job", "jobset", "trainjob"] = "job"
    """job: an Indexed Job with a headless Service. jobset: a JobSet. trainjob: a TrainJob of Kubeflow Trainer."""

    namespace: str | None = None
    """The namespace. None: that of kubectl."""

    queue: str | None = None
    """The local queue of Kueue."""

    pvc: str | None = None
    """CLAIM or CLAIM:/PATH: a volume that all machines share, for runs and data. The command runs in it."""

    shm: str | None = None
    """The size of /dev/shm, which is in memory, such as 16Gi. None: no limit but the memory of the pod."""

    stop_before: int = 300
    """Seconds that a pod has to save after it was signalled."""


def main(arguments: Sequence[str]) -> int:
    """Print or submit a job."""
    options, reading = read_options(Kubernetes, arguments, prog=PROG)
    recipe = reading.recipe
    cluster = Cluster(
        namespace=options.namespace,
        queue=options.queue,
        pvc=options.pvc,
        shm=options.shm,
        grace=max(options.stop_before, int(recipe.launch.grace_period) + GRACE),
    )
    options = replace(options, job_name=options.job_name or _name_of(recipe))
    request = checked_request(
        options,
        reading,
        arguments,
        prog=PROG,
        problems=[*cluster.check(), *_check(options)],
        image=options.image,
        stop_before=0,
    )
    assert options.recipe is not None
    objects = render(request.spec, cluster, options.kind, recipe=options.recipe.read_text())
    if options.pvc is None and recipe.checkpoint.dir is None:
        print("shoal: without --pvc, checkpoints are lost with their pods", file=sys.stderr)
    if options.submit and not options.dry_run:
        name = submit(objects, request.spec, cluster)
        print(json.dumps({"job": name}) if options.json else f"job {name} is submitted")
        return 0
    print(json.dumps({"objects": objects}) if options.json else spell(objects, request.spec, request.command), end="")
    return 0


def _name_of(recipe: Recipe) -> str:
    """The name of the run, as Kubernetes spells names."""
    return re.sub(r"[^a-z0-9-]+", "-", recipe.run.name.lower()).strip("-") or "run"


def _check(options: Kubernetes) -> Iterator[Problem]:
    if options.image is None:
        yield Problem("J025", f"{PROG} needs --image, a container image that has shoal", "--image registry/shoal:1")
    if options.again:
        what = "--again has no effect on Kubernetes, where the name of a job is unique"
        yield Problem("J009", what, "--job-name ANOTHER")
    yield from check_no_requeues(options, PROG)
    yield from check_spec(JobSpec(name=options.job_name or "run", words=(), memory=options.memory))
