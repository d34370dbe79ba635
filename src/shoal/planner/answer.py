"""The planner's answer: the best plans, their alternatives, and the command that trains by the first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from shoal.blueprint.plan import Plan
from shoal.config.parse_units import count_of
from shoal.errors import Problem, ShoalError, nearest, raise_if
from shoal.planner.changes.alternatives import Rejected, alternatives
from shoal.planner.commands import commands, remark
from shoal.planner.explain import Laws, Move, RuleOfThumb, Scale, laws, moves, rules_of_thumb, scaling
from shoal.planner.faults import Faults, predict_faults, read_times
from shoal.planner.flag_suggestions import Suggestion, suggestions
from shoal.planner.lint.lint import Lint, lint
from shoal.planner.request import PlanRequest
from shoal.planner.search import By, Candidate, SearchResult, search, tradeoffs, why_not
from shoal.planner.suggestions import AS_OPTIONS, reject_contradictions
from shoal.planner.task import Task
from shoal.predict.cluster import GIB
from shoal.predict.predict import Prediction
from shoal.predict.workload import Workload

MEMORY = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "gathered",
    "buffers",
    "logits",
    "allocator",
    "context",
)
SHOWN_FRONTIER = 6
"""Plans of the frontier that a table shows."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan that fits, with its prediction and its cluster."""

    task: Task
    prediction: Prediction

    @property
    def devices(self) -> int:
        """Devices that the plan uses."""
        return self.task.cluster.num_devices

    def device_hours(self, tokens: float) -> float:
        """Device-hours of training on that many tokens."""
        per_step = self.task.global_batch * self.task.sequence
        return tokens / per_step * self.prediction.time.total * self.devices / 3600

    def cost(self, tokens: float) -> float | None:
        """Money for training on that many tokens. None: the price of a device is unknown."""
        price = self.task.cluster.price
        return None if price is None else self.device_hours(tokens) * price

    def to_mapping(self) -> dict[str, Any]:
        """Return it as JSON values."""
        memory, time = self.prediction.memory, self.prediction.time
        saved = self.task.saved(self.prediction.plan)
        seconds = {name: round(value, 6) for name, value in time.causes().items()}
        return {
            "plan": str(self.prediction.plan),
            "devices": self.devices,
            "memory_gib": {
                **{name: round(getattr(memory, name) / GIB, 4) for name in MEMORY},
                "allocated": round(memory.allocated / GIB, 4),
                "reserved": round(memory.reserved / GIB, 4),
                "total": round(memory.total / GIB, 4),
            },
            "checkpoint_gib": {
                "total": round(saved.total / GIB, 4),
                "host_memory_per_rank": round(saved.copied / GIB, 4),
            },
            "step_s": {
                **seconds,
                "total": round(time.total, 6),
                "low": round(time.low, 6),
                "high": round(time.high, 6),
            },
            "mfu": round(time.mfu, 5),
            "tokens_per_s_per_device": round(time.tokens_per_s_per_device, 2),
            "cost_of_billion_tokens": self.cost(1e9),
        }


@dataclass
class Answer:
    """The result of a search, and everything derived from it."""

    task: Task
    search: SearchResult
    best: list[Choice]
    by: By = "time"
    top: int = 5
    """The number of plans requested."""
    assumed: dict[str, str] = field(default_factory=dict)
    """Dimension of the model that was not given → the assumed value, and why."""
    rejected: list[Rejected] = field(default_factory=list)
    lints: list[Lint] = field(default_factory=list)
    suggestions: list[Suggestion] = field(default_factory=list)
    rejection_reasons: list[str] = field(default_factory=list)
    """Why requested plans that fit cannot be run."""
    explanation: list[Move] = field(default_factory=list)
    laws: Laws | None = None
    scaling: list[Scale] = field(default_factory=list)
    rules_of_thumb: list[RuleOfThumb] = field(default_factory=list)
    tokens: float | None = None
    faults: Faults | None = None
    """The part of its time that a run of the first plan trains."""
    commands: dict[str, str] = field(default_factory=dict)
    """Launcher → the command that trains by the first plan, with the settings of its prediction."""
    remark: str = ""
    """The names in the commands that a reader fills in."""


