"""Profiles of systems: shoal, and those whose published runs the planner is tested with.

`source` says what the code or the documentation of a system states. Figures of `LEARNT` that differ from the defaults
of `FrameworkProfile` are fitted by hand to all measured runs of that system together, scored by `shoal backtest
RUNS.csv`: megatron to Megatron-Core's CI; megatron-lm and deepspeed to Narayanan, Korthikanti, Smith and MegaScale;
megatron-deepspeed to BigScience and vTrain's single node; nanotron to the sweep of the Ultra-Scale Playbook;
llm-foundry, torchtitan, internevo and automodel to their own tables; nemo to Megatron-Bridge and NeMo. Those of shoal
have their measurement beside them. `shoal backtest --leave-out` predicts each system without them.
"""

from __future__ import annotations

from dataclasses import replace

from shoal.predict.framework_profile import MS, FrameworkProfile

SHOAL = FrameworkProfile(
    name="shoal",
    is_known_together=False,
    is_exact=True,
    source="docs/concepts/gpu.md, predict/exact/state_memory.py: float32 weights, autocast, memory-saving layers, "
    "fused loss",
    weight=4,
    master=0,
    gradient=4,
    gradients_come_late=True,
    bucket=64 * 2**20,  # workspaces of cuBLAS, one for each thread that launches
    keeps_buckets=True,
    receives_ahead=True,
    gathers_ends_alone=True,
    keeps_normed=False,
    keeps_product=False,
    is_memory_saving=True,
    is_compiled=True,
    fuses_experts=True,
    logits=12,  # their softmax, its gradient and their own
    fused_loss=True,
    attention_part=0.6,
    modern_attention_part=0.52,
    fp8_casts=14,  # its largest value, itself, and itself transposed
    attention_ramp=1250,  # this and those marked with [1] fit 15 runs of planner-fit_nvidia-h200_2026-11-19.md
    passes=10,
    row_passes=2,  # [1] experts read rows where they lie
    fused_experts_start=0.95 * MS,  # 7 runs of that result and of planner_nvidia-h200_2026-11-19.md
    accumulation=12,
    adapter_passes=2.9,  # [1]
    product_traffic=0.67,  # [1]
    host_part=0.4,  # beside an H200 1.6 ms for a layer whose kernels take 4 ms to launch one by one
    cut="balanced",
    optimizer_traffic=32,
    rounding=1,  # traces of the kernel: 4.9 ns for a thousand parameters, and 6.8 with moments in float32
    fixed=2 * MS,  # idle at the start of a step, in a trace
    efficiency=0.97,
)

SHOAL_EAGER = replace(
    SHOAL,
    name="shoal, eager",
    source="the same without torch.compile; kernels of one block, forward and backward, and what they touch, counted",
    is_compiled=False,
    backward_tensors=7,
    passes=43,
    ffn_passes=12,
    cast_passes=60,
    cast_ffn_passes=17,
    host_part=1.0,
    fixed=10 * MS,
    row_passes=6,
)


def shoal_profile(
    *, compile: bool = True, state_dtype: str = "fp32", param_dtype: str = "fp32", recompute_swiglu: bool = True
) -> FrameworkProfile:
    """Those of a run with `run.compile` and `run.recompute_swiglu` on or off, and moments and weights in fp32 or bf16
    (`optim.state_dtype`, `optim.param_dtype`).

    >>> shoal_profile(compile=True, state_dtype="bf16").moments
    4.0
    >>> narrow = shoal_profile(param_dtype="bf16", state_dtype="bf16")
    >>> narrow.weight, narrow.gradient, narrow.optimizer_traffic
    (2, 2, 17.0)
    """
    profile = SHOAL if compile else SHOAL_EAGER
    profile = profile if recompute_swiglu else replace(profile, keeps_product=True)
    if param_dtype == "bf16":
        profile = profile.with_bf16_weights()
    return profile.with_bf16_moments() if state_dtype == "bf16" else profile


MEGATRON = FrameworkProfile(
    name="megatron",
    selective="core",
    source="NVIDIA Megatron-Core: bf16 weights, fp32 main gradients and masters, Transformer Engine, dropout",
    bucket=0.07 * 2**30,  # workspaces of cuBLAS and masks
    dropout=True,
    splits_experts=True,
    logits=6,  # fp32 of the softmax, bf16 of the product
    modern_attention_part=0.6,
    splits_tokens=False,
)

