"""Authenticated process groups: every pair of ranks proves that it holds the session key.

gloo connects ranks over TCP without authentication. A process that connects to a listening rank first, with the small
number that gloo expects, takes the place of a peer. So after a group is created, every pair of its ranks exchanges a
MAC over the same connection that tensors will use. If another process has taken a connection, the run ends.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from shoal.comm.group_lifetime import noting_connections
from shoal.comm.rendezvous.mac import TAG, mac
from shoal.errors import RunFailed

PRIVATE_INTERFACE = "export GLOO_SOCKET_IFNAME=<a private interface>"
GRACE_PERIOD = timedelta(seconds=60)
"""Time for a connected peer to authenticate."""


@dataclass(frozen=True, slots=True)
class Session:
    """A session key, and the number of groups that used it."""

    key: bytes = field(repr=False)
    _numbers: Any = field(default_factory=count, repr=False)

    def admit(self, group: dist.ProcessGroup, timeout: timedelta = GRACE_PERIOD) -> None:
        """Authenticate the ranks of a new group over each connection. Every rank of the group calls it."""
        self._prove(group, next(self._numbers), min(timeout, GRACE_PERIOD))

    def new_group(self, ranks: Sequence[int] | None = None, **options: Any) -> dist.ProcessGroup:
        """Create a group as `torch.distributed.new_group` does, and authenticate it. Every rank of the world calls
        it."""
        number = next(self._numbers)
        with noting_connections():
            group: dist.ProcessGroup = dist.new_group(None if ranks is None else list(ranks), **options)
        if ranks is None or dist.get_rank() in ranks:
            self._prove(group, number, min(options.get("timeout") or GRACE_PERIOD, GRACE_PERIOD))
        return group

    def _prove(self, group: dist.ProcessGroup, number: int, timeout: timedelta) -> None:
        if "cpu:" not in dist.get_backend_config(group):
            return  # NCCL: its connections need a secret that is in the sealed store
        me, peers = dist.get_rank(group), [rank for rank in range(group.size()) if rank != dist.get_rank(group)]
        arrived = torch.zeros(group.size(), TAG, dtype=torch.uint8)
        proofs = [_bytes(mac(self.key, "pair", number, me, peer)) for peer in peers]
        works = [dist.irecv(arrived[peer], group=group, group_src=peer) for peer in peers]
        works += [dist.isend(proof, group=group, group_dst=peer) for proof, peer in zip(proofs, peers, strict=True)]
        for work, peer in zip(works, [*peers, *peers], strict=True):
            assert work is not None
            try:
                work.wait(timeout)
            except RuntimeError as error:
                what = f"{_who(group, peer)} did not prove that it is part of this run: {error}"
                raise _restarted(RunFailed(what, fix=PRIVATE_INTERFACE, code="N010")) from error
        for peer in peers:
            if not hmac.compare_digest(arrived[peer].numpy().tobytes(), mac(self.key, "pair", number, peer, me)):
                what = f"the connection to {_who(group, peer)} was taken by a process that is not part of this run"
                raise _restarted(RunFailed(what, fix=PRIVATE_INTERFACE, code="N010"))


def _restarted(error: RunFailed) -> RunFailed:
    """Mark an error as one that a restart may cure: a stranger has to connect in the moment in which a peer does."""
    error.may_pass = True
    return error


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _who(group: dist.ProcessGroup, peer: int) -> str:
    return f"rank {dist.get_global_rank(group, peer)}"
