"""Any layout loads what any other has saved: each value of each tensor, and the run goes on as on one device.

CI goes round a ring of layouts: each loads what the one before it has saved, and saves for the next. In `make test` it
is a ring of those that have every word, in `make test-all` of all. All pairs: `make reshard`.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from shoal.comm.world import World
from shoal.config.recipe import OptimSection
from shoal.models import llama, moe
from shoal.numerics.init import initialise
from shoal.numerics.optim.build import build_optimizer
from shoal.train.run import Run
from tests.cover import covering, wide
from tests.dist.pool import Pool

BATCH, TOKENS, VOCABULARY = 24, 16, 37  # 37, and 22 below: pieces that are not alike, and empty ones
Layout = tuple[int, str]

DENSE: list[Layout] = [
    (1, "mb=6"),
    (2, "zero=1 mb=4"),
    (3, "zero=3 mb=4"),
    (4, "tp=2 pp=2 interleaved mb=3"),
    (6, "tp=2 zero=3 mb=4"),
    (2, "pp=2 1f1b mb=6"),
    (8, "tp=2 pp=2 zero=3 mb=3"),
    (3, "dp_replicate=3 mb=8"),
    (4, "dp_replicate=2 zero=3 mb=3"),
    (4, "cp=2 tp=2 mb=6"),
    (8, "zero=3 mb=3"),
    (2, "zero=2 mb=6"),
    (6, "pp=2 gpipe zero=3 mb=2"),
    (2, "cp=2 zero=3 mb=6"),
    (4, "pp=2 zbv zero=1 mb=3"),
    (6, "dp_replicate=3 zero=3 mb=4"),
]
TIED: list[Layout] = [(2, "pp=2 1f1b mb=6"), (3, "zero=3 mb=4"), (2, "tp=2 sp=off mb=4"), (1, "mb=12")]
EXPERTS: list[Layout] = [
    (1, "mb=6"),
    (4, "ep=2 zero=3 mb=3"),
    (2, "pp=2 1f1b mb=6"),
    (8, "ep=4 zero=3 mb=3"),
    (4, "ep=4 zero=1 mb=2"),
    (6, "ep=2 zero=3 mb=2"),
    (2, "ep=2 zero=3 mb=6"),
]
RINGS = {"llama": DENSE, "tied": TIED, "moe": EXPERTS}


def ring_of(kind: str) -> list[Layout]:
    ring = RINGS[kind]
    if os.environ.get("SHOAL_ALL"):
        return ring
    return [ring[number] for number in covering([traits(*layout) for layout in ring], [size for size, _ in ring])]


def traits(size: int, plan: str) -> set[str]:
    """Every axis, stage of ZeRO and the schedule that gives a rank several parts; a tensor cut in two directions."""
    words = {word for word in plan.split() if word.startswith(("tp=", "pp=", "cp=", "zero=")) or word == "interleaved"}
    words |= {word.partition("=")[0] for word in plan.split() if word.startswith(("ep=", "dp_replicate="))}
    return words | ({"alone"} if size == 1 else set()) | ({"cut twice"} if {"tp=2", "zero=3"} <= words else set())


def build(kind: str, num_layers: int = 4) -> torch.nn.Module:
    sizes: dict[str, Any] = {
        "num_layers": num_layers,
        "hidden": 16,
        "num_heads": 4,
        "num_kv_heads": 2,
        "vocabulary": VOCABULARY,
    }
    if kind == "moe":
        return moe.build(**sizes, ffn=24, num_experts=4, top_k=2, expert_ffn=8, bias_rate=0.01, max_sequence=TOKENS)
    return llama.build(**sizes, ffn=22, tied=kind == "tied", max_sequence=TOKENS)


def share(run: Run, step: int) -> dict[str, Tensor]:
    tokens = torch.randint(VOCABULARY, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(step))
    size = BATCH // run.degree
    own = tokens[run.coordinate * size : (run.coordinate + 1) * size]
    return {"tokens": own[:, :-1].contiguous(), "labels": own[:, 1:].contiguous()}


def visit(world: World, plan: str, kind: str, steps: list[str], step: int, optim: dict[str, str]) -> float:
    """Load a step, save it as it was loaded, make one more and save that; the loss."""
    before, again, after = steps
    model = build(kind)
    initialise(model, seed=step)  # so that what is not loaded is not right by chance
    run = Run(f"{'fp32' if optim else 'fp64'} {plan}", world=world, seed=0, clip=0.5)
    run.prepare(model)
    run.prepare(build_optimizer(run.parameters, OptimSection(**optim), lr=1e-2))  # type: ignore[arg-type]
    if step:
        assert run.load(before) == step
        run.save(again)
    loss = float(run.step(share(run, step)))
    run.save(after)
    return loss


def stay(world: World, kind: str, num_steps: int) -> list[float]:
    """The losses of so many steps on one device, with nothing saved or loaded."""
    model = build(kind)
    initialise(model, seed=0)
    run = Run("fp64 mb=24", world=world, seed=0, clip=0.5)
    run.prepare(model)
    run.prepare(build_optimizer(run.parameters, OptimSection(), lr=1e-2))
    return [float(run.step(share(run, step))) for step in range(num_steps)]


def whole(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the newest step, put together without shoal."""
    step = folder / (folder / "latest").read_text().strip()
    found = {}
    for name, entry in json.loads((step / "manifest.json").read_text())["tensors"].items():
        parts = []
        for piece in entry["pieces"]:
            with safe_open(step / piece["file"], "pt") as file:
                places = tuple(slice(b, b + s) for b, s in zip(piece["begin"], piece["shape"], strict=True))
                parts.append((places, file.get_tensor(piece["key"])))
        found[name] = torch.full(entry["shape"], -1, dtype=parts[0][1].dtype)
        for places, part in parts:
            found[name][places] = part
    return found


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    differing = [name for name, value in ours.items() if not torch.equal(value, theirs[name])]
    assert differing == []


