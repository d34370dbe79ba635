"""Modules that train whole beside adapters, as the head of a classifier: `modules_to_save` of PEFT."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from shoal.blueprint.placement import is_inside
from shoal.errors import Problem, nearest
from shoal.parallel.lora.layers import is_adapter

CLASSIFIERS = "Classification|QuestionAnswering|MultipleChoice|Regression"
"""In the name of a class of transformers: it has a head that begins with random weights."""
HEADS = ("classifier", "score", "qa_outputs")
"""Names of such heads, where the model without its head has no name."""
ATTRIBUTE = "lora_modules_to_save"
"""Of a model: the full names of the modules that train whole."""


def is_classifier(model: Any) -> bool:
    """Whether a model of transformers has a head that no pretraining has made: the base's weights do not include it."""
    return hasattr(model, "base_model_prefix") and re.search(CLASSIFIERS, type(model).__name__) is not None


def heads_of(model: Any) -> tuple[str, ...]:
    """The children of a classifier that are not the pretrained model inside of it."""
    if not is_classifier(model):
        return ()
    inside = getattr(model, model.base_model_prefix, None)
    children = {name: one for name, one in model.named_children() if next(one.parameters(), None) is not None}
    if isinstance(inside, nn.Module) and inside is not model:
        return tuple(name for name, one in children.items() if one is not inside)
    return tuple(name for name in children if name in HEADS)


def saved_with(model: nn.Module) -> tuple[str, ...]:
    """The full names of the modules of a model that train whole."""
    found: tuple[str, ...] = getattr(model, ATTRIBUTE, ())
    return found


def choose(model: nn.Module, names: Sequence[str] | None) -> tuple[str, ...]:
    """The full names of the modules that train whole; the outermost, where one is inside of another. `names`: last
    parts of them; None: the head of a classifier."""
    if names is None:
        return heads_of(model)
    found = [name for name, _ in model.named_modules() if any(name == one or name.endswith(f".{one}") for one in names)]
    return tuple(name for name in found if not is_inside(name, [other for other in found if other != name]))


def check_whole(model: nn.Module, names: Sequence[str] | None) -> Iterator[Problem]:
    """Problems of the names of modules that train whole."""
    if names is None:
        if is_classifier(model) and not heads_of(model):
            what = f"LoRA would freeze the head of {type(model).__name__}, which begins with random weights"
            yield Problem("L008", what, "modules_to_save=[...] with the names of its modules")
        return
    if isinstance(names, str):
        fix = f"modules_to_save=[{names!r}]"
        yield Problem("L009", f"modules_to_save must be a list of names, got the text {names!r}", fix)
        return
    known = dict.fromkeys(name.rpartition(".")[2] for name, one in model.named_modules() if name and _has_any(one))
    for name in names:
        found = [one for full, one in model.named_modules() if full == name or full.endswith(f".{name}")]
        if not name or not any(map(_has_any, found)):
            what = f"modules_to_save must name modules with parameters, got {name!r}"
            near = nearest(name, list(known)) or ", ".join(name for name in list(known)[-4:])
            yield Problem("L009", what, f"modules_to_save of {near}")
    yield from _shared(model, choose(model, names))


def _shared(model: nn.Module, chosen: Sequence[str]) -> Iterator[Problem]:
    """A weight with two names would be trained under both, where PEFT trains a copy of one."""
    every = list(model.named_parameters(remove_duplicate=False))
    uses = Counter(parameter for _, parameter in every)
    for name, parameter in every:
        if uses[parameter] > 1 and is_inside(name, chosen):
            yield Problem(
                "L017",
                f"modules_to_save must hold weights of their own, and {name} has a second name",
                "model.config.tie_word_embeddings = False before the model is built, or modules_to_save without it",
            )


def _has_any(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def peft_settings(model: Any) -> dict[str, Any]:
    """Settings of PEFT that follow from a whole model; `others`: trained parameters that no setting names."""
    whole = saved_with(model)
    trained = (name for name, parameter in model.named_parameters() if parameter.requires_grad)
    others = [name for name in trained if not is_adapter(name) and not is_inside(name, whole)]
    settings = {"modules_to_save": list(whole), "task_type": _task_of(model)}
    return {**settings, "others": others} if others else settings


TASKS = {
    "ForCausalLM$|LMHeadModel$": "CAUSAL_LM",
    "ForSequenceClassification$": "SEQ_CLS",
    "ForTokenClassification$": "TOKEN_CLS",
    "ForQuestionAnswering$": "QUESTION_ANS",
}
"""In the name of a class of transformers → what PEFT calls its task."""


def _task_of(model: Any) -> str | None:
    """PEFT's class for other tasks than these takes any model: None."""
    kind = type(model).__name__
    if not hasattr(model, "base_model_prefix"):  # a model of shoal is one of transformers in a folder
        describe = getattr(model, "describe", None)
        return "CAUSAL_LM" if callable(describe) and getattr(describe(), "head", None) else None
    if kind.endswith("ForConditionalGeneration") and getattr(model.config, "is_encoder_decoder", False):
        return "SEQ_2_SEQ_LM"
    return next((task for pattern, task in TASKS.items() if re.search(pattern, kind)), None)
