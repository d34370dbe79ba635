"""Build the engine of one rank: its world, its connection to rank 0, and the process set of all ranks."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from typing import Any

import torch

from shoal.comm.rendezvous.launcher_environment import LOOPBACK, Placement, read_environment
from shoal.comm.rendezvous.mac import mac
from shoal.comm.rendezvous.network_interface import listening_socket
from shoal.comm.world import World
from shoal.horovod.engine.coordinator import Coordinator
from shoal.horovod.engine.engine import Engine
from shoal.horovod.engine.executor import SetGroup
from shoal.horovod.engine.hub import Client, ControlPlane, Hub
from shoal.horovod.engine.link import accept_ranks, connect

DEFAULT_FUSION = 64 * 2**20
WITHOUT_EFFECT = ("HOROVOD_TIMELINE", "HOROVOD_AUTOTUNE", "HOROVOD_AUTOTUNE_LOG")
"""Variables that a person waits for the result of."""


def open_engine() -> Engine:
    """Join the run that the launcher's variables describe; without any, be its only rank."""
    place = read_environment(os.environ)
    world = World.start(place, backend=_backend(place))
    group = None
    if world.size > 1:
        # A group that another program created stays its own: its collectives and ours must not mix.
        group = torch.distributed.group.WORLD if world.is_owner else world.with_own_connections().control_group
    engine = Engine(world, _control(world, place), {0: SetGroup(tuple(range(world.size)), group)})
    engine.start()
    return engine


def _backend(place: Placement | None) -> str | None:
    """gloo also for CUDA tensors where ranks share a GPU, which NCCL rejects."""
    num_gpus = torch.cuda.device_count()
    return "gloo" if place is not None and 0 < num_gpus < place.local_world_size else None


def _control(world: World, place: Placement | None) -> ControlPlane:
    if world.rank == 0:
        return _listen(world, place)
    mine: list[Any] = ["", 0, ""]
    host, port, salt = world.all_gather_object(mine)[0]
    return Client(connect((str(host), int(port)), world.rank, _secret(world, salt), world.timeout))


def _say_ignored() -> None:
    """Name the variables of Horovod that are set and have no effect."""
    if names := [name for name in WITHOUT_EFFECT if os.environ.get(name, "0") not in ("", "0")]:
        instead = "shoal.horovod has no timeline and no tuning; torch.profiler shows collectives"
        print(f"shoal.horovod: no effect here: {', '.join(names)} ({instead})", file=sys.stderr, flush=True)


def _listen(world: World, place: Placement | None) -> Hub:
    _say_ignored()
    coordinator = Coordinator(world.size, int(os.environ.get("HOROVOD_FUSION_THRESHOLD", DEFAULT_FUSION)))
    if world.size == 1:
        return Hub(coordinator, {})
    is_one_host = world.local_size == world.size
    named = place.master_addr if place is not None else None
    host = LOOPBACK if is_one_host else named or socket.gethostname()
    salt = secrets.token_hex(32)
    with listening_socket(host, 0, is_one_host=is_one_host) as server:
        world.all_gather_object([host, server.getsockname()[1], salt])
        return Hub(coordinator, accept_ranks(server, world.size, _secret(world, salt), world.timeout))


def _secret(world: World, salt: str) -> bytes:
    """The secret of this control plane: of the run's key, or, where a group has none, what rank 0 has sent by it."""
    return mac(b"" if world.session is None else world.session.key, "horovod", salt)
