"""What a trained model says: greedy tokens as of transformers, draws by temperature and top-p."""

from __future__ import annotations

import pytest
import torch

from shoal.cli.generate import _show
from shoal.train.inference.generate import Sampling, choose, generate


def test_greedy_tokens_are_those_of_transformers() -> None:
    pytest.importorskip("transformers")
    from tests import huggingface

    model = huggingface.build("llama").eval()
    prompt = [3, 1, 4, 1, 5]
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0, 5:].tolist()
    found = generate(model, prompt, end_token=-1, max_tokens=6, sampling=Sampling(), name="input_ids")
    assert list(found) == expected


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
