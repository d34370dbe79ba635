"""Rules of thumb, each a function of a plan: is it broken, what does that cost, which plan is cheaper.

A rule first checks the plan (tp spans two nodes) and then predicts the plans next to it (`lint.case`). So it reports
numbers of this plan, never those of its evidence. It names a fix only if that fits and is predicted to be better.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from shoal.blueprint.layout import divisors
from shoal.blueprint.plan import Plan
from shoal.blueprint.schedules.schedule_orders import check_schedule
from shoal.blueprint.schedules.table import V_SHAPED
from shoal.errors import listed
from shoal.planner.lint.case import (
    WORTH,
    Case,
    Finding,
    any_microbatch,
    gib,
    hybrids,
    is_starved,
    percent,
    roomier,
    schedules,
    smaller_microbatches,
    trades,
    words,
)
from shoal.planner.task import Task
from shoal.predict.estimate.rank_share import head_cost, layers_of_ranks
from shoal.predict.workload import Workload

# Thresholds are assumptions: they decide what is reported, never what is predicted. docs/concepts/lints.md has the
# measured runs behind each rule.
NOTABLE = 0.05
"""Of a step: what another size (of microbatch, batch or model) must save to be reported."""
MUCH = 0.1
"""Of a step, which a pipeline waits, sharded parameters travel, or everything takes that a larger batch would not
repeat."""
TOO_MUCH = 0.2
"""Of a step, for all communication together."""
FREE = 0.3
"""Of a device's memory: with so much of it free, nothing has to be computed twice."""
LARGE_LOGITS = 0.2
"""Of what a rank holds."""
HOT = 0.25
"""Of the time and the activations of experts, by which the busiest rank has more. Whole steps of Qwen3-235B, which is
mostly experts, take 9 % (128k tokens) to 24 % (16k) longer with real routing than with forced balance."""
SMALLER = 0.05
"""Of what a rank holds, that has to be saved for a fix to be one."""
SLOW_LINK = 64e9
"""Bytes/s inside a node: PCIe is below, NVLink above."""
ALIGNED = 8
"""Features, of which widths have to be multiples for matrix units to be used well."""
AXES = ("tp", "cp", "ep", "pp", "dp")
"""Causes of a step's time that are messages."""


# ---- messages -------------------------------------------------------------------------------------------------------


def tp_between_nodes(case: Case) -> Finding | None:
    """tp sends in the middle of every layer, and nothing hides it."""
    tp, cluster = case.degree("tp"), case.task.cluster
    nodes = cluster.link(tp, 1).nodes
    if nodes == 1 or case.part("tp") < WORTH:
        return None
    numbers = f"tp={tp} spans {nodes} nodes of {cluster.per_node}, its messages take {case.takes('tp')}"
    inside = (change for change in trades(case, "tp", "dp", "pp") if change["tp"] <= cluster.per_node)
    found = case.found(numbers, roomier(case, inside))
    if found or case.part("tp") < MUCH:
        return found
    link = cluster.between
    faster = f"links between nodes that are faster than {link.name} ({link.bandwidth / 1e9:.3g} GB/s)"
    wider = f"nodes of {tp} devices, or {faster}; no plan with less tp is predicted to fit and to be faster"
    return case.with_less_tp(numbers) or Finding(numbers, wider)


def tp_over_slow_link(case: Case) -> Finding | None:
    """The same inside of a node, where its devices are not joined by more than PCIe."""
    tp, link = case.degree("tp"), case.task.cluster.inside
    if case.task.cluster.link(tp, 1).nodes > 1 or link.bandwidth >= SLOW_LINK or case.part("tp") < WORTH:
        return None
    numbers = f"tp={tp} over {link.name} ({link.bandwidth / 1e9:.0f} GB/s) takes {case.takes('tp')}"
    return case.found(numbers, roomier(case, trades(case, "tp", "dp", "pp")))


