"""Strong and weak scaling over 1 to N ranks of this machine, or of several hosts, for several plans.

    strong   the same global batch on every number of ranks: what a step computes is the same
    weak     the same number of samples for each rank: the batch grows with the ranks
    base     one rank of the same program, with the same threads and the same microbatch

Efficiency is the time of the base over the time of a row, divided by the ranks in strong mode. It is taken round by
round, since both were measured side by side. All figures of a row are of one round, that of its median efficiency.
Predictions take computation as it was measured on ranks that send nothing (`anchor`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from torch import nn

from shoal.bench.training import data_parallel
from shoal.bench.training.anchor import Anchors, alone
from shoal.bench.training.cases import Ranks, checked_case, checked_job, microbatch_of, with_plan
from shoal.bench.training.machine import CalibrationTurns
from shoal.bench.training.predicted import Predicted, predict_case, typical
from shoal.bench.training.turns import WARMUP_STEPS, Case, Measure, Spread, differences, measure_in_turns
from shoal.config.recipe import Recipe
from shoal.errors import ShoalError, raise_if
from shoal.predict.cluster import Cluster
from shoal.train.build_model import build_model, without_memory
from shoal.train.recipe.preflight import Job

Mode = Literal["strong", "weak"]
Predictions = Mapping[str, Sequence[Predicted | None]]
"""Name of a case → its prediction in each round."""
BASE = "ddp"
"""The plan of the base, which is alone: nothing is divided and nothing is sent."""
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-3, "bf16": 5e-2, "fp16": 5e-2, "fp8": 2e-1}
"""The largest relative difference of a loss or of the norm of a gradient between plans that rounding explains, which
grows from step to step. An assumption. Losses alone do not show a gradient that is wrong by a factor: Adam divides it
out."""

TIMES = ("seconds", "low", "high", "messages", "waiting")
"""Keys of a prediction that are times."""


@dataclass(frozen=True, kw_only=True)
class ScaleRequest:
    """Ranks, plans and modes to measure, and for how long."""

    ranks: Ranks
    plans: tuple[str, ...]
    modes: tuple[Mode, ...]
    steps: int
    rounds: int
    is_anchored: bool = True
    """Whether predictions are of this machine, so that what was measured on it holds for them."""
    on_hosts: Measure | None = None
    """Measures the ranks that are spread over hosts."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One plan on a number of ranks, in one mode."""

    mode: Mode
    plan: str
    ranks: int
    batch: int
    case: Case
    base: Row | None = None
    """None: this is the base."""
    note: str = ""
    """Why its time says nothing about scaling; empty: it does."""


@dataclass(frozen=True, kw_only=True)
class ScaleTable:
    """The rows of a benchmark, measured or with their reasons."""

    recipe: Recipe
    request: ScaleRequest
    rows: list[Row]
    cases: list[Case] = field(default_factory=list)
    """Each once: at the largest number of ranks, both modes have the same batch."""
    anchors: Anchors = field(default_factory=Anchors)
    """Of every number of ranks that does not share cores."""
    has_dropout: bool = False
    """Then losses under tp, cp and pp are not compared with others: their masks differ."""


def table_of(recipe: Recipe, request: ScaleRequest) -> ScaleTable:
    """All rows, checked before anything is started. Problems of the base are raised."""
    known: dict[tuple[str, int, int], Case] = {}
    rows: list[Row] = []
    for mode in request.modes:
        base: Row | None = None
        for plan, ranks in _pairs(request):
            batch = _batch(recipe, request.ranks, mode, ranks)
            if (plan, ranks, batch) not in known:
                known[plan, ranks, batch] = _case(recipe, request, plan, ranks, batch)
            case = known[plan, ranks, batch]
            note = request.ranks.shared(ranks)
            rows.append(Row(mode=mode, plan=plan, ranks=ranks, batch=batch, case=case, base=base, note=note))
            base = base or rows[-1]
    rows += _data_parallel(request, rows)
    known |= {(row.plan, row.ranks, row.batch): row.case for row in rows if row.plan == data_parallel.NAME}
    anchors = _anchors(recipe, request, rows) if request.is_anchored else Anchors()
    measured = list(known.values())
    half = len(measured) // 2  # a machine's speed drifts: what all rows are predicted from is measured in their middle
    cases = {case.name: case for case in (*measured[:half], *anchors.cases.values(), *measured[half:])}
    return ScaleTable(
        recipe=recipe, request=request, rows=rows, cases=list(cases.values()), anchors=anchors,
        has_dropout=has_dropout(recipe),
    )  # fmt: skip


