"""Continue a sequence of tokens, one at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.errors import ShoalError
from shoal.train.build_model import describe
from shoal.train.inference.next_token import NextToken


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 0.0
    """0: the most likely token. Else logits are divided by it, and a token is drawn."""
    top_p: float = 1.0
    """Draw from the smallest set of likely tokens whose probability is at least this."""
    seed: int = 0


class Continuation:
    """The tokens after a prompt, as they are made. `stopped` then says why there are no more:

    end             the model has made an end token, which is not among them
    length          there are `max_tokens`
    model length    the sequence is as long as the model takes
    """

    def __init__(
        self,
        model: nn.Module,
        prompt: Sequence[int],
        *,
        end_tokens: Collection[int],
        max_tokens: int,
        sampling: Sampling,
        name: str = "tokens",
    ) -> None:
        """`name`: the argument of the forward with the tokens."""
        self.stopped = ""
        self.longest = describe(model).max_tokens
        self._model, self._prompt, self._name = model, list(prompt), name
        self._end_tokens, self._max_tokens, self._sampling = frozenset(end_tokens), max_tokens, sampling
        if self.longest is not None and len(self._prompt) > self.longest:
            raise ShoalError(
                f"a prompt must have at most the model's {self.longest} tokens, got {len(self._prompt)}",
                fix="--prompt with a shorter text",
                code="L021",
            )

    @torch.no_grad()
    def __iter__(self) -> Iterator[int]:
        device = next(self._model.parameters()).device
        generator = torch.Generator(device="cpu").manual_seed(self._sampling.seed)
        tokens = torch.tensor([self._prompt], device=device)
        next_token = NextToken(self._model, self._name)
        self.stopped = "length"
        for _ in range(self._max_tokens):
            if self.longest is not None and tokens.shape[1] > self.longest:
                self.stopped = "model length"
                return
            token = choose(next_token(tokens), self._sampling, generator)
            if token in self._end_tokens:
                self.stopped = "end"
                return
            yield token
            tokens = torch.cat([tokens, torch.tensor([[token]], device=device)], dim=1)


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """The next token, from the logits of all."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    probabilities, order = torch.softmax(logits / sampling.temperature, -1).sort(descending=True)
    before = probabilities.cumsum(-1) - probabilities
    kept = probabilities.masked_fill(before >= sampling.top_p, 0.0)  # the first is always kept
    return int(order[torch.multinomial(kept, 1, generator=generator)])
