"""Lint a plan: rules with codes, each with the plan's numbers, published evidence and a cheaper alternative.

A rule reports only if breaking it is predicted to cost time or memory on this cluster, and says how much. `rules` has
the rules themselves. Evidence is a published run, so that a finding does not rest on the prediction alone.
`docs/concepts/lints.md` has a section for every code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal.blueprint.plan import Plan
from shoal.errors import ShoalError
from shoal.planner.lint import rules
from shoal.planner.lint.case import Case, Finding, Saving
from shoal.planner.task import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Lint:
    """A rule that a plan breaks."""

    code: str
    title: str
    numbers: str
    """This plan's own; predicted, where they say so, else counted."""
    evidence: str
    """The measured cost of breaking the rule in a published run, with its source."""
    fix: str
    """The words of a plan next to it, or what to do instead."""
    saves: Saving | None = None
    """By that plan. None: the fix is no other plan."""

    def __str__(self) -> str:
        """On one line."""
        fix = f"{self.fix}: {self.saves}" if self.saves else self.fix
        return f"{self.code} {self.title}: {self.numbers} → {fix} [{self.evidence}]"

    def to_mapping(self) -> dict[str, Any]:
        """Return it as JSON values."""
        mapping = {key: getattr(self, key) for key in ("code", "title", "numbers", "evidence", "fix")}
        return {**mapping, "saves": self.saves.to_mapping() if self.saves else None}


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of thumb."""

    code: str
    title: str
    check: Callable[[Case], Finding | None]
    evidence: str
    unless: tuple[str, ...] = ()
    """More specific rules: if one of them reports, this one does not."""


_PLAYBOOK = "3.57B on H100: 10,900 tok/s/GPU at tp=8, 6,160 at tp=16 (measured, Ultra-Scale Playbook)"
_VTRAIN_MICROBATCH = "3.6B, tp=8, 64 A100: mb=64 takes 2.0 and mb=2 1.8 times as long as mb=32 (measured, vTrain)"
_INTERNEVO_BATCH = "7B on 1,024 GPUs: 4, 2, 1 microbatches give 3,625, 2,817, 2,346 tok/s/GPU (measured, InternEvo)"
_INTERNEVO_NODE = "7B on 1,024 GPUs: 3,625 tok/s/GPU sharded inside the node, 2,271 over all (measured, InternEvo)"

RULES = (
    Rule(
        "SH01",
        "tp between nodes",
        rules.tp_between_nodes,
        "3.6B on 64 A100: the best of tp=16 takes 2.1 times as long as the best of tp=8 (measured, vTrain)",
    ),
    Rule("SH02", "sharded over the whole job", rules.sharded_over_all, _INTERNEVO_NODE, unless=("SH03",)),
    Rule(
        "SH03",
        "zero=3 strong-scaled",
        rules.zero3_strong_scaled,
        "175B: 144, 88, 44 TFLOP/s on 384, 768, 1,536 GPUs, as mb falls 4, 2, 1 (measured, Narayanan et al. 2021)",
    ),
    Rule(
        "SH04",
        "misaligned widths",
        rules.misaligned,
        "h=13824 on 384 A100: heads of 144 118.1 s, heads of 108 156.8 s, 33 % more (measured, BigScience)",
    ),
    Rule(
        "SH05",
        "unequal stages",
        rules.unequal_stages,
        "the head weighs a layer or more: BigScience took 2 layers less for balance",
        unless=("SH06",),
    ),
    Rule(
        "SH06",
        "fewer microbatches than stages, or not whole rounds",
        rules.too_few_microbatches,
        "a bubble is (p-1)/m of the work, (p-1)/(v m) interleaved where m is a multiple of p (Narayanan et al. 2021)",
    ),
    Rule(
        "SH07",
        "microbatch at an extreme",
        rules.microbatch_size,
        _VTRAIN_MICROBATCH,
        unless=("SH01", "SH03", "SH06", "SH08", "SH13", "SH14", "SH16", "SH17"),
    ),
    Rule(
        "SH08",
        "zero=3 gathers again for every microbatch",
        rules.regathered,
        "2P of gathers and P of reduce-scatter for each microbatch, by design (counted, PyTorch FSDP2)",
    ),
    Rule(
        "SH09",
        "full recompute with memory free",
        rules.needless_recompute,
        "1T on 512 A100: 94.4 s with full recompute, 71.5 s with selective and sp (measured, Korthikanti et al. 2022)",
    ),
    Rule(
        "SH10",
        "global batch too small for the devices",
        rules.batch_too_small,
        _INTERNEVO_BATCH,
        unless=("SH06", "SH14", "SH16"),
    ),
    Rule(
        "SH11",
        "experts are not equally busy",
        rules.balanced_routing,
        "Qwen3-235B, 16k tokens: 295 TFLOP/s with forced balance, 237 with real routing (measured, MoE-ModelZoo)",
    ),
    Rule(
        "SH12",
        "logits are the peak",
        rules.logits_at_peak,
        "8 s b V / tp bytes: with a vocabulary of 128k and small layers they are the peak (arithmetic)",
    ),
    Rule("SH13", "tp over a slow link", rules.tp_over_slow_link, f"the same messages off NVLink: {_PLAYBOOK}"),
    Rule("SH14", "global batch does not fill the data ranks", rules.batch_not_dealt, _INTERNEVO_BATCH),
    Rule(
        "SH15",
        "groups cross nodes that could stay inside",
        rules.crossing_groups,
        _INTERNEVO_NODE,
        unless=("SH01", "SH02", "SH03"),
    ),
    Rule(
        "SH16",
        "pipeline with few microbatches",
        rules.large_bubble,
        "182B, pp=12 on 384 A100: 8.2 s of bubble in 35.8 s at m=32, in 107.1 s at m=128 (measured, BigScience)",
        unless=("SH06",),
    ),
    Rule(
        "SH17",
        "accumulation although the batch fits",
        rules.needless_accumulation,
        _VTRAIN_MICROBATCH,
        unless=("SH08", "SH14"),
    ),
    Rule(
        "SH18",
        "communication above 20 % of the step",
        rules.communication,
        "175B on 256 GPUs: hiding tp, pp, dp messages gave 2.2, 2.5, 1.5 points of MFU (measured, MegaScale)",
        unless=("SH01", "SH02", "SH03", "SH06", "SH08", "SH13", "SH14", "SH15"),
    ),
    Rule(
        "SH19",
        "offload that is not needed",
        rules.needless_offload,
        "16 bytes of state a parameter over a host link of 25 GB/s, against TB/s of the device (arithmetic)",
    ),
    Rule(
        "SH20",
        "learning rate not scaled with the batch",
        rules.unscaled_learning_rate,
        "ResNet-50: batches of 8,192 as good as of 256, at 32 times the rate, warmed up (measured, Goyal et al. 2017)",
    ),
)
"""In the order of their codes."""


def lint(task: Task, plan: Plan, *, learning_rate: float | None = None, base_batch: int | None = None) -> list[Lint]:
    """Return the rules that a plan breaks. `learning_rate` was chosen for batches of `base_batch`; None: not given."""
    if base_batch is not None and base_batch < 1:
        raise ShoalError(
            f"base_batch={base_batch} is no number of samples", fix="--base-batch 256, for example", code="Q001"
        )
    if learning_rate is not None and not 0 < learning_rate < math.inf:
        raise ShoalError(
            f"learning_rate={learning_rate} is no step to take", fix="--learning-rate 3e-4, for example", code="Q001"
        )
    case = Case(task, task.predict(plan.resolve(task.cluster.num_devices)), learning_rate, base_batch)
    found = {rule.code: (rule, finding) for rule in RULES if (finding := rule.check(case))}
    return [
        Lint(
            code=code,
            title=rule.title,
            numbers=finding.numbers,
            evidence=rule.evidence,
            fix=finding.fix,
            saves=finding.saves,
        )
        for code, (rule, finding) in found.items()
        if not any(other in found for other in rule.unless)
    ]
