"""Save on one layout, load on another: the run goes on as if nothing had happened, tensor by tensor in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal import ShoalError
from shoal.comm.world import World
from shoal.errors import RunFailed
from shoal.models import llama, moe
from shoal.numerics.init import initialise
from shoal.train.run import Run
from tests.dist.pool import Pool

BATCH, TOKENS, VOCABULARY = 8, 16, 37


def build(kind: str) -> torch.nn.Module:
    sizes: dict[str, Any] = {"num_layers": 4, "hidden": 16, "num_heads": 4, "num_kv_heads": 2, "vocabulary": VOCABULARY}
    if kind == "moe":
        return moe.build(**sizes, ffn=24, num_experts=4, top_k=2, expert_ffn=8, bias_rate=0.01, max_sequence=TOKENS)
    return llama.build(**sizes, ffn=22, tied=kind == "tied", max_sequence=TOKENS)  # 22, 37: uneven pieces


def batch(step: int) -> dict[str, Tensor]:
    tokens = torch.randint(VOCABULARY, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(step))
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def share(run: Run, step: int) -> dict[str, Tensor]:
    size = BATCH // run.degree
    return {name: x[run.coordinate * size : (run.coordinate + 1) * size] for name, x in batch(step).items()}


def steps(
    world: World, plan: str, kind: str, folder: str, first: int, last: int, *, frozen: str | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """Train from step `first`, which is loaded, to `last`, which is saved: losses, and weights on the main rank."""
    model = build(kind)
    initialise(model, 0)
    if frozen:
        model.get_parameter(frozen).requires_grad_(False)
    run = Run(f"fp64 {plan}", world=world, seed=0, clip=0.5)
    run.prepare(model)
    run.prepare(torch.optim.AdamW([p for p in run.parameters if p.requires_grad], lr=1e-2, weight_decay=0.1))
    if first:
        assert run.load(folder) == first == run.steps_done
    losses = [float(run.step(share(run, step))) for step in range(first, last)]
    run.save(folder)
    return losses, run.weights()


@pytest.fixture(scope="module")
def undisturbed(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Four steps on one rank, by kind of model."""
    known: dict[str, Any] = {}

    def of(kind: str, frozen: str | None = None) -> Any:
        if (kind, frozen) not in known:
            folder = str(tmp_path_factory.mktemp("whole"))
            known[kind, frozen] = pool.run(_steps, 1, "mb=2", kind, folder, 0, 4, frozen)[0]
        return known[kind, frozen]

    return of


def _steps(
    world: World, plan: str, kind: str, folder: str, first: int, last: int, frozen: str | None
) -> tuple[list[float], dict[str, Tensor]]:
    return steps(world, plan, kind, folder, first, last, frozen=frozen)


def test_the_same_layout_goes_on_bit_for_bit(pool: Pool, tmp_path: Path) -> None:
    whole, weights = pool.run(_steps, 2, "zero=3 mb=2", "llama", str(tmp_path / "a"), 0, 4, None)[0]
    first, _ = pool.run(_steps, 2, "zero=3 mb=2", "llama", str(tmp_path / "b"), 0, 2, None)[0]
    second, ours = pool.run(_steps, 2, "zero=3 mb=2", "llama", str(tmp_path / "b"), 2, 4, None)[0]
    assert [x.hex() for x in [*first, *second]] == [x.hex() for x in whole]
    assert all(torch.equal(ours[name], weight) for name, weight in weights.items())


def test_frozen_parameters_are_saved_too(pool: Pool, undisturbed: Any, tmp_path: Path) -> None:
    frozen = "model.embed_tokens.weight"
    losses, _ = undisturbed("llama", frozen)
    first, _ = pool.run(_steps, 2, "zero=3 mb=2", "llama", str(tmp_path), 0, 2, frozen)[0]
    second, _ = pool.run(_steps, 2, "tp=2 mb=2", "llama", str(tmp_path), 2, 4, frozen)[0]
    assert [*first, *second] == pytest.approx(losses, rel=1e-10)


def _refused(world: World, folder: str) -> str:
    with pytest.raises(ShoalError) as told:
        steps(world, "mb=2", "moe", folder, 2, 3)
    return str(told.value)


def test_another_model_is_refused_with_the_difference(pool: Pool, tmp_path: Path) -> None:
    pool.run(_steps, 1, "mb=2", "llama", str(tmp_path), 0, 2, None)
    told = pool.run(_refused, 1, str(tmp_path))[0]
    assert "is of another model" in told
    assert "experts" in told


def _told_of_damage(world: World, folder: str) -> str:
    with pytest.raises(ShoalError) as told:
        steps(world, "zero=3 mb=2", "llama", folder, 2, 3)
    return str(told.value)


def test_damage_that_one_rank_sees_ends_the_load_on_all(pool: Pool, tmp_path: Path) -> None:
    pool.run(_steps, 2, "zero=3 mb=2", "llama", str(tmp_path), 0, 2, None)
    path = tmp_path / "step-00000002" / "shard-00001.safetensors"  # which the other rank does not read
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for told in pool.run(_told_of_damage, 2, str(tmp_path)):
        assert "step-00000002/shard-00001.safetensors bytes" in told
        assert "differ from what was written" in told


def _told_of_failure(world: World, folder: str) -> str:
    with pytest.raises(RunFailed) as told:
        steps(world, "zero=3 mb=2", "llama", folder, 0, 1)
    return str(told.value)


def test_a_save_that_one_rank_cannot_make_fails_on_all(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for told in pool.run(_told_of_failure, 2, str(tmp_path / "file" / "below")):
        assert "was not saved" in told
        assert "rank 0" in told
