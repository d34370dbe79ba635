"""Layers of transformers that are swapped: the losses, gradients and weights of those that they replace, in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
import transformers

from shoal.models.huggingface import written_out
from shoal.models.huggingface.fast import swap_layers
from shoal.models.huggingface.fast.attention import swap_attention
from shoal.models.huggingface.fast.embedding import FastRotary
from shoal.models.huggingface.fast.feed_forward import swap_feed_forward
from shoal.models.huggingface.fast.norms import FastNorm, swap_norm
from shoal.parallel.lora.apply import lora
from shoal.train.build_model import describe
from shoal.train.run import Run
from shoal.verification.exact_casts import keeping_float64
from tests import huggingface
from tests.cover import wide
from tests.rejects import rejects


def drawn_model(kind: str) -> Any:
    """With norms and biases that are not those of the start, which would hide an error."""
    model = huggingface.build(kind).double()
    written_out(model)  # experts, which transformers computes in float32 at most
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
    return model


def batch_of(kind: str) -> dict[str, Tensor]:
    """Ragged: some labels do not count, and not equally many of each sample."""
    batch: dict[str, Tensor] = huggingface.batch(kind)
    batch["labels"][0, 3:] = -100
    batch["labels"][1, :2] = -100
    return batch


def loss_and_gradients(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    with keeping_float64("fp64", is_foreign=True):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
    return loss.detach(), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def assert_same(found: Tensor, expected: Tensor, what: str) -> None:
    difference = float(((found - expected).norm() / expected.norm().clamp(min=1e-30)).detach())
    assert difference <= 1e-12, (what, difference)


KINDS = {
    "llama": (2, 2, 5, 4),
    "qwen2": (2, 2, 5, 4),
    "qwen3": (2, 2, 9, 4),
    "gemma3": (2, 2, 13, 4),
    "olmo2": (2, 2, 9, 0),
    "granite": (2, 2, 5, 4),
    "smollm3": (2, 2, 5, 4),
    "cohere": (0, 2, 0, 0),
    "mixtral": (2, 0, 5, 0),
}
"""Kind → attentions, feed-forwards and norms that are recognised, and norms whose output is not saved."""


@pytest.mark.parametrize("kind", [one if one in ("qwen2", "gemma3", "olmo2") else wide(one) for one in KINDS])
def test_a_swapped_model_computes_the_same(kind: str) -> None:
    model, batch = drawn_model(kind), batch_of(kind)
    swapped = copy.deepcopy(model)
    line = swap_layers(swapped, describe(swapped).blocks) or ""
    attentions, feed_forwards, norms, connected = KINDS[kind]
    for number, what in ((attentions, "attentions"), (feed_forwards, "feed-forwards"), (norms, "norms")):
        assert (f"{number} {what}" in line) == (number > 0), line
    assert sum(isinstance(one, FastNorm) and one.recall is not None for one in swapped.modules()) == connected
    assert list(swapped.state_dict()) == list(model.state_dict())
    (found, mine), (expected, theirs) = (loss_and_gradients(one, batch) for one in (swapped, model))
    assert_same(found, expected, "loss")
    assert mine.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert_same(mine[name], gradient, name)


class Scaled(nn.Module):
    """A norm, but for its eps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps, self.power = nn.Parameter(torch.ones(6)), 1e-6, 2

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * (x.abs().pow(self.power).mean(-1, keepdim=True) + 3 * self.eps).rsqrt()


class FeedForward(nn.Module):
    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return y


@pytest.mark.parametrize(
    ("activation", "is_known"),
    [(nn.SiLU(), True), (nn.GELU("tanh"), True), (nn.GELU(), True), (nn.ReLU(), False), (nn.Dropout(0.5), False)],
)
def test_a_feed_forward_is_recognised_by_what_it_computes(activation: nn.Module, is_known: bool) -> None:
    module = FeedForward(activation).double()
    before, x = copy.deepcopy(module), torch.randn(2, 8, dtype=torch.float64)
    assert swap_feed_forward(module) == is_known
    assert_same(module.eval()(x), before.eval()(x), "output")


