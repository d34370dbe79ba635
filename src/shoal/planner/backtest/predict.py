"""Predict one row of a table of measured runs, or give the reason why it cannot be predicted.

A row gives dimensions, degrees and words. Here they become a workload, a plan, a cluster and a profile: the objects
that `shoal plan` works with. Facts about published systems (which network, which attention) are in the tables below,
with the words by which a source is recognised. Nothing here is fitted to a single row; what was observed on many runs
of one sweep, and is not understood, says so (`nanotron_sweep`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from shoal.blueprint.plan import Plan
from shoal.errors import ShoalError
from shoal.planner.backtest.nanotron_sweep import late, scatters
from shoal.planner.backtest.row_model import sequence_of, workload_of
from shoal.planner.backtest.rows import Row, Unpredictable
from shoal.predict.cluster import GIB, Cluster
from shoal.predict.cluster_parser import parse_cluster
from shoal.predict.estimate.peak_memory import PeakMemory, peak_memory, states
from shoal.predict.estimate.rank_share import Degrees, RankShare, head_cost, layers_of_stages
from shoal.predict.estimate.step_time import StepTime, step_time
from shoal.predict.framework_profile import FrameworkProfile
from shoal.predict.presets import frameworks as known
from shoal.predict.presets.clusters import DEVICES, preset
from shoal.predict.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A row beside what was predicted for it. None: not measured, or not to be predicted."""

    row: Row
    reason: str = ""
    """Why nothing can be predicted; empty if something can."""
    workload: Workload | None = None
    plan: Plan | None = None
    profile: FrameworkProfile | None = None
    time: StepTime | None = None
    memory: PeakMemory | None = None
    measured_s: float | None = None
    measured_gib: float | None = None
    predicted_gib: float | None = None
    """Of the number that the source prints: states only, allocated, reserved or used."""
    fits: bool | None = None
    is_dense: bool = True
    is_full: bool = False
    """Whether the row says everything that time depends on."""
    counts_time: bool = True

    @property
    def predicted_s(self) -> float | None:
        """Seconds of a step."""
        return self.time.total if self.time else None

    def slower(self, factor: float) -> Prediction:
        """The same with all times so many times as long."""
        return replace(self, time=self.time.slower(factor)) if self.time else self


def predict(row: Row, *, is_blind: bool = False) -> Prediction:
    """Predict a run. `is_blind`: without any figure that was measured on its system."""
    try:
        return _predict(row, is_blind)
    except Unpredictable as error:
        return Prediction(row=row, reason=str(error))
    except ShoalError as error:
        return Prediction(row=row, reason=str(error.problems[0].what))


def _predict(row: Row, is_blind: bool) -> Prediction:
    if "ZeRO" in row.text("source") and "ANALYTIC" in row.text("source"):
        return _of_table(row)
    workload = workload_of(row)
    profile = profile_of(row)
    if is_blind:
        profile = profile.as_documented()
    sequence = row.whole("seq") or sequence_of(row)
    plan, global_batch = plan_of(row, workload)
    if is_blind and not row.text("plan"):
        plan = replace(plan, sp=None)  # which is known from its runs alone
    cluster = cluster_of(row)
    seconds = _measured_seconds(row, workload, sequence, global_batch)
    gib = row.number("mem_gib")
    place = (plan.pp or 1) - 1 if _is_ci(row) else None
    memory = peak_memory(
        workload, plan, cluster, sequence=sequence, global_batch=global_batch, profile=profile, stage=place
    )
    held = memory.total * (1.0 if profile.is_known else HEADROOM)
    time = None
    if global_batch:
        time = step_time(workload, plan, cluster, sequence=sequence, global_batch=global_batch, profile=profile)
        if profile is known.NANOTRON:
            time = late(time, workload, plan, cluster, global_batch, memory.total <= cluster.device.memory)
    return Prediction(
        row=row,
        workload=workload,
        plan=plan,
        profile=profile,
        time=time,
        memory=memory,
        measured_s=seconds,
        measured_gib=gib,
        predicted_gib=_as_printed(row, memory),
        fits=held <= cluster.device.memory and not _has_empty_stage(workload, plan, profile),
        is_dense=not workload.experts,
        is_full=_is_full(row),
        counts_time=_counts_time(row),
    )


