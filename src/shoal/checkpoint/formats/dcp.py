"""Checkpoints of torch.distributed.checkpoint: written by torch's own writer, and read without running their pickle.

Their `.metadata` is a pickle, and loading a pickle calls what it names. torch loads it without a check, so a file can
run any command. Here no name of the pickle is ever imported. Each name of a valid one is replaced by a record that
stores its arguments; every other name is rejected. The tensors are read by torch's own weights-only reader, which
builds nothing but tensors, and must match the records.
"""

from __future__ import annotations

import io
import pickle
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from shoal.checkpoint.formats.lazy_tensor import Box, LazyTensor
from shoal.checkpoint.storage.manifest import MOST_BYTES, MOST_DIMS, Shape, tiles
from shoal.checkpoint.storage.shard_file import DTYPES, NAMES
from shoal.errors import ShoalError
from shoal.files import opened, read_regular

METADATA = ".metadata"
_STATE = re.compile(r"(?:optimizer|optim)\.state\.(.+)\.([^.]+)")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


def name_of_state(kind: str, parameter: str) -> str:
    """Return the name of an optimizer state, as in torch's flattened state dict of an optimizer."""
    return f"optimizer.state.{parameter}.{kind}"


def state_of_name(name: str) -> tuple[str, str] | None:
    """Return the kind of state and the parameter; None: it is not a state.

    >>> state_of_name("optimizer.state.layers.0.weight.exp_avg")
    ('exp_avg', 'layers.0.weight')
    """
    match = _STATE.fullmatch(name)
    return (match[2], match[1]) if match else None


# ---- writing --------------------------------------------------------------------------------------------------------


def write(folder: Path, tensors: Mapping[str, LazyTensor], progress: Callable[[int], None]) -> None:
    """Write a folder that `torch.distributed.checkpoint.load` reads. One box is in memory at a time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled, unavailable or uninitialized")
        try:
            # No prefetch: a box is written before the next one is read. No sync, which the caller does: torch syncs its
            # metadata before it flushes it.
            writer = _Writer(folder, per_thread_copy_ahead=0, sync_files=False)
            torch_checkpoint.save({}, storage_writer=writer, planner=_Planner(tensors, progress), no_dist=True)
        except CheckpointException as error:  # it holds the exceptions by rank
            raise reason(next(iter(error.failures.values()))[0]) from None


def reason(error: BaseException) -> BaseException:
    """Return why torch could not write: its own error, about a file that is too short, hides the disk's."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError | ShoalError):
        found = found.__cause__ or found.__context__
    return found or error


class _Writer(torch_checkpoint.FileSystemWriter):
    def storage_meta(self) -> StorageMeta | None:
        """Return nothing: else it would store the name of the draft."""
        return None


class _Planner(torch_checkpoint.DefaultSavePlanner):
    """Resolves values when torch writes them, not when it plans: so they are read one by one."""

    def __init__(self, tensors: Mapping[str, LazyTensor], progress: Callable[[int], None]) -> None:
        super().__init__()
        self.tensors, self.progress = tensors, progress
        self.boxes = {(name, box.begin): box for name, tensor in tensors.items() for box in tensor.boxes}
        self.last: Tensor | None = None

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                index=MetadataIndex(name, box.begin),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=torch.Size(box.begin), sizes=torch.Size(box.shape)),
                    properties=TensorProperties(dtype=DTYPES[tensor.dtype]),
                    size=torch.Size(tensor.shape),
                ),
            )
            for name, tensor in self.tensors.items()
            for box in tensor.boxes
        ]
        self.plan = SavePlan(items, planner_data={name: (name,) for name in self.tensors})
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        index = write_item.index
        if self.last is not None:  # already written, but torch.save's garbage refers to it until it is collected
            self.last.untyped_storage().resize_(0)
        value = self.boxes[index.fqn, tuple(index.offset or ())].read()
        if not value.untyped_storage().resizable():  # numpy has exported it
            value = value.clone()
        self.last = value
        self.progress(value.numel() * value.element_size())
        return value


# ---- reading --------------------------------------------------------------------------------------------------------


def read(folder: Path) -> tuple[dict[str, LazyTensor], list[str]]:
    """Return the tensors of a folder, and the names of other entries."""
    records = _metadata(folder / METADATA)
    try:
        entries, places = dict(records.state_dict_metadata), _places(records.storage_data)
    except (AttributeError, TypeError, ValueError):
        raise _wrong(folder, "does not list tensors and their places") from None
    tensors: dict[str, LazyTensor] = {}
    others = []
    for name, entry in entries.items():
        if hasattr(entry, "chunks"):
            tensors[str(name)] = _tensor(folder, str(name), entry, places)
        else:
            others.append(str(name))
    return tensors, others


def _places(storage: Any) -> dict[tuple[str, Shape], Any]:
    return {(index.fqn, tuple(getattr(index, "offset", None) or ())): info for index, info in storage.items()}


def _tensor(folder: Path, name: str, entry: Any, places: Mapping[tuple[str, Shape], Any]) -> LazyTensor:
    try:
        dtype, shape = entry.properties.state[0], _shape(entry.size)
        boxes = [(_shape(chunk.offsets), _shape(chunk.sizes)) for chunk in entry.chunks]
    except (AttributeError, TypeError, ValueError, IndexError, KeyError):
        raise _wrong(folder, f"does not describe {name[:200]!r}") from None
    if not isinstance(dtype, torch.dtype) or dtype not in NAMES:
        raise _wrong(folder, f"gives {name[:200]!r} the dtype {str(dtype)[:40]}, which shoal does not support")
    if any(len(part) != len(shape) for box in boxes for part in box) or not tiles(shape, boxes):
        raise _wrong(folder, f"has pieces of {name[:200]!r} that do not fill its shape {list(shape)} exactly once")
    parts = []
    for begin, size in boxes:
        place = places.get((name, begin))
        if place is None:
            raise _wrong(folder, f"does not list the place of {name[:200]!r}")
        parts.append(Box(begin, size, partial(_value, folder, name, _spot(folder, name, place), dtype, size)))
    return LazyTensor(NAMES[dtype], shape, tuple(parts))


