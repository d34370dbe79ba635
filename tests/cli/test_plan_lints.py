"""Lints as `shoal plan` shows them: every rule can be reached from the command line, and its numbers are right."""

from __future__ import annotations

import json

import pytest

from shoal.cli import main
from shoal.planner.lint.lint import RULES
from shoal.predict.cluster_parser import parse_cluster
from tests.unit.test_lint import CASES, Try

ONLY_IN_PYTHON = {"SH14"}
"""`shoal plan` rejects a batch that the data ranks cannot share; `lint()` takes any plan."""
DIMENSIONS = {"hidden": "hidden", "layers": "layers", "heads": "heads", "ffn": "ffn", "vocabulary": "vocabulary"}
REACHED = {code: (broken, kept) for code, broken, kept in CASES}
"""Code → the last of its cases: a plan that breaks the rule, and one next to it that does not."""


def words_of(case: Try) -> list[str]:
    """The case as it is typed."""
    model = [case.model]
    if case.model.startswith("bigscience"):
        model = [
            word for name, flag in DIMENSIONS.items() for word in (f"--{flag}", str(getattr(case.task.workload, name)))
        ]
    words = [*model, "--cluster", case.cluster, "--seq-len", str(case.sequence), "--global-batch", str(case.batch)]
    rate = [word for key, value in case.told.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    return [*words, "--plan", str(case.resolved), *rate]


def lints(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, str]]:
    code = main(["plan", *words, "--json"])
    said = capsys.readouterr()
    assert code == 0, said.out + said.err
    return {one["code"]: one for one in json.loads(said.out)["lint"]}


@pytest.mark.parametrize("code", [rule.code for rule in RULES if rule.code not in ONLY_IN_PYTHON])
def test_every_rule_is_reached_from_the_command_line(capsys: pytest.CaptureFixture[str], code: str) -> None:
    broken, kept = REACHED[code]
    assert code in lints(capsys, *words_of(broken))
    assert code not in lints(capsys, *words_of(kept))


def test_a_batch_that_cannot_be_dealt_is_rejected_before_any_lint(capsys: pytest.CaptureFixture[str]) -> None:
    broken, _ = REACHED["SH14"]
    assert main(["plan", *words_of(broken), "--json"]) == 2
    assert "dp_shard=16" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--learning-rate", "3e-4"], ["--base-batch", "64"]])
def test_a_rate_and_its_batch_come_together(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(["plan", "llama3-8b", "--cluster", "h200:8", *words]) == 2
    assert "fix: --learning-rate 3e-4 --base-batch 256" in capsys.readouterr().err


# ---- nodes that a group spans ---------------------------------------------------------------------------------------


def test_sharding_spans_no_more_nodes_than_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    """tp=4 on nodes of 6: groups of dp_shard lie 4 ranks apart, and one and a half of their members share a node."""
    words = ["llama3-8b", "--cluster", "h100:6x4", "--seq-len", "2048", "--global-batch", "12"]
    found = lints(capsys, *words, "--plan", "tp=4 dp_shard=6 zero=3 mb=1 bf16")
    assert "dp_shard=6 spans 4 nodes;" in found["SH02"]["numbers"]


@pytest.mark.parametrize("per_node", range(1, 10))
def test_nodes_of_a_group_are_those_that_its_ranks_are_on(per_node: int) -> None:
    for nodes in (1, 2, 3, 4, 6):
        cluster = parse_cluster(f"h100:{per_node}x{nodes}")
        world = per_node * nodes
        shapes = [(d, s) for d in range(1, world + 1) for s in range(1, world + 1) if world % (d * s) == 0]
        for degree, stride in shapes:
            starts = [block + place for block in range(0, world, degree * stride) for place in range(stride)]
            groups = [{(start + k * stride) // per_node for k in range(degree)} for start in starts]
            assert cluster.link(degree, stride).nodes == max(map(len, groups)), (nodes, degree, stride)


# ---- tp between nodes of one device ---------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["llama3-8b", "llama3-1b"])
def test_tp_over_ethernet_gets_a_verdict(capsys: pytest.CaptureFixture[str], model: str) -> None:
    found = lints(capsys, model, "--cluster", "rtx4090:1x8", "--tp", "8")
    assert "tp=8 spans 8 nodes of 1" in found["SH01"]["numbers"]
    assert found["SH01"]["saves"] is not None
    assert found["SH01"]["saves"]["part"] > 0.3  # type: ignore[index]
    assert "SH18" not in found


def test_tp_over_ethernet_that_nothing_can_replace_names_the_link(capsys: pytest.CaptureFixture[str]) -> None:
    """Half a layer is all that fits on a device, and one sample leaves a pipeline nothing to do."""
    size = ["--hidden", "16384", "--layers", "1", "--heads", "128", "--vocabulary", "1024", "--ffn", "65536"]
    words = [*size, "--cluster", "rtx4090:1x8", "--seq-len", "512", "--global-batch", "1", "--tp", "8"]
    found = lints(capsys, *words, "--state-dtype", "bf16")
    assert found["SH01"]["saves"] is None
    assert "faster than ethernet-10 (1.1 GB/s)" in found["SH01"]["fix"]


# ---- rules of thumb -------------------------------------------------------------------------------------------------


def test_a_rule_of_thumb_blames_the_words_that_were_given(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "llama3-8b", "--cluster", "rtx4090:1x8", "--tp", "8"])
    out = capsys.readouterr().out
    assert '"tensor parallelism stays inside a node" (plans were limited to tp=8)' in out
    assert "nothing else fits" not in out


def test_a_plan_that_was_printed_can_be_typed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["llama3-8b", "--cluster", "h200:8", "--seq-len", "8192", "--global-batch", "64", "--json"]
    main(["plan", *words])
    first = json.loads(capsys.readouterr().out)["plans"][0]
    assert main(["plan", *words, "--plan", first["plan"]]) == 0
    assert json.loads(capsys.readouterr().out)["plans"] == [first]
