"""Predicted time: its parts against formulas, its bubble against the schedules, and what must make it longer."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from shoal.blueprint.plan import Plan
from shoal.predict.cluster import Cluster
from shoal.predict.cluster_parser import parse_cluster
from shoal.predict.estimate.peak_memory import peak_memory
from shoal.predict.estimate.step_time import SPREAD, StepTime, step_time
from shoal.predict.framework_profile import FrameworkProfile
from shoal.predict.presets.frameworks import ALL, MEGATRON, SHOAL, shoal_profile
from shoal.predict.presets.models import MODELS

H100 = parse_cluster("h100:8x4")


def predicted(
    words: str,
    *,
    ranks: int = 32,
    model: str = "llama3-8b",
    profile: FrameworkProfile = SHOAL,
    cluster: Cluster = H100,
    **more: int,
) -> StepTime:
    said = {"sequence": 4096, "global_batch": 256, **more}
    return step_time(MODELS[model], Plan.parse(words).resolve(ranks), cluster, profile=profile, **said)


def test_causes_add_up_and_rates_follow() -> None:
    found = predicted("bf16 zero=3 mb=2")
    assert found.total == pytest.approx(sum(found.causes().values()))
    assert found.tokens_per_s_per_device == pytest.approx(256 * 4096 / found.total / 32)
    flops = MODELS["llama3-8b"].flops_per_token(4096) * 256 * 4096
    assert found.mfu == pytest.approx(flops / found.total / 32 / 989e12)
    assert 0.3 < found.mfu < 0.7, "of a plan that everybody uses"


def test_an_interval_holds_its_centre_and_is_narrower_where_machines_were_measured() -> None:
    found = predicted("bf16 zero=3 mb=2")
    here = predicted("bf16 zero=3 mb=2", cluster=replace(H100, is_measured=True))
    assert found.low < found.total < found.high
    assert here.high - here.low < 0.6 * (found.high - found.low)


def test_more_microbatches_shrink_the_part_of_the_bubble() -> None:
    few, many = (predicted("bf16 pp=4 zero=1 mb=1", global_batch=batch) for batch in (32, 512))
    assert few.bubble / few.total > 3 * many.bubble / many.total


def test_every_virtual_stage_sends() -> None:
    plain, looped = (predicted(f"bf16 pp=4 zero=1 {words} mb=1") for words in ("1f1b", "interleaved v=2"))
    assert looped.pp == pytest.approx(2 * plain.pp)


def test_full_recompute_costs_a_third_more_of_the_layers() -> None:
    none, full = predicted("bf16 zero=3 mb=2"), predicted("bf16 zero=3 mb=2 recompute=full")
    assert full.matmul / none.matmul == pytest.approx(4 / 3)
    assert full.head == none.head


def test_tp_between_nodes_is_slow() -> None:
    inside, between = predicted("bf16 tp=8 zero=1 mb=1"), predicted("bf16 tp=16 zero=1 mb=1")
    assert between.tp > 1.5 * inside.tp


def test_sharded_accumulation_pays_its_gathers_again() -> None:
    once, often = predicted("bf16 zero=3 mb=8"), predicted("bf16 zero=3 mb=1")
    assert often.dp > 4 * once.dp


def test_gradients_hide_in_the_shadow_of_the_backward() -> None:
    plain = replace(MEGATRON, name="nothing overlaps", overlaps_gradients=False)
    assert predicted("bf16 mb=1", profile=plain).dp > 2 * predicted("bf16 mb=1", profile=MEGATRON).dp


def test_attention_is_as_fast_as_it_was_measured_where_it_was_measured() -> None:
    rate = 500e12
    measured = replace(H100, device=replace(H100.device, name="measured", attention={"bf16": rate}))
    found = predicted("bf16 zero=3 mb=1", cluster=measured, sequence=8192)
    flops = 3.5 * 32 * MODELS["llama3-8b"].attention_flops(8192) * 8192 * 64 / 8
    assert found.attention == pytest.approx(flops / (rate * SHOAL.attention_sustained))


def test_a_compiler_launches_fewer_kernels() -> None:
    """Than `shoal calibrate` does, which launches all of them."""
    slow = replace(H100, device=replace(H100.device, name="slow", host_factor=20.0), is_measured=True)
    eager, compiled = (
        predicted("bf16 zero=3 mb=1", cluster=slow, profile=shoal_profile(compile=word), sequence=128)
        for word in (False, True)
    )
    each = (SHOAL.host_forward + SHOAL.host_backward) * 20
    shards = MODELS["llama3-8b"].parameters / 32  # gradients of seven microbatches are added to those before
    added = 7 * shards * SHOAL.accumulation / (slow.device.bandwidth * slow.device.streaming)
    launched = [found.host + found.matmul + found.attention + found.memory_bound - added for found in (eager, compiled)]
    assert launched == pytest.approx([32 * 8 * each, 32 * 8 * each * SHOAL.host_part])


def test_a_host_that_is_slow_is_waited_for() -> None:
    slow = replace(H100, device=replace(H100.device, host_factor=20.0))
    assert predicted("bf16 zero=3 mb=1", cluster=slow).host > 0
    assert predicted("bf16 zero=3 mb=1").host == 0


def test_experts_travel_and_a_ring_hides_behind_attention() -> None:
    moe = predicted("bf16 zero=1 ep=8 mb=1", model="mixtral-8x7b")
    assert moe.ep > 0
    ring = predicted("bf16 cp=4 zero=3 mb=1", sequence=32768)
    ulysses = predicted("bf16 cp=4 ulysses zero=3 mb=1", sequence=32768)
    assert 0 < ring.cp < ulysses.cp


def test_the_head_makes_the_last_stage_the_slowest_where_layers_are_even() -> None:
    even = predicted("bf16 pp=8 zero=1 mb=1", model="llama3-1b", profile=MEGATRON)
    assert even.head > 0
    assert even.bubble > 0


def test_numbers_in_fp32_travel_as_such() -> None:
    profile = replace(SHOAL, name="without accumulation", accumulation=0.0)
    half, full = (predicted(f"{word} tp=8 sp=off mb=1", profile=profile) for word in ("bf16", "fp32"))
    sums = 64 * 32 * 4  # of every microbatch, in every layer
    extra = 2 * 4096 * 4096  # two bytes more of every feature of every token, round a ring and back
    assert full.tp - half.tp == pytest.approx(sums * 2 * 7 / 8 * extra / H100.inside.bandwidth)
    assert full.memory_bound > 1.5 * half.memory_bound


def test_a_cpu_hides_no_message() -> None:
    """Who sends does not compute meanwhile."""
    cpu = parse_cluster("cpu:2")
    fast = replace(cpu, inside=replace(cpu.inside, bandwidth=1e15, latency=0.0, base=0.0))
    for words in ("fp32 zero=0 mb=1", "fp32 zero=3 mb=1"):
        slow = predicted(words, ranks=2, model="llama3-1b", cluster=cpu, sequence=512, global_batch=4)
        free = predicted(words, ranks=2, model="llama3-1b", cluster=fast, sequence=512, global_batch=4)
        model = MODELS["llama3-1b"]
        size, root = 4 * model.parameters, 4 * (model.vocabulary + 1) * model.hidden  # embedding, head and last norm
        sent = size if "zero=0" in words else 2 * (3 * size - root) / 2  # the root is not gathered again
        assert slow.dp - free.dp == pytest.approx(sent / cpu.inside.bandwidth, rel=0.01)
        assert free.dp > size / (cpu.device.bandwidth * cpu.device.streaming), "what is sent is copied"


def test_a_cpu_pays_for_every_action_of_a_pipeline() -> None:
    cpu = parse_cluster("cpu:2")
    said = {"ranks": 2, "model": "llama3-1b", "sequence": 512, "global_batch": 8}
    simple, divided = (predicted(f"fp32 pp=2 {word} mb=1", cluster=cpu, **said) for word in ("1f1b", "zb"))  # type: ignore[arg-type]
    assert divided.host - simple.host == pytest.approx(8 * 0.4e-3), "gradients of weights are one more"
    assert predicted("bf16 pp=2 zb mb=1", ranks=2, cluster=parse_cluster("h100:2"), global_batch=8).host == 0


def test_a_compiler_and_states_in_bf16_save_time() -> None:
    eager, compiled, half = (
        predicted("bf16 zero=3 mb=2", profile=profile)
        for profile in (shoal_profile(compile=False), shoal_profile(), shoal_profile(state_dtype="bf16"))
    )
    touched = (
        2 * 8 * 4096 * 2.5 * 32 * ((43 + 60 - 10) * 4096 + (12 + 17 - 4) * 14336)
    )  # eight sequences of 4096 a rank
    stream = H100.device.bandwidth * H100.device.streaming
    assert eager.memory_bound - compiled.memory_bound == pytest.approx(touched / stream)
    assert half.optimizer == pytest.approx((24 + 1) / 32 * compiled.optimizer), "rounding at random takes its time"
    assert eager.matmul == pytest.approx(compiled.matmul)


def test_a_traced_model_has_a_time() -> None:
    found = predicted(
        "mb=64", model="resnet50", ranks=8, sequence=1, global_batch=1024, cluster=parse_cluster("h100:8")
    )
    assert found.matmul > 0
    assert found.total < 5


@pytest.mark.parametrize("profile", ALL.values(), ids=ALL)
def test_every_system_has_a_source_and_a_finite_prediction(profile: FrameworkProfile) -> None:
    assert profile.source
    found = predicted("bf16 tp=2 pp=2 zero=1 mb=1", profile=profile)
    assert all(0 <= seconds < 1e3 for seconds in found.causes().values())
    documented = profile.as_documented()
    assert documented.efficiency == FrameworkProfile(name="x").efficiency
    stranger = predicted("bf16 tp=2 pp=2 zero=1 mb=1", profile=documented)
    wider = 1.5 if profile.is_known_together else 0.9  # shoal itself is a stranger on several devices
    assert stranger.high / stranger.low > (found.high / found.low) ** wider
    assert documented.gradient == profile.gradient


def test_every_cause_has_a_spread() -> None:
    assert set(predicted("bf16 zero=3 mb=1").causes()) == set(SPREAD)


@pytest.mark.alone
def test_one_call_of_both_takes_no_time() -> None:
    """A search asks ten thousand times; the bar is 100 microseconds, and this machine may be busy."""
    model, plan = MODELS["llama3-405b"], Plan.parse("bf16 tp=8 pp=2 zero=1 mb=1").resolve(32)

    def seconds() -> float:
        start = time.perf_counter()
        for _ in range(200):
            peak_memory(model, plan, H100, sequence=8192, global_batch=256)
            step_time(model, plan, H100, sequence=8192, global_batch=256)
        return (time.perf_counter() - start) / 200

    assert min(seconds() for _ in range(5)) < 600e-6
