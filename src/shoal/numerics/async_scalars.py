"""Numbers of a device that are read late, so that nobody waits for them.

To read a number from a GPU is to wait until all that was asked of it before is done, while nothing new is asked of it.
So a step's numbers are sent on their way when it ends and read when the next one has been asked for:

    host     step 1 ─ step 2 ─[read 1]─ step 3 ─[read 2]─ ...
    device       step 1 ─────────── step 2 ─────────── step 3 ─── ...
                          └─ numbers of 1

On a CPU they are there at once.
"""

from __future__ import annotations

import torch
from torch import Tensor


class AsyncScalars:
    """Copies of numbers, on their way to the host."""

    def __init__(self, *numbers: Tensor) -> None:
        self._numbers: list[float] = []
        self._arrived: torch.cuda.Event | None = None
        if any(number.is_cuda for number in numbers):
            together = torch.cat([number.detach().double().flatten() for number in numbers])
            self._host = torch.empty(together.shape, dtype=together.dtype, pin_memory=True)
            self._host.copy_(together, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(together.device))
        else:
            self._numbers = [one for number in numbers for one in number.detach().flatten().tolist()]

    def read(self) -> list[float]:
        """The numbers; waits for them, if they are not there yet."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._numbers, self._arrived = self._host.tolist(), None
        return list(self._numbers)
