"""From the arguments of Megatron-LM to the words of a plan and the options of `shoal plan`; all problems at once."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from shoal.config.deepspeed.translation import Line, Translation
from shoal.config.megatron.flags import (
    NO_EFFECT,
    OWN_FSDP,
    REJECTED,
    REQUEST,
    STRATEGIES,
    STRENGTH,
    SWITCHES,
    WHOLE,
    WORDS,
)
from shoal.config.megatron.model import OF_MODEL, SWITCHES_OF_MODEL, read_model
from shoal.errors import Problem, nearest

STRATEGY = "data-parallel-sharding-strategy"
SPECIAL = (
    STRATEGY,
    *OWN_FSDP,
    "num-layers-per-virtual-pipeline-stage",
    "recompute-method",
    "recompute-num-layers",
    "expert-tensor-parallel-size",
)
KNOWN = (*WHOLE, *SWITCHES, *WORDS, *REQUEST, *REJECTED, *NO_EFFECT, *SPECIAL, *OF_MODEL)


def translate_megatron(text: str, *, num_ranks: int | None = None) -> Translation:
    """Translate a command line. Options of `shoal plan` are in `settings`, without a dot; `num_ranks` None: unknown."""
    into = Translation("plan", plan={"tp": 1, "pp": 1, "cp": 1})
    given: dict[str, list[str]] = {}
    for flag, values in _arguments(text, into):
        if flag in given:
            what = f"--{flag} is given twice: {' '.join(given[flag])} and {' '.join(values)}"
            into.problems.append(Problem("E061", what, f"--{flag} once"))
        given[flag] = values
        _one(flag, values, into)
    read_model(given, into)
    _precision(given, into)
    _sharding(given, into)
    _stages(given, into)
    _recomputed(given, into)
    _batch(into, num_ranks)
    into.lines = [_as_it_is(line, into) for line in into.lines]
    return into


def _arguments(text: str, into: Translation) -> Iterator[tuple[str, list[str]]]:
    """Flags with their values, without the dashes. A launcher and a script before them are left out."""
    try:
        words = shlex.split(re.sub(r"\\\r?\n", " ", text))  # lines that are continued
    except ValueError as error:
        into.problems.append(Problem("E061", f"--megatron cannot be read: {error}", "close the quotes"))
        return
    words = _after_script(words)
    if not words and text.strip():
        what = f"--megatron has no argument of Megatron-LM, got {text.strip()[:80]!r}"
        into.problems.append(Problem("E061", what, '--megatron "--tensor-model-parallel-size 2 --num-layers 32"'))
    while words:
        flag, equals, value = words.pop(0).removeprefix("--").partition("=")
        values = [value] if equals else []
        while words and not words[0].startswith("--"):
            values.append(words.pop(0))
        yield flag.replace("_", "-") if flag.replace("_", "-") in KNOWN else flag, values


def _after_script(words: list[str]) -> list[str]:
    """The words from the first flag on. torchrun's own flags, before the script, are none of Megatron-LM."""
    script = next((place for place, word in enumerate(words) if word.endswith(".py")), 0)
    if any(word.startswith("--") and _name(word) in KNOWN for word in words[:script]):
        script = 0  # it is a value
    first = next((place for place in range(script, len(words)) if words[place].startswith("--")), len(words))
    return words[first:]


def _name(word: str) -> str:
    return word.removeprefix("--").partition("=")[0].replace("_", "-")


