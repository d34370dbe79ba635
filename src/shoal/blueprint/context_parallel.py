"""Context parallelism as numbers: the tokens of each rank, the steps of ring attention, their traffic and memory.

torch's attention kernels run on one device. Context parallelism divides the tokens of a sequence over `cp` ranks. Its
rules are written once, here. `shoal.parallel.context.attention` runs `ring_steps` on the tokens of `zigzag`, and the
planner counts work and memory from the same two functions.

A causal query attends only to earlier tokens, so the rank with the end of a sequence has the most work. Ring attention
cuts the sequence into 2 cp chunks and gives each rank an early one and a late one, folded like a zig-zag:

    chunk    0  1  2  3  4  5  6  7        cp=4: rank 0 holds 0 and 7, rank 1 holds 1 and 6, ...
    rank     0  1  2  3  3  2  1  0

Then every step of every rank is the same amount of work, and no step computes masked pairs:

    step 0           own keys               all queries x all keys, causal
    earlier keys     source < rank          all queries x their early chunk: their late chunk is after all own tokens
    later keys       source > rank          late queries x all their keys: own early queries are before all of theirs
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm, prod
from typing import Literal

from shoal.blueprint.plan import Plan

Shape = tuple[int, ...]
Range = tuple[int, int]
"""Tokens from start to stop, stop excluded."""


# ---- tokens of a rank -----------------------------------------------------------------------------------------------


def zigzag(tokens: int, rank: int, cp: int) -> list[Range]:
    """The tokens of a rank of a ring: its early chunk and its late one. 2 cp divides the tokens.

    >>> [zigzag(8, rank, 2) for rank in range(2)]
    [[(0, 2), (6, 8)], [(2, 4), (4, 6)]]
    """
    assert tokens % (2 * cp) == 0, (tokens, cp)
    chunk = tokens // (2 * cp)
    return [(index * chunk, (index + 1) * chunk) for index in (rank, 2 * cp - 1 - rank)]


def contiguous(tokens: int, rank: int, cp: int) -> list[Range]:
    """The tokens of a rank of ulysses: one part after the other. cp divides the tokens.

    >>> [contiguous(8, rank, 2) for rank in range(2)]
    [[(0, 4)], [(4, 8)]]
    """
    assert tokens % cp == 0, (tokens, cp)
    part = tokens // cp
    return [(rank * part, (rank + 1) * part)]


# ---- steps of a ring ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RingStep:
    """The work of one rank while the next keys and values travel."""

    source: int
    """The position on the cp axis that the keys and values come from."""
    queries: Literal["all", "late"]
    """The part of its own queries that attends to them."""
    keys: Literal["all", "early"]
    is_causal: bool
    """Whether queries and keys are the same tokens, so that the later half of the pairs is masked."""


def ring_steps(rank: int, cp: int, causal: bool = True) -> Iterator[RingStep]:
    """The steps of a rank; keys and values travel from each rank to the next one.

    >>> [(step.source, step.queries, step.keys) for step in ring_steps(1, 3)]
    [(1, 'all', 'all'), (0, 'all', 'early'), (2, 'late', 'all')]
    """
    for number in range(cp):
        source = (rank - number) % cp
        if not causal:
            yield RingStep(source, "all", "all", is_causal=False)
        elif source == rank:
            yield RingStep(source, "all", "all", is_causal=True)
        elif source < rank:
            yield RingStep(source, "all", "early", is_causal=False)
        else:
            yield RingStep(source, "late", "all", is_causal=False)


def ring_work(cp: int, tokens: int, causal: bool = True) -> list[int]:
    """Pairs of a query and a key that each rank computes for one head of one sequence.

    >>> ring_work(4, 16)
    [34, 34, 34, 34]
    """
    return [sum(_pairs(step, tokens // cp) for step in ring_steps(rank, cp, causal)) for rank in range(cp)]


def _pairs(step: RingStep, own: int) -> int:
    queries = own if step.queries == "all" else own // 2
    keys = own if step.keys == "all" else own // 2
    return own * (own + 1) // 2 if step.is_causal else queries * keys


# ---- traffic --------------------------------------------------------------------------------------------------------


def ring_elements(plan: Plan, *, samples: int, keys: Shape) -> int:
    """Elements of the keys and values of one rank, in one message; `keys` (heads, tokens, head dim) of a sample."""
    return 2 * samples * prod(keys) // (plan.layout.tp * plan.layout.cp)


def ulysses_elements(plan: Plan, *, samples: int, queries: Shape, keys: Shape) -> tuple[int, int]:
    """Elements of queries, keys and values of one rank, in one message, and of its output in another."""
    tp, cp = plan.layout.tp, plan.layout.cp
    out = samples * prod(queries) // (tp * cp)
    repeated = repeated_kv_heads(keys[0] // tp, cp)
    return out + 2 * samples * repeated * prod(keys[1:]) // cp, out


def repeated_kv_heads(num_kv_heads: int, cp: int) -> int:
    """Key/value heads that ulysses sends: each is repeated until cp divides their number.

    >>> repeated_kv_heads(8, 4), repeated_kv_heads(2, 4), repeated_kv_heads(3, 2)
    (8, 4, 6)
    """
    return lcm(num_kv_heads, cp)


# ---- memory ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AttentionMemory:
    """Bytes of one attention on a rank for one microbatch, without the workspace of a kernel (`cpu_kernel_bytes`)."""

    kept: int
    """Stored from its forward to its backward: queries, keys, values, the output, and the log-sum-exp of each query."""
    peak_forward: int
    """The peak of its forward, its inputs included."""
    peak_backward: int
    """The peak of its backward, the gradient of the output included."""


def attention_memory(
    plan: Plan,
    *,
    samples: int,
    tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    size_bytes: int,
    causal: bool = True,
) -> AttentionMemory:
    """Predicted bytes of attention over a whole sequence, on the rank of a plan with the largest peak.

    They follow from the buffers of `shoal.parallel.context.ring` and `shoal.parallel.context.ulysses`. q, kv, out and
    lse are the bytes of a rank's tokens, and c is the number of ranks:

    | context | kept                | forward                                 | backward                               |
    |---------|---------------------|-----------------------------------------|----------------------------------------|
    | none    | q + kv + out + lse  | as kept                                 | kept + out + q + kv                    |
    | ring    | the same, of T/c    | an incoming block, one in use, the      | the same blocks, three of gradients    |
    |         |                     | output of a step and their sum          | and the result of a step               |
    | ulysses | the same, of N/c    | three packed copies of q + kv, three of | kept + 2 out + q + kv, or three packed |
    |         | heads and all T     | out, and the inputs                     | copies                                 |
    """
    cp, tp = plan.layout.cp, plan.layout.tp
    rows = samples * tokens // cp
    heads, kv_heads = num_heads // tp, num_kv_heads // tp
    row = head_dim * size_bytes
    held = _RankBytes(
        q=rows * heads * row,
        kv=2 * rows * kv_heads * row,
        lse=rows * heads * max(4, size_bytes),
        widening=max(4, size_bytes) // size_bytes,
    )
    if cp == 1:
        return AttentionMemory(held.kept, held.kept, held.kept + 2 * held.q + held.kv)
    if plan.context == "ulysses":
        return _ulysses_memory(held, repeated_kv_heads(kv_heads, cp) // kv_heads)
    steps = [list(ring_steps(rank, cp, causal)) for rank in range(cp)]
    return AttentionMemory(
        kept=held.kept,
        peak_forward=max(moment for mine in steps for moment in _ring_forward(held, mine)),
        peak_backward=max(moment for mine in steps for moment in _ring_backward(held, mine)),
    )


def cpu_kernel_bytes(num_queries: int, num_threads: int) -> int:
    """Workspace of torch's CPU kernel in a backward, for any number of keys.

    Every thread has a block of scores and one of their gradients, 512 keys wide, in float32.

    >>> cpu_kernel_bytes(8192, num_threads=2)
    2097152
    """
    rows = 256 if num_queries >= 768 else 64 if num_queries >= 192 else 32
    return num_threads * 2 * rows * 512 * 4


@dataclass(frozen=True, slots=True)
class _RankBytes:
    """Bytes of one rank's tokens; the output is as large as the queries."""

    q: int
    kv: int
    lse: int
    widening: int
    """The size of a sum in elements: sums are at least float32."""

    @property
    def kept(self) -> int:
        return 2 * self.q + self.kv + self.lse


