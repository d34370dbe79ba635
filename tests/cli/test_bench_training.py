"""`shoal bench scale`, `step` and `memory`: short ones of a tiny model, and what a person can get wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import main
from tests.cli.host import Host

TINY = (
    *("--model.num_layers", "2", "--model.hidden", "16", "--model.num_heads", "2", "--model.num_kv_heads", "2"),
    *("--model.ffn", "32", "--data.seq_len", "8", "--data.global_batch", "4"),
    *("--data.source", "synthetic", "--device", "cpu", "--launch.threads", "1", "--cluster", "cpu:2"),
)
SHORT = ("--steps", "2", "--rounds", "1", "--json")


@pytest.fixture(scope="module")
def scaled(host: Host, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Scaling of two plans and an illegal one, and the folder with its files."""
    folder = tmp_path_factory.mktemp("scale")
    words = ["--nproc", "2", "--plans", "ddp,tp=2,tp=3", "--out", "s.json", "--html", "s.html", *SHORT]
    ended = host.run("bench", "scale", *TINY, *words, cwd=folder)
    assert ended.code == 0, ended.said
    return ended.json, folder


def row_of(found: dict[str, Any], mode: str, plan: str) -> dict[str, Any]:
    (row,) = (row for row in found["rows"] if (row["mode"], row["plan"], row["is_base"]) == (mode, plan, False))
    return row


def test_one_rank_is_the_base_of_both_modes(scaled: tuple[dict[str, Any], Path]) -> None:
    bases = [row for row in scaled[0]["rows"] if row["is_base"]]
    assert [(row["mode"], row["ranks"], row["global_batch"]) for row in bases] == [("strong", 1, 4), ("weak", 1, 2)]
    rows = [row for row in scaled[0]["rows"] if "microbatch" in row]
    assert {row["microbatch"] for row in rows} == {2}, "the base has the same microbatch"
    assert scaled[0]["threads"] == 1
    assert all(row["predicted"]["seconds"] > 0 for row in bases), "a named cluster is not this machine"
    assert scaled[0]["alone"] == []


def test_efficiency_is_that_of_the_same_round(scaled: tuple[dict[str, Any], Path]) -> None:
    found, _ = scaled
    for mode in ("strong", "weak"):
        row = row_of(found, mode, "ddp")
        if row["note"]:  # on one core, two ranks measure nothing
            assert "efficiency" not in row
            continue
        spread = row["efficiency"]
        assert 0 < spread["low"] <= spread["median"] <= spread["high"]
        assert row["speedup"] == pytest.approx(2 * spread["median"])
        assert row["predicted_efficiency"] > 0
    strong, weak = row_of(found, "strong", "ddp"), row_of(found, "weak", "ddp")
    assert strong["step_seconds"] == weak["step_seconds"], "the same case is measured once"


def test_losses_are_the_same_under_every_plan(scaled: tuple[dict[str, Any], Path]) -> None:
    (losses,) = scaled[0]["losses"]
    assert losses["are_equal"]
    assert losses["largest"] < 1e-5
    assert losses["largest_of_norm"] < 1e-4
    assert set(losses["differences"]) == {"ddp on 2 ranks, batch 4", "tp=2 on 2 ranks, batch 4"}


SUMMED = """\
import torch.distributed as dist
from torch import nn

class Net(nn.Sequential):
    def forward(self, images):
        return super().forward(images)

def build():
    net = Net(nn.Flatten(), nn.Linear(192, 8))
    for parameter in net.parameters():
        parameter.register_hook(lambda gradient: gradient * dist.get_world_size())
    return net
"""


def test_a_gradient_that_is_wrong_by_a_factor_is_found(host: Host, tmp_path: Path) -> None:
    """The sum over ranks in place of their mean: AdamW makes the same updates, so that the losses are equal."""
    (tmp_path / "net.py").write_text(SUMMED)
    words = ["--model.name", "net.py:build", "--data.source", "synthetic", "--data.synthetic_kind", "images"]
    words += ["--data.image_size", "8", "--data.vocabulary", "8", "--data.global_batch", "8", "--data.workers", "0"]
    words += ["--device", "cpu", "--launch.threads", "1", "--cluster", "cpu:2", "--optim.name", "adamw"]
    words += ["--nproc", "2", "--plans", "ddp", "--mode", "strong", *SHORT]
    ended = host.run("bench", "scale", *words, cwd=tmp_path)
    (losses,) = ended.json["losses"]
    assert ended.code == 1, ended.said
    assert losses["largest"] < losses["tolerance"]
    assert losses["largest_of_norm"] == pytest.approx(1.0, rel=0.01)


