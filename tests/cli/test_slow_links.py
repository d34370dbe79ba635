"""Two hosts with 10, 1 or 0.1 Mbit/s between them: `sync=auto` sends as little as the link demands, and predicts it."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.cli.test_bench import PREFIX, harness
from tests.cli.test_train import MADE_UP

RARELY = "sync=diloco:50 compress=int8"
WAYS = ["plain", "compress=int8", RARELY]
TINY = [
    *["--model.num_layers", "1", "--model.ffn", "48", *MADE_UP, "--data.seq_len", "32"],
    *["--data.global_batch", "4", "--data.workers", "0", "--device", "cpu", "--launch.threads", "1"],
]


def over(rate: str, *words: str) -> dict[str, Any]:
    """The ways to synchronize, predicted and tried over a link."""
    command = [sys.executable, "-m", "shoal", "bench", "compress", *TINY, *words]
    command += ["--steps", "3", "--json", "--methods", *WAYS]
    with harness.made(2, rate=rate, prefix=PREFIX, network="10.79.0") as hosts:
        ended = harness.checked(harness.run(hosts, command, timeout=280))
    found: dict[str, Any] = json.loads(ended[0].stdout)
    return found


@pytest.mark.wide
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("rate", "mbit", "hidden"), [("10mbit", 10, 128), ("1mbit", 1, 64), ("100kbit", 0.1, 32)])
def test_less_is_sent_over_slower_links_as_predicted(rate: str, mbit: float, hidden: int) -> None:
    if harness.missing():
        pytest.skip(harness.missing())
    said = over(rate, "--model.hidden", str(hidden))
    plain, narrow, rarely = said["methods"]
    print({way["method"]: (way["predicted"], way["seconds"], way["loss"]) for way in said["methods"]}, said["why"])
    assert said["link"]["bytes_per_second"] == pytest.approx(mbit * 1e6 / 8, rel=0.25)
    for way in (plain, rarely):  # a narrow message fits into the bucket that the link may send at once
        assert way["predicted"] == pytest.approx(way["seconds"], rel=0.2), way
    assert narrow["seconds"] < plain["seconds"] / 2
    assert said["chosen"] != "plain"
    assert plain["seconds"] > 3 * rarely["seconds"]
    if rate != "10mbit":
        assert said["chosen"] == RARELY
    for way in said["methods"]:
        assert way["loss"] < 1.02 * plain["loss"]  # local SGD has made more steps
