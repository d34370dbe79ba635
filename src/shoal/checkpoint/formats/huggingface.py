"""Hugging Face folders: safetensors files, the index of several, and the configuration of a llama.

    model-00001-of-00002.safetensors    or model.safetensors, if there is one
    model-00002-of-00002.safetensors
    model.safetensors.index.json        the file of each tensor
    config.json                         the model's configuration

Shoal's llama has the modules, their names and the rotary pairs of `transformers.LlamaForCausalLM`. So tensors are
copied unchanged, and only the configuration is translated.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from shoal.checkpoint.formats import safetensors
from shoal.checkpoint.formats.lazy_tensor import LazyTensor
from shoal.checkpoint.storage.filesystem import Filesystem
from shoal.errors import Problem, ShoalError, raise_if
from shoal.files import read_regular

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
MOST_JSON = 256 * 2**20

WORDS = {
    "vocabulary": "vocab_size",
    "hidden": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "max_sequence": "max_position_embeddings",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
    "init_std": "initializer_range",
}
"""shoal's name of a llama setting → Hugging Face's name."""

ROPE_WORDS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"rope_factor": "factor"},
    "llama3": {
        **{"rope_factor": "factor", "rope_original": "original_max_position_embeddings"},
        **{"rope_low_freq": "low_freq_factor", "rope_high_freq": "high_freq_factor"},
    },
    "yarn": {
        **{"rope_factor": "factor", "rope_original": "original_max_position_embeddings"},
        **{"rope_beta_fast": "beta_fast", "rope_beta_slow": "beta_slow", "rope_attention": "attention_factor"},
    },
}
"""Type of rotary positions → shoal's name of each of its settings → Hugging Face's name in `rope_parameters`."""
ROPE_NEEDS = {
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_IN_ALL_ROPES = {"rope_type", "type", "rope_theta", "truncate"}

DEFAULTS = {
    "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "intermediate_size": 11008, "max_position_embeddings": 2048, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "initializer_range": 0.02,
}  # fmt: skip
"""Defaults of a llama's config.json."""

COPIED = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json"),
    *("added_tokens.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "chat_template.jinja"),
    "preprocessor_config.json",
)
"""Files of a folder that an export copies from the folder that training began with."""

DTYPE_WORDS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


@dataclasses.dataclass(frozen=True)
class Extra:
    """What a folder has beside tensors."""

    config: Mapping[str, Any] | None = None
    copies: tuple[Path, ...] = ()


