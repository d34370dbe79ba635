"""What a trained model says: greedy tokens as of transformers, draws by temperature and top-p."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shoal.cli.runs.generate import _show
from shoal.config.recipe import DataSection, ModelSection
from shoal.data.sources.chat.open import open_chat_tokenizer
from shoal.train.build_model import describe
from shoal.train.inference.end_tokens import end_tokens
from shoal.train.inference.generate import Continuation, Sampling, choose
from shoal.train.inference.next_token import NextToken
from shoal.train.inference.prompt_form import is_of_conversations
from tests.rejects import rejects


def test_greedy_tokens_are_those_of_transformers() -> None:
    pytest.importorskip("transformers")
    from tests import huggingface

    model = huggingface.build("llama").eval()
    prompt = [3, 1, 4, 1, 5]
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0, 5:].tolist()
    found = Continuation(model, prompt, end_tokens=(), max_tokens=6, sampling=Sampling(), name="input_ids")
    assert list(found) == expected
    assert found.stopped == "length"
    ends = Continuation(
        model, prompt, end_tokens=[40, expected[3]], max_tokens=6, sampling=Sampling(), name="input_ids"
    )
    assert list(ends) == expected[: expected.index(expected[3])]
    assert ends.stopped == "end"


def steps_of(model: torch.nn.Module, length: int) -> tuple[list[torch.Tensor], list[torch.Tensor], NextToken]:
    """The logits for each token of a random text, one after the other: as generated, and of the whole text before."""
    text = torch.randint(2, 40, (1, length), generator=torch.Generator().manual_seed(5))
    next_token = NextToken(model, "input_ids")
    ours = [next_token(text[:, :end]) for end in range(4, length)]
    theirs = [model(input_ids=text[:, :end], use_cache=False).logits[0, -1] for end in range(4, length)]
    return ours, theirs, next_token


CACHED = ("llama", "mistral window", "gemma3", "gpt2", "gpt-oss", "mixtral", "bloom", "falcon")
MORE_CACHED = (
    "gemma2",
    "qwen3-moe",
    "deepseek-v3",
    "opt",
    "llama4",
    "jamba",
    "gemma3n",
    "gpt-neo",
    "cohere2",
    "stablelm",
)
NOT_CACHED = ("bamba", "recurrent-gemma")
"""Kinds whose cache gives other logits, or none."""


@pytest.mark.parametrize(
    "kind", [*CACHED, *NOT_CACHED, *(pytest.param(kind, marks=pytest.mark.wide) for kind in MORE_CACHED)]
)
@torch.no_grad()
def test_logits_with_a_cache_are_those_without(kind: str) -> None:
    """Also beyond a window of three tokens, and where the cache is left out."""
    pytest.importorskip("transformers")
    from tests import huggingface

    model = huggingface.build(kind).eval()
    ours, theirs, next_token = steps_of(model, min(18, describe(model).max_tokens or 18))
    for one, other in zip(ours, theirs, strict=True):
        assert float((one - other).abs().max()) <= 2e-5 * float(other.abs().max())
    assert next_token.uses_cache == (kind not in NOT_CACHED)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 8}
        | {"short_factor": [1.0, 1.0], "long_factor": [3.0, 5.0]},
    ],
)
@torch.no_grad()
def test_no_key_is_cached_whose_rotation_depends_on_the_length(rope: dict[str, object]) -> None:
    transformers = pytest.importorskip("transformers")
    few = {"vocab_size": 41, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(
        **few, max_position_embeddings=8, rope_parameters={"rope_theta": 100.0, **rope}, initializer_range=0.5
    )
    ours, theirs, next_token = steps_of(transformers.LlamaForCausalLM(config).eval(), 14)
    for one, other in zip(ours, theirs, strict=True):
        assert float((one - other).abs().max()) <= 2e-5 * float(other.abs().max())
    assert not next_token.uses_cache


def test_a_model_is_called_with_one_token_at_a_time() -> None:
    pytest.importorskip("transformers")
    from tests import huggingface

    model, lengths = huggingface.build("llama").eval(), []
    model.model.register_forward_pre_hook(
        lambda _, given, named: lengths.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    found = Continuation(model, [3, 1, 4], end_tokens=(), max_tokens=5, sampling=Sampling(), name="input_ids")
    assert len(list(found)) == 5
    assert lengths == [3, 1, 4, 1, 1, 1]  # the whole text once more, to compare


SMALL = {"hidden_size": 8, "intermediate_size": 8, "word_embed_proj_dim": 8}


@pytest.mark.parametrize(
    ("kind", "config", "longest"),
    [
        ("GPT2", {"n_positions": 8, "n_embd": 8}, 8),
        ("Llama", {"max_position_embeddings": 8, **SMALL}, None),
        pytest.param("OPT", {"max_position_embeddings": 8, "ffn_dim": 8, **SMALL}, 8, marks=pytest.mark.wide),
        pytest.param("Roberta", {"max_position_embeddings": 8, **SMALL}, 6, marks=pytest.mark.wide),  # pads with 1
    ],
)
def test_a_table_of_positions_ends_a_sequence(kind: str, config: dict[str, int], longest: int | None) -> None:
    transformers = pytest.importorskip("transformers")
    few = {"vocab_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "bos_token_id": 0, "eos_token_id": 2}
    made = getattr(transformers, f"{kind}Config")(**few, **config, is_decoder=True)
    model = transformers.AutoModelForCausalLM.from_config(made).eval()
    found = Continuation(model, [3, 2, 5], end_tokens=(), max_tokens=9, sampling=Sampling(), name="input_ids")
    assert found.longest == longest
    assert len(list(found)) == (9 if longest is None else longest - 2)  # the last is made of the longest sequence
    assert found.stopped == ("length" if longest is None else "model length")
    if longest is not None:
        with rejects("L021", f"{longest} tokens"):
            Continuation(model, [2] * (longest + 1), end_tokens=(), max_tokens=9, sampling=Sampling())


def test_all_end_tokens_of_a_folder_count_with_its_own_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    for folder in ("model", "other"):
        (tmp_path / folder).mkdir()
        made.save(str(tmp_path / folder / "tokenizer.json"))
        made.add_tokens(["b"])
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 3}))
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 5]}))
    section = ModelSection(name=f"hf:{tmp_path / 'model'}")
    for folder, expected in (("model", {1, 3, 4, 5}), ("other", {1})):
        name = str(tmp_path / folder)
        assert end_tokens(section, open_chat_tokenizer(name), name) == expected
    assert end_tokens(section, open_chat_tokenizer("bytes"), "bytes") == {256}


def test_draws_follow_temperature_and_top_p() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0]).log_softmax(-1)
    generator = torch.Generator().manual_seed(0)

    def share(**settings: float) -> list[float]:
        drawn = [choose(logits, Sampling(**settings), generator) for _ in range(4000)]
        return [drawn.count(token) / len(drawn) for token in range(3)]

    for found, expected in zip(share(temperature=2.0), torch.softmax(logits / 2, -1).tolist(), strict=True):
        assert abs(found - expected) < 0.03
    assert share(temperature=1.0, top_p=0.7)[0] == 0.0
    assert share(temperature=1.0, top_p=0.5) == [0.0, 1.0, 0.0]


def test_text_appears_as_it_is_made_and_no_character_is_halved(capsys: pytest.CaptureFixture[str]) -> None:
    made, shown, steps = "né🙂 \ufffd!".encode(), "", []
    for length in range(1, len(made) + 1):
        shown += _show(made[:length].decode(errors="replace"), shown)
        steps.append(capsys.readouterr().out)
    assert "".join(steps) == shown == "né🙂 \ufffd!"
    assert steps[:3] == ["n", "", "é"]
    assert "\ufffd" not in "".join(steps[:-1])


def test_the_form_of_a_prompt_is_the_saved_one_or_that_of_the_data(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    for name, row in (("chat", chat), ("plain", {"prompt": "a", "completion": "b"}), ("text", {"text": "a"})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.jsonl").write_text(json.dumps(row))

    def found(source: str, **state: str) -> bool:
        saved = SimpleNamespace(manifest=SimpleNamespace(state=state))
        recipe = SimpleNamespace(data=DataSection(source=source))
        return is_of_conversations(SimpleNamespace(step=saved, recipe=recipe))  # type: ignore[arg-type]

    assert found("gone.jsonl", prompts="conversations")
    assert not found(str(tmp_path / "chat"), prompts="text")
    for path in (tmp_path / "chat", tmp_path / "chat" / "rows.jsonl"):
        assert found(str(path))
    assert not any(found(str(tmp_path / name / "rows.jsonl")) for name in ("plain", "text"))
    assert not any(found(source) for source in ("python", "synthetic", "gone.txt"))
    with rejects("D102", "gone.jsonl"):
        found("gone.jsonl")
