"""From a config of DeepSpeed to plan, settings and a line for each key; all problems at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.config.deepspeed.batch import translate_batch
from shoal.config.deepspeed.data_types import translate_data_types
from shoal.config.deepspeed.features import translate_features
from shoal.config.deepspeed.optimizer import translate_optimizer
from shoal.config.deepspeed.parallel import translate_parallel
from shoal.config.deepspeed.precision import translate_precision
from shoal.config.deepspeed.read import read_config
from shoal.config.deepspeed.scheduler import translate_scheduler
from shoal.config.deepspeed.translation import Line, Reader, Target, Translation
from shoal.config.deepspeed.zero import translate_zero
from shoal.errors import ShoalError

DEFAULT_CLIP = 1.0
"""DeepSpeed clips at this norm if a config says nothing."""


def translate(
    source: str | Path | Mapping[str, Any], *, target: Target, num_ranks: int | None = None, shared: int | None = None
) -> Translation:
    """Translate a file or a mapping. Problems are in the result; `num_ranks` None: not known.

    `shared` is the number of ranks that see the same samples. None: the config decides.
    """
    into = Translation(target)
    try:
        config = read_config(source)
    except ShoalError as error:
        into.problems += error.problems
        return into
    reader = Reader(config, into)
    of_config = translate_parallel(reader)
    shared = of_config if shared is None else shared
    data_ranks = None if num_ranks is None else max(1, num_ranks // shared)
    translate_batch(reader, data_ranks)
    translate_zero(reader, data_ranks)
    translate_precision(reader)
    translate_data_types(reader)
    translate_optimizer(reader)
    translate_scheduler(reader)
    _clip(reader)
    translate_features(reader)
    reader.finish()
    if target == "plan":  # the ranks of a config are data-parallel unless it says otherwise
        into.plan = {"tp": 1, "pp": 1, "cp": 1, **into.plan}
        _say_open(config, into)
    return into


def _say_open(config: Mapping[str, Any], into: Translation) -> None:
    """Name what a config leaves to DeepSpeed's defaults, and the planner chooses."""
    if not config.get("zero_optimization"):
        into.lines.append(Line("zero_optimization", None, "", "left open; DeepSpeed's default is stage 0: --zero 0"))
    if not any(config.get(key) for key in ("bf16", "bfloat16", "fp16", "torch_autocast", "amp")):
        into.lines.append(Line("bf16", None, "", "left open; DeepSpeed's default is that of the model, often fp32"))


def _clip(reader: Reader) -> None:
    clip = reader.number("gradient_clipping")
    if clip is not None:
        remark = "" if clip else "no clipping"
        reader.setting("gradient_clipping", "optim.clip", clip or None, remark)
    elif reader.into.target == "initialize":
        reader.into.settings["optim.clip"] = DEFAULT_CLIP
