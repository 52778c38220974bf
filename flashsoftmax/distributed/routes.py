"""Which keys travel from whom to whom, and when. Plain arithmetic: every rank knows the routes of all.

The keys of a segment visit only the holders that see some of them, in the order of the ring: owner + 1, owner + 2, and
so on. Each hop carries only the rows that someone further on sees. At step t, holder r computes with the keys of owner
r - t; they arrive while it computes step t - 1. Gradients of keys follow the same chain one step behind, and end at the
owner. With `gather`, each holder gets what it sees from the owner itself, all at step 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from .layout import Band, Layout


@dataclass(frozen=True)
class Hop:
    """The positions [start, end) of a segment of `owner` go from sender to receiver during a step."""

    step: int
    sender: int
    receiver: int
    owner: int
    segment: int
    start: int
    end: int


@dataclass(frozen=True)
class Visit:
    """`holder` sees the positions [start, end) of a segment of another holder."""

    holder: int
    start: int
    end: int


def visits(layout: Layout, band: Band) -> Iterator[tuple[int, int, list[Visit]]]:
    """(owner, segment, visits in the order of the ring) for each segment that others see."""
    queries = defaultdict(list)
    for holder, segments in enumerate(layout.segments):
        for segment in segments:
            queries[segment.document].append((holder, segment))
    for owner, segments in enumerate(layout.segments):
        for n, key in enumerate(segments):
            spans: dict[int, tuple[int, int]] = {}
            for holder, query in queries[key.document]:
                start, end = band.seen(query, key)
                if holder != owner and start < end:
                    spans[holder] = _hull(spans.get(holder, (start, end)), (start, end))
            if spans:
                order = sorted(spans, key=lambda holder: (holder - owner) % layout.holders)
                yield owner, n, [Visit(holder, *spans[holder]) for holder in order]


def key_hops(layout: Layout, band: Band, gather: bool) -> Iterator[Hop]:
    """How keys and values reach those who see them."""
    for owner, n, chain in visits(layout, band):
        if gather:
            yield from (Hop(0, owner, v.holder, owner, n, v.start, v.end) for v in chain)
            continue
        span = chain[-1].start, chain[-1].end
        for at in reversed(range(len(chain))):
            span = _hull(span, (chain[at].start, chain[at].end))
            sender = chain[at - 1].holder if at else owner
            receiver = chain[at].holder
            yield Hop((receiver - owner) % layout.holders - 1, sender, receiver, owner, n, *span)


def gradient_hops(layout: Layout, band: Band, gather: bool) -> Iterator[Hop]:
    """How the gradients of keys and values come home."""
    for owner, n, chain in visits(layout, band):
        if gather:
            yield from (Hop(2, v.holder, owner, owner, n, v.start, v.end) for v in chain)
            continue
        span = chain[0].start, chain[0].end
        for at, visit in enumerate(chain):
            span = _hull(span, (visit.start, visit.end))
            is_last = at + 1 == len(chain)
            receiver = owner if is_last else chain[at + 1].holder
            step = (visit.holder - owner) % layout.holders + 1 if is_last else (receiver - owner) % layout.holders
            yield Hop(step, visit.holder, receiver, owner, n, *span)


def _hull(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return min(a[0], b[0]), max(a[1], b[1])
