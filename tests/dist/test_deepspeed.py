"""The engine of `shoal.deepspeed`: DeepSpeed's arithmetic on every stage, and all that scripts call."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal.deepspeed as deepspeed
from shoal.comm.world import World
from shoal.deepspeed import api
from shoal.errors import ShoalError
from tests.dist.pool import Pool, on_ranks

ACCUMULATED, STEPS = 2, 4


def config(stage: int, **others: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": ACCUMULATED,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
        "gradient_clipping": 0.1,
        **others,
    }


def build(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))


def microbatch(number: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * number + rank)
    y = torch.randint(0, 5, (4,), generator=generator)
    y[: number % 3 + rank] = -100  # other numbers of labels count on each rank
    return torch.randn(4, 6, generator=generator), y


def loss_of(model: Any, number: int, rank: int) -> Tensor:
    x, y = microbatch(number, rank)
    return F.cross_entropy(model(x), y, ignore_index=-100)


def by_hand(ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    """DeepSpeed's arithmetic in one process: the mean of the means, clipped, AdamW, and a logarithmic warm-up."""
    import math

    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        iteration = step - 1
        optimizer.param_groups[0]["lr"] = (
            0.05 * math.log(max(iteration, 0) + 1) / math.log(4) if iteration < 4 else 0.05
        )
        parts = [
            loss_of(model, step * ACCUMULATED + part, rank) for part in range(ACCUMULATED) for rank in range(ranks)
        ]
        loss = torch.stack(parts).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(model.state_dict())


def trained(world: World, stage: int, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    api._worlds[:] = [world]
    model = build(seed=3 + world.rank)  # rank 0's weights are everyone's, as in DeepSpeed
    engine, optimizer, loader, schedule = deepspeed.initialize(model=model, config=config(stage))
    assert loader is None
    assert engine.lr_scheduler is schedule
    losses = []
    for number in range(STEPS * ACCUMULATED):
        assert engine.is_gradient_accumulation_boundary() == (number % ACCUMULATED == 1)
        loss = loss_of(engine, number, world.rank)
        returned = engine.backward(loss)
        assert torch.equal(returned, loss.detach() / ACCUMULATED)
        engine.step()
        losses.append(loss.item())
        if number == STEPS * ACCUMULATED // 2 - 1:
            engine.save_checkpoint(folder, client_state={"epoch": 3})
    if stage:  # resume in an engine of another stage: the second half has the same losses
        other, _, _, _ = deepspeed.initialize(model=build(), config=config(3 - stage))
        path, client = other.load_checkpoint(folder)
        assert path is not None
        assert Path(path).name == "global_step2"
        assert client == {"epoch": 3}
        assert (other.global_steps, other.micro_steps, other.global_samples) == (2, 4, 2 * 8 * world.size)
        for number in range(STEPS * ACCUMULATED // 2, STEPS * ACCUMULATED):
            loss = loss_of(other, number, world.rank)
            other.backward(loss)
            other.step()
            assert loss.item() == pytest.approx(losses[number], rel=1e-5)
    mean = engine.run.world.all_reduce_host(losses).wait()
    merged = [mean[2 * step] + mean[2 * step + 1] for step in range(STEPS)]
    assert engine.get_lr() == [pytest.approx(0.05 * 1.0 if STEPS > 4 else optimizer.param_groups[0]["lr"])]
    norm = engine.get_global_grad_norm()
    assert norm is not None
    assert norm > 0.1  # before clipping
    return [each / (ACCUMULATED * world.size) for each in merged], engine.run.weights()


@pytest.mark.parametrize("stage", [0, 1, pytest.param(2, marks=pytest.mark.wide), 3])
def test_every_stage_is_deepspeeds_arithmetic(pool: Pool, stage: int, tmp_path: Path) -> None:
    losses, weights = pool.run(trained, 2, stage, str(tmp_path))[0]
    expected, by_name = by_hand(2)
    assert losses == pytest.approx(expected, rel=1e-6)
    for name, tensor in by_name.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6)


def with_own_boundaries(world: World, stage: int, way: str) -> dict[str, Tensor]:
    """The same training, whose script says itself which backward is the last one of a step."""
    api._worlds[:] = [world]
    number_of_config = 1 if way == "no_sync" else ACCUMULATED
    words = config(stage, gradient_accumulation_steps=number_of_config)
    engine, *_ = deepspeed.initialize(model=build(), config=words)
    for number in range(STEPS * ACCUMULATED):
        is_last = number % ACCUMULATED == ACCUMULATED - 1
        if way == "boundary":
            engine.set_gradient_accumulation_boundary(is_last)
        with engine.no_sync() if way == "no_sync" and not is_last else nullcontext():
            loss = loss_of(engine, number, world.rank)
            engine.backward(loss * number_of_config / ACCUMULATED)
        if is_last:
            engine.step()
    assert (engine.global_steps, engine.micro_steps) == (STEPS, STEPS)
    return engine.run.weights()


@pytest.mark.parametrize("way", ["boundary", "no_sync"])
@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.wide), 2, 3])
def test_a_script_may_say_where_a_step_ends(pool: Pool, stage: int, way: str) -> None:
    weights = pool.run(with_own_boundaries, 2, stage, way)[0]
    for name, tensor in by_hand(2)[1].items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_what_scripts_call(world: World) -> None:
    api._worlds[:] = [world]
    data = torch.utils.data.TensorDataset(torch.randn(32, 6), torch.randint(0, 5, (32,)))
    model = build()
    engine, optimizer, loader, _ = deepspeed.initialize(
        model=model,
        model_parameters=[{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}],
        training_data=data,
        config=config(2, bf16={"enabled": True}),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
    )
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.05]
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (16, 4)
    assert engine.gradient_accumulation_steps() == ACCUMULATED
    assert engine.bfloat16_enabled()
    assert engine.zero_optimization_stage() == 2
    assert (engine.world_size, engine.global_rank) == (2, world.rank)
    for x, y in loader:
        loss = F.cross_entropy(engine(x), y)
        engine.backward(loss)
        engine.step()
    assert (engine.global_steps, engine.skipped_steps) == (2, 0)
    assert engine.get_lr() == [pytest.approx(0.001), pytest.approx(0.0005)]
    engine.eval()
    with torch.no_grad():
        engine(x)
    assert not engine.module.training
    assert engine.train().append is not None  # a method of the model
    with pytest.raises(ShoalError, match="E015"):
        engine.step()
