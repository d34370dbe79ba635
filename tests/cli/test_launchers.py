"""The same recipe under every launcher: shoal's own, torchrun, Slurm, Open MPI. The same losses, bit for bit."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from tests.cli.host import Host
from tests.cli.test_train import MADE_UP, SMALL, Command, Ended, forked, losses
from tests.unit.test_slurm_jobs import GPUS, RECIPE, codes, program
from tests.warm import warm_python

TORCHRUN = [warm_python(), "-m", "torch.distributed.run"]
OF_TWO = ["--nproc-per-node", "2"]
WORDS = ["train", *SMALL, *MADE_UP, "--run.dir", "run", "--json", "--data.workers", "0"]


@pytest.fixture(scope="module")
def reference(host: Host, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of `shoal train --nproc 2`."""
    folder = tmp_path_factory.mktemp("reference")
    assert host.run(*WORDS, "--nproc", "2", cwd=folder).code == 0
    return losses(folder / "run")


def test_torchrun_needs_one_restart(reference: list[float], tmp_path: Path) -> None:
    """Its store outlives the workers, with the addresses of the dead; a new generation does not look at them."""
    words = [*TORCHRUN, "--standalone", *OF_TWO, "--max-restarts", "3", "-m", "shoal", *WORDS]
    env = {"SHOAL_FAULTS": "kill_at=rank:1,step:3", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    env["PYTHON_EXEC"] = warm_python()  # by which torchrun starts workers
    ended = Command.start([*words, "--checkpoint.every", "1step"], cwd=tmp_path, env=env).ended()
    assert ended.code == 0, ended.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["restarts"], summary["resumed_from"] in (1, 2), summary["steps"]) == (1, True, 3)
    assert summary["ranks"] == 2
    told = [json.loads(line) for line in ended.out.splitlines()]
    assert [one for one in told if "error" not in one] == [summary]  # printed by rank 0 alone
    assert losses(tmp_path / "run") == reference


@pytest.mark.wide
def test_the_launcher_before_torchrun_adds_a_word(tmp_path: Path) -> None:
    """`python -m torch.distributed.launch` adds --local-rank=0 to the command."""
    words = [sys.executable, "-W", "ignore", "-m", "torch.distributed.launch", "--nproc-per-node", "1", "--master-port"]
    words += [str(free_port()), "-m", "shoal", *WORDS, "--dry-run"]
    ended = Command.start(words, cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": ""}).ended()
    assert ended.code == 0, ended.err


def test_slurm(host: Host, reference: list[float], tmp_path: Path) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NODEID": "0"}
    job |= {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": str(free_port())}
    places = [{**job, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    assert_same(together(host, places, tmp_path), tmp_path, reference)


def test_model_and_data_are_checked_before_a_job_is_submitted(host: Host, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(RECIPE)
    program(tmp_path, "squeue", "")
    program(tmp_path, "sbatch", f"echo x > {tmp_path}/submitted")
    words = ["small.yaml", *GPUS, "--submit", "--plan", "tp=32", "--data.source", "no-such.txt", "--json"]
    ended = host.run("launch", "slurm", *words, cwd=tmp_path, env={"PATH": f"{tmp_path}/bin"})
    assert ended.code == 2
    assert {code[0] for code in codes(ended.json)} == {"P", "D"}, ended.told
    assert "--unchecked" in ended.json["error"]["title"]
    assert not (tmp_path / "submitted").exists()


def test_open_mpi(host: Host, reference: list[float], tmp_path: Path) -> None:
    job = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_PORT": str(free_port())}
    ranks = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    places = [job | dict.fromkeys(ranks, str(rank)) for rank in range(2)]
    assert_same(together(host, places, tmp_path), tmp_path, reference)


def test_deepspeed(host: Host, reference: list[float], tmp_path: Path) -> None:
    """Its launcher has names of its own, and adds a word after the name of the module."""
    job = {"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "CROSS_RANK": "0", "CROSS_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    job["MASTER_PORT"] = str(free_port())
    places = [{**job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    started = [host.start(f"--local_rank={rank}", *WORDS, cwd=tmp_path, env=place) for rank, place in enumerate(places)]
    assert_same([Ended(rank.wait(), rank.told, rank.said) for rank in started], tmp_path, reference)


@pytest.mark.wide
def test_mpich(host: Host, reference: list[float], tmp_path: Path) -> None:
    job = {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "MASTER_PORT": str(free_port())}
    places = [job | dict.fromkeys(("PMI_RANK", "MPI_LOCALRANKID"), str(rank)) for rank in range(2)]
    assert_same(together(host, places, tmp_path), tmp_path, reference)


@pytest.mark.wide
def test_a_launcher_that_gives_rank_size_and_address_alone(host: Host, reference: list[float], tmp_path: Path) -> None:
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    places = [{**job, "RANK": str(rank)} for rank in range(2)]
    assert_same(together(host, places, tmp_path), tmp_path, reference)


def test_all_ranks_refuse_what_rank_0_cannot_have(host: Host, tmp_path: Path) -> None:
    """Else the others would wait for it until their time is out."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    places = [{**job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    for ended in together(host, places, tmp_path):
        assert ended.code == 2
        assert ended.err.startswith("shoal: bad input: 'run' is not empty and holds no run of shoal")


def test_a_variable_that_is_missing(host: Host, tmp_path: Path) -> None:
    ended = forked(host, *WORDS, cwd=tmp_path, env={"RANK": "0", "WORLD_SIZE": "2"})
    assert ended.code == 2
    assert "MASTER_ADDR is not set, though RANK=0 and WORLD_SIZE=2 is" in ended.err
    assert len(ended.json["error"]["problems"]) == 4  # LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT


def together(host: Host, places: list[dict[str, str]], folder: Path) -> list[Ended]:
    """Ranks that somebody else starts, as they find themselves: with these variables."""
    started = [host.start(*WORDS, cwd=folder, env=place) for place in places]
    return [Ended(rank.wait(), rank.told, rank.said) for rank in started]


def assert_same(ranks: list[Ended], folder: Path, reference: list[float]) -> None:
    assert [ended.code for ended in ranks] == [0, 0], ranks[0].err + ranks[1].err
    assert ranks[0].json["ranks"] == 2
    assert ranks[1].out == ""
    assert losses(folder / "run") == reference


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
