"""Measure the memory of a rank by cause, at the moment when an allocation fails."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch

from shoal.launch.failure import MEASURED, is_out_of_memory
from shoal.launch.host_memory import resident_bytes
from shoal.parallel.inspect.live_memory import live_memory, peak_bytes
from shoal.train.run import Run

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_REQUESTED = re.compile(r"tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", re.IGNORECASE)


@contextlib.contextmanager
def memory_at_failure(run: Run) -> Iterator[None]:
    """Attach the bytes by cause to an exception that says that memory ran out."""
    before = 0 if run.device.type == "cuda" else resident_bytes()
    try:
        yield
    except BaseException as error:
        if is_out_of_memory(error):
            with contextlib.suppress(Exception):  # the cause matters more than its numbers
                setattr(error, MEASURED, _measured(run, error, before))
        raise


def _measured(run: Run, error: BaseException, before: int) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer, counted; `outside` of tensors, and the `total` with the allocation
    that failed, measured."""
    requested = requested_bytes(str(error))
    found = {"outside": before, "total": peak_bytes(run.device) + requested, "requested": requested}
    if run.device.type == "cuda":
        found["limit"] = torch.cuda.get_device_properties(run.device).total_memory
    if run.parallel_model is not None and run.prepared_optimizer is not None:
        counted = live_memory(run.parallel_model, run.prepared_optimizer)
        states = {"parameters": counted.parameters, "gradients": counted.gradients, "optimizer": counted.optimizer}
        found |= states
    return found


def requested_bytes(text: str) -> int:
    """The size of the allocation that failed, from the text of torch's error; 0: it has none.

    >>> requested_bytes("CUDA out of memory. Tried to allocate 2.00 GiB"), requested_bytes("out of memory")
    (2147483648, 0)
    """
    found = _REQUESTED.search(text)
    return round(float(found[1]) * _UNITS.get(found[2], 1)) if found else 0
