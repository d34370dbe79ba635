"""The logits of the next token: with the keys and values that the model has cached, where it can, else of all tokens.

    prompt            ── whole ──▶ logits, cache
    first new token   ── cached ─▶ logits ══ equal? ══ logits ◀─ whole     no: whole from here on
    later tokens      ── cached ─▶ logits

Models of transformers take `past_key_values` and return them. A cache that is wrong for a model would change its text
without a word, so the first result is compared. The cost is one forward. Where the rotation of a token depends on the
length of the sequence, keys that were cached are wrong only later, and the cache is left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

CLOSE = 1e-3
"""The largest difference of rounding, in parts of the largest logit. Wrong positions or keys are far above it."""


class NextToken:
    """Calls a model for one sequence that grows by a token from call to call."""

    def __init__(self, model: nn.Module, name: str) -> None:
        """`name`: the argument of the forward with the tokens."""
        self.uses_cache = _takes_cache(model) and not _rotates_by_length(model)
        self._model, self._name = model, name
        self._cache: Any = None
        self._is_compared = False

    def __call__(self, tokens_1T: Tensor) -> Tensor:
        """tokens_1T → logits_V of the token after them, on the CPU."""
        if not self.uses_cache:
            return self._logits(tokens_1T)
        if self._cache is None:
            return self._with_cache(tokens_1T)
        logits_V = self._with_cache(tokens_1T[:, -1:], past_key_values=self._cache)
        if not self._is_compared:
            self._is_compared = True
            expected_V = self._logits(tokens_1T)
            self.uses_cache = self.uses_cache and _are_close(logits_V, expected_V)
            return expected_V
        return logits_V if self.uses_cache else self._logits(tokens_1T)

    def _with_cache(self, tokens_1T: Tensor, **cached: Any) -> Tensor:
        output = self._model(**{self._name: tokens_1T}, **cached, use_cache=True)
        self._cache = getattr(output, "past_key_values", None)
        self.uses_cache = self._cache is not None
        return last_of(output)

    def _logits(self, tokens_1T: Tensor) -> Tensor:
        without = {"use_cache": False} if _takes_cache(self._model) else {}
        return last_of(self._model(**{self._name: tokens_1T}, **without))


def last_of(output: Any) -> Tensor:
    """The logits of the last token, from what a model returns."""
    logits_V: Tensor = getattr(output, "logits", output)[0, -1].float().cpu()
    return logits_V


def _takes_cache(model: nn.Module) -> bool:
    parameters = inspect.signature(model.forward).parameters
    return {"past_key_values", "use_cache"} <= parameters.keys()


def _rotates_by_length(model: nn.Module) -> bool:
    found = [getattr(module, "rope_type", None) for module in model.modules()]
    kinds = [kind for one in found for kind in (one.values() if isinstance(one, Mapping) else [one])]
    return any(kind in ("dynamic", "longrope") for kind in kinds)


def _are_close(ours_V: Tensor, theirs_V: Tensor) -> bool:
    return float((ours_V - theirs_V).abs().max()) <= CLOSE * float(theirs_V.abs().max())
