"""The workload of a model of transformers whose config does not show its costs: it is traced, as a module is."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shoal.config.pretrained_folder import CONFIG, PREFIX
from shoal.errors import ShoalError
from shoal.predict.huggingface_config import NoDimensions
from shoal.predict.workload import Workload
from shoal.train.build_model import adapter_of, describe, from_pretrained
from shoal.train.trace.model_trace import workload_of

TOKENS = 512
"""Tokens of a sample where neither the user nor the model says a number."""
SAMPLES = 2


def workload_of_folder(name: str, why: NoDimensions, *, sequence: int | None, precision: str) -> Workload:
    """Trace the model of `hf:FOLDER` or of a config.json, on inputs and labels of its shapes. `why` its config is not
    enough."""
    try:
        with _as_folder(name) as folder:
            return _traced(from_pretrained(folder, init="random"), name, sequence, precision)
    except ShoalError as error:
        problem = error.problems[0]
        what = f"{why.problems[0].what}, and it cannot be traced: {problem.what}"
        raise ShoalError(what, fix=why.problems[0].fix, code="Q022") from error


@contextmanager
def _as_folder(name: str) -> Iterator[str]:
    """The name of a folder with the config.json."""
    if name.startswith(PREFIX):
        yield name
        return
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(name, Path(folder, CONFIG))
        yield f"{PREFIX}{folder}"


def _traced(model: Any, name: str, sequence: int | None, precision: str) -> Workload:
    adapter, description = adapter_of(model), describe(model)
    assert adapter is not None
    adapter.install_experts(model)
    tokens = sequence or min(description.max_tokens or TOKENS, TOKENS)
    generator = torch.Generator().manual_seed(0)
    batch = adapter.random_batch(model, num_samples=SAMPLES, num_tokens=tokens, generator=generator)
    trace = partial(workload_of, model, batch, name=name.removeprefix(PREFIX), precision=precision)
    try:
        found = trace()
    except ShoalError:  # layers that are left out at random while it trains, as those of Whisper
        model.eval()
        found = trace()
    has_tokens = any(one.dim() == 2 and not one.is_floating_point() for one in batch.values())
    left_out = tuple((axis, reason.partition(" ")[2]) for axis, reason in description.why_not.items() if axis != "sp")
    return replace(found, sequence=tokens if has_tokens else 0, left_out=left_out)
