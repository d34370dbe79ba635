"""The planner against measured runs: reading tables, reading rows, scores on known cases, and the figures that CI holds
the planner to."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from shoal.blueprint.plan import Plan
from shoal.cli import main
from shoal.errors import ShoalError
from shoal.planner.backtest import score
from shoal.planner.backtest.predict import Prediction, predict
from shoal.planner.backtest.report import backtest, to_mapping
from shoal.planner.backtest.rows import COLUMNS, PAPER_FIGURES, Row, append, read
from shoal.predict.estimate.peak_memory import PeakMemory
from shoal.predict.estimate.step_time import SPREAD, StepTime
from shoal.predict.presets.frameworks import SHOAL
from tests.rejects import rejects

RUN = {
    "source": "pytorch/torchtitan benchmarks",
    "model": "Llama3.1-8B",
    "seq": "8192",
    "gpu": "H200-141GB",
    "n_gpus": "32",
    "tp": "1",
    "pp": "1",
    "dp": "32",
    "zero_stage": "3",
    "micro_batch": "2",
    "global_batch": "64",
    "recompute": "selective",
    "precision": "bf16",
    "tokens_per_s_per_gpu": "8000",
    "mem_gib": "47.96",
}


def row(**cells: str) -> Row:
    return Row({**RUN, **cells}, "runs.csv:2")


# ---- rows -----------------------------------------------------------------------------------------------------------


def write(path: Path, columns: list[str], *rows: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=columns, restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_a_table_without_columns_names_them_all(tmp_path: Path) -> None:
    path = write(tmp_path / "runs.csv", [name for name in COLUMNS if name not in ("seq", "mem_gib")], RUN)
    with rejects("Q027", "mem_gib"):
        read([path])


@pytest.mark.parametrize(("text", "what"), [("", "lacks the columns"), (",".join(COLUMNS) + "\n", "has no rows")])
def test_an_empty_table_says_so(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(text)
    with pytest.raises(ShoalError, match=what):
        read([path])


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    with rejects("Q026", match="cannot be read"):
        read([tmp_path / "none.csv"])
    with rejects("Q026", match="no table to read"):
        read([tmp_path])


def test_a_folder_stands_for_its_tables(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", list(COLUMNS), RUN)
    write(tmp_path / "b.csv", list(COLUMNS), RUN, RUN)
    assert len(read([tmp_path])) == 3


def test_a_run_of_shoal_is_appended_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "shoal.csv"
    cells = {"source": "shoal", "model": "llama3-8b", "seq": 4096, "n_gpus": 8, "global_batch": 64, "iter_time_s": 2.5}
    for _ in range(2):
        append(path, {**cells, "plan": "zero=3 bf16 mb=1", "cluster": "h200:8", "mem_gib": 40.0})
    found = [predict(each) for each in read([path])]
    assert [one.reason for one in found] == ["", ""]
    assert found[0].plan is not None
    assert found[0].plan.zero == 3
    assert found[0].profile is not None
    assert found[0].profile.name == "shoal, eager"
    with rejects("Q027", "'duration'"):
        append(path, {"duration": 1})


# ---- predictions ----------------------------------------------------------------------------------------------------


def test_a_row_becomes_a_plan_on_machines() -> None:
    found = predict(row())
    assert found.reason == ""
    assert found.plan is not None
    assert (found.plan.dp_shard, found.plan.zero, found.plan.recompute) == (32, 3, "selective")
    assert found.measured_s == pytest.approx(64 * 8192 / 8000 / 32)
    assert found.predicted_gib == pytest.approx(47.96, rel=0.08)


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"micro_batch": ""}, "size of a microbatch is not published"),
        ({"seq": ""}, "length of sequences is not published"),
        ({"n_gpus": ""}, "number of devices is not published"),
        ({"gpu": "Abacus"}, "device 'Abacus' is not known"),
        ({"model": "Mystery"}, "layers, hidden, heads not published"),
        ({"model": "Llama3 8B LoRA"}, "LoRA"),
        ({"precision": "NVFP4"}, "fp4"),
        ({"tp": "5"}, "is not the number of devices, 32"),
        ({"micro_batch": "two"}, "micro_batch is 'two', not a number"),
    ],
)
def test_a_row_that_cannot_be_predicted_says_why(cells: dict[str, str], reason: str) -> None:
    found = predict(row(**cells))
    assert reason in found.reason
    assert found.time is None


def test_a_number_of_parameters_tells_of_a_gate() -> None:
    dims = {"model": "GPT-7B", "layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "32", "ffn": "11008"}
    found = predict(row(**dims, vocab="32000", params_b="6.74"))
    assert found.workload is not None
    assert found.workload.gated
    assert found.workload.parameters == pytest.approx(6.74e9, rel=0.01)


def test_a_system_is_known_by_its_source_and_a_stranger_by_its_plan() -> None:
    def name(**cells: str) -> str:
        profile = predict(row(**cells)).profile
        assert profile is not None
        return profile.name

    assert name() == "torchtitan"
    assert name(source="pytorch/torchtitan benchmarks/llama3_h100_202412.md") == "torchtitan-2024"
    assert name(source="nobody knows") == "torchtitan"
    assert name(source="nobody knows", zero_stage="1") == "megatron"
    assert "splits_tokens" in name(source="NVIDIA/Megatron-LM", notes="sequence-parallel=True")


LLAMA = {"model": "Llama-1.34B", "layers": "16", "hidden": "2048", "heads": "32", "ffn": "8192", "vocab": "131072"}
SWEPT = {"source": "nanotron sweep", **LLAMA, "seq": "4096", "gpu": "H100-80GB", "zero_stage": "1", "recompute": ""}


def test_pipelines_of_the_sweep_are_late_where_it_says_so() -> None:
    def seconds(devices: int, *, pp: int, zero: int = 1) -> float:
        cells = {"n_gpus": str(devices), "pp": str(pp), "dp": str(devices // pp), "zero_stage": str(zero)}
        return predict(row(**{**SWEPT, **cells, "micro_batch": "1", "global_batch": "512"})).predicted_s or 0.0

    assert seconds(512, pp=8) > 10 * seconds(128, pp=8) / 4
    assert seconds(32, pp=2, zero=0) > 10 * seconds(32, pp=2)
    assert seconds(512, pp=1, zero=0) > seconds(512, pp=1) + 1
    late = swept(512, pp="8", dp="64").time
    assert late is not None
    assert late.tokens_per_s_per_device == pytest.approx(512 * 4096 / late.total / 512)


def swept(devices: int, **cells: str) -> Prediction:
    common = {"n_gpus": str(devices), "dp": str(devices), "pp": "1", "tp": "1", "micro_batch": "1"}
    return predict(row(**{**SWEPT, **common, "global_batch": "512", **cells}))


def test_ranks_of_the_sweep_divide_tokens_in_pipelines_on_several_nodes_and_in_its_largest_runs() -> None:
    def sp(devices: int, *, tp: int, pp: int) -> bool | None:
        found = swept(devices, tp=str(tp), pp=str(pp), dp=str(devices // tp // pp))
        assert found.plan is not None
        return found.plan.sp

    assert [sp(8, tp=2, pp=2), sp(32, tp=2, pp=2)] == [False, True]
    assert [sp(256, tp=8, pp=1), sp(512, tp=8, pp=1), sp(512, tp=32, pp=1)] == [False, True, False]


def test_the_sweeps_key_heads_are_not_taken_from_what_was_measured() -> None:
    told, silent = swept(32, kv_heads="8"), swept(32, kv_heads="")
    assert told.workload == silent.workload
    assert predict(row(**{**SWEPT, "source": "nobody", "n_gpus": "32", "kv_heads": "8"})).workload != told.workload


MEASURED = ("tflops_per_gpu", "mfu", "tokens_per_s_per_gpu", "iter_time_s", "mem_gib", "status")


def test_no_prediction_looks_at_what_was_measured() -> None:
    rows = [*read([PAPER_FIGURES]), row(), Row({**RUN, **SWEPT, "n_gpus": "512", "tp": "8", "dp": "64"}, "runs.csv:3")]
    for one in rows:
        seen = predict(one)
        blank = predict(Row({**one.cells, **dict.fromkeys(MEASURED, "")}, one.place))
        assert (seen.plan, seen.time, seen.memory, seen.fits) == (blank.plan, blank.time, blank.memory, blank.fits)
        assert seen.time is not None or seen.predicted_gib == blank.predicted_gib


def test_a_stranger_has_to_leave_more_room() -> None:
    cells = {"source": "llm-foundry", "gpu": "A100-80GB", "n_gpus": "4", "dp": "4", "recompute": "none"}
    known, strange = (predict(row(**cells, micro_batch="1"), is_blind=blind) for blind in (False, True))
    assert known.memory is not None
    assert strange.memory is not None
    room = 79.2 * 2**30
    assert strange.memory.total < room < 1.2 * strange.memory.total
    assert (known.fits, strange.fits) == (True, False)


def test_a_stage_with_nothing_to_do_cannot_run() -> None:
    cells = {"n_gpus": "32", "dp": "1", "tp": "2", "micro_batch": "1", "global_batch": "256"}
    assert predict(row(**{**SWEPT, **cells, "pp": "16"})).fits is False
    assert predict(row(**{**SWEPT, **cells, "pp": "8", "dp": "2"})).fits is True


def test_tests_of_megatron_log_their_last_rank_and_regular_ones_keep_scores() -> None:
    dims = {
        "layers": "12",
        "hidden": "512",
        "heads": "8",
        "ffn": "2048",
        "seq": "1024",
        "n_gpus": "",
        "dp": "2",
        "pp": "4",
    }
    words = {
        "source": "NVIDIA/Megatron-LM tests/functional_tests",
        "zero_stage": "0",
        "micro_batch": "4",
        "recompute": "none",
    }
    notes = "deterministic-mode=True; swiglu=False; untied=False; num-experts=None; sequence-parallel=False"
    common = {**dims, **words, "global_batch": "32", "gpu": "", "notes": notes}
    fused, regular = (predict(row(**common, model=model)) for model in ("gpt/gpt3_tp1_pp4_resume", "gpt/gpt3_tp1_pp4"))
    assert fused.memory is not None
    assert regular.memory is not None
    assert fused.memory.stage == 3
    scores = 3 * 4 * 1024 * (5 * 8 * 1024 - 4 * 8)  # layers x tokens x bytes, instead of their sums
    assert regular.memory.activations - fused.memory.activations == pytest.approx(scores)


def test_the_table_of_the_zero_paper_is_exact() -> None:
    rows = [one for one in read([PAPER_FIGURES]) if one.family == "ZeRO"]
    pairs = score.memories(map(predict, rows))
    assert len(pairs) >= 9
    assert all(predicted == pytest.approx(measured, rel=0.005) for predicted, measured in pairs)


def test_without_what_was_learnt_a_system_is_predicted_otherwise() -> None:
    assert predict(row()).predicted_s != predict(row(source="llm-foundry")).predicted_s
    blind = predict(row(source="llm-foundry"), is_blind=True)
    assert blind.profile is not None
    assert "documented" in blind.profile.name


# ---- scores on cases that can be reckoned by hand -------------------------------------------------------------------


def judged(
    predicted: float, measured: float, *, fits: bool = True, failed: bool = False, low: float = 0, high: float = 0
) -> Prediction:
    causes = dict.fromkeys(SPREAD, 0.0) | {"matmul": predicted}
    time = StepTime(**causes, mfu=0, tokens_per_s_per_device=0, low=low, high=high)
    memory = PeakMemory(**{entry.name: 0 for entry in fields(PeakMemory)})
    cells = {**RUN, "status": "oom_or_crash" if failed else "ok"}
    return Prediction(
        row=Row(cells, "x"), time=time, memory=memory, measured_s=None if failed else measured, fits=fits, is_full=True
    )


def test_errors() -> None:
    off = score.errors([(1.1, 1.0), (0.8, 1.0), (1.0, 1.0)])
    assert off is not None
    assert (off.count, off.signed) == (3, 0.0)
    assert [off.mean, off.median] == pytest.approx([0.1, 0.1])
    assert score.errors([]) is None


def test_regret_is_of_the_pick_among_what_fits() -> None:
    runs = [judged(1.0, 3.0, fits=False), judged(2.0, 2.2), judged(3.0, 2.0), judged(4.0, 4.0), judged(5.0, 5.0)]
    (cell,) = score.cells(runs)
    assert cell.regret == pytest.approx(2.2 / 2.0 - 1)
    assert cell.count == 5
    assert score.cells(runs[:4]) == [], "a cell has at least five runs"


def test_of_plans_that_are_as_fast_the_one_on_fewer_axes_is_picked() -> None:
    def on(words: str, predicted: float, measured: float, *, known: bool = True) -> Prediction:
        profile = SHOAL if known else SHOAL.as_documented()
        return replace(judged(predicted, measured), plan=Plan.parse(words).resolve(32), profile=profile)

    def regret(apart: float, *, known: bool = True) -> float:
        runs = [on("tp=2 pp=2", 1.0, 2.0, known=known), on("tp=2", 1.0 + apart, 1.0, known=known)]
        return score.cells([*runs, *[on("pp=4", 9.0, 9.0, known=known)] * 3])[0].regret

    assert [regret(0.04), regret(0.06)] == [0.0, 1.0]
    assert [regret(0.12, known=False), regret(0.13, known=False)] == [0.0, 1.0]


def test_among_random_halves_a_lucky_run_counts_half() -> None:
    lucky = [judged(5.0, 1.0), *[judged(1.0, 2.0)] * 40]
    (found,) = score.halves(lucky).values()
    assert found.mean == pytest.approx(0.5, abs=0.1)
    assert found.high == 1.0
    assert found.close == pytest.approx(1 - found.mean)
    assert score.halves(lucky) == score.halves(lucky)
    assert score.halves(lucky[:9]) == {}, "half of a cell has at least five runs"


def test_rank_correlation() -> None:
    assert score.spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert score.spearman([1, 2, 3, 4], [40, 30, 20, 10]) == pytest.approx(-1)
    assert score.spearman([1, 1, 2], [5, 4, 6]) == pytest.approx(0.75**0.5), "equal values share a rank"


def test_recall_and_precision() -> None:
    runs = [judged(1, 1, fits=False, failed=True)] * 3 + [judged(1, 1, fits=True, failed=True)] + [judged(1, 1)] * 5
    found = score.fits([*runs, judged(1, 1, fits=False)])
    assert found is not None
    assert (found.recall, found.precision) == (0.75, 0.75)
    assert score.fits([judged(1, 1)]) is None, "a source that tells of no failures cannot be judged by them"


def test_coverage() -> None:
    runs = [judged(1, 1, low=0.9, high=1.1), judged(1, 2, low=0.9, high=1.1)]
    assert score.coverage(runs) == (2, 0.5)


def test_a_slower_prediction_keeps_its_shape() -> None:
    found = predict(row())
    twice = found.slower(2.0)
    assert found.time is not None
    assert twice.time is not None
    assert twice.predicted_s == pytest.approx(2 * found.time.total)
    assert twice.time.high == pytest.approx(2 * found.time.high)


# ---- what CI holds the planner to -----------------------------------------------------------------------------------


def test_figures_of_papers_are_predicted_as_well_as_they_were() -> None:
    """A change that makes the planner worse on published figures is refused. What it reached when this was written is a
    little better than each bound."""
    report = backtest(read([PAPER_FIGURES]))
    assert [bar.name for bar in report.bars if not bar.holds] == []
    assert report.dense is not None
    assert report.dense.median < 0.09
    bounds = {"Korthikanti": 0.14, "InternLM/InternEvo": 0.07, "mosaicml/llm-foundry A100": 0.07}
    found = {source.name: source for source in report.sources}
    for name, bound in bounds.items():
        off = found[name].time
        assert off is not None
        assert off.mean < bound, name
    assert report.silent == ()


def test_leaving_a_source_out_predicts_it_from_the_others() -> None:
    rows = read([PAPER_FIGURES])
    seen, blind = backtest(rows), backtest(rows, leave_out=True)
    assert seen.dense is not None
    assert blind.dense is not None
    assert seen.dense.mean < blind.dense.mean < 0.6
    assert blind.is_blind


# ---- the verb -------------------------------------------------------------------------------------------------------


def test_the_verb_prints_tables_and_bars(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backtest", "--strict"]) == 0
    printed = capsys.readouterr().out
    assert "predicted beside measured" in printed
    assert "memory, table of the ZeRO paper" in printed


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backtest", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == set(to_mapping(backtest(read([PAPER_FIGURES]))))
    assert all(bar["holds"] for bar in found["bars"])


def test_a_pick_that_is_not_the_fastest_looks_unlike_it(capsys: pytest.CaptureFixture[str]) -> None:
    """BigScience has measured one plan on two days: 120.18 and 114.11 s."""
    report = backtest(read([PAPER_FIGURES]))
    (cell,) = [cell for cell in report.cells if cell.regret > 0]
    assert cell.is_repeat
    assert cell.pick.endswith("(paper_figures.csv:64)")
    assert cell.best.endswith("(paper_figures.csv:66)")
    assert main(["backtest"]) == 0
    assert "1 is another run of the fastest's plan" in " ".join(capsys.readouterr().out.split())


def test_runs_of_one_plan_that_differ_in_the_model_say_in_what() -> None:
    rows = {row.place: row for row in read([PAPER_FIGURES])}
    one = predict(rows["paper_figures.csv:64"])
    other = predict(replace(one.row, cells={**one.row.cells, "heads": "128"}))
    assert score._brief(one, other).endswith("(heads 64)")
    assert score._brief(other, one).endswith("(heads 128)")


def test_a_missed_bar_fails_only_if_that_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "runs.csv", list(COLUMNS), {**RUN, "mem_gib": "20"})
    assert main(["backtest", str(path)]) == 0
    assert main(["backtest", str(path), "--strict"]) == 1
    assert "missed" in capsys.readouterr().out


def test_bad_input_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backtest", str(tmp_path / "none.csv"), "--json"]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_the_verb_never_imports_torch() -> None:
    code = "import sys; from shoal.cli import main; main(['backtest', '--json']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
