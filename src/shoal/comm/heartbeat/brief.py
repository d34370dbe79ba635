"""Smaller beats, for where the whole one does not fit. Without torch, so that a reader of the board needs none."""

from __future__ import annotations

from typing import Any

from shoal.comm.heartbeat.ticket import group_of

EMPTY: dict[str, Any] = {"counters": {}, "groups": {}, "tickets": []}
"""The parts of a beat that grow with the world."""


def only_pending(beat: dict[str, Any]) -> dict[str, Any]:
    """A smaller beat: the channels with a pending call alone, and their groups. Large worlds have hundreds."""
    counters = {name: pair for name, pair in beat["counters"].items() if pair[0] > pair[1]}
    names = {group_of(name) for name in counters}
    groups = {name: group for name, group in beat["groups"].items() if name in names}
    return {**beat, "counters": counters, "groups": groups, "tickets": beat["tickets"][-4:], "is_partial": True}


def without_channels(beat: dict[str, Any]) -> dict[str, Any]:
    """The smallest beat: phase and step."""
    return {**beat, **EMPTY, "is_partial": True}
