"""What is done differently on a GPU to be fast, against float64 and against plain eager torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal import Run
from shoal.data.batch import stream_of_copies, to_device
from shoal.models.llama import Llama, LlamaConfig
from shoal.numerics.ops import fused_linear_cross_entropy as fused
from shoal.numerics.ops.fused_linear_cross_entropy import cross_entropy_, linear_cross_entropy
from shoal.numerics.ops.memory_saving_linear import RMSNorm, rms_norm_linear
from shoal.numerics.optim.adamw import AdamW, _stream_beside
from shoal.numerics.optim.build import step_scaled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; CI has none, run by hand with one"),
]

IGNORE = -100


def relative(found: Tensor, expected: Tensor) -> float:
    return float(((found.double() - expected.double()).norm() / expected.double().norm()).detach())


# ---- the loss -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [7, 1024, 32000, 128256, 256000])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
def test_the_kernel_of_cross_entropy(vocabulary: int, dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(vocabulary)
    whole = torch.full((64, vocabulary + 8), torch.nan, dtype=dtype, device="cuda")
    logits = whole[:, :vocabulary].copy_(torch.randn(64, vocabulary, device="cuda") * 4)
    labels = torch.randint(0, vocabulary, (64,), device="cuda")
    labels[::5] = IGNORE
    exact = logits.double().detach().requires_grad_()
    expected = F.cross_entropy(exact, labels, ignore_index=IGNORE, reduction="sum")
    expected.backward()
    total = cross_entropy_(logits, labels, ignore=IGNORE, with_gradient=True)
    assert relative(total, expected) < 1e-6
    assert exact.grad is not None
    assert relative(logits, exact.grad) < bound
    assert whole[:, vocabulary:].isnan().all(), "it wrote beside the logits"


def test_a_label_that_is_no_word_gives_no_number() -> None:
    logits = torch.randn(4, 100, device="cuda")
    labels = torch.tensor([0, 100, 3, -1], device="cuda")
    assert cross_entropy_(logits, labels, ignore=IGNORE, with_gradient=True).isnan()
    assert logits.isnan().any(dim=1).tolist() == [False, True, False, True], "its step would be made"


@pytest.mark.parametrize(("autocast", "bound"), [(None, 1e-5), (torch.bfloat16, 1e-2)])
def test_fused_linear_cross_entropy_in_chunks(
    autocast: torch.dtype | None, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    h = torch.randn(1000, 256, device="cuda", requires_grad=True)
    weight = (torch.randn(32000, 256, device="cuda") * 0.05).requires_grad_()
    labels = torch.randint(0, 32000, (1000,), device="cuda")
    monkeypatch.setattr(fused, "CHUNK_BYTES", 32000 * 4 * 128)
    with torch.autocast("cuda", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        loss = linear_cross_entropy(h, weight, labels, ignore=IGNORE)
    found = torch.autograd.grad(loss, (h, weight))
    exact = [x.detach().double().requires_grad_() for x in (h, weight)]
    expected = F.cross_entropy(F.linear(*exact), labels, reduction="sum")
    wanted = torch.autograd.grad(expected, exact)
    assert relative(loss, expected) < min(bound, 1e-3)
    assert all(relative(mine, theirs) < bound for mine, theirs in zip(found, wanted, strict=True))


@pytest.mark.parametrize("tokens", [3, 7, 1000])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_loss_that_was_told_its_factor_has_nothing_left_to_multiply(
    tokens: int, autocast: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean over so many tokens, of an h that does not lie in one piece."""
    torch.manual_seed(0)
    whole = torch.randn(tokens, 512, device="cuda")
    weight = torch.randn(1000, 256, device="cuda") * 0.05
    labels = torch.randint(0, 1000, (tokens,), device="cuda")
    rests: list[float] = []
    times_ = fused._times_
    monkeypatch.setattr(fused, "_times_", lambda x, factors: (rests.append(factors), times_(x, factors))[1])
    found = {}
    for factor in (1.0, 1 / tokens):
        inputs = [whole[:, ::2].detach().requires_grad_(), weight.clone().requires_grad_()]
        with torch.autocast("cuda", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            loss = linear_cross_entropy(*inputs, labels, ignore=IGNORE, factor=factor)
        rests.clear()
        found[factor] = torch.autograd.grad(loss * (1 / tokens), inputs, retain_graph=True)
        assert [float(rest) == 1.0 for rest in rests] == [factor != 1.0] * 2
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, inputs)
    bound = 1e-6 if autocast is None else 1e-2
    assert all(relative(told, plain) < bound for told, plain in zip(*found.values(), strict=True))


# ---- a model --------------------------------------------------------------------------------------------------------

CONFIG = LlamaConfig(vocabulary=1024, hidden=512, num_layers=1, num_heads=8, num_kv_heads=2, ffn=1024, max_sequence=512)


