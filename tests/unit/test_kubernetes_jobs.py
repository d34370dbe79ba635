"""`shoal launch k8s`, `skypilot`, `dstack` and `node`: the files, every mistake in one message, one job of a name."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.cli import main
from tests.unit.test_slurm_jobs import GPUS, RECIPE, codes, launch, program

ROOT = Path(__file__).parents[2]
IMAGE = ["--image", "registry/shoal:1"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "small.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def objects(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["launch", "k8s", "small.yaml", *GPUS, *IMAGE, *words]) == 0
    return {each["kind"]: each for each in yaml.safe_load_all(capsys.readouterr().out)}


def test_an_indexed_job(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--pvc", "runs:/data", "--queue", "team", "--shm", "16Gi", "--namespace", "ml", "--time", "1:00:00"]
    found = objects(capsys, *words, "--cpus", "4", "--memory", "200Gi", "--env", "A=$(B)", "--optim.lr", "1e-3")
    assert set(found) == {"Job", "ConfigMap", "Service"}
    job, pod = found["Job"], found["Job"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert {each["metadata"]["namespace"] for each in found.values()} == {"ml"}
    assert (job["spec"]["completions"], job["spec"]["completionMode"], job["spec"]["suspend"]) == (4, "Indexed", True)
    assert job["spec"]["activeDeadlineSeconds"] == 3600
    assert pod["subdomain"] == found["Service"]["metadata"]["name"] == "small"
    assert found["Service"]["spec"]["clusterIP"] == "None"
    assert pod["terminationGracePeriodSeconds"] >= 300
    assert container["resources"]["limits"] == {"cpu": "32", "memory": "200Gi", "nvidia.com/gpu": "8"}
    assert container["env"][1] == {"name": "A", "value": "$$(B)"}  # Kubernetes would replace $(B)
    assert pod["volumes"][0] == {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}
    assert container["workingDir"] == "/data"
    assert found["ConfigMap"]["data"]["recipe.yaml"] == RECIPE
    ends = ["--slots", "8", "--optim.lr", "1e-3"]
    assert container["command"][:4] == ["shoal", "launch", "node", "/etc/shoal/recipe.yaml"]
    assert container["command"][-4:] == ends
    ignored = [
        rule["onExitCodes"]["values"] for rule in job["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule
    ]
    assert ignored == [[130, 143], [2]]


def test_the_example_is_what_its_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / "examples" / "kubernetes.yaml").read_text()
    first = text.partition("\n")[0].removeprefix("# Written by: shoal ")
    assert main(shlex.split(first)) == 0
    assert capsys.readouterr().out == text


def test_the_grace_period_is_longer_than_that_of_the_recipe(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = objects(capsys, "--launch.grace_period", "900")
    assert found["Job"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 960


def test_a_jobset_and_a_trainjob(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = objects(capsys, "--kind", "jobset")
    job = found["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert "small-node-0-0.small" in job["template"]["spec"]["containers"][0]["command"]
    found = objects(capsys, "--kind", "trainjob", "--pvc", "runs", "--setup", "source /venv/bin/activate")
    trainer = found["TrainJob"]["spec"]["trainer"]
    assert trainer["command"][:2] == ["/bin/bash", "-ec"]
    assert trainer["command"][2].startswith("cd /workspace\nsource /venv/bin/activate\nexec shoal launch node ")
    assert "--rank $(PET_NODE_RANK) --master $(PET_MASTER_ADDR)" in trainer["command"][2]


def seen(text: str, variables: dict[str, str]) -> str:
    """The text that a container sees: Kubernetes reads `$$` as `$`, and `$(NAME)` as a variable if there is one."""

    def replaced(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replaced, text)


@pytest.mark.parametrize("kind", ["job", "trainjob"])
def test_kubernetes_changes_no_value(kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = "a$$b$$(A)$(A)$c$"
    words = ["--env", f"A={value}", "--setup", "echo $$ $(A)", "--data.source", value]
    (job,) = (each for name, each in objects(capsys, "--kind", kind, *words).items() if name in ("Job", "TrainJob"))
    spec = job["spec"]
    container = spec["trainer"] if kind == "trainjob" else spec["template"]["spec"]["containers"][0]
    variables = {"A": "!", "PET_NODE_RANK": "1", "JOB_COMPLETION_INDEX": "1"}
    assert [seen(each["value"], variables) for each in container["env"] if each["name"] == "A"] == [value]
    script = seen(container["command"][-1], variables)
    assert script.startswith("echo $$ $(A)\nexec shoal ")
    assert " --rank 1 " in script
    assert script.endswith(f" --data.source {shlex.quote(value)}")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ["J025"]),
        ([*IMAGE, "--job-name", "My Run"], ["J002", "J020"]),
        ([*IMAGE, "--pvc", "a:b", "--shm", "much", "--memory", "lots"], ["J021", "J021", "J021"]),
        ([*IMAGE, "--queue", "A B"], ["J020"]),
        ([*IMAGE, "--again", "--max-requeues", "20"], ["J009", "J009"]),
        ([*IMAGE, "--plan", "tp=3"], ["P009"]),
        ([*IMAGE, "--submit", "--unchecked"], ["J010"]),
    ],
)
def test_every_mistake_is_one_message(
    words: list[str], expected: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = launch("k8s", "small.yaml", *GPUS, *words, capsys=capsys, code=2)
    assert sorted(codes(found)) == expected, found


def submit(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    return launch("k8s", "small.yaml", *GPUS, *IMAGE, "--submit", "--unchecked", *words, capsys=capsys, code=code)


def test_a_job_is_submitted_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = folder / "made"
    exists = "echo 'Error from server (AlreadyExists): jobs.batch \"small\" already exists' >&2; exit 1"
    program(folder, "kubectl", f"[ -s {made} ] && [ $2 = -f ] && {{ {exists}; }}; /bin/cat >> {made}")
    assert submit(capsys) == {"job": "small"}
    job, beside = map(json.loads, made.read_text().replace("}{", "}\n{").splitlines())
    assert job["kind"] == "Job"
    assert [each["kind"] for each in beside["items"]] == ["ConfigMap", "Service", "Secret"]
    assert len(beside["items"][2]["stringData"]["SHOAL_KEY"]) == 64
    assert codes(submit(capsys, code=2)) == ["J012"]


def test_objects_of_others_are_not_replaced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A Service of this name exists: the job and the ConfigMap that were created are deleted, the Service is not."""
    exists = "echo 'Error from server (AlreadyExists): services \"small\" already exists' >&2; exit 1"
    answers = f"case $(/bin/cat) in *List*) echo configmap/small-recipe; {exists};; esac"
    program(folder, "kubectl", f'echo "$@" >> {folder}/calls; [ $1 = delete ] || {answers}')
    (problem,) = submit(capsys, "--namespace", "ml", code=2)["error"]["problems"]
    assert problem["code"] == "J032"
    assert 'services "small" already exists' in problem["what"]
    calls = (folder / "calls").read_text().splitlines()
    assert [call.split()[0] for call in calls] == ["create", "create", "delete"]
    assert calls[2] == "delete --wait=false jobs.batch/small configmap/small-recipe --namespace ml"


