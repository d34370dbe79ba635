"""`scheduler`: the warm-up schedules of DeepSpeed, with their defaults.

Traps: the warm-up is logarithmic by default; `warmup_max_lr` of WarmupDecayLR is 0.001 by default, and both WarmupLR
and WarmupDecayLR replace the learning rate of the optimizer by it; the first two steps have the lowest rate.
"""

from __future__ import annotations

from typing import Any

from shoal.config.deepspeed.translation import Reader, ScheduleChoice
from shoal.errors import Problem, nearest

NAMES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
LATE = "recipes start at 1 / steps; DeepSpeed makes two steps at the lowest rate first"


def translate_scheduler(reader: Reader) -> None:
    """The schedule, as settings of a recipe or as a choice for an engine."""
    section = reader.section("scheduler")
    if section is None:
        return None
    kind = section.word("type")
    params = section.section("params")
    section.seen |= {"type", "params"}
    if kind is None:
        return section.finish()
    if kind not in NAMES:
        near = nearest(kind, NAMES) or "WarmupDecayLR"
        fix = f'"type": "{near}"; or lr_scheduler=... of torch in a script with shoal.deepspeed.initialize'
        reader.into.problems.append(Problem("E010", f"the scheduler {kind!r} of DeepSpeed has no counterpart", fix))
        return section.finish()
    params = params or Reader({}, reader.into, "scheduler.params.")
    arguments = _arguments(kind, params)
    _position(params, arguments)
    reader.into.schedule = ScheduleChoice(kind, arguments)
    if reader.into.target == "train":
        _as_settings(section, params, kind, arguments)
    params.finish()
    section.finish()
    return None


def _arguments(kind: str, params: Reader) -> dict[str, Any]:
    """The arguments, with DeepSpeed's defaults."""
    steps = params.whole("warmup_num_steps")
    form = params.word("warmup_type", ("log", "linear"))
    found: dict[str, Any] = {"warmup_num_steps": steps or 1000, "warmup_type": form or "log"}
    if kind == "WarmupCosineLR":
        for key, usual in (("warmup_min_ratio", 0.0), ("cos_min_ratio", 1e-4)):
            value = params.number(key)
            found[key] = usual if value is None else value
    else:
        lowest, highest = _rates(params, "warmup_min_lr"), _rates(params, "warmup_max_lr")
        usual_rate = None if kind == "WarmupLR" else 1e-3
        found |= {"warmup_min_lr": lowest or 0.0, "warmup_max_lr": usual_rate if highest is None else highest}
    if kind != "WarmupLR":
        total = params.whole("total_num_steps")
        if total is None and params.values.get("total_num_steps") != "auto":
            what = f"scheduler.params.total_num_steps is missing, and {kind} ends there"
            params.into.problems.append(Problem("E010", what, '"total_num_steps": 10000'))
        found["total_num_steps"] = total
    return found


def _position(params: Reader, arguments: dict[str, Any]) -> None:
    """Where the schedule begins, if it is not at the begin."""
    first = params.whole("last_batch_iteration", least=-1)
    if first is None or first == -1:
        return
    if params.into.target == "initialize":
        arguments["last_batch_iteration"] = first
    else:
        fix = "remove it; a checkpoint has the position of the schedule"
        params.reject("last_batch_iteration", fix, "a recipe begins at its first step")


def _rates(params: Reader, key: str) -> float | list[float] | None:
    """A rate, or in an engine one for each group of parameters."""
    value = params.values.get(key)
    if isinstance(value, list) and value and params.into.target == "initialize":
        params.seen.add(key)
        if all(isinstance(one, int | float) and not isinstance(one, bool) and 0 <= one < float("inf") for one in value):
            return [float(one) for one in value]
    return params.number(key)


def _as_settings(section: Reader, params: Reader, kind: str, arguments: dict[str, Any]) -> None:
    """The schedule as settings of a recipe, which has linear warm-up from zero."""
    shapes = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    section.setting("type", "optim.schedule", shapes[kind], f"down to 0; {LATE}" if kind == "WarmupDecayLR" else LATE)
    if arguments["warmup_type"] == "log" and params.values.get("warmup_type") != "auto":
        what = f"{kind} warms up logarithmically{'' if 'warmup_type' in params.values else ' by default'}"
        fix = '"warmup_type": "linear"; or a script with shoal.deepspeed.initialize, which has both'
        params.into.problems.append(Problem("E010", f"{what}, and recipes linearly", fix))
    elif params.has("warmup_type"):
        params.same("warmup_type", "linear, as here")
    for key in ("warmup_min_lr", "warmup_min_ratio"):
        if arguments.get(key):
            params.reject(key, f'"{key}": 0', "recipes start from zero")
        elif params.has(key):
            params.same(key, "from zero, as here")
    if params.values.get("warmup_num_steps") != "auto":
        params.setting("warmup_num_steps", "optim.warmup", f"{arguments['warmup_num_steps']}step")
    rate = arguments.get("warmup_max_lr")
    if rate is not None and params.values.get("warmup_max_lr") != "auto":
        by_default = "" if "warmup_max_lr" in params.values else " (the default of WarmupDecayLR)"
        params.setting("warmup_max_lr", "optim.lr", rate, f"replaces the rate of the optimizer{by_default}")
    if kind != "WarmupLR":
        if kind == "WarmupDecayLR":
            params.into.settings["optim.final_lr"] = 0.0  # which the line of the type says
        else:
            params.setting("cos_min_ratio", "optim.final_lr", arguments["cos_min_ratio"])
        if arguments["total_num_steps"] is not None:
            params.setting("total_num_steps", "run.duration", f"{arguments['total_num_steps']}step")
