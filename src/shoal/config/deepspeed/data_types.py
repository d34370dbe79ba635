"""`data_types`: in which precision DeepSpeed sums gradients and keeps weights and buffers.

At stage 0 in bf16 DeepSpeed rounds sums of gradients to bfloat16 and rejects `grad_accum_dtype` "fp32". An engine
rounds them too, unless the config has it.
"""

from __future__ import annotations

from shoal.config.deepspeed.translation import Reader
from shoal.errors import Problem

IN_FLOAT32 = "gradients are summed in float32 over microbatches and ranks"
DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
}
"""A dtype as DeepSpeed spells it → as a plan does."""


def translate_data_types(reader: Reader) -> None:
    """After precision and ZeRO are known."""
    weights = _weights(reader)
    section = reader.section("data_types") or Reader({}, reader.into, "data_types.")
    sums = section.word("grad_accum_dtype", DTYPES)
    wide = sums is not None and DTYPES[sums] == "fp32"
    is_engine = reader.into.target == "initialize"
    if is_engine and weights == "bf16" and not reader.into.plan.get("zero") and not wide:
        reader.into.rounds_gradients = True
        section.same("grad_accum_dtype", 'rounded to bfloat16, as DeepSpeed does at stage 0, unless it is "fp32"')
    elif sums is not None:
        section.same("grad_accum_dtype", IN_FLOAT32 if wide else f"no effect here: {IN_FLOAT32}")
    own = section.word("param_dtype", DTYPES)
    if own is not None and weights is not None and DTYPES[own] != weights:
        what = f"data_types.param_dtype is {own!r}, and the precision of the config is {weights}"
        reader.into.problems.append(Problem("E011", what, f'"param_dtype": "{weights}"; or remove it'))
    buffers = section.word("buffer_dtype", DTYPES)
    if buffers is not None and DTYPES[buffers] != "fp32":
        section.reject("buffer_dtype", "remove it; buffers keep the dtype that the model gives them")
    section.seen.add("keep_in_fp32_modules")  # buffers keep their dtype; its "auto" is not that of a Trainer
    section.finish()


def _weights(reader: Reader) -> str | None:
    """The precision of DeepSpeed's weights; None: it is open."""
    sections = [(key, reader.values.get(key)) for key in ("bf16", "bfloat16", "fp16")]
    said = {key: section.get("enabled") for key, section in sections if isinstance(section, dict)}
    if "auto" in said.values():
        return None
    return next((DTYPES[key] for key, enabled in said.items() if enabled is True), "fp32")
