"""What an engine computes at stage 0 in bf16, held against DeepSpeed's optimizer for 16 bits in plain torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal.deepspeed as deepspeed

ACCUMULATED, STEPS, CLIP = 3, 6, 0.1  # of two, one rounding at the end would be the same
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-2, "warmup_num_steps": 3}}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.5, "torch_adam": True}}
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": ACCUMULATED,
    "bf16": {"enabled": True},
    "optimizer": ADAMW,
    "scheduler": WARMUP,
    "gradient_clipping": CLIP,
}


def net() -> nn.Module:
    """Weights that bfloat16 can hold."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).bfloat16().float()


def microbatch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, 8, generator=generator).bfloat16(), torch.randint(0, 4, (4,), generator=generator)


def by_hand(*, rounds: bool) -> list[float]:
    """Weights in bfloat16, copies in float32, and a step with gradients of zero before all others."""
    low, wide = net().bfloat16(), net()
    optimizer = torch.optim.AdamW(wide.parameters(), lr=1e-2, weight_decay=0.5)
    if rounds:
        for parameter in wide.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    schedule = deepspeed.WarmupLR(optimizer, warmup_max_lr=2e-2, warmup_num_steps=3)
    losses = []
    for step in range(STEPS):
        sums = [torch.zeros_like(p) for p in wide.parameters()]
        for part in range(ACCUMULATED):
            x, y = microbatch(ACCUMULATED * step + part)
            loss = F.cross_entropy(low(x).float(), y)
            losses.append(loss.item())
            gradients = torch.autograd.grad(loss / ACCUMULATED, list(low.parameters()))
            sums = [total + one.float() for total, one in zip(sums, gradients, strict=True)]
            if rounds:
                sums = [total.bfloat16().float() for total in sums]
        for parameter, gradient in zip(wide.parameters(), sums, strict=True):
            parameter.grad = gradient
        nn.utils.clip_grad_norm_(wide.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        low = copy.deepcopy(wide).bfloat16()
    return losses


def by_engine(**config: Any) -> list[float]:
    model = net()
    engine, *_ = deepspeed.initialize(model=model, config={**CONFIG, **config})
    losses = []
    for number in range(ACCUMULATED * STEPS):
        x, y = microbatch(number)
        loss = F.cross_entropy(engine(x).float(), y)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    engine.destroy()
    return losses


def test_losses_are_those_of_its_optimizer_for_16_bits() -> None:
    expected = by_hand(rounds=True)
    assert by_engine() == pytest.approx(expected, abs=1e-6)
    assert max(abs(a - b) for a, b in zip(expected, by_hand(rounds=False), strict=True)) > 1e-3  # so it matters


def test_sums_in_float32_are_exact() -> None:
    found = by_engine(data_types={"grad_accum_dtype": "fp32"})
    assert found == pytest.approx(by_hand(rounds=False), abs=1e-6)


def test_a_resumed_engine_makes_no_step_of_zeros(tmp_path: Any) -> None:
    """The step with gradients of zero belongs to the first update of a training, not to that of a process."""

    def engine() -> Any:
        return deepspeed.initialize(model=net(), config={**CONFIG, "gradient_accumulation_steps": 1})[0]

    def step(engine: Any, number: int) -> None:
        x, y = microbatch(number)
        engine.backward(F.cross_entropy(engine(x).float(), y))
        engine.step()

    first = engine()
    step(first, 0)
    first.save_checkpoint(tmp_path)
    step(first, 1)
    expected = {name: p.detach().clone() for name, p in first.module.named_parameters()}
    first.destroy()
    second = engine()
    second.load_checkpoint(tmp_path)
    step(second, 1)
    for name, parameter in second.module.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    assert second.run.engine.state.on_gradients is not None
    second.destroy()
