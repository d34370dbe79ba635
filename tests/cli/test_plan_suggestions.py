"""Everything that `shoal plan` says of its plans is true of their numbers, and all that it suggests can be typed."""

from __future__ import annotations

import json
import re
import shlex
from itertools import product
from pathlib import Path

import pytest
import yaml

from shoal.blueprint.plan import Plan
from shoal.cli import main
from shoal.planner.search import AS_FAST, LESS_MEMORY, LESS_TIME, search, tradeoffs, why_not
from shoal.planner.task import Task
from shoal.predict.cluster_parser import larger, parse_cluster
from shoal.predict.presets.models import find_model
from shoal.predict.workload import Workload
from tests.cover import wide

MODELS = ("llama3-1b", "llama3-8b", "gpt3-1.3b", "qwen3-30b-a3b", "resnet50", "mixtral-8x7b")
CLUSTERS = ("rtx4090:2", "rtx4090:1x8", "h100:8", "a100-40:8x2", "h200:1", "l40s:4", "cpu:2")


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["plan", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


# ---- alternatives ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [model if model in MODELS[3:] else wide(model) for model in MODELS])
def test_each_label_holds_for_the_numbers_below_it(model: str) -> None:
    workload = find_model(model)
    for name, by in product(CLUSTERS, ("time", "memory")):
        cluster = parse_cluster(name)
        tokens = 2048 if workload.is_transformer else 1
        task = Task(workload=workload, cluster=cluster, sequence=tokens, global_batch=16 * cluster.num_devices)
        found = search(task, Plan(precision="bf16"), by=by)  # type: ignore[arg-type]
        if not found.best:
            continue
        first, labelled = found.best[0], tradeoffs(found.best[0], found.frontier)
        for one in labelled.get(LESS_MEMORY, []):
            assert one.memory.total < first.memory.total
            assert one.time.total > first.time.total
            assert why_not(first, one, by) == ""  # type: ignore[arg-type]
        for one in labelled.get(AS_FAST, []):
            assert one.memory.total < first.memory.total
            assert one.time.total <= first.time.total
            assert why_not(first, one, by)  # type: ignore[arg-type]
        for one in labelled.get(LESS_TIME, []):
            assert one.memory.total > first.memory.total
            assert one.time.total < first.time.total
            assert why_not(first, one, by)  # type: ignore[arg-type]


def test_people_see_each_alternative_below_the_label_that_it_deserves(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["llama3-1b", "--cluster", "rtx4090:8", "--seq-len", "1024"]
    _, out, _ = asked(capsys, *words)
    assert LESS_MEMORY in out
    assert LESS_TIME in out
    assert "faster: predictions within 5 % are equal, and the first" in " ".join(out.split())
    chosen = _figures(out.split("plan ", 1)[1])[0]
    for label, is_smaller in ((LESS_MEMORY, True), (LESS_TIME, False)):
        below = _figures(out.split(f"{label}\n")[1])
        assert below
        for gib, seconds in below:
            assert (gib < chosen[0]) == is_smaller
            assert (seconds > chosen[1]) == is_smaller


def _figures(text: str) -> list[tuple[float, float]]:
    """GiB and seconds of each row of the table that the text begins with."""
    rows = re.split(r"\n\s*\n", text)[0].splitlines()[1:]
    return [
        (float(found[1]), float(found[2])) for row in rows if (found := re.search(r"(\d+\.\d+) +(\d+\.\d+) s", row))
    ]


def test_a_model_of_the_smallest_plan_is_not_compared_across_clusters(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = asked(capsys, "llama3-1b", "--cluster", "h100:8x4", "--seq-len", "2048", "--by", "money")
    assert LESS_MEMORY not in out
    assert LESS_TIME not in out


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("batch=32", "--global-batch 32"),
        ("weights=bf16", "--param-dtype bf16"),
        ("compile=1", "unless --eager is given"),
    ],
)
def test_a_fix_names_options_of_plan(capsys: pytest.CaptureFixture[str], word: str, fix: str) -> None:
    code, _, err = asked(capsys, "llama3-1b", "--cluster", "h200:1", "--plan", word)
    assert code == 2
    assert fix in err
    assert "--data." not in err
    assert "--optim." not in err


# ---- as many plans as were asked for --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "cluster"), list(product(("llama3-1b", "llama3-8b"), ("rtx4090:2", "h100:8", "h200:1")))
)
@pytest.mark.parametrize("top", [1, 5, 12])
def test_fewer_plans_than_were_asked_for_have_a_reason(
    capsys: pytest.CaptureFixture[str], model: str, cluster: str, top: int
) -> None:
    code, out, _ = asked(capsys, model, "--cluster", cluster, "--seq-len", "2048", "--top", str(top), "--json")
    told = json.loads(out)
    assert len(told["plans"]) <= top
    if code == 0:
        assert bool(told["why_fewer"]) == (len(told["plans"]) < top)
        assert told["why_fewer"].startswith(f"{len(told['plans'])} plan") or not told["why_fewer"]


