"""Attention over a sequence that is split over ranks."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from .. import ops
from ..library import statistics
from ..options import PER_HEAD, SCORE_NAMES, ScoreOptions, complete, entry_point
from . import heads
from .exchange import Arrival, Wire, reporting
from .layout import UNBOUNDED
from .plan import ShardPlan, agree
from .schedule import DIAGONAL, OWN, Call, Message, Rows, Schedule, Step
from .states import State, Tree

NAME = "context_attention"


@overload
def context_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: ShardPlan,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[ScoreOptions],
) -> Tensor: ...
@overload
def context_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: ShardPlan,
    *,
    return_lse: Literal[True],
    **options: Unpack[ScoreOptions],
) -> tuple[Tensor, Tensor]: ...
@partial(entry_point, options=ScoreOptions)
def context_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: ShardPlan,
    *,
    return_lse: bool = False,
    **options: Unpack[ScoreOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of this rank's queries over the keys of all ranks. Every rank of the plan calls it.

    The result is :func:`flashsoftmax.attention`'s on the whole sequence (with cu_seqlens :func:`attention_varlen`'s),
    split as the plan says. Keys travel as they are, with Hkv heads, and only to ranks that see them. Partial results
    are merged in float32 by a fixed tree over the chunks of the keys, so the bits of a row depend on the plan's layout,
    method and number of ranks and on the options, but neither on the rank that computes it nor on the order in which
    keys arrive. With one rank they are those of the plain call. Differentiable; gradients of keys and values are
    accumulated in float32, in a fixed order.

    Args:
        query: this rank's rows: [B, Hq, rows, Dqk]; with cu_seqlens [rows, Hq, Dqk].
        key: likewise with Hkv heads.
        value: likewise, with its own Dv.
        plan: of shard_plan.
        causal, window, scale, softcap: as in attention. Positions are those in the whole document.
        alibi_slopes: [Hq], the same on all ranks.
        sinks: [Hq], the same on all ranks, and so is their gradient: the sum over the ranks.
        return_lse: return (out, lse).

    Returns:
        out [B, Hq, rows, Dv] in the dtype of query, or [rows, Hq, Dv]. With return_lse also lse [B, Hq, rows], or
        [Hq, rows]: the natural logarithm over all keys of the document, float32 (float64 for float64). Every row sees
        at least itself, so none is masked.

    Raises:
        TypeError, ValueError: an argument does not fit the plan, or differs between ranks. On CPUs all ranks raise; on
        GPUs, where that would stop the stream, this is checked by the plan's first call only, or by all with
        FLASHSOFTMAX_CHECK=1. RuntimeError: another rank did not send its part within the timeout of the group.
    """
    run = _prepare(query, key, value, plan, options)
    if torch.is_autocast_enabled(query.device.type) and query.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if plan.packed:
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    if run.sinks is not None and plan.size > 1:
        run.sinks = _Replicated.apply(run.sinks, plan)
    if plan.ulysses > 1:
        out, lse = _over_heads(query, key, value, run)
    else:
        out, lse = _Context.apply(query, key, value, run.sinks, run.alibi_slopes, run)
    if plan.packed:
        out, lse = out.squeeze(0).transpose(0, 1), lse.squeeze(0)
    return (out, lse) if return_lse else out


@dataclass
class _Run:
    """The arguments of one call, checked."""

    plan: ShardPlan
    band: tuple[int, int]  # left and right
    options: dict[str, Any]  # of the operator: scale and softcap
    sinks: Tensor | None
    alibi_slopes: Tensor | None

    @property
    def schedule(self) -> Schedule:
        schedule: Schedule = self.plan.schedule(*self.band, self.alibi_slopes is not None)
        return schedule