def sharded_over_all(case: Case) -> Finding | None:
    """A copy of the parameters that is spread over nodes has to be gathered between nodes."""
    shards, cluster = case.degree("dp_shard"), case.task.cluster
    nodes = cluster.link(shards * case.degree("cp"), case.degree("tp")).nodes
    if not case.plan.zero or shards == 1 or nodes == 1 or case.part("dp") < WORTH:
        return None
    tokens = case.task.global_batch * case.task.sequence // case.plan.layout.world_size
    numbers = f"dp_shard={shards} spans {nodes} nodes; at {tokens:,} tokens a device its messages take"
    return case.found(f"{numbers} {case.takes('dp')}", hybrids(case))


def zero3_strong_scaled(case: Case) -> Finding | None:
    """The more ranks share the same batch, the less there is to compute while parameters travel."""
    is_one = case.plan.zero == 3 and case.degree("pp") == 1 and case.m == 1
    if not is_one or case.degree("dp_shard") == 1 or case.part("dp") < MUCH:
        return None
    tokens = case.mb * case.task.sequence // case.degree("cp")
    numbers = f"zero=3 on {case.degree('dp')} ranks with one microbatch of {tokens:,} tokens each"
    fewer = any_microbatch(case, trades(case, "dp", "tp", "pp", "cp"))
    changes = [*hybrids(case), *({**change, "zero": zero} for change in fewer for zero in (1, 3))]
    return case.found(f"{numbers} waits for parameters for {case.takes('dp')}", changes)


def regathered(case: Case) -> Finding | None:
    """zero=3 forgets what it gathered after each use, and every microbatch gathers it again."""
    if case.plan.zero != 3 or case.degree("pp") > 1 or case.m == 1 or case.part("dp") < WORTH:
        return None
    weights = 2 * case.task.workload.parameters / case.degree("tp")
    numbers = f"{case.m} microbatches gather {weights / 1e9:.1f} GB of parameters twice each"
    larger = [change for change in any_microbatch(case, [{}]) if change["mb"] > case.mb]
    modes = ({**change, "recompute": mode} for change in larger for mode in ("selective", "full"))
    changes = [{"zero": 2}, {"zero": 1}, *larger, *modes]
    return case.found(f"{numbers}, and wait for {case.takes('dp')}", changes)


def crossing_groups(case: Case) -> Finding | None:
    """Groups that are small enough for a node, and leave it for the way in which ranks are counted."""
    node = case.task.cluster.per_node
    if case.plan.layout.world_size <= node:
        return None
    for axis, cause in (("tp", "tp"), ("cp", "cp"), ("ep", "ep"), ("dp_shard", "dp")):
        degree, span = case.degree(axis), _span(case.plan, axis)
        is_chosen = axis != "dp_shard" or case.degree("dp_replicate") > 1
        if not (1 < degree <= node and node % span and is_chosen) or case.part(cause) < WORTH:
            continue
        numbers = f"a group of {axis}={degree} reaches over {span} ranks, and a node has {node}"
        numbers += f"; its messages take {case.takes(cause)}"
        even = [size for size in divisors(node) if size <= degree] if span <= node else []
        moves = [*trades(case, "tp", "dp", "pp"), *trades(case, "cp", "dp", "pp"), *hybrids(case)]
        moves += [{"ep": size} for size in divisors(degree) if axis == "ep"]
        stays = partial(_stays_inside, node, axis)
        if found := case.found(
            numbers, roomier(case, moves), otherwise=f"{axis}={listed(even)}" if even else "", keeps=stays
        ):
            return found
    return None


def _stays_inside(node: int, axis: str, plan: Plan) -> bool:
    return node % _span(plan, axis) == 0 and (getattr(plan, axis) or 1) > 1


def _span(plan: Plan, axis: str) -> int:
    """Over how many ranks in a row a group reaches."""
    inner = {"tp": (), "ep": ("tp",), "cp": ("tp",), "dp_shard": ("cp", "tp")}[axis]
    span = getattr(plan, axis) or 1
    for name in inner:
        span *= getattr(plan, name) or 1
    return int(span)


