"""A Python that starts warm: each process is a fork of one that has torch, transformers and shoal loaded.

    subprocess.run([warm_python(), "-m", "tests.cli.host"])          # also -c CODE, and the path of a script

`make test` has one server for all of its processes. Loading takes ten seconds, and a dozen processes of the tests would
each spend them anew. The server loads and never computes, so that a fork can compute.

    caller ── runs ──▶ a script of few lines ── words, files, folder, environment ──▶ server ── forks ──▶ process
                       it waits, and ends with the same code ◀── how it ended ──────────┘
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
VARIABLE = "WARM_PYTHON"
HIGHEST_FILE = 500
"""Files of a caller have lower numbers; ours lie above while they are moved."""

SCRIPT = """\
#!{python} -IS
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
files = []
for name in os.listdir("/proc/self/fd"):
    try:
        if os.get_inheritable(int(name)):
            files.append(int(name))
    except OSError:
        pass  # that of the folder itself
message = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ), files]).encode()
socket.send_fds(server, [len(message).to_bytes(8, "big")], files)
server.sendall(message)
for number in files:
    os.close(number)  # whoever reads from the process sees its end, not ours
code = int(server.recv(16) or b"70")
if code < 0:
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def warm_python() -> str:
    """The program to start: the warm one where `make test` has one, otherwise this Python."""
    return os.environ.get(VARIABLE, sys.executable)


class WarmPython:
    """The server, and the script by which others start processes."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="shoal-warm-"))
        address = str(self.folder / "server")
        self.path = str(self.folder / "python")
        Path(self.path).write_text(SCRIPT.format(python=sys.executable, address=address))
        Path(self.path).chmod(0o700)
        self.messages = self.folder / "messages"
        with socket.socket(socket.AF_UNIX) as listener, self.messages.open("w") as messages:
            listener.bind(address)
            listener.listen(64)  # who comes before it has loaded waits
            environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm", str(listener.fileno())], stdin=subprocess.PIPE,
                stdout=messages, stderr=messages, pass_fds=[listener.fileno()], cwd=ROOT, env=environ,
            )  # fmt: skip

    def close(self) -> None:
        """End the server and what it has started."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        if self.process.wait() != 0:
            print(self.messages.read_text(), file=sys.stderr)
        shutil.rmtree(self.folder)


# ---- inside the server ----------------------------------------------------------------------------------------------


class Server:
    """Forks a process for each caller, and tells the caller how it ended."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.callers: dict[int, socket.socket] = {}  # by the number of their process
        self.wakes, wakes = os.pipe()
        for end in (self.wakes, wakes):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes)

    def serve(self) -> list[str] | None:
        """Until our own caller is gone: None. In each fork: the words that it was started with."""
        while True:
            ready, _, _ = select.select([0, self.listener, self.wakes, *self.callers.values()], [], [])
            if 0 in ready:
                self.end_all()
                return None
            if self.wakes in ready:
                os.read(self.wakes, 4096)
                self.reap()
            for pid, caller in list(self.callers.items()):
                if caller in ready:  # it was killed; one that lives says nothing
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    self.callers.pop(pid).close()
            if self.listener in ready and (words := self.start()) is not None:
                return words

    def start(self) -> list[str] | None:
        caller, _ = self.listener.accept()
        length, files, _, _ = socket.recv_fds(caller, 8, HIGHEST_FILE)
        try:
            words, folder, environment, numbers = json.loads(exactly(caller, int.from_bytes(length, "big")))
        except (ConnectionError, ValueError):  # it was killed meanwhile
            caller.close()
            for file in files:
                os.close(file)
            return None
        pid = os.fork()
        if pid == 0:
            for ours in (self.listener, caller, *self.callers.values()):
                ours.detach()  # or they would close what gets their numbers now, once they are garbage
            become(folder, environment, dict(zip(numbers, files, strict=True)))
            return list(words)
        for file in files:
            os.close(file)
        self.callers[pid] = caller
        return None

    def reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if caller := self.callers.pop(ended[0], None):
                    with caller, contextlib.suppress(BrokenPipeError):
                        caller.sendall(str(os.waitstatus_to_exitcode(ended[1])).encode())

    def end_all(self) -> None:
        for pid in self.callers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self.callers:
            os.waitpid(pid, 0)


def exactly(caller: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = caller.recv(length - len(data))
        if not part:
            raise ConnectionError("a caller ended before it had said what to start")
        data += part
    return data


def become(folder: str, environment: dict[str, str], files: dict[int, int]) -> None:
    """Be a process with these files, and with none of the server's."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    moved = {number: fcntl.fcntl(file, fcntl.F_DUPFD, HIGHEST_FILE) for number, file in files.items()}
    os.closerange(0, HIGHEST_FILE)
    for number, file in moved.items():
        os.dup2(file, number)
        os.close(file)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)


def without_options(words: list[str]) -> list[str]:
    """Leave out the options of Python, such as those that multiprocessing passes on: -B, -W, -X."""
    while words[0].startswith("-") and words[0] not in ("-c", "-m"):
        words = words[2:] if words[0] in ("-W", "-X") else words[1:]
    return words


def run(words: list[str]) -> None:
    """As Python would with these words."""
    words = without_options(words)
    kind, what, *others = words if words[0] in ("-c", "-m") else ("", *words)
    if kind == "":
        sys.argv = [what, *others]
        sys.path.insert(0, str(Path(what).parent))
        runpy.run_path(what, run_name="__main__")
    elif kind == "-m":
        sys.argv = [what, *others]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.argv = ["-c", *others]
        main = ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(what, "<string>", "exec"), vars(main))


def main() -> None:
    """Be the server, and then each of its forks."""
    from tests import preload

    preload.load_models()
    preload.settle()
    words = Server(socket.socket(fileno=int(sys.argv[1]))).serve()
    if words is not None:
        leave(code_of(words))


def code_of(words: list[str]) -> int:
    code: object = 0
    try:
        run(words)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    return code or 0


def leave(code: int) -> None:
    """End as Python does, but do not take apart what is loaded: that takes half a second."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code % 256)


if __name__ == "__main__":
    main()