def _shape(found: Any) -> Shape:
    shape = tuple(found)
    if len(shape) > MOST_DIMS or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(shape)
    return shape


def _spot(folder: Path, name: str, place: Any) -> tuple[Path, int, int]:
    """Return the file of a value, and its bytes in it."""
    file, offset, length = (getattr(place, key, None) for key in ("relative_path", "offset", "length"))
    if not isinstance(file, str) or not _PLAIN_NAME.fullmatch(file):
        raise _wrong(folder, f"puts {name[:200]!r} into a file {str(file)[:80]!r}")
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise _wrong(folder, f"puts {name[:200]!r} at {str(offset)[:40]} of {file}")
    if getattr(place, "transform_descriptors", None):
        raise ShoalError(
            f"{folder / file} is compressed or encrypted, which shoal cannot read",
            fix="save it without extensions",
            code="C033",
        )
    return folder / file, offset, length


def _value(folder: Path, name: str, spot: tuple[Path, int, int], dtype: torch.dtype, shape: Shape) -> Tensor:
    path, offset, length = spot
    try:
        with opened(path) as file:
            window: Any = _Window(file, offset, length)
            value = torch.load(window, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ShoalError(
            f"{path} cannot be read: {error.strerror}", fix="all files of the checkpoint", code="C034"
        ) from error
    except Exception as error:  # torch raises many kinds for foreign bytes
        raise _wrong(folder, f"has no tensor {name[:200]!r} in {path.name}: {str(error).splitlines()[0]}") from None
    if not isinstance(value, Tensor) or value.dtype != dtype or tuple(value.shape) != shape:
        raise _wrong(folder, f"lists {dtype} {list(shape)} for {name[:200]!r}, and {path.name} has something else")
    return value.detach()


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: io.BufferedReader, begin: int, size: int) -> None:
        self.file, self.begin, self.size, self.at = file, begin, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = max(0, offset + (0, self.at, self.size)[whence])
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        room = memoryview(buffer).cast("B")
        self.file.seek(self.begin + self.at)
        count = self.file.readinto(room[: max(0, self.size - self.at)])
        self.at += count
        return count


# ---- the pickle -----------------------------------------------------------------------------------------------------


def _metadata(path: Path) -> Any:
    try:
        text = read_regular(path, MOST_BYTES)
    except OSError as error:
        raise ShoalError(
            f"{path} cannot be read: {error.strerror}",
            fix=f"a folder of torch.distributed.checkpoint has {METADATA}",
            code="C034",
        ) from error
    if len(text) > MOST_BYTES:
        raise _wrong(path.parent, f"has more than {MOST_BYTES:,} bytes")
    try:
        return _Unpickler(text).load()
    except ShoalError as error:
        raise ShoalError(*(problem.within(str(path)) for problem in error.problems)) from None
    except Exception as error:  # a broken pickle raises many kinds
        raise _wrong(path.parent, f"is not valid metadata: {type(error).__name__}") from None


# The Python version: the C version allocates memory for as many entries as a pickle announces.
class _Unpickler(pickle._Unpickler):
    """Reads a pickle into records. No name in it is imported or called."""

    def __init__(self, text: bytes) -> None:
        super().__init__(io.BytesIO(text))
        self._known = _stand_ins()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._known:
            return self._known[module, name]
        raise ShoalError(
            f"its pickle names {module}.{name}, which no checkpoint metadata needs; nothing was run",
            fix="do not load it with torch: it may run commands. Get the weights as safetensors",
            code="C036",
        )

    def get_extension(self, code: int) -> None:
        raise ShoalError(
            f"its pickle names the extension {code}; nothing was run", fix="get the weights as safetensors", code="C036"
        )


def _stand_ins() -> dict[tuple[str, str], Any]:
    """Map module and name to stand-ins. They are created for each pickle, since one may write to them."""

    class Record:
        """Stores its arguments."""

        def __new__(cls, *_: Any) -> Record:
            return super().__new__(cls)

        def __setstate__(self, state: Any) -> None:
            self.state = state
            with suppress(TypeError, ValueError):
                for key, value in dict(state).items():
                    if isinstance(key, str) and not key.startswith("_"):
                        self.__dict__[key] = value

    class Numbers(tuple[Any, ...]):
        __slots__ = ()

    kept = {
        "torch.distributed.checkpoint.metadata": (
            "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
            "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
        ),
        "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
        "torch.distributed.checkpoint.planner": (  # Megatron keeps the plans of all ranks
            "SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData",
        ),
        "megatron.core.dist_checkpointing.strategies.torch": ("MCoreMetadata", "MCoreSavePlan"),  # 0.15 and before
        "torch.serialization": ("_get_layout",),
        "pathlib": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
        "pathlib._local": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
    }  # fmt: skip
    known: dict[tuple[str, str], Any] = {(module, name): Record for module, names in kept.items() for name in names}
    known |= {("torch", name): found for name, found in vars(torch).items() if isinstance(found, torch.dtype)}
    known["torch", "Size"] = Numbers
    known["collections", "OrderedDict"] = type("Pairs", (dict,), {})
    return known


def _wrong(folder: Path, what: str) -> ShoalError:
    return ShoalError(
        f"{folder / METADATA} {what}", fix="the folder as torch.distributed.checkpoint wrote it", code="C035"
    )
