"""Random numbers without state: a hash of the arguments.

numpy's generators are sequences: the millionth number needs all draws before it, or one generator per sample. A hash
needs neither, so any rank can compute any sample at any time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

_CONSTANTS = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_GOLDEN, _FIRST, _SECOND = (np.uint64(constant) for constant in _CONSTANTS)


def mix(values: U64) -> U64:
    """A bijection of 64-bit numbers in which every input bit affects every output bit (the finaliser of SplitMix64)."""
    mixed = values ^ (values >> np.uint64(30))
    mixed *= _FIRST
    mixed ^= mixed >> np.uint64(27)
    mixed *= _SECOND
    mixed ^= mixed >> np.uint64(31)
    return mixed


def hashed(*parts: int | npt.NDArray[np.integer]) -> U64:
    """64 pseudorandom bits of all parts together; arrays broadcast.

    >>> hashed(1, 2).tolist() == hashed(1, 2).tolist() != hashed(2, 1).tolist()
    True
    """
    state = np.zeros(1, dtype=np.uint64)  # never a scalar: numpy warns when a scalar wraps around, and here it must
    for part in parts:
        number = np.array([part % 2**64], dtype=np.uint64) if isinstance(part, int) else part.astype(np.uint64)
        state = mix((state ^ number) + _GOLDEN)
    return state


def hashed_number(*parts: int) -> int:
    """The bits of `hashed` for scalars, as an int, in a tenth of the time.

    >>> hashed_number(1, 2) == int(hashed(1, 2)[0])
    True
    """
    golden, first, second = _CONSTANTS
    state = 0
    for part in parts:
        state = ((state ^ part % 2**64) + golden) % 2**64
        state = (state ^ state >> 30) * first % 2**64
        state = (state ^ state >> 27) * second % 2**64
        state ^= state >> 31
    return state


def unit_interval(bits: U64) -> npt.NDArray[np.float64]:
    """Bits as floats in [0, 1)."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