def plan(model: str | None = None, **request: Any) -> Answer:
    """Rank the plans that fit a model on a cluster: the answer of `shoal plan`, as a value. No GPU is needed.

    model    a preset, a Hugging Face `config.json` or `file.py:function`; None: by dimensions (`hidden=`, `layers=`)
    request  the options of `shoal plan` by name, with `_` for `-`; `shoal plan --help` lists them

    Every number is predicted. `answer.best` are the plans, best first; `choice.to_mapping()` of each is
    the JSON.

    >>> answer = plan("llama3-8b", cluster="h200:8", seq_len=8192, global_batch=64)
    >>> first = answer.best[0].prediction
    >>> print(first.plan.brief())
    dp_shard=8 zero=2 mb=2 bf16
    """
    given: object = model  # what a script passes, whatever the annotation says
    if not isinstance(given, str | None):
        what = f"plan() takes the name of a model, got a {type(given).__name__}"
        raise ShoalError(what, fix="plan('file.py:function'), a function that returns the module", code="Q029")
    known = [entry.name for entry in fields(PlanRequest)]
    raise_if(
        Problem("Q025", f"plan() has no argument {name!r}", nearest(name, known) or f"one of {', '.join(known)}")
        for name in request
        if name not in known
    )
    return answer(PlanRequest(model=model, **request))


def answer(request: PlanRequest, seen: list[Candidate] | None = None) -> Answer:
    """Search for plans, and explain the first. `seen` receives every plan that fits."""
    read_times(request)
    task, required = request.task(), request.required()
    reject_contradictions(task, Plan.of(required), AS_OPTIONS)
    found = search(task, required, keep=request.top, by=request.by, seen=seen)
    choices = [Choice(task, prediction) for prediction in found.best]
    if request.by == "money":
        choices = _cheapest(task, required, request.top)
    result = Answer(task, found, choices, request.by, request.top, assumed(request, task.workload))
    if request.tokens is not None:
        result.tokens = count_of(request.tokens)
    if not choices:
        result.rejection_reasons = list(found.rejection_reasons) if request.limits() else []
        result.suggestions = suggestions(request, task, dict(required), is_rejected=bool(result.rejection_reasons))
        return result
    first = choices[0]
    result.commands = commands(first.task, first.prediction.plan, request)
    result.remark = remark(first.task, request)
    result.rejected = alternatives(first.task, first.prediction)
    result.lints = lint(
        first.task, first.prediction.plan, learning_rate=request.learning_rate, base_batch=request.base_batch
    )
    result.rules_of_thumb = rules_of_thumb(first.task, first.prediction, required) if request.by == "time" else []
    if request.mtbf is not None:
        result.faults = predict_faults(request, first.task, first.prediction.plan)
    if request.explain:
        result.explanation = moves(first.task, first.prediction.plan)
        result.laws = laws(first.task, first.prediction)
        result.scaling = scaling(first.task, first.prediction.plan)
    return result


