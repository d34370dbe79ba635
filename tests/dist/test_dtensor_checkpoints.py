"""Checkpoints of DTensors, as Megatron-FSDP writes them: rejected by name, and read as what they are."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shoal.checkpoint.formats.import_ import ImportSettings, read
from shoal.checkpoint.formats.lazy_tensor import full
from shoal.comm.world import World
from tests.dist.pool import Pool
from tests.rejects import rejects

NAME = "decoder.layers.0.mlp.linear_fc2.weight"


def save(world: World, folder: str) -> None:
    """As `--ckpt-format fsdp_dtensor` does: one state dict of DTensors, arguments and numbers, and no `common.pt`."""
    mesh = init_device_mesh("cpu", (world.size,))
    whole = torch.arange(21.0).view(7, 3)  # ranks have other numbers of rows
    dtensor = distribute_tensor(whole, mesh, [Shard(0)])
    state = {
        "model": {NAME: dtensor},
        "optimizer": {"state": {NAME: {"exp_avg": distribute_tensor(whole * 2, mesh, [Shard(0)])}}},
        "args": argparse.Namespace(num_layers=1),
        "iteration": 3,
    }
    writer = torch_checkpoint.FileSystemWriter(folder)
    torch_checkpoint.save(state, storage_writer=writer)


def test_dtensors_of_megatron(pool: Pool, tmp_path: Path) -> None:
    step = tmp_path / "iter_0000003"
    pool.run(save, 2, str(step))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    with rejects("E064", "fsdp_dtensor", f"shoal checkpoint import {step} imported --format dcp --prefix model."):
        read(tmp_path, ImportSettings())
    found = read(step, ImportSettings(format="dcp", prefix="model."))
    assert full(found.model[NAME]).tolist() == torch.arange(21.0).view(7, 3).tolist()
    assert full(found.states["exp_avg", NAME]).tolist() == (torch.arange(21.0) * 2).view(7, 3).tolist()
    assert set(found.left_out) == {"args", "iteration"}
