"""Send files from rank to rank, chunk by chunk. Each chunk is checked by its hash when it arrives.

All ranks know all transfers, and the sizes and hashes of all files, so no header is sent. In each turn a rank sends the
next chunk of all files that it sends, and receives one of all that it gets: its memory is one chunk a file.

A rank that cannot read or write a chunk still takes part in all turns, since its peer waits for it. It raises at the
end. What it could not read arrives as zeros, and has the wrong hash.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoal.checkpoint.formats.safetensors import new_file
from shoal.checkpoint.peers.host_ranks import Transfer
from shoal.checkpoint.storage.filesystem import Filesystem
from shoal.checkpoint.storage.manifest import CHUNK, File
from shoal.comm.world import World
from shoal.errors import LostPeer, ShoalError
from shoal.files import opened


def send_files(
    world: World,
    transfers: Sequence[Transfer],
    files: Mapping[str, File],
    *,
    source: Callable[[], Path],
    target: Callable[[], Path],
    disk: Filesystem,
) -> None:
    """Make all transfers; every rank calls it with the same ones. Raises on the ranks on which one has failed.

    `source`, `target`: the folders of this host to read from and to write to.
    """
    if not any(world.rank in (each.source, each.target) for each in transfers):
        return
    with ExitStack() as stack:
        ends: list[_End] = []
        for tag, each in enumerate(transfers):
            if each.source == world.rank:
                ends.append(_Sender(each.target, tag, files[each.file], source() / each.file, stack))
            if each.target == world.rank:
                ends.append(_Receiver(each.source, tag, files[each.file], target() / each.file, stack, disk))
        for number in range(max(len(end.file.hashes) for end in ends)):
            now = [end for end in ends if number < len(end.file.hashes)]
            try:
                works = [end.start(number, world.control_group) for end in now]
                for work in works:
                    work.wait()
            except RuntimeError as error:  # from gloo
                raise _lost(world, str(error)) from error
            for end in now:
                end.finish(number)
        errors = [end.error for end in ends if end.error is not None]
        if errors:
            raise errors[0]


class _End(ABC):
    """One end of a transfer, with the buffer of its chunk."""

    def __init__(self, peer: int, tag: int, file: File, path: Path) -> None:
        self.peer, self.tag, self.file, self.path = peer, tag, file, path
        self.buffer = torch.empty(min(CHUNK, file.size), dtype=torch.uint8)
        self.error: Exception | None = None

    def chunk(self, number: int) -> torch.Tensor:
        """The buffer for a chunk; the last one is shorter."""
        return self.buffer[: min(CHUNK, self.file.size - number * CHUNK)]

    @abstractmethod
    def start(self, number: int, group: dist.ProcessGroup) -> Any:
        """Start to send or receive a chunk."""

    def finish(self, number: int) -> None:
        """Called when the chunk was sent or received."""
        return


class _Sender(_End):
    def __init__(self, peer: int, tag: int, file: File, path: Path, stack: ExitStack) -> None:
        super().__init__(peer, tag, file, path)
        try:
            self.source = stack.enter_context(opened(path))
        except OSError as error:
            self.error = error

    def start(self, number: int, group: dist.ProcessGroup) -> Any:
        chunk = self.chunk(number)
        try:
            if self.error is None and self.source.readinto(chunk.numpy()) != len(chunk):
                raise _damaged(self.path, number)
        except (OSError, ShoalError) as error:
            self.error = error
        if self.error is not None:
            chunk.zero_()
        return dist.isend(chunk, group=group, group_dst=self.peer, tag=self.tag)


class _Receiver(_End):
    def __init__(self, peer: int, tag: int, file: File, path: Path, stack: ExitStack, disk: Filesystem) -> None:
        super().__init__(peer, tag, file, path)
        self.disk = disk
        try:
            self.target = stack.enter_context(new_file(path, disk))
        except OSError as error:
            self.error = error

    def start(self, number: int, group: dist.ProcessGroup) -> Any:
        return dist.irecv(self.chunk(number), group=group, group_src=self.peer, tag=self.tag)

    def finish(self, number: int) -> None:
        data = self.chunk(number).numpy().data
        try:
            if self.error is None and hashlib.sha256(data).hexdigest() != self.file.hashes[number]:
                raise _damaged(self.path, number)
            if self.error is None:
                self.disk.write(self.target, data)
        except (OSError, ShoalError) as error:
            self.error = error


def _damaged(path: Path, number: int) -> ShoalError:
    return ShoalError(
        f"chunk {number} of the copy of {path.name} does not have the hash in its manifest",
        fix="look for errors of the memory and the network of this host; the previous checkpoint is unchanged",
        code="N090",
    )


def _lost(world: World, why: str) -> LostPeer:
    return LostPeer(
        f"rank {world.rank} lost the rank that it exchanges copies of shards with: {why.splitlines()[0]}",
        fix=f"--launch.timeout {2 * world.timeout:g}, if that rank is slow but still runs",
        code="N091",
    )
