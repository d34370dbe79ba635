"""The planner's table on one GPU, predicted again: every row is still within 1 % of the memory that was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.planner.gpu import GIB, MODELS, SETS, Case, predicted, recorded
from shoal.predict.cluster_parser import parse_cluster
from shoal.predict.estimate.activations import CHUNK

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
MEASURED = recorded(RESULTS / "planner_nvidia-h200_2026-11-15.md")
CASES = SETS["first"]
FITTED = recorded(RESULTS / "planner-fit_nvidia-h200_2026-11-19.md")
TWO_CHUNKS = {
    Case("1.5 B", 32, 1024),
    Case("1.5 B", 8, 4096),
    Case("1.5 B", 8, 4096, states="bf16"),
    Case("1.5 B", 1, 32768),
    Case("1.5 B", 1, 32768, "selective", "bf16"),
}
"""Runs whose fullest moment held two chunks of logits when they were measured. Four hours later the fused loss held
one at a time; `Case("1.5 B", 8, 4096)` was then measured again, at 47.24 GiB (tests/unit/test_peak_memory.py)."""


def test_the_result_has_every_case() -> None:
    assert set(MEASURED) == {str(case) for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_memory_on_paper_is_that_of_the_gpu(case: Case) -> None:
    measured = MEASURED[str(case)].peak
    if case in TWO_CHUNKS:
        logits = 2 * case.mb * case.sequence * MODELS[case.model].vocabulary
        assert logits / 4 <= CHUNK < logits / 2
        measured -= logits / 4
    cluster = parse_cluster("h200:1")
    if hasattr(
        MODELS[case.model], "num_experts"
    ):  # measured before experts were one operator, as they still are on older GPUs
        cluster = replace(cluster, device=replace(cluster.device, is_modern=False))
    assert predicted(case, cluster).memory.allocated == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("case", [case for case in SETS["fit"] if str(case) in FITTED], ids=str)
def test_memory_of_later_runs_too(case: Case) -> None:
    """fp8, experts and LoRA among them."""
    found = predicted(case, parse_cluster("h200:1")).memory.allocated
    assert found == pytest.approx(FITTED[str(case)].peak, rel=0.006)


def test_the_run_that_was_measured_again() -> None:
    found = predicted(Case("1.5 B", 8, 4096), parse_cluster("h200:1")).memory.allocated
    assert found == pytest.approx(47.24 * GIB, rel=1e-3)
