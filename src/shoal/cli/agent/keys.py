"""The key that coordinator and agents of one run share."""

from __future__ import annotations

import hashlib
import os

from shoal.comm.rendezvous.key import Key, key_of
from shoal.comm.rendezvous.launcher_environment import Placement


def handed_over(text: str) -> Key:
    """The key that a coordinator gives to the agents that it starts."""
    return Key(hashlib.sha256(text.encode()).digest(), "the coordinator")


def shared_key() -> Key:
    """The key of SHOAL_KEY, of SHOAL_KEY_FILE, or of the home directory."""
    text = os.environ.get("SHOAL_KEY")
    place = Placement(
        rank=0,
        world_size=2,
        local_rank=0,
        local_world_size=1,
        source="torchrun",
        key=text.encode() if text else None,
        key_file=os.environ.get("SHOAL_KEY_FILE") or None,
    )
    return key_of(place)