def communication(case: Case) -> Finding | None:
    """What all messages take together, wherever they come from."""
    if case.part(*AXES) <= TOO_MUCH:
        return None
    parts = sorted(((case.part(axis), axis) for axis in AXES if case.part(axis) >= WORTH), reverse=True)
    numbers = ", ".join(f"{axis} {percent(part)}" for part, axis in parts)
    trade = [
        trades(case, axis, *(other for other in ("dp", "tp", "pp", "cp") if other != axis))
        for axis in ("dp", "tp", "pp", "cp")
    ]
    sharding = [*hybrids(case), *({"zero": zero} for zero in (1, 2, 3) if case.degree("dp_shard") > 1)]
    changes = [*sharding, *any_microbatch(case, [{}, *(change for each in trade for change in each)])]
    otherwise = "a larger batch or faster links; no plan next to this one is predicted to be faster"
    return case.found(f"messages take {case.takes(*AXES)}: {numbers}", changes, otherwise=otherwise)


# ---- batches and pipelines ------------------------------------------------------------------------------------------


def unequal_stages(case: Case) -> Finding | None:
    """A pipeline runs at the pace of its slowest stage; the head counts as layers."""
    task, pp, v = case.task, case.degree("pp"), case.degree("v")
    if pp == 1 or not task.workload.is_transformer or pp * v > task.workload.layers:
        return None
    if (idle := _idle(task, task.workload, case.plan)) < WORTH:
        return None
    counts = layers_of_ranks(task.workload, pp, v, case.plan.schedule in V_SHAPED, task.profile.cut)
    numbers = f"{task.workload.layers} layers, and a head worth {head_cost(task.workload):.1f}, on pp={pp} v={v}"
    numbers += f" are {min(counts)} to {max(counts)} a rank: they wait {percent(idle)} of their time (predicted)"
    moves = [*trades(case, "pp", "dp", "tp"), *trades(case, "dp", "pp"), *trades(case, "tp", "pp"), *schedules(case)]
    found = case.found(numbers, roomier(case, moves), keeps=lambda plan: _idle(task, task.workload, plan) < idle / 2)
    if found and found.saves and found.saves.part > 3 * idle:  # it gains elsewhere: equal stages end only the wait
        found = None
    if found or idle < NOTABLE:
        return found
    return Finding(
        numbers, _even_layers(task, case.plan, idle / 2) or "fewer stages, beside which the head weighs less"
    )


