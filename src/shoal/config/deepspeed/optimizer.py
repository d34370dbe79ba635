"""`optimizer`: its type, with DeepSpeed's defaults, and its parameters.

Traps: the type Adam decays weights as AdamW does unless `adam_w_mode` is false; the weight decay is 0 by default, but
0.01 for AdamW with `torch_adam`; DeepSpeed decays every parameter, a recipe only matrices.
"""

from __future__ import annotations

from typing import Any

from shoal.config.deepspeed.translation import OptimizerChoice, Reader
from shoal.errors import Problem, nearest

NAMES = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD", "lion": "Lion"}
INSTEAD = {
    "lamb": '"AdamW"; or --optim.name lamb, which has no bounds of its trust ratio',
    "onebitadam": '"AdamW" with --plan.compress 1bit',
    "zerooneadam": '"AdamW" with --plan.compress 1bit',
    "onebitlamb": '"AdamW" with --plan.compress 1bit',
    "muon": '"AdamW"; or --optim.name muon, whose steps have another length',
    "adagrad": '"AdamW"; or optimizer=torch.optim.Adagrad(...) in a script with shoal.Run',
    "muadam": '"Adam", with learning rates of your own in param_groups of a script',
    "muadamw": '"AdamW", with learning rates of your own in param_groups of a script',
    "musgd": '"SGD", with learning rates of your own in param_groups of a script',
}
IMPLEMENTATION = ("torch_adam", "fused", "foreach", "capturable", "set_grad_none", "fp32_optimizer_states")
MATRICES = "a recipe decays matrices only, DeepSpeed every parameter"


def translate_optimizer(reader: Reader) -> None:
    """The optimizer, as settings of a recipe or as a choice for an engine."""
    section = reader.section("optimizer")
    if section is None:
        return None
    kind = section.word("type")
    section.no_effect("legacy_fusion", "an internal of DeepSpeed")
    name = (kind or "").lower()
    if kind is not None and name not in NAMES:
        near = nearest(name, NAMES)
        fix = f'"type": {INSTEAD[name]}' if name in INSTEAD else f'"type": "{NAMES.get(near or "", "AdamW")}"'
        reader.into.problems.append(Problem("E009", f"the optimizer {kind!r} of DeepSpeed has no counterpart", fix))
    params = section.section("params")
    section.seen.add("params")
    if name not in NAMES:
        return section.finish()
    params = params or Reader({}, reader.into, "optimizer.params.")
    arguments = _arguments(name, params)
    is_decoupled = name == "adamw" or params.flag("adam_w_mode") is not False
    if name in ("adam", "adamw"):
        params.seen.add("adam_w_mode")
        name = "adamw" if is_decoupled else "adam"
    for key in IMPLEMENTATION:
        params.no_effect(key, "the fastest kernels of the device")
    if params.has("max_grad_norm"):
        problem = Problem("E009", "optimizer.params.max_grad_norm is rejected by DeepSpeed", '"gradient_clipping": 1.0')
        reader.into.problems.append(problem)
    reader.into.optimizer = OptimizerChoice(name, arguments)
    if reader.into.target == "train":
        _as_settings(section, params, name, arguments)
    params.finish()
    section.finish(("type", "params"))
    return None


def _arguments(name: str, params: Reader) -> dict[str, Any]:
    """The arguments, with DeepSpeed's defaults."""
    found: dict[str, Any] = {"lr": params.number("lr"), "weight_decay": params.number("weight_decay")}
    if found["lr"] is None:
        found["lr"] = 1e-3
    if found["weight_decay"] is None:
        found["weight_decay"] = 0.01 if name == "adamw" and params.values.get("torch_adam") is True else 0.0
    if name == "sgd":
        found["momentum"] = params.number("momentum") or 0.0
        for key in ("nesterov", "dampening"):
            if params.values.get(key):
                params.reject(key, f"remove it; or optimizer=torch.optim.SGD(..., {key}=...) in a script")
            params.seen.add(key)
        return found
    found["betas"] = _betas(params, [0.9, 0.99] if name == "lion" else [0.9, 0.999])
    if name != "lion":
        eps = params.number("eps")
        found["eps"] = 1e-8 if eps is None else eps
        if params.flag("amsgrad"):
            params.reject("amsgrad", '"amsgrad": false')
        if params.flag("bias_correction") is False:
            params.reject("bias_correction", '"bias_correction": true')
        params.seen |= {"amsgrad", "bias_correction"}
    return found


def _betas(params: Reader, usual: list[float]) -> list[float]:
    value = params.values.get("betas")
    if not params.has("betas"):
        return usual
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    if not is_pair or not all(isinstance(one, int | float) and 0 <= one < 1 for one in value or ()):
        what = f"optimizer.params.betas must be two numbers from 0 to below 1, got {value!r}"
        params.into.problems.append(Problem("E005", what, '"betas": [0.9, 0.999]'))
        return usual
    return [float(one) for one in value or ()]


def _as_settings(section: Reader, params: Reader, name: str, arguments: dict[str, Any]) -> None:
    """The optimizer as settings of a recipe. Open ones (auto) stay those of the recipe."""
    if name == "adam":
        fix = '"adam_w_mode": true; or torch.optim.Adam in a script with shoal.deepspeed.initialize'
        params.reject("adam_w_mode", fix, "recipes have AdamW")
        return
    remark = "type Adam decays weights as AdamW does" if section.values.get("type", "").lower() == "adam" else ""
    section.setting("type", "optim.name", name, remark)
    for key, value in arguments.items():
        if params.values.get(key) == "auto":
            continue
        params.setting(key, f"optim.{key}", value, MATRICES if key == "weight_decay" and value else "")
