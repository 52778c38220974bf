"""What one rank does at each step: which rows it sends and gets, and which calls of attention it makes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from .layout import Band, Layout, Segment
from .routes import Hop, gradient_hops, key_hops

DIAGONAL = -1
OWN = 0
"""The buffer of a rank's own keys and values. Each message that arrives is another buffer."""


@dataclass(frozen=True)
class Rows:
    """The rows [start, end) of a buffer."""

    buffer: int
    start: int
    end: int


@dataclass(frozen=True)
class Keys:
    """Positions of a document from `start` on, and where they lie."""

    document: int
    chunk: int
    start: int
    rows: Rows

    @property
    def end(self) -> int:
        return self.start + self.rows.end - self.rows.start

    def part(self, start: int, end: int) -> Rows:
        """The rows of the positions [start, end)."""
        first = self.rows.start - self.start
        return Rows(self.rows.buffer, first + start, first + end)


@dataclass(frozen=True)
class Lengths:
    """The sequences of a call, as attention_varlen has them."""

    cu_seqlens_q: tuple[int, ...]
    cu_seqlens_k: tuple[int, ...]
    kv_lens: tuple[int, ...]
    max_seqlen_q: int
    max_seqlen_k: int


@dataclass(frozen=True)
class Call:
    """One call of attention: a range of the rank's queries on a range of the keys of a buffer."""

    queries: slice
    keys: Rows
    band: Band
    q_offset: int | None  # None: kv_len - q_len
    leaf: int  # of the merge tree; DIAGONAL: the queries' own segments, where sinks count
    lengths: Lengths | None  # None: one sequence, with a batch


@dataclass(frozen=True)
class Message:
    """What one rank sends another during a step."""

    peer: int
    hops: tuple[Hop, ...]
    rows: tuple[Rows, ...] = ()  # of keys that are sent: where they lie
    buffer: int = -1  # of keys that arrive: what they become

    @property
    def count(self) -> int:
        return sum(hop.end - hop.start for hop in self.hops)


@dataclass
class Step:
    """Messages are exchanged while the calls run, and may be used by the next step."""

    sends: list[Message] = field(default_factory=list)
    receives: list[Message] = field(default_factory=list)
    joined: list[Rows] = field(default_factory=list)  # rows that become a buffer of their own, before the calls
    joined_buffer: int = -1
    calls: list[Call] = field(default_factory=list)
    gradient_sends: list[Message] = field(default_factory=list)
    gradient_receives: list[Message] = field(default_factory=list)
    done: list[int] = field(default_factory=list)  # buffers that no later step reads
    gradients_done: list[int] = field(default_factory=list)  # buffers whose gradients have all been sent


@dataclass
class Schedule:
    steps: list[Step]
    keys: dict[tuple[int, int], Keys]  # (owner, segment): the keys that the calls read
    moved: list[tuple[int, Keys]]  # (segment, keys) of own segments that were joined with others' into a new buffer
    leaves: frozenset[int]  # of the merge tree, without the diagonal


def schedule(layout: Layout, holder: int, band: Band, *, gather: bool, positions: bool, batched: bool) -> Schedule:
    """The steps of one holder.

    positions: whether scores depend on positions (ALiBi). batched: the one document has a batch axis, and its segments
    are separate calls; otherwise the segments of all documents with the same offset are one call.
    """
    work = _Builder(layout, holder, band, positions, batched)
    work.route(key_hops(layout, band, gather), gradient_hops(layout, band, gather))
    for t, step in enumerate(work.steps):
        if t == 0:
            work.call_diagonal(step)
        if gather:
            keys = work.join(step) if t == 1 else []
        else:
            keys = [x for (owner, _), x in work.keys.items() if (holder - owner) % layout.holders == t]
        work.call(step, keys)
        work.exchange(step)
    work.release()
    leaves = frozenset(call.leaf for step in work.steps for call in step.calls) - {DIAGONAL}
    moved = [(n, x) for (owner, n), x in work.keys.items() if owner == holder and x.rows.buffer != OWN]
    return Schedule(work.steps, work.keys, moved, leaves)


