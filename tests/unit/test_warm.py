"""A process that starts warm is as any other of Python: its words, files, folder, variables and end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist.test_pool import is_alive, wait_until
from tests.warm import warm_python


def run(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([warm_python(), *words], capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize(
    ("code", "ends"),
    [
        ("", 0),
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('no')", 1),
        ("raise ValueError('no')", 1),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import atexit; atexit.register(print, 'no')", 0),
    ],
)
def test_it_ends_as_python_does(code: str, ends: int) -> None:
    ended = run("-c", code)
    assert ended.returncode == ends, ended.stderr
    assert ("no" in ended.stdout + ended.stderr) == ("no" in code)


def test_options_of_the_caller_are_taken() -> None:
    """multiprocessing passes on those of a Python with PYTHONDONTWRITEBYTECODE, or with filters of warnings."""
    ended = run("-B", "-Wignore", "-X", "dev", "-c", "import sys; print(sys.argv)", "-X")
    assert ended.stdout == "['-c', '-X']\n", ended.stderr


def test_it_has_what_its_caller_has(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys; print(sys.stdin.read(), sys.argv[1:], os.getcwd(), os.environ['OF_A_CALLER'])")
    ended = run(str(script), "a", "b c", input="in", cwd=tmp_path, env={**os.environ, "OF_A_CALLER": "1"})
    assert ended.stdout == f"in ['a', 'b c'] {tmp_path} 1\n", ended.stderr


def test_files_keep_their_numbers() -> None:
    reading, writing = os.pipe()
    assert run("-c", f"import os; os.write({writing}, b'x')", pass_fds=[writing]).returncode == 0
    os.close(writing)
    with open(reading, "rb") as file:
        assert file.read() == b"x"  # and an end: nobody else has the pipe


HAS_LOW_FILES = """
import os, subprocess, sys
reading, writing = os.pipe()
copies = [os.dup2(writing, number) for number in range(5, 60)]
code = "import gc, os; gc.collect(); [os.fstat(number) for number in range(5, 60)]"
sys.exit(subprocess.run([sys.argv[1], "-c", code], pass_fds=copies).returncode)
"""


def test_no_file_of_a_caller_is_closed() -> None:
    """They get numbers that files of the server had, which once closed these numbers when they became garbage."""
    ended = subprocess.run([sys.executable, "-c", HAS_LOW_FILES, warm_python()], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_who_kills_it_kills_the_process(tmp_path: Path) -> None:
    path = str(tmp_path / "pid")
    code = f"import os, pathlib, time; pathlib.Path({path!r}).write_text(str(os.getpid())); time.sleep(90)"
    with subprocess.Popen([warm_python(), "-c", code]) as started:
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        started.kill()
    wait_until(lambda: not is_alive(int((tmp_path / "pid").read_text())))
