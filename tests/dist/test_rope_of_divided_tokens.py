"""Under cp a rank has some tokens of a sequence. Rotary frequencies that transformers chooses by the length of the
sequence, as Phi-3.5's, were chosen by the largest position of a rank: gradients were off by 0.1 to 0.8."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from shoal.blueprint.plan import Plan
from shoal.comm.world import World
from shoal.train.build_model import describe
from shoal.verification.case import Case
from shoal.verification.rank import verify_in
from tests.dist.pool import Pool

pytest.importorskip("transformers")
import transformers

from tests import huggingface

SHORT = huggingface.TOKENS - 2  # ranks without the last tokens see a sequence that is not longer
KINDS: dict[str, dict[str, Any]] = {
    "longrope": {
        "original_max_position_embeddings": SHORT,
        "short_factor": [1.0, 1.5],
        "long_factor": [2.0, 4.0],
    },
    "dynamic": {},
}


def build(kind: str) -> Any:
    torch.manual_seed(0)
    rope = {"rope_type": kind, "rope_theta": 100.0, "factor": 4.0, **KINDS[kind]}
    sizes = {**huggingface.SMALL, "max_position_embeddings": SHORT}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, rope_parameters=rope))


def largest_difference(world: World, kind: str, words: str) -> float:
    plan = Plan.parse(f"fp64 {words}").resolve(world.size)
    case = Case(build=functools.partial(build, kind), batches=[huggingface.batch("llama")] * 2, plan=plan)
    verdict = verify_in(world, case).verdict
    return 0.0 if verdict is None else max(verdict.worst.loss, verdict.worst.grad, verdict.worst.weight)


@pytest.mark.parametrize(("kind", "words"), [("longrope", "cp=2 ring mb=2"), ("dynamic", "cp=2 ulysses")])
def test_every_rank_rotates_by_the_length_of_the_whole_sequence(pool: Pool, kind: str, words: str) -> None:
    assert max(pool.run(largest_difference, 2, kind, words)) < 1e-12


def test_a_model_that_remembers_the_longest_sequence_is_on_no_stages() -> None:
    assert "model.rotary_emb" in describe(build("dynamic")).why_not["pp"]
    assert not describe(build("longrope")).why_not.keys() & {"pp", "cp"}
