"""What workers of a sharded plan import is imported once, before they are forked."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
from shoal.numerics import lazy_dynamo
lazy_dynamo.install()
import torch, torch.distributed as dist
import shoal.train.recipe.loop
from shoal.blueprint.plan import Plan
from shoal.launch.local import fork_is_safe
from shoal.parallel.data.preload import preload

plan = Plan.parse(sys.argv[1]).resolve(2)
preload(plan)
assert fork_is_safe(), "an import has started threads"
assert lazy_dynamo.is_loaded() == plan.is_sharded
if plan.is_sharded:
    before = set(sys.modules)
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    model = torch.nn.Linear(4, 4)
    torch.distributed.fsdp.fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
    model(torch.ones(2, 4)).sum().backward()
    late = sorted(name for name in set(sys.modules) - before if name.startswith("torch."))
    assert len(late) < 10, late
    os._exit(0)  # a normal end would warn of the group
"""


@pytest.mark.parametrize("plan", ["dp_shard=2 zero=3", "dp_replicate=2", "tp=2"])
def test_the_launcher_imports_what_its_workers_need(plan: str) -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT, plan], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr[-2000:]
