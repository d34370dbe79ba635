"""Average gradients over replicas, exactly or compressed with error feedback.

`ScatterReduce` cuts a bucket into parts, one per rank; W replicas, here 3:

    rank 0   [a b c] ──encode──▶ a to rank 0, b to rank 1, c to rank 2                        [1]
    rank 1   [a b c] ──encode──▶ rank 1 decodes all b, adds its own, divides by W             [2]
    rank 2   [a b c] ──encode──▶ every owner encodes its mean once and sends it to all ranks  [3]
                                 all ranks decode it: the same bits everywhere

A rank's contribution counts 1/W in the mean. A rank keeps the error of its own encoding as its residual [4]. The owner
of a part sends nothing of its own part, so that place of its residual is free: it holds the error of the mean, times
W [5]. So one residual per rank is enough, and the mean of the residuals is exactly what the weights have not received.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.blueprint.replicas.compress_words import Compression, as_matrix
from shoal.comm.compression.codecs import Codec, TopKCodec, codec_of
from shoal.comm.replicas.transport import Transport


@dataclass
class Bucket:
    """Gradients that are averaged together."""

    shapes: Sequence[tuple[int, ...]]
    residual: Tensor | None = None
    """What was not transmitted yet, flat; None: the method has no residual."""
    q_factors: list[Tensor | None] = field(default_factory=list)
    """PowerSGD: for each gradient, the factor Q of the last step; None: it is sent uncompressed."""

    def pieces(self, flat: Tensor) -> list[Tensor]:
        """Return views of a flat tensor, one per gradient."""
        parts = flat.split([torch.Size(shape).numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


@dataclass(frozen=True, slots=True)
class Seeds:
    """Seeds of the random numbers of one step and bucket."""

    shared: int
    """The same on all replicas."""
    own: int


class Average(ABC):
    """A way to average. All replicas call it for the same buckets in the same order."""

    keeps_residual = False

    def new_bucket(
        self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device, seeds: Sequence[int]
    ) -> Bucket:
        """Create a bucket with a residual of zero. `seeds`: one per gradient."""
        size = sum(torch.Size(shape).numel() for shape in shapes)
        return Bucket(shapes, torch.zeros(size, dtype=dtype, device=device) if self.keeps_residual else None)

    @abstractmethod
    def __call__(self, x: Tensor, bucket: Bucket, transport: Transport, seeds: Seeds) -> None:
        """Replace a flat bucket by its mean over all replicas, or by an approximation."""


class AllReduce(Average):
    """The exact mean."""

    def __call__(self, x: Tensor, bucket: Bucket, transport: Transport, seeds: Seeds) -> None:
        """One all-reduce."""
        transport.all_reduce(x).div_(transport.size)


@dataclass(frozen=True)
class ScatterReduce(Average):
    """Average through a codec, as drawn above."""

    codec: Codec
    keeps_residual: bool

    def __call__(self, x: Tensor, bucket: Bucket, transport: Transport, seeds: Seeds) -> None:
        """Send the parts to their owners, and the means back."""
        drawn = _drawn(seeds.own, x.device)
        if bucket.residual is not None:
            x += bucket.residual
        parts = _filled_up(x, transport.size * self.codec.block).view(transport.size, -1)
        sent = self.codec.encode(parts.view(-1), drawn)
        arrived = transport.all_to_all(sent.view(transport.size, -1))  # [1]
        mean = parts[transport.rank].clone()  # [2] this rank's own part is never rounded
        for rank, message in enumerate(arrived):
            if rank != transport.rank:
                mean += self.codec.decode(message, x.dtype)
        mean /= transport.size
        # [3] The owner decodes its own message too: else it would hold other bits than the other ranks.
        means = self.codec.decode(transport.all_gather(self.codec.encode(mean, drawn)).view(-1), x.dtype).view_as(parts)
        if bucket.residual is not None:
            residual = parts - self.codec.decode(sent, x.dtype).view_as(parts)  # [4]
            residual[transport.rank] = (mean - means[transport.rank]) * transport.size  # [5]
            _keep(bucket.residual, residual.view(-1))
        x.copy_(means.view(-1)[: x.numel()])


@dataclass(frozen=True)
class TopK(Average):
    """Every rank sends the largest of its numbers to all others."""

    codec: TopKCodec
    keeps_residual = True

    def __call__(self, x: Tensor, bucket: Bucket, transport: Transport, seeds: Seeds) -> None:
        """One all-gather of the encoded buckets."""
        assert bucket.residual is not None
        x += bucket.residual
        filled = _filled_up(x, self.codec.block)
        sent = self.codec.encode(filled, _drawn(seeds.own, x.device))
        total = torch.zeros_like(filled)
        for message in transport.all_gather(sent):
            total += self.codec.decode(message, x.dtype)
        _keep(bucket.residual, filled - self.codec.decode(sent, x.dtype))
        x.copy_(total[: x.numel()]).div_(transport.size)


@dataclass(frozen=True)
class RandomK(Average):
    """One number of every `stride`, drawn again each step, the same on all ranks, and scaled by `stride`."""

    stride: int

    def __call__(self, x: Tensor, bucket: Bucket, transport: Transport, seeds: Seeds) -> None:
        """One all-reduce of the drawn numbers."""
        drawn = _drawn(seeds.shared, x.device)
        rows = _filled_up(x, self.stride).view(-1, self.stride)
        places = torch.randint(self.stride, (len(rows), 1), generator=drawn, device=x.device)
        # A number that was not drawn may be non-finite: the zero times the sum makes that visible.
        mean = transport.all_reduce(rows.gather(1, places) + 0 * x.sum()).mul_(self.stride / transport.size)
        x.copy_(torch.zeros_like(rows).scatter_(1, places, mean).view(-1)[: x.numel()])


@dataclass(frozen=True)
class PowerSGD(Average):
    """Approximate a matrix M as P Qᵀ, both narrow: one power iteration, started from the Q of the step before.

        P = mean of M Q, orthogonalized        Q = mean of Mᵀ P        M ≈ P Qᵀ

    All matrices of a bucket are sent in two messages. Tensors that are too small to gain go uncompressed with the
    first.
    """

    compression: Compression
    keeps_residual = True

    def new_bucket(
        self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device, seeds: Sequence[int]
    ) -> Bucket:
        """Create a bucket with random factors Q, the same on all ranks."""
        bucket = super().new_bucket(shapes, dtype, device, seeds)
        for shape, seed in zip(shapes, seeds, strict=True):
            bucket.q_factors.append(self._first(shape, dtype, device, seed))
        return bucket

    def _first(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> Tensor | None:
        rows, columns = as_matrix(shape)
        rank = int(self.compression.amount or 1)
        if rank * (rows + columns) >= rows * columns:
            return None
        drawn = _drawn(seed, torch.device("cpu"))
        return torch.randn(columns, rank, generator=drawn, dtype=dtype).to(device)

    def __call__(self, x: Tensor, bucket: Bucket, transport: Transport, seeds: Seeds) -> None:
        """Two all-reduces, of the factors P and Q."""
        assert bucket.residual is not None
        x += bucket.residual
        stands = torch.empty_like(x)
        each = list(zip(bucket.pieces(x), bucket.pieces(stands), bucket.q_factors, strict=True))
        wide = [(_matrix(piece), _matrix(place), q) for piece, place, q in each if q is not None]
        plain = [(piece, place) for piece, place, q in each if q is None]
        left, means = _averaged([piece @ q for piece, _, q in wide], [piece for piece, _ in plain], transport)
        left = [torch.linalg.qr(one.float() if one.dtype.itemsize < 4 else one)[0].to(x.dtype) for one in left]
        right, _ = _averaged([piece.T @ one for (piece, _, _), one in zip(wide, left, strict=True)], [], transport)
        for (_, place, q), one, other in zip(wide, left, right, strict=True):
            torch.mm(one, other.T, out=place)
            q.copy_(torch.where(other.isfinite().all(), other, q))  # a step that is dropped changes nothing
        for (piece, place), mean in zip(plain, means, strict=True):
            place.copy_(mean)
            piece.copy_(mean)  # sent exactly: no residual
        _keep(bucket.residual, x - stands)
        x.copy_(stands)


def build_average(compression: Compression | None) -> Average:
    """Return the averaging method of a plan."""
    if compression is None:
        return AllReduce()
    match compression.method:
        case "topk":
            return TopK(TopKCodec(compression.kept_in_block))
        case "randomk":
            return RandomK(compression.stride)
        case "powersgd":
            return PowerSGD(compression)
        case _:
            return ScatterReduce(codec_of(compression), keeps_residual=compression.feeds_back)


def _drawn(seed: int, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed % 2**63)


def _matrix(x: Tensor) -> Tensor:
    return x.view(as_matrix(tuple(x.shape)))


def _averaged(matrices: list[Tensor], plain: list[Tensor], transport: Transport) -> tuple[list[Tensor], list[Tensor]]:
    """Average many tensors in one message."""
    tensors = [*matrices, *plain]
    if not tensors:
        return [], []
    flat = transport.all_reduce(torch.cat([one.reshape(-1) for one in tensors])).div_(transport.size)
    means = [part.view(one.shape) for part, one in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True)]
    return means[: len(matrices)], means[len(matrices) :]


def _filled_up(x: Tensor, multiple: int) -> Tensor:
    """Pad with zeros to a multiple."""
    missing = -x.numel() % multiple
    return torch.cat([x, x.new_zeros(missing)]) if missing else x


def _keep(residual: Tensor, error: Tensor) -> None:
    """Store the residual for the next step, non-finite numbers as 0: they would stay long after their step is
    dropped."""
    torch.nan_to_num(error[: residual.numel()], nan=0.0, posinf=0.0, neginf=0.0, out=residual)
