"""What a model of transformers does with the output of its last layer before it returns it as logits.

Some models divide it (Granite), multiply it (Cohere) or cap it (Gemma 2: c tanh(l / c)). A copy of the model is called
in which the layers before the head are a stand-in, and the head returns known numbers. What comes out shows the
function: its slope at 0 is the scale, its limit the cap. Other numbers confirm both.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.models.huggingface.order import inputs_of
from shoal.verification.exact_casts import keeping_float64

SMALL, LARGE, TOLERANCE = 1e-9, 1e9, 1e-9


class LogitRule(NamedTuple):
    """Logits are scale · l; with a softcap, softcap · tanh(scale · l / softcap)."""

    scale: float = 1.0
    softcap: float | None = None

    def of(self, output: Tensor) -> Tensor:
        """The logits of an output of the head."""
        scaled = output * self.scale
        return scaled if self.softcap is None else (scaled / self.softcap).tanh() * self.softcap


def logit_rule(model: Any, head: nn.Module) -> LogitRule | None:
    """The rule of a model; None: it does something else, or could not be called."""
    base, inputs = model.base_model, inputs_of(model)
    if base is model or inputs is None or any(module is head for module in base.modules()):
        return None
    generator = torch.Generator().manual_seed(0)
    known = 9.0 * torch.randn(1, 4, 6, dtype=torch.float64, generator=generator)
    known[0, 0, 0], known[0, 0, 1] = SMALL, LARGE
    memo: dict[int, Any] = {id(base): _Base(), id(head): _Known(known), id(model.config): model.config}
    try:
        with keeping_float64("fp64", is_foreign=True):
            found = copy.deepcopy(model, memo).eval()(
                **{k: torch.zeros_like(x, device="cpu") for k, x in inputs.items()}
            )
    except Exception:  # it needs other inputs, or more of the layers before
        return None
    return _fit(known, getattr(found, "logits", None))


def _fit(known: Tensor, found: Any) -> LogitRule | None:
    if not isinstance(found, Tensor) or found.shape != known.shape:
        return None
    scale, limit = float(found[0, 0, 0]) / SMALL, float(found[0, 0, 1])
    is_linear = abs(limit - scale * LARGE) <= TOLERANCE * abs(limit)
    rule = LogitRule(_plain(scale), None if is_linear else _plain(limit))
    return rule if torch.allclose(rule.of(known), found.double(), rtol=TOLERANCE, atol=0.0) else None


def _plain(number: float) -> float:
    """Without the rounding of a division."""
    return float(f"{number:.12g}")


class _Base(nn.Module):
    """Stands for the layers before the head."""

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return _Output()


class _Output:
    last_hidden_state = torch.zeros(1, 4, 1, dtype=torch.float64)

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int) -> Tensor:
        return self.last_hidden_state


class _Known(nn.Module):
    """A head that returns known numbers."""

    def __init__(self, known: Tensor) -> None:
        super().__init__()
        self.known = known
        self.weight = nn.Parameter(torch.zeros(1, 1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.known.clone()
