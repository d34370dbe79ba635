"""How tokens may be divided between blocks: which modules need all of them, and what else they read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shoal import Split
from shoal.models.huggingface.splits.block_copies import BlockCopy
from shoal.models.huggingface.splits.divisions import division_of
from shoal.models.huggingface.splits.tokens import Division
from shoal.parallel.tensor_parts.arguments import by_name, changed, first_of, names_of

FEATURES, TOKENS, MEMORY = 4, 6, 5


def attended(q: Tensor, k: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2), -1) @ k


class Cross(nn.Module):
    """A decoder's attention to an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = (nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(3))

    def forward(self, hidden_states: Tensor, memory: Tensor) -> Tensor:
        return self.o(attended(self.q(hidden_states), self.k(memory)))


class Mixer(nn.Module):
    """It has numbers of its own, and reads the residual that it adds to."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.ones(1))

    def forward(self, hidden_states: Tensor, residual: Tensor) -> Tensor:
        return residual + self.decay * hidden_states.cumsum(-2)


class Block(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.cross, self.mixer = Cross(), Mixer()
        self.up, self.down = nn.Linear(FEATURES, 8), nn.Linear(8, FEATURES)

    def forward(self, hidden_states: Tensor, memory: Tensor | None = None, beside: Tensor | None = None) -> Tensor:
        x = hidden_states
        if self.how in ("cross", "leaks"):
            x = x + self.cross(x, memory)
        if self.how == "leaks":
            x = x + memory.mean()
        if self.how == "mixes":
            x = self.mixer(x.tanh(), x)
        if beside is not None:
            x = x + beside
        if self.how in ("rows", "mixed rows"):
            rows = x.reshape(-1, FEATURES)
            up = self.up(rows)
            rows = rows + self.down(up.cumsum(0) if self.how == "mixed rows" else up.relu())
            x = rows.view(x.shape)
        return x


ROWS = {"up": Split.COLUMN, "down": Split.ROW}
CROSS = {"cross": Split.REGION, "cross.q": Split.COLUMN, "cross.k": Split.COLUMN, "cross.o": Split.ROW}


def division(how: str, splits: dict[str, Split], **others: int) -> Division | str:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)

    def some(tokens: int) -> Tensor:
        return torch.randn(1, tokens, FEATURES, dtype=torch.float64, generator=generator).requires_grad_()

    options = {name: some(tokens) for name, tokens in others.items()}
    return division_of(BlockCopy(Block(how).double(), (some(TOKENS),), options, ("block",)), splits)


def found(how: str, splits: dict[str, Split], **others: int) -> Division:
    way = division(how, splits, **others)
    assert isinstance(way, Division), way
    return way


def test_what_an_encoder_returns_enters_whole() -> None:
    way = found("cross", CROSS, memory=MEMORY)
    assert way.arguments == {"": {"memory": "enter"}, "cross.k": {"input": "enter"}}
    whole = found("cross", {"cross": Split.ALL_TOKENS}, memory=MEMORY)
    assert whole.arguments["cross"] == {"memory": "enter"}


def test_what_is_read_elsewhere_too_does_not() -> None:
    """Its gradient would be summed in one place, and be a share in the other."""
    assert division("leaks", CROSS, memory=MEMORY) == "read more activations than those of their tokens"


def test_a_row_for_each_token_is_divided() -> None:
    assert found("plain", {}, beside=TOKENS).arguments == {"": {"beside": "divide"}}


def test_a_module_that_mixes_tokens_is_found() -> None:
    way = found("mixes", {"mixer": Split.SEQUENCE})
    assert way.splits["mixer"] is Split.ALL_TOKENS
    assert way.arguments["mixer"] == {"residual": "gather"}


def test_samples_and_tokens_may_be_one_dim_where_each_row_is_computed_alone() -> None:
    assert found("rows", ROWS).arguments == {"up": {"input": "gather"}}
    assert isinstance(division("mixed rows", ROWS), str)


@pytest.mark.parametrize(("arguments", "options"), [((1, 2), {}), ((1,), {"memory": 2})])
def test_arguments_have_names(arguments: tuple[int, ...], options: dict[str, int]) -> None:
    names = names_of(Cross())
    assert by_name(names, arguments, options) == {"hidden_states": 1, "memory": 2}
    assert first_of(names, arguments) == first_of(names, ()) == "hidden_states"
    new, others = changed(names, arguments, options, {"memory": 3})
    assert by_name(names, new, others) == {"hidden_states": 1, "memory": 3}
