"""bf16, fp16, torch_autocast and the loss scale."""

from __future__ import annotations

from shoal.config.deepspeed.translation import Reader
from shoal.errors import Problem

STAY_WIDE = "weights stay in float32 and are cast for each product; DeepSpeed keeps a second copy in 16 bits"


def translate_precision(reader: Reader) -> None:
    """The section that is enabled becomes the word of a plan."""
    enabled = {}
    for key in ("bf16", "bfloat16", "fp16", "torch_autocast", "amp"):
        section = reader.section(key)
        if section is None:
            continue
        is_enabled = section.flag("enabled")
        section.seen.add("enabled")
        enabled[key] = is_enabled
        is_open = section.values.get("enabled") == "auto"
        _SECTIONS[key](section, bool(is_enabled) or is_open)
        section.finish()
    chosen = [key for key, is_enabled in enabled.items() if is_enabled]
    if len(chosen) > 1:
        what = f"{' and '.join(chosen)} are both enabled, and a run has one precision"
        reader.into.problems.append(Problem("E011", what, f'"{chosen[1]}": {{"enabled": false}}'))
    if enabled and not chosen and all(one is False for one in enabled.values()):
        reader.into.plan["precision"] = "fp32"


def _bf16(section: Reader, is_enabled: bool) -> None:
    if section.values.get("enabled") is True:
        section.plan("enabled", "precision", "bf16", STAY_WIDE)
    elif section.has("enabled"):
        section.same("enabled", "fp32 unless another precision is enabled")
    section.no_effect("immediate_grad_update", "an internal of DeepSpeed")
    checks = section.flag("check_grad_overflow")
    if section.into.target != "initialize":
        section.no_effect("check_grad_overflow", "--run.on_nan stop, skip or ignore decides")
    elif checks is False and is_enabled:
        section.setting("check_grad_overflow", "run.on_nan", "stop", "a step that is not finite ends the run")
    elif checks is not None:
        section.same("check_grad_overflow", "a step that is not finite is dropped")
    if section.flag("bf16_master_weights_and_grads"):
        if section.into.target == "initialize":
            fix = "remove it; or shoal.Run('bf16', param_dtype='bf16') with shoal.AdamW"
            section.reject("bf16_master_weights_and_grads", fix)
        else:
            section.setting("bf16_master_weights_and_grads", "optim.param_dtype", "bf16", "rounded stochastically")
    if section.flag("bf16_optimizer_states"):
        if section.into.target == "initialize":
            section.reject("bf16_optimizer_states", "optimizer=shoal.AdamW(..., state_dtype='bf16')")
        else:
            section.setting("bf16_optimizer_states", "optim.state_dtype", "bf16", "rounded stochastically")


def _fp16(section: Reader, is_enabled: bool) -> None:
    if section.values.get("enabled") is True:
        section.plan("enabled", "precision", "fp16", STAY_WIDE)
    elif section.has("enabled"):
        section.same("enabled", "fp32 unless another precision is enabled")
    fixed = section.number("loss_scale")
    if fixed and is_enabled:
        fix = '"loss_scale": 0, with "initial_scale_power": 16: the scale adapts'
        section.reject("loss_scale", fix, "the loss scale of fp16 adapts")
    elif fixed == 0 and is_enabled:
        section.same("loss_scale", "the scale adapts, as here")
    for key in () if is_enabled else ("loss_scale_window", "initial_scale_power", "loss_scale"):
        if section.has(key):
            section.no_effect(key, "fp16 is not enabled")
    if is_enabled:
        _scaler(section)
    for key, why in (
        ("hysteresis", "every overflow halves the scale; DeepSpeed tolerates hysteresis - 1 of them first"),
        ("consecutive_hysteresis", "every overflow halves the scale"),
        ("min_loss_scale", "the scale does not fall below 1"),
        ("auto_cast", "inputs are cast by autocast"),
    ):
        section.no_effect(key, why)
    if section.flag("fp16_master_weights_and_grads"):
        section.reject("fp16_master_weights_and_grads", 'false; or "bf16" with --optim.param_dtype bf16')


def _scaler(section: Reader) -> None:
    """DeepSpeed doubles the scale after 1000 good steps by default, a recipe after 2000."""
    power = section.whole("initial_scale_power", least=0)
    if power is not None:
        section.setting("initial_scale_power", "optim.loss_scale", float(2 ** min(power, 64)))
    window = section.whole("loss_scale_window")
    if window is not None or section.values.get("enabled") is True:
        section.setting("loss_scale_window", "optim.loss_scale_window", 1000 if window is None else window)


def _autocast(section: Reader, is_enabled: bool) -> None:
    names = {"bfloat16": "bf16", "bf16": "bf16", "torch.bfloat16": "bf16"}
    names |= {"float16": "fp16", "fp16": "fp16", "torch.float16": "fp16", "half": "fp16"}
    dtype = section.word("dtype", names) or "bfloat16"
    section.seen |= {"dtype", "enabled"}
    if section.values.get("enabled") is True:
        section.plan("enabled", "precision", names[dtype], f"autocast to {dtype}, as here")
    section.no_effect("lower_precision_safe_modules", "autocast decides by operator")


def _amp(section: Reader, is_enabled: bool) -> None:
    if section.values.get("enabled") is True:
        section.reject("enabled", '"fp16": {"enabled": true} in place of "amp"', "it is NVIDIA's Apex")
        section.seen |= section.values.keys()
    for key in () if is_enabled else section.values:
        section.no_effect(key, "amp is NVIDIA's Apex, and is not enabled")


_SECTIONS = {"bf16": _bf16, "bfloat16": _bf16, "fp16": _fp16, "torch_autocast": _autocast, "amp": _amp}
