"""Pieces of a layer that holds several in one: a rank has a part of each."""

from __future__ import annotations

import pytest
import torch

from shoal import ShoalError
from shoal.blueprint.placement import chunk
from shoal.parallel.full_tensors import _placed
from shoal.parallel.tensor_parts.packed import cut, in_order, ranges


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("parts", [(), (8, 4, 4), (8, 8)])
@pytest.mark.parametrize("num_shards", [1, 2, 3, 16])
def test_boxes_are_where_a_rank_has_its_piece(dim: int, parts: tuple[int, ...], num_shards: int) -> None:
    """Of a piece of which dp_shard ranks have some rows each, too."""
    whole = torch.arange(16 * 16).view(16, 16)
    pieces = [cut(whole, dim, parts, index=index, degree=2) for index in range(2)]
    assert torch.equal(in_order(torch.cat(pieces, dim), dim, parts, 2), whole)
    for index, piece in enumerate(pieces):
        first = 0
        for shard in range(num_shards):
            rows = chunk(piece.shape[0], index=shard, degree=num_shards)
            own = list(ranges(16, parts, index=index, degree=2))
            boxes = list(_placed([first, 0], [rows, piece.shape[1]], dim, own))
            found = [whole[b0 : b0 + s0, b1 : b1 + s1] for (b0, b1), (s0, s1) in boxes]
            assert torch.equal(torch.cat(found, dim), piece[first : first + rows])
            first += rows


@pytest.mark.parametrize("parts", [(8, 4), (9, 7)])
def test_parts_that_do_not_fit_are_rejected(parts: tuple[int, ...]) -> None:
    with pytest.raises(ShoalError, match="M131"):
        cut(torch.zeros(16, 2), 0, parts, index=0, degree=2)
