"""`shoal launch slurm`: the script as text, every mistake in one message, and nothing submitted twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import main
from shoal.jobs.slurm.script import SlurmSite, mark_of, render
from shoal.jobs.spec import JobSpec
from shoal.jobs.time_limit import read_time, spell_time
from tests.rejects import rejects

RECIPE = """
model: {name: llama, preset: tiny}
data: {source: synthetic, global_batch: 32}
launch: {nproc: 2}
run: {name: small}
plan: zero=1
"""

SCRIPT = """\
#!/bin/bash
# Written by: shoal launch slurm small.yaml
#SBATCH --job-name=small
#SBATCH --partition=gpu
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=1-00:00:00
#SBATCH --chdir=/home/me
#SBATCH --output=jobs/%x-%j.log
#SBATCH --open-mode=append
# To the ranks, so that they save before the time is over:
#SBATCH --signal=USR1@300
# Also after a node has failed:
#SBATCH --requeue
#SBATCH --comment=shoal:0123

set -e

source venv/bin/activate

export A='1 2'

# The key of this run: other processes on the network cannot join it.
SHOAL_KEY=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
export SHOAL_KEY

restarts=${SLURM_RESTART_COUNT:-0}
if (( restarts > 3 )); then
    echo "shoal: the job was started $restarts times again, of at most 3" >&2
    exit 1
fi

code=0
srun --export=ALL --kill-on-bad-exit=0 --wait=60 shoal train small.yaml --optim.lr 1e-3 || code=$?

# The time is nearly over, or the job is preempted. 130: the run has saved and stopped;
# 138 and 143: USR1 or TERM came before its first step.
# 2 is a mistake in the recipe. Anything else is a failure, such as a lost node or a killed rank.
case "$code" in
    0 | 2) again=0 ;;
    130 | 138 | 143) again=1 ;;
    *)
        failures=jobs/"$SLURM_JOB_NAME-$SLURM_JOB_ID.failures"
        echo "exit code $code" >> "$failures"
        (( again = $(wc -l < "$failures") <= 3 )) || true ;;
esac
if (( again && restarts < 3 )); then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def test_the_script() -> None:
    spec = JobSpec(
        name="small",
        words=("small.yaml", "--optim.lr", "1e-3"),
        nodes=4,
        gpus=8,
        ranks_per_node=8,
        seconds=86400,
        max_requeues=3,
        env={"A": "1 2"},
        setup=("source venv/bin/activate",),
    )
    site = SlurmSite(partition="gpu")
    command = "shoal launch slurm small.yaml"
    assert render(spec, site, directory="/home/me", command=command, mark="shoal:0123") == SCRIPT
    marks = {mark_of(spec, site, directory="/home/me", recipe=text) for text in ("a", "a", "b")}
    assert len(marks) == 2  # a changed recipe is another job


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("1:30", 90), ("24:00:00", 86400), ("2-12", 216000), ("1-2:30", 95400), ("0-0:0:1", 1)],
)
def test_time_limits(text: str, seconds: int) -> None:
    assert read_time(text) == seconds
    assert read_time(spell_time(seconds)) == seconds


@pytest.mark.parametrize("text", ["", "a day", "0", "1:60", "1-24", "24h", "-1", "1:2:3:4", "999999999"])
def test_malformed_time_limits(text: str) -> None:
    with rejects("J003", repr(text)):
        read_time(text)


@pytest.mark.parametrize(
    ("code", "restarts", "failures", "is_requeued"),
    [(0, 0, 0, False), (2, 0, 0, False), (130, 0, 9, True), (130, 3, 0, False), (138, 1, 0, True), (143, 0, 0, True),
     (3, 0, 0, True), (137, 0, 2, True), (3, 0, 3, False)],
)  # fmt: skip
def test_which_exit_codes_are_requeued(
    code: int, restarts: int, failures: int, is_requeued: bool, tmp_path: Path
) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "small-7.failures").write_text("exit code 3\n" * failures)
    program(tmp_path, "srun", f"exit {code}")
    program(tmp_path, "scontrol", 'echo "$@" > requeued')
    script = SCRIPT.replace("source venv/bin/activate", "")
    environ = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "small"}
    environ["SLURM_RESTART_COUNT"] = str(restarts)
    ended = subprocess.run(["bash"], input=script, text=True, cwd=tmp_path, env=environ, check=False)
    assert ended.returncode == code
    assert (tmp_path / "requeued").exists() == is_requeued