def test_the_reason_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["llama3-1b", "--cluster", "h200:1", "--seq-len", "2048"]
    _, out, _ = asked(capsys, *words)
    assert "1 plan instead of 5: no other layout fits" in out
    _, out, _ = asked(capsys, "llama3-1b", "--cluster", "rtx4090:2", "--seq-len", "2048")
    assert re.search(r"\d plans? instead of 5: \d+ other layouts? would fit", out)


# ---- what was assumed -----------------------------------------------------------------------------------------------

PART = ["--hidden", "1024", "--layers", "8", "--heads", "16", "--cluster", "h100:2"]


def test_dimensions_that_were_not_given_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = asked(capsys, *PART)
    assert "assumed: --ffn 4096 (4 x hidden, with a gate), --vocabulary 32000 (default), --kv-heads 16" in out
    _, out, _ = asked(capsys, *PART, "--ffn", "2816", "--kv-heads", "4", "--vocabulary", "50304")
    assert "assumed" not in out
    _, out, _ = asked(capsys, *PART, "--experts", "8", "--top-k", "2", "--json")
    assert set(json.loads(out)["assumed"]) == {"ffn", "vocabulary", "kv_heads", "expert_ffn"}


def test_experts_are_as_wide_as_the_feed_forward_that_is_assumed() -> None:
    given = Workload(name="given", hidden=512, layers=2, heads=8, vocabulary=1000, experts=8, top_k=2, ffn=2048)
    assumed = Workload(name="assumed", hidden=512, layers=2, heads=8, vocabulary=1000, experts=8, top_k=2)
    assert assumed.expert_ffn == 2048
    assert assumed.parameters == given.parameters


def test_what_follows_from_a_dimension_follows_it_when_it_changes() -> None:
    named = find_model("llama3-8b")
    assert named.resized(hidden=2048).head_dim == 64
    assert named.resized(heads=16).head_dim == 256
    assert find_model("gpt3-1.3b").resized(heads=8).kv_heads == 8
    assert find_model("qwen3-32b").resized(hidden=2048).head_dim == 128  # which it says itself


def test_a_model_without_dimensions_is_given_none(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = asked(capsys, "resnet50", "--cluster", "h100:8", "--hidden", "512")
    assert code == 2
    assert "resnet50 is no transformer" in err


# ---- suggestions ----------------------------------------------------------------------------------------------------

NOTHING_FITS = (
    "llama3-8b --cluster rtx4090:1 --seq-len 2048",
    "llama3-8b --cluster rtx4090:2 --seq-len 4096 --tp 2 --zero 0",
    "llama3-8b --cluster rtx4090 --seq-len 8192 --mb 8",
    "llama3-8b --cluster h100:1 --seq-len 4096",
    "llama3-8b --cluster h100:1 --seq-len 4096 --precision fp8",
    "llama3-8b --cluster h100:2 --global-batch 8 --seq-len 32768 --recompute none",
    "llama3-1b --cluster rtx4090:1 --seq-len 2048 --max-memory 18GiB",
    "llama3-70b --cluster h100:8 --seq-len 8192",
    "llama3-70b --cluster h100:8x1 --global-batch 8",
    'llama3-70b --cluster h200:8 --plan "tp=8 zero=0 mb=4 bf16"',
    'llama3-8b --cluster h100:2 --plan "tp=2 mb=8 fp8"',
    "llama3-405b --cluster h100:8x4 --param-dtype bf16 --state-dtype bf16",
    "mixtral-8x7b --cluster a100-40:8 --ep 1",
    "llama3-8b --cluster h200:8 --global-batch 64 --pp 2 --schedule zbv",
    "llama3-8b --cluster h200:8 --global-batch 8 --pp 8 --schedule 1f1b --mb 2",
    "llama3-8b --cluster LAB --seq-len 2048",
)


def files_in(folder: Path, words: str) -> list[str]:
    """The words, with a file in the place of LAB."""
    lab = folder / "lab.yaml"
    lab.write_text(yaml.safe_dump({"like": "rtx4090:2", "between": "ethernet-100"}))
    return shlex.split(words.replace("LAB", str(lab)))


def typed(words: list[str], suggestion: str) -> list[str]:
    """The command with a suggestion followed."""
    how = suggestion.partition(": ")[0]
    without, _, add = how.partition(", and ") if how.startswith("without ") else ("", "", how)
    for flag in without.removeprefix("without ").split():
        place = words.index(flag)
        words = words[:place] + words[place + 2 :]
    for flag in shlex.split(add)[::2]:
        if flag in words:
            place = words.index(flag)
            words = words[:place] + words[place + 2 :]
    return [*words, *shlex.split(add)]


@pytest.mark.parametrize("words", [one if number % 3 == 0 else wide(one) for number, one in enumerate(NOTHING_FITS)])
def test_every_suggestion_can_be_typed_and_does_what_it_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: str
) -> None:
    given = files_in(tmp_path, words)
    code, out, err = asked(capsys, *given, "--json")
    assert code == 1, err
    told = json.loads(out)["suggestions"]
    assert told
    for suggestion in told:
        code, out, err = asked(capsys, *typed(given, suggestion), "--json")
        assert code == 0, (suggestion, err)
        first = json.loads(out)["plans"][0]
        plan, gib = re.fullmatch(r".*?: (.*) takes ([\d.]+) GiB", suggestion).groups()  # type: ignore[union-attr]
        assert Plan.parse(first["plan"]).brief() == plan
        assert first["memory_gib"]["total"] == pytest.approx(float(gib), abs=0.051)
    _, out, _ = asked(capsys, *given)
    assert all(suggestion in " ".join(out.split()) for suggestion in told)


