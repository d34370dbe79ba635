"""A run on a mixture resumes on another number of ranks as if it had not stopped, and on no other mixture."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.cli.host import Host
from tests.cli.test_changed_data import WORDS
from tests.cli.test_train import losses

SETTINGS = [*WORDS, "--plan", "fp64", "--data.token_dtype", "uint8", "--optim.schedule", "constant"]


def test_a_mixture_resumes_on_another_number_of_ranks(host: Host, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"line {number}\n" for number in range(300)))
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"text": "lorem ipsum " * 9}) for _ in range(9)))
    np.arange(900).astype(np.uint8).tofile(tmp_path / "c.bin")
    source = ["--data.source", "{a.txt: 0.5, b.jsonl: 0.3, c.bin: 0.2}"]
    whole = host.run(*SETTINGS, *source, "--run.dir", "whole", "--run.duration", "4step", cwd=tmp_path)
    assert whole.code == 0, whole.said
    for words in (["--nproc", "2", "--run.duration", "2step"], ["--run.duration", "4step", "--resume", "latest"]):
        ended = host.run(*SETTINGS, *source, *words, cwd=tmp_path)
        assert ended.code == 0, ended.said
    assert ended.json["resumed_from"] == 2
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=1e-12)
    other = ["--data.source", "{a.txt: 0.5, b.jsonl: 0.2, c.bin: 0.3}", "--resume", "latest"]
    ended = host.run(*SETTINGS, *other, "--run.duration", "6step", cwd=tmp_path)
    assert ended.code == 2, ended.said
    assert "data.source" in ended.said
