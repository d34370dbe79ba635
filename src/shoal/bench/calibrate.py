"""This machine, measured in about a minute: products, attention, memory, launches, a real block and messages.

Every rank of a run computes while the others do, shares the memory and the power with them, and waits for the slowest.
So all ranks measure the same thing at the same time, and the slowest counts. `shoal.bench.fit_cluster` makes a
`Cluster` of it.
"""

from __future__ import annotations

import os
import platform
import socket
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

from shoal.bench.fit_cluster import BYTES, Reading, Readings
from shoal.comm.collectives import all_gather, reduce_scatter
from shoal.comm.rendezvous.environment import Placement
from shoal.comm.world import World
from shoal.config.recipe import ModelSection, OptimSection
from shoal.errors import ShoalError
from shoal.launch.local import launch
from shoal.numerics.init import initialise
from shoal.numerics.optim.build import build_optimizer
from shoal.numerics.precision import hush
from shoal.train.build_model import build_model, describe

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HEAD_DIM = 128
ROUNDS = 5
"""How often a reading is taken. The fastest counts: what disturbs a machine only ever makes it slower."""
PARTS = 100
"""A reading takes this part of all the time, if it can."""
LEAST = 0.02
"""Seconds that a reading may always take: what is short is measured several times, however little time there is."""
LONGEST = 50
"""A product that would take more than this part of all the time is left out, and so are larger ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What is measured, in sizes that suit a device."""

    products: tuple[tuple[int, int, int], ...]
    """(M, N, K): tokens, features that come out, features that go in. From small to large."""
    precisions: tuple[str, ...]
    compute: str
    """In which blocks are measured."""
    attended: tuple[str, ...]
    """In which attention is."""
    attention: tuple[int, int]
    """Tokens."""
    heads: int
    copy: int
    """Bytes."""
    elementwise: int
    block: dict[str, int]
    """Of a model with one block."""
    tokens: int
    """That it is given."""
    messages: tuple[int, int, int]
    """Bytes."""


CPU = Sizes(
    products=(
        *((64, 256, 256), (256, 256, 256), (256, 768, 256), (512, 512, 512), (1024, 1024, 256), (1024, 256, 1024)),
        *((256, 1024, 1024), (2048, 512, 512), (1024, 1024, 1024), (1024, 512, 2048), (1024, 2048, 512)),
        (2048, 1024, 1024),
    ),
    precisions=("fp32", "fp64", "bf16", "fp16"),
    compute="fp32",
    attended=("fp32", "fp64"),
    attention=(256, 1024),
    heads=4,
    copy=2**27,
    elementwise=2**24,
    block={"hidden": 512, "num_heads": 8, "num_kv_heads": 4, "ffn": 1536},
    tokens=512,
    messages=(2**16, 2**20, 2**24),
)
CUDA = Sizes(
    products=(
        *((128, 4096, 4096), (1024, 1024, 4096), (2048, 2048, 2048), (2048, 4096, 4096), (8192, 1024, 4096)),
        *((4096, 6144, 4096), (8192, 4096, 4096), (16384, 4096, 4096), (4096, 14336, 4096), (8192, 14336, 4096)),
        *((8192, 4096, 14336), (8192, 8192, 8192)),
    ),
    precisions=("bf16", "fp32", "fp16", "fp8", "fp64"),
    compute="bf16",
    attended=("bf16", "fp16", "fp32"),
    attention=(2048, 8192),
    heads=16,
    copy=2**30,
    elementwise=2**29,
    block={"hidden": 4096, "num_heads": 32, "num_kv_heads": 8, "ffn": 14336},
    tokens=8192,
    messages=(2**16, 2**23, 2**28),
)
SMALL_BLOCK = {"hidden": 64, "num_heads": 4, "num_kv_heads": 2, "ffn": 128}
"""A block in which launching its kernels is all that takes time, with `FEW` tokens."""
FEW = 16


def calibrate(
    *, nproc: int | None = None, device: str = "auto", seconds: float = 60.0, quiet: bool = False
) -> Readings:
    """Measure this machine on all of its GPUs at once, or on its CPU. `seconds`: about how long.

    `nproc` None: a rank for each GPU; on the CPU two, since it takes two to send a message.
    """
    num_cuda = 0 if device == "cpu" else torch.cuda.device_count()
    num_ranks = nproc or num_cuda or 2
    arguments = (device, seconds, quiet, time.monotonic())  # a clock that all processes of a machine share
    if num_ranks > 1:
        return launch(measure, arguments, nproc=num_ranks)[0]
    try:
        return measure(None, None, *arguments)
    except torch.OutOfMemoryError as error:
        what = f"the GPU has too little memory to be measured: {error}"
        raise ShoalError(what, fix="end what else runs on it, or --device cpu") from error