def test_what_computes_something_else_stays() -> None:
    norm, layer_norm = Scaled(), nn.LayerNorm(6, bias=False)
    assert not swap_norm(norm)
    assert not swap_norm(layer_norm)
    hooked = nn.RMSNorm(6)
    hooked.register_forward_hook(lambda *_: None)
    assert not swap_norm(hooked)
    assert swap_norm(nn.RMSNorm(6, eps=1e-5))
    assert not swap_attention(huggingface.build("gpt-oss").model.layers[0].self_attn)  # it passes a tensor: its sinks


def test_a_limit_that_small_numbers_do_not_reach_is_found() -> None:
    """OLMo clamps queries, keys and values."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    for limit, is_known in ((None, True), (12.0, False), (4000.0, False)):
        config = transformers.OlmoConfig(vocab_size=32, clip_qkv=limit, **sizes)
        assert swap_attention(transformers.OlmoForCausalLM(config).model.layers[0].self_attn) is is_known

    class Limited(nn.Module):
        def __init__(self, limit: float) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
            self.limit = limit

        def forward(self, x: Tensor) -> Tensor:
            up = self.up_proj(x).clamp(-self.limit, self.limit)
            return self.down_proj(nn.functional.silu(self.gate_proj(x)) * up)

    assert swap_feed_forward(Limited(float("inf")))
    assert not swap_feed_forward(Limited(10.0))


def test_angles_stay_wide() -> None:
    model: Any = huggingface.build("llama")
    swap_layers(model, describe(model).blocks)
    rotary = next(one for one in model.modules() if isinstance(one, FastRotary))
    cos, _ = rotary(torch.zeros(1, 4, 16, dtype=torch.bfloat16), torch.arange(4)[None])
    assert cos.dtype == torch.float32


@pytest.mark.parametrize("fused_loss", [True, None])  # None: on a CPU a small one has its logits whole
@pytest.mark.parametrize("kind", ["gemma2", wide("granite"), wide("cohere"), wide("llama tied")])
def test_a_run_has_the_loss_of_the_model_itself(kind: str, fused_loss: bool | None) -> None:
    """Shifted labels of a ragged batch, a scale or a cap of logits, and no logits of all tokens."""
    model, batch = drawn_model(kind), batch_of(kind)
    plain = copy.deepcopy(model)
    with keeping_float64("fp64", is_foreign=True):
        with Run("fp64 mb=4", fused_loss=fused_loss, fused_layers=True) as run:
            run.prepare(model)
            run.prepare(torch.optim.SGD(run.parameters, lr=0.5))
            assert run.fused_layers is not None
            losses = [float(run.step(batch)) for _ in range(3)]
            weights = run.weights()
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
        for loss in losses:
            own = plain(**batch).loss
            own.backward()
            assert abs(loss / float(own.detach()) - 1) <= 1e-12
            optimizer.step()
            optimizer.zero_grad()
    for name, weight in plain.named_parameters():
        assert_same(weights[name], weight.detach(), name)


@pytest.mark.parametrize("kind", ["llama", "opt", "bart decoder"])
def test_padding_before_the_tokens_is_not_seen(kind: str) -> None:
    """Causality does not hide it there. The heads of OPT and BART call the decoder without the model around it."""
    model = LEFT_PADDED[kind]().double()
    tokens = torch.randint(3, 32, (4, 8), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(8) >= torch.arange(4)[:, None]).long()
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}
    expected, gradients = loss_and_gradients(copy.deepcopy(model), batch)
    with keeping_float64("fp64", is_foreign=True), Run("fp64 mb=4", fused_layers=True, device="cpu") as run:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        before = run.weights()
        assert_same(run.step(batch).detach(), expected, "loss")
        after = run.weights()
    for name, gradient in gradients.items():  # that of a bias of keys is zero
        assert float((before[name] - after[name] - gradient).norm()) <= 1e-12 * (1 + float(gradient.norm())), name


def test_a_mask_of_four_dimensions_is_not_taken_for_padding() -> None:
    """transformers would let every query see all of its keys, also later ones."""
    model, tokens = LEFT_PADDED["llama"](), torch.randint(3, 32, (2, 8))
    mask = torch.ones(2, 1, 1, 8, dtype=torch.bool)
    mask[0, ..., 6:] = False
    with keeping_float64("fp64", is_foreign=True), Run("fp64", fused_layers=True, device="cpu") as run:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        with rejects("M063", (2, 1, 1, 8)):
            run.step({"input_ids": tokens, "attention_mask": mask, "labels": tokens})


def opt() -> Any:
    sizes = {"hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 16, "num_hidden_layers": 2}
    return transformers.OPTForCausalLM(
        transformers.OPTConfig(vocab_size=32, num_attention_heads=2, max_position_embeddings=32, dropout=0.0, **sizes)
    )


def bart_decoder() -> Any:
    sizes = {"d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}
    config = transformers.BartConfig(vocab_size=32, max_position_embeddings=32, dropout=0.0, **sizes)
    config.is_decoder, config.is_encoder_decoder = True, False
    return transformers.BartForCausalLM(config)


LEFT_PADDED = {"llama": lambda: huggingface.build("llama"), "opt": opt, "bart decoder": bart_decoder}


def test_positions_that_are_counted_from_a_mask_are_not_divided() -> None:
    assert "counts positions from its attention_mask" in describe(opt()).why_not["cp"]


@pytest.mark.parametrize("words", ["recompute=full", wide("recompute=selective"), wide("mb=2")])
def test_blocks_that_are_recomputed(words: str) -> None:
    found = []
    for fused in (True, False):
        with keeping_float64("fp64", is_foreign=True), Run(f"fp64 {words}", fused_layers=fused) as run:
            run.prepare(drawn_model("qwen3"))
            run.prepare(torch.optim.SGD(run.parameters, lr=0.5))
            losses = [float(run.step(batch_of("qwen3"))) for _ in range(2)]
            found.append((losses, run.weights()))
    (losses, weights), (expected, theirs) = found
    assert losses == pytest.approx(expected, rel=1e-12)
    for name, weight in theirs.items():
        assert_same(weights[name], weight, name)


def test_a_packed_batch_has_the_attention_of_transformers() -> None:
    """Positions that start anew separate samples, which shoal's own attention does not see."""
    model, batch = drawn_model("llama"), batch_of("llama")
    batch["position_ids"] = torch.arange(huggingface.TOKENS).remainder(5).expand(huggingface.BATCH, -1)
    expected = float(copy.deepcopy(model)(**batch, use_cache=False).loss.detach())
    with keeping_float64("fp64", is_foreign=True), Run("fp64", fused_layers=True) as run:
        run.prepare(model)
        run.prepare(torch.optim.SGD(run.parameters, lr=0.0))
        assert model.config._attn_implementation == "shoal"
        assert float(run.step(batch)) == pytest.approx(expected, rel=1e-6)  # in float32, outside
        assert model.config._attn_implementation == "sdpa"
        del batch["position_ids"]
        assert float(run.step(batch)) != pytest.approx(expected, rel=1e-6)
        assert model.config._attn_implementation == "shoal"


