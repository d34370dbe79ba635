"""The environments of torchrun, Slurm and Open MPI, as tables: their values, and the errors when they are broken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from shoal.comm.rendezvous.accelerate_settings import without_effect
from shoal.comm.rendezvous.launcher_environment import Placement, read_environment, thread_limit
from shoal.comm.rendezvous.slurm_nodelist import expand_counts, expand_hosts
from shoal.errors import ShoalError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29501",
}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "11",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_TASKS_PER_NODE": "4(x2),3",
    "SLURM_JOB_NODELIST": "gpu[08-10]",
    "MASTER_PORT": "12345",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
}


DEEPSPEED = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_SIZE": "4",
    "CROSS_RANK": "1",
    "CROSS_SIZE": "2",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29501",
}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3"}


def changed(environ: Mapping[str, str], **changes: str | None) -> dict[str, str]:
    return {name: value for name, value in {**environ, **changes}.items() if value is not None}


def place(rank: int, size: int, local_rank: int, local_size: int, node: int, *rest: Any) -> Placement:
    address, port, source = rest
    return Placement(
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_world_size=local_size,
        node=node,
        master_addr=address,
        master_port=port,
        source=source,
    )


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param(TORCHRUN, place(5, 8, 1, 4, 1, "node7", 29501, "torchrun"), id="torchrun"),
        pytest.param(
            changed(TORCHRUN, GROUP_RANK=None), place(5, 8, 1, 4, 1, "node7", 29501, "torchrun"), id="node-from-rank"
        ),
        pytest.param({**SLURM, **TORCHRUN}, place(5, 8, 1, 4, 1, "node7", 29501, "torchrun"), id="torchrun-in-slurm"),
        pytest.param(
            {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
            place(0, 1, 0, 1, 0, "127.0.0.1", 29500, "torchrun"),
            id="alone-without-address",
        ),
        pytest.param(SLURM, place(9, 11, 1, 3, 2, "gpu08", 12345, "slurm"), id="slurm"),
        pytest.param(
            changed(
                SLURM, SLURM_STEP_NUM_TASKS="10", SLURM_STEP_TASKS_PER_NODE="4(x2),2", SLURM_STEP_NODELIST="z[1-3]"
            ),
            place(9, 10, 1, 2, 2, "z1", 12345, "slurm"),
            id="slurm-step-smaller-than-job",
        ),
        pytest.param(
            changed(SLURM, SLURM_TASKS_PER_NODE=None, SLURM_NTASKS_PER_NODE="4", MASTER_ADDR="10.0.0.1"),
            place(9, 11, 1, 4, 2, "10.0.0.1", 12345, "slurm"),
            id="slurm-own-address",
        ),
        pytest.param(DEEPSPEED, place(5, 8, 1, 4, 1, "node7", 29501, "torchrun"), id="deepspeed"),
        pytest.param(
            changed(DEEPSPEED, LOCAL_SIZE=None), place(5, 8, 1, 4, 1, "node7", 29501, "torchrun"), id="size-from-hosts"
        ),
        pytest.param(
            changed(TORCHRUN, LOCAL_WORLD_SIZE=None, GROUP_RANK=None, MASTER_ADDR="127.0.0.1", LOCAL_RANK="5"),
            place(5, 8, 5, 8, 0, "127.0.0.1", 29501, "torchrun"),
            id="all-on-the-loopback",
        ),
        pytest.param(
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1234"},
            place(1, 2, 1, 2, 0, "localhost", 1234, "torchrun"),
            id="without-local-rank",
        ),
        pytest.param(HYDRA, place(2, 3, 2, 3, 0, "127.0.0.1", 29500, "openmpi"), id="hydra"),
        pytest.param({**SLURM, **HYDRA}, place(2, 3, 2, 3, 0, "127.0.0.1", 12345, "openmpi"), id="hydra-in-slurm"),
        pytest.param(
            {**SLURM, "PMI_RANK": "9", "PMI_SIZE": "11"}, place(9, 11, 1, 3, 2, "gpu08", 12345, "slurm"), id="srun-pmi"
        ),
        pytest.param(
            {name.replace("OMPI", "MV2"): value for name, value in OPENMPI.items()},
            place(2, 3, 2, 3, 0, "127.0.0.1", 29500, "openmpi"),
            id="mvapich",
        ),
        pytest.param(OPENMPI, place(2, 3, 2, 3, 0, "127.0.0.1", 29500, "openmpi"), id="openmpi-one-host"),
        pytest.param({**SLURM, **OPENMPI}, place(2, 3, 2, 3, 0, "127.0.0.1", 12345, "openmpi"), id="openmpi-in-slurm"),
        pytest.param(
            changed(OPENMPI, OMPI_COMM_WORLD_LOCAL_RANK="0", OMPI_COMM_WORLD_LOCAL_SIZE="1", MASTER_ADDR="h"),
            place(2, 3, 0, 1, 2, "h", 29500, "openmpi"),
            id="openmpi-hosts",
        ),
    ],
)
def test_placement(environ: dict[str, str], expected: Placement) -> None:
    found = read_environment(environ)
    assert found is not None
    assert replace(found, job="") == expected


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"MASTER_ADDR": "h", "MASTER_PORT": "1", "LOCAL_RANK": "0"}, id="address-only"),
        pytest.param(changed(SLURM, SLURM_STEP_ID=None, SLURM_PROCID="0"), id="sbatch-shell"),
        pytest.param(changed(SLURM, SLURM_STEP_ID="4294967291"), id="batch-step"),
        pytest.param(changed(SLURM, SLURM_STEP_ID="4294967290"), id="interactive-step"),
        pytest.param(changed(SLURM, SLURM_NTASKS="1"), id="srun-one-task"),
    ],
)
def test_no_launcher(environ: dict[str, str]) -> None:
    assert read_environment(environ) is None


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        pytest.param(
            {"RANK": "3"}, ["WORLD_SIZE is not set", "RANK=3", "LOCAL_RANK", "MASTER_ADDR", "problems"], id="half"
        ),
        pytest.param(
            changed(TORCHRUN, RANK="8"), ["RANK must be below WORLD_SIZE=8, got 8", "fix: "], id="rank-too-large"
        ),
        pytest.param(changed(TORCHRUN, RANK="x"), ["RANK must be an integer of 0 or more, got 'x'"], id="not-a-number"),
        pytest.param(changed(TORCHRUN, RANK="-1"), ["RANK must be an integer of 0 or more, got '-1'"], id="negative"),
        pytest.param(changed(TORCHRUN, WORLD_SIZE=""), ["WORLD_SIZE is not set"], id="empty"),
        pytest.param(
            changed(TORCHRUN, MASTER_PORT="99999"), ["MASTER_PORT must be a port up to 65535, got 99999"], id="port"
        ),
        pytest.param(
            changed(TORCHRUN, LOCAL_WORLD_SIZE="9"),
            ["LOCAL_WORLD_SIZE must be at most the 8 ranks in all, got 9"],
            id="local-over-world",
        ),
        pytest.param(
            changed(TORCHRUN, LOCAL_RANK="4", MASTER_PORT="http"),
            ["2 problems", "LOCAL_RANK must be below LOCAL_WORLD_SIZE=4, got 4", "'http'"],
            id="all-at-once",
        ),
        pytest.param(changed(SLURM, SLURM_LOCALID="3"), ["SLURM_LOCALID=3", "3 tasks"], id="slurm-local"),
        pytest.param(changed(SLURM, SLURM_NODEID="3"), ["SLURM_NODEID=3", "4(x2),3"], id="slurm-node"),
        pytest.param(changed(SLURM, SLURM_TASKS_PER_NODE="4(y2)"), ["4(y2)", "4(x2)"], id="slurm-counts"),
        pytest.param(
            changed(SLURM, SLURM_JOB_NODELIST="n[1-"),
            ["SLURM_JOB_NODELIST must be a list of hosts, got 'n[1-'", "brackets"],
            id="slurm-list",
        ),
        pytest.param(changed(SLURM, SLURM_JOB_NODELIST=None), ["SLURM_JOB_NODELIST is not set"], id="slurm-no-list"),
        pytest.param(
            changed(OPENMPI, OMPI_COMM_WORLD_LOCAL_RANK="0", OMPI_COMM_WORLD_LOCAL_SIZE="1"),
            ["MASTER_ADDR is not set", "of 3 ranks only 1", "mpirun -x MASTER_ADDR"],
            id="openmpi-hosts",
        ),
    ],
)
def test_rejected_with_name_value_and_fix(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ShoalError) as caught:
        read_environment(environ)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def test_half_set_names_every_missing_variable() -> None:
    with pytest.raises(ShoalError) as caught:
        read_environment({"RANK": "0"})
    names = {problem.what.split()[0] for problem in caught.value.problems}
    assert {"WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= names


def test_the_job_is_what_the_launcher_calls_it() -> None:
    def job(environ: dict[str, str]) -> str:
        found = read_environment(environ)
        assert found is not None
        return found.job

    assert job({**SLURM, **TORCHRUN, "TORCHELASTIC_RUN_ID": "run-1"}) == "run-1"
    assert job({**SLURM, **TORCHRUN}) == ""
    assert job(SLURM) == "4711"
    assert job({**SLURM, "SLURM_HET_JOB_ID": "4710"}) == "4710"
    assert job({**SLURM, **OPENMPI}) == ""


@pytest.mark.parametrize(
    ("environ", "generation"),
    [
        (changed(SLURM, SLURM_RESTART_COUNT="2"), 2),
        (SLURM, 0),
        (changed(TORCHRUN, SLURM_RESTART_COUNT="2", TORCHELASTIC_RESTART_COUNT="1"), 3),
    ],
)
def test_a_requeued_job_is_a_later_generation(environ: dict[str, str], generation: int) -> None:
    found = read_environment(environ)
    assert found is not None
    assert found.generation == generation


def test_port_is_the_same_on_all_ranks_of_a_step_and_differs_between_steps() -> None:
    ranks = [changed(SLURM, MASTER_PORT=None, SLURM_PROCID=str(rank)) for rank in range(11)]
    ports = {place.master_port for environ in ranks if (place := read_environment(environ))}
    other = read_environment(changed(SLURM, MASTER_PORT=None, SLURM_STEP_ID="1"))
    assert len(ports) == 1
    assert other is not None
    assert other.master_port not in ports
    assert all(port is not None and 1024 < port < 32768 for port in ports)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n[01-03,7]", ["n01", "n02", "n03", "n7"]),
        ("a1,b[2-3]x", ["a1", "b2x", "b3x"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]n[0,5].site,z", ["r1n0.site", "r1n5.site", "r2n0.site", "r2n5.site", "z"]),
        ("single-host-1", ["single-host-1"]),
    ],
)
def test_node_lists(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["n[1", "n]1[", "n[a-b]", "a,,b", "", "n[1-2-3]", "n[[1]]"])
def test_invalid_node_lists_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"brackets|numbers|empty"):
        expand_hosts(text)


@pytest.mark.parametrize(("text", "counts"), [("4(x2),3", [4, 4, 3]), ("2", [2]), ("1,2(x3)", [1, 2, 2, 2])])
def test_tasks_per_node(text: str, counts: list[int]) -> None:
    assert expand_counts(text) == counts


def test_a_store_of_each_round_of_torchrun_needs_no_number() -> None:
    """With TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which a node that joins later needs (torch 2.13)."""
    for value, expected in (("False", True), ("True", False), (None, False)):
        environ = {**TORCHRUN, **({} if value is None else {"TORCHELASTIC_USE_AGENT_STORE": value})}
        found = read_environment(environ)
        assert found is not None
        assert found.has_new_store is expected


@pytest.mark.parametrize(
    ("environ", "limit"),
    [
        ({}, None),
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}, None),  # of torchrun itself
        ({"OMP_NUM_THREADS": "4,2"}, None),
    ],
)
def test_a_limit_of_threads(environ: dict[str, str], limit: int | None) -> None:
    assert thread_limit(environ) == limit


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, []),
        ({"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}, []),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, []),  # as the plan
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, ["--mixed_precision fp16"]),
        ({"ACCELERATE_USE_FSDP": "true"}, ["--use_fsdp"]),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, ["--use_deepspeed"]),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, ["--gradient_accumulation_steps 4"]),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, ["--dynamo_backend inductor"]),
    ],
)
def test_settings_of_accelerate_are_not_lost_without_a_word(environ: dict[str, str], said: list[str]) -> None:
    found = list(without_effect(environ, precision="bf16", zero=0, compiles=False))
    assert len(found) == len(said)
    assert all(flag in sentence for flag, sentence in zip(said, found, strict=True))
    assert not list(without_effect({"ACCELERATE_USE_FSDP": "true"}, precision="bf16", zero=3, compiles=False))