def _anchors(recipe: Recipe, request: ScaleRequest, rows: Sequence[Row]) -> Anchors:
    """Of each number of ranks that do not share cores, as many that send nothing."""
    is_spread = request.ranks.is_spread
    batches = {row.ranks: row.batch for row in rows if not row.note and row.plan != data_parallel.NAME}
    batches = {number: batch for number, batch in batches.items() if not is_spread(number)}
    more = {number: alone(recipe, request.ranks, number, batch) for number, batch in batches.items() if number > 1}
    return Anchors(more, rows[0].case)


def _data_parallel(request: ScaleRequest, rows: Sequence[Row]) -> Iterator[Row]:
    """The row of `nn.DataParallel` on the largest number of ranks, against the first base; measured with GPUs alone."""
    base, ranks = rows[0], request.ranks.most_here
    job = base.case.job
    assert job is not None
    if ranks > 1 and base.mode == "strong":
        num_gpus = ranks if request.ranks.device == "cuda" else 0
        reason = data_parallel.why_not(num_gpus, job)
        measure = partial(data_parallel.measure, num_gpus=num_gpus)
        case = Case(f"{data_parallel.NAME} on {ranks}, batch {base.batch}", job, reason, measure)
        yield Row(mode="strong", plan=data_parallel.NAME, ranks=ranks, batch=base.batch, case=case, base=base)


def measure_scale(table: ScaleTable, say: Callable[[str, int, int], None], machine: CalibrationTurns) -> None:
    """Measure all rows in turns, and the machine beside them. A base that fails is raised: nothing could be compared
    with it."""

    def calibrate() -> None:
        if machine.is_needed:
            say("the machine itself", len(machine.clusters) * len(table.cases), machine.rounds * len(table.cases))
            machine.take()

    steps, rounds = table.request.steps, table.request.rounds
    measure_in_turns(table.cases, steps=steps, rounds=rounds, say=say, before_round=calibrate)
    for row in table.rows:
        if row.base is None and row.case.reason:
            what = f"one rank, the base of every efficiency, cannot be measured: {row.case.reason}"
            raise ShoalError(what, fix="--data.global_batch 4, or a smaller --model.preset", code="N112")


def _pairs(request: ScaleRequest) -> Iterator[tuple[str, int]]:
    yield BASE, 1
    for plan in request.plans:
        yield from ((plan, ranks) for ranks in request.ranks.nproc if ranks > 1)


