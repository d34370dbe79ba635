"""What other systems have started or wrapped: processes of `mp.spawn` without a group, models in DataParallel and DDP.

Without a process group each process of `torch.multiprocessing.spawn` used to train alone, and each was the main one; a
model in `nn.DataParallel` was accepted, and replicated on top of its own replicas.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shoal.comm.world import World
from shoal.errors import ShoalError
from shoal.train.run import Run
from tests.dist.pool import on_ranks

SCRIPT = """
import os, tempfile
import torch, torch.distributed as dist, torch.multiprocessing as mp
from shoal.train.run import Run

def train(rank, kind, nprocs, folder):
    if kind == "group":
        store = dist.FileStore(folder + "/store", nprocs)
        dist.init_process_group("gloo", rank=rank, world_size=nprocs, store=store)
    if kind == "apart":
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    with Run(device="cpu", threads=1) as run:
        said = f"{kind}: size {run.world.size} main {run.is_main} total {run.sum(1)[0]:.0f}\\n"
        os.write(1, said.encode())  # at once: two processes write to one pipe
    if kind == "group":
        dist.destroy_process_group()

def spawn(kind, nprocs):
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(train, (kind, nprocs, folder), nprocs, start_method="fork")

if __name__ == "__main__":
    spawn("group", 2)
    spawn("only child", 1)
    spawn("apart", 2)
    for _ in range(2):
        one = mp.get_context("fork").Process(target=train, args=(1, "process", 1, ""))
        one.start()
        one.join()
    spawn("alone", 2)
"""


@pytest.mark.wide
def test_spawn_without_a_group_is_rejected_and_others_are_not(tmp_path: Path) -> None:
    """One script, since each takes seconds to load torch: the last of its calls is the mistake."""
    (tmp_path / "script.py").write_text(SCRIPT)
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")], env=environ, capture_output=True, text=True, timeout=100
    )
    lines = [line for line in done.stdout.splitlines() if not line.startswith("alone")]  # that of process 0, at times
    assert sorted(lines) == [
        "apart: size 1 main True total 1",
        "apart: size 1 main True total 1",
        "group: size 2 main False total 2",  # a run uses the group that is there
        "group: size 2 main True total 2",
        "only child: size 1 main True total 1",
        "process: size 1 main True total 1",  # one trial after the other, say
        "process: size 1 main True total 1",
    ], done.stderr
    assert done.returncode != 0
    assert "this is process 1 of torch.multiprocessing.spawn" in done.stderr
    assert "fix: dist.init_process_group" in done.stderr


@on_ranks(1)
def test_a_wrapped_model_is_rejected_with_the_fix(world: World) -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.backbone = inner

    group = dist.group.WORLD
    for model, what in (
        (nn.DataParallel(nn.Linear(2, 2)), "this model is in torch's DataParallel(.|\n)*fix: .*model.module"),
        (DistributedDataParallel(nn.Linear(2, 2), process_group=group), "torch's DistributedDataParallel"),
        (Outer(nn.DataParallel(nn.Linear(2, 2))), "'backbone' is in torch's DataParallel(.|\n)*model.backbone.module"),
        (fully_shard(nn.Linear(2, 2)), r"fully_shard(.|\n)*Run\('zero=3'\)"),
    ):
        with pytest.raises(ShoalError, match=what):
            Run("fp32", world=world).prepare(model)
    inner = nn.DataParallel(nn.Linear(2, 2)).module
    run = Run("fp32", world=world)
    run.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    run.step((torch.ones(2, 2), torch.tensor([0, 1])))
