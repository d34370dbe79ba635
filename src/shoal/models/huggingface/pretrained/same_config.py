"""Whether the weights of another folder mean the same in a model: its config.json against that of the model.

Tensors of the same names and shapes compute something else with another base of rotary positions, another epsilon or a
window. What is set under `model:` is meant to differ, so it is set in both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shoal.checkpoint.formats.huggingface import CONFIG
from shoal.config.pretrained_folder import PREFIX
from shoal.errors import Problem, ShoalError
from shoal.models.huggingface.pretrained.folder import config_of, with_floats

IGNORED = re.compile(
    r"_.*|(transformers|\w+)_version|architectures|auto_map|model_type|(torch_)?dtype|use_bfloat16|tokenizer_class"
    r"|unsloth\w*|finetuning_task|task_specific_params|prefix|problem_type|id2label|label2id|num_labels"
    r"|use_cache|cache_implementation|use_return_dict|return_dict|output_\w+|torchscript|gradient_checkpointing"
    r"|chunk_size_feed_forward|pretraining_tp|\w*dropout\w*|\w*_pdrop|\w*drop_path\w*|\w*layerdrop|router_jitter_noise"
    r"|init_std|init_xavier_std|\w*initializer_\w+|\w*aux_loss\w*|router_z_loss\w*"
    r"|(bos|eos|pad|sep|cls|mask|unk|forced_[be]os)_token_id|apply_spec_augment|mask_(time|feature)_\w+"
    r"|do_sample|temperature|top_p|num_beams|max_length|min_length|length_penalty|early_stopping|no_repeat_ngram_size"
)
"""Keys of a config.json that do not change what weights compute: bookkeeping, dropout and losses of a training, how
weights are drawn, tokens, and how text is generated."""
UNSAID = re.compile(r"\w*ForPreTraining|(?!\w*(LMHead|DoubleHeads)Model)\w*Model")
"""Classes without a head, or with all of them: others take their weights."""
_NO_POINT = re.compile(r"(?<![\w.\"])(\d+)e(?=[-+])")
"""In JSON, a number that YAML takes for a text: 1e-06."""
NO_KEYS = ("name", "preset", "lora", "init", "trust_remote_code")
"""Keys of a model section that are not of its config."""
MOST_TYPED = 200
"""Characters of a value that a fix shows."""


class Origin(NamedTuple):
    """What a model was built from."""

    folder: Path
    config: Any
    changes: Mapping[str, Any]
    """What is set under `model:`, in place of values of the folder."""


def other_config(origin: Origin, folder: Path) -> Iterator[Problem]:
    """Problems of the config.json of a folder whose weights a model starts with."""
    if folder.resolve() != origin.folder.resolve():
        path = folder / CONFIG
        yield from _compared(
            origin, config_of(folder), str(path), f"--model.name hf:{folder}, without --run.start_from"
        )


def other_section(model: Any, theirs: Mapping[str, Any], where: str) -> Iterator[Problem]:
    """The same for a checkpoint whose recipe has this model section. A folder that is not here is not compared."""
    name, origin = str(theirs["name"]), model.origin
    is_same_name = name.removeprefix(PREFIX) == str(origin.folder)
    folder = origin.folder if is_same_name else Path(name.removeprefix(PREFIX)).expanduser()
    if not (folder / CONFIG).is_file():
        return
    changes = {key: value for key, value in theirs.items() if key not in NO_KEYS}
    if is_same_name and changes == origin.changes:
        return
    yield from _compared(origin, {**config_of(folder), **changes}, where, None)


def _compared(origin: Origin, said: Mapping[str, Any], path: str, instead: str | None) -> Iterator[Problem]:
    """Differences of a config, which is in `path`. `instead`: the settings of a model that has these weights; None: the
    keys of our own can be set."""
    here = origin.config
    there = str(said.get("model_type") or here.model_type)
    other = instead or "the model section of these weights, or --run.start_from OTHER_WEIGHTS"
    if there != here.model_type:
        what = f"the weights must be of the model_type {here.model_type!r}, as the model, got {there[:80]!r} in {path}"
        yield Problem("M087", what, other)
        return
    classes = [_class_in(names) for names in (here.architectures, said.get("architectures"))]
    if None not in classes and classes[0] != classes[1]:
        yield Problem("M087", f"the weights must be of a {classes[0]}, as the model, got {classes[1]} in {path}", other)
        return
    made = _made(type(here), said, origin.changes, path)
    ours, theirs = here.to_dict(), made.to_dict()
    for key, value, wanted in _differences(ours, theirs):
        top = key.partition(".")[0]
        fix = instead or _flag(top, theirs) or other
        meant = _flag(top, ours)
        yield Problem(
            "C051",
            f"model.{key} must be {_shown(wanted)}, as in {path}, got {_shown(value)}",
            fix + (f"; or, if ours is meant, {meant}" if meant else ""),
        )


def _made(kind: Any, said: Mapping[str, Any], changes: Mapping[str, Any], path: str) -> Any:
    try:
        return kind.from_dict(with_floats({**said, **changes}))
    except Exception as error:  # of the class, for values that it does not expect
        reason = str(error).strip().partition("\n")[0][:200]
        raise ShoalError(
            f"{path} is no config of a {kind.model_type}: {type(error).__name__}: {reason}",
            fix="the config.json as save_pretrained writes it",
            code="M073",
        ) from error


def _class_in(names: Any) -> str | None:
    """The class that a config names; None: it names none, or one whose weights others take."""
    name = names[0] if isinstance(names, list) and names else None
    return name if isinstance(name, str) and not UNSAID.fullmatch(name) else None


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Key, our value and theirs, of all that differ; keys of configs inside have dots."""
    has_type = "rope_type" in ours and "rope_type" in theirs  # older files have it as `type`, too
    for key in sorted({*map(str, ours), *map(str, theirs)}):
        value, other = _plain(ours.get(key)), _plain(theirs.get(key))
        is_off = key not in (ours.keys() & theirs.keys()) and not value and not other  # in one file, and false there
        if IGNORED.fullmatch(key) or value == other or is_off or (key == "type" and has_type):
            continue
        if isinstance(value, dict) and isinstance(other, dict):
            yield from ((f"{key}.{inner}", *pair) for inner, *pair in _differences(value, other))
        else:
            yield key, value, other


def _plain(value: Any) -> Any:
    """Without differences that JSON does not have."""
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)[:80]


def _flag(key: str, settings: Mapping[str, Any]) -> str:
    """How to set a value; empty for a key that the config has not, and for a config inside."""
    value = settings.get(key)
    if key not in settings:
        return ""
    typed = _NO_POINT.sub(r"\1.0e", json.dumps(value, default=str))
    has_none = "Infinity" in typed or "NaN" in typed  # no YAML
    if len(typed) > MOST_TYPED or has_none or (isinstance(value, dict) and "model_type" in value):
        return ""
    quoted = f"'{typed}'" if isinstance(value, dict | list | tuple) else typed
    return f"--model.{key} {quoted}"