def _batch(recipe: Recipe, ranks: Ranks, mode: Mode, number: int) -> int:
    if mode == "strong":
        return recipe.data.global_batch
    most, mb = max(ranks.nproc), microbatch_of(recipe, max(ranks.nproc))
    share = max(mb, recipe.data.global_batch // most // mb * mb)
    return share * number


def _case(recipe: Recipe, request: ScaleRequest, plan: str, ranks: int, batch: int) -> Case:
    mb = microbatch_of(recipe, max(request.ranks.nproc))
    changed = with_plan(recipe, plan, ranks=ranks, batch=batch, mb=mb, threads=request.ranks.threads)
    name = f"{plan} on {ranks} rank{'s' * (ranks != 1)}, batch {batch}"
    if ranks > 1:
        case = checked_case(name, changed, ranks, request.ranks.here(ranks))
        if request.on_hosts is not None and request.ranks.is_spread(ranks):
            case.measure = request.on_hosts
        return case
    problems, job = checked_job(changed, ranks)
    raise_if(problems)
    return Case(name, job)


# ---- the result -----------------------------------------------------------------------------------------------------


def to_mapping(table: ScaleTable, clusters: Sequence[Cluster]) -> dict[str, Any]:
    """Rows, losses and errors of the prediction, as JSON; times in seconds, memory in bytes. `clusters`: the machine as
    it was in each round."""
    predictions = {case.name: _predicted(case.job, table.request, clusters) for case in table.cases if case.job}
    anchored = {case.name: table.anchors.anchored(case, predictions) for case in table.cases}
    rows = [row_mapping(row, anchored, is_anchored=table.anchors.base is not None) for row in table.rows]
    return {
        "rows": rows,
        "alone": table.anchors.to_mapping(),
        "losses": losses_of(table),
        "prediction": _errors(rows),
        "steps": table.request.steps,
        "rounds": table.request.rounds,
        "warmup_steps": WARMUP_STEPS,
        "threads": table.request.ranks.threads,
        "cores": table.request.ranks.cores,
        "device": table.request.ranks.device,
        "hosts": list(table.request.ranks.hosts),
    }


def _predicted(job: Job, request: ScaleRequest, clusters: Sequence[Cluster]) -> list[Predicted | None]:
    """The predictions of a case, one for each round. Between hosts they need a cluster that is named: this machine,
    which is measured otherwise, has no link to another one."""
    is_spread = request.ranks.is_spread(job.recipe.plan.layout.world_size)
    if is_spread and request.is_anchored:
        return []
    num_hosts = len(request.ranks.hosts) if is_spread else 1
    return [predict_case(job.recipe, cluster, num_hosts) for cluster in clusters]


def row_mapping(row: Row, predictions: Predictions, *, is_anchored: bool = False) -> dict[str, Any]:
    """One row as JSON. `is_anchored`: the base is what predictions begin with, so that it has none of its own."""
    case = row.case
    known: dict[str, Any] = {
        "mode": row.mode, "plan": row.plan, "ranks": row.ranks, "global_batch": row.batch,
        "is_base": row.base is None, "reason": case.reason or None, "note": row.note or None,
    }  # fmt: skip
    if case.job is None:
        return known
    rounds = predictions.get(case.name, ())
    plan, predicted = case.job.recipe.plan, _of_round(row, predictions) if case.is_measured else typical(rounds)
    if row.plan != data_parallel.NAME:
        known |= {
            "microbatch": plan.microbatch_size(row.batch),
            "num_microbatches": plan.num_microbatches(row.batch),
            "predicted": None if predicted is None else predicted.to_mapping(),
        }
    if not case.is_measured:
        return known
    found = known | _measured(row, predictions)
    if is_anchored and row.base is None and predicted is not None:
        found |= {"step_error": None, "predicted": {**found["predicted"], **dict.fromkeys(TIMES)}}
    return found


def _measured(row: Row, predictions: Predictions) -> dict[str, Any]:
    case, number = row.case, typical_round(row)
    predicted = _of_round(row, predictions)
    assert case.job is not None
    seconds, tokens = replace(case.seconds, median=case.turns[number].median), case.job.training.tokens_per_sample or 1
    found = {
        "round": number,
        "step_seconds": seconds.to_mapping(),
        "per_second": row.batch * tokens / seconds.median,
        "peak_bytes": case.peak,
        "wait_fraction": max(turn.wait_fraction for turn in case.turns),
        "loss": case.turns[-1].losses[-1],
        **_efficiency(row, predictions),
    }
    if predicted is None:
        return found
    return found | {
        "step_error": predicted.seconds / seconds.median - 1,
        "peak_error": predicted.peak / case.peak - 1,
    }


def _efficiency(row: Row, predictions: Predictions) -> dict[str, Any]:
    """Efficiency and its prediction; nothing for the base, and where ranks share cores."""
    each, number = _efficiencies(row), typical_round(row)
    if not each or row.base is None:
        return {}
    found = Spread(each[number], min(each), max(each))
    known: dict[str, Any] = {"efficiency": found.to_mapping(), "speedup": found.median * row.ranks}
    own, base = _of_round(row, predictions), _of_round(row.base, predictions, number)
    if own is not None and base is not None:
        expected = base.seconds / (own.seconds * (row.ranks if row.mode == "strong" else 1))
        known |= {"predicted_efficiency": expected, "efficiency_error": expected / found.median - 1}
    return known


def _efficiencies(row: Row) -> list[float]:
    """The efficiency in each round; empty for the base, and where ranks share cores."""
    if row.base is None or row.note or not row.base.case.is_measured:
        return []
    of = row.ranks if row.mode == "strong" else 1
    pairs = zip(row.case.turns, row.base.case.turns, strict=False)
    return [base.median / (turn.median * of) for turn, base in pairs]


def typical_round(row: Row) -> int:
    """The round that all figures of a row are of: that of its median efficiency, else of its median step; of an even
    number of rounds the slower one of the two in the middle. A step, its prediction and its error from different rounds
    would be of different speeds of the machine."""
    of_speed = _efficiencies(row) or [-turn.median for turn in row.case.turns]
    return sorted(range(len(of_speed)), key=of_speed.__getitem__)[(len(of_speed) - 1) // 2]


def _of_round(row: Row, predictions: Predictions, number: int | None = None) -> Predicted | None:
    """The prediction of a row for the machine as it was in a round; in its own, if none is given. The planner knows no
    `nn.DataParallel`: its job is that of one rank."""
    rounds = () if row.plan == data_parallel.NAME else predictions.get(row.case.name, ())
    number = typical_round(row) if number is None else number
    return rounds[number] if number < len(rounds) else None


def losses_of(table: ScaleTable) -> list[dict[str, Any]]:
    """For each global batch: whether all plans have the same losses and gradients, which they must up to rounding."""
    found = []
    tolerance = TOLERANCE[table.recipe.plan.precision]
    rows = [row for row in table.rows if row.case.is_measured and _is_comparable(row, table)]
    for batch in dict.fromkeys(row.batch for row in rows):
        measured = {row.case.name: row.case for row in rows if row.batch == batch}
        if len(measured) < 2:
            continue
        base, *_ = measured.values()
        turns, of_base = {name: case.turns[-1] for name, case in measured.items()}, base.turns[-1]
        losses = differences({name: turn.losses for name, turn in turns.items()}, of_base.losses)
        norms = differences({name: turn.norms for name, turn in turns.items()}, of_base.norms)
        largest, of_norm = max(losses.values()), max(norms.values())
        found.append(
            {
                "global_batch": batch,
                "compared_with": base.name,
                "steps": len(of_base.losses),
                "loss": of_base.losses[-1],
                "differences": {name: value for name, value in losses.items() if name != base.name},
                "norm_differences": {name: value for name, value in norms.items() if name != base.name},
                "largest": largest,
                "largest_of_norm": of_norm,
                "tolerance": tolerance,
                "are_equal": max(largest, of_norm) <= tolerance,
            }
        )
    return found


def _is_comparable(row: Row, table: ScaleTable) -> bool:
    """Whether a plan must have the losses of the base. Compression, local SGD and another precision compute something
    else, and so does dropout where ranks share samples."""
    assert row.case.job is not None
    plan = row.case.job.recipe.plan
    if plan.compress is not None or plan.sync is not None or plan.precision != table.recipe.plan.precision:
        return False
    return not table.has_dropout or plan.layout.tp * plan.layout.cp * plan.layout.pp == 1


def has_dropout(recipe: Recipe) -> bool:
    """Whether the model drops some activations at random."""
    model = without_memory(lambda: build_model(recipe.model))
    return model is not None and any(isinstance(each, nn.Dropout) and each.p > 0 for each in model.modules())


def _errors(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How far predictions are off, over the rows that say something."""
    keys = ("step_error", "efficiency_error", "peak_error")
    known = {key: [abs(row[key]) for row in rows if row.get(key) is not None and not row["note"]] for key in keys}
    return {
        key: {"median": Spread.of(found).median, "worst": max(found), "rows": len(found)} if found else None
        for key, found in known.items()
    }
