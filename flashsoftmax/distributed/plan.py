"""The plan of a sequence over ranks: who holds which rows, and by which method they attend."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .exchange import Arrival, Wire, reasons
from .layout import Band, Layout, LayoutName, cut
from .schedule import Schedule, schedule

Method: TypeAlias = Literal["ring", "gather", "ulysses"] | tuple[int, int]


def shard_plan(
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    seq_len: int | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    layout: LayoutName = "zigzag",
    method: Method = "ring",
) -> ShardPlan:
    """Plans how a sequence, or packed documents, are split over the ranks of a group. Every rank calls it.

    Args:
        group: a process group, or a mesh of one dimension, or of two for method (ulysses, ring): [ring, ulysses]. The
            default group if omitted; without one the plan is that of a single rank.
        seq_len: the length of one sequence, for tensors [B, heads, rows, dim]. Any length: nothing is padded, and
            shards may differ by a row or be empty.
        cu_seqlens: [documents + 1], for packed documents [rows, heads, dim], as attention_varlen has them. Read on the
            host.
        layout: "zigzag" cuts each document into 2n chunks, of which rank r holds chunk r and chunk 2n - 1 - r, so that
            causal attention is the same work for all ranks. "contiguous" cuts all rows into n pieces in order.
        method: "ring": keys and values travel from rank to rank while the present ones are used (Liu et al., 2023,
            arXiv:2310.01889). "gather": each rank first gets all keys that it sees; fewer and larger calls, more
            memory. "ulysses": ranks trade rows for heads, so each has all rows of some heads (Jacobs et al., 2023,
            arXiv:2309.14509). (ulysses, ring): Ulysses within `ulysses` consecutive ranks, and a ring of `ring` such
            groups (Fang and Zhao, 2024, arXiv:2405.07719); the layout splits over the groups, and each rank of a group
            holds a contiguous part of the group's rows.

    Raises:
        TypeError, ValueError: an argument does not fit, or differs between the ranks. All ranks raise.
    """
    return ShardPlan(group, seq_len, cu_seqlens, layout, method)


class ShardPlan:
    """What shard_plan returns: who holds which rows.

    Attributes:
        group: the process group, or None for a single rank.
        rank, size: of this process in the group.
        devices: the types of devices that the group's backends serve.
        rows: the number of rows of each rank.
        positions: [rows], int64: the position of each of this rank's rows in its document, for rotary embeddings.
        indices: [rows], int64: the index of each of this rank's rows in the whole sequence.
        layout: who holds which rows, if Ulysses is left out of account: each of its holders is a Ulysses group.
        holder: the index of this rank's Ulysses group.
        ulysses, ring: the degree of each; their product is size.
        gather: whether keys are gathered rather than sent around a ring.
        packed: whether tensors are [rows, heads, dim] (cu_seqlens) or [B, heads, rows, dim] (seq_len).
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None,
        seq_len: int | None,
        cu_seqlens: Tensor | Sequence[int] | None,
        layout: LayoutName,
        method: Method,
    ) -> None:
        self.group, mesh_shape = process_group(group)
        self.size = dist.get_world_size(self.group) if self.group else 1
        self.rank = dist.get_rank(self.group) if self.group else 0
        self.devices = {x.type for x in self.group._device_types} if self.group else {"cpu", "cuda"}
        if self.rank < 0:
            raise ValueError("group: this process is not one of its ranks")
        problem, signature = None, ""
        try:
            lengths = _lengths(seq_len, cu_seqlens)
            self.ulysses, self.ring, self.gather = _degrees(method, self.size, mesh_shape)
            if layout not in ("zigzag", "contiguous"):
                raise ValueError(f"layout: {layout!r}, wanted 'zigzag' or 'contiguous'")
            signature = f"seq_len {seq_len}, documents {lengths}, layout {layout}, method {method}"
        except (TypeError, ValueError) as error:
            problem = error
        agree(self.group, "shard_plan", signature, problem)
        self.packed = seq_len is None
        self.layout = Layout(lengths, self.ring, layout)
        self.holder = self.rank // self.ulysses
        self.rows = tuple(len(self._piece(rank, range(1 << 62))) for rank in range(self.size))
        positions = self._piece(self.rank, self.layout.positions(self.holder))
        self.positions = torch.tensor(positions, dtype=torch.int64)
        self.indices = torch.tensor(self.indices_of(self.rank), dtype=torch.int64)
        self.is_agreed = False  # set by the first call of context_attention
        self._schedules: dict[tuple[int, int, bool], Schedule] = {}

    def indices_of(self, rank: int) -> list[int]:
        """`indices` of another rank."""
        return list(self._piece(rank, self.layout.indices(rank // self.ulysses)))

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """This rank's rows of a tensor that has all of them along dim. Differentiable."""
        self._check_rows("x", x, dim, self.layout.starts[-1])
        return x.index_select(dim, self.indices.to(x.device))

    def unshard(self, x: Tensor, dim: int) -> Tensor:
        """All rows, in order, from the rows of every rank; all ranks call it.

        Differentiable: the gradient is that of the sum of all ranks' losses, as is usual for gathered tensors.
        """
        self._check_rows("x", x, dim, self.rows[self.rank])
        gathered: Tensor = _Unshard.apply(x.movedim(dim, 0), self)
        return gathered.movedim(0, dim)

    @torch.compiler.assume_constant_result
    def schedule(self, left: int, right: int, positions: bool) -> Schedule:
        """What this rank does, step by step, for a band. positions: whether scores depend on them."""
        at = left, right, positions
        if at not in self._schedules:
            self._schedules[at] = schedule(
                self.layout,
                self.holder,
                Band(left, right),
                gather=self.gather,
                positions=positions,
                batched=not self.packed,
            )
        return self._schedules[at]

    def _piece(self, rank: int, rows: Sequence[int]) -> Sequence[int]:
        """The part of a rank of the rows of its Ulysses group."""
        count, part = self.layout.rows[rank // self.ulysses], rank % self.ulysses
        return rows[cut(count, self.ulysses, part) : cut(count, self.ulysses, part + 1)]

    def _check_rows(self, name: str, x: Tensor, dim: int, wanted: int) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: {type(x).__name__}, wanted a Tensor")
        if not -x.dim() <= dim < x.dim():
            raise ValueError(f"dim: {dim}, wanted an axis of {name}, which has {x.dim()}")
        if x.size(dim) != wanted:
            raise ValueError(f"{name}: {x.size(dim)} rows along axis {dim}, wanted {wanted} (rank {self.rank})")

    def __repr__(self) -> str:
        return (
            f"ShardPlan(rank {self.rank} of {self.size}, rows {self.rows[self.rank]} of {self.layout.starts[-1]}, "
            f"{self.layout.name}, ulysses {self.ulysses}, {'gather' if self.gather else 'ring'} {self.ring})"
        )


class _Unshard(torch.autograd.Function):
    """x [rows, ...] of each rank becomes [all rows, ...]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: ShardPlan) -> Tensor:
        ctx.plan = plan
        others = [rank for rank in range(plan.size) if rank != plan.rank]
        arrivals = [Arrival(rank, x.new_empty(plan.rows[rank], *x.shape[1:])) for rank in others]
        wire = Wire(plan.group, "unshard", x)
        found = wire.exchange([(rank, x) for rank in others], arrivals, x.dtype).wait()
        found.insert(plan.rank, x)
        indices = [i for rank in range(plan.size) for i in plan.indices_of(rank)]
        order = torch.tensor(indices, dtype=torch.int64, device=x.device)
        return wire.result(torch.cat(found).index_select(0, order.argsort()))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        plan: ShardPlan = ctx.plan
        parts = [
            grad.index_select(0, torch.tensor(plan.indices_of(rank), dtype=torch.int64, device=grad.device))
            for rank in range(plan.size)
        ]
        others = [rank for rank in range(plan.size) if rank != plan.rank]
        arrivals = [Arrival(rank, torch.empty_like(parts[plan.rank])) for rank in others]
        wire = Wire(plan.group, "backward of unshard", grad)
        found = wire.exchange([(rank, parts[rank]) for rank in others], arrivals, grad.dtype).wait()
        found.insert(plan.rank, parts[plan.rank])
        return wire.result(functools.reduce(torch.add, found)), None


def agree(
    group: dist.ProcessGroup | None,
    name: str,
    signature: str,
    problem: Exception | None,
    device: torch.device | None = None,
) -> None:
    """Raises on every rank if one has a problem, or if the signatures differ. The error says which rank, and why.

    device: of a short exchange that finds out whether the texts are needed at all.
    """
    if group is None:
        if problem is not None:
            raise problem
        return
    if device is not None:
        digest = int.from_bytes(hashlib.sha256(signature.encode()).digest()[:7], "little")
        mine = torch.tensor([-1 if problem else digest], device=device)
        digests = [torch.empty_like(mine) for _ in range(group.size())]
        try:
            dist.all_gather(digests, mine, group=group)
        except RuntimeError as error:
            text = f"{name}: rank {group.rank()} waited for the others: {error}"
            raise RuntimeError("\n".join([text, *reasons(group)])) from error
        if len(set(torch.cat(digests).tolist())) == 1 and problem is None:
            return
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, (signature, problem and f"{type(problem).__name__}: {problem}"), group=group)
    if problem is not None:
        raise problem
    for rank, (_, text) in enumerate(found):
        if text is not None:
            raise ValueError(f"{name}: rank {rank} raised {text}")
    for rank, (other, _) in enumerate(found):
        if other != found[0][0]:
            raise ValueError(f"{name}: rank 0 has {found[0][0]}; rank {rank} has {other}; wanted the same on all ranks")


def process_group(group: object) -> tuple[dist.ProcessGroup | None, tuple[int, ...] | None]:
    """The process group, and the shape of the mesh if there is one."""
    if isinstance(group, DeviceMesh):
        shape = tuple(group.shape)
        if len(shape) == 1:
            return group.get_group(), shape
        if len(shape) == 2:
            return group._flatten().get_group(), shape
        raise ValueError(f"group: a mesh of {len(shape)} dimensions, wanted 1, or 2: [ring, ulysses]")
    if group is None:
        return (dist.group.WORLD, None) if dist.is_available() and dist.is_initialized() else (None, None)
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: {type(group).__name__}, wanted a ProcessGroup or a DeviceMesh")
    return group, None


def _lengths(seq_len: object, cu_seqlens: Any) -> tuple[int, ...]:
    """The lengths of the documents."""
    if (seq_len is None) == (cu_seqlens is None):
        raise ValueError("seq_len, cu_seqlens: wanted one of the two")
    if seq_len is not None:
        if not isinstance(seq_len, int) or isinstance(seq_len, bool):
            raise TypeError(f"seq_len: {type(seq_len).__name__}, wanted an int")
        if seq_len < 0:
            raise ValueError(f"seq_len: {seq_len}, wanted at least 0")
        return (seq_len,)
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
            found = f"{cu_seqlens.dim()} dimensions of {cu_seqlens.dtype}"
            raise ValueError(f"cu_seqlens: {found}, wanted 1 of int32 or int64")
        cu_seqlens = cu_seqlens.tolist()
    starts = list(cu_seqlens)
    if not starts or starts[0] != 0:
        raise ValueError(f"cu_seqlens: starts with {starts[:1]}, wanted 0")
    lengths = tuple(b - a for a, b in pairwise(starts))
    for document, length in enumerate(lengths):
        if length < 0:
            raise ValueError(f"cu_seqlens: falls after element {document}, wanted rising values")
    return lengths


def _degrees(method: object, size: int, mesh: tuple[int, ...] | None) -> tuple[int, int, bool]:
    """(ulysses, ring, gather) of a method."""
    if method in ("ring", "gather"):
        degrees = 1, size
    elif method == "ulysses":
        degrees = size, 1
    elif isinstance(method, tuple) and len(method) == 2 and all(type(x) is int and x > 0 for x in method):
        degrees = method
        if degrees[0] * degrees[1] != size:
            raise ValueError(f"method: {method} is for {degrees[0] * degrees[1]} ranks, the group has {size}")
    else:
        raise ValueError(f"method: {method!r}, wanted 'ring', 'gather', 'ulysses' or a pair (ulysses, ring) of ints")
    if mesh is not None and len(mesh) == 2 and mesh != (degrees[1], degrees[0]):
        raise ValueError(f"group: a mesh of {list(mesh)}, wanted [ring, ulysses] = {[degrees[1], degrees[0]]}")
    return (*degrees, method == "gather")