class _Builder:
    def __init__(self, layout: Layout, holder: int, band: Band, positions: bool, batched: bool) -> None:
        self.layout, self.holder, self.band = layout, holder, band
        self.positions, self.batched = positions, batched
        own = enumerate(layout.segments[holder])
        self.keys = {(holder, n): Keys(s.document, s.chunk, s.start, _rows(s)) for n, s in own}
        self.buffers = 1
        self.steps: list[Step] = []

    def route(self, keys: Iterable[Hop], gradients: Iterable[Hop]) -> None:
        """Sorts the hops from and to this holder into messages: one per step and peer. All ranks have as many steps."""
        every, every_back = list(keys), list(gradients)
        mine, mine_back = ([h for h in hops if self.holder in (h.sender, h.receiver)] for hops in (every, every_back))
        self.steps = [Step() for _ in range(max((h.step for h in (*every, *every_back)), default=1) + 1)]
        for (t, peer), hops in _grouped(mine, self.holder, sent=True):
            self.steps[t].sends.append(Message(peer, hops))
        for (t, peer), hops in _grouped(mine, self.holder, sent=False):
            self.steps[t].receives.append(Message(peer, hops, buffer=self._new_buffer()))
        for (t, peer), hops in _grouped(mine_back, self.holder, sent=True):
            self.steps[t].gradient_sends.append(Message(peer, hops))
        for (t, peer), hops in _grouped(mine_back, self.holder, sent=False):
            self.steps[t].gradient_receives.append(Message(peer, hops))

    def exchange(self, step: Step) -> None:
        """Finds the rows that the step sends, and notes where those that it gets will lie."""
        for n, message in enumerate(step.sends):
            sent = [self.keys[h.owner, h.segment].part(h.start, h.end) for h in message.hops]
            step.sends[n] = Message(message.peer, message.hops, _joined(sent))
        for message in step.receives:
            row = 0
            for h in message.hops:
                segment = self.layout.segments[h.owner][h.segment]
                rows = Rows(message.buffer, row, row + h.end - h.start)
                self.keys[h.owner, h.segment] = Keys(segment.document, segment.chunk, h.start, rows)
                row = rows.end

    def join(self, step: Step) -> list[Keys]:
        """Puts all keys that this holder has into one buffer, ordered by position: then few calls do."""
        found = sorted(self.keys.items(), key=lambda item: (item[1].document, item[1].start))
        step.joined = [x.rows for _, x in found]
        step.joined_buffer = buffer = self._new_buffer()
        runs: list[Keys] = []
        row = 0
        for at, x in found:
            rows = Rows(buffer, row, row + x.end - x.start)
            self.keys[at] = Keys(x.document, x.chunk, x.start, rows)
            row = rows.end
            if runs and runs[-1].document == x.document and runs[-1].end == x.start:
                rows = Rows(buffer, runs[-1].rows.start, row)
                runs[-1] = Keys(x.document, 0, runs[-1].start, rows)
            else:
                runs.append(Keys(x.document, 0, x.start, rows))
        return runs

    def call_diagonal(self, step: Step) -> None:
        """Adds the calls of each segment's queries on its own keys."""
        pairs = [(segment, _rows(segment)) for segment in self.layout.segments[self.holder]]
        for group in [[pair] for pair in pairs] if self.batched else [pairs] if pairs else []:
            step.calls.append(self._call(group, self.band, None, DIAGONAL))

    def call(self, step: Step, keys: Iterable[Keys]) -> None:
        """Adds the calls of this holder's queries on these keys, but for those of their own segments."""
        by_document = defaultdict(list)
        for x in keys:
            by_document[x.document].append(x)
        groups = defaultdict(list)
        for query in self.layout.segments[self.holder]:
            for x in by_document[query.document]:
                start, end = self.band.seen(query, Segment(x.document, x.chunk, x.start, x.end, 0))
                for side, part in enumerate(((start, min(end, query.start)), (max(start, query.end), end))):
                    if part[0] < part[1]:
                        leaf, mode = 2 * x.chunk + side, self._mode(query, *part)
                        groups[query.chunk, leaf, x.rows.buffer, mode].append((query, x.part(*part)))
        for (_, leaf, _, mode), pairs in groups.items():
            step.calls.append(self._call(pairs, *mode, leaf))

    def _call(self, pairs: list[tuple[Segment, Rows]], band: Band, q_offset: int | None, leaf: int) -> Call:
        (first, first_rows), (last, last_rows) = pairs[0], pairs[-1]
        keys = Rows(first_rows.buffer, first_rows.start, last_rows.end)
        lengths = None if self.batched else self._lengths(pairs)
        return Call(slice(first.row, last.rows.stop), keys, band, q_offset, leaf, lengths)

    def _mode(self, query: Segment, start: int, end: int) -> tuple[Band, int | None]:
        """The band and the q_offset of a call: as few different ones as possible, so that calls are few."""
        if not self.positions and self.band.is_full(query, start, end):
            return Band(), None
        return self.band, query.start - start

    def _lengths(self, pairs: list[tuple[Segment, Rows]]) -> Lengths:
        """Segments between those of the pairs become sequences without keys; rows between the keys are not read."""
        first, last = pairs[0][0].row, pairs[-1][0].row
        rows = {query.row: x for query, x in pairs}
        cu_q, starts, kv_lens = [0], [], []
        for segment in self.layout.segments[self.holder]:
            if first <= segment.row <= last:
                x = rows.get(segment.row)
                cu_q.append(segment.rows.stop - first)
                starts.append(x.start if x else -1)
                kv_lens.append(x.end - x.start if x else 0)
        cu_k = [pairs[-1][1].end]
        for start in reversed(starts):
            cu_k.append(cu_k[-1] if start < 0 else start)
        cu_k = [x - cu_k[-1] for x in reversed(cu_k)]
        longest = max(b - a for a, b in pairwise(cu_k))
        return Lengths(tuple(cu_q), tuple(cu_k), tuple(kv_lens), self.layout.longest, longest)

    def release(self) -> None:
        """Notes after which step each buffer is not needed any more."""
        last: dict[int, int] = {}
        last_gradient: dict[int, int] = {}
        for t, step in enumerate(self.steps):
            for rows in (*step.joined, *(c.keys for c in step.calls), *(r for m in step.sends for r in m.rows)):
                last[rows.buffer] = t
            for message in step.gradient_sends:
                last_gradient |= {self.keys[h.owner, h.segment].rows.buffer: t for h in message.hops}
        for buffer in last.keys() - {OWN}:
            self.steps[last[buffer]].done.append(buffer)
        home = {x.rows.buffer for (owner, _), x in self.keys.items() if owner == self.holder}
        for buffer in last_gradient.keys() - home:
            self.steps[last_gradient[buffer]].gradients_done.append(buffer)

    def _new_buffer(self) -> int:
        self.buffers += 1
        return self.buffers - 1


def _rows(segment: Segment) -> Rows:
    return Rows(OWN, segment.row, segment.rows.stop)


def _joined(rows: Iterable[Rows]) -> tuple[Rows, ...]:
    """The same rows, where ranges that touch are one."""
    joined: list[Rows] = []
    for x in rows:
        if joined and (joined[-1].buffer, joined[-1].end) == (x.buffer, x.start):
            joined[-1] = Rows(x.buffer, joined[-1].start, x.end)
        else:
            joined.append(x)
    return tuple(joined)


def _grouped(hops: Iterable[Hop], holder: int, *, sent: bool) -> list[tuple[tuple[int, int], tuple[Hop, ...]]]:
    """((step, peer), hops) of what a holder sends or gets, in an order that both sides know."""
    groups: dict[tuple[int, int], list[Hop]] = defaultdict(list)
    for h in sorted(hops, key=lambda h: (h.owner, h.segment)):
        if holder == (h.sender if sent else h.receiver):
            groups[h.step, h.receiver if sent else h.sender].append(h)
    return [(at, tuple(groups[at])) for at in sorted(groups)]
