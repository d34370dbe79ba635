"""One collective of a rank, as its heartbeat has it. Without torch, so that a reader of the board needs none."""

from __future__ import annotations

from dataclasses import dataclass

ANY_SOURCE = -1
"""The sender of a message that is received from any rank."""

_DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16"}
_DTYPES |= {"Byte": "uint8", "Int": "int32", "Long": "int64", "Bool": "bool"}


def group_of(channel: str) -> str:
    """The group of a channel of collectives or of messages.

    >>> group_of("nccl/0"), group_of("0:1>2")
    ('0', '0')
    """
    name = channel.partition(":")[0]
    return name.partition("/")[2] or name


@dataclass(frozen=True, slots=True)
class Ticket:
    """One collective that this rank has entered."""

    group: str
    number: int
    operation: str
    dtypes: tuple[str, ...]
    sizes: tuple[tuple[int, ...], ...]
    """Of its inputs."""
    nanoseconds: int
    """When it was entered, on the clock of this machine."""
    is_done: bool
    backend: str = "gloo"

    @property
    def channel(self) -> str:
        """Backend and group, within which its number counts."""
        return f"{self.backend}/{self.group}"

    def inputs(self) -> str:
        """Dtypes and sizes of its inputs.

        >>> Ticket("0", 7, "all_reduce", ("Float",), ((3, 4),), 0, False).inputs()
        'float32[3, 4]'
        """
        parts = [
            f"{_DTYPES.get(dtype, dtype)}{list(size)}" for dtype, size in zip(self.dtypes, self.sizes, strict=True)
        ]
        return f"{', '.join(parts[:3])}{', ...' if parts[3:] else ''}"