def _prepare(query: Any, key: Any, value: Any, plan: ShardPlan, options: ScoreOptions) -> _Run:
    """Checks the arguments. If one is wrong on any rank, all ranks raise."""
    if not isinstance(plan, ShardPlan):
        raise TypeError(f"plan: {type(plan).__name__}, wanted a ShardPlan of shard_plan")
    problem, signature = None, ""
    try:
        _check_shapes(query, key, value, plan)
        completed = complete(query, options, SCORE_NAMES)
        for name in PER_HEAD:
            x = completed[name]
            if x is not None and (x.dim() != 1 or x.size(0) != query.size(1)):
                raise ValueError(f"{name}: shape {list(x.shape)}, wanted [{query.size(1)}]")
        left, right = completed["window_left"], completed["window_right"]
        run = _Run(
            plan,
            (UNBOUNDED if left is None else left, UNBOUNDED if right is None else right),
            {"scale": completed["scale"], "softcap": completed["softcap"]},
            completed["sinks"],
            completed["alibi_slopes"],
        )
        signature = _signature(query, key, value, run)
    except (TypeError, ValueError) as error:
        problem = error
    device = query.device if isinstance(query, Tensor) else torch.device("cpu")
    if not torch.compiler.is_compiling() and (not plan.is_agreed or device.type == "cpu" or _always_check()):
        agree(plan.group, NAME, signature, problem, device)
        plan.is_agreed = True
    if problem is not None:
        raise problem
    return run


def _over_heads(query: Tensor, key: Tensor, value: Tensor, run: _Run) -> tuple[Tensor, Tensor]:
    """Gives each rank of a Ulysses group all rows of some heads, attends, and gives the rows back."""
    plan, group = run.plan, query.size(1) // key.size(1)
    queries = heads.query_heads(query.size(1), plan.ulysses)
    keys = heads.key_heads(queries, group)
    mine = queries[plan.rank % plan.ulysses]
    query, key, value = heads.RowsToHeads.apply(plan, [queries, keys, keys], query, key, value)
    key, value = (heads.aligned(x, mine, group) for x in (key, value))
    sinks, slopes = (None if x is None else x[slice(*mine)] for x in (run.sinks, run.alibi_slopes))
    out, lse = _Context.apply(query, key, value, sinks, slopes, run)
    out, lse = heads.HeadsToRows.apply(plan, [queries, queries], out, lse.unsqueeze(-1))
    return out, lse.squeeze(-1)


class _Context(torch.autograd.Function):
    """Attention over the ring, or over gathered keys. Operands are [B, heads, rows, dim]."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        alibi_slopes: Tensor | None,
        run: _Run,
    ) -> tuple[Tensor, Tensor]:
        with _reporting(run.plan, NAME):
            state = _forward(query, key, value, sinks, alibi_slopes, run)
        out = state.out.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, alibi_slopes, out, state.lse, state.lse_error)
        ctx.run = run
        ctx.set_materialize_grads(False)
        return out, state.lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        # Every rank takes part, or the others would wait for it.
        grad_out = torch.zeros_like(ctx.saved_tensors[5]) if grad_out is None else grad_out
        with _reporting(ctx.run.plan, f"backward of {NAME}"):
            grads = _backward(grad_out, grad_lse, *ctx.saved_tensors, run=ctx.run)
        return *grads, None, None


def _forward(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, alibi_slopes: Tensor | None, run: _Run
) -> State:
    schedule, tree, diagonal = run.schedule, Tree(run.schedule.leaves), None
    options = {**run.options, "alibi_slopes": alibi_slopes}
    wire = Wire(run.plan.group, NAME, query)
    buffers = _Buffers(run.plan, key, value, wire)
    for t, step in enumerate(schedule.steps):
        buffers.join(step)
        pending = buffers.start(t, step)
        leaves: dict[int, list[tuple[slice, State]]] = {}
        for call in step.calls:
            state = _attend(query, buffers, call, sinks, options)
            leaves.setdefault(call.leaf, []).append((call.queries, state))
        for leaf, parts in leaves.items():
            state = _whole(parts, query.size(2))
            if leaf == DIAGONAL:
                diagonal = state
            else:
                tree.add(leaf, state)
        buffers.finish(step, pending)
    state = diagonal or _empty(tuple(query.shape[:3]), value)
    if tree.result is not None:
        state = state.merge(tree.result)
    return State(state.out, wire.result(state.lse), state.lse_error)


def _backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    *results: Tensor,
    run: _Run,
) -> tuple[Tensor | None, ...]:
    """The gradients of query, key, value and sinks. results: out, lse and lse_error over all keys."""
    wire = Wire(run.plan.group, f"backward of {NAME}", grad_out)
    buffers = _Buffers(run.plan, key, value, wire)
    gradients = _Gradients(run.plan, run.schedule, buffers)
    grad_query = torch.zeros_like(query, dtype=gradients.dtype)
    grad_sinks = None if sinks is None else torch.zeros_like(sinks)
    names = ("grad_out", "grad_lse", "out", "lse", "lse_error")
    for t, step in enumerate(run.schedule.steps):
        buffers.join(step)
        pending, gradients_pending = buffers.start(t, step), gradients.start(t, step)
        for call in step.calls:
            rows = [None if x is None else x[:, :, call.queries] for x in (grad_out, grad_lse, *results)]
            arguments = {**dict(zip(names, rows, strict=True)), **run.options, "alibi_slopes": alibi_slopes}
            arguments |= {**_operands(query, buffers, call), "sinks": sinks if call.leaf == DIAGONAL else None}
            dq, dk, dv, _, ds = ops.attention_backward(**arguments)
            grad_query[:, :, call.queries] += dq
            gradients.add(call.keys, dk, dv)
            if grad_sinks is not None and call.leaf == DIAGONAL:
                grad_sinks += ds
        gradients.finish(step, gradients_pending)
        buffers.finish(step, pending)
    return wire.result(grad_query).to(query.dtype), *gradients.own(), grad_sinks


def _reporting(plan: ShardPlan, what: str) -> Any:
    """torch.compile cannot trace the store of the group."""
    return nullcontext() if torch.compiler.is_compiling() else reporting(plan.group, what)


class _Replicated(torch.autograd.Function):
    """A tensor that all ranks have; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: ShardPlan) -> Tensor:
        ctx.plan = plan
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.plan.group)
        return total, None


