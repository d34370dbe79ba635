"""The likely causes of defects in context parallelism, routers and experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.blueprint import Layout
from shoal.verification.compare import Observation, compare
from shoal.verification.diagnosis.causes import likely_cause
from shoal.verification.diagnosis.evidence import Context, Piece

Tensors = dict[str, Tensor]
Change = Callable[[str, Tensor], Tensor]

EXPERTS, TOLERANCE = 4, 1e-10
PIECES: dict[str, Piece] = {"embedding": Piece()}
for layer in range(2):
    attention, sparse = f"{layer}.attention", f"{layer}.mlp"
    PIECES |= {f"{layer}.norm": Piece()}
    PIECES |= {f"{attention}.{name}.weight": Piece(role="attention", module=attention) for name in ("q", "k", "v", "o")}
    PIECES |= {
        f"{layer}.second_norm": Piece(),
        f"{sparse}.router.weight": Piece(role="router", module=sparse, has_loss=True),
    }
    of_experts = Piece(role="expert", module=sparse, num_experts=EXPERTS)
    PIECES |= {f"{sparse}.experts.{name}": of_experts for name in ("up", "down")}
PIECES |= {"head": Piece()}
NAMES = list(PIECES)


def draw(seed: int, scale: float = 1.0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(8, 6, generator=generator, dtype=torch.float64) * scale for name in NAMES}


INITIAL = draw(99)


def run() -> list[Observation]:
    """Two steps of plain SGD, whose gradients are drawn. The last row of the embedding is not used."""
    weights, steps = INITIAL, []
    for step in range(2):
        gradients = draw(step)
        gradients["embedding"][7:] = 0.0
        weights = {name: weights[name] - 0.01 * gradients[name] for name in NAMES}
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
        steps.append(Observation(5.0 - step, norm, gradients, weights))
    return steps


def changed(change: Change, step: int = 0, **others: Any) -> list[Observation]:
    steps = run()
    gradients = {name: change(name, gradient.clone()) for name, gradient in steps[step].gradients.items()}
    steps[step] = replace(steps[step], gradients=gradients, **others)
    return steps


def noisy(*wrong: str) -> Change:
    def change(name: str, gradient: Tensor) -> Tensor:
        noise = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(5), dtype=gradient.dtype)
        return gradient + noise * gradient.bool() if name in wrong else gradient

    return change


def cause_of(candidate: list[Observation], pieces: dict[str, Piece] = PIECES, **degrees: int) -> str:
    first = compare(run(), candidate, tolerance=TOLERANCE).first
    assert first is not None
    said = Context(layout=Layout(**degrees), pieces=pieces, initial=INITIAL, tolerance=TOLERANCE)
    return likely_cause(first, run(), candidate, said)


def up_to(last: str) -> list[str]:
    return NAMES[: NAMES.index(last) + 1]


# ---- attention over ranks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", ["q", "k", "v"])
def test_a_backward_of_attention_that_is_wrong(kept: str) -> None:
    """The output projection of the last layer is behind it and right; what is before it is not."""
    wrong = [name for name in up_to("1.attention.v.weight") if name != f"1.attention.{kept}.weight"]
    text = cause_of(changed(noisy(*wrong)), cp=2)
    assert f"in 1.attention the gradient of {kept} and o is right" in text
    assert "the backward of attention over cp" in text
    assert "over cp" not in cause_of(changed(noisy(*wrong)), tp=2)


def test_a_weight_of_attention_that_is_wrong_alone_is_not_its_backward() -> None:
    assert "backward of attention" not in cause_of(changed(noisy("1.attention.k.weight")), cp=2)


def test_a_backward_that_is_wrong_behind_attention_is_not_its_own() -> None:
    text = cause_of(changed(noisy(*up_to("1.second_norm"))), cp=2)
    assert "backward of attention" not in text
    assert "the gradient that flows back from 1.mlp.router.weight is wrong" in text


def test_a_forward_over_cp_says_what_to_look_at() -> None:
    text = cause_of(changed(noisy(*NAMES), loss=4.4), cp=2)
    assert all(word in text for word in ("cp (", "labels", "positions", "attention", "number of tokens"))
    elsewhere = changed(lambda name, gradient: gradient + 1, loss=4.4)
    assert "tokens and labels are cut differently over cp" in cause_of(elsewhere, cp=2)
    assert "cp" not in cause_of(elsewhere, dp_shard=2)


# ---- experts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factor", "words"), [(2.0, "were probably not divided by ep=2"), (0.5, "divided once too often by ep=2")]
)
def test_experts_off_by_the_degree_of_ep(factor: float, words: str) -> None:
    steps = changed(lambda name, gradient: gradient * (factor if "experts" in name else 1))
    text = cause_of(steps, ep=2, dp_shard=2)
    assert words in text
    assert "dp_shard" not in text
    assert "the degree of dp_shard" in cause_of(steps, dp_shard=2)
    assert "the degree of dp_shard" in cause_of(changed(lambda name, gradient: gradient * factor), ep=2, dp_shard=2)


def test_experts_that_lie_in_another_order() -> None:
    steps = changed(noisy(*NAMES), loss=4.4)
    name = "1.mlp.experts.down"
    swapped = torch.cat([steps[0].weights[name].chunk(EXPERTS)[index] for index in (2, 1, 0, 3)])
    steps[0] = replace(steps[0], weights={**steps[0].weights, name: swapped})
    text = cause_of(steps, ep=2, dp_shard=2)
    assert "The experts of 1.mlp are in the order 2, 1, 0, 3, as seen in 1.mlp.experts.down: ranks along ep" in text
    doubled = torch.cat([run()[0].weights[name].chunk(EXPERTS)[index] for index in (0, 0, 2, 3)])
    twice = [replace(steps[0], weights={**steps[0].weights, name: doubled}), steps[1]]
    assert "are in the order 0, 0, 2, 3" in cause_of(twice, ep=2, dp_shard=2)
    far = {name: weight + draw(3, scale=9.0)[name] for name, weight in steps[0].weights.items()}
    steps[0] = replace(steps[0], weights=far)  # near to none
    assert "order" not in cause_of(steps, ep=2, dp_shard=2)


def test_an_expert_whose_rows_are_lost() -> None:
    def lose(name: str, gradient: Tensor) -> Tensor:
        if name.startswith("0.mlp.experts"):
            gradient.chunk(EXPERTS)[3].zero_()
        return gradient

    text = cause_of(changed(lose, loss=4.4), ep=2, dp_shard=2)
    assert "Expert 3 of 0.mlp (of ep rank 1) gets no gradient" in text
    assert "lost in the dispatch over ep" in text
    assert "lost in the dispatch." in cause_of(changed(lose), dp_shard=2)
    # of a part of its weights alone, it is not rows that are missing
    of_one = changed(lambda name, gradient: lose(name, gradient) if name.endswith("up") else gradient)
    assert "lost" not in cause_of(of_one, ep=2, dp_shard=2)


def test_pieces_of_experts_are_those_of_ep() -> None:
    steps = changed(lambda name, gradient: gradient.roll(4, 0) if name == "0.mlp.experts.up" else gradient)
    assert "0.mlp.experts.up has its slices along dim 0 in the order 1, 0: ep ranks" in cause_of(
        steps, ep=2, dp_shard=4
    )
    assert "the dp_shard x cp ranks" in cause_of(
        changed(lambda name, gradient: torch.cat([gradient[:6], gradient[6:] + 1]) if name == "head" else gradient),
        dp_shard=2,
        cp=2,
    )


def test_what_experts_send_back_is_wrong() -> None:
    steps = changed(noisy(*up_to("1.second_norm")))
    text = cause_of(steps, ep=2, dp_shard=2)
    assert "the gradients of 1.mlp are right, and all before it are wrong" in text
    assert "returned over ep" in text
    assert "over ep" not in cause_of(steps, dp_shard=2)


def test_a_norm_of_the_experts_of_one_rank() -> None:
    steps = run()
    pieces = [g[4:] if "experts" in name else g for name, g in steps[0].gradients.items()]
    norm = math.sqrt(sum(float(piece.square().sum()) for piece in pieces))
    steps[0] = replace(steps[0], grad_norm=norm)
    assert "that of ep rank 1 alone: its square is not summed over ep" in cause_of(steps, ep=2, dp_shard=2)


# ---- routers --------------------------------------------------------------------------------------------------------


def test_an_auxiliary_loss_that_is_wrong() -> None:
    """It reaches the router and what is before it, and no expert of the last layer."""
    steps = changed(noisy(*up_to("1.mlp.router.weight")))
    text = cause_of(steps, dp_replicate=2)
    assert "the gradient of 1.mlp.router.weight is wrong and those of its experts are right" in text
    assert "auxiliary loss" in text
    assert "whole sequence" not in text
    assert "over the whole sequence" in cause_of(steps, cp=2)
    without = {name: replace(piece, has_loss=False) for name, piece in PIECES.items()}
    text = cause_of(steps, pieces=without, cp=2)
    assert "auxiliary" not in text
    assert "probably the gradient of the weights with which results are summed" in text
    assert "auxiliary" not in cause_of(changed(noisy(*up_to("1.mlp.experts.up"))), cp=2)


def test_routers_that_are_wrong_alone() -> None:
    text = cause_of(changed(noisy("0.mlp.router.weight", "1.mlp.router.weight")), cp=2, tp=2)
    assert text.startswith("The gradients of 0.mlp.router.weight and 1.mlp.router.weight are wrong and no other is")
    assert "not reduced over cp or tp" in text


def test_routers_without_a_gradient() -> None:
    text = cause_of(changed(lambda name, gradient: gradient * ("router" not in name), loss=4.4), ep=2, dp_shard=2)
    assert "summed without the router's weights" in text


def test_a_bias_that_drifts() -> None:
    biased = {name: replace(piece, has_bias=piece.role == "router") for name, piece in PIECES.items()}
    steps = changed(noisy(*NAMES), step=1, loss=3.3)
    text = cause_of(steps, pieces=biased, ep=2, dp_shard=2)
    assert "the bias of 0.mlp.router is not updated from the loads of all ranks" in text
    assert "bias" not in cause_of(steps, ep=2, dp_shard=2)
    assert "bias" not in cause_of(changed(noisy(*NAMES), loss=3.3), pieces=biased, ep=2, dp_shard=2)


def test_rows_of_routers_and_experts_tell_nothing_about_samples() -> None:
    steps = changed(lambda name, gradient: gradient if name == "embedding" else noisy(name)(name, gradient), loss=4.4)
    reference = run()
    reference[0].gradients["0.mlp.experts.up"][0] = 0.0  # a feature without a gradient on one device, and with one here
    first = compare(reference, steps, tolerance=TOLERANCE).first
    assert first is not None
    said = Context(layout=Layout(ep=2, dp_shard=2), pieces=PIECES, tolerance=TOLERANCE)
    assert "samples are distributed wrongly" not in likely_cause(first, reference, steps, said)


# ---- whatever happens -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda name, t: t * 0,
        lambda name, t: t[:1],
        lambda name, t: t * math.nan,
        lambda name, t: t[:3] if "experts" in name else t + 1,
        lambda name, t: t.sum() if "experts" in name else t + 1,
    ],
)
@pytest.mark.parametrize("degrees", [{"ep": 2, "dp_shard": 2}, {"cp": 2}, {"ep": 2, "cp": 2, "tp": 2}])
def test_any_two_runs_have_a_cause(change: Change, degrees: dict[str, int]) -> None:
    for others in ({}, {"loss": 4.4}, {"weights": {name: change(name, w) for name, w in run()[0].weights.items()}}):
        steps = changed(change, **others)
        for reference, candidate in ((run(), steps), (steps, run())):
            first = compare(reference, candidate, tolerance=TOLERANCE).first
            assert first is not None
            said = Context(layout=Layout(**degrees), pieces=PIECES, initial=INITIAL, tolerance=TOLERANCE)
            assert likely_cause(first, reference, candidate, said).endswith(".")