def _ulysses_memory(held: _RankBytes, times: int) -> AttentionMemory:
    """Bytes under ulysses; `times` is the number of repeats of each key/value head."""
    kv = held.kv * times
    kept, packed = 2 * held.q + kv + held.lse, held.q + kv
    given = held.q + held.kv + (kv if times > 1 else 0)
    return AttentionMemory(
        kept=kept,
        peak_forward=given + 3 * packed + 3 * held.q + held.lse,
        peak_backward=max(kept + 3 * held.q + kv, held.q + 3 * packed),
    )


def _share(step: RingStep) -> tuple[float, float]:
    """The fractions of its queries and of the current keys that a rank computes with."""
    return (1.0 if step.queries == "all" else 0.5), (1.0 if step.keys == "all" else 0.5)


def _blocks(number: int, num_steps: int) -> int:
    """Blocks of keys and values from other ranks at a step: the one in use, and the incoming one."""
    return (number > 0) + (number < num_steps - 1)


def _ring_forward(held: _RankBytes, steps: list[RingStep]) -> Iterator[int]:
    """Bytes at the peaks of every step: at a send, after the attention, and while its output is merged."""
    total, given = held.q * held.widening + held.lse, held.q + 2 * held.kv  # the inputs, and kv packed to be sent
    for number, step in enumerate(steps):
        queries, _ = _share(step)
        part = queries * (held.q + held.lse)
        blocks = given + _blocks(number, len(steps)) * held.kv
        if 1 < number < len(steps) - 1:  # the block of the last send is still allocated
            yield int(blocks + held.kv + total)
        yield int(blocks + (total if number else 0) + part)
        if number:
            widened = held.q * held.widening if held.widening > 1 else 0
            yield int(blocks + total + part + queries * (widened + 2 * held.lse))
    yield int(given + held.kv + total + (held.q if held.widening > 1 else 0))


def _ring_backward(held: _RankBytes, steps: list[RingStep]) -> Iterator[int]:
    """Bytes at the peaks of every step: with its gradients, at a send of a block's gradients, and at the final cast."""
    wide_q, wide_kv = held.q * held.widening, held.kv * held.widening
    always = held.kept + held.q + wide_q + wide_kv
    for number, step in enumerate(steps):
        queries, keys = _share(step)
        found = queries * held.q + keys * held.kv
        blocks = always + _blocks(number, len(steps)) * held.kv
        yield int(blocks + (2 * wide_kv if number > 1 else 0) + found)
        if number:
            yield int(blocks + (min(number, 2) + 1) * wide_kv)
    yield int(always + 2 * wide_kv + (held.q + held.kv if held.widening > 1 else 0))
