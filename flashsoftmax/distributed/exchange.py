"""Point-to-point messages between the ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional


@dataclass(frozen=True)
class Arrival:
    """A contiguous tensor, to be filled by a rank of the group."""

    peer: int
    tensor: Tensor


@dataclass
class Pending:
    """Messages under way. `wait` returns the tensors of the arrivals."""

    arrivals: Sequence[Arrival]
    works: list[Any] = field(default_factory=list)
    keep: Sequence[Tensor] = ()  # what is sent must live until it has been
    what: str = ""

    def wait(self) -> list[Tensor]:
        for work in self.works:
            try:
                work.wait()
            except RuntimeError as error:
                peers = sorted({x.peer for x in self.arrivals})
                raise RuntimeError(f"{self.what}, which waits for ranks {peers} of its group: {error}") from error
        return [x.tensor for x in self.arrivals]


def exchange(
    group: dist.ProcessGroup | None, sends: Sequence[tuple[int, Tensor]], arrivals: Sequence[Arrival], what: str
) -> Pending:
    """Starts to send each tensor to its peer and to receive the arrivals. Both sides list a pair's messages in order.

    Eager calls use batch_isend_irecv. torch.compile cannot trace it: there all messages are one functional all-to-all,
    in which every rank of the group takes part.
    """
    sends = [(peer, x.contiguous()) for peer, x in sends]
    if torch.compiler.is_compiling() and group is not None:
        return Pending(_all_to_all(group, sends, arrivals))
    ops = [dist.P2POp(dist.isend, x, group=group, group_peer=peer) for peer, x in sends if x.numel()]
    ops += [dist.P2POp(dist.irecv, x.tensor, group=group, group_peer=x.peer) for x in arrivals if x.tensor.numel()]
    works = dist.batch_isend_irecv(ops) if ops else []
    return Pending(arrivals, works, [x for _, x in sends], what)


def _all_to_all(
    group: dist.ProcessGroup, sends: Sequence[tuple[int, Tensor]], arrivals: Sequence[Arrival]
) -> list[Arrival]:
    ranks = range(group.size())
    outgoing = [[x.flatten() for to, x in sends if to == peer] for peer in ranks]
    incoming = [[n for n, x in enumerate(arrivals) if x.peer == peer] for peer in ranks]
    counts = [sum(x.numel() for x in group) for group in outgoing]
    wanted = [sum(arrivals[n].tensor.numel() for n in group) for group in incoming]
    like = [x for _, x in sends] + [x.tensor for x in arrivals]
    if not like:
        return []
    flat = torch.cat([x for group in outgoing for x in group] or [like[0].new_empty(0)])
    flat = functional.all_to_all_single(flat, wanted, counts, group)
    order = [n for group in incoming for n in group]
    parts = flat.split([arrivals[n].tensor.numel() for n in order])
    found = dict(zip(order, parts, strict=True))
    return [Arrival(x.peer, found[n].view(x.tensor.shape)) for n, x in enumerate(arrivals)]