class _Buffers:
    """Keys and values by buffer, as [rows, B, heads, dim]: a range of rows can be sent without a copy."""

    def __init__(self, plan: ShardPlan, key: Tensor, value: Tensor, wire: Wire) -> None:
        self.plan, self.wire = plan, wire
        self.pairs = {OWN: (key.permute(2, 0, 1, 3), value.permute(2, 0, 1, 3))}

    def join(self, step: Step) -> None:
        if step.joined:
            self.pairs[step.joined_buffer] = self._rows(tuple(step.joined))

    def start(self, t: int, step: Step) -> Any:
        sends = [(self._rank(m), x) for m in step.sends for x in self._rows(m.rows)]
        arrivals = [
            Arrival(self._rank(m), x.new_empty(m.count, *x.shape[1:])) for m in step.receives for x in self.pairs[OWN]
        ]
        return self.wire.exchange(sends, arrivals, self.pairs[OWN][0].dtype, f"step {t} of rank {self.plan.rank}")

    def finish(self, step: Step, pending: Any) -> None:
        found = iter(pending.wait())
        for message in step.receives:
            self.pairs[message.buffer] = next(found), next(found)
        for buffer in step.done:
            del self.pairs[buffer]

    def operands(self, rows: Rows) -> list[Tensor]:
        """The key and the value of a call, [B, heads, rows, dim]."""
        return [x[rows.start : rows.end].permute(1, 2, 0, 3) for x in self.pairs[rows.buffer]]

    def _rows(self, ranges: tuple[Rows, ...]) -> tuple[Tensor, Tensor]:
        parts = [[x[r.start : r.end] for x in self.pairs[r.buffer]] for r in ranges]
        key, value = (side[0] if len(side) == 1 else torch.cat(side) for side in zip(*parts, strict=True))
        return key, value

    def _rank(self, message: Message) -> int:
        return message.peer * self.plan.ulysses + self.plan.rank % self.plan.ulysses


