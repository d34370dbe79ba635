"""Start an agent on each host: a fork for this one, a command such as ssh for the others.

The key is written to the command's standard input. It never stands in an argument or a variable, which other users of
a host can read.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from shoal.errors import Problem, ShoalError
from shoal.launch.hosts.hostlist import HostSpec

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=6 {host}"
NOBODY = "none"
"""In place of a command: agents are started by hand or by a scheduler."""
_TAKES_ONE_STRING = ("ssh", "rsh", "pdsh", "gsissh")
_NO_DIRECTORY, _NO_PYTHON = 91, 92
MOST_SAID = 4000
SECONDS_TO_ASK = 5.0
"""Seconds in which ssh has to print its configuration."""


@dataclass(slots=True)
class Command:
    """The running command that has started the agent of a host."""

    host: HostSpec
    words: list[str]
    process: subprocess.Popen[bytes]
    said: bytearray = field(default_factory=bytearray)
    began: float = field(default_factory=time.monotonic)

    def read(self) -> None:
        """Read what it has printed, without waiting."""
        assert self.process.stdout is not None
        with contextlib.suppress(BlockingIOError, ValueError):
            while data := os.read(self.process.stdout.fileno(), 2**16):
                self.said += data
                del self.said[:-MOST_SAID]

    @property
    def text(self) -> str:
        """The end of what it has printed."""
        return self.said.decode(errors="replace").strip()

    def end(self, seconds: float) -> None:
        """Wait for its end, and kill it after some seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.read()
        assert self.process.stdout is not None
        self.process.stdout.close()


def start_agent(host: HostSpec, address: tuple[str, int], key: str, template: str) -> Command:
    """Run the command that starts an agent on a host."""
    words = command_for(host, address, template)
    try:
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
        )
    except OSError as error:
        what = f"the agent of host {host.name} cannot be started: {words[0]!r}: {error.strerror}"
        fix = f"--ssh 'COMMAND {{host}}', a command that runs others on a host; the default is {SSH!r}"
        raise ShoalError(what, fix=fix, code="N054") from None
    assert process.stdin is not None
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    with contextlib.suppress(OSError):  # it has ended already
        process.stdin.write(f"{key}\n".encode())
        process.stdin.close()
    return Command(host, words, process)


def command_for(host: HostSpec, address: tuple[str, int], template: str) -> list[str]:
    """The words of the command.

    >>> command_for(HostSpec("b", 8), ("10.0.0.1", 29400), "ssh {host}")[:2]
    ['ssh', 'b']
    """
    return python_command(
        host,
        f"-m shoal agent --join {address[0]}:{address[1]} --name {shlex.quote(host.name)} --key-from-stdin --json",
        template,
    )


def python_command(host: HostSpec, arguments: str, template: str) -> list[str]:
    """The words of a command that runs this Python in this directory of a host; `arguments` are quoted already."""
    words = [word.replace("{host}", host.name) for word in shlex.split(template)]
    python = shlex.quote(sys.executable)
    script = (
        f"cd {shlex.quote(os.getcwd())} 2>/dev/null || exit {_NO_DIRECTORY}; command -v {python} >/dev/null ||"
        f" exit {_NO_PYTHON}; exec {python} {arguments}"
    )
    if Path(words[0]).name in _TAKES_ONE_STRING:  # a shell on the other host splits the string again
        return [*words, "--", f"sh -c {shlex.quote(script)}"]
    return [*words, "sh", "-c", script]


def route_to(host: HostSpec, template: str) -> str | None:
    """The name or address to which ssh would connect for a host, which may be an alias; None: that is not known, since
    the command is another one (kubectl, a container) or ssh goes over another host."""
    words = [word.replace("{host}", host.name) for word in shlex.split(template)]
    if not words or Path(words[0]).name != "ssh":
        return None
    try:
        asked = subprocess.run(
            [words[0], "-G", *words[1:]],
            capture_output=True, text=True, timeout=SECONDS_TO_ASK, check=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None  # starting the agent will say more
    settings = dict(line.partition(" ")[::2] for line in asked.stdout.splitlines())
    has_proxy = any(settings.get(name, "none") != "none" for name in ("proxyjump", "proxycommand"))
    return None if has_proxy else settings.get("hostname")


def is_reached(host: HostSpec, template: str) -> bool:
    """Whether the command may find a host whose name has no address on this one."""
    route = route_to(host, template)
    return route is None or route.lower() != host.bare_name.lower()


def why_ended(command: Command) -> ShoalError:
    """The error of a command that ended before its agent joined."""
    host, code, text = command.host.name, command.process.returncode, command.text
    cwd, python = os.getcwd(), sys.executable
    last = text.splitlines()[-1] if text else ""
    if (own := _own_error(text)) is not None:
        return own
    if code == _NO_DIRECTORY:
        fix = f"ssh {host} mkdir -p {cwd}, with the same files as here"
        return ShoalError(f"host {host} has no directory {cwd!r}", fix=fix, code="N055")
    if code == _NO_PYTHON:
        fix = "install the same environment there, under the same path"
        return ShoalError(f"host {host} has no program {python!r}", fix=fix, code="N055")
    if "No module named" in text:
        fix = f"ssh {host} {python} -m pip install PATH_OF_SHOAL"
        return ShoalError(f"host {host} has no shoal in {python!r}: {last}", fix=fix, code="N055")
    shown = f": {last}" if last else ""
    by = shlex.join(command.words[: max(1, len(command.words) - (2 if "--" in command.words else 3))])
    fix = f"`{by} true` has to work without a password; or --ssh 'COMMAND {{host}}'"
    what = f"the agent of host {host} cannot be started: exit code {code}{shown}"
    return ShoalError(what, fix=fix, code="N054")


def _own_error(text: str) -> ShoalError | None:
    """The error that an agent has printed as JSON; None: it has printed none."""
    line = next((line for line in text.splitlines() if line.startswith('{"error":')), None)
    if line is None:
        return None
    problems = json.loads(line)["error"]["problems"]
    return ShoalError(*(Problem(**each) for each in problems))
