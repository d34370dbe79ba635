"""On a GPU: experts in one grouped matmul are those of a loop, and layouts with ep and cp compute what one GPU does."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

import shoal
from shoal.models import llama, moe
from shoal.numerics.ops.experts.fused import fused_experts, has_fused_experts
from shoal.numerics.ops.experts.grouped_matmul import grouped_matmul, has_grouped_kernel
from shoal.numerics.ops.experts.split_product import has_split_product, split_product
from shoal.parallel.expert.experts import Experts
from shoal.parallel.expert.router import Routing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),  # in the first backward of a process
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a CUDA device; CI has none, run by hand with one"),
]

VOCABULARY, TOKENS = 97, 16
SHAPE = {"hidden": 32, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "vocabulary": VOCABULARY, "preset": "tiny"}
LLAMA = functools.partial(llama.build, **SHAPE, ffn=48)
MOE = functools.partial(moe.build, **SHAPE, expert_ffn=16, num_experts=4, top_k=2, auxiliary_coefficient=0.1)
BIASED = functools.partial(
    moe.build,
    **SHAPE,
    expert_ffn=16,
    num_experts=4,
    top_k=2,
    auxiliary_coefficient=0.0,
    score="sigmoid",
    bias_rate=0.05,
)


def relative(ours: Tensor, exact: Tensor) -> float:
    return ((ours.double() - exact).norm() / exact.norm()).item()


# ---- arithmetic -----------------------------------------------------------------------------------------------------


def looped(x_RD: Tensor, w_EDF: Tensor, ends: list[int]) -> Tensor:
    """One matmul after the other, in the precision at hand."""
    starts = [0, *ends[:-1]]
    return torch.cat([x_RD[start:end] @ w for start, end, w in zip(starts, ends, w_EDF, strict=True)])


@pytest.mark.parametrize(
    "ends", [[100, 200, 300, 400], [0, 1, 399, 400], [400, 400, 400, 400], [13, 13, 200, 400]], ids=str
)
def test_a_grouped_matmul_is_a_loop(ends: list[int]) -> None:
    """Forward and both gradients in bfloat16, also of experts without a row; at most twice as far from float64 as one
    matmul after the other, and a hundredth at most."""
    generator = torch.Generator("cuda").manual_seed(0)
    x_RD = torch.randn(400, 64, device="cuda", generator=generator).bfloat16()
    w_EFD = torch.randn(4, 128, 64, device="cuda", generator=generator).bfloat16()
    grad_RF = torch.randn(400, 128, device="cuda", generator=generator).bfloat16()
    results = {}
    for name in ("exact", "loop", "ours"):
        dtype = torch.float64 if name == "exact" else torch.bfloat16
        x, w = (tensor.to(dtype, copy=True).requires_grad_() for tensor in (x_RD, w_EFD))
        w_EDF = w.transpose(1, 2)  # as the weights lie in memory
        if name == "ours":
            assert has_grouped_kernel(x, w_EDF)
            y = grouped_matmul(x, w_EDF, torch.tensor(ends, dtype=torch.int32, device="cuda"))
        else:
            y = looped(x, w_EDF, ends)
        y.backward(grad_RF.to(dtype))
        results[name] = (y.detach(), x.grad, w.grad)
    for which, exact, loop, ours in zip(("y", "dx", "dw"), *results.values(), strict=True):
        assert relative(ours, exact) < min(1e-2, 2 * relative(loop, exact) + 1e-6), which


def written_down(experts: Experts, x_TD: Tensor, chosen_Tk: Tensor, weight_Tk: Tensor) -> Tensor:
    """Every expert for every token, weighted by zero where it was not chosen."""
    weight_TE = torch.zeros(x_TD.shape[0], experts.num_experts, dtype=x_TD.dtype, device=x_TD.device)
    weight_TE = weight_TE.scatter(1, chosen_Tk, weight_Tk.to(x_TD.dtype))
    gate, up = (w.view(-1, experts.ffn, experts.hidden) for w in (experts.gate_proj, experts.up_proj))
    down = experts.down_proj.view(-1, experts.hidden, experts.ffn)
    product = torch.nn.functional.silu(torch.einsum("td,efd->tef", x_TD, gate)) * torch.einsum("td,efd->tef", x_TD, up)
    return torch.einsum("tef,edf,te->td", product, down, weight_TE)


# Tolerances: sums in float64 in another order; bfloat16 rounds to 3 digits five times on the way.
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)], ids=["float64", "bfloat16"]
)
@pytest.mark.parametrize("favourite", [False, True], ids=["even", "two experts without a token"])
def test_experts_compute_what_is_written_down(dtype: torch.dtype, tolerance: float, favourite: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    exact = Experts(64, 32, 8).to("cuda", torch.float64)
    for parameter in exact.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=generator)
        parameter.data = parameter.data.to(dtype).double()
    ours = Experts(64, 32, 8).to("cuda", dtype)
    ours.load_state_dict(exact.state_dict())
    x_TD = torch.randn(160, 64, device="cuda", generator=generator).to(dtype)
    chosen_Tk = torch.rand(160, 6 if favourite else 8, device="cuda", generator=generator).topk(2).indices
    weight_Tk = torch.rand(160, 2, device="cuda", generator=generator)
    grad = torch.randn(160, 64, device="cuda", generator=generator).to(dtype)
    x, weight = x_TD.clone().requires_grad_(), weight_Tk.clone().requires_grad_()
    token_R = torch.arange(320, device="cuda") // 2
    y = ours(x, Routing(token_R, chosen_Tk.flatten(), weight.flatten(), 160, 2))
    y.backward(grad)
    x_exact, weight_exact = x_TD.double().requires_grad_(), weight_Tk.double().requires_grad_()
    y_exact = written_down(exact, x_exact, chosen_Tk, weight_exact)
    y_exact.backward(grad.double())
    pairs = [("y", y, y_exact), ("dx", x.grad, x_exact.grad), ("dweight", weight.grad, weight_exact.grad)]
    pairs += [(n, p.grad, q.grad) for (n, p), q in zip(ours.named_parameters(), exact.parameters(), strict=True)]
    for name, found, expected in pairs:
        assert found is not None
        assert relative(found, expected) < (1e-6 if name == "dweight" and dtype == torch.float64 else tolerance), name


SIZES = {"small": (160, 2, 64, 32, 8), "one each": (333, 1, 128, 264, 4), "many": (1000, 8, 256, 136, 64)}
"""Tokens, experts of a token, features of a token and inside an expert, experts."""


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # torch's own, while it compiles
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_fused_experts(size: tuple[int, ...], weights: torch.dtype, is_compiled: bool) -> None:
    """Outputs and all gradients, which have the dtype of the weights. The last expert has no token."""
    num_tokens, top_k, hidden, ffn, num_experts = size
    generator = torch.Generator("cuda").manual_seed(2)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    chosen_Tk = torch.rand(num_tokens, num_experts - 1, device="cuda", generator=generator).topk(top_k).indices
    matrices = [drawn(num_experts * ffn, hidden), drawn(num_experts * ffn, hidden), drawn(num_experts * hidden, ffn)]
    inputs = [drawn(num_tokens, hidden).bfloat16(), drawn(num_tokens, top_k).sigmoid()]
    leaves = [x.requires_grad_() for x in (*inputs, *((0.05 * w).to(weights) for w in matrices))]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    if not has_fused_experts(leaves[0], leaves[-1]):
        pytest.skip("needs a Hopper GPU")
    call = torch.compile(fused_experts, fullgraph=True) if is_compiled else fused_experts
    y, grad = call(leaves[0], chosen_Tk, *leaves[1:]), drawn(num_tokens, hidden).bfloat16()
    y.backward(grad)
    reference = Experts(hidden, ffn, num_experts)
    reference.gate_proj, reference.up_proj, reference.down_proj = map(torch.nn.Parameter, exact[2:])
    y_exact = written_down(reference, exact[0], chosen_Tk, exact[1])
    y_exact.backward(grad.double())
    exact[2:] = reference.parameters()
    assert relative(y, y_exact) < 1e-2
    for number, (ours, right) in enumerate(zip(leaves, exact, strict=True)):
        assert ours.grad is not None
        assert right.grad is not None
        assert ours.grad.dtype == ours.dtype
        assert relative(ours.grad, right.grad) < 1e-2, number
    assert leaves[2].grad is not None
    assert not leaves[2].grad[-ffn:].any()


def test_a_split_product_has_the_digits_of_float32() -> None:
    """Six of its seven; TF32 has three."""
    generator = torch.Generator("cuda").manual_seed(3)
    x_BTD = torch.randn(2, 3000, 512, device="cuda", generator=generator).bfloat16().requires_grad_()
    w_ED = torch.randn(24, 512, device="cuda", generator=generator).requires_grad_()
    grad_BTE = torch.randn(2, 3000, 24, device="cuda", generator=generator)
    assert has_split_product(x_BTD, w_ED)
    y = split_product(x_BTD, w_ED)
    y.backward(grad_BTE)
    x, w = (tensor.detach().double().requires_grad_() for tensor in (x_BTD, w_ED))
    exact = torch.nn.functional.linear(x, w)
    exact.backward(grad_BTE.double())
    assert relative(y, exact) < 2e-6
    assert w_ED.grad is not None
    assert w.grad is not None
    assert relative(w_ED.grad, w.grad) < 2e-6
    assert x_BTD.grad is not None
    assert x.grad is not None
    assert relative(x_BTD.grad, x.grad) < 3e-3  # it is in bfloat16


# ---- layouts --------------------------------------------------------------------------------------------------------


def batch_of(num_samples: int) -> dict[str, Tensor]:
    """No token comes twice in a sample: between two that no router can tell apart, rounding would choose."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.rand(num_samples, VOCABULARY, generator=generator).argsort(1)[:, : TOKENS + 1]
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize(
    ("build", "nproc", "plan"),
    [
        pytest.param(LLAMA, 2, "cp=2 mb=2", id="cp2"),
        pytest.param(LLAMA, 2, "cp=2 ulysses mb=2", id="cp2-ulysses"),
        pytest.param(LLAMA, 4, "cp=4 mb=2", id="cp4"),
        pytest.param(LLAMA, 4, "cp=2 tp=2 mb=2", id="cp2-tp2"),
        pytest.param(LLAMA, 4, "cp=2 pp=2 1f1b mb=1", id="cp2-pp2"),
        pytest.param(MOE, 2, "ep=2 zero=3 mb=2", id="ep2-zero3"),
        pytest.param(MOE, 4, "ep=2 cp=2 zero=3 mb=2", id="ep2-cp2-zero3"),
        pytest.param(MOE, 4, "ep=2 pp=2 zero=1 1f1b mb=1", id="ep2-pp2-zero1"),
        pytest.param(BIASED, 4, "ep=4 zero=2 mb=2", id="ep4-biased"),
    ],
)
def test_a_layout_computes_what_one_gpu_does(build: functools.partial, nproc: int, plan: str, precision: str) -> None:
    """In bfloat16 rounding may send a token that hesitates to another expert, so a mixture's gradients are compared in
    the precision in which layouts cannot differ, and its losses in both."""
    proof = shoal.verify(build, batch_of(8), plan, nproc=nproc, device="cuda", precision=precision)
    worst = proof.verdict.worst
    print(f"{plan} {precision}: loss {worst.loss:.1e}, gradient {worst.grad:.1e}, weight {worst.weight:.1e}")
    if precision == "bf16" and build is not LLAMA:
        assert worst.loss < 1e-3, proof.cause
    else:
        assert proof.equal, proof.cause