def measure(
    placement: Placement | None, store: dist.Store | None, device: str, seconds: float, quiet: bool, began: float
) -> Readings:
    """What one rank does; every rank returns the same. The seconds count from when ranks began to be started."""
    with World.start(placement, device=device, store=store) as world, warnings.catch_warnings():
        hush(world.device)
        is_cuda = world.device.type == "cuda"
        context = 0.0 if is_cuda else _resident_after_a_step(world)
        bench = Bench(world, seconds, _progress(world, quiet), began=began)
        with bench.progress:
            bench.run()
        return Readings(
            readings=tuple(bench.readings),
            device=torch.cuda.get_device_name(world.device) if is_cuda else _cpu_name(),
            kind=world.device.type,
            num_ranks=world.size,
            num_threads=torch.get_num_threads(),
            memory=_memory(world),
            context=_outside_of_allocator(world.device) if is_cuda else context,
            host=socket.gethostname(),
            torch=torch.__version__,
            date=date.today().isoformat(),
            took=time.monotonic() - began,
        )


@dataclass
class Bench:
    """Takes readings, one after the other, in step with all ranks."""

    world: World
    seconds: float
    """For everything."""
    progress: Progress
    readings: list[Reading] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    until: float = 0.0
    """When the part that is being measured should be over, in seconds from the beginning."""
    num_left: int = PARTS
    """Readings of it that are still to be taken."""

    def __post_init__(self) -> None:
        self.until = self.until or self.seconds

    @property
    def device(self) -> torch.device:
        """Of this rank."""
        return self.world.device

    @property
    def sizes(self) -> Sizes:
        """That suit it."""
        return CUDA if self.device.type == "cuda" else CPU

    def run(self) -> None:
        """Measure everything."""
        words = self.precisions()
        attended = len([word for word in self.sizes.attended if _supports(self.device, word)])
        parts: list[tuple[str, int, Callable[[], None]]] = [
            *((f"products in {word}", len(self.sizes.products), partial(self.products, word)) for word in words),
            ("attention", attended * len(self.sizes.attention), self.attention),
            ("memory", 2, self.memory),
            ("a block", 2, self.blocks),
            ("messages", 4 * len(self.sizes.messages), self.messages),
        ]
        task = self.progress.add_task("", total=len(parts))
        for number, (name, count, measure_part) in enumerate(parts):
            self.progress.update(task, description=name)
            elapsed = self.elapsed()
            self.until = elapsed + max(0.0, self.seconds - elapsed) / (len(parts) - number)
            self.num_left = count
            measure_part()
            self.progress.advance(task)

    def precisions(self) -> list[str]:
        """In which this device can multiply."""
        return [word for word in self.sizes.precisions if _supports(self.device, word)]

    # ---- what is measured -------------------------------------------------------------------------------------------

    def products(self, precision: str) -> None:
        """x @ W.T, as linear layers compute it. Data is random: zeros need less power, and run faster."""
        last: Reading | None = None
        for rows, columns, inner in self.sizes.products:
            flops = 2.0 * rows * columns * inner
            if last is not None:
                expected = flops / last.rate
                # It is computed at least twice: to warm up, and to be timed. A rate is fitted to several, so short
                # ones are always taken.
                left = max(2 * LEAST, self.until - self.elapsed())
                if expected > self.seconds / LONGEST or 2 * expected > left:
                    return
            multiply = _product(rows, columns, inner, precision, self.device)
            size, traffic = BYTES[precision], rows * inner + inner * columns + rows * columns
            last = self.take(
                "product", (rows, columns, inner), precision, multiply, flops=flops, traffic=float(size * traffic)
            )

    def attention(self) -> None:
        """Causal, forward and backward. The backward computes the scores again, so both are 3.5 times the forward."""
        words = [word for word in self.sizes.attended if _supports(self.device, word)]
        for precision, num_tokens in product(words, self.sizes.attention):
            shape = (1, self.sizes.heads, num_tokens, HEAD_DIM)
            q, k, v, grad = (torch.randn(shape, device=self.device, dtype=DTYPES[precision]) for _ in range(4))
            flops = 3.5 * 2 * self.sizes.heads * (num_tokens**2 / 2) * (2 * HEAD_DIM)
            self.take("attention", (num_tokens, HEAD_DIM), precision, _attention(q, k, v, grad), flops=flops)

    def memory(self) -> None:
        """A copy, and what layers do between products: it reads and writes as well, and on a CPU also computes."""
        self.take(
            "copy", (self.sizes.copy,), "fp32", _copy(self.sizes.copy, self.device), traffic=2.0 * self.sizes.copy
        )
        size, precision = self.sizes.elementwise, self.sizes.compute
        self.take("elementwise", (size,), precision, _elementwise(size, precision, self.device), traffic=10.0 * size)

    def blocks(self) -> None:
        """A block of a real model, forward and backward: a small one, which launches all the same, and a large one."""
        precision = self.sizes.compute
        launches, _ = _block_step(SMALL_BLOCK, FEW, precision, self.device)
        self.take("launch", (FEW, SMALL_BLOCK["hidden"]), precision, launches)
        work, flops = _block_step(self.sizes.block, self.sizes.tokens, precision, self.device)
        self.take("block", (self.sizes.tokens, self.sizes.block["hidden"]), precision, work, flops=flops)

    def messages(self) -> None:
        """Three sizes of each collective, between all ranks at once."""
        if self.world.size == 1:
            return
        for size in self.sizes.messages:
            for what, send in _collectives(self.world, size).items():
                self.take(what, (size,), "fp32", send, traffic=float(size))

    # ---- how it is measured -----------------------------------------------------------------------------------------

    def take(
        self,
        what: str,
        size: tuple[int, ...],
        precision: str,
        work: Callable[[], object],
        *,
        flops: float = 0.0,
        traffic: float = 0.0,
    ) -> Reading:
        """Measure something. All ranks do it equally often, also where they take their time."""
        self.world.barrier()
        self.timed(work, 1)  # allocates, compiles, connects
        once = self.slowest(self.timed(work, 1))
        left = max(0.0, self.until - self.elapsed()) / max(1, self.num_left)
        limit = max(LEAST, min(self.seconds / PARTS, left))
        self.num_left -= 1
        number = max(1, int(limit / ROUNDS / once))
        rounds = min(ROUNDS, int(limit / once / number))  # 0: there is no time for more than the one that is known
        seconds = min([once, *(self.timed(work, number) / number for _ in range(rounds))])
        seconds = self.slowest(seconds)
        reading = Reading(what=what, size=size, precision=precision, seconds=seconds, flops=flops, traffic=traffic)
        self.readings.append(reading)
        return reading

    def timed(self, work: Callable[[], object], number: int) -> float:
        """Seconds for so many, one after the other."""
        _synchronize(self.device)
        start = time.perf_counter()
        for _ in range(number):
            work()
        _synchronize(self.device)
        return time.perf_counter() - start

    def elapsed(self) -> float:
        """Seconds since the beginning, the same on all ranks."""
        return self.slowest(time.monotonic() - self.began)

    def slowest(self, seconds: float) -> float:
        """Of all ranks."""
        return self.world.all_reduce_host([seconds], "max").wait()[0]