def test_suggestions_are_options_of_this_verb(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = asked(capsys, *NOTHING_FITS[6].split(), "--json")
    assert any(one.startswith("--state-dtype bf16: ") for one in json.loads(out)["suggestions"])
    _, out, _ = asked(capsys, *NOTHING_FITS[0].split(), "--json")
    assert any(one.startswith("--cluster rtx4090:8: ") for one in json.loads(out)["suggestions"])


@pytest.mark.parametrize(
    ("said", "next_ones"),
    [
        ("rtx4090", ["rtx4090:8x2", "rtx4090:8x4"]),
        ("rtx4090:1", ["rtx4090:2", "rtx4090:4", "rtx4090:8", "rtx4090:8x2"]),
        ("rtx4090:1x1", ["rtx4090:1x2", "rtx4090:1x4"]),
        ("h100:3", ["h100:6", "h100:6x2"]),
        ("here:2", ["here:2x2"]),
    ],
)
def test_larger_clusters_have_the_form_that_was_typed(said: str, next_ones: list[str]) -> None:
    names = larger(said)
    assert [next(names) for _ in next_ones] == next_ones


def test_a_file_of_a_cluster_takes_a_size(tmp_path: Path) -> None:
    lab = tmp_path / "lab.yaml"
    lab.write_text(yaml.safe_dump({"like": "rtx4090:2", "between": "ethernet-100"}))
    assert (parse_cluster(str(lab)).per_node, parse_cluster(str(lab)).nodes) == (2, 1)
    bigger = parse_cluster(f"{lab}:4x3")
    assert (bigger.per_node, bigger.nodes, bigger.between.name) == (4, 3, "ethernet-100")
    assert next(larger(str(lab))) == f"{lab}:2x2"


CONTRADICTIONS = (
    "llama3-70b --cluster h100:8x8 --tp 3",
    "llama3-70b --cluster h100:8x8 --tp 8 --pp 16",
    "llama3-8b --cluster h100:8 --global-batch 64 --mb 3",
    "llama3-8b --cluster h100:8 --global-batch 7 --dp-shard 8",
    "resnet50 --cluster h100:8 --global-batch 7",
    "mixtral-8x7b --cluster h100:8 --ep 3",
    "llama3-8b --cluster h100:8 --dp-shard 3",
)


@pytest.mark.parametrize("words", CONTRADICTIONS)
def test_every_fix_of_a_contradiction_can_be_typed(capsys: pytest.CaptureFixture[str], words: str) -> None:
    code, _, err = asked(capsys, *words.split())
    assert code == 2
    what, _, rest = err.strip().partition("\n    fix: ")
    fix, _, hint = rest.partition("\n")
    assert hint.startswith("shoal explain Q0")
    assert fix.startswith(("--", "leave out --"))
    for flag, value in choices_of(fix):
        given = words.split()
        if flag in given:
            place = given.index(flag)
            given = given[:place] + given[place + 2 :]
        _, _, again = asked(capsys, *given, *([flag, value] if value else []))
        assert what not in again, (flag, value)


def choices_of(fix: str) -> list[tuple[str, str]]:
    """`--tp 1, 2 or 4` as three options with a value each; `leave out --tp or --pp` as two without."""
    if fix.startswith("leave out "):
        return [(flag, "") for flag in re.split(r", | or ", fix.removeprefix("leave out "))]
    flag, _, values = fix.partition(" ")
    return [(flag, value) for value in re.split(r", | or ", values)]
