"""On a GPU: layouts whose ranks share it over gloo compute what one process does there; offloading changes nothing."""

from __future__ import annotations

import functools

import pytest
import torch

import shoal
from shoal.models import llama
from shoal.numerics.offload.host_copies import HostCopies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a CUDA device; CI has none, run by hand with one"),
]

BUILD = functools.partial(
    llama.build, hidden=32, ffn=48, num_layers=4, num_heads=4, num_kv_heads=2, vocabulary=97, preset="tiny"
)


@pytest.mark.parametrize(
    ("nproc", "plan"),
    [
        (1, "mb=2 offload=optimizer"),
        (1, "zero=3 mb=2 offload=parameters"),
        (2, "zero=3 mb=2 offload=parameters"),
        (2, "zero=2 mb=2 offload=optimizer"),
        (2, "tp=2 mb=2 recompute=selective"),
        (4, "pp=2 zero=2 zbv mb=1"),
        (4, "tp=2 pp=2 1f1b mb=1"),
    ],
)
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_a_layout_computes_what_one_gpu_does(nproc: int, plan: str, precision: str) -> None:
    tokens = torch.randint(97, (8, 17), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    proof = shoal.verify(BUILD, batch, plan, nproc=nproc, device="cuda", precision=precision)
    assert proof.equal, proof.cause


@pytest.mark.parametrize("bucket", [1, 2**12, 2**28])
def test_buckets_of_an_offloaded_optimizer(bucket: int) -> None:
    """Copies and updates overlap; each bucket waits for its own gradients, and the next forward for all weights."""
    weights = [torch.randn(size, 64, dtype=torch.float64, device="cuda") for size in (1, 700, 3, 64, 5000)]
    on_device, offloaded = ([torch.nn.Parameter(one.clone()) for one in weights] for _ in range(2))
    optimizer = torch.optim.AdamW(offloaded, lr=0.1, fused=True)
    copies, expected = HostCopies(optimizer, lambda one: one, bucket=bucket), torch.optim.AdamW(on_device, lr=0.1)
    for _ in range(5):
        for one, other in zip(on_device, offloaded, strict=True):
            one.grad = torch.randn_like(one) @ torch.randn(64, 64, dtype=torch.float64, device="cuda")
            other.grad = one.grad.clone()
        expected.step()
        copies.step()
        for one, other in zip(on_device, offloaded, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)


def test_weights_that_the_script_changes_are_kept_by_an_offloaded_optimizer() -> None:
    parameter = torch.nn.Parameter(torch.ones(8, device="cuda"))
    copies = HostCopies(torch.optim.SGD([parameter], lr=0.5), lambda one: one)
    for start in (1.0, 3.0):
        with torch.no_grad():
            parameter.fill_(start)
        parameter.grad = torch.ones_like(parameter)
        copies.step()
        assert parameter.tolist() == [start - 0.5] * 8
