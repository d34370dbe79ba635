"""Axes of a plan that a run rejects for architectures of transformers, by the model_type of a config.json.

A run finds this in the model itself, and says more. A planner without torch has no model, so it is written down here,
for what the table of docs/huggingface.md says; a test compares the two. Models whose config does not show their costs
are not here, since they are traced. Another architecture may be rejected as well.
"""

from __future__ import annotations

from collections.abc import Mapping

_POSITIONS = "takes no position_ids, which tokens of a divided sequence need"
_OWN_ATTENTION = "computes its attention itself, without transformers' attention interface"
_MORE_THAN_A_WINDOW = "declares that flash attention cannot compute its attention"
_PADDING = "counts positions from its padding token"
_MASK = "counts positions from its attention_mask"
_UNKNOWN = "cannot be run without memory"
_NO_EXPERTS = "describes no experts"
_NO_CHAIN = "has parameters outside of the modules that it runs"

LEFT_OUT: Mapping[str, Mapping[str, str]] = {
    **{kind: {"cp": _POSITIONS} for kind in ("bloom", "mpt")},
    **{kind: {"cp": _OWN_ATTENTION} for kind in ("falcon", "gptj")},
    **{kind: {"cp": _MORE_THAN_A_WINDOW} for kind in ("openai-gpt", "codegen", "fnet")},
    **{kind: {"cp": _PADDING} for kind in ("roberta", "xlm-roberta", "mpnet", "roberta-prelayernorm")},
    **{kind: {"cp": _MASK} for kind in ("opt", "biogpt")},
    "esm": {"cp": "scales every token by the number of masked tokens in its sample"},
    "recurrent_gemma": {"cp": "has no attention in model.layers.0"},
    "dbrx": {"tp": _UNKNOWN, "pp": _UNKNOWN},
    "deberta-v2": {"tp": _UNKNOWN, "pp": _UNKNOWN, "cp": _MORE_THAN_A_WINDOW},
    "jetmoe": {"tp": _UNKNOWN, "pp": _UNKNOWN, "cp": "may mix tokens", "ep": _NO_EXPERTS},
    "llama4_text": {"cp": _MORE_THAN_A_WINDOW, "ep": _NO_EXPERTS},
    "wav2vec2": {"tp": _NO_CHAIN, "pp": _NO_CHAIN, "cp": _POSITIONS},
}
"""model_type → axis → why: words of the table's reason. `sp` is not here: a run has it where the model allows it."""


def left_out_axes(model_type: str) -> tuple[tuple[str, str], ...]:
    """Axes that a run would reject, each with the reason."""
    return tuple(LEFT_OUT.get(model_type, {}).items())