def _even_layers(task: Task, plan: Plan, idle: float) -> str:
    """A model with a few layers less, of which ranks have parts that are more equal."""
    layers = task.workload.layers
    fewest = max((plan.pp or 1) * (plan.v or 1), layers - max(2, layers // 10))
    for size in range(layers - 1, fewest - 1, -1):
        if _idle(task, task.workload.resized(layers=size), plan) < idle:
            return f"{size} layers instead of {layers}"
    return ""


def _idle(task: Task, workload: Workload, plan: Plan) -> float:
    """The part of their time that ranks of a pipeline wait since others have more layers."""
    pp, v, is_v_shaped = plan.pp or 1, plan.v or 1, plan.schedule in V_SHAPED
    if pp == 1:
        return 0.0
    busy = [float(count) for count in layers_of_ranks(workload, pp, v, is_v_shaped, task.profile.cut)]
    busy[0 if is_v_shaped else -1] += head_cost(workload)
    return 1 - sum(busy) / len(busy) / max(busy)


def too_few_microbatches(case: Case) -> Finding | None:
    """A pipeline with fewer microbatches than ranks never fills; an interleaved one needs whole rounds of them."""
    pp, m, schedule = case.degree("pp"), case.m, case.plan.schedule or "1f1b"
    if pp == 1:
        return None
    wrong = check_schedule(schedule, num_ranks=pp, v=case.degree("v"), num_microbatches=m)
    if not wrong and (not is_starved(case.task, case.plan) or case.part("bubble") < WORTH):
        return None
    numbers = wrong[0].what if wrong else f"{m} microbatch{'es' * (m > 1)} on pp={pp} with {schedule}"
    numbers += f"; the bubble takes {case.takes('bubble')}"
    changes = [*any_microbatch(case, [{}, *schedules(case)]), *roomier(case, trades(case, "pp", "dp", "tp"))]
    need = max(pp * (2 if schedule == "dualpipev" else 1), -(-m // pp) * pp)
    batch = need * case.mb * case.degree("dp")
    return case.found(numbers, changes, otherwise=f"{need} microbatches: a global batch of {batch}")


def large_bubble(case: Case) -> Finding | None:
    """Enough microbatches to fill a pipeline, and too few for its filling not to matter."""
    if case.part("bubble") < MUCH:
        return None
    numbers = f"{case.m} microbatches on pp={case.plan.pp} with {case.plan.schedule}:"
    numbers += f" the bubble takes {case.takes('bubble')}"
    smaller = [{"mb": size} for size in smaller_microbatches(case)]
    orders = [{**order, **change} for order in schedules(case) for change in ({}, *smaller)]
    return case.found(numbers, [*smaller, *orders, *roomier(case, trades(case, "pp", "dp", "tp"))])


def microbatch_size(case: Case) -> Finding | None:
    """Small ones do not fill the device, large ones leave a pipeline too few of them."""
    numbers = f"mb={case.mb}, {case.m} of them: {percent(case.prediction.time.mfu)} MFU (predicted)"
    return case.found(numbers, any_microbatch(case, [{}]), worth=NOTABLE)


def needless_accumulation(case: Case) -> Finding | None:
    """What fits at once need not be done in parts."""
    if case.degree("pp") > 1 or case.m == 1:
        return None
    share = case.task.global_batch // case.degree("dp")
    numbers = f"{case.m} microbatches of {case.mb}, and all {share} sequences of a rank are predicted to fit at once"
    return case.found(numbers, [{"mb": share}] if share else [])


def batch_too_small(case: Case) -> Finding | None:
    """What every step costs once is shared by the tokens of the step."""
    once = ("dp", "optimizer", "fixed")
    if case.part(*once) < MUCH or case.degree("dp") == 1:
        return None
    batch = 4 * case.task.global_batch
    larger = replace(case.task, global_batch=batch).time(replace(case.plan, mb=case.mb))
    gain = larger.tokens_per_s_per_device / case.prediction.time.tokens_per_s_per_device - 1
    if gain < NOTABLE:
        return None
    numbers = f"{case.m} microbatch{'es' * (case.m > 1)} of {case.mb} on each of {case.degree('dp')} data ranks,"
    numbers += f" gradients, optimizer and what else a step costs once take {case.takes(*once)}"
    return Finding(numbers, f"a global batch of {batch}: {percent(gain)} more tokens/s (predicted), or fewer devices")


def batch_not_dealt(case: Case) -> Finding | None:
    """Every data rank has to have as many whole microbatches as the others."""
    batch, ranks = case.task.global_batch, case.degree("dp")
    each = ranks * case.mb
    if batch % each == 0:
        return None
    idle = 1 - batch / (case.m * each)
    numbers = f"a batch of {batch} for dp={ranks} x mb={case.mb}: {percent(idle)} of their places stay empty"
    batches = [size for size in (batch // each * each, -(-batch // each) * each) if size]
    moves = [*any_microbatch(case, [{}, *trades(case, "dp", "tp", "pp", "cp")])]
    return case.found(numbers, moves, otherwise=f"a global batch of {listed(dict.fromkeys(batches))}")


# ---- memory ---------------------------------------------------------------------------------------------------------


def needless_recompute(case: Case) -> Finding | None:
    """Full recompute adds a third of the compute, for memory that is free anyway."""
    limit, held = case.task.memory_limit, case.prediction.memory.total
    if case.plan.recompute != "full" or held > (1 - FREE) * limit:
        return None
    numbers = f"recompute=full with {gib(limit - held)} of {gib(limit)} free (predicted)"
    return case.found(numbers, [{"recompute": "none"}, {"recompute": "selective"}])


def needless_offload(case: Case) -> Finding | None:
    """States that fit on the device need not travel to the host and back."""
    if case.plan.offload == "none":
        return None
    numbers = f"offload={case.plan.offload} takes {case.takes('offload')}"
    return case.found(numbers, [{"offload": "none"}, {"offload": "optimizer"}])


def logits_at_peak(case: Case) -> Finding | None:
    """Logits in fp32 and their gradient, of a whole microbatch, beside activations that are small."""
    task, memory = case.task, case.prediction.memory
    is_fused = task.profile.fused_loss and case.degree("tp") == case.degree("pp") == 1
    if is_fused or memory.logits < LARGE_LOGITS * memory.total or memory.total < (1 - FREE) * task.memory_limit:
        return None
    numbers = f"logits are {gib(memory.logits)} of the {gib(memory.total)} that the fullest rank needs (predicted)"
    smaller = [{"mb": size} for size in smaller_microbatches(case)]
    moves = [
        *smaller,
        *roomier(case, [*trades(case, "pp", "dp"), *trades(case, "tp", "dp"), *trades(case, "dp", "tp")]),
    ]
    for saving in case.savings(moves):
        if saving.bytes > SMALLER * memory.total and saving.part > -MUCH:
            return Finding(numbers, words(case.plan, saving.plan), saving)
    return Finding(numbers, "a loss that is fused or computed in chunks")


# ---- models ---------------------------------------------------------------------------------------------------------


def misaligned(case: Case) -> Finding | None:
    """Matrix units take eight features at a time. What it costs is not predicted: see the evidence."""
    model, tp = case.task.workload, case.degree("tp")
    if not model.is_transformer or case.task.cluster.device.is_host:
        return None
    widths = {"head_dim": model.head_dim, "hidden": model.hidden, "ffn": model.ffn, "expert_ffn": model.expert_ffn}
    odd = {name: width for name, width in widths.items() if width % ALIGNED}
    if odd:
        fixes = (f"{name}={listed(_multiples_around(width))}" for name, width in odd.items())
        shown = ", ".join(f"{name}={width}" for name, width in odd.items())
        return Finding(f"{shown}: no multiple of {ALIGNED}", ", ".join(fixes))
    if model.ffn % tp == 0 and model.ffn // tp % ALIGNED:
        legal = [size for size in divisors(tp) if model.ffn // size % ALIGNED == 0]
        numbers = f"ffn={model.ffn} / tp={tp} = {model.ffn // tp} is no multiple of {ALIGNED}"
        return Finding(numbers, f"tp={listed(legal)}, or ffn={listed(_multiples_around(model.ffn, ALIGNED * tp))}")
    return None


def _multiples_around(number: int, divisor: int = ALIGNED) -> list[int]:
    return [multiple for multiple in (number // divisor * divisor, -(-number // divisor) * divisor) if multiple]


def balanced_routing(case: Case) -> Finding | None:
    """Experts are predicted to be equally busy; with ep the busiest rank sets the pace and is the fullest."""
    model, memory, time = case.task.workload, case.prediction.memory, case.prediction.time
    if not model.experts or case.degree("ep") == 1:
        return None
    routed = model.sparse_layers * model.top_k * model.matrices * model.hidden * model.expert_ffn
    slower = HOT * (routed / model.active_parameters * case.part("matmul") + case.part("ep"))
    more = HOT * memory.activations
    is_full = memory.total <= case.task.memory_limit < memory.total + more
    if slower < WORTH and not is_full:
        return None
    numbers = f"{percent(slower)} of the step and up to {gib(more)} more where experts are not equally busy (predicted)"
    if is_full:
        return Finding(
            f"{numbers}, {gib(memory.total + more)} of {gib(case.task.memory_limit)}",
            "smaller microbatches, or recompute",
        )
    return Finding(
        numbers, f"count on {time.total * (1 + slower):.2f} s instead of {time.total:.2f} s; a balancing loss"
    )


def unscaled_learning_rate(case: Case) -> Finding | None:
    """Larger batches have less noise, and can bear larger steps; they also take fewer of them."""
    rate, base, batch = case.learning_rate, case.base_batch, case.task.global_batch
    if rate is None or not base or 0.5 < batch / base < 2:
        return None
    ratio = batch / base
    numbers = f"a learning rate of {rate:.3g}, chosen for batches of {base}, with batches of {batch}"
    return Finding(numbers, f"{rate * ratio**0.5:.3g} with Adam, {rate * ratio:.3g} with SGD, after a warm-up")
