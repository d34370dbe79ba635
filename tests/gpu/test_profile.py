"""A profile on a GPU: parts add to the step by another clock, kernels run as long as the trace says, nothing waits."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.profile.gpu import measured
from shoal.cli.profile import main as profile_command
from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.comm.world import World
from shoal.launch.local import launch
from shoal.models.llama import Llama, LlamaConfig
from shoal.numerics.init import initialise
from shoal.train.profile.profiler import Profiler
from shoal.train.run import Run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a CUDA device; CI has none, run by hand with one"),
]


def test_parts_kernels_and_cost() -> None:
    asked = argparse.Namespace(size="large", batch=8, sequence=1024, steps=4, rounds=2, device="cuda")
    found = measured(asked, "bf16 mb=4 recompute=full")
    print(json.dumps(found))
    assert found["parts_over_clock"] == pytest.approx(1.0, abs=0.005)
    assert found["busy"] == pytest.approx(found["busy_of_trace"], rel=0.01)
    assert 0.05 < found["utilization"] <= 1.0
    assert found["mfu"] < found["utilization"]
    assert found["timer_cost"] < 0.2  # benchmarks/profile/gpu.py measures it
    assert found["trace_cost"] < 0.5


def small_run(plan: str, **options: Any) -> tuple[Run, dict[str, Tensor]]:
    run = Run(plan, **options)
    model = Llama(LlamaConfig(hidden=256, num_layers=4, num_heads=4, num_kv_heads=4, ffn=512, vocabulary=512))
    initialise(model, 0)
    run.prepare(model)
    run.prepare(torch.optim.AdamW(run.module.parameters(), lr=1e-3, fused=True))
    tokens = torch.randint(0, 512, (8 // run.degree, 257), generator=torch.Generator().manual_seed(0))
    return run, {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def test_a_profile_waits_no_more_often() -> None:
    run, batch = small_run("bf16 mb=2 recompute=full", device="cuda")

    def waits() -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                for _ in range(3):
                    run.step(batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing" in str(each.message) for each in caught)

    waits()  # the first steps allocate
    without = waits()
    with Profiler(run) as profiler:
        run.step(batch)  # its memory is read
        profiled = waits()
    assert profiled <= without
    found = profiler.result
    assert len(found.step_seconds) == 3
    assert {"forward", "backward", "recompute", "optimizer"} <= set(found.parts)
    forward = found.parts["forward"]
    assert 0.2 * forward < found.parts["recompute"] < 3 * forward
    readings = profiler.memory.readings
    after_forward = next(each for each in readings if each["part"] == "forward")
    assert after_forward["other"] > 0
    assert max(each["gradients"] for each in readings) == after_forward["parameters"]
    run.close()


class Slow(Dataset[Tensor]):
    """Samples that take a while to read."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.005)
        return torch.ones(64)


def test_a_slow_loader_is_the_verdict(tmp_path: Path) -> None:
    """The stream is idle while the main thread waits for a batch."""
    run = Run("fp32", device="cuda", loss=lambda model, x: model(x).square().mean())
    model = torch.nn.Linear(64, 64)
    _, _, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), DataLoader(Slow(), batch_size=16))
    with Profiler(run) as profiler:
        for batch in itertools.islice(run.batches(loader), 5):
            run.step(batch)
    assert profiler.result.verdict.kind == "data", str(profiler.result)
    assert profiler.result.parts["data"] > 0.06
    profiler.result.write_trace(tmp_path / "trace.json")
    assert "GPU, by part" in (tmp_path / "trace.json").read_text()
    run.close()


def two_ranks(placement: Placement, store: dist.Store, plan: str, is_profiled: bool = True) -> dict[str, Any]:
    world = World.start(placement, device="cuda", backend="gloo", store=store)
    run, batch = small_run(plan, world=world)
    with run:
        profiler = Profiler(run)
        moments: list[float] = []

        def then() -> None:
            torch.cuda.synchronize()
            moments.append(time.perf_counter())

        if is_profiled:
            profiler.start(then=then)
        for _ in range(4):
            run.step(batch)
        if not is_profiled:
            return {}
        mine = profiler.finish().ranks[world.rank]
        return {"parts": mine.total, "sum": sum(mine.seconds), "clock": moments[-1] - moments[0]}


PLANS = [("dp_replicate=2 mb=2", ""), ("zero=3 mb=2", "dp_shard"), ("tp=2 mb=2", "tp"), ("pp=2 1f1b mb=2", "pp")]
"""Gloo's waits of DDP are none of Python's: they count as backward."""


@pytest.mark.parametrize(("plan", "axis"), PLANS)
def test_two_ranks_on_one_gpu(plan: str, axis: str) -> None:
    for found in launch(two_ranks, nproc=2, args=(plan,)):
        print(plan, found)
        assert sum(found["parts"].values()) == pytest.approx(found["sum"], rel=1e-6)
        assert found["sum"] == pytest.approx(found["clock"], rel=0.01)
        assert axis in {name.partition(".")[0] for name in found["parts"]} | {""}


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = ["--model.num_layers", "4", "--model.hidden", "512", "--model.ffn", "1024"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        rc = profile_command(
            ["--json", "--quiet", "--launch.device", "cuda", "--plan", "bf16", "--data.global_batch", "32", *sizes]
        )
    assert rc == 0
    found = json.loads(out.getvalue())
    print({name: found[name] for name in ("step_seconds", "verdict", "gpu", "memory")})
    assert sum(part["fraction"] for part in found["parts"]) == pytest.approx(1.0, abs=0.005)
    gpu = found["gpu"]
    assert 0 < gpu["utilization"] <= 1
    assert gpu["busy_seconds"] > 0
    assert gpu["kernels"][0]["fraction"] > 0
    parts = {each["part"] for each in found["memory"]["over_time"]}
    assert {"forward", "backward", "optimizer"} <= parts
    events = json.loads(Path(found["trace"]).read_text())["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
    # The text, too.
    rc = profile_command(["--quiet", "--launch.device", "cuda", "--plan", "bf16", "--data.global_batch", "32", *sizes])
    assert rc == 0
