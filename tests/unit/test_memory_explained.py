"""The sentence below the memory of a rank that ran out of it agrees with the rows above."""

from __future__ import annotations

import pytest

from shoal.predict.estimate.peak_memory import PeakMemory
from shoal.train.recipe.memory.explain import _verdict

MIB = 2**20
STATES = {"parameters": 17 * MIB, "gradients": 17 * MIB, "optimizer": 34 * MIB}
OTHERS = {"activations": 600 * MIB, "context": 300 * MIB}
PREDICTED = PeakMemory(**STATES, **OTHERS, **dict.fromkeys(("gathered", "buffers", "logits", "allocator"), 0.0))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (600, "no cause grew over its prediction; 0.65 GiB are needed together"),
        (620, "no cause grew over its prediction by much: activations, buffers, other took 20.00 MiB more; 0.65 GiB"),
        (900, "activations, buffers, other took 0.29 GiB more than predicted"),
    ],
)
def test_the_cause_that_grew(other: int, words: str) -> None:
    measured = {"parameters": 17 * MIB, "gradients": 0, "optimizer": 0, "total": (17 + other) * MIB}
    assert _verdict(PREDICTED, measured).startswith(words)