def test_no_layer_is_swapped_unless_it_is_wanted() -> None:
    for wanted in (None, False):  # None: not on a CPU
        with Run("fp64 mb=4", device="cpu", fused_layers=wanted) as run:
            run.prepare(huggingface.build("llama"))
            assert run.fused_layers is None


def test_a_feed_forward_with_lora_does_not_save_the_input_of_its_last_layer() -> None:
    """And computes the same, forward and every gradient."""
    plain = lora(drawn_model("llama"), rank=2, targets="all-linear")
    for name, parameter in plain.named_parameters():
        if name.endswith("lora_B"):
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name)))
    swapped = copy.deepcopy(plain)
    feed_forward = swapped.model.layers[0].mlp
    assert swap_feed_forward(feed_forward)
    x = torch.randn(2, 3, feed_forward.gate_proj.in_features, dtype=torch.float64)
    inner = feed_forward.gate_proj.out_features
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
        found = feed_forward(x.requires_grad_())
    assert sum(one.shape == (2, 3, inner) for one in saved) == 2, "gate and up alone"
    assert_same(found, plain.model.layers[0].mlp(x), "output")
    assert swap_layers(swapped, describe(swapped).blocks) is not None
    (loss, gradients), (expected, theirs) = (loss_and_gradients(one, batch_of("llama")) for one in (swapped, plain))
    assert_same(loss, expected, "loss")
    assert gradients.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert_same(gradients[name], gradient, name)