# ---- the work -------------------------------------------------------------------------------------------------------


def _product(rows: int, columns: int, inner: int, precision: str, device: torch.device) -> Callable[[], Tensor]:
    dtype = DTYPES.get(precision, torch.bfloat16)
    x, weight = (torch.randn(size, inner, device=device).to(dtype) for size in (rows, columns))
    if precision != "fp8":
        return lambda: F.linear(x, weight)
    x8, weight8 = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(x8, weight8.T, one, one, out_dtype=torch.bfloat16)


def _copy(num_bytes: int, device: torch.device) -> Callable[[], Tensor]:
    source = torch.randn(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _elementwise(num_bytes: int, precision: str, device: torch.device) -> Callable[[], object]:
    """Four kernels that read or write a tensor ten times: what a gate, a norm's scale and a residual are made of."""
    dtype = DTYPES[precision]
    gate, up = torch.randn(2, num_bytes // dtype.itemsize, device=device, dtype=dtype)
    return lambda: (F.silu(gate).mul_(up), gate.mul(0.5), gate.add(up))


def _attention(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Callable[[], object]:
    inputs = [x.requires_grad_() for x in (q, k, v)]
    return lambda: torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), inputs, grad)


def _block_step(
    dims: dict[str, int], num_tokens: int, precision: str, device: torch.device
) -> tuple[Callable[[], object], float]:
    """Forward and backward of the block of a model that has one, and their FLOPs, counted by the model."""
    model, tokens = _model(dims, num_tokens, device)
    description = describe(model)
    block = model.get_submodule(description.blocks[0])
    autocast = torch.autocast(device.type, dtype=DTYPES[precision], enabled=precision in ("bf16", "fp16"))
    arguments = _arguments_of(block, lambda: model(tokens), autocast)
    x, rest = arguments[0].detach().requires_grad_(), arguments[1:]
    grad = torch.randn_like(x)

    def step() -> None:
        with autocast:
            output = block(x, *rest)
        output.backward(grad)

    assert description.training_flops is not None
    return step, description.training_flops((1, num_tokens)) - 6.0 * 8 * dims["hidden"] * num_tokens


def _model(dims: dict[str, int], num_tokens: int, device: torch.device) -> tuple[nn.Module, Tensor]:
    """A model with one block, and a sample for it."""
    with torch.device(device):
        model = build_model(ModelSection.model_validate({"name": "llama", "num_layers": 1, "vocabulary": 8, **dims}))
        tokens = torch.zeros(1, num_tokens, dtype=torch.int64)
    initialise(model, seed=0)
    return model, tokens


def _arguments_of(module: nn.Module, run: Callable[[], object], autocast: Any) -> tuple[Any, ...]:
    """What a submodule is called with."""
    seen: list[tuple[Any, ...]] = []
    hook = module.register_forward_pre_hook(lambda _, arguments: seen.append(arguments))
    with torch.no_grad(), autocast:
        run()
    hook.remove()
    return seen[0]


def _collectives(world: World, num_bytes: int) -> dict[str, Callable[[], object]]:
    """Messages of so many bytes in all: to the next rank, gathered from all, summed over all and divided, summed."""
    whole = torch.zeros(num_bytes // 4, device=world.device)
    received = torch.empty_like(whole)
    part = whole[: whole.numel() // world.size].clone()
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size

    def pass_on() -> None:
        swaps = [dist.P2POp(dist.isend, whole, after), dist.P2POp(dist.irecv, received, before)]
        for work in dist.batch_isend_irecv(swaps):
            work.wait()

    return {
        "send": pass_on,
        "all_gather": lambda: all_gather(part, 0, dist.group.WORLD),
        "reduce_scatter": lambda: reduce_scatter(whole[: part.numel() * world.size], 0, dist.group.WORLD),
        "all_reduce": lambda: dist.all_reduce(whole),
    }


# ---- the machine ----------------------------------------------------------------------------------------------------


def _supports(device: torch.device, precision: str) -> bool:
    if device.type == "cpu":
        return precision != "fp8"
    if precision == "bf16":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return precision != "fp8" or torch.cuda.get_device_capability(device) >= (8, 9)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _memory(world: World) -> float:
    """Bytes that a rank has to itself: its GPU's, or its share of the host's."""
    if world.device.type == "cuda":
        return float(torch.cuda.mem_get_info(world.device)[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / world.local_size


def _outside_of_allocator(device: torch.device) -> float:
    """Bytes of a GPU in use that torch's allocator knows nothing of: context, libraries, communicators."""
    free, total = torch.cuda.mem_get_info(device)
    return float(total - free - torch.cuda.memory_reserved(device))


def _resident_after_a_step(world: World) -> float:
    """Bytes of this process in memory when it has trained and talked a little, and holds next to no tensor: all that is
    measured later would leave libraries in memory that a run may never need."""
    model, tokens = _model(SMALL_BLOCK, FEW, world.device)
    model(tokens).sum().backward()
    build_optimizer(model.parameters(), OptimSection(), lr=1e-3).step()
    world.barrier()
    return float(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))


def _cpu_name() -> str:
    """As the system calls it. ARM's does not say; then its architecture must do."""
    lines = _cpu_lines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"CPU {names[0] if names else platform.machine()}"


def _cpu_lines() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def _progress(world: World, quiet: bool) -> Progress:
    columns = (BarColumn(bar_width=24), TextColumn("measuring {task.description}"), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet or not world.is_main)