@pytest.mark.parametrize(
    ("answer", "fix"),
    [
        ('error: no matches for kind "JobSet" in version "jobset.x-k8s.io/v1alpha2"', "--kind job"),
        ("Error from server (Forbidden): jobs.batch is forbidden", "--namespace"),
        ("The connection to the server localhost:8080 was refused", "kubectl cluster-info"),
    ],
)
def test_kubernetes_rejects(answer: str, fix: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program(folder, "kubectl", f"/bin/cat > /dev/null; echo '{answer}' >&2; exit 1")
    (problem,) = submit(capsys, code=2)["error"]["problems"]
    assert (problem["code"], fix in problem["fix"]) == ("J022", True)
    assert answer in problem["what"]


def test_jobs_are_listed_and_deleted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = {"items": [{"metadata": {"name": "small"}, "status": {"active": 4}}]}
    (folder / "jobs.json").write_text(json.dumps(jobs))
    program(folder, "kubectl", f'echo "$@" >> {folder}/calls; [ "$1 $2" = "get jobs.batch" ] && exec /bin/cat jobs.json; [ $1 != get ]')  # fmt: skip # noqa: E501
    found = launch("status", capsys=capsys)["jobs"]
    assert found == [{"id": "small", "kind": "job", "state": "RUNNING (4 pods)", "name": "small"}]
    assert codes(launch("cancel", "other", capsys=capsys, code=2)) == ["J024"]
    assert "delete" not in (folder / "calls").read_text()
    launch("cancel", "small", "--namespace", "ml", capsys=capsys)
    deleted = [line for line in (folder / "calls").read_text().splitlines() if line.startswith("delete")]
    assert deleted[0] == "delete jobs.batch small --wait=false --namespace ml"
    assert "app.kubernetes.io/instance=small" in deleted[1]
    assert launch("logs", "small", capsys=capsys)["logs"] == {"small": ""}


def test_files_for_clouds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["small.yaml", *GPUS, "--accelerator", "H100", "--setup", "pip install shoal"]
    words += ["--memory", "200G", "--cpus", "4"]
    sky = yaml.safe_load(launch("skypilot", *words, capsys=capsys)["file"])
    assert (sky["num_nodes"], sky["resources"]["accelerators"], sky["secrets"]) == (4, "H100:8", {"SHOAL_KEY": None})
    assert sky["run"].startswith("shoal launch node small.yaml --nodes 4 --slots 8 ")
    assert (sky["resources"]["memory"], sky["resources"]["cpus"]) == ("200+", "32+")
    stack = yaml.safe_load(launch("dstack", *words, "--time", "60", capsys=capsys)["file"])
    assert (stack["resources"]["memory"], stack["resources"]["cpu"]) == ("200GB..", "32..")
    assert (stack["nodes"], stack["resources"]["gpu"], stack["max_duration"]) == (4, "H100:8", "60m")
    assert stack["files"] == ["small.yaml"]
    assert stack["commands"][-1].endswith('--rank $DSTACK_NODE_RANK --master "$DSTACK_MASTER_NODE_IP"')
    assert codes(launch("skypilot", "small.yaml", *GPUS, "--submit", capsys=capsys, code=2)) == ["J026", "J027"]
    assert codes(launch("dstack", *words, "--max-requeues", "3", capsys=capsys, code=2)) == ["J009"]
    assert codes(launch("skypilot", *words, "--time", "60", capsys=capsys, code=2)) == ["J009"]
    assert codes(launch("dstack", *words[:-4], "--memory", "1.5Gi", capsys=capsys, code=2)) == ["J021"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ["R054"]),
        (["small.yaml", "--nodes", "2", "--rank", "2"], ["J031"]),
        (["small.yaml", "--slots", "0"], ["J001"]),
        (["small.yaml", "--nodes", "2", "--rank", "1", "--master", "no-such.invalid", "--wait", "0"], ["J030"]),
    ],
)
def test_mistakes_of_a_node(
    words: list[str], expected: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert codes(launch("node", *words, capsys=capsys, code=3 if expected == ["J030"] else 2)) == expected
