"""`shoal plan --deepspeed` and `--megatron`: the words of a translation become words that every plan must have."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from shoal.blueprint.plan import Plan
from shoal.blueprint.plan_parser import read_words
from shoal.cli.other_systems.table import table
from shoal.config.deepspeed.translate import translate
from shoal.config.deepspeed.translation import Line, Translation
from shoal.config.megatron.translate import translate_megatron
from shoal.errors import ShoalError, raise_if
from shoal.planner.request import DIMENSIONS, WORDS, PlanRequest
from shoal.predict.cluster_parser import parse_cluster


def with_translation(options: Any, arguments: Sequence[str]) -> tuple[Any, list[Line]]:
    """The request with the words of the other system below those that were typed, and a line for each key."""
    if options.deepspeed is not None and options.megatron is not None:
        raise ShoalError("--deepspeed and --megatron exclude each other", fix="one of them", code="R044")
    ranks = _num_devices(options.cluster)
    if options.deepspeed is not None:
        title, found = str(options.deepspeed), _deepspeed(options, ranks)
    else:
        title, found = "--megatron", translate_megatron(options.megatron, num_ranks=ranks)
    raise_if(found.problems, title=title if len(found.problems) > 1 else "")
    changed, typed = _merged(options, found)
    if "--json" not in arguments:
        print(table(title, found.lines, typed), file=sys.stderr)
    return replace(options, **changed), found.lines


def _deepspeed(options: Any, ranks: int | None) -> Translation:
    """Translate a config twice: for the plan, and for the batch, which depends on degrees that were typed."""
    words = read_words(options.plan).values
    found = translate(options.deepspeed, target="plan", num_ranks=ranks)
    degrees = ("tp", "pp", "cp")
    shared = prod(getattr(options, name) or words.get(name) or found.plan.get(name) or 1 for name in degrees)
    return translate(options.deepspeed, target="plan", num_ranks=ranks, shared=shared)


def _num_devices(cluster: str) -> int | None:
    try:
        return parse_cluster(cluster).num_devices
    except ShoalError:  # which the planner reports
        return None


def _merged(options: PlanRequest, found: Translation) -> tuple[dict[str, Any], list[str]]:
    """The options that change, and the names of settings that were typed."""
    own = read_words(options.plan).values
    given = {*own, *(name for name in (*WORDS, "precision") if getattr(options, name) is not None)}
    below = {key: value for key, value in found.plan.items() if key not in given and value is not None}
    changed: dict[str, Any] = {"plan": str(Plan.of({**below, **own}))}
    typed = [f"plan.{name}" for name in given]
    asked = {"global_batch": found.settings.get("data.global_batch"), **found.settings}
    for name in ("global_batch", "seq_len", *DIMENSIONS):
        is_of_model = name in DIMENSIONS and options.model is not None
        if getattr(options, name) is not None or (is_of_model and asked.get(name) is not None):
            typed += (
                [name.replace("_", "-"), "data.global_batch"] if name == "global_batch" else [name.replace("_", "-")]
            )
        elif asked.get(name) is not None:
            changed[name] = asked[name]
    if options.model is None:
        changed["form"] = found.form
    return changed, typed