class _Gradients:
    """Gradients of keys and values, by buffer like these, in float32 (float64 for float64)."""

    def __init__(self, plan: ShardPlan, schedule: Schedule, buffers: _Buffers) -> None:
        self.plan, self.schedule, self.buffers = plan, schedule, buffers
        self.like = buffers.pairs[OWN]
        self.dtype = statistics(self.like[0].dtype)
        self.pairs = {OWN: self._zeros(self.like[0].size(0))}
        self.arrived: dict[tuple[int, int], tuple[int, list[Tensor]]] = {}

    def add(self, rows: Rows, *gradients: Tensor) -> None:
        if rows.buffer not in self.pairs:
            self.pairs[rows.buffer] = self._zeros(self.buffers.pairs[rows.buffer][0].size(0))
        for total, x in zip(self.pairs[rows.buffer], gradients, strict=True):
            total[rows.start : rows.end] += x.permute(2, 0, 1, 3)

    def start(self, t: int, step: Step) -> Any:
        sends = [(self.buffers._rank(m), x) for m in step.gradient_sends for x in self._outgoing(m)]
        for buffer in step.gradients_done:
            self.pairs.pop(buffer, None)
        arrivals = [
            Arrival(self.buffers._rank(m), x.new_empty(m.count, *x.shape[1:], dtype=self.dtype))
            for m in step.gradient_receives
            for x in self.like
        ]
        step_name = f"step {t} of rank {self.plan.rank}, gradients"
        return self.buffers.wire.exchange(sends, arrivals, self.dtype, step_name)

    def finish(self, step: Step, pending: Any) -> None:
        found = iter(pending.wait())
        for message in step.gradient_receives:
            pair, row = (next(found), next(found)), 0
            for h in message.hops:
                parts = [x[row : row + h.end - h.start] for x in pair]
                row += h.end - h.start
                if h.receiver == h.owner:
                    self._add_home(h.segment, h.start, parts)
                else:
                    self.arrived[h.owner, h.segment] = h.start, parts

    def own(self) -> list[Tensor]:
        """The gradients of this rank's key and value, [B, heads, rows, dim] in their dtype."""
        for n, keys in self.schedule.moved:
            if keys.rows.buffer in self.pairs:
                rows = slice(keys.rows.start, keys.rows.end)
                self._add_home(n, keys.start, [x[rows] for x in self.pairs[keys.rows.buffer]])
        return [x.to(like.dtype).permute(1, 2, 0, 3) for x, like in zip(self.pairs[OWN], self.like, strict=True)]

    def _add_home(self, n: int, start: int, parts: list[Tensor]) -> None:
        segment = self.plan.layout.segments[self.plan.holder][n]
        row = segment.row + start - segment.start
        for total, x in zip(self.pairs[OWN], parts, strict=True):
            total[row : row + x.size(0)] += x

    def _outgoing(self, message: Message) -> tuple[Tensor, Tensor]:
        """For each hop of a message: what came from the holders before, plus what this holder found."""
        pair, row = self._zeros(message.count), 0
        for h in message.hops:
            keys = self.schedule.keys[h.owner, h.segment]
            found = [(keys.start, [x[keys.rows.start : keys.rows.end] for x in self.pairs[keys.rows.buffer]])]
            found += [self.arrived.pop((h.owner, h.segment))] if (h.owner, h.segment) in self.arrived else []
            for start, parts in found:
                first, end = max(start, h.start), min(start + parts[0].size(0), h.end)
                for total, x in zip(pair, parts, strict=True):
                    total[row + first - h.start : row + end - h.start] += x[first - start : end - start]
            row += h.end - h.start
        return pair

    def _zeros(self, rows: int) -> tuple[Tensor, Tensor]:
        key, value = (x.new_zeros(rows, *x.shape[1:], dtype=self.dtype) for x in self.like)
        return key, value


def _operands(query: Tensor, buffers: _Buffers, call: Call) -> dict[str, Any]:
    """The arguments of the operators that differ between calls."""
    key, value = buffers.operands(call.keys)
    left, right = (None if x == UNBOUNDED else x for x in (call.band.left, call.band.right))
    arguments = {"query": query[:, :, call.queries], "key": key, "value": value, "q_offset": call.q_offset}
    arguments |= {"window_left": left, "window_right": right}
    if call.lengths is not None:
        lengths = call.lengths
        for name in ("cu_seqlens_q", "cu_seqlens_k", "kv_lens"):
            arguments[name] = torch.tensor(getattr(lengths, name), dtype=torch.int32, device=query.device)
        arguments |= {"max_seqlen_q": lengths.max_seqlen_q, "max_seqlen_k": lengths.max_seqlen_k}
    return arguments