def _one(flag: str, values: list[str], into: Translation) -> None:
    """What becomes of one argument."""
    if flag in WHOLE or flag in REQUEST:
        if (number := _whole(flag, values, into)) is not None:
            _take_number(flag, number, into)
    elif values and flag in (*SWITCHES, *SWITCHES_OF_MODEL, *OWN_FSDP):
        what = f"--{flag} takes no value, and is on by being there, got {' '.join(values)[:80]}"
        into.problems.append(Problem("E061", what, f"--{flag} alone, or leave it out"))
    elif flag in SWITCHES:
        _take_word(flag, None, *SWITCHES[flag], into)
    elif flag in WORDS:
        _word(flag, values, into)
    elif flag in REJECTED:
        what = f"--{flag} {' '.join(values)}".rstrip() + " has no counterpart in a plan of shoal"
        into.problems.append(Problem("E062", what, REJECTED[flag]))
    elif flag in NO_EFFECT:
        into.lines.append(Line(f"--{flag}", " ".join(values) or None, "", f"no effect here: {NO_EFFECT[flag]}"))
    elif flag not in SPECIAL and flag not in OF_MODEL:
        near = nearest(flag, KNOWN)
        fix = f"--{near}" if near else f"leave --{flag} out, if it changes neither parallelism nor batch nor precision"
        into.problems.append(Problem("E060", f"shoal does not know --{flag} of Megatron-LM", fix))


def _take_number(flag: str, number: int, into: Translation) -> None:
    if flag in WHOLE:
        into.plan[WHOLE[flag]] = number
        into.lines.append(Line(f"--{flag}", number, f"--plan.{WHOLE[flag]} {number}"))
    else:  # a vocabulary with padding is the larger of two
        into.settings[REQUEST[flag]] = max(number, into.settings.get(REQUEST[flag], 1))
        into.lines.append(Line(f"--{flag}", number, f"--{REQUEST[flag].replace('_', '-')} {number}"))


def _typed(value: object) -> str:
    return "on" if value is True else str(value)


def _whole(flag: str, values: list[str], into: Translation) -> int | None:
    text = " ".join(values)
    if text.isdecimal() and 1 <= int(text) < 2**40:
        return int(text)
    what = f"--{flag} must be a whole number of at least 1, got {text[:80] or 'nothing'}"
    into.problems.append(Problem("E061", what, f"--{flag} 1"))
    return None


def _word(flag: str, values: list[str], into: Translation) -> None:
    known, text = WORDS[flag], " ".join(dict.fromkeys(values))
    if text not in known:
        fix = f"--{flag} {nearest(text, known) or next(iter(known))}"
        into.problems.append(Problem("E062", f"--{flag} {text[:80]} has no counterpart in a plan of shoal", fix))
        return
    _take_word(flag, text, *known[text], into)


def _take_word(flag: str, text: str | None, key: str, value: Any, into: Translation) -> None:
    """Set a word of the plan, unless another argument has set it to a stronger value."""
    is_shared = key in STRENGTH and key in into.plan
    into.plan[key] = max(into.plan[key], value, key=STRENGTH[key].index) if is_shared else value
    into.lines.append(Line(f"--{flag}", text, f"--plan.{key} {_typed(value)}"))


def _as_it_is(line: Line, into: Translation) -> Line:
    """The line, or one that says which word holds in place of its own."""
    setting, _, value = line.flag.partition(" ")
    key = setting.removeprefix("--plan.")
    if setting == key or _typed(into.plan[key]) == value:
        return line
    return replace(line, flag="", remark=f"--plan.{key} {_typed(into.plan[key])}, by another argument")


def _precision(given: dict[str, list[str]], into: Translation) -> None:
    """Weights have one precision of 16 bits."""
    if "bf16" in given and "fp16" in given:
        into.problems.append(Problem("E061", "--bf16 and --fp16 exclude each other", "--bf16"))


def _sharding(given: dict[str, list[str]], into: Translation) -> None:
    """Copies on all ranks, unless an argument shards something."""
    _own_fsdp(given, into)
    if "use-torch-fsdp2" in given and "torch-fsdp2-no-reshard-after-forward" in given:
        into.plan["zero"] = 2
    zero = into.plan.setdefault("zero", 0)
    into.plan.setdefault("precision", "fp32")
    if zero:
        into.plan.setdefault("dp_replicate", 1)
    elif (into.plan.get("ep") or 1) == 1:
        into.plan["dp_shard"] = 1


