"""Wrong use of attention, documents, routers and experts raises one message."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.comm.world import World
from shoal.errors import ShoalError
from shoal.train.run import Run
from tests.dist.pool import on_ranks
from tests.dist.test_rejected_layouts import prepared


class Reader(nn.Module):
    """One attention over 4 heads; `wrong` says what its author got wrong."""

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wrong = wrong
        self.table, self.places, self.head = nn.Embedding(31, 16), nn.Embedding(64, 16), nn.Linear(16, 31)
        self.attention, self.mask = shoal.Attention(), shoal.DocumentMask()

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        positions = torch.arange(tokens.shape[1])[None] if positions is None else positions
        x = self.table(tokens) + self.places(positions)
        q = x.unflatten(-1, (4, 4))
        q = q if self.wrong == "layout" else q.transpose(1, 2)
        mask: Any = self.mask(documents)
        if self.wrong == "mask":
            mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool)
        attend = F.scaled_dot_product_attention if self.wrong == "torch's" else self.attention
        y = attend(q, q, q, mask)
        y = y if self.wrong == "layout" else y.transpose(1, 2)
        logits: Tensor = self.head(y.flatten(2))
        return logits

    def describe(self) -> shoal.Description:
        documents = None if self.wrong == "documents" else "documents"
        return shoal.Description(positions="positions", documents=documents, num_heads=4)


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(0, 31, (4, 17), generator=torch.Generator().manual_seed(0))
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


@on_ranks(2)
def test_gather_tokens_before_anything_was_cut(world: World) -> None:
    run = prepared(world, "cp=2 mb=2", Reader())
    with pytest.raises(ShoalError, match="no batch was cut yet"):
        run.model(batch()["tokens"])
    mine = run.own_tokens(batch())
    logits = run.model(mine["tokens"])
    assert logits.requires_grad
    whole = run.gather_tokens(logits)
    assert whole.shape == (4, 16, 31)
    assert not whole.requires_grad
    torch.testing.assert_close(whole, Reader()(batch()["tokens"]).detach())


@on_ranks(2)
def test_heads_and_tokens_the_other_way_round(world: World) -> None:
    with pytest.raises(ShoalError, match="tokens in the place of heads"):
        prepared(world, "cp=2 mb=2", Reader("layout")).step(batch())


@on_ranks(2)
def test_torchs_attention_in_place_of_the_models(world: World) -> None:
    with pytest.raises(ShoalError, match=r"must call its shoal\.Attention"):
        prepared(world, "cp=2 mb=2", Reader("torch's")).step(batch())


@on_ranks(2)
def test_a_mask_of_ones_own_in_a_ring(world: World) -> None:
    with pytest.raises(ShoalError, match="ring attention builds its masks from documents"):
        prepared(world, "cp=2 mb=2", Reader("mask")).step(batch())


@on_ranks(2)
def test_documents_that_the_description_does_not_name(world: World) -> None:
    with pytest.raises(ShoalError, match="does not name the argument with the documents"):
        prepared(world, "cp=2 mb=2", Reader("documents"))


def test_documents_given_as_a_mask() -> None:
    q = torch.randn(2, 4, 8, 4)
    with pytest.raises(ShoalError, match=r"shoal.DocumentMask"):
        shoal.Attention()(q, q, q, torch.zeros(2, 8, dtype=torch.long))


class Sparse(nn.Module):
    def __init__(self, num_experts: int = 4, top_k: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.said = (num_experts, top_k)
        self.table, self.head = nn.Embedding(31, 16), nn.Linear(16, 31)
        self.router, self.experts = shoal.Router(16, 4, top_k=2), shoal.Experts(16, 8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        routing, *facts = self.router(x)
        y = self.router.attach_aux_loss(self.experts(x.flatten(0, 1), routing).view_as(x), *facts)
        logits: Tensor = self.head(y)
        return logits

    def describe(self) -> shoal.Description:
        splits = {"experts": shoal.Split.EXPERTS}
        return shoal.Description(num_experts=self.said[0], active_experts=self.said[1], splits=splits)


@on_ranks(2)
def test_a_description_of_other_experts(world: World) -> None:
    with pytest.raises(ShoalError, match="num_experts=8, and the model has 4"):
        prepared(world, "ep=2 mb=2", Sparse(num_experts=8))
    with pytest.raises(ShoalError, match="active_experts=3, and the model has 2"):
        prepared(world, "ep=2 mb=2", Sparse(top_k=3))


@on_ranks(2)
def test_routers_and_experts_start_with_values(world: World) -> None:
    model = Sparse()
    assert all(0.01 < float(p.detach().std()) < 0.03 for p in (*model.router.parameters(), *model.experts.parameters()))
    assert prepared(world, "ep=2 mb=2", model).step(batch()).isfinite()


def test_experts_that_are_called_wrongly() -> None:
    router, experts, x = shoal.Router(16, 4, top_k=2), shoal.Experts(16, 8, 4), torch.randn(2, 5, 16)
    result = router(x)
    with pytest.raises(ShoalError, match="must be called with a Routing, got tuple"):
        experts(x.flatten(0, 1), result)
    with pytest.raises(ShoalError, match=r"\(tokens, features\)"):
        experts(x, result[0])
    with pytest.raises(ShoalError, match="num_experts of the router must be 6, got 4"):
        shoal.Experts(16, 8, 6)(x.flatten(0, 1), result[0])


def test_a_description_that_is_none() -> None:
    class Wrong(nn.Linear):
        def describe(self) -> dict[str, Any]:
            return {"blocks": ()}

    with Run("fp32") as run, pytest.raises(ShoalError, match=r"returned a dict"):
        run.prepare(Wrong(2, 2))