def _attend(query: Tensor, buffers: _Buffers, call: Call, sinks: Tensor | None, options: dict[str, Any]) -> State:
    here = sinks if call.leaf == DIAGONAL else None
    out, lse, error = ops.attention_exact(**_operands(query, buffers, call), **options, sinks=here)
    return State(out.to(lse.dtype), lse, error)


def _whole(parts: list[tuple[slice, State]], rows: int) -> State:
    """One state of all rows. Each row is in at most one part, or empty in all others."""
    (first, state), *rest = parts
    if not rest and first == slice(0, rows):
        return state
    whole = _empty((*state.lse.shape[:2], rows), state.out)
    for at, part in parts:
        whole.out[:, :, at] += part.out
        whole.lse[:, :, at] = torch.maximum(whole.lse[:, :, at], part.lse)
        whole.lse_error[:, :, at] += part.lse_error
    return whole


def _empty(rows: tuple[int, ...], value: Tensor) -> State:
    dtype = statistics(value.dtype)
    lse = value.new_full(rows, -torch.inf, dtype=dtype)
    return State(value.new_zeros(*rows, value.size(3), dtype=dtype), lse, torch.zeros_like(lse))


def _check_shapes(query: Any, key: Any, value: Any, plan: ShardPlan) -> None:
    layout = "[rows, heads, head_dim]" if plan.packed else "[B, heads, rows, head_dim]"
    dims, rows_axis = (3, 0) if plan.packed else (4, 2)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: {type(x).__name__}, wanted a Tensor")
        if x.dim() != dims:
            raise ValueError(f"{name}: {x.dim()} dimensions, wanted {dims}: {layout}")
        if x.size(rows_axis) != plan.rows[plan.rank]:
            raise ValueError(f"{name}: {x.size(rows_axis)} rows, wanted {plan.rows[plan.rank]}, as the plan has them")
        if x.dtype != query.dtype:
            raise ValueError(f"{name}: dtype {x.dtype}, wanted {query.dtype} as query")
        if x.device != query.device:
            raise ValueError(f"{name}: device {x.device}, wanted {query.device} as query")
    if query.device.type not in plan.devices:
        raise ValueError(f"query: device {query.device}, wanted one that the group serves: {sorted(plan.devices)}")
    queries, keys = query.size(1), key.size(1)
    if value.size(1) != keys:
        raise ValueError(f"value: {value.size(1)} heads, wanted {keys} as key")
    if keys == 0 or queries % keys:
        raise ValueError(f"key: {keys} heads, wanted a divisor of the {queries} heads of query")
    if queries < plan.ulysses:
        raise ValueError(f"query: {queries} heads, wanted at least the Ulysses degree {plan.ulysses}")
    if key.size(-1) != query.size(-1):
        raise ValueError(f"key: head_dim {key.size(-1)}, wanted {query.size(-1)} as query")
    if not plan.packed and not query.size(0) == key.size(0) == value.size(0):
        raise ValueError(f"key, value: batch {key.size(0)} and {value.size(0)}, wanted {query.size(0)} as query")


def _signature(query: Tensor, key: Tensor, value: Tensor, run: _Run) -> str:
    """What all ranks must agree on."""
    rows = 0 if run.plan.packed else 2
    shapes = [[n for axis, n in enumerate(x.shape) if axis != rows] for x in (query, key, value)]
    given = [None if x is None else list(x.shape) for x in (run.alibi_slopes, run.sinks)]
    inputs = (query, key, value, run.sinks)
    grad = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in inputs]
    return (
        f"query, key, value without rows {shapes}, {query.dtype} on {query.device.type}, window {run.band}, "
        f"{run.options}, alibi_slopes, sinks {given}, requires_grad {grad}"
    )


def _always_check() -> bool:
    return os.environ.get("FLASHSOFTMAX_CHECK") == "1"
