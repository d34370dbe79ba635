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
    1: [("mb=2", "moe"), ("mb=2 recompute=full", "bias"), ("mb=4 recompute=selective", "moe"), ("mb=2", "packed")],
    2: [
        ("cp=2 mb=2", "llama"),
        ("cp=2 mb=2", "packed"),
        ("cp=2 ulysses mb=2", "packed"),
        ("cp=2 ulysses mb=2 recompute=full", "llama"),
        ("cp=2 mb=2 recompute=full", "packed"),
        ("cp=2 mb=2 recompute=selective", "llama"),
        ("cp=2 zero=1 mb=2", "llama"),
        ("cp=2 zero=3 mb=2", "moe"),
        ("cp=2 mb=2", "capacity"),
        ("cp=2 ulysses mb=2", "choice"),
        ("cp=2 ep=2 zero=2 mb=2", "bias"),
        ("ep=2 zero=1 mb=2", "moe"),
        ("ep=2 zero=2 mb=2", "bias"),
        ("ep=2 zero=3 mb=2 recompute=full", "moe"),
        ("ep=2 zero=3 mb=2 recompute=selective", "bias"),
        ("ep=2 zero=3 mb=4", "capacity"),
        ("ep=2 zero=3 mb=4", "choice"),
        ("tp=2 mb=2", "moe"),
        ("tp=2 sp=off mb=2", "bias"),
        ("tp=2 mb=2", "capacity"),
        ("dp_replicate=2 mb=2", "moe"),
        ("zero=3 mb=2", "bias"),
        ("pp=2 1f1b mb=1", "moe"),
        ("pp=2 1f1b mb=1 recompute=full", "moe"),
        ("pp=2 zb mb=1", "bias"),
        ("pp=2 zbv mb=1", "moe"),
        ("pp=2 dualpipev mb=1", "bias"),
        ("pp=2 gpipe mb=2", "packed"),
    ],
    4: [
        ("cp=4 mb=2", "llama"),
        ("cp=4 mb=2", "packed"),
        ("cp=4 ulysses mb=2", "llama"),
        ("cp=2 dp_replicate=2 mb=2", "llama"),
        ("cp=2 zero=3 mb=2", "packed"),
        ("cp=2 zero=1 mb=2", "moe"),
        ("cp=2 tp=2 mb=2", "packed"),
        ("cp=2 tp=2 sp=off mb=2", "llama"),
        ("cp=2 tp=2 ulysses mb=2", "moe"),
        ("cp=2 tp=2 mb=2", "capacity"),
        ("cp=2 pp=2 1f1b mb=1", "packed"),
        ("cp=2 pp=2 interleaved mb=1 ulysses", "llama"),
        ("cp=2 pp=2 zbv mb=1", "llama"),
        ("cp=2 pp=2 zero=2 zb mb=1", "moe"),
        ("ep=2 zero=3 mb=2", "moe"),
        ("ep=4 zero=2 mb=2", "bias"),
        ("ep=2 dp_replicate=2 dp_shard=2 zero=3 mb=2", "moe"),
        ("ep=2 tp=2 zero=3 mb=2", "moe"),
        ("ep=2 tp=2 sp=off zero=1 mb=2", "bias"),
        ("ep=2 cp=2 zero=3 mb=2", "bias"),
        ("ep=4 cp=2 zero=3 mb=2", "moe"),
        ("ep=2 pp=2 zero=1 1f1b mb=1", "moe"),
        ("ep=2 pp=2 zero=3 dualpipev mb=1", "bias"),
        ("ep=2 pp=2 zero=2 looped mb=2", "moe"),
        ("ep=2 pp=2 zero=2 zbv mb=1", "moe"),
        ("pp=2 tp=2 zb mb=1", "moe"),
    ],
    8: [
        ("dp_replicate=2 cp=2 tp=2 mb=2", "llama"),
        ("cp=2 tp=2 pp=2 1f1b mb=1", "packed"),
        ("dp_shard=2 cp=2 tp=2 zero=3 mb=2 ep=2", "moe"),
        ("dp_shard=2 tp=2 pp=2 ep=2 zero=1 zbv mb=1", "moe"),
        ("dp_replicate=2 dp_shard=2 cp=2 ep=4 zero=3 mb=1", "bias"),
        ("cp=2 pp=2 dp_shard=2 ep=4 zero=2 1f1b mb=1", "moe"),
    ],
}