HEADROOM = 1.2
"""Memory that an unmeasured system may hold, relative to its prediction: 9 of 10 runs of Megatron's CI and of
BigScience hold at most that much more."""


def _has_empty_stage(workload: Workload, plan: Plan, profile: FrameworkProfile) -> bool:
    """Whether a pipeline rank would have nothing to compute, which no system survives."""
    pp = plan.pp or 1
    counts = layers_of_stages(workload.layers, pp * (plan.v or 1), head_cost(workload), profile.cut)
    if profile.cut != "thresholds":
        return 0 in counts
    unused = next((i for i, layers in enumerate(reversed(counts)) if layers), 0)
    return unused > 2  # the head takes one stage, the loss may take another


# ---- the table of the ZeRO paper ------------------------------------------------------------------------------------


def _of_table(row: Row) -> Prediction:
    """Model states alone, of a number of parameters that is all that is known of the model."""
    billions, devices, stage = row.number("params_b"), row.whole("n_gpus"), row.whole("zero_stage")
    if billions is None or devices is None or stage is None:
        raise Unpredictable("params_b, n_gpus or zero_stage is not published")
    profile = replace(known.MEGATRON, name="zero", gradient=2)
    held = RankShare(layers=1, dense=billions * 1e9, experts=0.0, unit=0.0, root=0.0)
    plan = Plan(dp_shard=devices, zero=stage, precision="bf16")
    gib = sum(states(held, Degrees.of(plan, profile), profile)) / GIB
    return Prediction(row=row, profile=profile, measured_gib=row.number("mem_gib"), predicted_gib=gib)


# ---- the system -----------------------------------------------------------------------------------------------------

SYSTEMS: tuple[tuple[str, FrameworkProfile], ...] = (
    ("shoal", known.SHOAL),
    ("vTrain", known.MEGATRON_DEEPSPEED),
    ("bigscience", known.MEGATRON_DEEPSPEED),
    ("nanotron", known.NANOTRON),
    ("llm-foundry", known.LLM_FOUNDRY),
    ("torchtitan", known.TORCHTITAN),
    ("InternEvo", known.INTERNEVO),
    ("Automodel", known.AUTOMODEL),
    ("Megatron-Bridge", known.NEMO),
    ("NeMo", known.NEMO),
    ("Primus", known.PRIMUS),
    ("Megatron-MoE", known.NEMO),
    ("Narayanan", known.MEGATRON_LM),
    ("Korthikanti", known.MEGATRON_LM),
    ("Smith", known.MEGATRON_LM),
    ("MegaScale", known.MEGATRON_LM),
    ("Megatron", known.MEGATRON),
)
"""A word in a source → the system that ran it; the first that is found counts. A stranger is taken for PyTorch's own
where parameters are sharded, else for Megatron."""


def profile_of(row: Row) -> FrameworkProfile:
    """The system that ran a row."""
    source = row.text("source").lower()
    if source == "shoal":
        return known.shoal_profile(compile="compiled" in row.text("notes"))
    if source.startswith("narayanan") and row.whole("zero_stage") == 3:
        return known.DEEPSPEED
    if "torchtitan" in source and re.search(r"202[34]", source):
        return known.TORCHTITAN_2024
    for word, profile in SYSTEMS:
        if word.lower() in source:
            return _as_noted(row, profile)
    return _as_noted(row, known.TORCHTITAN if row.whole("zero_stage") == 3 else known.MEGATRON)


