"""Measure this machine in about a minute: products, attention, memory, launches, a transformer block and messages.

Ranks of a run compute at the same time, share memory and power, and wait for the slowest.
So all ranks measure the same operation at the same time, and the slowest counts. `shoal.bench.fit_cluster` fits a
`Cluster` to the readings.
"""

from __future__ import annotations

import os
import platform
import socket
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from shoal.bench import calibrate_workloads as workloads
from shoal.bench.fit_cluster import BYTES, Reading, Readings
from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.comm.world import World
from shoal.config.recipe import OptimSection
from shoal.errors import ShoalError
from shoal.launch.local import launch
from shoal.numerics.optim.build import build_optimizer
from shoal.numerics.precision import silence_matmul_warning

HEAD_DIM = 128
ROUNDS = 5
"""Rounds of a reading. The fastest counts, since disturbances only make it slower."""
PARTS = 100
"""A reading takes one of this many parts of the time, if it can."""
LEAST = 0.02
"""Seconds that a reading may always take, so that short operations are measured several times."""
LONGEST = 50
"""A product that would take more than one of this many parts of the time is skipped, and so are larger ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The operations to measure, in sizes for a kind of device."""

    products: tuple[tuple[int, int, int], ...]
    """(M, N, K): tokens, output features, input features. From small to large."""
    precisions: tuple[str, ...]
    compute: str
    """The precision of blocks."""
    attended: tuple[str, ...]
    """The precisions of attention."""
    attention: tuple[int, int]
    """Tokens."""
    heads: int
    copy: int
    """Bytes."""
    elementwise: int
    block: dict[str, int]
    """Dimensions of a model with one block."""
    tokens: int
    """Tokens in the input of the block."""
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
"""A block so small that, with `FEW` tokens, kernel launches take all of its time."""
FEW = 16


def calibrate(
    *,
    nproc: int | None = None,
    device: str = "auto",
    seconds: float = 60.0,
    quiet: bool = False,
    began: float | None = None,
) -> Readings:
    """Measure this machine on all of its GPUs at once, or on its CPU. `seconds`: about how long, from `began` on, a
    monotonic time; None: from now on.

    `nproc` None: a rank for each GPU; on the CPU two, since a message needs two ranks.
    """
    num_cuda = 0 if device == "cpu" else torch.cuda.device_count()
    num_ranks = nproc or num_cuda or 2
    began = time.monotonic() if began is None else began  # a clock that all processes of a machine share
    arguments = (device, seconds, quiet, began)
    if num_ranks > 1:
        return launch(measure, arguments, nproc=num_ranks)[0]
    try:
        return measure(None, None, *arguments)
    except torch.OutOfMemoryError as error:
        what = f"the GPU has too little memory to be measured: {error}"
        raise ShoalError(what, fix="stop other programs on the GPU, or --device cpu", code="N023") from error


