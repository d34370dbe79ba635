"""shoal's AdamW against torch's, and its moments in bfloat16."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from shoal.config.recipe import OptimSection
from shoal.numerics.optim.adamw import AdamW
from shoal.numerics.optim.adamw_host import PIECE, update_on_host
from shoal.numerics.optim.adamw_update import Update, stochastically_rounded, update_plainly
from shoal.numerics.optim.build import build_optimizer, step_scaled
from tests.rejects import rejects

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((64, 33), (17,))]


def give_gradients(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step + 1)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_computes_what_torch_does(dtype: torch.dtype) -> None:
    ours, theirs = ([nn.Parameter(w.detach().to(dtype)) for w in weights()] for _ in range(2))
    mine, reference = AdamW(ours, **OPTIONS), torch.optim.AdamW(theirs, **OPTIONS)
    for step in range(5):
        for parameters, optimizer in ((ours, mine), (theirs, reference)):
            give_gradients(parameters, step)
            optimizer.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
        for name in ("exp_avg", "exp_avg_sq", "step"):
            torch.testing.assert_close(mine.state[one][name], reference.state[other][name], rtol=1e-6, atol=1e-7)


def test_a_divisor_and_a_dropped_step() -> None:
    ours, theirs = weights(), weights()
    mine, reference = AdamW(ours, **OPTIONS), torch.optim.AdamW(theirs, fused=True, **OPTIONS)
    for step in range(4):
        for parameters, optimizer in ((ours, mine), (theirs, reference)):
            give_gradients(parameters, step)
            step_scaled(optimizer, divisor=torch.tensor(2.0), is_dropped=torch.tensor(float(step == 2)))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
        assert float(mine.state[one]["step"]) == 3.0


def test_rounding_at_random_has_the_right_mean_and_two_values() -> None:
    x = torch.full((200_000,), 1.0 + 2**-9)  # a quarter of the way from 1 to the next bfloat16
    rounded = stochastically_rounded(x, torch.Generator().manual_seed(0)).float()
    assert set(rounded.unique().tolist()) == {1.0, 1.0 + 2**-7}
    assert abs(float(rounded.mean()) - float(x[0])) < 1e-4


def bf16_of(values: Tensor, seed: int) -> list[Tensor]:
    """Weight and moments in bfloat16 after an update on the host that leaves them as they are: lr and gradient are 0,
    and so is the decay of the moments."""
    stored = [torch.zeros_like(values, dtype=torch.bfloat16) for _ in range(3)]
    update = Update(
        step=torch.tensor(1.0), lr=0.0, betas=(0.0, 0.0), eps=1.0, decay=0.0, seed=seed, divisor=None, dropped=None
    )
    update_on_host(stored[0], values, stored[1], stored[2], update)
    return stored


@pytest.mark.parametrize("size", [1, 1000, PIECE + 3])
def test_on_the_host_the_numbers_are_those_of_one_tensor_at_a_time(size: int) -> None:
    """In float32 to rounding; in bfloat16 within one step of it, and on both sides."""
    generator = torch.Generator().manual_seed(0)
    weight, gradient, first = torch.randn(3, size, generator=generator)
    second = torch.rand(size, generator=generator)
    update = Update(
        step=torch.tensor(7.0), lr=0.1, betas=(0.9, 0.95), eps=1e-8, decay=0.1, seed=3,
        divisor=torch.tensor(2.0), dropped=None,
    )  # fmt: skip
    exact = [weight.double(), first.double(), second.double()]
    update_plainly(exact[0], gradient.double(), exact[1], exact[2], update)
    for dtypes in ([torch.float32] * 3, [torch.float32] + [torch.bfloat16] * 2, [torch.bfloat16] * 3):
        stored = [one.to(dtype) for one, dtype in zip((weight, first, second), dtypes, strict=True)]
        begin = [one.double() for one in stored]
        update_plainly(begin[0], gradient.double(), begin[1], begin[2], update)
        update_on_host(stored[0], gradient.clone(), stored[1], stored[2], update)
        assert float(update.step) == 7.0
        for one, expected, dtype in zip(stored, begin, dtypes, strict=True):
            tolerance = 2**-7 if dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(one.double(), expected, rtol=tolerance, atol=1e-6)
            if dtype == torch.bfloat16 and size >= 1000:
                assert 0.45 < float((one.double() > expected).double().mean()) < 0.55


@pytest.mark.parametrize("stride", [1, 2])
def test_on_the_host_gradients_are_divided_in_their_own_precision(stride: int) -> None:
    """Divided by a number in float32, they would differ in the eighth digit; and the script keeps its gradient."""
    stored = list(torch.rand(4, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    divisor = torch.tensor(1 / 3, dtype=torch.float64)
    update = Update(
        step=torch.tensor(2.0), lr=0.1, betas=(0.9, 0.95), eps=1e-8, decay=0.1, seed=3, divisor=divisor, dropped=None
    )
    here, there = ([one.clone()[::stride] for one in stored] for _ in range(2))
    update_on_host(*here, update)
    update_plainly(*there, update)
    assert torch.equal(here[1], stored[1][::stride])
    for one, other in zip(here, there, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_on_the_host_the_default_dtype_does_not_matter(dtype: torch.dtype) -> None:
    expected = bf16_of(torch.full((1000,), 1.003), 1)
    torch.set_default_dtype(dtype)
    try:
        found = bf16_of(torch.full((1000,), 1.003, dtype=torch.float32), 1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, found, expected))


def test_on_the_host_rounding_at_random_has_the_right_mean_in_every_step() -> None:
    value = 1.0 + 2**-9
    x = torch.full((200_000,), value)  # a quarter of the way from 1 to the next bfloat16; its square is a half
    moments = [bf16_of(x, seed)[1:] for seed in (1, 2, 3)]
    for first, second in moments:
        assert set(first.float().unique().tolist()) == {1.0, 1.0 + 2**-7}
        assert abs(float(first.float().mean()) - value) < 1e-4
        assert abs(float(second.float().mean()) - value**2) < 1e-4
    ups = torch.stack([first.float() > 1 for first, _ in moments] + [moments[0][1].float() > 1]).double()
    correlation = torch.corrcoef(ups) - torch.eye(4, dtype=torch.float64)
    assert float(correlation.abs().max()) < 0.02, "rounding of steps and of moments is independent"


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7F800000, 0])
def test_on_the_host_what_is_not_finite_stays_so(bits: int) -> None:
    x = torch.tensor([bits, 0x3F800000], dtype=torch.int32).view(torch.float32)
    for stored in bf16_of(x, 5)[1:]:
        assert stored.isfinite().tolist() == [bool(x[0].isfinite()), True]
        assert bits or float(stored[0]) == 0.0


def test_a_moment_in_bf16_still_moves_by_less_than_a_step() -> None:
    """Rounded to the nearest, a second moment that shrinks by 0.1 % a step would stand still."""
    parameter = nn.Parameter(torch.ones(4096))
    optimizer = AdamW([parameter], lr=0.0, betas=(0.9, 0.999), weight_decay=0.0, state_dtype="bf16")
    parameter.grad = torch.ones(4096)
    optimizer.step()
    start = optimizer.state[parameter]["exp_avg_sq"].float().mean()
    parameter.grad = torch.zeros(4096)
    for _ in range(500):
        optimizer.step()
    moment = optimizer.state[parameter]["exp_avg_sq"]
    assert moment.dtype == torch.bfloat16
    assert float(moment.float().mean() / start) == pytest.approx(0.999**500, rel=0.01)


def quadratic_losses(states: str) -> list[float]:
    target = torch.randn(256, 16, generator=torch.Generator().manual_seed(5))
    parameter = nn.Parameter(torch.zeros(256, 16))
    optimizer = build_optimizer([parameter], OptimSection(state_dtype=states, weight_decay=0.0), lr=1e-2)  # type: ignore[arg-type]
    losses: list[float] = []
    for _ in range(200):
        loss = (parameter - target).square().mean()
        (parameter.grad,) = torch.autograd.grad(loss, (parameter,))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_it_trains_as_with_states_in_fp32() -> None:
    exact, rounded = quadratic_losses("fp32"), quadratic_losses("bf16")
    assert exact[-1] < 0.1 * exact[0]
    assert rounded[-1] == pytest.approx(exact[-1], rel=0.05)


def test_the_same_again_and_from_a_saved_state() -> None:
    def run(steps: range, parameters: list[nn.Parameter], optimizer: AdamW) -> list[Tensor]:
        for step in steps:
            give_gradients(parameters, step)
            optimizer.step()
        return [parameter.detach().clone() for parameter in parameters]

    first, again = weights(), weights()
    whole = run(range(6), first, AdamW(first, state_dtype="bf16", **OPTIONS))
    half = AdamW(again, state_dtype="bf16", **OPTIONS)
    run(range(3), again, half)
    resumed = AdamW(again, state_dtype="bf16", **OPTIONS)
    resumed.load_state_dict(copy.deepcopy(half.state_dict()))
    for one, other in zip(whole, run(range(3, 6), again, resumed), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_copies_of_one_parameter_are_rounded_alike_wherever_they_stand() -> None:
    """The two ends of a pipeline each hold a tied embedding, among other parameters."""
    first, last = nn.Parameter(torch.ones(64, 8)), nn.Parameter(torch.ones(64, 8))
    ends = (
        AdamW([first, *weights()], state_dtype="bf16", **OPTIONS),
        AdamW([*weights(), last], state_dtype="bf16", **OPTIONS),
    )
    for step in range(4):
        for optimizer in ends:
            for group in optimizer.param_groups:
                give_gradients(group["params"], step)
        first.grad = torch.randn(64, 8, generator=torch.Generator().manual_seed(step))
        last.grad = first.grad.clone()
        for optimizer in ends:
            optimizer.step()
    assert torch.equal(first, last)


def test_a_copy_of_an_optimizer_is_one() -> None:
    parameters = weights()
    again = copy.deepcopy(AdamW(parameters, state_dtype="bf16", **OPTIONS))
    give_gradients(again.param_groups[0]["params"], 0)
    step_scaled(again, divisor=None, is_dropped=torch.tensor(0.0))
    assert {state["exp_avg"].dtype for state in again.state.values()} == {torch.bfloat16}


def test_what_is_not_a_number_is_not_rounded_to_one() -> None:
    bits = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    assert stochastically_rounded(bits, torch.Generator().manual_seed(0)).isnan().all()


def test_moments_of_narrow_weights_are_loaded_as_they_were_saved() -> None:
    """torch casts what it loads to the precision of the weights, and moments in float32 came back as bfloat16."""
    ours, others = ([nn.Parameter(w.detach().bfloat16()) for w in weights()] for _ in range(2))
    mine, loaded = AdamW(ours, **OPTIONS), AdamW(others, **OPTIONS)
    for step in range(3):
        give_gradients(ours, step)
        mine.step()
    loaded.load_state_dict(mine.state_dict())
    for one, other in zip(ours, others, strict=True):
        for name in ("step", "exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(loaded.state[other][name], mine.state[one][name], rtol=0, atol=0)


def test_it_goes_on_from_the_states_of_torchs_own() -> None:
    ours, theirs = weights(), weights()
    mine, reference = AdamW(ours, **OPTIONS), torch.optim.AdamW(theirs, **OPTIONS)
    give_gradients(theirs, 0)
    reference.step()
    mine.load_state_dict(reference.state_dict())
    for one, other in zip(ours, theirs, strict=True):
        one.data.copy_(other.data)
    for parameters, optimizer in ((ours, mine), (theirs, reference)):
        give_gradients(parameters, 1)
        optimizer.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "value"),
    [("state_dtype", "fp16"), ("lr", -1e-3), ("betas", (1.0, 0.9)), ("eps", -1.0), ("weight_decay", -0.1)],
)
def test_options_that_cannot_be_are_told_when_it_is_made(name: str, value: object) -> None:
    with rejects("T036", match=f"{name} must be"):
        AdamW(weights(), **{**OPTIONS, name: value})
    with rejects("T036", match=f"{name} must be"):
        AdamW([{"params": weights(), name: value}], **OPTIONS)


def test_a_closure_is_refused_in_words() -> None:
    with rejects("T037"):
        AdamW(weights(), **OPTIONS).step(lambda: None)
