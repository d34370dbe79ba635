"""Which compositions of parallelisms are proven: the plans that tests/dist/test_compositions.py trains, by number of
ranks. The table in docs/compositions.md is made from this list.

Each plan is followed by the model that it is tried with:

llama      dense
packed     dense, several documents in a sample
moe        softmax router, auxiliary loss and z-loss, one dense layer first
bias       sigmoid router, shared expert, balanced by a bias
capacity   a router that drops
choice     experts that choose their tokens
"""

from __future__ import annotations

PLANS: dict[int, list[tuple[str, str]]] = {
    1: [("mb=2", "moe"), ("mb=2 recompute=full", "bias"), ("mb=2", "packed")],
    2: [
        ("cp=2 mb=2", "llama"),
        ("cp=2 ulysses mb=2", "packed"),
        ("cp=2 mb=2", "capacity"),
        ("cp=2 ulysses mb=2", "choice"),
        ("ep=2 zero=2 mb=2", "bias"),
        ("ep=2 zero=3 mb=2 recompute=full", "moe"),
        ("ep=2 zero=3 mb=4", "capacity"),
        ("ep=2 zero=3 mb=4", "choice"),
        ("tp=2 mb=2", "moe"),
        ("tp=2 mb=2", "capacity"),
        ("dp_replicate=2 mb=2", "moe"),
        ("zero=3 mb=2", "bias"),
        ("pp=2 1f1b mb=2", "moe"),
    ],
    4: [
        ("cp=4 mb=2", "packed"),
        ("cp=4 ulysses mb=2", "llama"),
        ("cp=2 pp=2 zbv mb=2", "llama"),
        ("cp=2 pp=2 zero=2 zb mb=2", "moe"),
        ("ep=4 zero=2 mb=2", "bias"),
        ("ep=2 tp=2 sp=off zero=1 mb=2", "bias"),
        ("ep=2 pp=2 zero=1 1f1b mb=1", "moe"),
        ("ep=2 pp=2 zero=3 dualpipev mb=1", "bias"),
        ("ep=2 pp=2 zero=2 looped mb=2", "moe"),
        ("pp=2 tp=2 zb mb=2", "moe"),
        # Pairs that no plan above has: see tests/dist/table.py.
        ("cp=2 ulysses pp=2 gpipe ep=2 zero=1 recompute=full mb=2", "moe"),
        ("cp=2 ulysses tp=2 sp=off zero=2 recompute=selective mb=4", "packed"),
        ("cp=2 pp=2 interleaved ep=2 zero=2 recompute=full mb=2", "moe"),
        ("cp=2 pp=2 looped zero=1 recompute=selective mb=2", "packed"),
        ("cp=2 pp=2 gpipe zero=3 recompute=selective mb=2", "moe"),
        ("cp=2 ulysses pp=2 zb ep=2 zero=3 mb=2", "bias"),
        ("cp=2 ulysses pp=2 interleaved zero=3 mb=2", "llama"),
        ("tp=2 sp=off pp=2 looped recompute=full mb=2", "moe"),
        ("tp=2 sp=off pp=2 interleaved mb=2", "bias"),
        ("dp_replicate=2 pp=2 interleaved recompute=selective mb=1", "llama"),
        ("tp=2 sp=off pp=2 1f1b recompute=selective mb=2", "packed"),
        ("cp=2 pp=2 dualpipev zero=1 mb=2", "llama"),
        ("cp=2 ulysses pp=2 dualpipev zero=2 mb=2", "packed"),
        ("dp_replicate=2 pp=2 looped recompute=full mb=1", "moe"),
        ("tp=2 sp=off pp=2 gpipe mb=2", "capacity"),
        ("tp=2 sp=off pp=2 zb mb=2", "bias"),
        ("tp=2 pp=2 interleaved mb=2", "moe"),
        ("tp=2 pp=2 dualpipev mb=2", "choice"),
        ("cp=2 ulysses pp=2 1f1b zero=2 mb=2", "capacity"),
        ("cp=2 ulysses pp=2 zbv zero=3 mb=2", "llama"),
        ("cp=2 pp=2 zb zero=1 mb=2", "packed"),
        ("cp=2 pp=2 gpipe zero=2 mb=2", "bias"),
        ("dp_replicate=2 pp=2 dualpipev mb=1", "bias"),
        ("dp_replicate=2 cp=2 ulysses mb=2", "packed"),
    ],
    8: [
        ("cp=2 tp=2 sp=off pp=2 1f1b mb=2", "packed"),
        ("dp_shard=2 cp=2 tp=2 zero=3 mb=2 ep=2", "moe"),
        ("dp_shard=2 tp=2 pp=2 ep=2 zero=1 zbv mb=1", "moe"),
        ("dp_replicate=2 dp_shard=2 cp=2 ep=4 zero=3 mb=1", "bias"),
        ("cp=2 ulysses tp=2 pp=2 looped zero=2 mb=2", "packed"),
        ("dp_replicate=2 tp=2 sp=off pp=2 zbv mb=1", "moe"),
    ],
}

COMPILED = [
    (2, "cp=2 zero=1 recompute=selective mb=4", "packed"),
    (2, "pp=2 interleaved mb=2", "llama"),
    (4, "tp=2 sp=off pp=2 looped mb=2", "llama"),
]
"""Plans whose blocks are compiled, beside those in tests/dist/test_compiled.py."""