def block_model(dtype: torch.dtype = torch.float32) -> Llama:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Llama(CONFIG)
    generator = torch.Generator("cuda").manual_seed(1)
    for name, parameter in model.named_parameters():
        model.init_parameter(name, parameter.data, generator)
    return model.to(dtype)


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 1024, (4, 513), generator=generator)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def plain_logits(weights: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """What a person would write: one block of a Llama of torch's own functions, nothing of shoal's."""
    size, at = CONFIG.hidden // CONFIG.num_heads, "model.layers.0."
    dtype = torch.promote_types(weights["lm_head.weight"].dtype, torch.float32)
    frequencies = CONFIG.rope_theta ** -(torch.arange(0, size, 2, dtype=dtype, device=tokens.device) / size)
    angles = torch.outer(torch.arange(tokens.shape[1], dtype=dtype, device=tokens.device), frequencies)
    cos, sin = angles.cos(), angles.sin()

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (CONFIG.hidden,), weights[name + ".weight"], CONFIG.norm_eps)

    def product(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[name + ".weight"])

    def turn(x: Tensor) -> Tensor:
        first, second = x.to(dtype).chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)

    x = F.embedding(tokens, weights["model.embed_tokens.weight"])
    y = norm(x, at + "input_layernorm")
    q, k, v = (product(y, f"{at}self_attn.{name}_proj").unflatten(-1, (-1, size)).transpose(1, 2) for name in "qkv")
    attended = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True, enable_gqa=True)
    x = x + product(attended.transpose(1, 2).flatten(2), at + "self_attn.o_proj")
    y = norm(x, at + "post_attention_layernorm")
    gated = F.silu(product(y, at + "mlp.gate_proj")) * product(y, at + "mlp.up_proj")
    x = x + product(gated, at + "mlp.down_proj")
    return product(norm(x, "model.norm"), "lm_head")


def plain_gradients(dtype: torch.dtype, *, autocast: bool = False) -> dict[str, Tensor]:
    model = block_model(dtype)
    given = {name: x.cuda() for name, x in batch().items()}
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        logits = plain_logits(dict(model.named_parameters()), given["tokens"])
    F.cross_entropy(logits.to(dtype).flatten(0, 1), given["labels"].flatten()).backward()
    return gradients(model)


def shoal_gradients(**options: Any) -> dict[str, Tensor]:
    model = block_model()
    found: dict[str, Tensor] = {}
    with Run("bf16", device="cuda", **options) as run:
        run.prepare(model)
        run.prepare(torch.optim.SGD(run.parameters, lr=0.0, fused=True))
        run.on_gradients = lambda: found.update(gradients(model))
        run.step(batch())
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compile": True},
        {"compile": True, "recompute_swiglu": False},
        {"attention": "flash"},
        {"fused_loss": False},
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile's own parts
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_one_block_in_bf16_is_as_exact_as_plain_torch(options: dict[str, Any]) -> None:
    exact, plain = plain_gradients(torch.float64), plain_gradients(torch.float32, autocast=True)
    ours = shoal_gradients(**options)
    assert ours.keys() == exact.keys()
    worst = max(relative(ours[name], exact[name]) for name in exact)
    of_plain = max(relative(plain[name], exact[name]) for name in exact)
    told = {name: (relative(ours[name], exact[name]), relative(plain[name], exact[name])) for name in exact}
    assert worst < 1e-2, told
    assert worst < 1.25 * of_plain, told


