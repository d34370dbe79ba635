"""Settings that `accelerate launch` hands to Accelerate by the environment, and that no plan of shoal reads.

A config that `accelerate config` has written long ago gives them, too, so they must not be lost without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

SHARDED = {
    "ACCELERATE_USE_FSDP": "--use_fsdp",
    "ACCELERATE_USE_DEEPSPEED": "--use_deepspeed",
    "ACCELERATE_USE_MEGATRON_LM": "--use_megatron_lm",
}
"""Variable of a way to shard → the flag that sets it."""


def without_effect(environ: Mapping[str, str], *, precision: str, zero: int, compiles: bool) -> Iterator[str]:
    """Yield a sentence for each setting that differs from the plan: its precision, its stage of ZeRO."""
    mixed = environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if mixed != "no" and mixed != precision:
        yield _sentence(f"--mixed_precision {mixed}", f"the plan has {precision}", f"{mixed} in the plan")
    for variable, flag in SHARDED.items():
        if environ.get(variable, "").lower() == "true" and not zero:
            yield _sentence(flag, "the plan has zero=0", "zero=3 in the plan")
    number = environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if number != "1":
        yield _sentence(f"--gradient_accumulation_steps {number}", "it follows from batch and plan", "mb=4 in the plan")
    backend = environ.get("ACCELERATE_DYNAMO_BACKEND", "NO").lower()
    if backend != "no" and not compiles:
        yield _sentence(
            f"--dynamo_backend {backend}", "nothing is compiled", "--run.compile true; or Run(compile=True)"
        )


def _sentence(flag: str, state: str, fix: str) -> str:
    return f"accelerate launch {flag} has no effect on shoal: {state} (fix: {fix})"
