"""Worlds of one process, one after the other: how they are counted, and how they end."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace

import pytest
import torch

from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.comm.world import _destroy_within, _with_job
from tests.cli.test_launchers import free_port
from tests.warm import warm_python

RANK = """
import os
from shoal.comm.rendezvous.launcher_environment import read_environment
from shoal.comm.world import World

if os.environ["RANK"] == "1":
    World.start(None, device="cpu").close()
with World.start(read_environment(os.environ), device="cpu", timeout=8) as world:
    print(world.all_gather_object(world.rank))
"""


def test_a_world_of_one_rank_does_not_keep_ranks_from_meeting() -> None:
    """Rank 1 was alone before: it has made a world that rank 0 has not."""
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"SHOAL_KEY": "sixteen characters", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [warm_python(), "-c", RANK],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=60) for rank in ranks]
    assert [out for out, _ in said] == ["[0, 1]\n"] * 2, said[0][1] + said[1][1]


def test_ranks_prove_the_job_and_the_port() -> None:
    one = Placement(rank=0, world_size=2, local_rank=0, local_world_size=2, master_port=29500, job="1")
    places = (one, replace(one, job="2"), replace(one, master_port=29501), replace(one, rank=1))
    texts = [_with_job("a run", place) for place in places]
    assert len(set(texts)) == 3
    assert texts[0] == texts[3]


def test_a_group_that_cannot_be_destroyed_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    """There is none, so torch raises, in a thread whose failures Python prints with a traceback."""
    _destroy_within(5.0, torch.device("cpu"))  # what another test may have left
    capfd.readouterr()
    _destroy_within(5.0, torch.device("cpu"))
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert said.startswith("shoal: the process group was not destroyed: ")
    assert said.count("\n") == 1