def test_an_illegal_plan_has_its_reason(scaled: tuple[dict[str, Any], Path]) -> None:
    row = row_of(scaled[0], "strong", "tp=3")
    assert "tp=3 does not divide the number of ranks, 2 [P009]" in row["reason"]
    assert "step_seconds" not in row
    assert "one plain module" in row_of(scaled[0], "strong", "nn.DataParallel")["reason"]


def test_files_have_what_was_printed(scaled: tuple[dict[str, Any], Path]) -> None:
    found, folder = scaled
    assert json.loads((folder / "s.json").read_text()) == found
    page = (folder / "s.html").read_text()
    assert "tp=3 does not divide the number of ranks" in page
    assert "script-src 'none'" in page


def test_memory_by_cause(host: Host, tmp_path: Path) -> None:
    """The states are exact: two moments of Adam for each parameter, and half of all on each of two ranks."""
    words = ["--plans", "ddp,zero=3,tp=3", "--steps", "1", "--html", "m.html", "--json"]
    ended = host.run("bench", "memory", *TINY, *words, cwd=tmp_path)
    assert ended.code == 0, ended.said
    whole, sharded, illegal = ended.json["rows"]
    measured = whole["measured"]
    assert measured["parameters"] == measured["gradients"] == measured["optimizer"] / 2 > 0
    assert measured["parameters"] == whole["predicted"]["parameters"]
    assert sharded["measured"]["optimizer"] == pytest.approx(measured["optimizer"] / 2, rel=0.05)
    parts = [measured[cause] for cause in ("parameters", "gradients", "optimizer", "other", "process")]
    assert sum(parts) == measured["total"]
    assert "P009" in illegal["reason"]
    assert "ddp, 2 ranks" in (tmp_path / "m.html").read_text()


def test_settings_are_compared_with_the_recipe(host: Host, tmp_path: Path) -> None:
    words = ["--nproc", "2", "--plan", "ddp", "--settings", "microbatch,buckets", "--html", "p.html", *SHORT]
    ended = host.run("bench", "step", *TINY, *words, cwd=tmp_path)
    assert ended.code == 0, ended.said
    base, *changes = ended.json["rows"]
    assert base["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    overrides = [row["overrides"] for row in changes if "together" not in row["name"]]
    assert overrides == [["--plan.mb", "1"], ["--run.bucket_mb", "1"], ["--run.bucket_mb", "100"]]
    assert all(row["loss"] == pytest.approx(base["loss"], rel=1e-5) for row in changes)
    assert "predicted_ratio" in changes[0]
    assert "predicted_ratio" not in changes[1], "buckets are not predicted"
    assert "microbatch of 1" in (tmp_path / "p.html").read_text()


# ---- what a person can get wrong ------------------------------------------------------------------------------------

WRONG = {
    "no rank": ("scale --nproc 0", "--nproc must be numbers of ranks, each 1 or more, got '0'", "--nproc 1,2"),
    "no number": ("scale --nproc two", "got 'two'", "--nproc 1,2"),
    "no plan word": ("scale --plans ddp,zeroo=3", "a plan has no key 'zeroo'", "zero=3"),
    "no plan": ("scale --plans ,", "--plans must not be empty", "--plans ddp,zero=1"),
    "far too many ranks": ("scale --nproc 1,90000 --device cpu", "--nproc must be at most", "--nproc 1"),
    "no mode": ("scale --mode wide", "--mode must be", "--mode both"),
    "too few steps": ("scale --steps 2", "--steps must be 3 or more, at least one for each round, got 2", "--steps 30"),
    "no rounds": ("memory --steps 0", "--steps must be 1 or more", "--steps 30"),
    "another ending": ("scale --html page.txt", "the file must end in .html, got page.txt", "page.html"),
    "no folder": ("memory --out nowhere/m.json", "nowhere/m.json cannot be written", ".json"),
    "no setting": ("step --settings bukets", "unknown setting 'bukets'", "buckets"),
    "several numbers": ("step --nproc 1,2", "--nproc must be one number here, got '1,2'", "--nproc 2"),
}


@pytest.mark.parametrize("words", WRONG)
def test_a_mistake_is_one_message_with_a_fix(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, what, fix = WRONG[words]
    assert main(["bench", *command.split()]) == 2
    said = capsys.readouterr().err
    assert what in said
    assert fix in said.split("fix:", 1)[1]


def test_a_model_that_does_not_fit_is_rejected(host: Host, tmp_path: Path) -> None:
    words = ["--model.preset", "llama3-70b", "--data.source", "synthetic", "--device", "cpu", "--cluster", "cpu:2"]
    ended = host.run("bench", "scale", *words, cwd=tmp_path)
    assert ended.code == 2
    assert "[Q012]" in ended.said
