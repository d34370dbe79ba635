"""Inject the faults of SHOAL_FAULTS (`shoal.blueprint.faults`) between backward and update, where peers wait.

With SHOAL_FAULTS_LOG, a rank appends to that file when it is about to fail, and which collectives it has entered.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.blueprint.faults import FLIPS, GENERATION, MISMATCHES, VARIABLE, Fault, Faults
from shoal.comm.heartbeat.heart import heart
from shoal.train.run import Run

LOG = "SHOAL_FAULTS_LOG"
AN_HOUR = 3600.0


def inject_faults(run: Run, generation: int) -> None:
    """Make the steps of a run fail as the environment says."""
    os.environ[GENERATION] = str(generation)  # read by the faults of the disk
    faults = Faults.here(run.world.rank)
    everywhere = Faults.parse(os.environ.get(VARIABLE, "")).ordered
    mismatches = [fault for fault in everywhere if fault.kind in MISMATCHES and fault.generation in (None, generation)]
    if not faults.ordered and not mismatches:
        return
    _flip_gradients(run, faults)

    def fail() -> None:
        step = run.steps_done + 1
        _log(faults, mismatches, run.world.rank, step)
        _hang(faults, step)  # first: a rank can sleep, and be killed when it awakes
        if faults.due("kill_at", step=step):
            os.kill(os.getpid(), signal.SIGKILL)
        if faults.due("fail_allreduce_at", step=step):
            raise RuntimeError(f"the exchange of step {step} fails, as SHOAL_FAULTS orders")
        for fault in mismatches:
            if fault.step in (None, step):
                _mismatch(run, fault)

    run.on_gradients = fail


def _flip_gradients(run: Run, faults: Faults) -> None:
    """Flip a bit of the first parameter's gradient as it is computed; its peers get it with the average."""
    flips = [fault for fault in faults.ordered if fault.kind in FLIPS]
    if not flips:
        return
    done: set[Fault] = set()

    def flip(gradient: Tensor) -> Tensor:
        step = run.steps_done + 1
        for fault in flips:
            is_due = fault.step == step if fault.kind == "flip_gradient_at" else step >= (fault.step or 0)
            if is_due and (fault.kind == "flip_gradient_from" or fault not in done):
                done.add(fault)
                gradient = gradient.clone(memory_format=torch.contiguous_format)
                gradient.view(-1)[:1].view(torch.uint8)[-1:].bitwise_xor_(1)  # of the exponent: a visible error
        return gradient

    next(iter(run.composed.named.values())).register_hook(flip)


def _log(faults: Faults, mismatches: list[Fault], rank: int, step: int) -> None:
    """Append the faults of this step to the log, if there is one."""
    path, beating = os.environ.get(LOG), heart()
    due = [fault for fault in faults.ordered if fault.step == step and fault not in mismatches]
    due += [fault for fault in mismatches if fault.step == step and fault.rank in (None, rank)]
    if path and due:
        counters = {} if beating is None else beating.entered()
        with open(path, "a") as file:
            file.write(json.dumps({"at": time.monotonic(), "rank": rank, "step": step, "counters": counters}) + "\n")


def _hang(faults: Faults, step: int) -> None:
    if faults.due("stop_at", step=step):
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault := faults.due("sleep_at", step=step):
        time.sleep(fault.seconds or AN_HOUR)
    if fault := faults.due("hold_gil_at", step=step):
        hold_gil(fault.seconds)
    if faults.due("block_read_at", step=step):
        os.read(os.pipe()[0], 1)


def hold_gil(seconds: float | None = None) -> None:
    """Wait with the GIL, which PyDLL keeps, unlike CDLL. None: for ever. A signal, as for a stack, would end a sleep; a
    thread that locks a mutex twice stays."""
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(128)
    if seconds is not None:
        libc.sleep(int(seconds))
        return
    for _ in range(2):
        libc.pthread_mutex_lock(mutex)


def _mismatch(run: Run, fault: Fault) -> None:
    """A collective along the first axis, in which one rank makes another call than the others."""
    group = next(iter(run.mesh.groups.values()))
    is_faulty = fault.rank in (None, run.world.rank)
    if is_faulty and fault.kind == "other_op_at":
        dist.broadcast(torch.ones(1000), group=group, group_src=dist.get_rank(group))
    else:
        dist.all_reduce(torch.ones(700 if is_faulty else 1000), group=group)