def _cheapest(task: Task, required: Mapping[str, Any], keep: int) -> list[Choice]:
    """Return the best plans of the whole cluster, of half of it, of a quarter, ..., by device-seconds per step."""
    choices: list[Choice] = []
    devices = task.cluster.num_devices
    while devices >= 1:
        fewer = replace(task, cluster=task.cluster.resized(devices))
        choices += [Choice(fewer, prediction) for prediction in search(fewer, required, keep=2).best]
        if devices % 2 or (devices > task.cluster.per_node and (devices // 2) % task.cluster.per_node):
            break
        devices //= 2
    return sorted(choices, key=lambda choice: choice.devices * choice.prediction.time.total)[:keep]


def to_mapping(result: Answer) -> dict[str, Any]:
    """Return the answer as JSON values. Every number is predicted."""
    task = result.task
    mapping: dict[str, Any] = {
        "model": task.workload.name,
        "parameters": task.workload.parameters,
        "trained_parameters": task.workload.trained_parameters,
        "cluster": str(task.cluster),
        "is_measured_cluster": task.cluster.is_measured,
        "seq_len": task.sequence,
        "global_batch": task.global_batch,
        "assumed": result.assumed,
        "memory_limit_gib": round(task.memory_limit / GIB, 3),
        "plans_predicted": result.search.num_predicted,
        "num_too_large": result.search.num_too_large,
        "plans": [choice.to_mapping() for choice in result.best],
        "why_fewer": why_fewer(result),
        "command": next(iter(result.commands.values()), None),
        "commands": result.commands,
        "frontier": [Choice(task, prediction).to_mapping() for prediction in result.search.frontier],
        "rejected": [one.to_mapping() for one in result.rejected],
        "lint": [one.to_mapping() for one in result.lints],
        "rules_of_thumb": [{"rule": one.rule, "agrees": one.agrees, "why": one.why} for one in result.rules_of_thumb],
    }
    if not result.best:
        mapping["suggestions"] = [str(suggestion) for suggestion in result.suggestions]
        mapping["rejection_reasons"] = result.rejection_reasons
        mapping["smallest"] = (
            None if result.search.smallest is None else Choice(task, result.search.smallest).to_mapping()
        )
    if result.explanation:
        mapping["explain"] = [move.to_mapping() for move in result.explanation]
    if result.laws is not None:
        law = result.laws
        limit = None if law.limit == float("inf") else law.limit
        mapping["laws"] = {
            "serial_part": law.serial_part, "amdahl_limit": limit, "message_bytes": law.message,
            "latency_s": law.latency, "transfer_s": law.transfer,
        }  # fmt: skip
        mapping["scaling"] = [
            {"devices": one.devices, "step_s": one.seconds, "efficiency": one.efficiency} for one in result.scaling
        ]
    if result.faults is not None:
        mapping["faults"] = result.faults.to_mapping()
    if result.tokens is not None and result.best:
        mapping["run"] = costs_of_run(result)
    return mapping


def costs_of_run(result: Answer) -> dict[str, Any]:
    """Return days, device-hours and cost of training on all tokens; with those that faults cost, if they are known."""
    assert result.tokens is not None
    first = result.best[0]
    useful = 1.0 if result.faults is None else result.faults.goodput.ettr
    hours = first.device_hours(result.tokens) / useful
    cost = first.cost(result.tokens)
    return {
        "tokens": result.tokens,
        "days": hours / first.devices / 24,
        "device_hours": hours,
        "cost": None if cost is None else cost / useful,
    }


# ---- for tables -----------------------------------------------------------------------------------------------------


def tradeoffs_of(result: Answer) -> dict[str, list[Prediction]]:
    """Group other plans by tradeoff. Plans of the whole cluster are not compared with a plan of a part of it."""
    first = result.best[0]
    if first.devices != result.task.cluster.num_devices:
        return {}
    found = tradeoffs(first.prediction, result.search.frontier)
    return {label: plans[:SHOWN_FRONTIER] for label, plans in found.items()}


def tradeoff_rows(result: Answer, plans: list[Prediction]) -> tuple[list[str], list[tuple[Prediction, list[str]]]]:
    """The columns of one group, and each plan with the last cells of its row: why a plan that is no slower than the
    chosen one was not chosen. A group of slower plans has no such column."""
    best = result.best[0].prediction
    reasons = [why_not(best, one, result.by) for one in plans]
    column = ["why it was not chosen"] if any(reasons) else []
    return ["plan", "GiB", "step", *column], [
        (one, [reason] if column else []) for one, reason in zip(plans, reasons, strict=True)
    ]


def why_fewer(result: Answer) -> str:
    """Say why there are fewer plans than requested; empty if there are not."""
    count = len(result.best)
    if not count or count >= result.top:
        return ""
    shown = f"{count} plan{'s' * (count > 1)} instead of {result.top}"
    if result.by == "money":
        return f"{shown}: of each number of devices, the two best that fit"
    if left_out := result.search.num_left_out:
        others = f"{left_out} other layout{'s' * (left_out > 1)}"
        return f"{shown}: {others} would fit, and one of these matches each in time, memory and simplicity within 5 %"
    return f"{shown}: no other layout fits"


def assumed(request: PlanRequest, workload: Workload) -> dict[str, str]:
    """Return the assumed dimensions of a model that is given by its dimensions."""
    if request.model is not None:
        return {}
    reasons = {
        "ffn": "4 x hidden, with a gate",
        "vocabulary": "default",
        "kv_heads": "as many as heads",
        "expert_ffn": "as wide as ffn",
    }
    names = [name for name in reasons if getattr(request, name) is None and (name != "expert_ffn" or workload.experts)]
    return {name: f"{getattr(workload, name)} ({reasons[name]})" for name in names}
