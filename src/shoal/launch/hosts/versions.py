"""What has to be equal on all hosts, and what helps to name this one."""

from __future__ import annotations

import os
import platform
import socket
from importlib import metadata

from shoal.launch.hosts.messages import Message
from shoal.version import __version__

MUST_AGREE = ("shoal", "torch", "python")


def facts() -> Message:
    """The versions and the name of this host."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "shoal": __version__,
        "torch": metadata.version("torch"),
        "python": ".".join(platform.python_version_tuple()[:2]),
    }
