"""What the fuzzer of `shoal verify` has found, each as a command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import main
from tests.cover import wide

IMAGES = [
    *[
        "--real",
        "--data.source",
        "synthetic",
        "--data.synthetic_kind",
        "images",
        "--data.global_batch",
        "4",
        "--steps",
        "1",
    ],
    *["--device", "cpu"],
]
MLP = ["--model.name", "mlp", "--model.sizes", "[48, 4, 4, 5]", "--data.image_size", "4", "--data.vocabulary", "5"]
RESNET = ["--model.name", "resnet", "--model.width", "2", "--data.image_size", "8", "--data.vocabulary", "10"]
SMALL = ["--model.num_heads", "2", "--model.num_kv_heads", "1", "--steps", "1", "--device", "cpu"]


@pytest.fixture
def verified(capfd: pytest.CaptureFixture[str]) -> Any:
    def verify(*words: str) -> tuple[int, Any]:
        code = main(["verify", *words, "--json"])
        return code, json.loads(capfd.readouterr().out)

    return verify


def test_the_mlp_takes_images_and_starts_with_numbers(verified: Any) -> None:
    """Its forward called them `inputs`, which no data does; and its weights, torch's own, were never drawn: NaN."""
    code, told = verified("--plan", "dp_replicate=2 mb=1", *MLP, *IMAGES)
    assert (code, told["equal"]) == (0, True), told


def test_the_mlp_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [word for word in IMAGES if word not in ("--real", "--steps", "1")]
    assert main(["train", *MLP, *words, "--run.fast_dev_run", "--quiet"]) == 0


def test_a_forward_that_does_not_take_what_a_batch_has_is_rejected(verified: Any, tmp_path: Path) -> None:
    """It was a traceback of torch's."""
    file = tmp_path / "own.py"
    file.write_text(
        "from torch import nn\n"
        "class Own(nn.Linear):\n    def forward(self, picture): return super().forward(picture.flatten(1))\n"
        "def build(): return Own(48, 5)\n"
    )
    own = ["--model.name", f"{file}:build", *MLP[4:]]
    code, told = verified("--plan", "dp_replicate=2", *own, *IMAGES)
    assert code == 2, told
    (problem,) = told["error"]["problems"]
    assert "'images'" in problem["what"]
    assert "(picture)" in problem["what"]
    assert "def forward(self, images)" in problem["fix"]


def test_batch_norm_of_one_value_is_rejected_and_of_two_is_not(verified: Any) -> None:
    """It was a traceback of torch's; and where a pipeline is traced with one sample, also with two in a microbatch."""
    code, told = verified("--plan", "dp_replicate=2 mb=1", *RESNET, *IMAGES)
    assert code == 2, told
    assert told["error"]["problems"][0]["fix"] == "--plan.mb 2, or --data.image_size 16"
    code, told = verified("--plan", "dp_replicate=2 mb=2", *RESNET, *IMAGES)
    assert (code, told["equal"]) == (0, True), told


@pytest.mark.parametrize("plan", [wide("pp=2 gpipe mb=1"), "pp=2 1f1b mb=1", wide("pp=2 looped v=2 mb=1")])
def test_gradients_that_no_microbatch_finds_are_not_predicted(verified: Any, plan: str) -> None:
    """A rank that makes all of its forwards first holds no gradient before any of them."""
    code, told = verified("--nproc", "2", "--plan", plan, "--data.global_batch", "2", *SMALL)
    assert code == 0, told
    held = told["memory"]["gradients"]
    assert held["predicted"] in (None, held["counted"])


def test_the_steps_that_adam_counts_are_no_state_as_large_as_a_parameter(verified: Any) -> None:
    """In a small model, four bytes for each parameter are more than one per cent."""
    sizes = ["--real", "--model.hidden", "4", "--model.head_dim", "2", "--model.ffn", "12", "--model.vocabulary", "97"]
    data = ["--data.source", "synthetic", "--data.vocabulary", "97", "--data.seq_len", "2", "--data.global_batch", "4"]
    code, told = verified("--nproc", "1", "--plan", "mb=2", *sizes, *data, *SMALL)
    assert code == 0, told
    assert told["memory"]["optimizer"]["predicted"] == told["memory"]["optimizer"]["counted"]
