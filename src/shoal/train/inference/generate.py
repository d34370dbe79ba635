"""Continue a sequence of tokens, one at a time. The model computes the whole sequence for each, without a cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.train.build_model import describe


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 0.0
    """0: the most likely token. Else logits are divided by it, and a token is drawn."""
    top_p: float = 1.0
    """Draw from the smallest set of likely tokens whose probability is at least this."""
    seed: int = 0


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Sequence[int],
    *,
    end_token: int,
    max_tokens: int,
    sampling: Sampling,
    name: str = "tokens",
) -> Iterator[int]:
    """Yield tokens after the prompt, up to `max_tokens`, to the end token, or to the longest sequence of the model.
    `name`: the argument of the forward with the tokens."""
    device = next(model.parameters()).device
    generator = torch.Generator(device="cpu").manual_seed(sampling.seed)
    tokens = torch.tensor([list(prompt)], device=device)
    longest = describe(model).max_tokens
    for _ in range(max_tokens):
        if longest is not None and tokens.shape[1] >= longest:
            return
        output = model(**{name: tokens})
        logits: Tensor = getattr(output, "logits", output)[0, -1].float().cpu()
        token = choose(logits, sampling, generator)
        if token == end_token:
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
