"""What the arguments of Megatron-LM say of a model beside its dimensions, with its own defaults: a GPT-2, unless they
say otherwise."""

from __future__ import annotations

import re
from collections.abc import Mapping

from shoal.config.deepspeed.translation import Line, Translation
from shoal.errors import Problem

OF_MODEL = {
    "swiglu": "a gate in each feed-forward",
    "squared-relu": "a feed-forward without a gate",
    "disable-bias-linear": "no biases",
    "untie-embeddings-and-output-weights": "a head of its own",
    "group-query-attention": "heads share keys and values",
    "kv-channels": "features of a head",
    "position-embedding-type": "rows of learned positions, or none",
    "use-rotary-position-embeddings": "no learned positions",
    "max-position-embeddings": "rows of learned positions, if there are any",
    "make-vocab-size-divisible-by": "rows of padding of the vocabulary",
    "moe-shared-expert-intermediate-size": "features of experts that see every token",
    "moe-layer-freq": "which layers have experts",
}
"""Arguments → what they decide of the model that is predicted."""
SWITCHES_OF_MODEL = (
    *("swiglu", "squared-relu", "disable-bias-linear", "untie-embeddings-and-output-weights"),
    *("group-query-attention", "use-rotary-position-embeddings"),
)
"""Those of them without a value."""
LEARNED = "learned_absolute"
_DENSE_FIRST = re.compile(r"\(?\[0\]\*(\d+)\+\[1\]\*(\d+)\)?")


def read_model(given: Mapping[str, list[str]], into: Translation) -> None:
    """Note the form of the model, and sizes that follow from others."""
    into.lines += [
        Line(f"--{name}", " ".join(given[name]) or None, "", OF_MODEL[name]) for name in given if name in OF_MODEL
    ]
    if "hidden" not in into.settings:
        return
    form, sizes = into.form, into.settings
    form["gated"] = "swiglu" in given
    form["biases"] = "disable-bias-linear" not in given
    form["tied"] = "untie-embeddings-and-output-weights" not in given
    if size := _number("kv-channels", given, into):
        form["head_dim"] = size
    kind = LEARNED if "use-rotary-position-embeddings" not in given else "rope"
    if " ".join(given.get("position-embedding-type", [kind])) == LEARNED:
        form["positions"] = _number("max-position-embeddings", given, into) or 0
    if "group-query-attention" in given:
        sizes.setdefault("kv_heads", 1)
    elif sizes.pop("kv_heads", None) is not None:  # which Megatron-LM does not read then
        into.lines = [_without_groups(line) for line in into.lines]
    hidden = sizes["hidden"]
    sizes.setdefault("ffn", int(4 * hidden * 2 / 3 / 64) * 64 if form["gated"] else 4 * hidden)
    if "vocabulary" in sizes and "padded-vocab-size" not in given:
        multiple = (_number("make-vocab-size-divisible-by", given, into) or 128) * into.plan["tp"]
        sizes["vocabulary"] = -(-sizes["vocabulary"] // multiple) * multiple
    if "experts" in sizes:
        _experts(given, into)


def _without_groups(line: Line) -> Line:
    if line.key != "--num-query-groups":
        return line
    return Line(line.key, line.value, "", "no effect without --group-query-attention")


def _experts(given: Mapping[str, list[str]], into: Translation) -> None:
    into.settings.setdefault("top_k", 2)
    if size := _number("moe-shared-expert-intermediate-size", given, into):
        into.form["shared_ffn"] = size
    text = "".join(given.get("moe-layer-freq", ["1"])).replace(" ", "")
    pattern = _DENSE_FIRST.fullmatch(text)
    if pattern is not None:
        into.form["dense_layers"] = int(pattern[1])
    elif text != "1":
        what = f"--moe-layer-freq {text[:60]} has no counterpart in a plan of shoal: layers without experts come first"
        into.problems.append(Problem("E062", what, '--moe-layer-freq "([0]*1+[1]*31)", or 1'))


def _number(name: str, given: Mapping[str, list[str]], into: Translation) -> int | None:
    """A whole number; None: it is not given."""
    text = " ".join(given.get(name, []))
    if name not in given or (text.isdecimal() and 1 <= int(text) < 2**40):
        return int(text) if text else None
    what = f"--{name} must be a whole number of at least 1, got {text[:80] or 'nothing'}"
    into.problems.append(Problem("E061", what, f"--{name} 1"))
    return None
