"""What the planner leaves out for an architecture is what the table of docs/huggingface.md says is rejected."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from shoal.blueprint.plan import Plan
from shoal.cli import main
from shoal.errors import ShoalError
from shoal.planner.candidates import layouts
from shoal.planner.changes.alternatives import alternatives
from shoal.planner.search import search
from shoal.planner.task import Task
from shoal.predict.cluster_parser import parse_cluster
from shoal.predict.huggingface_config import from_hugging_face
from shoal.predict.left_out_axes import LEFT_OUT
from shoal.predict.presets.models import find_model

PAGE = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text()
TABLE = PAGE.partition("<!-- table: begin -->")[2].partition("<!-- table: end -->")[0]
REASONS = dict(re.findall(r"- \*\*(\w)\*\*: (.*)", TABLE))
AXES = {"tp": 1, "pp": 3, "cp": 4, "ep": 6}
"""Axis → its column. That of `sp=on` is not compared: a run turns it on where the model allows it."""
CONFIG = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 8, "vocab_size": 256}


def rows() -> dict[str, list[str]]:
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.splitlines() if line[:3] != "| |"]
    return {name: values for name, *values in cells if len(values) == 7 and not name.startswith("-")}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of transformers' DeBERTa
def test_the_table_is_that_of_the_page() -> None:
    pytest.importorskip("transformers")
    from tests import huggingface

    expected: dict[str, dict[str, str]] = {}
    for name, cells in rows().items():
        config = huggingface.build(name).config.to_dict()
        try:
            experts = from_hugging_face(config, name=name).experts
        except ShoalError:
            continue  # it is not planned
        letters = {axis: cells[column] for axis, column in AXES.items() if cells[column] in REASONS}
        found = {axis: REASONS[letter] for axis, letter in letters.items() if axis != "ep" or experts}
        if found:
            expected.setdefault(config["model_type"], found)
            assert expected[config["model_type"]].keys() == found.keys(), name
    assert {kind: set(axes) for kind, axes in LEFT_OUT.items()} == {kind: set(axes) for kind, axes in expected.items()}
    for kind, axes in LEFT_OUT.items():
        assert all(reason in expected[kind][axis] for axis, reason in axes.items() if axis != "ep"), kind


def task(folder: Path, kind: str) -> Task:
    (folder / "config.json").write_text(
        json.dumps({**CONFIG, "model_type": kind, "num_local_experts": 4, "num_experts_per_tok": 2})
    )
    cluster = parse_cluster("h100:8")
    return Task(workload=find_model(f"hf:{folder}"), cluster=cluster, sequence=8192, global_batch=64)


@pytest.mark.parametrize("kind", ["llama", *LEFT_OUT])
def test_no_layout_has_an_axis_that_is_left_out(tmp_path: Path, kind: str) -> None:
    work = task(tmp_path, kind)
    degrees = {axis: {layout[axis] for layout in layouts(work, Plan())} for axis in AXES}
    assert {axis for axis, found in degrees.items() if found == {1}} == set(LEFT_OUT.get(kind, ()))


def test_the_plan_says_what_is_left_out(tmp_path: Path) -> None:
    work = task(tmp_path, "deberta-v2")
    found = {one.move: one.reason for one in alternatives(work, search(work).best[0])}
    assert "cannot be run without memory" in found["tp, pp"]
    assert "flash attention" in found["cp"]
    assert not [move for move in found if move.startswith(("tp 1", "pp 1", "cp 1"))]


def test_an_axis_that_is_asked_for_is_rejected_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task(tmp_path, "bloom")
    assert main(["plan", f"hf:{tmp_path}", "--cluster", "h100:8", "--plan", "cp=2"]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in ("Q008", "cp=2", "takes no position_ids", "--cp 1"))