def _as_noted(row: Row, profile: FrameworkProfile) -> FrameworkProfile:
    """What the notes of a row say of it."""
    notes = row.text("notes")
    changes: dict[str, object] = {}
    if "sequence-parallel=True" in notes or "SP+selective" in notes or "seq" in row.text("recompute"):
        changes["splits_tokens"] = True
    if "sequence-parallel=False" in notes or "no SP" in notes or "without sequence parallel" in notes:
        changes["splits_tokens"] = False
    if _is_ci(row):
        changes |= _of_ci(row.text("model"), row.text("gpu"), notes)
    if not changes:
        return profile
    return replace(profile, name=f"{profile.name} {sorted(changes.items())}", **changes)  # type: ignore[arg-type]


def _of_ci(model: str, gpu: str, notes: str) -> dict[str, object]:
    """Switches of Megatron's functional tests that their configurations share: those that do not resume and are
    deterministic say `--attention-backend unfused`, which context parallelism cannot have."""
    changes: dict[str, object] = {}
    is_regular = "resume" not in model and "deterministic-mode=True" in notes and "_cp2" not in model
    is_old = "dracooci" in gpu or "transformer-impl=local" in notes
    if (is_regular or is_old) and "memory_speed" not in model:
        changes["attention"] = "eager"
    if "cross_entropy_loss_fusion" in model:
        changes["logits"] = 10
    return changes


# ---- the plan -------------------------------------------------------------------------------------------------------


