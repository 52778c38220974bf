"""Who holds which rows: how documents are cut into chunks, and which chunks each holder has. Plain arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

LayoutName: TypeAlias = Literal["zigzag", "contiguous"]
UNBOUNDED = 1 << 60


@dataclass(frozen=True)
class Segment:
    """The rows [start, end) of a document, as one holder has them: from `row` on in its shard."""

    document: int
    chunk: int
    start: int
    end: int
    row: int

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.end - self.start)


@dataclass(frozen=True)
class Band:
    """Position i sees the positions i - left to i + right of its document."""

    left: int = UNBOUNDED
    right: int = UNBOUNDED

    def seen(self, query: Segment, key: Segment) -> tuple[int, int]:
        """The first position of key that query sees, and the one after the last. Nothing is seen if end <= first."""
        if query.document != key.document:
            return key.start, key.start
        return max(key.start, query.start - self.left), min(key.end, query.end + self.right)

    def is_full(self, query: Segment, first: int, end: int) -> bool:
        """Whether each position of query sees each of [first, end)."""
        return query.end - 1 - self.left <= first and end - 1 <= query.start + self.right


@dataclass(frozen=True)
class Layout:
    """Documents of these lengths, split over `holders`.

    zigzag: each document is cut into 2 * holders chunks, and holder r has chunk r and chunk 2 * holders - 1 - r, so
    that causal attention is the same work for all. contiguous: the packed documents are cut into one piece per holder.
    Chunk i of c begins at row i * length // c. In zigzag it begins at (i * length + d % c) // c, where d is the number
    of the document: without d, all documents of one row would be in the last chunk, and so on one holder.
    """

    lengths: tuple[int, ...]
    holders: int
    name: LayoutName = "zigzag"

    @property
    def chunks(self) -> int:
        """Chunks per document."""
        return 2 * self.holders if self.name == "zigzag" else self.holders

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first row of each document, and the number of all rows."""
        starts = [0]
        for length in self.lengths:
            starts.append(starts[-1] + length)
        return tuple(starts)

    @cached_property
    def segments(self) -> tuple[tuple[Segment, ...], ...]:
        """Each holder's segments, in the order of its rows. None is empty."""
        return tuple(_numbered(self._pieces(holder)) for holder in range(self.holders))

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """How many rows each holder has."""
        return tuple(sum(s.end - s.start for s in segments) for segments in self.segments)

    @cached_property
    def longest(self) -> int:
        """The length of the longest segment of all holders."""
        return max((s.end - s.start for segments in self.segments for s in segments), default=0)

    def positions(self, holder: int) -> list[int]:
        """The position of each row within its document."""
        return [i for s in self.segments[holder] for i in range(s.start, s.end)]

    def indices(self, holder: int) -> list[int]:
        """The index of each row among the rows of all documents."""
        segments = self.segments[holder]
        return [self.starts[s.document] + i for s in segments for i in range(s.start, s.end)]

    def _pieces(self, holder: int) -> list[tuple[int, int, int, int]]:
        """(document, chunk, start, end) of each piece of a holder. Some may be empty."""
        chunks = self.chunks
        if self.name == "contiguous":
            first, end = cut(self.starts[-1], chunks, holder), cut(self.starts[-1], chunks, holder + 1)
            documents = enumerate(zip(self.starts[:-1], self.lengths, strict=True))
            return [(d, holder, max(first - start, 0), min(end - start, length)) for d, (start, length) in documents]
        pieces = []
        for d, length in enumerate(self.lengths):
            head, tail = (
                (d, chunk, cut(length, chunks, chunk, d % chunks), cut(length, chunks, chunk + 1, d % chunks))
                for chunk in (holder, chunks - 1 - holder)
            )
            pieces += [(*head[:3], tail[3])] if head[3] == tail[2] else [head, tail]
        return pieces


def cut(length: int, chunks: int, chunk: int, shift: int = 0) -> int:
    """Where a chunk begins; that of `chunks` is where the last one ends."""
    return (chunk * length + shift) // chunks


def _numbered(pieces: Sequence[tuple[int, int, int, int]]) -> tuple[Segment, ...]:
    segments, row = [], 0
    for document, chunk, start, end in pieces:
        if start < end:
            segments.append(Segment(document, chunk, start, end, row))
            row += end - start
    return tuple(segments)
