"""Gradient compression between replicas: the values of `compress=` in a plan, and the bytes that each sends.

A gradient of n numbers of 4 bytes, W replicas; bytes that a rank sends, about:

word            sent                                                    bytes                    residual     unbiased
(none)          the numbers                                             2 (W-1)/W x 4 n          -            yes
bf16, fp16      each in 2 bytes                                         2 (W-1)/W x 2 n          no           nearly
int8            each in 1, rounded at random; a scale for every 256     2 (W-1)/W x 1.016 n      no           yes
1bit            its sign; a scale for every 1024                        2 (W-1)/W x 0.129 n      yes          no
topk:0.01       the largest hundredth of every 1024, and their places   (W-1) x 0.04 n           yes          no
randomk:0.1     a tenth, drawn at random, the same on all ranks         2 (W-1)/W x 0.4 n        no           yes
powersgd:4      two narrow matrices in place of a wide one              2 (W-1)/W x 16 (a + b)   yes          no
                                                                        of each matrix a x b

*Residual* (error feedback): the part that was not sent is stored and added to the next step's gradient. Sums are always
in the gradient's own precision: numbers are compressed for transport only.
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
"""Numbers that share one scale."""
SIGN_BLOCK = 1024
TOPK_BLOCK = 1024
SCALE_BYTES = 4
PAIR_BYTES = 4
"""A selected number, as bf16, and its index in its block."""
_DEFAULTS: dict[Method, float] = {"topk": 0.01, "randomk": 0.1, "powersgd": 4}


@dataclass(frozen=True, slots=True)
class Compression:
    """A method and its parameter: the fraction that is sent (topk, randomk), or the rank (powersgd).

    >>> str(Compression.parse("powersgd"))
    'powersgd:4'
    >>> Compression.parse("int8").feeds_back
    False
    """

    method: Method
    amount: float | None = None

    @classmethod
    def parse(cls, word: str) -> Compression:
        """Read the value of `compress=`; raises a ShoalError with the fix."""
        problem = check_word(word)
        if problem is not None:
            raise ShoalError(problem)
        name, _, amount = word.partition(":")
        method: Method = next(one for one in METHODS if one == name)
        return cls(method, float(amount) if amount else _DEFAULTS.get(method))

    def __str__(self) -> str:
        return self.method if self.amount is None else f"{self.method}:{self.amount:g}"

    @property
    def feeds_back(self) -> bool:
        """Whether the method stores a residual for the next step (error feedback)."""
        return self.method in ("1bit", "topk", "powersgd")

    @property
    def warmup_steps(self) -> int:
        """The default number of first steps without compression."""
        return 0 if self.method in ("fp16", "bf16", "int8") else 50

    @property
    def error_bound(self) -> float:
        """The largest error of the mean with an empty residual, relative to the RMS norm of the replicas' gradients.

        fp16 and bf16 round twice, by a relative error. int8 rounds by less than one step of a scale that a block of 256
        shares. The unsent part of topk, and the error of a sign, is no larger than the whole. randomk is right on
        average only: it multiplies the numbers that it draws by its stride. fp16 has no numbers below 6e-8 or above
        65,504: gradients there vanish, or are not finite and drop the step.
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
        """Of topk: the numbers of a block that are sent."""
        assert self.amount is not None
        return max(1, round(self.amount * TOPK_BLOCK))

    @property
    def stride(self) -> int:
        """Of randomk: one number of this many is sent."""
        assert self.amount is not None
        return max(1, round(1 / self.amount))

    def bytes_sent(self, shapes: Iterable[tuple[int, ...]], world: int, width: int = 4) -> int:
        """Predicted bytes that one rank sends for gradients of these shapes in one bucket, padding included.

        `width` is the size of one number in bytes.

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
        """The compressed size as a fraction of the uncompressed one, for a large square matrix.

        The planner uses it, since it has no shapes.

        >>> round(Compression("int8").part_sent(8), 3)
        0.254
        """
        plain = 2 * (world - 1) / world * 4 * 4096**2
        return self.bytes_sent([(4096, 4096)], world) / plain if plain else 1.0

    def powersgd_size(self, shape: tuple[int, ...]) -> int:
        """Numbers that powersgd sends for a gradient: two narrow matrices, or the gradient itself if that is smaller.

        >>> Compression("powersgd", 4).powersgd_size((512, 256))
        3072
        """
        assert self.amount is not None
        rows, columns = as_matrix(shape)
        rank = int(self.amount)
        return min(rank * (rows + columns), rows * columns)


def exact_bytes(num_bytes: int, world: int) -> int:
    """Bytes that a rank sends for a ring all-reduce of `num_bytes`.

    >>> exact_bytes(300, world=3)
    400
    """
    return 2 * (world - 1) * num_bytes // world


def _by_parts(size: int, world: int, *, block: int, block_bytes: int) -> int:
    """Bytes of a reduce-scatter and an all-gather; parts are padded to whole blocks."""
    return 2 * (world - 1) * ceil(size / (world * block)) * block_bytes


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a tensor as a matrix; a vector has one row."""
    return (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))


def check_word(word: object) -> Problem | None:
    """Check a value of `compress=`; None: it is valid."""
    name, colon, amount = str(word).partition(":")
    what = f"compress must be {listed(METHODS)}, got {word!r}"
    if word in ("none", "auto"):
        return Problem("P023", what, "remove compress" if word == "none" else "sync=auto, which chooses compress too")
    if not isinstance(word, str) or name not in METHODS:
        near = nearest(name.lower(), METHODS)
        examples = listed([str(Compression(method, _DEFAULTS.get(method))) for method in METHODS])
        return Problem("P023", what, f"compress={near}" if near else f"compress={examples}")
    if not colon:
        return None
    if name not in _DEFAULTS:
        return Problem("P024", f"compress={word}: {name} takes no number", f"compress={name}")
    try:
        number = float(amount)
    except ValueError:
        number = -1.0
    if name == "powersgd" and not (number >= 1 and number.is_integer()):
        what = f"the rank of compress=powersgd must be a whole number of at least 1, got {amount!r}"
        return Problem("P024", what, "compress=powersgd:4")
    if name != "powersgd" and not 0 < number <= 1:
        what = f"the fraction of compress={name} must be above 0 and at most 1, got {amount!r}"
        return Problem("P024", what, f"compress={name}:0.01")
    return None
