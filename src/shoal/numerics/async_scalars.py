"""Copy scalars to the host asynchronously; read them one step later.

Reading a number from a GPU waits until all earlier work of the GPU is done, and no new work is launched meanwhile. So
the copy of a step's numbers starts when the step ends, and they are read after the next step was launched:

    host     step 1 ─ step 2 ─[read 1]─ step 3 ─[read 2]─ ...
    device       step 1 ─────────── step 2 ─────────── step 3 ─── ...
                          └─ numbers of 1

On a CPU they are available at once.
"""

from __future__ import annotations

import torch
from torch import Tensor


class AsyncScalars:
    """Scalars whose copy to the host is in flight."""

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
        """Return the numbers; wait for the copy if it is not done."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._numbers, self._arrived = self._host.tolist(), None
        return list(self._numbers)
