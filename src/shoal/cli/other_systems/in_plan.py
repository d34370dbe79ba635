"""`shoal plan --deepspeed`: the words of a translation become words that every plan must have."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from shoal.blueprint.plan import Plan
from shoal.blueprint.plan_parser import read_words
from shoal.cli.other_systems.deepspeed import table
from shoal.config.deepspeed.translate import translate
from shoal.config.deepspeed.translation import Line, Translation
from shoal.errors import ShoalError, raise_if
from shoal.planner.request import WORDS, PlanRequest
from shoal.predict.cluster_parser import parse_cluster

Request = TypeVar("Request", bound=PlanRequest)


def with_translation(options: Any, arguments: Sequence[str]) -> tuple[Any, list[Line]]:
    """The request with the words of `--deepspeed` below those that were typed, and a line for each key."""
    found = translate(options.deepspeed, target="plan", num_ranks=_num_devices(options.cluster))
    raise_if(found.problems, title=str(options.deepspeed) if len(found.problems) > 1 else "")
    words, batch, typed = _merged(options, found)
    if "--json" not in arguments:
        print(table(Path(options.deepspeed), found.lines, typed), file=sys.stderr)
    return replace(options, plan=str(words) if words.to_mapping() else "", global_batch=batch), found.lines


def _num_devices(cluster: str) -> int | None:
    try:
        return parse_cluster(cluster).num_devices
    except ShoalError:  # which the planner reports
        return None


def _merged(options: PlanRequest, found: Translation) -> tuple[Plan, int | None, list[str]]:
    """The words of every plan, the global batch, and the names of settings that were typed."""
    own = read_words(options.plan).values
    given = {*own, *(name for name in (*WORDS, "precision") if getattr(options, name) is not None)}
    below = {key: value for key, value in found.plan.items() if key not in given and value is not None}
    typed = [f"plan.{name}" for name in given]
    batch = options.global_batch
    if batch is None:
        batch = found.settings.get("data.global_batch")
    else:
        typed.append("data.global_batch")
    return Plan.of({**below, **own}), batch, typed
