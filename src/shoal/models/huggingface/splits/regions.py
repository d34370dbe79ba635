"""Layers of a block that tensor parallelism may split together.

A *region* begins with layers that are split by columns and ends with one that is split by rows:

    x ── query, key, value ── attention ── dense ── + x     columns: query, key, value     row: dense

It is found by gradients (`flow`) and proven by numbers (`trial`). Else it stays whole. The module around a region may
hold more: low-rank layers before the columns, norms of each head, numbers of each head.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Region:
    """Layers that are split together. Names are those inside the block."""

    columns: tuple[str, ...]
    row: str
    home: str
    """The innermost module around the columns."""
    reads_home: bool
    """Whether all that is computed inside of it comes from its first argument, or its `hidden_states`, and from further
    arguments of the block as they are: keys and values of another sequence."""
    latent: tuple[str, ...] = ()
    """Linear layers of `home` before the columns, which stay whole."""
    others: tuple[str, ...] = ()
    """Parameters of `home` outside of linear layers."""
    divided: tuple[str, ...] = ()
    """Attributes of `home` of which a rank has its part."""
    parts: tuple[int, ...] = ()
    """The sizes of what a single column holds, as queries, keys and values; none: it holds one thing."""
    cuts: tuple[tuple[str, int], ...] = ()
    """Those of `others` that are cut, and the dim."""
