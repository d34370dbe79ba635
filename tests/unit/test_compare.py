"""Comparison of two runs: no NaN, name or shape is missed, and each kind of defect is named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor

from shoal.blueprint import Layout
from shoal.verification.compare import Comparison, Disagreement, Observation, compare, relative_difference
from shoal.verification.diagnosis.causes import likely_cause
from shoal.verification.diagnosis.evidence import Context, Piece
from shoal.verification.report import Count, VerifyResult, render, to_mapping

Tensors = dict[str, Tensor]
Change = Callable[[list[Observation]], None]

# Four stages of one block each: a norm that tp does not cut, `up` cut along dim 0 and `down` along dim 1.
PIECES = {"embedding": Piece(0, 0)}
for stage in range(4):
    PIECES |= {f"{stage}.norm": Piece(None, stage), f"{stage}.up": Piece(0, stage), f"{stage}.down": Piece(1, stage)}
SHAPES = {"norm": (8,), "up": (12, 8), "down": (8, 12), "embedding": (10, 8)}
LR, CLIP, TOLERANCE = 0.1, 2.0, 1e-10


def draw(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(SHAPES[name.rpartition(".")[2]], generator=generator, dtype=torch.float64) for name in PIECES
    }


def norm_of(gradients: Tensors) -> float:
    return math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))


INITIAL = draw(99)


def run(num_steps: int = 3) -> list[Observation]:
    """A training by plain SGD with clipping, whose gradients are drawn; the last rows of the embedding are not used."""
    weights, steps = INITIAL, []
    for step in range(num_steps):
        gradients = draw(step)
        gradients["embedding"][7:] = 0.0
        norm = norm_of(gradients)
        weights = {name: weights[name] - LR * min(1.0, CLIP / norm) * gradients[name] for name in weights}
        steps.append(Observation(5.0 - step, norm, gradients, weights))
    return steps


def context(num_microbatches: int = 1, **degrees: int) -> Context:
    return Context(
        layout=Layout(**degrees),
        num_microbatches=num_microbatches,
        num_stages=degrees.get("pp", 1),
        pieces=PIECES,
        clip=CLIP,
        initial=INITIAL,
        tolerance=TOLERANCE,
    )


def judged(candidate: list[Observation]) -> Comparison:
    return compare(run(), candidate, tolerance=TOLERANCE)


def with_gradients(step: int = 0, **changed: Tensor) -> list[Observation]:
    """A run in which some gradients of one step are others; keys are names with `_` for `.` and 's' before a stage."""
    steps = run()
    names = {key: key.removeprefix("s").replace("_", ".") for key in changed}
    gradients = {**steps[step].gradients, **{names[key]: value for key, value in changed.items()}}
    steps[step] = replace(steps[step], gradients=gradients)
    return steps


def where_gradients(change: Callable[[str, Tensor], Tensor], step: int = 0) -> list[Observation]:
    steps = run()
    changed = {name: change(name, gradient.clone()) for name, gradient in steps[step].gradients.items()}
    steps[step] = replace(steps[step], gradients=changed)
    return steps


def where_weights(change: Callable[[str, Tensor], Tensor], step: int = 0) -> list[Observation]:
    steps = run()
    changed = {name: change(name, weight.clone()) for name, weight in steps[step].weights.items()}
    steps[step] = replace(steps[step], weights=changed)
    return steps


def noise(tensor: Tensor) -> Tensor:
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(7), dtype=tensor.dtype)


def cause_of(candidate: list[Observation], said: Context) -> str:
    first = judged(candidate).first
    assert first is not None
    return likely_cause(first, run(), candidate, said)


# ---- the measure ----------------------------------------------------------------------------------------------------


def test_a_run_equals_itself() -> None:
    verdict = judged(run())
    assert verdict.equal
    assert verdict.first is None
    assert (verdict.worst.loss, verdict.worst.grad, verdict.worst.weight) == (0.0, 0.0, 0.0)
    assert verdict.worst.tensor in PIECES


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8), st.floats(-1.0, 1.0), st.integers(0, 7))
@settings(max_examples=60, deadline=None)
def test_a_difference_is_measured_against_the_largest_value(values: list[float], shift: float, place: int) -> None:
    other = list(values)
    other[place % len(values)] += shift
    expected = max(abs(a - b) for a, b in zip(values, other, strict=True)) / (max(map(abs, values)) or 1.0)
    got = relative_difference(torch.tensor(values, dtype=torch.float64), torch.tensor(other, dtype=torch.float64))
    assert got == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_equal(value: float) -> None:
    one = torch.tensor([1.0, value])
    assert relative_difference(one, one.clone()) == math.inf
    assert relative_difference(torch.ones(2), one) == math.inf
    assert relative_difference(one, torch.ones(2)) == math.inf


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_two_runs_with_the_same_nan_are_not_equal(value: float) -> None:
    steps = run()
    same = [replace(steps[0], loss=value), *steps[1:]]
    assert not compare(same, same, tolerance=TOLERANCE).equal
    same = [replace(steps[0], grad_norm=value), *steps[1:]]
    verdict = compare(same, same, tolerance=TOLERANCE)
    assert verdict.first is not None
    assert verdict.first.kind == "grad_norm"
    same = with_gradients(s0_up=torch.full((12, 8), value, dtype=torch.float64))
    verdict = compare(same, same, tolerance=TOLERANCE)
    assert verdict.first is not None
    assert verdict.worst.grad == math.inf
    assert verdict.first.tensor == "0.up"


def test_types_and_layouts_of_memory_do_not_matter_but_values_do() -> None:
    one = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    assert relative_difference(one, one.to(torch.bfloat16)) == 0.0
    assert relative_difference(one, one.to_sparse()) == 0.0
    assert relative_difference(torch.tensor([1 + 1j]), torch.tensor([1 - 1j])) == pytest.approx(math.sqrt(2))
    assert relative_difference(torch.empty(0), torch.empty(0)) == 0.0


def test_an_all_zero_reference_is_measured_by_what_is_there_instead() -> None:
    assert relative_difference(torch.zeros(3), torch.tensor([0.0, -0.25, 0.0])) == 0.25


def test_rounding_noise_where_a_gradient_should_be_zero_is_no_difference() -> None:
    tiny = [torch.full((8,), size, dtype=torch.float64) for size in (1e-17, -1e-17, 1e-8)]
    noisy = with_gradients(s0_norm=tiny[0])
    assert compare(noisy, with_gradients(s0_norm=tiny[1]), tolerance=TOLERANCE).equal
    assert not compare(noisy, with_gradients(s0_norm=tiny[2]), tolerance=TOLERANCE).equal


# ---- what differs first ---------------------------------------------------------------------------------------------


def first_of(candidate: list[Observation]) -> tuple[int, str, str | None]:
    first = judged(candidate).first
    assert first is not None
    return first.step, first.kind, first.tensor


def test_the_order_of_computation_within_a_step() -> None:
    steps = run()
    lonely = Disagreement("tp", "gradient", "2.norm", 0.5)
    weights = {**steps[1].weights, "0.up": steps[1].weights["0.up"] + 1}
    gradients = {**steps[1].gradients, "3.up": steps[1].gradients["3.up"] * 2, "1.up": steps[1].gradients["1.up"] * 2}
    step = replace(steps[1], weights=weights)
    assert first_of([steps[0], step, steps[2]]) == (1, "weight", "0.up")
    step = replace(step, disagreements=(lonely,))
    assert first_of([steps[0], step, steps[2]]) == (1, "replicas", "2.norm")
    step = replace(step, grad_norm=1.0)
    assert first_of([steps[0], step, steps[2]]) == (1, "grad_norm", None)
    step = replace(step, gradients=gradients)
    assert first_of([steps[0], step, steps[2]]) == (1, "gradient", "1.up")
    step = replace(step, loss=1.0)
    assert first_of([steps[0], step, steps[2]]) == (1, "loss", None)
    assert first_of([replace(steps[0], loss=1.0), step, steps[2]]) == (0, "loss", None)


def test_a_difference_within_the_tolerance_is_none() -> None:
    steps = where_gradients(lambda name, gradient: gradient * (1 + 1e-11))
    assert judged(steps).equal
    assert 0 < judged(steps).worst.grad < 1e-10
    assert not compare(run(), steps, tolerance=1e-12).equal


def without(name: str) -> list[Observation]:
    steps = run()
    return [replace(steps[0], gradients={n: g for n, g in steps[0].gradients.items() if n != name}), *steps[1:]]


def test_names_and_shapes_that_do_not_match_are_differences() -> None:
    missing = judged(without("2.up"))
    assert missing.first is not None
    assert (missing.first.tensor, missing.first.difference) == ("2.up", math.inf)
    extra = judged(with_gradients(other=torch.ones(3)))
    assert extra.first is not None
    assert extra.first.tensor == "other"
    shaped = judged(with_gradients(s0_up=run()[0].gradients["0.up"].T))
    assert shaped.first is not None
    assert "(8, 12) instead of (12, 8)" in shaped.first.note


@pytest.mark.parametrize("length", [0, 1, 2, 4])
def test_another_number_of_steps_is_a_difference(length: int) -> None:
    verdict = compare(run(3), run(length), tolerance=TOLERANCE)
    assert not verdict.equal
    assert verdict.first is not None
    assert f"made 3 steps and the candidate {length}" in likely_cause(verdict.first, run(3), run(length), context())


def test_nothing_compared_is_not_equal() -> None:
    assert not compare([], [], tolerance=TOLERANCE).equal
    empty = [Observation(1.0, 1.0, {}, {})]
    verdict = compare(empty, empty, tolerance=TOLERANCE)
    assert verdict.first is not None
    assert verdict.first.note == "no gradient was observed"


def test_replicas_that_differ_by_nan_are_not_equal() -> None:
    steps = run()
    steps[0] = replace(steps[0], disagreements=(Disagreement("tp", "gradient", "0.norm", math.nan),))
    verdict = judged(steps)
    assert not verdict.equal
    assert verdict.worst.replicas == math.inf
    steps[0] = replace(steps[0], disagreements=(Disagreement("tp", "gradient", "0.norm", 1e-15),))
    assert judged(steps).equal


def test_the_worst_tensor_is_named() -> None:
    steps = where_gradients(lambda name, gradient: gradient * {"1.up": 1.1, "2.down": 1.5}.get(name, 1.0))
    worst = judged(steps).worst
    assert worst.tensor == "2.down"
    assert worst.grad == pytest.approx(0.5)


# ---- the likely cause -----------------------------------------------------------------------------------------------


def test_replicas_that_disagree_name_their_axis() -> None:
    lonely = Disagreement("dp_replicate", "gradient", "0.up", 0.5)
    steps = where_gradients(lambda name, gradient: gradient + noise(gradient))
    steps[0] = replace(steps[0], disagreements=(lonely,))
    text = cause_of(steps, context(dp_replicate=2, tp=2))
    assert "Ranks along dp_replicate hold different gradients of 0.up" in text
    assert "the reduction over dp_replicate is missing" in text
    steps[0] = replace(steps[0], disagreements=(replace(lonely, axis="tp", tensor="0.norm"),))
    assert "its sum over tp is missing" in cause_of(steps, context(dp_replicate=2, tp=2))


def test_replicas_whose_weights_alone_disagree() -> None:
    steps = run()
    steps[1] = replace(steps[1], disagreements=(Disagreement("dp_replicate", "weight", "0.up", 0.5),))
    assert "did not start equal, or the optimizer differs" in cause_of(steps, context(dp_replicate=2))


@pytest.mark.parametrize(
    ("factor", "said", "words"),
    [
        (
            2.0,
            context(dp_replicate=2),
            "2 times too large, which is the degree of dp_replicate: summed over dp_replicate",
        ),
        (0.25, context(dp_shard=4, tp=2), "4 times too small, which is the degree of dp_shard: divided once too often"),
        (4.0, context(dp_replicate=2, dp_shard=2), "the degree of data"),
        (3.0, context(tp=3), "the degree of tp"),
        (3.0, context(cp=3), "the degree of cp"),
        (4.0, context(pp=4, tp=2), "the degree of pp"),
        (4.0, context(4, tp=2), "4 times too large, which is the number of microbatches"),
        (1 / 8, context(8, tp=2), "8 times too small, which is the number of microbatches"),
        (2.0, context(2, tp=2), "the degree of tp and the number of microbatches"),
        (6.0, context(3, dp_shard=2), "the degree of dp_shard x the number of microbatches"),
        (
            0.7,
            context(dp_shard=2),
            "1.42857 times too small, and otherwise right: a scale is wrong that is no degree",
        ),
        (-1.0, context(dp_shard=2), "-1 times the right value"),
    ],
)
def test_a_constant_factor_is_a_degree(factor: float, said: Context, words: str) -> None:
    text = cause_of(where_gradients(lambda name, gradient: gradient * factor), said)
    assert text.startswith("Every gradient is")
    assert words in text


def test_a_factor_of_what_tp_does_not_cut_is_about_tp_alone() -> None:
    steps = where_gradients(lambda name, gradient: gradient * (2 if "norm" in name else 1))
    text = cause_of(steps, context(2, dp_shard=2, tp=2))
    assert "the degree of tp:" in text
    assert "dp_shard" not in text
    assert "microbatches" not in text


def test_a_loss_that_is_summed() -> None:
    steps = run()
    steps[0] = replace(steps[0], loss=steps[0].loss * 4)
    assert "The loss is 4 times too large, which is the degree of dp_shard" in cause_of(steps, context(dp_shard=4))


def test_a_gradient_of_zeros() -> None:
    steps = with_gradients(s2_up=torch.zeros(12, 8, dtype=torch.float64))
    text = cause_of(steps, context(dp_shard=2))
    assert "The gradient of 2.up is zero" in text
    assert "reduction over dp_shard" in text


def test_a_stage_of_zeros() -> None:
    steps = where_gradients(lambda name, gradient: gradient * (0 if name.startswith("2.") else 1))
    assert "Every gradient of stage 2 is zero" in cause_of(steps, context(pp=4))


def test_exactly_what_tp_does_not_cut_is_wrong() -> None:
    steps = where_gradients(lambda name, gradient: gradient + (noise(gradient) if "norm" in name else 0))
    text = cause_of(steps, context(tp=2))
    assert "exactly the tensors that tp does not cut" in text
    assert "partial gradients are not summed over tp" in text
    steps = where_gradients(lambda name, gradient: gradient + (noise(gradient) if name == "1.norm" else 0))
    assert "The gradient of 1.norm is wrong, among the tensors" in cause_of(steps, context(tp=2))


@pytest.mark.parametrize(("name", "dim"), [("1.up", 0), ("1.down", 1)])
def test_one_slice_along_the_cut_is_wrong(name: str, dim: int) -> None:
    def change(which: str, gradient: Tensor) -> Tensor:
        if which == name:
            gradient.chunk(2, dim)[1].add_(1.0)
        return gradient

    text = cause_of(where_gradients(change), context(tp=2))
    assert f"The gradient of {name} is wrong in slice 1 along dim {dim} and right in slice 0: the tp ranks" in text


def test_one_shard_is_wrong() -> None:
    def change(name: str, weight: Tensor) -> Tensor:
        weight.chunk(4)[2].add_(noise(weight).chunk(4)[2])
        return weight

    text = cause_of(where_weights(change), context(dp_shard=4))
    assert "wrong in slice 2 along dim 0 and right in slice 0, 1, 3: the dp_shard ranks" in text


def test_swapped_slices() -> None:
    steps = with_gradients(s1_down=run()[0].gradients["1.down"].roll(4, 1))
    text = cause_of(steps, context(tp=3))
    assert "1.down has its slices along dim 1 in the order 2, 0, 1: tp ranks hold each other's shard" in text


def test_one_stage_is_wrong() -> None:
    steps = where_gradients(lambda name, gradient: gradient + noise(gradient) * name.startswith("2."))
    text = cause_of(steps, context(4, pp=4, dp_shard=2))
    assert "Only gradients of stage 2 are wrong" in text
    assert "another microbatch" in text


def test_all_stages_up_to_one_are_wrong() -> None:
    steps = where_gradients(lambda name, gradient: gradient + noise(gradient) * (PIECES[name].stage <= 1))
    text = cause_of(steps, context(4, pp=4))
    assert "Only gradients up to stage 1 are wrong: the gradient that stage 2 sends back over pp is wrong" in text


def test_rows_of_the_embedding_tell_which_samples_were_seen() -> None:
    def missing(name: str, gradient: Tensor) -> Tensor:
        gradient += noise(gradient)
        if name == "embedding":
            gradient[5:] = 0.0
        return gradient

    text = cause_of(where_gradients(missing), context(2, dp_shard=2, tp=2))
    assert "embedding lacks the gradients of some rows" in text
    assert "the reduction over dp_shard is missing or a microbatch is not accumulated" in text
    for change in (missing, lambda name, gradient: gradient + noise(gradient)):
        steps = where_gradients(change)
        steps[0] = replace(steps[0], loss=4.4)
        assert "samples are distributed wrongly" in cause_of(steps, context(2, dp_shard=2))
    assert "stage 0 of pp gets a wrong microbatch" in cause_of(steps, context(2, pp=4))


def seen_rows_kept(name: str, gradient: Tensor) -> Tensor:
    return gradient + noise(gradient) * gradient.bool()


def test_loss_right_and_no_gradient() -> None:
    text = cause_of(where_gradients(seen_rows_kept), context(2, dp_shard=3, tp=1))
    assert "The loss is right, but no gradient is" in text
    assert "the reduction over dp_shard or the accumulation over microbatches" in text


def test_the_place_where_the_backward_goes_wrong() -> None:
    wrong = [name for name in PIECES if name not in ("3.down", "3.up")]
    steps = where_gradients(lambda name, gradient: seen_rows_kept(name, gradient) if name in wrong else gradient)
    text = cause_of(steps, context(tp=2))
    assert "wrong from 3.norm back to embedding: the gradient that flows back from 3.up is wrong" in text
    assert "perhaps a sum over tp" in text


def test_the_forward_is_wrong_and_every_axis_in_use_is_named() -> None:
    steps = where_gradients(seen_rows_kept)
    steps[0] = replace(steps[0], loss=4.4)
    text = cause_of(steps, context(tp=2, pp=4))
    assert "forward is already wrong" in text
    assert "tp (" in text
    assert "pp (" in text
    assert "dp_shard" not in text


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        (lambda n, g: g if PIECES[n].stage == 1 else g * 0, "that of stage 1 alone: its square is not summed over pp"),
        (lambda n, g: g if PIECES[n].tp_dim is not None else g * math.sqrt(2), "uncut tensors counted 2 times"),
        (
            lambda n, g: g if PIECES[n].tp_dim is None else g.chunk(2, PIECES[n].tp_dim)[1],
            "that of tp rank 1 alone: its square is not summed over tp",
        ),
        (lambda n, g: g.chunk(3)[0], "that of dp_shard rank 0 alone"),
        (lambda n, g: g * math.sqrt(3), "is 3 times too large or small, and that is the degree of dp_shard"),
        (lambda n, g: g * 0.9, "over dp_shard, tp, pp is wrong"),
    ],
)
def test_a_wrong_norm_of_right_gradients(pieces: Callable[[str, Tensor], Tensor], words: str) -> None:
    steps = run()
    norm = norm_of({name: pieces(name, gradient) for name, gradient in steps[0].gradients.items()})
    steps[0] = replace(steps[0], grad_norm=norm)
    text = cause_of(steps, context(dp_shard=3, tp=2, pp=4))
    assert text.startswith("Every gradient is right")
    assert words in text


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize(
    ("power", "words"), [(-1, "nothing was clipped"), (1, "clipped twice"), (0.5, "by another norm")]
)
def test_an_update_that_is_scaled(step: int, power: float, words: str) -> None:
    steps = run()
    before = steps[step - 1].weights if step else INITIAL
    factor = (CLIP / steps[step].grad_norm) ** power
    changed = where_weights(lambda name, weight: before[name] + factor * (weight - before[name]), step)
    assert words in cause_of(changed, context(dp_shard=2))


def test_a_weight_that_is_not_updated() -> None:
    steps = where_weights(lambda name, weight: INITIAL[name] if name == "1.norm" else weight)
    assert "The weight of 1.norm is unchanged by the step" in cause_of(steps, context(dp_shard=2))


def test_gradients_right_and_weights_not() -> None:
    steps = where_weights(lambda name, weight: weight + 1e-3 * noise(weight) * (name == "1.norm"))
    text = cause_of(steps, context(dp_replicate=2))
    assert "Every gradient is right, but 1.norm is not after the update: look at clipping" in text
    text = cause_of(steps, context(pp=4))
    assert "Only weights of stage 1 are wrong" in text


def test_state_that_is_lost_between_steps() -> None:
    steps = where_weights(lambda name, weight: weight + 1e-3 * noise(weight), step=1)
    assert "optimizer state or learning rate" in cause_of(steps, context(dp_replicate=2))
    steps = run()
    steps[2] = replace(steps[2], loss=3.3)
    steps[2] = replace(steps[2], gradients={n: seen_rows_kept(n, g) for n, g in steps[2].gradients.items()})
    assert "All before step 2 is right and its loss is not: a stale copy" in cause_of(steps, context(dp_shard=2))


def test_gradients_that_are_not_cleared() -> None:
    before = run()[0].gradients
    steps = where_gradients(lambda name, gradient: gradient + before[name], step=1)
    text = cause_of(steps, context(dp_shard=2))
    assert "that of step 1 plus that of step 0: gradients are not cleared" in text


def test_what_cannot_be_compared_has_a_cause_too() -> None:
    assert "No rank holds it, or no backward reached it (it belongs to stage 2)" in cause_of(
        without("2.up"), context(pp=4)
    )
    shaped = with_gradients(s0_up=torch.ones(6, 8, dtype=torch.float64))
    assert "not joined as they were cut along dim 0 over tp" in cause_of(shaped, context(tp=2))
    broken = with_gradients(s0_up=torch.full((12, 8), math.nan, dtype=torch.float64))
    assert "0.up: it is not finite in the candidate" in cause_of(broken, context(tp=2))
    assert "another name" in cause_of(with_gradients(other=torch.ones(3)), context(tp=2))
    steps = run()
    steps[0] = replace(steps[0], loss=math.nan)
    assert "The loss of the candidate is nan" in cause_of(steps, context(tp=2))


def mutations() -> list[Any]:
    changes: list[Callable[[str, Tensor], Tensor]] = [
        lambda name, t: t * 0,
        lambda name, t: t[:1],
        lambda name, t: t.flip(0),
        lambda name, t: t * math.nan,
        lambda name, t: t + noise(t) if name == "3.down" else t.float(),
        lambda name, t: t.new_ones(()) if name == "0.norm" else t,
        lambda name, t: t * 2 if name == "3.down" else t.sum() if name == "0.norm" else t * 3,
    ]
    return changes


@pytest.mark.parametrize("change", mutations())
@pytest.mark.parametrize("apply", [where_gradients, where_weights])
@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("degrees", [{}, {"dp_replicate": 2, "dp_shard": 2}, {"tp": 2, "pp": 4}, {"cp": 2, "tp": 4}])
def test_any_two_runs_have_a_verdict_and_a_cause(change: Any, apply: Any, step: int, degrees: dict[str, int]) -> None:
    candidate = apply(change, step)
    for reference, other in ((run(), candidate), (candidate, run())):
        first = compare(reference, other, tolerance=TOLERANCE).first
        assert first is not None
        for said in (context(2, **degrees), replace(context(**degrees), pieces={}, initial={}, clip=None)):
            text = likely_cause(first, reference, other, said)
            assert text.endswith(".")


# ---- the report -----------------------------------------------------------------------------------------------------


def proof(candidate: list[Observation], said: Context) -> VerifyResult:
    verdict = judged(candidate)
    cause = None if verdict.first is None else likely_cause(verdict.first, run(), candidate, said)
    return VerifyResult(
        plan="tp=2 pp=2 zero=1 1f1b mb=1",
        world_size=4,
        verdict=verdict,
        cause=cause,
        seconds=8.25,
        bytes={"tp": Count(1_234_567, 1_234_567), "pp": Count(4096, 2048)},
        collectives={"tp": {"all_reduce": Count(16, 16)}, "pp": {"send": Count(8, 4)}},
        memory={"parameters": Count(1_000_000, 1_000_000), "peak": Count(measured=9_000_000)},
    )


def rendered(shown: VerifyResult, width: int = 100, **options: Any) -> str:
    console = Console(width=width, record=True, quiet=False, file=open("/dev/null", "w"), **options)  # noqa: SIM115
    with console.file:
        render(console, shown)
        return console.export_text()


def test_the_object_has_the_promised_keys_and_is_strict_json() -> None:
    mapping = to_mapping(proof(run(), context(tp=2)))
    assert json.loads(json.dumps(mapping, allow_nan=False)) == mapping
    assert mapping["equal"] is True
    assert mapping["first_difference"] is None
    assert {"loss", "grad", "weight", "tensor"} <= set(mapping["worst"])
    assert mapping["bytes"] == {
        "tp": {"predicted": 1_234_567, "counted": 1_234_567},
        "pp": {"predicted": 4096, "counted": 2048},
    }
    assert mapping["collectives"]["pp"] == {"send": {"predicted": 8, "counted": 4}}
    assert mapping["memory"]["peak"]["measured"] == 9_000_000
    assert (mapping["ranks"], mapping["steps"], mapping["tolerance"]) == (4, 3, TOLERANCE)


def test_the_object_of_a_difference() -> None:
    broken = with_gradients(s0_up=torch.full((12, 8), math.nan, dtype=torch.float64))
    mapping = to_mapping(proof(broken, context(tp=2)))
    json.dumps(mapping, allow_nan=False)
    assert mapping["equal"] is False
    assert mapping["worst"]["grad"] == "inf"
    first = mapping["first_difference"]
    assert (first["step"], first["kind"], first["tensor"], first["difference"]) == (0, "gradient", "0.up", "inf")
    assert "0.up" in first["cause"]


def test_an_equal_run_is_said_in_the_first_word() -> None:
    text = rendered(proof(run(), context(tp=2)))
    assert text.startswith("equal  tp=2 pp=2 zero=1 1f1b mb=1 on 4 ranks computes the same as one process")
    assert "8.2 s" in text
    assert str(proof(run(), context(tp=2))) == text.rstrip()


def test_a_difference_is_said_with_place_and_cause_and_marked_where_it_is() -> None:
    text = rendered(proof(where_gradients(lambda name, gradient: gradient * 2, step=1), context(tp=2)))
    assert text.startswith("NOT equal")
    assert "step 1, the gradient of embedding, off by 1.0e+00" in text
    assert "the degree of tp" in text.replace("\n", " ")
    steps = [line for line in text.splitlines() if line.strip()[:2] in ("0 ", "1 ", "2 ")]
    assert [line.strip()[-1] for line in steps] == ["✓", "✗", "✓"]


def test_what_was_counted_stands_beside_what_was_predicted() -> None:
    lines = rendered(proof(run(), context(tp=2))).splitlines()
    (sends,) = [line.split() for line in lines if "send calls" in line]
    assert sends == ["pp", "send", "calls", "8", "4", "✗"]
    assert any(line.split() == ["bytes", "1,234,567", "1,234,567", "✓"] for line in lines)
    assert any(line.split()[:1] == ["parameters"] and line.rstrip().endswith("✓") for line in lines)


@pytest.mark.parametrize("width", [100, 200])
def test_it_stays_within_the_page_and_needs_no_colour(width: int) -> None:
    long = {"model.layers.11.self_attn.q_projection_of_a_very_long_name.weight": torch.ones(2)}
    steps = [Observation(1.0, 1.0, long, long)]
    shown = replace(proof(run(), context()), verdict=compare(steps, steps, tolerance=TOLERANCE))
    text = rendered(shown, width, no_color=True)
    assert max(map(len, text.splitlines())) <= 100
    assert "very_long_name.weight" in text


def test_a_report_without_traffic_or_memory_has_no_empty_tables() -> None:
    bare = VerifyResult(plan="auto", world_size=1, verdict=judged(run()), seconds=1.0)
    text = rendered(bare)
    assert "traffic" not in text
    assert "memory" not in text
