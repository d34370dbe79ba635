"""Compression and local SGD from the command line: compared with each other, and chosen by `sync=auto`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.host import Host
from tests.cli.test_train import MADE_UP

TINY = [
    *["--model.num_layers", "1", "--model.hidden", "32", "--model.ffn", "48", *MADE_UP, "--data.seq_len", "32"],
    *["--data.global_batch", "4", "--data.workers", "0", "--device", "cpu", "--launch.threads", "1", "--nproc", "2"],
]


HELD_OUT = ["--data.validation", "0.1"]


def test_ways_are_predicted_and_tried(host: Host, tmp_path: Path) -> None:
    ways = ["compress=powersgd:2", "sync=diloco:4 compress=int8"]
    said = host.run(
        "bench", "compress", *TINY, "--steps", "4", *HELD_OUT, "--json", "--methods", *ways, cwd=tmp_path
    ).json
    assert [way["method"] for way in said["methods"]] == ["plain", *ways]
    plain, narrow, local_sgd = said["methods"]
    assert plain["bytes"] == 4 * said["parameters"]  # of a ring of two: 2 (n - 1) / n of it
    assert narrow["bytes"] < plain["bytes"] / 4
    assert local_sgd["bytes"] < plain["bytes"] / 12
    for way in said["methods"]:
        assert way["steps"] == len(way["curve"]) == 4
        assert way["predicted"] > 0
        assert way["seconds"] > 0
        assert way["loss"] == pytest.approx(plain["loss"], rel=0.1)
        assert way["speedup"] == pytest.approx(plain["seconds"] / way["seconds"])
        assert way["eval_loss_ratio"] == pytest.approx(way["eval_loss"] / plain["eval_loss"])
    assert said["chosen"] in ["plain", *ways]
    assert said["link"]["bytes_per_second"] > 1e6


def test_a_loss_that_was_reached_ends_a_way(host: Host, tmp_path: Path) -> None:
    words = [*TINY, "--steps", "50", "--until-loss", "100", "--json", "--methods", "plain"]
    said = host.run("bench", "compress", *words, cwd=tmp_path).json
    assert said["methods"][0]["steps"] == 1
    assert said["methods"][0]["seconds_to_loss"] > 0


def test_auto_chooses_and_says_why(host: Host, tmp_path: Path) -> None:
    words = [
        *TINY,
        "--plan",
        "sync=auto",
        "--comm.algorithm",
        "auto",
        "--comm.fragments",
        "2",
        "--run.bucket_mb",
        "auto",
    ]
    ended = host.run("train", *words, "--run.duration", "3step", "--run.dir", str(tmp_path / "run"), cwd=tmp_path)
    assert ended.code == 0
    lines = [line.removeprefix("sync   ") for line in ended.said.splitlines() if line.startswith("sync ")]
    assert lines[0].startswith("sync=auto is ")
    assert "Mbit/s" in lines[0]
    assert lines[1].startswith("comm.algorithm auto is ")
    assert "builtin " in lines[1]
    assert lines[2].startswith("run.bucket_mb auto is ")
    assert "ms, measured" in lines[2]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["auto_choices"] == lines
    assert "auto" not in (tmp_path / "run" / "recipe.yaml").read_text().split("plan:")[1].split("\n")[0]


def test_who_compresses_gradients_for_adam_is_told_of_a_better_way(host: Host, tmp_path: Path) -> None:
    words = ["train", *TINY, "--run.duration", "2step", "--run.dir", str(tmp_path / "run"), "--plan"]
    assert (
        "sync=local:1 compress=topk:0.1 sends its updates" in host.run(*words, "compress=topk:0.1", cwd=tmp_path).said
    )
    assert "sends its updates" not in host.run(*words, "compress=int8", cwd=tmp_path).said


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["bench", "compress", "--methods", "compress=int9"], "or powersgd, got 'int9'"),
        (["bench", "compress", "--nproc", "1"], "the plan must have two or more replicas"),
        (["bench", "compress", "--steps", "1"], "--steps must be 2 or more"),
        (["bench", "compass"], "shoal bench compress"),
        (["bench", "compress", "--methods", "int8"], "fix: compress=int8"),
        (["bench", "compress", "--methods", "in8"], "fix: compress=int8"),
        (["bench", "compress", "--methods", "sync=auto"], "got sync=auto in"),
        (["bench", "compress", "--methods", "tp=2"], "got other words in 'tp=2'"),
        (["bench", "compress", "--method", "plain"], "fix: --methods"),
        (["bench", "compress", "--plan", "zero=3", "--nproc", "2"], "--plan.dp_replicate 2"),
        (
            ["bench", "compress", "--plan", "fp16", "--nproc", "2", "--methods", "compress=1bit"],
            "changing loss scale of fp16",
        ),
    ],
)
def test_what_cannot_be_tried_is_refused(host: Host, tmp_path: Path, words: list[str], what: str) -> None:
    ended = host.run(*words, cwd=tmp_path)
    assert ended.code == 2
    assert what in ended.said
