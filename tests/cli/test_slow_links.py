"""Two hosts with 10, 1 or 0.1 Mbit/s between them: `sync=auto` sends as little as the link demands, and predicts it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_bench import PREFIX, harness
from tests.cli.test_train import MADE_UP

RARELY = "sync=diloco:50 compress=int8"
WAYS = ["plain", "compress=int8", RARELY]
MODEL = """
import time
from torch import nn

class Bigram(nn.Module):
    num_outputs = 256

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, {hidden}), nn.Linear({hidden}, 256)

    def forward(self, tokens):
        time.sleep(0.2)  # as if it were larger: the cores of a busy machine are no part of the prediction
        return self.head(self.embedding(tokens))
"""
SETTINGS = [
    *[*MADE_UP, "--data.seq_len", "32", "--data.global_batch", "4", "--data.workers", "0"],
    *["--device", "cpu", "--launch.threads", "1", "--steps", "3", "--json", "--methods", *WAYS],
]


def over(rate: str, model: Path) -> dict[str, Any]:
    """The ways to synchronize, predicted and tried over a link."""
    command = [sys.executable, "-m", "shoal", "bench", "compress", "--model.name", f"{model}:Bigram", *SETTINGS]
    with harness.made(2, rate=rate, prefix=PREFIX, network="10.79.0") as hosts:
        ended = harness.checked(harness.run(hosts, command, timeout=580))
    found: dict[str, Any] = json.loads(ended[0].stdout)
    return found


@pytest.mark.wide
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("rate", "mbit", "hidden", "chosen"),
    [("10mbit", 10, 64, "compress=int8"), ("1mbit", 1, 64, RARELY), ("100kbit", 0.1, 16, RARELY)],
)
def test_less_is_sent_over_slower_links_as_predicted(
    rate: str, mbit: float, hidden: int, chosen: str, tmp_path: Path
) -> None:
    if harness.missing():
        pytest.skip(harness.missing())
    (tmp_path / "own.py").write_text(MODEL.format(hidden=hidden))
    said = over(rate, tmp_path / "own.py")
    ways = {way["method"]: way for way in said["methods"]}
    print(rate, {name: (way["predicted"], way["seconds"], way["loss"]) for name, way in ways.items()}, said["why"])
    assert said["link"]["bytes_per_second"] == pytest.approx(mbit * 1e6 / 8, rel=0.4)
    assert said["chosen"] == chosen
    for name in ("plain", chosen):
        assert ways[name]["predicted"] == pytest.approx(ways[name]["seconds"], rel=0.2), name
    assert ways[chosen]["seconds"] < ways["plain"]["seconds"]
    assert ways[chosen]["loss"] < 1.02 * ways["plain"]["loss"]  # local SGD has made more steps
