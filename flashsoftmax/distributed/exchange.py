"""Point-to-point messages between the ranks of a group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed.distributed_c10d import _get_process_group_store

KEY = "flashsoftmax/failure of rank "


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
    group: dist.ProcessGroup | None = None
    what: str = ""

    def wait(self) -> list[Tensor]:
        for work in self.works:
            try:
                work.wait()
            except RuntimeError as error:
                peers = sorted({x.peer for x in self.arrivals})
                text = f"{self.what}, which waits for ranks {peers} of its group: {error}"
                raise RuntimeError("\n".join([text, *reasons(self.group)])) from error
        return [x.tensor for x in self.arrivals]


@contextmanager
def reporting(group: dist.ProcessGroup | None, what: str) -> Iterator[None]:
    """Leaves the reason for a failure in the group's store, where the ranks that wait for this one find it."""
    try:
        yield
    except Exception as error:
        if group is not None:
            text = f"rank {dist.get_rank(group)}, {what}: {type(error).__name__}: {error}"
            _get_process_group_store(group).set(f"{KEY}{dist.get_rank(group)}", text)
        raise


def reasons(group: dist.ProcessGroup | None) -> list[str]:
    """What other ranks of the group have reported, if its store still answers."""
    if group is None:
        return []
    store, keys = _get_process_group_store(group), [f"{KEY}{r}" for r in range(group.size()) if r != group.rank()]
    try:
        return [store.get(key).decode() for key in keys if store.check([key])]
    except RuntimeError:
        return []


class Wire:
    """The messages of one call, between the ranks of a group.

    Eager calls use batch_isend_irecv. torch.compile cannot trace it: there each exchange is one functional all-to-all
    in which every rank takes part. The compiler drops a collective whose result a rank does not use, and may swap two
    that do not depend on each other, which would leave the ranks out of step. So each rank also sends itself one
    element, the token, which passes through all exchanges of a call and ends in its result.
    """

    def __init__(self, group: dist.ProcessGroup | None, what: str, after: Tensor) -> None:
        """after: the exchanges begin when this tensor is known. In a backward that is a gradient: the compiler moves
        into the forward, on some of the ranks, what does not depend on one.
        """
        self.group, self.what = group, what
        self.token: Tensor | None = None
        if group is not None and torch.compiler.is_compiling():
            self.token = after.flatten()[:1].sum().isnan().float().view(1) * 0

    def exchange(
        self, sends: Sequence[tuple[int, Tensor]], arrivals: Sequence[Arrival], dtype: torch.dtype, step: str = ""
    ) -> Pending:
        """Starts to send each tensor to its peer, and to receive the arrivals.

        Both sides list the messages of a pair of ranks in the same order; all have this dtype.
        """
        sends = [(peer, x.contiguous()) for peer, x in sends]
        if self.token is not None:
            return Pending(self._all_to_all(sends, arrivals, dtype))
        ops = [dist.P2POp(dist.isend, x, group=self.group, group_peer=peer) for peer, x in sends if x.numel()]
        ops += [
            dist.P2POp(dist.irecv, x.tensor, group=self.group, group_peer=x.peer) for x in arrivals if x.tensor.numel()
        ]
        works = dist.batch_isend_irecv(ops) if ops else []
        return Pending(arrivals, works, [x for _, x in sends], self.group, f"{self.what}: {step}")

    def result(self, x: Tensor) -> Tensor:
        """x, computed after all exchanges."""
        return x if self.token is None else x + self.token.to(x.dtype)

    def _all_to_all(
        self, sends: Sequence[tuple[int, Tensor]], arrivals: Sequence[Arrival], dtype: torch.dtype
    ) -> list[Arrival]:
        assert self.group is not None and self.token is not None
        size, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        sends = [(rank, self.token.to(dtype)), *sends]
        arrivals = [Arrival(rank, self.token), *arrivals]
        outgoing = [[x.flatten() for to, x in sends if to == peer] for peer in range(size)]
        incoming = [[n for n, x in enumerate(arrivals) if x.peer == peer] for peer in range(size)]
        counts = [sum(x.numel() for x in to_one) for to_one in outgoing]
        wanted = [sum(arrivals[n].tensor.numel() for n in from_one) for from_one in incoming]
        flat = torch.cat([x for to_one in outgoing for x in to_one])
        flat = functional.all_to_all_single(flat, wanted, counts, self.group)
        order = [n for from_one in incoming for n in from_one]
        parts = dict(zip(order, flat.split([arrivals[n].tensor.numel() for n in order]), strict=True))
        self.token = parts[0].to(torch.float32)
        return [Arrival(x.peer, parts[n].view(x.tensor.shape)) for n, x in enumerate(arrivals) if n > 0]