MEGATRON_LM = FrameworkProfile(
    name="megatron-lm",
    selective="core",
    source="Narayanan et al. 2021, Korthikanti et al. 2022: eager attention, fp16, dropout, fused kernels",
    efficiency=0.95,
    attention="eager",
    dropout=True,
    splits_tokens=False,
    overlaps_gradients=False,
    logits=10,
)

DEEPSPEED = FrameworkProfile(
    name="deepspeed",
    source="Narayanan et al. 2021, section 5.2: ZeRO-3 of DeepSpeed, gathering parameter by parameter",
    attention="eager",
    dropout=True,
    selective="core",
    gradient=2,
    reduce=2,
    messages=12,
    overlaps_gathers=False,
)

MEGATRON_DEEPSPEED = FrameworkProfile(
    name="megatron-deepspeed",
    bucket=2.8 * 2**30,  # DeepSpeed's all-gather and two reduce buckets, 5e8 elements of 2 bytes each
    selective="core",
    source="BigScience: ZeRO-1 of DeepSpeed under Megatron-LM of 2021, bf16 with fp32 gradients",
    attention="eager",
    dropout=True,
    splits_tokens=False,
    overlaps_gradients=False,
    host_forward=0.85 * MS,
    host_backward=1.2 * MS,
    fixed=12 * MS,
    logits=10,
)

NANOTRON = FrameworkProfile(
    name="nanotron",
    source="huggingface/nanotron: bf16 weights, fp32 gradient accumulation, flash attention 2, no recompute",
    gradient_copy=2,
    keeps_normed=False,
    keeps_silu=True,
    fragmentation=0.4,
    pipeline_fragmentation=0.45,
    splits_tokens=True,
    logits=12,
    cut="thresholds",
    passes=8,
    ffn_passes=6,
    host_forward=0.8 * MS,
    host_backward=2.0 * MS,
    host_collective=0.16 * MS,
    host_scatter=2.2 * MS,
    crossing=0.65 * MS,
    messages=6,
    shadow=0.45,
    bucket_size=25e6,
    tp_exposed=0.65,
    fixed=16 * MS,
    efficiency=0.64,
)

LLM_FOUNDRY = FrameworkProfile(
    name="llm-foundry",
    source="mosaicml/llm-foundry: FSDP 1, ALiBi, flash attention 2, low-precision layer norm, full recompute",
    weight=4,
    master=0,
    gradients_come_late=True,
    reduce=2,
    attention_part=0.42,
    modern_attention_part=0.24,
)

TORCHTITAN = FrameworkProfile(
    name="torchtitan",
    selective="half",
    source="pytorch/torchtitan: FSDP 2, fp32 shards, compiled blocks, flash attention",
    weight=4,
    master=0,
    gradients_come_late=True,
    passes=10,
    logits=6,
)

TORCHTITAN_2024 = replace(
    TORCHTITAN,
    name="torchtitan-2024",
    source="pytorch/torchtitan before its loss was compiled: logits as bf16, as fp32, their softmax and its gradient",
    logits=14,
)

INTERNEVO = FrameworkProfile(
    name="internevo",
    source="InternLM/InternEvo: hybrid ZeRO-1, bf16 weights, flash attention, packed data",
    gradient=2,
    reduce=2,
    messages=7,
    efficiency=0.78,
)

NEMO = FrameworkProfile(
    name="nemo",
    selective="core",
    source="NVIDIA NeMo and Megatron-Bridge: Megatron-Core tuned, tp traffic overlapped",
    splits_experts=True,
    logits=6,
    modern_attention_part=0.65,
    tp_exposed=0.4,
    efficiency=0.9,
)

AUTOMODEL = FrameworkProfile(
    name="automodel",
    source="NVIDIA NeMo AutoModel: FSDP 2, Transformer Engine, DeepEP",
    weight=4,
    master=0,
    gradients_come_late=True,
    modern_attention_part=0.6,
)

PRIMUS = FrameworkProfile(name="primus", source="AMD Primus: Megatron and torchtitan backends on ROCm")

ALL = {
    profile.name: profile
    for profile in (
        SHOAL,
        SHOAL_EAGER,
        MEGATRON,
        MEGATRON_LM,
        DEEPSPEED,
        MEGATRON_DEEPSPEED,
        NANOTRON,
        LLM_FOUNDRY,
        TORCHTITAN,
        TORCHTITAN_2024,
        INTERNEVO,
        NEMO,
        AUTOMODEL,
        PRIMUS,
    )
}
"""By name."""