def round_trip(pool: Pool, folder: Path, ring: list[Layout], kind: str, **optim: str) -> list[float]:
    losses = []
    for step, (size, plan) in enumerate(ring):
        names = [str(folder / name) for name in (f"after-{step - 1}", f"again-{step}", f"after-{step}")]
        losses.append(pool.run(visit, size, plan, kind, names, step, optim)[0])
        if step:
            assert_same(whole(Path(names[1])), whole(Path(names[0])))
    return losses


@pytest.mark.parametrize("kind", [wide(kind) if kind == "llama" else kind for kind in RINGS])
def test_round_a_ring_of_layouts(pool: Pool, tmp_path: Path, kind: str) -> None:
    ours = round_trip(pool, tmp_path / "ring", ring_of(kind), kind)
    assert any(name.startswith("optimizer/exp_avg/") for name in whole(tmp_path / "ring" / "after-1"))
    assert ours == pytest.approx(pool.run(stay, 1, kind, len(ours))[0], rel=1e-10)


def test_states_of_another_dtype(pool: Pool, tmp_path: Path) -> None:
    ring: list[Layout] = [(2, "zero=3 mb=4"), (1, "mb=6"), (3, "zero=1 mb=4"), (2, "tp=2 mb=4")]
    round_trip(pool, tmp_path, ring, "llama", state_dtype="bf16")
    dtypes = {tensor.dtype for tensor in whole(tmp_path / "after-3").values()}
    assert dtypes == {torch.float32, torch.bfloat16}


@pytest.mark.skipif(not os.environ.get("SHOAL_ALL_PAIRS"), reason="minutes; run with `make reshard`")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", RINGS)
def test_all_pairs(pool: Pool, tmp_path: Path, kind: str) -> None:
    for (first, saves), (second, loads) in itertools.permutations(RINGS[kind], 2):
        folder = tmp_path / f"{first} {saves} to {second} {loads}"
        round_trip(pool, folder, [(first, saves), (second, loads)], kind)
        shutil.rmtree(folder)
        print(f"{kind}: {folder.name}: equal", flush=True)
