"""All presets as plain rows, for `shoal presets`: names, sizes, one line each. Nothing is imported that loads torch."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from shoal.predict.presets.clusters import DEVICES
from shoal.predict.presets.models import MODELS
from shoal.predict.workload import Workload

SOURCES = Path(__file__).parents[2] / "models"
TRAINED = {"llama": "llama_config.py", "moe": "moe_config.py", "resnet": "resnet.py", "mlp": "mlp.py"}
"""Name of a model that trains → the file of its presets."""


def presets(folder: Path | None = None) -> dict[str, list[dict[str, Any]]]:
    """Models and clusters of the planner, models that train, and the recipes in a folder.

    None: those in `recipes/` of the working directory, else those of the clone that shoal runs from.
    """
    return {"models": _models(), "clusters": _clusters(), "trained": _trained(), "recipes": _recipes(folder)}


def _models() -> list[dict[str, Any]]:
    return [
        {"name": name, "billions": round(model.parameters / 1e9, 3), "sequence": model.sequence, "about": _shape(model)}
        for name, model in MODELS.items()
    ]


def _shape(model: Workload) -> str:
    if not model.is_transformer:
        return f"{len(model.blocks)} blocks, images"
    experts = f", {model.experts} experts of which {model.top_k} per token" if model.experts else ""
    heads = f"{model.heads} heads" + (f" ({model.kv_heads} of keys)" if model.kv_heads != model.heads else "")
    return f"{model.layers} layers of {model.hidden}, {heads}{experts}, up to {model.sequence:,} tokens"


def _clusters() -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "per_node": entry.per_node,
            "memory_gib": entry.memory,
            "about": f"{entry.inside} inside a node, {entry.between} between",
        }
        for name, entry in DEVICES.items()
    ]


def _trained() -> list[dict[str, Any]]:
    found = [{"name": name, "presets": _keys(SOURCES / file)} for name, file in TRAINED.items()]
    return [*found, {"name": "hf:FOLDER", "presets": []}, {"name": "file.py:function", "presets": []}]


def model_flags(name: str) -> list[str]:
    """The flags of `shoal train` for a model of the planner; empty: it does not train by this name.

    >>> model_flags("llama3-8b"), model_flags("gpt3-175b")
    (['--model.name', 'llama', '--model.preset', 'llama3-8b'], [])
    """
    if name.startswith("hf:") or ".py:" in name:
        return ["--model.name", name]
    known = (kind for kind, file in TRAINED.items() if name in _keys(SOURCES / file))
    return next((["--model.name", kind, "--model.preset", name] for kind in known), [])


def _keys(path: Path) -> list[str]:
    """The keys of `PRESETS` in a file, which would load torch if it were imported."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        is_presets = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PRESETS"
        if is_presets and isinstance(node.value, ast.Dict):  # type: ignore[attr-defined]
            return [ast.literal_eval(key) for key in node.value.keys if key is not None]  # type: ignore[attr-defined]
    return []


def _recipes(folder: Path | None) -> list[dict[str, Any]]:
    clone = Path(__file__).parents[4] / "recipes"
    places = [Path("recipes"), clone] if folder is None else [folder]
    where = next((each for each in places if each.is_dir()), None)
    paths = sorted(where.glob("*.yaml")) if where else []
    return [{"path": str(path), "about": _first_comment(path)} for path in paths]


def _first_comment(path: Path) -> str:
    """The first sentence of a recipe's first comment."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            lines = [next(file, "") for _ in range(3)]
    except OSError:
        return ""
    text = " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))
    return text.partition(". ")[0].partition(".\n")[0].rstrip(".")[:160]