def test_a_job_of_an_array_requeues_itself_alone(tmp_path: Path) -> None:
    """The last job of an array has the number of the whole array."""
    spec = JobSpec(name="small", words=("small.yaml",), variants=(("--optim.lr", "1"), ("--optim.lr", "2")))
    program(tmp_path, "srun", "exit 130")
    program(tmp_path, "scontrol", 'echo "$@" > requeued')
    script = render(spec, SlurmSite(), directory="/home/me", command="", mark="")
    environ = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}
    environ["PATH"] = f"{tmp_path}/bin:/usr/bin:/bin"
    subprocess.run(["bash"], input=script, text=True, cwd=tmp_path, env=environ, check=False)
    assert (tmp_path / "requeued").read_text() == "requeue 7_1\n"


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────

GPUS = ["--nodes", "4", "--gpus", "8"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "small.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def launch(*words: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, Any]:
    assert main(["launch", *words, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def codes(found: dict[str, Any]) -> list[str]:
    return [problem["code"] for problem in found["error"]["problems"]]


def program(folder: Path, name: str, text: str) -> None:
    """A program of the site, with an answer that the test chooses."""
    (folder / "bin").mkdir(exist_ok=True)
    path = folder / "bin" / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_settings_and_sweeps_reach_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*GPUS, "--optim.lr", "1e-3", "--plan", "zero=2 mb=1", "--array", "run.seed=0,1", "--array=optim.clip=1,2"]
    words += ["--max-requeues", "0"]
    script = launch("slurm", "small.yaml", *words, "--env", "A=1", "--env=B=x y", capsys=capsys)["script"]
    assert (
        f"{sys.executable} -m shoal train small.yaml --optim.lr 1e-3 --plan 'zero=2 mb=1' \"${{chosen[@]}}\"" in script
    )
    assert "#SBATCH --array=0-3\n" in script
    assert "    2) chosen=(--run.seed 1 --optim.clip 1 --run.dir runs/small-array/2) ;;" in script
    assert "export A=1\nexport B='x y'\n" in script
    assert "if (( restarts > 0 )); then" in script
    subprocess.run(["/bin/bash", "-n"], input=script, text=True, check=True)


def test_a_config_of_deepspeed_becomes_settings_of_the_command(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "zero_optimization": {"stage": 1}}
    (folder / "ds.json").write_text(json.dumps(config))
    words = ["small.yaml", *GPUS, "--deepspeed", "ds.json", "--optim.lr", "1e-3"]
    script = launch("slurm", *words, capsys=capsys)["script"]
    assert " train small.yaml --plan.mb 2 " in script
    assert " --plan.zero 1 --data.global_batch 192 --optim.lr 1e-3 ||" in script  # of 32 ranks
    subprocess.run(["/bin/bash", "-n"], input=script, text=True, check=True)
    (folder / "ds.json").write_text(json.dumps({**config, "train_batch_size": 100}))
    assert codes(launch("slurm", *words, capsys=capsys, code=2)) == ["E006"]


@pytest.mark.parametrize("memory", ["0", "1024", "200G", "200gb", "1T"])
def test_sizes_that_slurm_reads(memory: str) -> None:
    assert not list(SlurmSite().check(memory))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--container", "img.sif"], 'apptainer exec --nv --bind "$PWD" --pwd "$PWD" img.sif \\\n    shoal train'),
        (["--container", "a/b:1"], '--container-image=a/b:1 --container-mounts="$PWD:$PWD" --container-workdir="$PWD"'),
        (["--container", "a/b:1", "--runtime", "apptainer"], "a/b:1 \\\n    shoal train"),
    ],
)
def test_containers(words: list[str], expected: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = launch("slurm", "small.yaml", *GPUS, *words, capsys=capsys)["script"]
    assert expected in script
    subprocess.run(["/bin/bash", "-n"], input=script, text=True, check=True)


def test_variables_win_over_those_of_an_image(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["small.yaml", *GPUS, "--env", "A=1", "--env", "B=x,y z"]
    script = launch("slurm", *words, "--container", "a/b:1", capsys=capsys)["script"]
    assert " --container-env=A,B " in script
    assert "APPTAINERENV" not in script
    script = launch("slurm", *words, "--container", "img.sif", capsys=capsys)["script"]
    assert "export A=1\nexport B='x,y z'\nexport APPTAINERENV_A=1\nexport APPTAINERENV_B='x,y z'\n" in script


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--time", "a day"], ["J003"]),
        (["--time", "1", "--stop-before", "60"], ["J004"]),
        (["--nodes", "0"], ["J001"]),
        (["--env", "A"], ["J005"]),
        (["--array", "optim.lr"], ["J006"]),
        (["--array", "run.dir=a,b"], ["J006"]),  # each job has a directory of its own
        (["--ranks-per-node", "4"], ["J007"]),  # four of eight GPUs would be idle
        (["--nproc", "4"], ["J009"]),  # a job has 32 ranks
        (["--array", "optim.lr=1,2", "--array", "optim.lr=3"], ["J006"]),
        (["--partition", "a b", "--job-name", "x y", "--sbatch", "hello"], ["J002", "J002", "J002"]),
        (["--sbatch=--constraint=a --array=0-3", "--sbatch=--arr 0-3", "--sbatch=--bb=x-array"], ["J002", "J002"]),
        (["--memory", "1G\ntouch broken"], ["J021"]),
        (["--memory", "200Gi"], ["J021"]),  # of Kubernetes
        (["--memory", "1.5G", "--folder", "a%j", "--qos", "a\n", "--account", "a\r"], ["J002", "J002", "J002", "J021"]),
        (["--array", "optim.lr=1,2", "--at-once", "0"], ["J001"]),
        (["--launch.device", "cpu"], ["J007"]),
        (["--run.overwrite"], ["J008"]),
        (["--runtime", "pyxis", "--at-once", "2"], ["J009", "J009"]),
        (["--plan", "tp=3"], ["P009"]),  # of 32 ranks
        (["--data.global_batch", "33"], ["P011"]),
        (["--array", "data.global_batch=32,33"], ["P011"]),
        (["--optim.lrr", "1", "--time", "x"], ["J003", "R011"]),  # all at once
        (["--submit", "--unchecked"], ["J010"]),
    ],
)
def test_every_mistake_is_one_message(
    words: list[str], expected: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = launch("slurm", "small.yaml", *GPUS, *words, capsys=capsys, code=2)
    assert sorted(codes(found)) == sorted(expected), found


@pytest.mark.parametrize(
    ("name", "is_rejected"), [("a\\b", True), ("a%jb", True), ("a\nb", True), ("it's a $b", False)]
)
def test_directories_that_sbatch_misreads(
    name: str, is_rejected: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / name).mkdir()
    monkeypatch.chdir(folder / name)
    found = launch("slurm", "../small.yaml", *GPUS, capsys=capsys, code=2 if is_rejected else 0)
    assert not is_rejected or codes(found) == ["J033"]


def test_a_plan_that_does_not_fit_is_mended_by_other_machines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (problem,) = launch("slurm", "small.yaml", *GPUS, "--plan", "tp=3", capsys=capsys, code=2)["error"]["problems"]
    assert problem["fix"] == "tp=1, 2, 4, 8, 16 or 32, or --nodes and --gpus with 30 or 33 ranks in all"


def test_a_recipe_and_gpus_are_needed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert codes(launch("slurm", "--gpus", "8", capsys=capsys, code=2)) == ["R054"]
    assert codes(launch("slurm", "small.yaml", capsys=capsys, code=2)) == ["J007"]
    assert codes(launch("slurm", "no-such.yaml", *GPUS, capsys=capsys, code=2)) == ["R006"]


def submit(folder: Path, capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    return launch("slurm", "small.yaml", *GPUS, "--submit", "--unchecked", *words, capsys=capsys, code=code)


def test_a_job_is_submitted_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    queue, count = folder / "queue", folder / "count"
    program(folder, "squeue", f"/bin/cat {queue}")
    program(folder, "sbatch", f'echo x >> {count}; m=$(/bin/sed -n s/.*--comment=//p "$2"); echo "4711|PENDING|Resources|$m|small|0:00|" > {queue}; echo 4711')  # fmt: skip # noqa: E501
    queue.write_text("")
    found = submit(folder, capsys)
    assert (found["job"], found["state"], found["reason"]) == ("4711", "PENDING", "Resources")
    (recipe,) = (folder / "jobs").glob("*.yaml")
    assert recipe.read_text() == RECIPE  # a copy: later changes are for later jobs
    assert f"train jobs/{recipe.name}" in Path(found["script"]).read_text()
    same = submit(folder, capsys, code=2)
    assert codes(same) == ["J012"]
    assert "4711 is pending (Resources)" in same["error"]["problems"][0]["what"]
    submit(folder, capsys, "--again")
    (folder / "small.yaml").write_text(RECIPE.replace("zero=1", "zero=2"))
    submit(folder, capsys)
    assert count.read_text().count("x") == 3


@pytest.mark.parametrize(
    ("answer", "code", "fix"),
    [
        ("sbatch: error: invalid partition specified: gpu", "J013", "--partition"),
        (
            "sbatch: error: Batch job submission failed: Requested node configuration is not available",
            "J013",
            "--nodes",
        ),
        ("sbatch: error: Batch job submission failed: Job violates accounting/QOS policy", "J013", "--account"),
        ("sbatch: error: QOSMaxSubmitJobPerUserLimit", "J013", "--qos"),
        ("sbatch: error: Unable to contact slurm controller (connect failure)", "J013", "scontrol ping"),
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", "J014", "status"),
    ],
)
def test_sbatch_rejects(answer: str, code: str, fix: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program(folder, "squeue", "")
    program(folder, "sbatch", f"echo '{answer}' >&2; exit 1")
    (problem,) = submit(folder, capsys, code=2)["error"]["problems"]
    assert problem["code"] == code
    assert answer in problem["what"]
    assert fix in problem["fix"]


def test_a_job_whose_answer_was_lost_is_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    queue = folder / "queue"
    queue.write_text("")
    program(folder, "squeue", f"/bin/cat {queue}")
    program(folder, "sbatch", f'm=$(/bin/sed -n s/.*--comment=//p "$2"); echo "7|PENDING|None|$m|small|0:00|" > {queue}; echo "Socket timed out" >&2; exit 1')  # fmt: skip # noqa: E501
    assert submit(folder, capsys)["job"] == "7"


def test_pyxis_is_looked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program(folder, "srun", "echo usage")
    program(folder, "sbatch", "exit 1")
    assert codes(submit(folder, capsys, "--container", "a/b", code=2)) == ["J017"]


# ── status, logs, cancel ─────────────────────────────────────────────────────────────────────────────────────────────


def test_jobs_of_others_are_not_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        "1|RUNNING|None|shoal:aa|one|1:00|n[1-2]",
        "2|RUNNING|None|mine|two|1:00|n3",
        "3_0|COMPLETED|None|shoal:b|x|9|",
    ]
    program(folder, "squeue", "\n".join(f"echo '{line}'" for line in lines))
    program(folder, "scancel", f"echo $1 > {folder}/cancelled")
    assert [job["id"] for job in launch("status", capsys=capsys)["jobs"]] == ["1", "3_0"]
    assert codes(launch("cancel", "2", capsys=capsys, code=2)) == ["J016"]
    assert codes(launch("cancel", "3", capsys=capsys, code=2)) == ["J019"]
    assert not (folder / "cancelled").exists()
    assert launch("cancel", "1", capsys=capsys) == {"cancelled": "1"}
    assert (folder / "cancelled").read_text() == "1\n"
    assert main(["launch", "status"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "1    one   running    1:00  n[1-2]"


def test_logs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert codes(launch("logs", "5", capsys=capsys, code=2)) == ["J018"]
    assert codes(launch("logs", "../5", capsys=capsys, code=2)) == ["J016"]
    assert codes(launch("status", capsys=capsys, code=2)) == ["J010"]
    os.makedirs("jobs")
    Path("jobs/a-5_0.log").write_text("1\n2\n3\n")
    assert launch("logs", "5", "--lines", "2", capsys=capsys)["logs"] == {"jobs/a-5_0.log": "2\n3\n"}


def test_the_actions_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch"]) == 0
    assert "slurm" in capsys.readouterr().out
    assert codes(launch("slrum", capsys=capsys, code=2)) == ["R001"]


def test_nothing_imports_torch(folder: Path) -> None:
    check = "import sys; from shoal.cli import main; main(['launch', 'slurm', 'small.yaml', '--gpus', '2']); "
    check += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True, stdout=subprocess.DEVNULL, timeout=60)
