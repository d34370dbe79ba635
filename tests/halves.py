"""Runs all tests as two pytest processes side by side: much of a test is waiting, for another rank or for a disk.

    python -m tests.halves              # both halves
    python -m tests.halves -k layout    # what is said to pytest, in one process

What the second half prints comes when the first has ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Real ranks and signals on the one side; on the other what mostly computes in one process.
HALVES = [["dist", "cli"], ["unit", "bugs", "recipes", "examples", "readme", "gpu"]]


def main(words: list[str]) -> int:
    """Exit code 0: everything passed."""
    pytest = [sys.executable, "-m", "pytest"]
    if words:
        return subprocess.run([*pytest, *words], cwd=ROOT, check=False).returncode
    shown, kept = ([str(Path("tests", part)) for part in half] for half in HALVES)
    quiet = {name: value for name, value in os.environ.items() if name != "ENVIRONMENT_SECONDS"}
    with tempfile.TemporaryFile() as file:
        other = subprocess.Popen([*pytest, *kept], cwd=ROOT, env=quiet, stdout=file, stderr=subprocess.STDOUT)
        try:
            codes = [subprocess.run([*pytest, *shown], cwd=ROOT, check=False).returncode, other.wait()]
        finally:
            other.terminate()
            other.wait()
        file.seek(0)
        sys.stdout.buffer.write(file.read())
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
