"""The model of a row: a preset that its name matches, or its dimensions."""

from __future__ import annotations

import re
from dataclasses import replace

from shoal.planner.backtest.rows import Row, Unpredictable
from shoal.predict.presets.models import MODELS
from shoal.predict.workload import Workload

UNGATED = ("gpt-", "gpt3", "gpt", "mpt", "mt-nlg", "175b", "530b", "nemotron", "bert", "bloom")
ALIASES = (
    (r"deepseek.?v3", "deepseek-v3"),
    (r"deepseek.?v2.?lite", "deepseek-v2-lite"),
    (r"qwen3.*235b", "qwen3-235b-a22b"),
    (r"qwen3.*30b", "qwen3-30b-a3b"),
    (r"gpt.?oss.*120b", "gpt-oss-120b"),
    (r"gpt.?oss.*20b", "gpt-oss-20b"),
    (r"mixtral.?8x7b", "mixtral-8x7b"),
    (r"mixtral.?8x22b", "mixtral-8x22b"),
    (r"llama.?3.*405b", "llama3-405b"),
    (r"llama.?3.*70b", "llama3-70b"),
    (r"llama.?3.*8b", "llama3-8b"),
    (r"llama.?2.*70b", "llama2-70b"),
    (r"llama.?2.*13b", "llama2-13b"),
    (r"llama.?2.*7b", "llama2-7b"),
    (r"^gpt.?3.?175b", "gpt3-175b"),
    (r"qwen2.5.*7b", "qwen2.5-7b"),
)
"""Names that tables use → presets."""


UNSUPPORTED_MODELS = (
    "nemotron_3",
    "nemotron v3",
    "hybrid",
    "mamba",
    "kimi",
    "vlm",
    "t5",
    "bert",
    "llava",
    "grpo",
    "distill",
)


def workload_of(row: Row) -> Workload:
    """The model of a row: a preset by its name, else its dimensions."""
    name = row.text("model").lower()
    if "lora" in name:
        raise Unpredictable("LoRA trains few parameters; only full training is predicted")
    if any(word in name for word in UNSUPPORTED_MODELS):
        raise Unpredictable(f"{row.text('model')} is not the training of a plain decoder")
    for pattern, preset_name in ALIASES:
        if re.search(pattern, name) and _agrees(row, MODELS[preset_name]):
            return MODELS[preset_name]
    return _of_dimensions(row, name)


def _agrees(row: Row, workload: Workload) -> bool:
    """Whether no published dimension of a row contradicts a preset."""
    dimensions = {"layers": workload.layers, "hidden": workload.hidden, "heads": workload.heads}
    return all(row.whole(column) in (None, number) for column, number in dimensions.items())


def _of_dimensions(row: Row, name: str) -> Workload:
    dimensions = {key: row.whole(key) for key in ("layers", "hidden", "heads")}
    dimensions |= _inferred(row, dimensions)
    missing = [key for key, value in dimensions.items() if not value]
    if missing:
        raise Unpredictable(f"{', '.join(missing)} not published")
    notes = row.text("notes")
    experts = _noted(notes, "num-experts")
    if (row.whole("ep") or 1) > 1 and not experts:
        raise Unpredictable("the number of experts is not published")
    gated = not any(word in name for word in UNGATED)
    if "swiglu=" in notes:
        gated = "swiglu=True" in notes
    tied = not gated
    if "untied=" in notes:
        tied = "untied=False" in notes
    vocabulary = row.whole("vocab") or (51200 if "vtrain" in row.text("source").lower() else 50304)
    top_k = 0
    if experts:
        found = re.search(r"top(\d)", name)
        top_k = int(found[1]) if found else 1 if "parallel" in name else 2
    ffn = row.whole("ffn") or 4 * (dimensions["hidden"] or 0)
    workload = Workload(
        name=row.text("model"),
        layers=dimensions["layers"] or 0,
        hidden=dimensions["hidden"] or 0,
        heads=dimensions["heads"] or 0,
        kv_heads=_kv_heads(row) or dimensions["heads"] or 0,
        ffn=ffn,
        vocabulary=vocabulary,
        gated=gated,
        tied=tied,
        biases=not gated,
        positions=(row.whole("seq") or 0) if not gated else 0,
        experts=experts,
        top_k=top_k,
        expert_ffn=ffn if experts else 0,
    )
    return _nearest_size(workload, row)


def _kv_heads(row: Row) -> int | None:
    """As published. Those of the nanotron sweep are inferred from rates that were measured, and are passed over."""
    return None if "nanotron" in row.text("source") else row.whole("kv_heads")


def _inferred(row: Row, dimensions: dict[str, int | None]) -> dict[str, int | None]:
    """Layers that a number of parameters leaves no doubt about, and heads of the usual width, of a plain GPT."""
    hidden, billions, vocabulary = dimensions["hidden"], row.number("params_b"), row.whole("vocab")
    if not hidden or not billions or not vocabulary or not any(word in row.text("model").lower() for word in UNGATED):
        return {}
    layers = round((billions * 1e9 - vocabulary * hidden) / (12 * hidden**2))
    return {"layers": dimensions["layers"] or layers, "heads": dimensions["heads"] or max(1, hidden // 128)}


def _nearest_size(workload: Workload, row: Row) -> Workload:
    """Infer gate and tied head from the number of parameters, where the row does not say."""
    billions = row.number("params_b")
    if not billions or workload.experts or "untied=" in row.text("notes"):
        return workload
    ways = [replace(workload, gated=gated, tied=tied) for gated in (True, False) for tied in (True, False)]
    best = min(ways, key=lambda way: abs(way.parameters / 1e9 - billions))
    off = abs(workload.parameters / 1e9 / billions - 1)
    return best if off > 0.04 and abs(best.parameters / 1e9 / billions - 1) < off / 2 else workload


def _noted(notes: str, key: str) -> int:
    found = re.search(rf"{key}=(\d+)", notes)
    return int(found[1]) if found else 0


def sequence_of(row: Row) -> int:
    """Raise: the row does not say how long its samples are."""
    raise Unpredictable("the length of sequences is not published")
