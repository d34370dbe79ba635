"""Counters and tickets of all collectives, from torch's flight recorder.

The recorder sees every collective at the lowest level: those of DDP's and FSDP's own code, of compiled graphs and of a
user's `dist.all_reduce`. It is on by default, also for gloo. A ring holds the last entries. All use of its private
functions is in this file, and `tests/dist/test_heartbeat.py` notices when they change.

    entered()    channel → number of its last collective, from the groups themselves, without the recorder
    counters()   channel → (entered, completed): 20 µs
    tickets()    the last collectives with operation, sizes and time of arrival: 2 ms for a ring of 64 entries

On gloo an entry stays in the state "scheduled", and its end time stays 0 (torch 2.11 to 2.13): `retired` says whether
it has ended. Point-to-point messages are not recorded on gloo, but its sequence numbers count them; see `messages`.

At the first collective of a group, torch adds that group to the recorder without its lock. A thread that reads the
recorder at this moment crashes the process (torch 2.13: seen in one of 700 starts with ten reads a second). So
`counters` and `tickets` are for a rank that has not entered anything for a while.

A group of `cpu:gloo,cuda:nccl` has two backends, and each numbers its own collectives from 1. So a channel is a backend
and a group, `nccl/0`.

The status of groups in a dump has torch's numbers of them, not their names. A process numbers only the groups that it
is in, and does not start over when they are destroyed. Only entries have both, so the names are learnt from those.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shoal.comm.heartbeat.ticket import Ticket

SIZE_VARIABLE = "TORCH_FR_BUFFER_SIZE"
RING_SIZE = "64"
"""Entries of the ring. A dump takes 30 µs per entry, and a stalled rank has only a few collectives in flight."""

_DUMPS = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
"""Backend → the function that dumps its recorder."""

Counters = dict[str, tuple[int, int]]
"""Channel → number of its last entered and of its last completed collective, from 1."""


_names: dict[tuple[str, str], str] = {}
"""Backend and the recorder's number of a group → the group's name."""
_gone: set[tuple[str, str]] = set()
"""Backends and numbers of groups that are gone. No number is used twice."""


def forget() -> None:
    """Leave out all groups that have been used until now. Later groups have the names of those that are gone."""
    for backend, dumped in _dumps(with_entries=False):
        _gone.update((backend, number) for number in dumped.get("pg_status", {}))


def limit_ring() -> None:
    """Set the size of the ring, unless the user has; before the first group is made."""
    os.environ.setdefault(SIZE_VARIABLE, RING_SIZE)


def entered(messages: Mapping[tuple[str, str], int]) -> dict[str, int]:
    """Channel → number of its last entered collective, from the groups themselves. Safe at any time."""
    return {channel: number for channel, number, _ in _used(messages)}


def _used(messages: Mapping[tuple[str, str], int]) -> Iterator[tuple[str, int, int]]:
    """Channels that have been used, each with the number of its last collective, and with its messages."""
    for group in _groups():
        for backend in _DUMPS:
            if devices := _devices(group, backend):
                number = group._get_backend(torch.device(devices[0]))._get_sequence_number_for_group()
                sent = sum(messages.get((group.group_name, device), 0) for device in devices)
                number -= sent if backend == "gloo" else 0
                if number > 0:
                    yield f"{backend}/{group.group_name}", number, sent


def counters(messages: Mapping[tuple[str, str], int]) -> Counters:
    """The counters of all channels that have been used. `messages`: group and kind of device → messages of this rank.

    The number of pending collectives is not exact: it is 0, or at least 1. The tickets have it.
    """
    pending, found = _pending(), {}
    for channel, number, sent in _used(messages):
        is_mixed = sent > 0 and channel.startswith("nccl/")  # its status mixes the numbers of messages and collectives
        found[channel] = number, number - (channel in pending and not is_mixed)
    return found


def _pending() -> set[str]:
    """The channels whose last collective has not completed."""
    status = {
        (backend, number): each
        for backend, dumped in _dumps(with_entries=False)
        for number, each in dumped.get("pg_status", {}).items()
        if (backend, number) not in _gone
    }
    if not status.keys() <= _names.keys():
        _entries()  # learns names
    return {
        f"{backend}/{_names[backend, number]}"
        for (backend, number), each in status.items()
        if int(each["last_enqueued_collective"]) > int(each["last_completed_collective"])
        and (backend, number) in _names  # else its last entry has left the ring, and others came after it
    }


def _devices(group: Any, backend: str) -> list[str]:
    """The kinds of devices whose tensors a group sends by this backend."""
    pairs = dist.get_backend_config(group).split(",")
    return [device for device, _, name in (pair.partition(":") for pair in pairs) if name == backend]


def exact(counted: Counters, recorded: Iterable[Ticket]) -> Counters:
    """The counters with the number of the first pending collective, from the tickets."""
    found = dict(counted)
    for ticket in recorded:
        if not ticket.is_done and ticket.channel in found:
            entered, completed = found[ticket.channel]
            found[ticket.channel] = entered, min(completed, ticket.number - 1)
    return found


def tickets() -> list[Ticket]:
    """The last collectives of this rank, oldest first."""
    return [_ticket(entry, backend) for backend, entry in _entries() if not _is_message(entry)]


def _entries() -> list[tuple[str, dict[str, Any]]]:
    """Backend and entry of the last collectives and messages, those of groups that are gone left out. Learns names."""
    found = []
    for backend, dumped in _dumps(with_entries=True):
        for entry in dumped.get("entries", []):
            key = backend, str(entry["pg_id"])
            if key not in _gone:
                _names[key] = entry["process_group"][0]
                found.append((backend, entry))
    return found


def _is_message(entry: Mapping[str, Any]) -> bool:
    """Whether an entry of NCCL is a message, or several: two ranks make it, and its number is not one of the group."""
    is_batch = entry["profiling_name"].endswith("coalesced") and entry.get("p2p_seq_id", 0) > 0
    return bool(entry.get("is_p2p")) or is_batch


def _ticket(entry: Mapping[str, Any], recorded_by: str) -> Ticket:
    backend, _, operation = entry["profiling_name"].rpartition(":")
    return Ticket(
        group=entry["process_group"][0],
        number=entry["collective_seq_id"],
        operation=operation,
        dtypes=tuple(entry["input_dtypes"]),
        sizes=tuple(tuple(size) for size in entry["input_sizes"]),
        nanoseconds=entry["time_created_ns"],
        is_done=entry["retired"],
        backend=backend or recorded_by,
    )


def _dumps(*, with_entries: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """What the recorders of gloo and of NCCL hold; each has one of its own."""
    for backend, name in _DUMPS.items():
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is not None and (backend == "gloo" or torch.cuda.is_initialized()):
            yield backend, json.loads(dump(with_entries, False))


@dataclass(frozen=True, slots=True)
class Group:
    """A process group: its axis of the layout, and its ranks."""

    axis: str
    ranks: tuple[int, ...]


def groups() -> dict[str, Group]:
    """All groups that this rank belongs to, by torch's name."""
    found = {}
    for group in _groups():
        axis = {"default_pg": "world", "undefined": ""}.get(group.group_desc, group.group_desc)
        ranks = tuple(dist.get_process_group_ranks(group))
        found[group.group_name] = Group(axis or f"group {group.group_name}", ranks)
    return found


def _groups() -> list[Any]:
    """The groups that this rank is in. torch has a placeholder for each of those that it is not in."""
    known = list(dist.distributed_c10d._world.pg_group_ranks) if dist.is_initialized() else []
    return [group for group in known if isinstance(group, dist.ProcessGroup)]