def measure(
    placement: Placement | None,
    store: dist.Store | None,
    device: str,
    seconds: float,
    quiet: bool,
    began: float,
    threads: int | None = None,
    only: str | None = None,
) -> Readings:
    """Measure as one rank; every rank returns the same. The time counts from the start of the ranks. `threads` None: an
    even share of the cores. `only`: a precision, for readings beside steps in it; a busy machine slows both, so the
    median of the rounds counts, as it does of the steps."""
    with World.start(placement, device=device, store=store, threads=threads) as world, warnings.catch_warnings():
        silence_matmul_warning(world.device)
        is_cuda = world.device.type == "cuda"
        context = 0.0 if is_cuda else _resident_after_a_step(world)
        bench = CalibrationBench(world, seconds, _progress(world, quiet), began=began, only=only)
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
class CalibrationBench:
    """Take readings one after the other, in step with all ranks."""

    world: World
    seconds: float
    """The time for all readings."""
    progress: Progress
    readings: list[Reading] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    until: float = 0.0
    """When the current part should end, in seconds from the start."""
    num_left: int = PARTS
    """Readings that remain in the current part."""
    only: str | None = None
    """The precision that is needed, beside that of blocks; None: all, and the fastest round counts."""

    def __post_init__(self) -> None:
        self.until = self.until or self.seconds

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.world.device

    @property
    def sizes(self) -> Sizes:
        """The sizes for its kind."""
        return CUDA if self.device.type == "cuda" else CPU

    def run(self) -> None:
        """Measure everything."""
        words = self.precisions()
        attended = len(self.attended())
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
        """The precisions of products that this device supports."""
        return [word for word in self.sizes.precisions if _supports(self.device, word) and self._is_needed(word)]

    def attended(self) -> list[str]:
        """The precisions of attention that this device supports."""
        return [word for word in self.sizes.attended if _supports(self.device, word) and self._is_needed(word)]

    def _is_needed(self, precision: str) -> bool:
        return self.only is None or precision in (self.only, self.sizes.compute)

    # ---- operations -------------------------------------------------------------------------------------------------

    def products(self, precision: str) -> None:
        """Measure x @ W.T, as linear layers compute it. Data is random: zeros need less power and run faster."""
        last: Reading | None = None
        for rows, columns, inner in self.sizes.products:
            flops = 2.0 * rows * columns * inner
            if last is not None:
                expected = flops / last.rate
                # A product is computed at least twice: to warm up, and to be timed. A rate is fitted to several
                # products, so short ones are always measured.
                left = max(2 * LEAST, self.until - self.elapsed())
                if expected > self.seconds / LONGEST or 2 * expected > left:
                    return
            multiply = workloads.product(rows, columns, inner, precision, self.device)
            size, traffic = BYTES[precision], rows * inner + inner * columns + rows * columns
            last = self.take(
                "product", (rows, columns, inner), precision, multiply, flops=flops, traffic=float(size * traffic)
            )

    def attention(self) -> None:
        """Measure causal attention. The backward recomputes the scores, so both passes are 3.5 times the forward."""
        for precision, num_tokens in product(self.attended(), self.sizes.attention):
            shape = (1, self.sizes.heads, num_tokens, HEAD_DIM)
            q, k, v, grad = (
                torch.randn(shape, device=self.device, dtype=workloads.DTYPES[precision]) for _ in range(4)
            )
            flops = 3.5 * 2 * self.sizes.heads * (num_tokens**2 / 2) * (2 * HEAD_DIM)
            self.take("attention", (num_tokens, HEAD_DIM), precision, workloads.attention(q, k, v, grad), flops=flops)

    def memory(self) -> None:
        """Measure a copy, and the element-wise operations between products, which on a CPU are also compute-bound."""
        self.take(
            "copy",
            (self.sizes.copy,),
            "fp32",
            workloads.copy(self.sizes.copy, self.device),
            traffic=2.0 * self.sizes.copy,
        )
        size, precision = self.sizes.elementwise, self.sizes.compute
        self.take(
            "elementwise", (size,), precision, workloads.elementwise(size, precision, self.device), traffic=10.0 * size
        )

    def blocks(self) -> None:
        """Measure forward and backward of a small block, whose time is kernel launches, and of a large block."""
        precision = self.sizes.compute
        launches, _ = workloads.block_step(SMALL_BLOCK, FEW, precision, self.device)
        self.take("launch", (FEW, SMALL_BLOCK["hidden"]), precision, launches)
        work, flops = workloads.block_step(self.sizes.block, self.sizes.tokens, precision, self.device)
        self.take("block", (self.sizes.tokens, self.sizes.block["hidden"]), precision, work, flops=flops)

    def messages(self) -> None:
        """Measure three sizes of each collective, between all ranks at once."""
        if self.world.size == 1:
            return
        for size in self.sizes.messages:
            for what, send in workloads.collectives(self.world, size).items():
                self.take(what, (size,), "fp32", send, traffic=float(size))

    # ---- timing ----------------------------------------------------------------------------------------------------

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
        """Measure one operation. All ranks repeat it equally often, also if their times differ."""
        self.world.barrier()
        self.timed(work, 1)  # includes allocation, compilation and connection setup
        once = self.slowest(self.timed(work, 1))
        left = max(0.0, self.until - self.elapsed()) / max(1, self.num_left)
        limit = max(LEAST, min(self.seconds / PARTS, left))
        self.num_left -= 1
        number = max(1, int(limit / ROUNDS / once))
        rounds = min(ROUNDS, int(limit / once / number))  # 0: there is no time for another round
        pick: Callable[[list[float]], float] = min if self.only is None else statistics.median
        seconds = pick([once, *(self.timed(work, number) / number for _ in range(rounds))])
        seconds = self.slowest(seconds)
        reading = Reading(what=what, size=size, precision=precision, seconds=seconds, flops=flops, traffic=traffic)
        self.readings.append(reading)
        return reading

    def timed(self, work: Callable[[], object], number: int) -> float:
        """Seconds of `number` calls."""
        _synchronize(self.device)
        start = time.perf_counter()
        for _ in range(number):
            work()
        _synchronize(self.device)
        return time.perf_counter() - start

    def elapsed(self) -> float:
        """Seconds since the start, the same on all ranks."""
        return self.slowest(time.monotonic() - self.began)

    def slowest(self, seconds: float) -> float:
        """The maximum over all ranks."""
        return self.world.all_reduce_host([seconds], "max").wait()[0]


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
    """Bytes for each rank: its GPU's memory, or its share of the host's."""
    if world.device.type == "cuda":
        return float(torch.cuda.mem_get_info(world.device)[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / world.local_size


def _outside_of_allocator(device: torch.device) -> float:
    """Bytes of a GPU in use outside of torch's allocator: context, libraries, communicators."""
    free, total = torch.cuda.mem_get_info(device)
    return float(total - free - torch.cuda.memory_reserved(device))


def _resident_after_a_step(world: World) -> float:
    """Resident bytes of this process after one small step and a barrier, with almost no tensors. It is measured first:
    later readings load libraries that a run may never need."""
    model, tokens = workloads.one_block_model(SMALL_BLOCK, FEW, world.device)
    model(tokens).sum().backward()
    build_optimizer(model.parameters(), OptimSection(), lr=1e-3).step()
    world.barrier()
    return float(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))


def _cpu_name() -> str:
    """The system's name of the CPU; on ARM, which has none, its architecture."""
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