def plan_of(row: Row, workload: Workload) -> tuple[Plan, int]:
    """The plan of a row, and its global batch (0: not published)."""
    if words := row.text("plan"):
        return Plan.parse(words).resolve(row.whole("n_gpus") or 1), row.whole("global_batch") or 0
    devices = row.whole("n_gpus") or (8 if _is_ci(row) else 0)
    if not devices:
        raise Unpredictable("the number of devices is not published")
    tp, pp, cp, ep = (row.whole(key) or 1 for key in ("tp", "pp", "cp", "ep"))
    if workload.experts and not row.text("ep"):
        raise Unpredictable("how experts are divided is not published")
    v = row.whole("vpp") or 1
    dp = row.whole("dp") or devices // (tp * pp * cp)
    if tp * pp * cp * dp != devices:
        dp = devices // (tp * pp * cp)
        if dp < 1 or tp * pp * cp * dp != devices:
            raise Unpredictable(f"tp x pp x cp x dp is not the number of devices, {devices}")
    mb, batch = row.whole("micro_batch"), row.whole("global_batch")
    if not mb:
        raise Unpredictable("the size of a microbatch is not published")
    zero = row.whole("zero_stage")
    zero = 0 if zero is None else zero
    if dp * cp == 1:
        zero = 0
    shard = _shard_group(row, dp)
    if ep > 1 and not zero:  # replicas of ranks that share the experts
        zero, shard = 1, max(1, ep // cp)
    if (dp * cp) % ep and _is_ci(row):
        raise Unpredictable(f"ep={ep} takes in tp ranks, which no plan here can")
    while (dp * cp) % ep:
        ep //= 2
    settings: dict[str, object] = {
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "ep": ep,
        "zero": zero,
        "mb": mb,
        "recompute": _recompute(row.text("recompute")),
        "precision": _precision(row.text("precision")),
        "dp_shard": shard if zero else 1,
        "dp_replicate": dp // shard if zero else dp,
    }
    if tp > 1 and "nanotron" in row.text("source"):
        settings["sp"] = scatters(tp, pp, devices)
    if pp > 1:
        settings["v"] = v
        settings["schedule"] = "interleaved" if v > 1 else "1f1b"
    return Plan.of(settings).resolve(devices), batch or 0


def _shard_group(row: Row, dp: int) -> int:
    """Ranks that optimizer states are sharded over; InternEvo says so in its notes."""
    found = re.search(r"zero1=(\d+)", row.text("notes"))
    group = int(found[1]) if found else dp
    return group if 0 < group <= dp and dp % group == 0 else dp


def _recompute(word: str) -> str:
    word = word.lower()
    if word.startswith("full"):
        return "full"
    return "selective" if word.startswith("selective") else "none"


def _precision(word: str) -> str:
    word = word.lower()
    if "nvfp4" in word or "fp4" in word:
        raise Unpredictable("fp4 is no precision of a plan")
    if "fp8" in word:
        return "fp8"
    if "bf16" in word:
        return "bf16"
    return "fp16" if "fp16" in word else "bf16"


# ---- the machines ---------------------------------------------------------------------------------------------------

GPUS = (
    ("h100-96", "h100-96"),
    ("h200", "h200"),
    ("gb300", "gb300"),
    ("b300", "b300"),
    ("gb200", "gb200"),
    ("b200", "b200"),
    ("h100", "h100"),
    ("a100-40", "a100-40"),
    ("a100", "a100-80"),
    ("a800", "a800"),
    ("v100", "v100"),
    ("mi250", "mi250x"),
    ("mi300", "mi300x"),
    ("mi325", "mi325x"),
    ("mi355", "mi355x"),
    ("l40s", "l40s"),
    ("4090", "rtx4090"),
    ("cpu", "cpu"),
)
"""A part of what tables call a device → its preset."""
NETWORKS = (
    ("nanotron", "efa"),
    ("llm-foundry", "roce-200"),
    ("InternEvo", "roce-50"),
    ("bigscience", "omnipath-50"),
    ("vTrain", "infiniband-edr"),
)
"""A word in a source → the network that its documentation names, where it is not what such nodes usually have."""


def cluster_of(row: Row) -> Cluster:
    """The machines of a row."""
    if name := row.text("cluster"):
        return parse_cluster(name)
    word = row.text("gpu").lower()
    names = [name for spelled, name in GPUS if spelled in (word or "a100" * _is_ci(row))]
    if not names:
        raise Unpredictable(f"the device {row.text('gpu')!r} is not known" if word else "the device is not published")
    devices = row.whole("n_gpus") or 1
    per_node = DEVICES[names[0]].per_node
    source = row.text("source").lower()
    between = next((tier for key, tier in NETWORKS if key.lower() in source), None)
    if names[0] == "h100" and between == "roce-200":
        between = "ethernet-400"
    if devices <= per_node:
        return preset(names[0], per_node=devices, nodes=1, between=between)
    return preset(names[0], per_node=per_node, nodes=-(-devices // per_node), between=between)


# ---- what was measured ----------------------------------------------------------------------------------------------


def _measured_seconds(row: Row, workload: Workload, sequence: int, global_batch: int) -> float | None:
    """Seconds of a step as published, or as they follow from tokens per second, or from a rate of FLOPs."""
    seconds = row.number("iter_time_s")
    if seconds:
        return seconds
    devices, rate = row.whole("n_gpus") or 1, row.number("tokens_per_s_per_gpu")
    if rate and global_batch:
        return global_batch * sequence / rate / devices
    tera = row.number("tflops_per_gpu")
    if tera and global_batch and "Narayanan" in row.text("source"):
        h, layers, vocabulary = workload.hidden, workload.layers, workload.vocabulary
        flops = 96.0 * global_batch * sequence * layers * h**2
        flops *= 1 + sequence / (6 * h) + vocabulary / (16 * layers * h)  # their equation 3
        return flops / (tera * 1e12 * devices)
    return None


def _as_printed(row: Row, memory: PeakMemory) -> float:
    """GiB of the number that the source prints."""
    source = row.text("source")
    is_of_process = source == "shoal" and row.text("gpu").lower().startswith("cpu")  # what the system says it holds
    if "bigscience" in source.lower() or is_of_process:
        return memory.total / GIB
    if "torchtitan" in source or "InternEvo" in source or "nanotron" in source:
        return memory.reserved / GIB
    return memory.allocated / GIB


FULL = ("layers", "hidden", "heads", "seq", "n_gpus", "tp", "pp", "micro_batch", "global_batch")


def _is_full(row: Row) -> bool:
    return all(row.text(name) for name in FULL)


def _is_ci(row: Row) -> bool:
    """Whether it is one of Megatron's functional tests: one node, memory logged by the last rank."""
    return "tests/functional_tests" in row.text("source")


def _counts_time(row: Row) -> bool:
    """Whether the speed of a row is one: CI runs that are made deterministic are not."""
    return not _is_ci(row)
