"""torch._dynamo is loaded when something compiles and not before; once loaded it is torch's own, complete and single.

Each case runs in a process of its own: a module that was loaded once cannot be unloaded.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = """
import sys, torch
from torch import nn
from shoal.numerics import lazy_dynamo
assert "torch._dynamo" not in sys.modules, "torch imports it by itself now: lazy_dynamo has no use"
lazy_dynamo.install()
"""
EAGER = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
model = DistributedDataParallel(nn.Linear(4, 4))
for optimizer in (torch.optim.AdamW(model.parameters(), fused=True), torch.optim.SGD(model.parameters(), lr=0.1)):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
torch.compiler.disable(lambda: None)()
dist.destroy_process_group()
assert not lazy_dynamo.is_loaded()
"""
COMPILED = """
@torch.compiler.disable
def kept_out(x):
    return x * 2
seen = []
def backend(graph, inputs):
    seen.append(graph)
    return graph.forward
step = torch.compile(lambda x: kept_out(x + 1) + 3, backend=backend)
assert torch.equal(step(torch.ones(3)), torch.full((3,), 7.0))
assert lazy_dynamo.is_loaded() and len(seen) == 2, "two graphs: before and after what is kept out"
"""
SUBMODULE = """
import torch._dynamo.config as config
from torch._dynamo.utils import counters
from torch._dynamo import OptimizedModule
assert lazy_dynamo.is_loaded() and sys.modules["torch._dynamo"] is torch._dynamo
assert config is torch._dynamo.config is sys.modules["torch._dynamo.config"]
assert counters is torch._dynamo.utils.counters
"""
AS_TORCH = """
stand_in = sys.modules["torch._dynamo"]
OptimizedModule, mode = stand_in.OptimizedModule, stand_in.utils.get_optimize_ddp_mode()
assert not isinstance(nn.Linear(1, 1), OptimizedModule) and not lazy_dynamo.is_loaded()
original = lazy_dynamo.load()
assert mode == original.utils.get_optimize_ddp_mode()
assert isinstance(torch.compile(nn.Linear(1, 1)), OptimizedModule)
assert original.graph_break() is None and callable(original.trace_rules.clear_lru_cache)
constant = original.assume_constant_result(lambda: 1)
assert vars(constant) == vars(stand_in.assume_constant_result(lambda: 1))
"""


@pytest.mark.parametrize(
    "script",
    [
        EAGER,
        pytest.param(COMPILED, marks=pytest.mark.wide),
        pytest.param(SUBMODULE, marks=pytest.mark.wide),
        pytest.param(AS_TORCH, marks=pytest.mark.wide),
    ],
    ids=["eager", "compiled", "sub", "as_torch"],
)
def test_the_original_is_loaded_when_it_is_needed(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", BEGIN + script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_run_without_shards_stages_or_a_compiler_does_not_load_them(tmp_path: Path) -> None:
    words = ["train", "recipes/tiny.yaml", "--quiet", "--run.duration", "1step", "--run.dir", str(tmp_path / "run")]
    command = [
        sys.executable,
        "-X",
        "importtime",
        "-m",
        "shoal",
        *words,
        "--model.num_layers",
        "1",
        "--data.validation",
        "0",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "shoal.train.recipe.loop" in loaded
    heavy = {
        "torch._dynamo",
        "torch.distributed.tensor",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "sympy",
    }
    assert not heavy & loaded