def write(
    folder: Path,
    tensors: Mapping[str, LazyTensor],
    disk: Filesystem,
    progress: Callable[[int], None],
    *,
    shard_bytes: float,
    extra: Extra,
) -> list[str]:
    """Write a folder; return the names of its files."""
    groups = split(tensors, shard_bytes)
    names = [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    names = names if len(groups) > 1 else [SINGLE]
    for name, group in zip(names, groups, strict=True):
        safetensors.write(folder / name, {key: tensors[key] for key in group}, disk, progress, format="pt")
    texts: dict[str, Any] = {}
    copies = {path.name: _content(path) for path in extra.copies}
    if len(groups) > 1:
        total = sum(tensor.num_bytes for tensor in tensors.values())
        where = {key: name for name, group in zip(names, groups, strict=True) for key in group}
        texts[INDEX] = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    if extra.config is not None:
        texts[CONFIG] = extra.config
    copies |= {name: (json.dumps(text, indent=2) + "\n").encode() for name, text in texts.items()}
    for name, data in copies.items():
        with safetensors.new_file(folder / name, disk) as file:
            disk.write(file, data)
    return [*names, *copies]


def _content(path: Path) -> bytes:
    data = read_regular(path, MOST_JSON)
    if len(data) > MOST_JSON:
        raise ShoalError(f"{path} must have at most {MOST_JSON:,} bytes", fix=f"mv {path} elsewhere", code="C043")
    return data


def split(tensors: Mapping[str, LazyTensor], most_bytes: float) -> list[list[str]]:
    """Group tensors into files, in their order; one that is too large has its own file."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if groups[-1] and size + tensor.num_bytes > most_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += tensor.num_bytes
    return groups


def read(folder: Path) -> dict[str, LazyTensor]:
    """Return the tensors of a folder, from the files that its index names, or from all there are."""
    if (folder / INDEX).is_file():
        where = read_json(folder / INDEX).get("weight_map")
        if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
            raise ShoalError(
                f"{folder / INDEX} must have a weight_map, got none", fix="the index that was written", code="C041"
            )
        for name in where.values():
            if not _PLAIN_NAME.fullmatch(name):
                raise ShoalError(
                    f"{folder / INDEX} names a file {name[:80]!r}", fix="plain names, without a path", code="C041"
                )
        raise_if(
            Problem(
                "C041", f"{folder / INDEX} names the file {name}, which is not there", "the files that were written"
            )
            for name in sorted(set(where.values()))
            if not (folder / name).exists()
        )
        files = {name: safetensors.read(folder / name) for name in sorted(set(where.values()))}
        raise_if(
            Problem("C041", f"{name} is not in {file}, where {INDEX} lists it", "the files that were written")
            for name, file in where.items()
            if name not in files[file]
        )
        return {name: files[file][name] for name, file in where.items()}
    paths = [folder / SINGLE] if (folder / SINGLE).is_file() else sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ShoalError(
            f"there are no safetensors in {folder}", fix=f"a folder with {SINGLE}, or {INDEX}", code="C042"
        )
    found: dict[str, LazyTensor] = {}
    for path in paths:
        read = safetensors.read(path)
        if twice := sorted(found.keys() & read.keys()):
            raise ShoalError(
                f"{twice[0]} is in {path.name} and in another file", fix=f"add an {INDEX} that lists files", code="C041"
            )
        found.update(read)
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file."""
    try:
        text = read_regular(path, MOST_JSON)
        found = json.loads(text) if len(text) <= MOST_JSON else None
    except OSError as error:
        raise ShoalError(f"{path} cannot be read: {error.strerror}", fix=f"chmod u+r {path}", code="C034") from error
    except (ValueError, RecursionError) as error:
        raise ShoalError(f"{path} is not JSON: {error}", fix="the file as it was written", code="C043") from None
    if not isinstance(found, dict):
        raise ShoalError(f"{path} must be a JSON object", fix="the file as it was written", code="C043")
    return found


# ---- the configuration of a llama -----------------------------------------------------------------------------------


def for_export(model: Mapping[str, Any], tensors: Mapping[str, LazyTensor]) -> tuple[dict[str, LazyTensor], Extra]:
    """Return the tensors under the names of a folder, and what else belongs there, for a recipe's model section."""
    exporters: Mapping[str, str] = import_module("shoal.models").EXPORTERS
    for prefix, place in exporters.items():
        if str(model.get("name")).startswith(prefix):
            module_name, _, function = place.partition(":")
            found: tuple[dict[str, LazyTensor], Extra] = getattr(import_module(module_name), function)(model, tensors)
            return found
    return dict(tensors), Extra(config_of(model, tensors))


def dtype_word(tensors: Mapping[str, LazyTensor]) -> str:
    """Return the dtype of most tensors, as a config.json names it."""
    dtypes = [tensor.dtype for tensor in tensors.values()]
    return DTYPE_WORDS.get(max(set(dtypes), key=dtypes.count), "float32")


def config_of(model: Mapping[str, Any], tensors: Mapping[str, LazyTensor]) -> dict[str, Any] | None:
    """Return the `config.json` of a recipe's model section; None if it is not a llama."""
    if model.get("name") != "llama":
        return None
    arguments = {key: value for key, value in model.items() if key != "name" and value is not None}
    known = import_module("shoal.models.llama_config")
    llama = known.build_config("llama", known.PRESETS, known.LlamaConfig(), arguments)
    said = dataclasses.asdict(llama)
    _reject_other_architecture(said, tensors)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{theirs: said[ours] for ours, theirs in WORDS.items()},
        "head_dim": llama.dim_of_head,
        "rope_parameters": _rope_parameters(said),
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "use_cache": True,
        "torch_dtype": dtype_word(tensors),
    }


