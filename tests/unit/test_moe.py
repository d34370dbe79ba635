"""Experts and the model around them against loops over tokens and experts, in float64; sizes against published ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.blueprint.description import Split, matches
from shoal.errors import ShoalError
from shoal.models import llama
from shoal.models.moe import PRESETS, Moe, MoeConfig, build
from shoal.models.moe_config import smaller
from shoal.numerics.init import can_fill, initialise, materialise
from shoal.numerics.ops.experts import grouped_matmul
from shoal.numerics.ops.experts.fused import has_fused_experts, sorted_by_expert
from shoal.numerics.ops.experts.split_product import bfloat16_parts
from shoal.numerics.ops.memory_saving_linear import RMSNorm
from shoal.parallel.expert import experts
from shoal.parallel.expert.aux_loss import AuxLoss
from shoal.parallel.expert.experts import ExpertParallel, Experts, divide, experts_in
from shoal.parallel.expert.router import Routing, auxiliary_loss, note_routers, routers
from tests.cover import wide
from tests.rejects import rejects

PUBLISHED = {"mixtral-8x7b": (46_702_792_704, 12.9e9), "qwen3-30b-a3b": (30_532_122_624, 3.3e9)}
T, D, FFN, E = 17, 8, 12, 5


def drawn(module: Any, seed: int = 0, std: float = 0.5) -> Any:
    generator = torch.Generator().manual_seed(seed)
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=std, generator=generator)
    return module


def a_routing(kind: str) -> Routing:
    """Rows with weights that have a gradient. k: two experts for each token. ragged: some tokens have none, some many,
    and expert 3 has no row."""
    generator = torch.Generator().manual_seed(3)
    if kind == "k":
        experts = torch.rand(T, E, generator=generator).topk(2).indices
        tokens, top_k = torch.arange(T).repeat_interleave(2), 2
    else:
        table = torch.rand(T, E, generator=generator) < 0.4
        table[:, 3] = False
        tokens, experts = table.nonzero().unbind(1)
        shuffled = torch.randperm(len(tokens), generator=generator)
        tokens, experts, top_k = tokens[shuffled], experts[shuffled], None
    if kind == "none":
        tokens, experts = tokens[:0], experts[:0]
    weights = torch.rand(len(tokens), dtype=torch.float64, generator=generator, requires_grad=True)
    return Routing(tokens, experts.flatten(), weights, T, top_k)


def by_loops(weights: dict[str, Tensor], x: Tensor, routing: Routing, row_weights: Tensor) -> Tensor:
    rows = [torch.zeros_like(token) for token in x]
    for token, chosen, weight in zip(routing.token_R.tolist(), routing.expert_R.tolist(), row_weights, strict=True):
        gate = weights["gate_proj"][chosen * FFN : (chosen + 1) * FFN] @ x[token]
        up = weights["up_proj"][chosen * FFN : (chosen + 1) * FFN] @ x[token]
        hidden = gate / (1 + torch.exp(-gate)) * up
        rows[token] = rows[token] + weight * (weights["down_proj"][chosen * D : (chosen + 1) * D] @ hidden)
    return torch.stack(rows)


@pytest.mark.parametrize("kind", ["k", "ragged", "none"])
def test_experts_and_every_gradient_equal_loops(kind: str) -> None:
    experts, routing = drawn(Experts(D, FFN, E)), a_routing(kind)
    x = torch.randn(T, D, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(1))
    weights = {name: p.detach().clone().requires_grad_() for name, p in experts.named_parameters()}
    x_too, row_weights = (value.detach().clone().requires_grad_() for value in (x, routing.weight_R))
    y, expected = experts(x, routing), by_loops(weights, x_too, routing, row_weights)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-13)

    use = torch.randn(T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (y * use).sum().backward()
    if kind != "none":
        (expected * use).sum().backward()
    zero = torch.zeros_like(x)
    torch.testing.assert_close(x.grad, zero if kind == "none" else x_too.grad, rtol=1e-12, atol=1e-13)
    for name, parameter in experts.named_parameters():
        grad = torch.zeros_like(parameter) if kind == "none" else weights[name].grad
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-12, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")
    if kind != "none":
        torch.testing.assert_close(routing.weight_R.grad, row_weights.grad, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("counts", [[3, 0, 5, 2], [0, 0, 10, 0], [10, 0, 0, 0]])
def test_the_grouped_kernel_and_the_loop_agree(counts: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(10, 16, generator=generator)
    w = torch.randn(4, 24, 16, generator=generator)  # stored with rows of outputs
    use = torch.randn(10, 24, generator=generator)
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    results = []
    for multiply in (grouped_matmul._looped_matmul, lambda x, w, ends: grouped_matmul._grouped_mm(x, w, offs=ends)):
        leaves = [value.clone().requires_grad_() for value in (x, w)]
        y = multiply(leaves[0], leaves[1].transpose(1, 2), ends)
        (y * use).sum().backward()
        results.append([y.detach(), *(leaf.grad for leaf in leaves)])
    for looped, at_once in zip(*results, strict=True):
        torch.testing.assert_close(at_once, looped, rtol=1e-5, atol=1e-5)


def test_kernel_is_chosen_by_device_dtype_and_alignment() -> None:
    x, w = torch.empty(4, 16, dtype=torch.bfloat16), torch.empty(2, 16, 8, dtype=torch.bfloat16)
    assert not grouped_matmul.has_grouped_kernel(x, w)  # CPU


def test_rows_are_sorted_by_expert_and_found_again() -> None:
    """Those of one expert keep the order of their tokens. Experts 1 and 4 have none."""
    expert_Tk = torch.tensor([[3, 0], [0, 2], [3, 2], [0, 3]])
    order_R, place_Tk, ends_E = sorted_by_expert(expert_Tk, 5)
    assert order_R.tolist() == [1, 2, 6, 3, 5, 0, 4, 7]
    assert order_R[place_Tk].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert ends_E.tolist() == [3, 3, 5, 8, 8]
    assert ends_E.dtype == torch.int32  # of grouped products
    assert not has_fused_experts(torch.ones(4, 8, dtype=torch.bfloat16), torch.ones(40, 8))  # CPU


def test_three_bfloat16_numbers_hold_a_float32() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-20, 20, 1000)
    high, middle, low = bfloat16_parts(x)
    assert torch.equal(high.double() + middle.double() + low.double(), x.double())
    assert not torch.equal(high.double() + middle.double(), x.double())


def test_gated_keeps_no_more_than_its_inputs() -> None:
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    gate, up = (torch.randn(6, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.rand(6, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        experts.gated(gate, up, weight)
    assert {id(tensor) for tensor in kept} == {id(gate), id(up), id(weight)}
    assert torch.autograd.gradcheck(experts.gated, (gate, up, weight))
    assert torch.autograd.gradcheck(lambda g, u: experts.gated(g, u, None), (gate, up))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch says so once on a CPU without bfloat16
def test_autocast_casts_rows_and_weights() -> None:
    experts, routing = drawn(Experts(D, FFN, E)).float(), a_routing("k")
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = experts(x, routing)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), experts(x, routing), rtol=0, atol=0.15)
    y.float().sum().backward()
    assert experts.gate_proj.grad.dtype == torch.float32


# ---- the model ------------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"vocabulary": 50, "hidden": 24, "num_heads": 4, "num_kv_heads": 2, "num_layers": 2, "ffn": 20}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"num_dense_layers": 1, "num_shared_experts": 2, "score": "sigmoid", "bias_rate": 1e-3, "scale": 2.5},
    {"capacity_factor": 1.0, "z_coefficient": 1e-3},
    {"choice": "expert", "qk_norm": True, "tied": True},
]


def model_and_tokens(**settings: Any) -> tuple[Moe, Tensor]:
    model = build(**SMALL | {"expert_ffn": 16, "init_std": 0.3} | settings).double()
    initialise(model, seed=1)
    return model, torch.randint(0, 50, (3, 13), generator=torch.Generator().manual_seed(2))


def test_one_expert_is_a_llama() -> None:
    model, tokens = model_and_tokens(num_experts=1, top_k=1, normalise=False, expert_ffn=20)
    dense = llama.build(**SMALL).double()
    dense.load_state_dict(
        {
            name.replace("mlp.experts.", "mlp.").removesuffix(".weight") + ".weight": value
            for name, value in model.state_dict().items()
            if "router" not in name
        }
    )
    for one in (model, dense):
        F.cross_entropy(one(tokens).flatten(0, 1), tokens.flatten()).backward()
    torch.testing.assert_close(model(tokens), dense(tokens), rtol=1e-12, atol=1e-12)
    grads = {name: parameter.grad for name, parameter in dense.named_parameters()}
    for name, parameter in model.named_parameters():
        if "router" not in name:
            same = name.replace("mlp.experts.", "mlp.").removesuffix(".weight") + ".weight"
            torch.testing.assert_close(parameter.grad, grads[same], rtol=1e-11, atol=1e-13)


def test_shared_experts_are_added() -> None:
    model, _ = model_and_tokens(num_shared_experts=2)
    layer = model.model.layers[0].mlp
    x = torch.randn(2, 5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert layer.shared.gate_proj.weight.shape == (32, 24)
    norm = RMSNorm(24, dtype=torch.float64)
    (_, whole), (_, shared) = layer(x, norm), layer.shared(norm(x))
    layer.shared = None
    torch.testing.assert_close(whole, layer(x, norm)[1] + shared)


def test_queries_and_keys_are_normed_by_head() -> None:
    model, _ = model_and_tokens(qk_norm=True, num_kv_heads=4, rope_theta=1e6)
    attention = drawn(model.model.layers[0].self_attn)
    x = torch.randn(2, 5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    still = (torch.ones(1, 5, 3, dtype=torch.float64), torch.zeros(1, 5, 3, dtype=torch.float64))  # nothing turned

    norm = RMSNorm(24, eps=1e-5, dtype=torch.float64)

    def normed(heads: Tensor, weight: Tensor) -> Tensor:
        return heads / (heads.square().mean(-1, keepdim=True) + model.config.norm_eps).sqrt() * weight

    q, k, v = (
        (norm(x) @ getattr(attention, f"{name}_proj").weight.T).view(2, 5, 4, 6).transpose(1, 2)
        for name in ("q", "k", "v")
    )
    scores = normed(q, attention.q_norm.weight) @ normed(k, attention.k_norm.weight).transpose(2, 3) / 6**0.5
    scores = scores.masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -torch.inf)
    expected = (scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 5, 24) @ attention.o_proj.weight.T
    torch.testing.assert_close(attention(x, norm, still, None)[1], expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_run_equals_plain_torch(settings: dict[str, Any]) -> None:
    model, tokens = model_and_tokens(**settings)
    in_run, balance = copy.deepcopy(model), AuxLoss()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    (loss + auxiliary_loss(model)).backward()
    note_routers(in_run, balance)
    balance.factor = lambda: 1 / len(tokens)
    F.cross_entropy(in_run(tokens).flatten(0, 1), tokens.flatten()).backward()
    for (name, parameter), other in zip(model.named_parameters(), in_run.parameters(), strict=True):
        assert parameter.grad is not None, name
        torch.testing.assert_close(other.grad, parameter.grad, rtol=1e-12, atol=1e-13)
    assert list(balance.loads) == list(routers(model)) or list(balance.loads) == list(routers(model))[::-1]
    for name, router in routers(model).items():
        assert torch.equal(balance.loads[name], router.load)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_meta_build_runs_and_is_filled_as_on_the_cpu(settings: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = build(**SMALL | settings)
        model(torch.zeros(2, 8, dtype=torch.int64)).sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    assert can_fill(model)
    materialise(model, "cpu")
    initialise(model, seed=3)
    on_cpu = build(**SMALL | settings)
    initialise(on_cpu, seed=3)
    for (name, value), other in zip(model.state_dict().items(), on_cpu.state_dict().values(), strict=True):
        assert torch.equal(value, other), name
    assert sum(parameter.numel() for parameter in model.parameters()) == model.config.num_parameters
    down = model.get_parameter(f"model.layers.{SMALL['num_layers'] - 1}.mlp.experts.down_proj")
    assert down.std().item() == pytest.approx(0.02 / 2, rel=0.1)  # sqrt(2 · 2 layers)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_description_names_what_is_there(settings: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = build(**SMALL | settings)
    description = model.describe()
    names = [name for name, _ in model.named_modules()]
    for pattern in description.splits:
        assert any(matches(pattern, name) for name in names), pattern
    found = {name: {how for pattern, how in description.splits.items() if matches(pattern, name)} for name in names}
    for name, module in model.named_modules():
        if any(True for _ in module.parameters(recurse=False)):
            assert len(found[name]) == 1, name
    assert found["model.layers.1.mlp.router"] == {Split.SEQUENCE}
    assert found["model.layers.1.mlp.experts"] == {Split.EXPERTS}
    assert (description.num_experts, description.active_experts) == (8, 2)
    assert (description.positions, description.documents) == ("positions", "documents")
    assert description.training_flops is not None


@pytest.mark.parametrize(("settings", "in_run"), [({}, True), wide({"capacity_factor": 1.0}, False)], ids=str)
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own doings, and hides that from users only
def test_a_compiled_block_computes_the_same(settings: dict[str, Any], in_run: bool) -> None:
    model, tokens = model_and_tokens(num_layers=1, **settings)
    if in_run:
        note_routers(model, AuxLoss())
    before = model(tokens)
    before.square().sum().backward()
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.model.layers[0].compile(backend="aot_eager")
    after = model(tokens)
    after.square().sum().backward()
    torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[name], rtol=1e-11, atol=1e-12)
    torch._dynamo.reset()


# ---- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_have_the_size_that_they_say(preset: str) -> None:
    with torch.device("meta"):
        model = build(preset=preset)
    config = model.config
    assert sum(parameter.numel() for parameter in model.parameters()) == config.num_parameters
    idle = sum(
        parameter.numel() * (config.num_experts - config.top_k) // config.num_experts
        for experts in experts_in(model).values()
        for parameter in experts.parameters()
    )
    assert config.num_active_parameters == config.num_parameters - idle
    if preset in PUBLISHED:
        total, active = PUBLISHED[preset]
        assert config.num_parameters == total
        assert config.num_active_parameters == pytest.approx(active, rel=0.02)
    attention = 12 * config.num_layers * config.num_heads * config.dim_of_head * 64
    matmuls = 6 * (config.num_active_parameters - config.vocabulary * config.hidden)
    assert config.training_flops((2, 64)) == pytest.approx(2 * 64 * (matmuls + attention), rel=1e-12)


def test_sizes_of_the_two_presets_that_are_ours() -> None:
    assert PRESETS["deepseek-v3"].num_parameters == pytest.approx(671e9, rel=0.01)
    assert PRESETS["deepseek-v3"].num_active_parameters == pytest.approx(37e9, rel=0.03)
    ours = PRESETS["1b-active"]
    assert ours.num_active_parameters == pytest.approx(1e9, rel=0.05)
    assert 16 * ours.num_parameters < 0.65 * 139 * 2**30
    sizes = (ours.hidden, ours.expert_ffn, ours.vocabulary, ours.num_heads * ours.dim_of_head, ours.dim_of_head)
    assert all(size % 128 == 0 for size in sizes)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_smaller_copy_has_the_same_structure(preset: str) -> None:
    arguments = smaller({"preset": preset, "z_coefficient": 0.5}, num_stages=2)
    small, original = build(**arguments), PRESETS[preset]
    assert small.config.num_parameters < 6_000_000
    assert (small.config.num_layers, small.config.num_experts) == (4, 8)
    assert small.config.top_k in (2, 4)
    for name in ("num_heads", "score", "choice", "bias_rate", "num_shared_experts", "qk_norm", "scale"):
        assert getattr(small.config, name) == getattr(original, name), name
    assert small.config.z_coefficient == 0.5
    assert smaller({"num_experts": 6, "top_k": 6}, num_stages=9)["num_layers"] == 4
    assert smaller({"num_experts": 6, "top_k": 6}, num_stages=1)["top_k"] == 3


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (
            {"num_experts": 0, "hidden": -1},
            ["model 'moe'", "num_experts must be above 0, got 0", "hidden must be above 0, got -1"],
        ),
        ({"num_dense_layers": 4}, ["num_dense_layers=4 of num_layers=4 leave no layer to experts"]),
        ({"bias_rate": -0.1}, ["bias_rate must be 0 or more, got -0.1"]),
        ({"num_expert": 4}, ["unknown setting 'num_expert'", "num_experts"]),
        ({"top_k": 9}, ["top_k must be from 1 to num_experts=8, got 9"]),
    ],
)
def test_refused_numbers(arguments: dict[str, Any], texts: list[str]) -> None:
    with pytest.raises(ShoalError) as error:
        build(**arguments)
    for text in texts:
        assert text in str(error.value)


def test_experts_that_cannot_be_divided_are_refused() -> None:
    three = ExpertParallel()
    three.degree = 3
    with rejects("P039", "num_experts=8", "ep=3", "ep=1, 2, 4"):
        divide(Experts(D, FFN, 8), three)


def test_a_config_is_a_llama_config() -> None:
    assert isinstance(MoeConfig(), llama.LlamaConfig)
    assert isinstance(build(), nn.Module)
