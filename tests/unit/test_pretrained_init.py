"""First weights of models of transformers: every parameter is drawn as transformers draws it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.numerics.init import initialise
from tests.rejects import rejects

pytest.importorskip("transformers")
import transformers

from shoal.models.huggingface.pretrained.build import build_unchanged
from shoal.models.huggingface.pretrained.twin import Twin
from tests import huggingface
from tests import huggingface_more as more

SEEDS = 4
KINDS = (
    *("llama", "llama tied", "gemma2", "gpt2", "openai-gpt", "gpt-bigcode", "opt", "nanochat"),
    *("apertus", "diffllama", "mixtral", "gpt-oss", "deepseek-v3", "ernie4.5-moe", "qwen3-next", "mamba", "mamba2"),
    *("recurrent-gemma", "jamba", "bert", "modernbert", "fnet", "t5"),
    *("bart", "whisper", "vit", "clip", "siglip", "swin", "wav2vec2"),
)


def config_of(kind: str) -> Any:
    name, settings = huggingface.ALL[kind]
    if kind in more.ALL:
        config, class_name = more.config_of(kind), more.class_of(kind)
    else:
        config = huggingface.config_of(name, settings)
        class_name = huggingface.CLASSES.get(name, f"{name}ForCausalLM")
    config.architectures = [class_name]
    return config


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # the module of gpt-bigcode
@pytest.mark.parametrize("kind", KINDS)
def test_first_weights_have_the_distribution_of_transformers(tmp_path: Path, kind: str) -> None:
    config = config_of(kind)
    config.save_pretrained(tmp_path)
    model: Any = build_unchanged(f"hf:{tmp_path}", init="random")
    ours, theirs = [], []
    for seed in range(SEEDS):
        initialise(model, seed)
        ours.append(values(model))
        torch.manual_seed(seed)
        theirs.append(values(getattr(transformers, config.architectures[0])(config)))
    assert ours[0].keys() == theirs[0].keys()
    wrong = {name: difference([one[name] for one in ours], [one[name] for one in theirs]) for name in ours[0]}
    assert not {name: what for name, what in wrong.items() if what}


def difference(ours: list[Tensor], theirs: list[Tensor]) -> str:
    """Empty if values that transformers draws have the same mean and deviation, and all others are equal."""
    if all(torch.equal(one, theirs[0]) for one in theirs):
        return "" if all(torch.equal(one, theirs[0]) for one in ours) else f"{ours[0].flatten()[:3]} {theirs[0]}"
    if any(torch.equal(one, ours[0]) for one in ours[1:]):
        return "the same for every seed"
    one, other = torch.stack(ours).double(), torch.stack(theirs).double()
    number, deviation = one.numel(), other.std()
    means, deviations = abs(one.mean() - other.mean()) / deviation, abs(math.log(one.std() / deviation))
    kurtosis = ((other - other.mean()) ** 4).mean() / deviation**4  # by which a measured deviation varies
    too_far = means > 6 * math.sqrt(2 / number) or deviations > 6 * math.sqrt(
        max(float(kurtosis) - 1, 1) / (2 * number)
    )
    return f"{one.mean():.3g} ± {one.std():.3g} {other.mean():.3g} ± {deviation:.3g}" if too_far else ""


def test_a_part_draws_what_the_whole_model_draws(tmp_path: Path) -> None:
    config_of("t5").save_pretrained(tmp_path)
    whole, part = (build_unchanged(f"hf:{tmp_path}", init="random") for _ in range(2))
    initialise(whole, 0)
    torch.manual_seed(7)
    initialise(part, 0, lambda name: name.startswith("encoder.block.1"))
    for one, other in zip(whole.encoder.block[1].parameters(), part.encoder.block[1].parameters(), strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(whole.shared.weight, part.shared.weight)


@contextmanager
def memory_counted() -> Iterator[list[int]]:
    """The numbers of elements of tensors with memory that are drawn."""
    sizes: list[int] = []
    usual = Tensor.normal_

    def counted(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        sizes.append(0 if self.is_meta else self.numel())
        return usual(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "normal_", counted)
        yield sizes


def test_only_the_wanted_parameter_has_memory(tmp_path: Path) -> None:
    config_of("t5").save_pretrained(tmp_path)
    twin: Twin = build_unchanged(f"hf:{tmp_path}", init="random").twin
    name = "encoder.block.0.layer.0.SelfAttention.q.weight"
    with memory_counted() as sizes:
        twin.draw(name, into := torch.empty(16, 16), torch.Generator().manual_seed(0))
    assert into.std() < 0.2
    assert sum(sizes) == 2 * into.numel()  # by the rule of a linear layer, and then by that of the attention around it
    assert all(parameter.is_meta for parameter in twin.model.parameters())


def test_a_rule_that_needs_another_parameter_of_its_module(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"attention_hidden_size": 16, "context_length": 8, "vocab_size": 41}
    config = transformers.RwkvConfig(hidden_size=16, num_hidden_layers=2, architectures=["RwkvForCausalLM"], **sizes)
    config.save_pretrained(tmp_path)
    model = build_unchanged(f"hf:{tmp_path}", init="random")
    name = "rwkv.blocks.1.attention.time_mix_value"
    expected = model.get_parameter(name).detach().clone()
    initialise(model, 0)
    assert torch.equal(model.get_parameter(name), expected)


class Scaled(transformers.LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """With parameters that no rule fills."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[no-untyped-call]
        self.table = nn.Parameter(torch.arange(6.0).view(2, 3))
        self.row = nn.Parameter(torch.empty(4, 3).fill_(2.0)[1])
        self.scale = nn.Parameter(torch.empty(3))


def test_what_no_rule_fills_keeps_the_value_of_the_constructor_or_is_rejected() -> None:
    config = config_of("llama")
    twin = Twin(lambda: Scaled(config))
    drawn = {"table": torch.empty(3, 2).T, "row": torch.empty(2, 3)[1]}  # a column of memory, and a part of one
    for name, into in drawn.items():
        twin.draw(name, into, torch.Generator().manual_seed(0))
    assert drawn["table"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert drawn["row"].tolist() == [2, 2, 2]
    with rejects("M078", "scale"):
        twin.draw("scale", torch.empty(3), torch.Generator().manual_seed(0))