def test_projections_together_are_those_alone() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(64, width, bias=False, device="cuda") for width in (64, 16, 16)]
    norm = RMSNorm(64, eps=1e-5, device="cuda")
    x = torch.randn(8, 64, device="cuda", requires_grad=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        _, (joint,) = rms_norm_linear(x, norm, *layers, together=True)
        _, alone = rms_norm_linear(x, norm, *layers)
        called = [layer(norm(x)) for layer in layers]
    together = joint.split([64, 16, 16], dim=-1)
    assert all(relative(a, b) < 1e-2 for a, b in zip(together, called, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


@pytest.mark.parametrize(("dtype", "count"), [(torch.float32, 1), (torch.bfloat16, 2)])
def test_wide_projections_are_together_where_they_are_cast(dtype: torch.dtype, count: int) -> None:
    layers = [nn.Linear(64, 128, bias=False, device="cuda", dtype=dtype) for _ in range(2)]
    x = torch.randn(8, 64, device="cuda", requires_grad=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        _, products = rms_norm_linear(x, RMSNorm(64, eps=1e-5, device="cuda"), *layers, together=True)
    assert len(products) == count


# ---- nobody waits ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=["torch's", "shoal's", "shoal's in bf16"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    weights: Any = "bf16" if "bf16" in request.param else "fp32"
    with Run("bf16 mb=2", device="cuda", clip=1.0, param_dtype=weights) as run:
        run.prepare(block_model())
        if request.param == "torch's":
            run.prepare(torch.optim.AdamW(run.parameters, lr=1e-3, fused=True))
        else:
            run.prepare(AdamW(run.parameters, lr=1e-3, state_dtype=weights))
        yield run


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_step_does_not_wait_for_the_device(run: Run) -> None:
    run.step(batch())
    run.step(batch())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # every call that waits is an error
    try:
        run.step(batch())
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_next_batch_is_copied_while_the_device_computes() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    given = torch.arange(1 << 24, dtype=torch.float64).pin_memory()
    torch.cuda._sleep(1_000_000_000)  # the device computes for half a second
    moved = to_device({"x": given}, device, torch.float32)["x"]
    stream_of_copies(device).synchronize()
    assert not torch.cuda.current_stream().query(), "the copy has waited for what was computed before it"
    assert torch.equal(moved.cpu(), given.float())


def test_who_computes_waits_for_what_is_copied() -> None:
    """The stream of copies is late, and the batch is read at once."""
    device = torch.device("cuda", torch.cuda.current_device())
    for value in (1.0, 2.0):
        given = torch.full((1 << 20,), value).pin_memory()
        with torch.cuda.stream(stream_of_copies(device)):
            torch.cuda._sleep(100_000_000)
        moved = to_device({"x": given}, device, torch.float32)["x"]
        assert bool((moved.clone() == value).all())


def test_a_batch_is_kept_until_it_was_read() -> None:
    """The device is late, and the host has forgotten one batch and brought the next, which must not take its place."""
    device = torch.device("cuda", torch.cuda.current_device())
    batches = [torch.full((1 << 20,), value).pin_memory() for value in (1.0, 2.0)]
    read = []
    for given in batches:
        moved = to_device({"x": given}, device, torch.float32)["x"]
        torch.cuda._sleep(100_000_000)
        read.append(moved.clone())
        del moved
    assert [float(x.mean()) for x in read] == [1.0, 2.0]


def test_a_step_that_is_not_finite_is_dropped_on_the_device_and_told_late(run: Run) -> None:
    run.step(batch())
    before = [parameter.clone() for parameter in run.module.parameters()]
    with torch.no_grad():
        head = run.module.get_parameter("lm_head.weight")
        kept = head[0, 0].clone()
        head[0, 0] = torch.nan
    run.step(batch())
    with torch.no_grad():
        head[0, 0] = kept
    with pytest.raises(Exception, match="step 2: the loss is not finite on rank 0, microbatch 0"):
        run.step(batch())
    assert all(torch.equal(old, new) for old, new in zip(before, run.module.parameters(), strict=True))


# ---- the optimizer --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("states", "bound"), [("fp32", 1e-5), ("bf16", 2e-2)])
def test_the_kernel_of_adamw(states: Any, bound: float) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    ours, theirs = ([nn.Parameter(torch.ones(n, device="cuda")) for n in (5000, 7, 1 << 20)] for _ in range(2))
    mine, reference = AdamW(ours, state_dtype=states, **options), torch.optim.AdamW(theirs, fused=True, **options)
    for step in range(6):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        for optimizer in (mine, reference):
            dropped = torch.full((), float(step == 3), device="cuda")
            step_scaled(optimizer, divisor=torch.full((), 2.0, device="cuda"), is_dropped=dropped)
    for one, other in zip(ours, theirs, strict=True):
        assert relative(one - 1, other.detach() - 1) < bound
        assert relative(mine.state[one]["exp_avg"], reference.state[other]["exp_avg"]) < bound
        assert float(mine.state[one]["step"]) == 5.0


@pytest.mark.parametrize("late", ["gradients", "updates"])
def test_updates_in_two_streams_come_after_gradients_and_before_who_reads_weights(late: str) -> None:
    """Gradients that come late are waited for in both streams, and an update that comes late in the other one by who
    reads weights at once."""
    torch.manual_seed(0)
    ours, theirs = ([nn.Parameter(torch.ones(1 << 26, device="cuda")) for _ in range(4)] for _ in range(2))
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    mine, reference = AdamW(ours, **options), torch.optim.AdamW(theirs, fused=True, **options)
    gradients = [torch.randn_like(parameter) for parameter in ours]
    here, beside = torch.cuda.current_stream(), _stream_beside(ours[0].device)
    for _ in range(2):
        for one in ours:
            one.grad = torch.zeros_like(one)
        torch.cuda.synchronize()
        with torch.cuda.stream(here if late == "gradients" else beside):
            torch.cuda._sleep(200_000_000)
        for one, other, gradient in zip(ours, theirs, gradients, strict=True):
            assert one.grad is not None
            one.grad.copy_(gradient)
            other.grad = gradient
        mine.step()
        read = [one.detach().clone() for one in reversed(ours)]
        torch.cuda.synchronize()
        reference.step()
        assert all(relative(one - 1, other.detach() - 1) < 1e-5 for one, other in zip(read, theirs[::-1], strict=True))
