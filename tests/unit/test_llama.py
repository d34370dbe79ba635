"""Llama against a plain reference: explicit softmax, repeated key/value heads and complex rotation, in float64."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.blueprint.description import Description, Split, matches
from shoal.errors import ShoalError
from shoal.models.llama import PRESETS, Llama, LlamaConfig, build
from shoal.numerics.init import initialise, materialise
from tests.rejects import rejects

PUBLISHED = {
    "llama3-1b": 1_235_814_400,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
}


def model_and_batch(dtype: torch.dtype = torch.float64, **settings: Any) -> tuple[Llama, Tensor]:
    """A model whose weights are large enough that every part of it shows in the logits, and three rows of tokens."""
    model = build(
        **{"vocabulary": 50, "hidden": 48, "num_heads": 6, "num_kv_heads": 2, "ffn": 40, "init_std": 0.3} | settings
    )
    initialise(model.to(dtype), seed=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones would hide a norm that forgets its weight
                parameter.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(len(name)))
    return model, torch.randint(0, 50, (3, 13), generator=torch.Generator().manual_seed(2))


def reference(
    weights: dict[str, Tensor], config: LlamaConfig, tokens: Tensor, positions: Tensor, mask: Tensor
) -> Tensor:
    """A Llama written from the paper, one head at a time; positions (B, T), mask (B, T, T) true where a row may
    look."""
    num_heads, size = config.num_heads, config.head_dim or config.hidden // config.num_heads

    def norm(x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.norm_eps) * weights[name + ".weight"]

    def turn(head: Tensor) -> Tensor:
        frequency = torch.tensor([config.rope_theta ** (-2 * i / size) for i in range(size // 2)], dtype=torch.float64)
        angle = positions[..., None].double() * frequency
        pairs = torch.complex(head[..., : size // 2], head[..., size // 2 :]) * torch.polar(
            torch.ones_like(angle), angle
        )
        return torch.cat([pairs.real, pairs.imag], -1)

    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}."
        y = norm(x, at + "input_layernorm")
        q, k, v = (y @ weights[f"{at}self_attn.{name}_proj.weight"].T for name in "qkv")
        heads = []
        for n in range(num_heads):
            kv = n // (num_heads // config.num_kv_heads)
            q_head = turn(q[..., n * size : (n + 1) * size])
            k_head = turn(k[..., kv * size : (kv + 1) * size])
            scores = q_head @ k_head.transpose(1, 2) / size**0.5
            weight = torch.exp(scores) * mask
            heads.append(weight / weight.sum(-1, keepdim=True) @ v[..., kv * size : (kv + 1) * size])
        x = x + torch.cat(heads, -1) @ weights[at + "self_attn.o_proj.weight"].T
        y = norm(x, at + "post_attention_layernorm")
        gate, up = (y @ weights[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate / (1 + torch.exp(-gate)) * up) @ weights[at + "mlp.down_proj.weight"].T
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return norm(x, "model.norm") @ head.T


def causal(batch: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    positions = torch.arange(num_tokens).expand(batch, -1)
    return positions, positions[:, :, None] >= positions[:, None, :]


@pytest.mark.parametrize("settings", [{}, {"head_dim": 10}, {"tied": True}, {"num_kv_heads": 6}, {"num_kv_heads": 1}])
def test_logits_and_every_gradient_equal_the_reference(settings: dict[str, Any]) -> None:
    model, tokens = model_and_batch(**settings)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    expected = reference(weights, model.config, tokens, *causal(*tokens.shape))
    logits = model(tokens=tokens)
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)

    F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    F.cross_entropy(expected.flatten(0, 1), tokens.flatten()).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, weights[name].grad, rtol=1e-11, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_given_positions_and_documents_equal_the_reference() -> None:
    model, tokens = model_and_batch()
    documents = torch.tensor([[0] * 13, [0] * 5 + [1] * 8, [7] * 1 + [3] * 4 + [9] * 8])
    _, mask = causal(*tokens.shape)
    mask = mask & (documents[:, :, None] == documents[:, None, :])
    positions = torch.randint(0, 5000, tokens.shape, generator=torch.Generator().manual_seed(3))
    expected = reference(dict(model.named_parameters()), model.config, tokens, positions, mask)
    torch.testing.assert_close(model(tokens, documents, positions), expected, rtol=1e-12, atol=1e-12)


def test_packed_documents_equal_each_document_alone() -> None:
    model, tokens = model_and_batch()
    lengths = (1, 5, 7)
    documents = torch.repeat_interleave(torch.tensor([4, 2, 8]), torch.tensor(lengths)).expand(3, -1)
    packed = model(tokens, documents).split(lengths, dim=1)
    for alone, part in zip(tokens.split(lengths, dim=1), packed, strict=True):
        torch.testing.assert_close(part, model(alone), rtol=1e-12, atol=1e-12)
    # Rotation knows only differences, so a wrong start would show in the last bits alone.
    positions = torch.tensor([[0, *range(5), *range(7)]] * 3)
    assert torch.equal(torch.cat(packed, dim=1), model(tokens, documents, positions))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch says so once on a CPU without bfloat16
def test_low_precision_norms_and_angles_are_computed_in_float32() -> None:
    x = torch.randn(4, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    norm = nn.RMSNorm(512, eps=1e-5, dtype=torch.bfloat16)
    wide = x.float()
    expected = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    assert torch.equal(norm(x), expected.bfloat16())

    model, tokens = model_and_batch(torch.bfloat16, init_std=0.05)
    exact, _ = model_and_batch(torch.float64, init_std=0.05)
    exact.load_state_dict(model.state_dict())
    far = torch.arange(13).expand(3, -1) + 4000  # bfloat16 has no 4001
    logits, expected = model(tokens, positions=far), exact(tokens, positions=far)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.double(), expected, rtol=0, atol=0.02 * expected.abs().max().item())


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch says so once on a CPU without bfloat16
def test_autocast_keeps_the_residual_stream_in_float32() -> None:
    model, tokens = model_and_batch(torch.float32, init_std=0.05)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(tokens)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), model(tokens), rtol=0, atol=0.05)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_on_meta_have_the_published_size(preset: str) -> None:
    with torch.device("meta"):
        model = build(preset=preset)
    assert all(p.is_meta for p in model.parameters())
    count = sum(p.numel() for p in model.parameters())
    assert count == model.config.num_parameters == PUBLISHED.get(preset, count)
    if preset == "small":
        assert 10e6 < count < 20e6


def test_the_largest_is_built_on_meta_within_a_second() -> None:
    """At the latest when it is tried for the third time: a machine that is shared has slow moments."""

    def seconds() -> float:
        start = time.process_time()  # of this process: others on the machine do not count
        with torch.device("meta"):
            build(preset="llama3-405b")
        return time.process_time() - start

    assert any(seconds() < 1 for _ in range(3))


@pytest.mark.parametrize("preset", PRESETS)
def test_description_names_what_exists_and_forgets_nothing(preset: str) -> None:
    with torch.device("meta"):
        model = build(preset=preset, num_layers=3)
    description = model.describe()
    modules = dict(model.named_modules())
    parts = [*description.before_blocks, *description.blocks, *description.after_blocks]
    assert all(name in modules for name in parts)
    assert len(description.blocks) == 3
    assert description.num_outputs == model.lm_head.out_features
    for pattern, split in description.splits.items():
        found = [modules[name] for name in modules if matches(pattern, name)]
        assert len(found) == (3 if "*" in pattern else 1), pattern
        kind = {Split.SEQUENCE: nn.RMSNorm}.get(split, (nn.Linear, nn.Embedding))
        assert all(isinstance(module, kind) for module in found)
    for name, _ in model.named_parameters(remove_duplicate=False):
        assert any(name.startswith(part + ".") for part in parts), name
        assert any(matches(pattern, name.rpartition(".")[0]) for pattern in description.splits), name
    for first, second in description.tied:
        assert model.get_parameter(first) is model.get_parameter(second)


class Gone(nn.Module):
    """What stands where a part of the model was taken out."""

    def forward(self, x: Tensor, *_: object) -> Tensor:
        return x


def stage(model: nn.Module, description: Description, start: int, stop: int) -> nn.Module:
    """The blocks from start to stop, with the head of the model at the first and its tail at the last."""
    gone = [*description.blocks[:start], *description.blocks[stop:]]
    gone += description.before_blocks if start > 0 else ()
    gone += description.after_blocks if stop < len(description.blocks) else ()
    for name in gone:
        model.set_submodule(name, Gone())
    return model


def test_stages_one_after_another_equal_the_whole() -> None:
    model, tokens = model_and_batch(tied=True)
    documents = torch.tensor([[0] * 4 + [1] * 9] * 3)
    expected = model(tokens, documents)
    x = tokens
    for start, stop in ((0, 1), (1, 3), (3, 4)):
        part, _ = model_and_batch(tied=True)
        whole = {name for name, _ in part.named_parameters(remove_duplicate=False)}
        stage(part, part.describe(), start, stop)
        part.to_empty(device="cpu")
        initialise(part, seed=1)  # a part starts as the whole does, also where it holds only one end of a tied pair
        names = [name for name, _ in part.named_parameters(remove_duplicate=False)]
        assert set(names) < whole
        state = model.state_dict()
        for name in names:
            if "norm" in name:
                part.get_parameter(name).data.copy_(state[name])
            assert torch.equal(part.get_parameter(name), state[name]), name
        x = part(x, documents)
    assert torch.equal(x, expected)


def test_flops_count_matmuls_and_attention() -> None:
    def counted(config: LlamaConfig, tokens: int) -> float:
        size = config.hidden // config.num_heads
        kv = config.num_kv_heads * size
        linears = 2 * config.hidden * (config.hidden + kv) + 3 * config.hidden * config.ffn
        matmuls = config.num_layers * linears + config.vocabulary * config.hidden
        return 3 * tokens * (2 * matmuls + 2 * 2 * config.num_layers * tokens * config.hidden)

    for preset in ("tiny", "llama3-1b", "llama3-8b"):  # one is tied: its head still multiplies
        config = PRESETS[preset]
        flops = config.training_flops((5, 1024))
        assert flops == pytest.approx(5 * counted(config, 1024), rel=2e-3)  # norms count as parameters, by convention
    assert PRESETS["llama3-8b"].training_flops((1, 8192)) == pytest.approx(
        8192 * (6 * (8_030_261_248 - 128256 * 4096) + 12 * 32 * 4096 * 8192)
    )


def test_first_values_follow_the_law() -> None:
    model = build(hidden=256, num_layers=2, ffn=512, init_std=0.05)
    initialise(model, seed=3)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones(256))
        else:
            std = 0.05 / 2 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.05
            assert parameter.std().item() == pytest.approx(std, rel=0.02), name
            assert abs(parameter.mean().item()) < 4 * std / parameter.numel() ** 0.5, name
    logits = model(torch.randint(0, 264, (4, 32), generator=torch.Generator().manual_seed(0)))
    loss = F.cross_entropy(logits.flatten(0, 1), torch.zeros(128, dtype=torch.long)).item()
    assert loss == pytest.approx(5.58, abs=0.5)  # near ln 264: it believes nothing yet


def test_it_learns() -> None:
    model = build(hidden=32, num_layers=1, ffn=64)
    initialise(model, seed=0)
    tokens = torch.arange(40).remainder(7).expand(4, -1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(20):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5


@pytest.mark.parametrize("tied", [False, True])
def test_from_meta_it_is_the_same_model(tied: bool) -> None:
    with torch.device("meta"):
        late = build(tied=tied)
    materialise(late, "cpu")
    initialise(late, seed=5)
    early = build(tied=tied)
    initialise(early, seed=5)
    tokens = torch.arange(20)[None]
    assert torch.equal(late(tokens), early(tokens))
    assert (late.lm_head.weight is late.model.embed_tokens.weight) == tied


def test_mistakes_are_named_with_a_way_out() -> None:
    with rejects("M006", match=r"unknown preset 'llama3-8B'[\s\S]*fix: --model.preset llama3-8b"):
        build(preset="llama3-8B")
    with rejects("M006", match=r"unknown setting 'num_layer'[\s\S]*fix: --model.num_layers 2"):
        build(num_layer=2)
    with pytest.raises(ShoalError) as caught:  # names, types and values in one list
        build(num_layer=2, hidden="wide", vocabulary=0, max_sequence=-1)
    assert [problem.what for problem in caught.value.problems] == [
        "hidden must be an integer, got 'wide'",
        "max_sequence must be above 0, got -1",
        "unknown setting 'num_layer'",
        "vocabulary must be above 0, got 0",
    ]
    with pytest.raises(ShoalError) as caught:
        build(hidden=100, num_heads=8, num_kv_heads=3)
    assert "hidden=100 is not divisible by num_heads=8" in str(caught.value)
    assert "num_heads=8 is not divisible by num_kv_heads=3" in str(caught.value)
    assert "num_kv_heads=1, 2, 4 or 8" in str(caught.value)
    with rejects("M010"):
        build(hidden=60)
    with pytest.raises(ShoalError) as caught:
        build(ffn=0, vocabulary=-1, norm_eps=0.0)
    assert len(caught.value.problems) == 3
    with pytest.raises(ShoalError) as caught:
        build(hidden="wide", tied=1, num_layers=2.5, presett="tiny")
    assert len(caught.value.problems) == 4


def test_numerals_from_yaml_are_numbers() -> None:
    config = build(norm_eps="1e-6", hidden="64", head_dim=None, rope_theta=10000).config
    assert (config.norm_eps, config.hidden, config.head_dim, config.rope_theta) == (1e-6, 64, None, 10000.0)


def test_a_longer_sequence_than_allowed_is_refused() -> None:
    model, tokens = model_and_batch(max_sequence=12)
    with rejects("D034", "max_sequence=12", "got 13"):
        model(tokens)
