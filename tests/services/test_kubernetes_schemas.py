"""The objects of `shoal launch k8s` against strict schemas of Kubernetes, JobSet and Kubeflow: `make test-k8s`."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import pytest

from shoal.cli import main

pytestmark = pytest.mark.skipif(not os.environ.get("SHOAL_SERVICES"), reason="needs schemas: make test-k8s")

OPTIONS = [
    ["--pvc", "runs:/data"],
    ["--queue", "team"],
    ["--gpus", "8", "--cpus", "4", "--memory", "200Gi", "--shm", "16Gi", "--launch.device", "cuda"],
    ["--time", "24:00:00", "--env", "A=1", "--setup", "source venv/bin/activate", "--namespace", "ml"],
]
CHOICES = [list(itertools.chain(*chosen)) for count in range(5) for chosen in itertools.combinations(OPTIONS, count)]


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
def test_all_options(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="make test-k8s installs it")
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="make test-k8s installs it")
    own = {"JobSet": models.JobsetV1alpha2JobSet, "TrainJob": models.TrainerV1alpha1TrainJob}
    recipe = tmp_path / "small.yaml"
    recipe.write_text("data: {source: synthetic, global_batch: 32}\nlaunch: {device: cpu}\nrun: {name: small}\n")
    assert len(CHOICES) == 16
    for words in CHOICES:
        command = ["launch", "k8s", str(recipe), "--nodes", "2", "--image", "a/b:1", "--kind", kind, *words, "--json"]
        assert main(command) == 0
        for each in json.loads(capsys.readouterr().out)["objects"]:
            if each["kind"] not in own:
                validate.validate(each, "1.32", strict=True)
                continue
            read = own[each["kind"]].from_dict(each)
            # These models read any key. Written again, an unknown one is missing.
            assert json.loads(read.to_json()) == each
            for job in each["spec"].get("replicatedJobs", []):
                made = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **job["template"]}
                validate.validate(made, "1.32", strict=True)


def test_a_wrong_object_is_noticed() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="make test-k8s installs it")
    wrong = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": {"completion": 2}}
    with pytest.raises(validate.ValidationError):
        validate.validate(wrong, "1.32", strict=True)