def _reject_other_architecture(said: Mapping[str, Any], tensors: Mapping[str, LazyTensor]) -> None:
    layers = {name.split(".")[2] for name in tensors if name.startswith("model.layers.")}
    embedding = tensors.get("model.embed_tokens.weight")
    there = (list(embedding.shape) if embedding else None, len(layers), "lm_head.weight" not in tensors)
    wanted = ([said["vocabulary"], said["hidden"]], said["num_layers"], said["tied"])
    if there != wanted:
        words = "an embedding of {}, {} layers and {} head"
        one, other = (words.format(e, n, "a tied" if tied else "an own") for e, n, tied in (there, wanted))
        raise ShoalError(
            f"the recipe must describe the checkpoint's model, {one}, got {other}",
            fix="--recipe RECIPE, with the recipe that the checkpoint was trained with",
            code="C044",
        )


def model_of(config: Mapping[str, Any], path: Path) -> dict[str, Any] | None:
    """Return the model section of a recipe for a `config.json`; None if it is not a llama. Raises for a llama that
    shoal's llama does not support."""
    if config.get("model_type") != "llama":
        return None
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or rope
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    others = (
        (kind not in ROPE_WORDS, f"rotary positions of the type {kind!r}"),
        (bool(_unread_rope(scaling, kind)), f"rotary positions with {' and '.join(_unread_rope(scaling, kind))}"),
        (config.get("attention_bias", False), "biases in its attention"),
        (config.get("mlp_bias", False), "biases in its feed-forward"),
        (config.get("hidden_act", "silu") != "silu", f"the activation {config.get('hidden_act')!r}"),
    )
    fix = "--format safetensors, which imports the tensors alone, for a model of your own"
    raise_if(
        [Problem("C045", f"{path} has {what}, which shoal's llama does not support", fix) for is_so, what in others
         if is_so]
    )  # fmt: skip
    values = {**DEFAULTS, **rope, **{key: value for key, value in config.items() if value is not None}}
    values.setdefault("num_key_value_heads", values["num_attention_heads"])
    found = {"name": "llama", **{ours: values[theirs] for ours, theirs in WORDS.items() if theirs in values}}
    if kind == "default":
        return found
    missing = [theirs for theirs in ROPE_NEEDS[kind] if scaling.get(theirs, values.get(theirs)) is None]
    if missing:
        what = f"{path}: rotary positions of the type {kind!r} must have {' and '.join(missing)}"
        raise ShoalError(what, fix="the config.json as save_pretrained writes it", code="C045")
    rope = {ours: scaling.get(theirs, config.get(theirs)) for ours, theirs in ROPE_WORDS[kind].items()}
    return {**found, "rope_type": kind, **{ours: value for ours, value in rope.items() if value is not None}}


def _unread_rope(scaling: Mapping[str, Any], kind: str) -> list[str]:
    """Keys of rotary positions that would change them, and are not read."""
    known = {*_IN_ALL_ROPES, *ROPE_WORDS.get(kind, {}).values()}
    unread = {key: value for key, value in scaling.items() if key not in known and value is not None}
    harmless = {"finetuned": None, "partial_rotary_factor": 1.0}
    unread = {key: value for key, value in unread.items() if key not in harmless or value not in (harmless[key], True)}
    return [] if kind == "default" else [*sorted(unread), *(["truncate false"] * (scaling.get("truncate") is False))]


def _rope_parameters(said: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary positions of a llama, as a config.json has them."""
    kind = said["rope_type"]
    own = {theirs: said[ours] for ours, theirs in ROPE_WORDS[kind].items() if said[ours] is not None}
    return {"rope_type": kind, "rope_theta": said["rope_theta"], **own}


def without_copies(tensors: Mapping[str, LazyTensor], model: Mapping[str, Any]) -> dict[str, LazyTensor]:
    """Drop tensors that shoal's llama does not have: the second name of a tied embedding, tables of rotary angles."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not name.endswith("rotary_emb.inv_freq") and not (model["tied"] and name == "lm_head.weight")
    }