def _own_fsdp(given: dict[str, list[str]], into: Translation) -> None:
    """Megatron-FSDP has the last word on what is sharded. Its strategy has no effect without it."""
    own, text = next((name for name in OWN_FSDP if name in given), None), " ".join(given.get(STRATEGY, []))
    if STRATEGY in given and text not in STRATEGIES:
        fix = f"--{STRATEGY} {nearest(text, STRATEGIES) or 'optim'}"
        into.problems.append(Problem("E062", f"--{STRATEGY} {text[:80]} has no counterpart in a plan of shoal", fix))
        return
    if own is None:
        if STRATEGY in given:
            into.lines.append(Line(f"--{STRATEGY}", text, "", "no effect without --use-megatron-fsdp"))
        return
    zero = into.plan["zero"] = STRATEGIES[text or "optim_grads_params"]
    name = STRATEGY if STRATEGY in given else own
    into.lines += [Line(f"--{name}", text or None, f"--plan.zero {zero}")]
    into.lines += [Line(f"--{own}", None, "", f"--{STRATEGY} says what is sharded")] if name != own else []


def _stages(given: dict[str, list[str]], into: Translation) -> None:
    """Several stages on each rank of a pipeline, and experts under tensor parallelism."""
    pp, layers = into.plan["pp"], into.settings.get("layers")
    name = "num-layers-per-virtual-pipeline-stage"
    if name in given and (each := _whole(name, given[name], into)) is not None:
        if layers is None or layers % (pp * each):
            what = f"--{name} {each} needs --num-layers that are a multiple of {pp} x {each}, got {layers}"
            into.problems.append(Problem("E063", what, f"--num-layers {pp * each * 2}"))
        else:
            into.plan["v"] = layers // (pp * each)
            into.lines.append(Line(f"--{name}", each, f"--plan.v {into.plan['v']}"))
    if into.plan.get("v", 1) > 1:
        into.plan["schedule"] = "interleaved"
    name = "expert-tensor-parallel-size"
    if name in given and (size := _whole(name, given[name], into)) is not None:
        if size != into.plan["tp"]:
            what = f"--{name} {size} has no counterpart in a plan of shoal: experts are divided as other layers are"
            into.problems.append(Problem("E062", what, f"--{name} {into.plan['tp']}"))
        else:
            into.lines.append(Line(f"--{name}", size, "", "the same here"))


def _recomputed(given: dict[str, list[str]], into: Translation) -> None:
    """Whole blocks are computed again, all of them."""
    if "recompute" not in into.plan and "hidden" in into.settings:
        remark = "left open; Megatron-LM's default is none: --recompute none"
        into.lines.append(Line("--recompute-granularity", None, "", remark))
    number, layers = " ".join(given.get("recompute-num-layers", [])), into.settings.get("layers")
    is_part = given.get("recompute-method") == ["block"] and number != str(layers)
    if is_part:
        what = f"--recompute-method block --recompute-num-layers {number} has no counterpart in a plan of shoal"
        into.problems.append(Problem("E062", f"{what}: all blocks, or none", "--recompute-granularity full alone"))
        return
    for name in ("recompute-method", "recompute-num-layers"):
        if name in given:
            into.lines.append(Line(f"--{name}", " ".join(given[name]), "", "no effect here: each block by itself"))


def _batch(into: Translation, num_ranks: int | None) -> None:
    """The global batch is a multiple of a microbatch on every data-parallel rank; one of them, if it is not given."""
    batch, mb, plan = into.settings.get("global_batch"), into.plan.get("mb"), into.plan
    if num_ranks is None or mb is None:
        return
    ranks = max(1, num_ranks // (plan["tp"] * plan["pp"] * plan["cp"]))
    if batch is None:
        batch = into.settings["global_batch"] = mb * ranks
        remark = f"the default: a microbatch on each of {ranks} data-parallel ranks"
        into.lines.append(Line("--global-batch-size", None, f"--global-batch {batch}", remark))
    if batch % (mb * ranks):
        what = f"--global-batch-size {batch} is no multiple of --micro-batch-size {mb} x {ranks} data-parallel ranks"
        near = max(1, batch // (mb * ranks)) * mb * ranks
        into.problems.append(Problem("E063", what, f"--global-batch-size {near}"))
