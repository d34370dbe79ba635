"""Predicted peak memory: the textbook's formulas, and the activations of the schedules."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shoal.blueprint.plan import Plan
from shoal.numerics.fp8 import convert, products
from shoal.predict.cluster_parser import parse_cluster
from shoal.predict.estimate import fp8_memory
from shoal.predict.estimate import peak_memory as module
from shoal.predict.estimate.activations import kept_per_token
from shoal.predict.estimate.peak_memory import PeakMemory, peak_memory
from shoal.predict.estimate.rank_share import layers_of_stages
from shoal.predict.framework_profile import FrameworkProfile
from shoal.predict.presets.frameworks import MEGATRON_LM, SHOAL, SHOAL_EAGER, shoal_profile
from shoal.predict.presets.models import MODELS
from shoal.predict.workload import Block, Workload

GPT = MODELS["gpt3-175b"].resized(positions=0)
H200 = parse_cluster("h200:8")


LLAMA = MODELS["llama3-8b"]


def predicted(
    words: str, *, ranks: int = 8, model: str = "llama3-8b", profile: FrameworkProfile = SHOAL, **more: int
) -> PeakMemory:
    said = {"sequence": 4096, "global_batch": 64, **more}
    return peak_memory(MODELS[model], Plan.parse(words).resolve(ranks), H200, profile=profile, **said)


def test_a_classic_block_keeps_what_korthikanti_counts() -> None:
    h, a, s = 12288, 96, 2048  # bytes of a token and layer: h (34 + 5 a s / h), tp and sp divide all of it

    def kept(tp: int, *, sp: bool) -> float:
        return kept_per_token(GPT, MEGATRON_LM, tp=tp, sp=sp, sequence=s, size=2.0)

    assert kept(1, sp=False) == pytest.approx(h * (34 + 5 * a * s / h))
    assert kept(8, sp=False) == pytest.approx(h * (10 + 24 / 8 + 5 * a * s / (h * 8)))
    assert kept(8, sp=True) == pytest.approx(h * (34 + 5 * a * s / h) / 8)


def test_selective_recompute_of_megatron_forgets_the_scores() -> None:
    plain = module.recomputed(GPT, MEGATRON_LM, "selective", tp=8, sp=True, sequence=2048, size=2.0)
    assert plain == pytest.approx(34 * 12288 / 8)


def test_flash_attention_keeps_sums_instead_of_scores() -> None:
    flash = replace(MEGATRON_LM, name="flash", attention="flash")
    kept = kept_per_token(GPT, flash, tp=1, sp=False, sequence=2048, size=2.0)
    assert kept == pytest.approx(34 * 12288 + 4 * 96)


@pytest.mark.parametrize(("zero", "states"), [(0, 16), (1, 4 / 8 + 2 + 4 + 8 / 8), (2, 4 / 8 + 2 + 4 / 8 + 1), (3, 2)])
def test_states_of_shoal_are_those_of_its_sharding(zero: int, states: float) -> None:
    """float32 weights, gradients and moments; zero=1 and 2 keep a gathered bf16 copy beside the shard."""
    found = predicted(f"bf16 zero={zero} mb=1")
    assert found.states / MODELS["llama3-8b"].parameters == pytest.approx(states, rel=1e-3)


def test_gradients_of_one_microbatch_never_meet_its_activations() -> None:
    one, two = predicted("bf16 mb=8", ranks=1, global_batch=8), predicted("bf16 mb=8", ranks=1, global_batch=16)
    assert one.gradients == 0
    assert two.gradients == pytest.approx(4 * MODELS["llama3-8b"].parameters, rel=1e-3)


def test_a_fused_loss_holds_a_chunk_and_tp_holds_all_logits() -> None:
    fused, split = predicted("bf16 mb=8", ranks=1), predicted("bf16 tp=2 zero=1 mb=8", ranks=8)
    beside = 6 * LLAMA.head_parameters + 8 * 8 * 4096 * 4096  # the head's weight and gradient, and what goes into it
    assert fused.logits - beside == pytest.approx(8 * 4096 * 128256 * 2 / 4)  # as many chunks of 2 GiB at most
    assert split.logits == pytest.approx(8 * 4096 * 128256 / 2 * 8)  # exponentials, and their gradient
    staged = predicted("bf16 pp=2 zero=1 mb=8", stage=1)
    assert staged.logits == pytest.approx(8 * 4096 * 128256 * 12)  # and of a plain loss, what goes in, too


def test_few_logits_exist_all_at_once() -> None:
    few, many = (module.logit_bytes(LLAMA, SHOAL, tokens=t, tp=1, pp=1, size=2.0) for t in (512, 4096))
    weight = LLAMA.head_parameters * (2 + 4)
    stream = 4 + 2 + 2  # as the norm gives it, cast, and its gradient
    assert few - weight == pytest.approx(512 * (128256 * 2 + 4096 * stream))
    assert many - weight == pytest.approx(4096 * (128256 * 2 / 2 + 4096 * stream))  # half of them


# ---- shoal's own ----------------------------------------------------------------------------------------------------


def test_replicas_that_accumulate_hold_gradients_twice() -> None:
    once, twice = (predicted("bf16 mb=1", ranks=8, global_batch=batch) for batch in (8, 16))
    assert once.gradients == twice.gradients == pytest.approx(4 * LLAMA.parameters, rel=1e-3)
    assert twice.buffers - once.buffers == pytest.approx(4 * LLAMA.parameters, rel=1e-3)


def test_a_stage_has_a_buffer_for_every_message_of_a_step() -> None:
    message = 4096 * 4096 * 2
    few, many = (predicted("bf16 pp=4 mb=1", ranks=4, global_batch=batch, stage=1) for batch in (8, 32))
    assert many.buffers - few.buffers == pytest.approx(24 * 2 * message)  # from before and from behind
    few, many = (predicted("bf16 pp=4 mb=1", ranks=4, global_batch=batch, stage=0) for batch in (8, 32))
    assert many.buffers - few.buffers == pytest.approx(24 * message)


def test_layers_that_tp_divides_keep_what_autograd_keeps() -> None:
    lean = kept_per_token(LLAMA, SHOAL_EAGER, tp=2, sp=True, sequence=4096, size=2.0)
    plain = kept_per_token(LLAMA, SHOAL_EAGER.where_split, tp=2, sp=True, sequence=4096, size=2.0)
    whole_inputs, gated = 2 * 2 * 4096, 2 * 14336 * 2 / 2  # of projections; silu(gate), and times up
    assert plain - lean == pytest.approx(whole_inputs + gated)
    assert MEGATRON_LM.where_split == MEGATRON_LM


def test_without_a_compiler_a_backward_needs_room() -> None:
    words = "bf16 mb=8 recompute=selective"
    eager = predicted(words, ranks=1, profile=SHOAL_EAGER)
    compiled = predicted(words, ranks=1)
    assert compiled.logits > 0
    assert eager.logits == 0, "its fullest moment is another one"
    wide = (7 + 1.5) * 4 * 14336  # seven tensors; and two more that were cast, less what is narrow
    room = 8 * 4096 * (wide + 3 * 2 * 4096) + 4 * 4096 * 14336
    assert eager.buffers - compiled.buffers == pytest.approx(room)


def test_ends_are_gathered_alone() -> None:
    found = predicted("bf16 zero=3 mb=8")
    assert found.logits > 0
    assert found.gathered == pytest.approx(2 * 2 * LLAMA.head_parameters)


def test_gloo_copies_what_it_scatters() -> None:
    model = MODELS["llama3-1b"]
    found = peak_memory(
        model, Plan.parse("zero=2 mb=1").resolve(2), parse_cluster("cpu:2"), sequence=16, global_batch=8
    )
    assert found.logits == 0
    head = 4 * model.head_parameters
    assert found.buffers == pytest.approx(head * (2 + 1 + 1 / 2))  # as it is, as one message, its copy; and a half


def test_a_head_has_a_gradient_beside_the_one_that_adds_up() -> None:
    few = module.logit_bytes(LLAMA, SHOAL.where_split, tokens=512, tp=2, pp=1, size=2.0)
    assert few == pytest.approx(4 * (512 + 4096) * 128256 / 2)


def test_states_in_bf16_are_half_as_large() -> None:
    full, half = (
        predicted("bf16 mb=1", ranks=1, profile=shoal_profile(state_dtype=states)) for states in ("fp32", "bf16")
    )
    assert full.optimizer == 2 * half.optimizer == pytest.approx(8 * LLAMA.parameters, rel=1e-3)
    assert shoal_profile(compile=False, state_dtype="bf16").passes == SHOAL_EAGER.passes


def test_full_recompute_keeps_an_input_per_layer() -> None:
    full, none = predicted("bf16 zero=3 mb=2 recompute=full"), predicted("bf16 zero=3 mb=2")
    tokens = 2 * 4096
    inputs = 32 * tokens * 4096 * 2
    stream = tokens * 4096 * 2
    layer = kept_per_token(LLAMA, SHOAL_EAGER, tp=1, sp=False, sequence=4096, size=2.0) * tokens
    eager = predicted("bf16 zero=3 mb=2 recompute=full", profile=SHOAL_EAGER)
    assert full.activations == pytest.approx(inputs + stream)
    assert eager.activations == pytest.approx(inputs + layer + 2 * stream), "one layer is computed again"
    assert full.total < none.total


LLAMA_1_5 = Workload(name="1.5", hidden=2048, layers=16, heads=32, kv_heads=8, ffn=8192, vocabulary=128256)
LLAMA_1_1 = Workload(name="1.1", hidden=2048, layers=22, heads=32, kv_heads=4, ffn=5632, vocabulary=32000)
MIXTURE = Workload(
    name="moe", hidden=2048, layers=24, heads=16, kv_heads=4, vocabulary=32768, experts=16, top_k=2, expert_ffn=2048
)
FINE_MIXTURE = Workload(
    name="fine", hidden=1536, layers=16, heads=12, kv_heads=4, vocabulary=65536, experts=64, top_k=8, expert_ffn=512
)


@pytest.mark.parametrize(
    ("mb", "recompute", "states", "measured"), [(2, "none", "fp32", 80.28), (4, "full", "bf16", 59.04)]
)
def test_experts_by_steps_hold_what_was_measured_on_a_gpu(
    mb: int, recompute: str, states: str, measured: float
) -> None:
    """Before experts were one operator, as they still are with ep: planner_nvidia-h200_2026-11-15.md."""
    profile = shoal_profile(state_dtype=states).without_fused_experts
    plan = Plan.parse(f"bf16 mb={mb} recompute={recompute}").resolve(1)
    found = peak_memory(MIXTURE, plan, H200, sequence=4096, global_batch=mb, profile=profile)
    assert found.allocated / 2**30 == pytest.approx(measured, rel=0.004)
    older = replace(H200, device=replace(H200.device, is_modern=False))
    assert (
        peak_memory(MIXTURE, plan, older, sequence=4096, global_batch=mb, profile=shoal_profile(state_dtype=states))
        == found
    )


@pytest.mark.parametrize(
    ("model", "mb", "sequence", "recompute", "states", "microbatches", "measured"),
    [
        (LLAMA_1_1, 8, 4096, "none", "fp32", 1, 42.56),
        (LLAMA_1_5, 4, 1024, "none", "fp32", 1, 23.29),
        (LLAMA_1_5, 8, 4096, "none", "fp32", 1, 47.24),
        (LLAMA_1_5, 2, 4096, "none", "fp32", 4, 32.58),
        (LLAMA_1_5, 1, 32768, "full", "fp32", 1, 24.97),
        (LLAMA_1_5, 16, 4096, "full", "fp32", 1, 29.01),
        (LLAMA_1_5, 1, 524288, "full", "fp32", 1, 107.13),
        (LLAMA, 2, 4096, "none", "bf16", 1, 96.66),
        (LLAMA, 1, 8192, "selective", "bf16", 1, 90.07),
        (LLAMA, 4, 4096, "full", "bf16", 1, 90.65),
        (MIXTURE, 4, 4096, "none", "fp32", 1, 78.85),
        (MIXTURE, 4, 4096, "none", "fp32", 2, 94.0),
        (FINE_MIXTURE, 4, 4096, "none", "fp32", 1, 41.61),
    ],
    ids=str,
)
def test_compiled_layers_hold_what_was_measured_on_a_gpu(
    model: Workload, mb: int, sequence: int, recompute: str, states: str, microbatches: int, measured: float
) -> None:
    """GiB of torch.cuda.max_memory_allocated on an H200: benchmarks/results/planner_nvidia-h200_2026-11-15.md,
    h200-longest and h200-speed of the same day; of mixtures, experts-peers of 2026-11-18 and experts of 2026-11-19."""
    plan = Plan.parse(f"bf16 mb={mb} recompute={recompute}").resolve(1)
    profile = shoal_profile(state_dtype=states)
    found = peak_memory(model, plan, H200, sequence=sequence, global_batch=mb * microbatches, profile=profile)
    assert found.allocated / 2**30 == pytest.approx(measured, rel=0.004)


MANY_WORDS = Workload(name="1.3", hidden=1792, layers=20, heads=14, kv_heads=2, ffn=5120, vocabulary=151936)
"""Its keys and values have 256 features, which is too narrow for fp8."""


@pytest.mark.parametrize(
    ("model", "mb", "sequence", "weights", "states", "measured"),
    [
        (MANY_WORDS, 12, 2048, "fp32", "fp32", 39.5),
        (LLAMA_1_5, 8, 4096, "fp32", "fp32", 48.9),
        (LLAMA, 2, 4096, "fp32", "bf16", 90.5),
        (LLAMA, 2, 4096, "bf16", "bf16", 74.5),
    ],
    ids=str,
)
def test_fp8_holds_what_was_measured_on_a_gpu(
    model: Workload, mb: int, sequence: int, weights: str, states: str, measured: float
) -> None:
    """GiB of torch.cuda.max_memory_allocated on an H200: h200-speed and h200-fp8 of 2026-11-16, and a run with a large
    vocabulary and narrow keys."""
    profile = shoal_profile(state_dtype=states, param_dtype=weights)
    plan = Plan.parse(f"fp8 mb={mb}").resolve(1)
    found = peak_memory(model, plan, H200, sequence=sequence, global_batch=mb, profile=profile)
    assert found.allocated / 2**30 == pytest.approx(measured, rel=0.006)


def test_a_head_in_fp8_takes_what_was_measured_more_than_one_in_bf16() -> None:
    """3.2 GiB with the 1.50 B model: h200-rowwise of 2026-11-16, 48.9 against 45.7."""
    sizes = {"tokens": 8 * 4096.0, "tp": 1, "pp": 1, "size": 2.0}
    in_fp8, in_bf16 = (module.logit_bytes(LLAMA_1_5, SHOAL, precision=word, **sizes) for word in ("fp8", "bf16"))  # type: ignore[arg-type]
    assert (in_fp8 - in_bf16) / 2**30 == pytest.approx(3.2, abs=0.05)
    odd = replace(LLAMA_1_5, vocabulary=128257)  # whose head stays in bf16
    assert module.logit_bytes(odd, SHOAL, precision="fp8", **sizes) == module.logit_bytes(odd, SHOAL, **sizes)  # type: ignore[arg-type]


def test_layers_are_narrow_on_paper_where_they_are_in_a_run() -> None:
    assert (fp8_memory.MIN_FEATURES, fp8_memory.MULTIPLE) == (convert.MIN_FEATURES, products.MULTIPLE)
    for width in (256, 504, 512, 520, 528, 4096):
        with torch.device("meta"):
            layer = torch.nn.Linear(1792, width, bias=False)
        assert fp8_memory.is_wide(1792, width) == convert.is_fit_for_fp8(layer)


def test_a_compiler_keeps_casts_of_weights_and_sharding_has_none() -> None:
    casts = 2 * (LLAMA.attention_parameters + LLAMA.ffn_parameters * 2 / 3)
    whole = predicted("bf16 mb=8", ranks=1, profile=SHOAL).activations
    gathered = predicted("bf16 zero=3 mb=8", profile=SHOAL).activations
    assert whole - gathered == pytest.approx(32 * casts)
    in_float32_anyway = 32 * 8 * 4096 * (4 * 32 + 2 * 4)  # sums of scores, and what norms divide by
    assert predicted("fp32 mb=8", ranks=1).activations == pytest.approx(2 * gathered - in_float32_anyway)


def test_a_tied_head_has_its_gradient_early() -> None:
    tied, untied = (
        module.rank_share(LLAMA.resized(tied=tied), 0, tp=1, pp=1, v=1, ep=1, is_v_shaped=False, profile=SHOAL)
        for tied in (True, False)
    )
    assert untied.late - tied.late == LLAMA.head_parameters
    assert tied.late == tied.unit


@pytest.mark.parametrize("axis", ["tp=2", "cp=2", "pp=2"])
def test_every_axis_divides_activations_or_states(axis: str) -> None:
    assert predicted(f"bf16 {axis} zero=1 mb=2").total < predicted("bf16 zero=1 mb=2").total + 4e9
    assert predicted(f"bf16 {axis} mb=1", ranks=2).states < predicted("bf16 mb=1", ranks=1).states + 1


def test_experts_are_divided_by_ep_and_shared_by_fewer() -> None:
    whole = predicted("bf16 zero=1 mb=1", model="mixtral-8x7b")
    divided = predicted("bf16 zero=1 ep=8 mb=1", model="mixtral-8x7b")
    model = MODELS["mixtral-8x7b"]
    experts = model.layers * model.expert_parameters
    # all hold every expert's weight and gradient (6 bytes), or an eighth of them with all of its state (18 bytes)
    assert whole.states - divided.states == pytest.approx(experts * (6 + 12 / 8) - experts / 8 * 18, rel=0.01)


def test_stages_are_cut_evenly_by_cost_or_where_shares_end() -> None:
    assert layers_of_stages(10, 4, 0.0, "even") == (3, 3, 2, 2)
    assert layers_of_stages(8, 4, 2.0, "balanced") == (2, 2, 3, 1)
    assert layers_of_stages(16, 8, 4.0, "thresholds") == (2, 3, 2, 3, 2, 3, 1, 0)


def test_a_v_shaped_schedule_has_embedding_and_head_on_its_first_rank() -> None:
    first = predicted("bf16 pp=4 zbv mb=1", ranks=4)
    assert first.stage == 0
    assert first.logits > 0


def test_offloading_leaves_the_device() -> None:
    assert predicted("bf16 zero=3 mb=1 offload=optimizer").optimizer == 0
    assert predicted("bf16 zero=3 mb=1 offload=parameters").states == 0


def test_three_numbers_are_told_apart() -> None:
    found = predicted("bf16 zero=3 mb=1")
    assert found.allocated < found.reserved < found.total
    assert found.total - found.reserved == H200.device.context


def test_a_cpu_has_no_workspaces() -> None:
    plan, said = Plan.parse("mb=2").resolve(1), {"sequence": 512, "global_batch": 4}
    there = peak_memory(MODELS["llama3-1b"], plan, H200, **said)
    here = peak_memory(MODELS["llama3-1b"], plan, parse_cluster("cpu:2"), **said)
    assert here.buffers == here.allocator == 0
    stream = 2 * 512 * 2048 * 4
    assert here.activations - there.activations == 2 * stream  # what the last norm gives, and a copy of its input


def test_a_traced_model_is_counted_by_its_blocks() -> None:
    resnet, plan = MODELS["resnet50"], Plan.parse("mb=64").resolve(1)
    found = peak_memory(resnet, plan, H200, sequence=1, global_batch=128)
    assert found.states == pytest.approx(16 * resnet.parameters)
    assert found.activations == pytest.approx(64 * sum(block.saved for block in resnet.blocks))


def test_what_does_not_grow_with_samples_is_counted_once() -> None:
    blocks = tuple(Block(name=f"b{i}", parameters=1000, flops=1.0, saved=10.0, saved_anyway=7.0) for i in range(4))
    model = Workload(name="mine", blocks=blocks)

    def activations(words: str, ranks: int = 1) -> float:
        return peak_memory(model, Plan.parse(words).resolve(ranks), H200, sequence=1, global_batch=32).activations

    assert activations("mb=8") == 8 * 40 + 28
    assert activations("mb=16") == 16 * 40 + 28
    assert activations("mb=8 pp=2 1f1b", ranks=2) == 2 * (8 * 20 + 14), "each microbatch has its own"
    assert activations("mb=8 recompute=full") == 8 * 10 + 7, "one block at a time"
