"""Take the rank that `shoal run --restarts` gives a surviving process after another one was replaced."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

SECONDS = 20.0
"""How long to wait for the launcher. It notices the end of a process within milliseconds."""
POLL = 0.02


def take_new_place(seconds: float = SECONDS) -> bool:
    """Read the newest generation that the launcher has written into this process's variables; whether there is one.

    No new generation comes if no process has ended, such as after a failed transfer: then all ranks join again as they
    were.
    """
    folder, name = os.environ.get("SHOAL_RUN_FOLDER"), os.environ.get("SHOAL_RUN_PROCESS", "")
    if folder is None:
        return False
    generation, deadline = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (path := Path(folder) / f"generation-{generation + 1}.json").exists():
            while (later := Path(folder) / f"generation-{generation + 2}.json").exists():
                path, generation = later, generation + 1
            os.environ.update(json.loads(path.read_text())[name])
            return True
        time.sleep(POLL)
    return False
