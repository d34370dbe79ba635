"""Which of the calls in a circle of waiting ranks some ranks have made and the others never will.

    rank 0   barrier #17 of world             no rank has made such a call before: entered alone
    rank 1   all_reduce #13 of dp             the same call as in the steps before
    rank 2   all_reduce #13 of dp

Counters alone show a circle: rank 0 waits for 1 and 2, and they wait for it. Two groups in a different order look the
same, but there both calls are usual ones.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal.comm.heartbeat.ticket import Ticket
from shoal.launch.watch.reading import Reading


def lone_call(calls: Mapping[int, tuple[str, int]], readings: Mapping[int, Reading]) -> tuple[str, int] | None:
    """The unusual one of the calls (channel and number) in which ranks wait; of two that are as usual, the one with
    fewer ranks. None: there is no such call, or one rank of each."""
    distinct = sorted(set(calls.values()))
    if len(distinct) != 2:
        return None
    unusual = [call for call in distinct if _is_new(call, readings)]
    if len(unusual) == 1:
        return unusual[0]
    one, two = ([rank for rank in calls if calls[rank] == call] for call in distinct)
    if len(one) == len(two):
        return None
    return distinct[0] if len(one) < len(two) else distinct[1]


def _is_new(call: tuple[str, int], readings: Mapping[int, Reading]) -> bool:
    """Whether the operation was not made before in its group, as far as the newest calls of all ranks show."""
    tickets = [ticket for reading in readings.values() for ticket in reading.tickets if ticket.channel == call[0]]
    own = {_kind(ticket) for ticket in tickets if ticket.number == call[1]}
    before = {_kind(ticket) for ticket in tickets if ticket.number < call[1]}
    return bool(own) and bool(before) and not own & before


def _kind(ticket: Ticket) -> tuple[str, str]:
    return ticket.operation, ticket.inputs()
