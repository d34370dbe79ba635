"""How gradients travel between replicas in fewer bytes: the words of a plan, and what each costs on the wire.

A gradient of n numbers of 4 bytes, W replicas; bytes that a rank sends, about:

word            what travels                                            bytes                    feeds back   unbiased
(none)          the numbers                                             2 (W-1)/W x 4 n          -            yes
bf16, fp16      each in 2 bytes                                         2 (W-1)/W x 2 n          no           nearly
int8            each in 1, rounded at random; a scale for every 256     2 (W-1)/W x 1.016 n      no           yes
1bit            its sign; a scale for every 1024                        2 (W-1)/W x 0.129 n      yes          no
topk:0.01       the largest hundredth of every 1024, and their places   (W-1) x 0.04 n           yes          no
randomk:0.1     a tenth, drawn at random, the same on all ranks         2 (W-1)/W x 0.4 n        no           yes
powersgd:4      two narrow matrices in place of a wide one              2 (W-1)/W x 16 (a + b)   yes          no
                                                                        of each matrix a x b

*Feeds back*: what did not travel is kept and added to the next step's gradient, so that nothing is lost for good.
Sums are always in the gradient's own precision: numbers are narrow on the wire only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, prod, sqrt
from typing import Literal, get_args

from shoal.errors import Problem, ShoalError, listed, nearest

Method = Literal["fp16", "bf16", "int8", "1bit", "topk", "randomk", "powersgd"]
METHODS: tuple[Method, ...] = get_args(Method)

INT8_BLOCK = 256
"""Numbers that share a scale."""
SIGN_BLOCK = 1024
TOPK_BLOCK = 1024
SCALE_BYTES = 4
PAIR_BYTES = 4
"""A number that was chosen, as bf16, and its place in its block."""
_DEFAULTS: dict[Method, float] = {"topk": 0.01, "randomk": 0.1, "powersgd": 4}


@dataclass(frozen=True, slots=True)
class Compression:
    """A method, and its one number: which part is sent (topk, randomk), or the rank (powersgd).

    >>> str(Compression.parse("powersgd"))
    'powersgd:4'
    >>> Compression.parse("int8").feeds_back
    False
    """

    method: Method
    amount: float | None = None

    @classmethod
    def parse(cls, word: str) -> Compression:
        """Read the word of a plan; raises a ShoalError that says what would be right."""
        problem = problem_of(word)
        if problem is not None:
            raise ShoalError(problem)
        name, _, amount = word.partition(":")
        method: Method = next(one for one in METHODS if one == name)
        return cls(method, float(amount) if amount else _DEFAULTS.get(method))

    def __str__(self) -> str:
        return self.method if self.amount is None else f"{self.method}:{self.amount:g}"

    @property
    def feeds_back(self) -> bool:
        """Whether what did not travel is kept for the next step."""
        return self.method in ("1bit", "topk", "powersgd")

    @property
    def warmup_steps(self) -> int:
        """How many of the first steps send gradients as they are, unless somebody says otherwise."""
        return 0 if self.method in ("fp16", "bf16", "int8") else 50

    @property
    def error_bound(self) -> float:
        """How far the mean may be off when nothing is owed from before: at most so many times the root of the mean
        square of the replicas' own gradients.

        Narrow numbers are rounded twice, by a part of themselves; int8 by less than a step of a scale that a block of
        256 shares; what is left out, or what a sign leaves, is no larger than the whole. randomk is right on average
        only: what it draws, it makes as many times larger. fp16 has no numbers below 6e-8 or above 65,504: gradients
        there vanish, or are not finite and drop the step.
        """
        match self.method:
            case "fp16":
                return 2 * 2.0**-11 * 1.01
            case "bf16":
                return 2 * 2.0**-8 * 1.01
            case "int8":
                once = sqrt(INT8_BLOCK) / 127
                return once * (2 + once)
            case "topk":
                return sqrt(1 - self.kept_in_block / TOPK_BLOCK) + 2.0**-8
            case "randomk":
                return float(self.stride)
            case "1bit":
                return 3.0
            case "powersgd":
                return 1.0

    @property
    def kept_in_block(self) -> int:
        """Of topk: how many of a block travel."""
        assert self.amount is not None
        return max(1, round(self.amount * TOPK_BLOCK))

    @property
    def stride(self) -> int:
        """Of randomk: one of how many travels."""
        assert self.amount is not None
        return max(1, round(1 / self.amount))

    def bytes_sent(self, shapes: Iterable[tuple[int, ...]], world: int, width: int = 4) -> int:
        """By one rank for gradients of these shapes, in numbers of `width` bytes, as one bucket: *predicted*, with what
        fills up the last blocks.

        >>> Compression("int8").bytes_sent([(100,)], world=2)
        520
        """
        shapes = list(shapes)
        size = sum(map(prod, shapes))
        match self.method:
            case "fp16" | "bf16":
                return _by_parts(size, world, block=1, block_bytes=2)
            case "int8":
                return _by_parts(size, world, block=INT8_BLOCK, block_bytes=INT8_BLOCK + SCALE_BYTES)
            case "1bit":
                return _by_parts(size, world, block=SIGN_BLOCK, block_bytes=SIGN_BLOCK // 8 + SCALE_BYTES)
            case "topk":
                return (world - 1) * PAIR_BYTES * self.kept_in_block * ceil(size / TOPK_BLOCK)
            case "randomk":
                return exact_bytes(ceil(size / self.stride) * width, world)
            case "powersgd":
                wide = [as_matrix(shape) for shape in shapes if self.powersgd_size(shape) < prod(shape)]
                rank = int(self.amount or 1)
                second = rank * sum(columns for _, columns in wide)
                first = sum(map(self.powersgd_size, shapes)) - second
                return exact_bytes(first * width, world) + exact_bytes(second * width, world)

    def part_sent(self, world: int) -> float:
        """Of what gradients would take, for the planner, which knows no shapes: of large square matrices.

        >>> round(Compression("int8").part_sent(8), 3)
        0.254
        """
        plain = 2 * (world - 1) / world * 4 * 4096**2
        return self.bytes_sent([(4096, 4096)], world) / plain if plain else 1.0

    def powersgd_size(self, shape: tuple[int, ...]) -> int:
        """Numbers that stand for a gradient: of two narrow matrices, or its own, if those would not be fewer.

        >>> Compression("powersgd", 4).powersgd_size((512, 256))
        3072
        """
        assert self.amount is not None
        rows, columns = as_matrix(shape)
        rank = int(self.amount)
        return min(rank * (rows + columns), rows * columns)


def exact_bytes(num_bytes: int, world: int) -> int:
    """That a rank sends for the sum of so many bytes over all ranks, by a ring.

    >>> exact_bytes(300, world=3)
    400
    """
    return 2 * (world - 1) * num_bytes // world


def _by_parts(size: int, world: int, *, block: int, block_bytes: int) -> int:
    """To the owner of each part, and its mean to all; parts are filled up to whole blocks."""
    return 2 * (world - 1) * ceil(size / (world * block)) * block_bytes


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a tensor that is read as a matrix; of a vector, one row."""
    return (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))


def problem_of(word: object) -> Problem | None:
    """What is wrong with a word after `compress=`, if anything is."""
    name, colon, amount = str(word).partition(":")
    if word in ("none", "auto"):
        fix = "leave compress out" if word == "none" else "sync=auto, which chooses compress too"
        return Problem(f"compress={word!r} does not exist", fix)
    examples = listed([str(Compression(method, _DEFAULTS.get(method))) for method in METHODS])
    if not isinstance(word, str) or name not in METHODS:
        near = nearest(name.lower(), METHODS)
        return Problem(f"compress={word!r} does not exist", f"compress={near}" if near else f"compress={examples}")
    if not colon:
        return None
    if name not in _DEFAULTS:
        return Problem(f"compress={word}: {name} takes no number", f"compress={name}")
    try:
        number = float(amount)
    except ValueError:
        number = -1.0
    if name == "powersgd" and not (number >= 1 and number.is_integer()):
        return Problem(f"compress={word}: the rank is not a whole number of at least 1", "compress=powersgd:4")
    if name != "powersgd" and not 0 < number <= 1:
        return Problem(f"compress={word}: the part that is sent is not between 0 and 1", f"compress={name}:0.01")
    return None
