"""Fine-tuning as a user meets it: conversations, LoRA on a trained model, resume on other ranks, generation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.cli import main
from tests.cli.host import Host
from tests.cli.test_train import Ended, forked, losses

SIZES = ["--model.vocabulary", "257", "--model.num_layers", "1", "--model.hidden", "32", "--model.ffn", "48"]
SMALL = [*SIZES, "--model.num_heads", "2", "--model.init_std", "0.2", "--data.seq_len", "48", "--data.validation", "0"]
CHAT = ["--data.source", "chat.jsonl", "--data.global_batch", "4", "--optim.lr", "0.02", "--optim.weight_decay", "0"]
CPU = ["--device", "cpu", "--launch.threads", "1", "--json"]
LATEST = ["--resume", "latest"]
LORA = ["--model.lora.rank", "8", "--run.start_from", "base", "--checkpoint.every", "0step"]


@pytest.fixture(scope="module")
def folder(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained base, and LoRA on it: sixty steps on one rank, two more on two."""
    path = tmp_path_factory.mktemp("finetune")
    answers = {"red": "stop", "green": "go"}
    rows = [{"messages": [_message("user", one), _message("assistant", two)]} for one, two in answers.items()]
    path.joinpath("chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    path.joinpath("text.txt").write_text("def double(x):\n    return 2 * x\n" * 20)
    text = ["--data.source", "text.txt", "--data.global_batch", "2", "--run.duration", "2step", "--run.dir", "base"]
    commands = [
        [*SMALL, *text],
        [*SMALL, *CHAT, *LORA, "--run.duration", "60step", "--run.dir", "tuned"],
        [
            *SMALL,
            *CHAT,
            *LORA,
            "--run.duration",
            "62step",
            "--run.dir",
            "tuned",
            "--nproc",
            "2",
            "--plan",
            "zero=3",
            *LATEST,
        ],
    ]
    for words in commands:
        ended = forked(host, "train", *words, *CPU, cwd=path)
        assert ended.code == 0, ended.err
    return path


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_the_loss_falls_and_a_run_resumes_on_two_ranks(folder: Path) -> None:
    found = losses(folder / "tuned")
    assert len(found) == 62
    assert found[0] > 3
    assert found[59] < 1.5
    assert max(found[60:]) < 1.2 * found[59] + 0.05  # the same adapters on the same base


def test_another_base_is_rejected(folder: Path, host: Host) -> None:
    words = [
        *SMALL,
        *CHAT,
        *LORA,
        "--run.duration",
        "64step",
        "--run.dir",
        "tuned",
        "--run.start_from",
        "null",
        *LATEST,
    ]
    ended: Ended = forked(host, "train", *words, *CPU, cwd=folder)
    assert ended.code == 2
    assert "L010" in ended.err


def said(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_the_model_says_what_it_has_learned(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)  # the recipe names its base and its data by relative paths
    (folder / "chat.jsonl").rename(folder / "moved.jsonl")  # the checkpoint says what it was trained on
    for prompt, answer in (("red", "stop"), ("green", "go")):
        found = said(["generate", "tuned", "--prompt", prompt], capsys)
        assert (found["text"], found["stopped"], found["step"]) == (answer, "end", 62)
    (folder / "moved.jsonl").rename(folder / "chat.jsonl")
    plain = said(["generate", "base", "--prompt", "def ", "--max-tokens", "3"], capsys)
    assert (len(plain["tokens"]), plain["stopped"]) == (3, "length")
    drawn = said(["generate", "tuned", "--prompt", "red", "--temperature", "5", "--top-p", "0.9", "--raw"], capsys)
    assert drawn["text"] != "stop"


def test_merged_weights_say_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(folder)
    found = said(["generate", "tuned", "--prompt", "green"], capsys)
    said(["checkpoint", "merge", "tuned", "merged"], capsys)
    model = transformers.LlamaForCausalLM.from_pretrained("merged")
    prompt = list(b"<|user|>\ngreen\n<|assistant|>\n")
    out = model.generate(torch.tensor([prompt]), max_new_tokens=3, do_sample=False, eos_token_id=256)
    assert out[0, len(prompt) :].tolist() == [*found["tokens"], 256]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--max-tokens", "0"], "L021"),
        (["--temperature", "-1"], "L021"),
        (["--top-p", "0"], "L021"),
        (["--prompt", "", "--raw"], "L021"),
    ],
)
def test_rejected(folder: Path, words: list[str], code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(folder / "base"), "--prompt", "x", *words]) == 2
    assert code in capsys.readouterr().err
