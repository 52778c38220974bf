"""Attention over a sequence that is split over ranks: plans without processes, and groups of gloo processes."""

import time
from dataclasses import dataclass, field
from itertools import accumulate, product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ranks
import reference
from checks import assert_accurate, assert_same_bits
from flashsoftmax import attention, attention_varlen

if not dist.is_available():
    pytest.skip("torch has no distributed", allow_module_level=True)

from flashsoftmax.distributed import context_attention, decode_over_ranks, shard_plan
from flashsoftmax.distributed.layout import UNBOUNDED, Band, Layout
from flashsoftmax.distributed.routes import gradient_hops, key_hops
from flashsoftmax.distributed.schedule import OWN, Lengths, schedule
from flashsoftmax.distributed.states import State, Tree

lengths = st.lists(st.sampled_from([0, 1, 2, 3, 5, 7, 8, 12, 20]), max_size=5).map(tuple)
layouts = st.builds(Layout, lengths, st.integers(1, 6), st.sampled_from(["zigzag", "contiguous"]))
sides = st.sampled_from([0, 1, 3, UNBOUNDED])
bands = st.builds(Band, sides, sides)


# Plans, without processes


def test_zigzag_is_head_and_tail():
    layout = Layout((8,), 2)
    assert [layout.positions(r) for r in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    packed = Layout((8, 4), 2)
    assert [packed.positions(r) for r in range(2)] == [[0, 1, 6, 7, 0, 3], [2, 3, 4, 5, 1, 2]]
    assert [packed.indices(r) for r in range(2)] == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]
    assert [Layout((3, 5), 2, "contiguous").indices(r) for r in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@given(layouts)
@settings(deadline=None)
def test_each_row_is_on_one_rank(layout):
    rows = [i for holder in range(layout.holders) for i in layout.indices(holder)]
    assert sorted(rows) == list(range(sum(layout.lengths)))
    if layout.name == "contiguous":
        assert max(layout.rows) - min(layout.rows) <= 1


def test_short_documents_are_spread_over_the_ranks():
    rows = Layout((1,) * 64, 4).rows
    assert max(rows) <= 2 * min(rows)


@given(layouts, bands, st.booleans(), st.booleans(), st.booleans())
@settings(deadline=None, max_examples=300)
def test_each_pair_is_computed_once(layout, band, gather, positions, batched):
    if batched:
        layout = Layout(layout.lengths[:1] or (4,), layout.holders, layout.name)
    found = []
    for holder in range(layout.holders):
        own = [(s.document, i) for s in layout.segments[holder] for i in range(s.start, s.end)]
        buffers = {OWN: own}
        for step in schedule(layout, holder, band, gather=gather, positions=positions, batched=batched).steps:
            if step.joined:
                buffers[step.joined_buffer] = [x for r in step.joined for x in buffers[r.buffer][r.start : r.end]]
            for call in step.calls:
                found += pairs_of(call, own[call.queries], buffers[call.keys.buffer][call.keys.start : call.keys.end])
            for message in step.sends:
                sent = [x for r in message.rows for x in buffers[r.buffer][r.start : r.end]]
                assert sent == rows_of(layout, message.hops)
            for message in step.receives:
                buffers[message.buffer] = rows_of(layout, message.hops)
            for buffer in step.done:
                del buffers[buffer]  # a later use would raise
    assert len(found) == len(set(found))
    expected = {
        ((document, i), (document, j), i - j)
        for document, length in enumerate(layout.lengths)
        for i, j in product(range(length), repeat=2)
        if i - band.left <= j <= i + band.right
    }
    assert {x[:2] for x in found} == {x[:2] for x in expected}
    if positions:
        assert set(found) == expected


def pairs_of(call, queries, keys):
    """(query, key, distance) that a call computes."""
    whole = Lengths((0, len(queries)), (0, len(keys)), (len(keys),), len(queries), len(keys))
    x = call.lengths or whole
    for b, count in enumerate(x.kv_lens):
        q = queries[x.cu_seqlens_q[b] : x.cu_seqlens_q[b + 1]]
        k = keys[x.cu_seqlens_k[b] : x.cu_seqlens_k[b] + count]
        assert len(q) <= x.max_seqlen_q and x.cu_seqlens_k[b + 1] - x.cu_seqlens_k[b] <= x.max_seqlen_k
        offset = len(k) - len(q) if call.q_offset is None else call.q_offset
        for (i, query), (j, key) in product(enumerate(q), enumerate(k)):
            if i + offset - call.band.left <= j <= i + offset + call.band.right:
                yield query, key, i + offset - j


def rows_of(layout, hops):
    return [(layout.segments[h.owner][h.segment].document, i) for h in hops for i in range(h.start, h.end)]


@given(layouts, bands, st.booleans())
@settings(deadline=None)
def test_hops_are_matched_and_end_at_home(layout, band, gather):
    schedules = [
        schedule(layout, h, band, gather=gather, positions=False, batched=False) for h in range(layout.holders)
    ]
    for sends, receives in (("sends", "receives"), ("gradient_sends", "gradient_receives")):
        sent, received = set(), set()
        for holder, plan in enumerate(schedules):
            for t, step in enumerate(plan.steps):
                sent |= {(t, holder, m.peer, m.hops) for m in getattr(step, sends)}
                received |= {(t, m.peer, holder, m.hops) for m in getattr(step, receives)}
        assert sent == received
    for h in key_hops(layout, band, gather):
        assert h.sender != h.receiver != h.owner and h.start < h.end
    homes = {(h.owner, h.segment) for h in gradient_hops(layout, band, gather) if h.receiver == h.owner}
    assert homes == {(h.owner, h.segment) for h in key_hops(layout, band, gather)}


@pytest.mark.parametrize("gather", [False, True])
def test_a_window_moves_its_own_size(gather):
    """Rows sent by all ranks: at most the window per segment, however long the sequence is."""
    for length in (1000, 100_000):
        rows = sum(h.end - h.start for h in key_hops(Layout((length,), 8), Band(16, 0), gather))
        assert 0 < rows <= 16 * 16


def test_a_causal_ring_moves_less_than_everything():
    """Half of the segments' pairs are hidden; tails are not sent to ranks that do not see them."""
    layout = Layout((1 << 12,), 4)
    rows = sum(h.end - h.start for h in key_hops(layout, Band(right=0), gather=False))
    assert rows == (1 << 12) // 8 * (4 * 3 + (0 + 1 + 2 + 3))  # heads to all, the tail of rank r to r ranks


@given(st.permutations(range(11)), st.sets(st.integers(0, 10), min_size=1))
@settings(deadline=None, max_examples=30)
def test_the_order_of_arrival_changes_no_bit(order, leaves):
    generator = torch.Generator().manual_seed(0)
    states = [
        State(torch.randn(1, 2, 3, 4, generator=generator), lse, torch.zeros_like(lse))
        for lse in torch.randn(11, 1, 2, 3, generator=generator)
    ]
    results = []
    for numbers in (range(11), order):
        tree = Tree(frozenset(leaves))
        for n in numbers:
            if n in leaves:
                tree.add(n, states[n])
        assert len(tree.waiting) == 1
        results.append((tree.result.out, tree.result.lse))
    assert_same_bits(*results)


# Groups of processes


@dataclass
class Case:
    lengths: tuple[int, ...]
    method: object = "ring"
    layout: str = "zigzag"
    packed: bool = False
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (16, 8)
    batch: int = 1
    dtype: torch.dtype = torch.float32
    options: dict = field(default_factory=dict)
    has_slopes: bool = False
    has_sinks: bool = False
    scale_of_query: float = 1

    @property
    def rows_axis(self) -> int:
        return 0 if self.packed else 2

    def inputs(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        (queries, keys), (dim, dim_v), rows = self.heads, self.dims, sum(self.lengths)

        def random_tensor(heads, dim):
            shape = (rows, heads, dim) if self.packed else (self.batch, heads, rows, dim)
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)

        inputs = {"query": random_tensor(queries, dim) * self.scale_of_query, "key": random_tensor(keys, dim)}
        inputs |= {"value": random_tensor(keys, dim_v), "grad_out": random_tensor(queries, dim_v)}
        inputs["grad_lse"] = random_tensor(queries, 1).squeeze(-1).to(statistics(self.dtype))
        if self.packed:
            inputs["grad_lse"] = inputs["grad_lse"].mT
        if self.has_sinks:
            inputs["sinks"] = torch.randn(queries, generator=generator).to(statistics(self.dtype))
        if self.has_slopes:
            inputs["alibi_slopes"] = torch.rand(queries, generator=generator).to(statistics(self.dtype))
        return inputs

    def plan(self, group=None):
        cu_seqlens = [0, *accumulate(self.lengths)]
        lengths = {"cu_seqlens": cu_seqlens} if self.packed else {"seq_len": self.lengths[0]}
        return shard_plan(group, **lengths, layout=self.layout, method=self.method)


GRADIENTS = ("query", "key", "value", "sinks")


def statistics(dtype):
    return torch.promote_types(dtype, torch.float32)


def cases(n: int) -> list[Case]:
    causal = {"causal": True}
    window = {"causal": True, "window": (5, None)}
    found = [
        Case((2 * n - 1,), options=causal),
        Case((64,), options=causal, batch=2),
        Case((65,), "gather", options=causal, has_sinks=True, batch=2),
        Case((130,), options=window, has_slopes=True, has_sinks=True),
        Case((130,), "gather", "contiguous", options=window, has_slopes=True),
        Case((130,), "ring", "contiguous", options={"window": (7, 3), "softcap": 3.0}),
        Case((1,), options=causal),
        Case((0,), options=causal),
        Case((1, 7, 2 * n - 1, 0, 333), packed=True, options=causal, has_sinks=True),
        Case((1, 7, 2 * n - 1, 90), packed=True, has_slopes=True, method="gather"),
        Case((40, 7, 41), packed=True, options={"window": (4, 2)}, has_sinks=True, method="gather"),
        Case((1, 7, 2 * n - 1, 90), packed=True, options=window, layout="contiguous"),
        Case((5, 0, 30), packed=True, options={"softcap": 2.0}, dtype=torch.float64),
        Case((96,), options=causal, dtype=torch.bfloat16, heads=(8, 1), dims=(64, 64)),
        Case((33,), options=causal, scale_of_query=1e7),  # lse near 1e8
        Case((96,), "ulysses", options=causal, heads=(8, 2), has_sinks=True, has_slopes=True),
        Case((50, 3), "ulysses", packed=True, heads=(8, 8)),
        Case((51,), "ulysses", heads=(9, 3), options=window),
        Case((51,), "ulysses", heads=(8, 1), options=causal, dtype=torch.bfloat16),
    ]
    if n % 2 == 0:
        found += [
            Case((77,), (2, n // 2), heads=(4, 1), options=causal, has_sinks=True),
            Case((77, 1, 20), (2, n // 2), heads=(6, 2), packed=True, options=window),
            Case((40,), (n // 2, 2), heads=(8, 4), layout="contiguous", options=causal),
        ]
    return found


def expected(case: Case, dtype: torch.dtype, **how) -> dict[str, Tensor]:
    """out, lse and gradients of the reference, of each document by itself."""
    inputs = {name: x.to(dtype) for name, x in case.inputs().items()}
    leaves = {name: inputs[name].requires_grad_() for name in GRADIENTS if name in inputs}
    per_head = {name: inputs[name] for name in ("sinks", "alibi_slopes") if name in inputs}
    outs, lses = [], []
    start = 0
    for length in case.lengths:
        rows = slice(start, start + length)
        start += length
        q, k, v = (inputs[name][rows].transpose(0, 1)[None] if case.packed else inputs[name] for name in GRADIENTS[:3])
        out, lse = reference.attention(q, k, v, **case.options, **per_head, **how)
        outs.append(out[0].transpose(0, 1) if case.packed else out)
        lses.append(lse[0] if case.packed else lse)
    out, lse = torch.cat(outs, case.rows_axis), torch.cat(lses, 1 if case.packed else 2)
    loss = (out * inputs["grad_out"]).sum() + (lse * inputs["grad_lse"].to(lse)).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return {"out": out.detach(), "lse": lse.detach()} | dict(zip(leaves, grads, strict=True))


def found(case: Case, plan) -> dict[str, Tensor]:
    """out, lse and gradients of this rank, unsharded."""
    inputs, rows = case.inputs(), case.rows_axis
    local = {name: plan.shard(inputs[name], rows) for name in GRADIENTS[:3]}
    leaves = {name: x.requires_grad_() for name, x in local.items()}
    options = dict(case.options)
    if case.has_sinks:
        options["sinks"] = leaves["sinks"] = inputs["sinks"].requires_grad_()
    if case.has_slopes:
        options["alibi_slopes"] = inputs["alibi_slopes"]
    out, lse = context_attention(*local.values(), plan, return_lse=True, **options)
    assert out.dtype == case.dtype and lse.dtype == statistics(case.dtype)
    per_row = 1 if case.packed else 2
    grad_outputs = plan.shard(inputs["grad_out"], rows), plan.shard(inputs["grad_lse"], per_row)
    grads = torch.autograd.grad((out, lse), list(leaves.values()), grad_outputs)
    results = {"out": plan.unshard(out.detach(), rows), "lse": plan.unshard(lse.detach(), per_row)}
    for name, x in zip(leaves, grads, strict=True):
        results[name] = x if name == "sinks" else plan.unshard(x, rows)
    return results


def check_case(case: Case, group=None) -> None:
    plan = case.plan(group)
    actual = found(case, plan)
    again = found(case, plan)
    assert_same_bits(list(actual.values()), list(again.values()))
    if plan.rank == 0:
        exact, naive = expected(case, torch.float64), expected(case, case.dtype)
        others = [expected(case, case.dtype, textbook=True), expected(case, case.dtype, reordered=True)]
        for name, x in actual.items():
            assert_accurate(f"{name} of {case}", x, exact[name], naive[name], *(o[name] for o in others), slack=2)


def check_cases(n: int) -> None:
    for case in cases(n):
        check_case(case)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_ranks(n):
    ranks.run(n, check_cases, n)


@pytest.mark.parametrize("method", ["ring", "gather", "ulysses"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
def test_one_rank_is_the_plain_call(method, dtype, packed):
    lengths = (300, 1, 0, 40) if packed else (300,)
    case = Case(lengths, method, packed=packed, dtype=dtype, options={"causal": True, "window": (50, 0)})
    case.has_sinks = case.has_slopes = True
    inputs = case.inputs()
    leaves = [inputs[name].requires_grad_() for name in GRADIENTS]
    options = case.options | {"sinks": leaves[3], "alibi_slopes": inputs["alibi_slopes"], "return_lse": True}
    if packed:
        cu_seqlens = torch.tensor([0, *accumulate(lengths)])
        bounds = {"max_seqlen_q": 300, "max_seqlen_k": 300}
        plain = attention_varlen(*leaves[:3], cu_seqlens, cu_seqlens, **bounds, **options)
    else:
        plain = attention(*leaves[:3], **options)
    split = context_attention(*leaves[:3], case.plan(), **options)
    assert_same_bits(split, plain)
    grads = [torch.autograd.grad(x, leaves, (inputs["grad_out"], inputs["grad_lse"])) for x in (split, plain)]
    assert_same_bits(*grads)


class Averaged(torch.autograd.Function):
    """A tensor that all ranks have and use for the same loss; its gradient is the mean of theirs."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad / dist.get_world_size()


def check_gradients(method) -> None:
    plan = shard_plan(seq_len=5, method=method)
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 5, 2, dtype=torch.float64, generator=generator).unbind()
    sinks = torch.randn(2, dtype=torch.float64, generator=generator)

    def whole(query, key, value, sinks):
        parts = [plan.shard(Averaged.apply(x), 2) for x in (query, key, value)]
        out, lse = context_attention(*parts, plan, causal=True, window=(3, 0), sinks=sinks, return_lse=True)
        return plan.unshard(out, 2), plan.unshard(lse, 2)

    def averaged_sinks(query, key, value, sinks):
        # The gradient of sinks is summed over ranks already, and each rank's loss is the same.
        return whole(query, key, value, Scaled.apply(sinks, 1 / plan.size))

    inputs = [x.requires_grad_() for x in (query, key, value, sinks)]
    torch.autograd.gradcheck(averaged_sinks, inputs)


class Scaled(torch.autograd.Function):
    """x, with a gradient that is multiplied."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_gradcheck(method):
    ranks.run(2, check_gradients, method)


def check_clients() -> None:
    """Activation checkpointing, autocast, a mesh, and a group of some of the ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.utils.checkpoint import checkpoint

    case = Case((50,), options={"causal": True}, heads=(4, 2))
    plan = case.plan()
    inputs = case.inputs()
    local = [plan.shard(inputs[name], 2) for name in GRADIENTS[:3]]

    def attend(*operands):
        return context_attention(*operands, plan, causal=True)

    def gradients(function):
        leaves = [x.clone().requires_grad_() for x in local]
        out = function(*leaves)
        out.square().sum().backward()
        return [out.detach(), *(x.grad for x in leaves)]

    plain = gradients(attend)
    for reentrant in (True, False):
        assert_same_bits(gradients(lambda *x: checkpoint(attend, *x, use_reentrant=reentrant)), plain)  # noqa: B023
    with torch.autocast("cpu", torch.bfloat16):
        cast = attend(*local)
    assert cast.dtype == torch.bfloat16
    assert_same_bits(cast, attend(*(x.bfloat16() for x in local)))

    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("ring", "ulysses"))
    pair = Case((50,), (2, dist.get_world_size() // 2), options={"causal": True})
    check_case(pair, mesh)
    check_case(case, mesh["ulysses"])
    check_case(Case((9, 30), "gather", packed=True, options={"causal": True}), mesh["ring"])


def check_compiled(case: Case) -> None:
    """In one graph, with the collectives of the compiler."""
    plan, inputs = case.plan(), case.inputs()

    def attend(*operands):
        return context_attention(*operands, plan, return_lse=True, **case.options)

    results = []
    for function in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=False)):
        leaves = [plan.shard(inputs[name], case.rows_axis).requires_grad_() for name in GRADIENTS[:3]]
        out, lse = function(*leaves)
        (out.square().sum() + lse.sum()).backward()
        results.append([out.detach(), lse.detach(), *(x.grad for x in leaves)])
    torch.testing.assert_close(*results)


def check_losses_differ() -> None:
    """One rank's loss takes out, the other's lse."""
    for method in ("ring", "gather", "ulysses"):
        case = Case((50,), method, options={"causal": True}, heads=(4, 2))
        plan, inputs = case.plan(), case.inputs()
        whole = [inputs[name].clone().requires_grad_() for name in GRADIENTS[:3]]
        out, lse = attention(*whole, causal=True, return_lse=True)
        rows = [plan.indices_of(rank) for rank in range(2)]
        (out[:, :, rows[0]].square().sum() + lse[:, :, rows[1]].square().sum()).backward()
        leaves = [plan.shard(inputs[name], 2).requires_grad_() for name in GRADIENTS[:3]]
        context_attention(*leaves, plan, causal=True, return_lse=True)[plan.rank].square().sum().backward()
        for x, expected in zip(leaves, whole, strict=True):
            torch.testing.assert_close(x.grad, plan.shard(expected.grad, 2))


def test_losses_differ():
    ranks.run(2, check_losses_differ)


def check_all_compiled() -> None:
    check_compiled(Case((3, 1, 40), packed=True, options={"window": (5, 0)}))
    check_compiled(Case((50,), "gather", options={"causal": True}))
    check_compiled(Case((50,), "ulysses", options={"causal": True}))


def test_compile():
    ranks.run(3, check_all_compiled)


def test_clients():
    ranks.run(4, check_clients)


def raises(kind, text, function, *args, **kwargs) -> None:
    with pytest.raises(kind, match=text):
        function(*args, **kwargs)


def check_errors() -> None:
    rank = dist.get_rank()
    raises(ValueError, "seq_len, cu_seqlens: wanted one", shard_plan)
    raises(ValueError, "seq_len: -1, wanted at least 0", shard_plan, seq_len=-1)
    raises(TypeError, "seq_len: float, wanted an int", shard_plan, seq_len=8.0)
    raises(ValueError, "cu_seqlens: starts with", shard_plan, cu_seqlens=[1, 2])
    raises(ValueError, "cu_seqlens: falls after element 1", shard_plan, cu_seqlens=[0, 4, 2])
    raises(ValueError, "cu_seqlens: 1 dimensions of torch.float32", shard_plan, cu_seqlens=torch.tensor([0.0]))
    raises(ValueError, "layout: 'ring', wanted 'zigzag'", shard_plan, seq_len=8, layout="ring")
    raises(ValueError, "method: 'star', wanted", shard_plan, seq_len=8, method="star")
    raises(ValueError, r"method: \(2, 2\) is for 4 ranks, the group has 2", shard_plan, seq_len=8, method=(2, 2))
    raises(TypeError, "group: int, wanted a ProcessGroup", shard_plan, 3, seq_len=8)
    raises(ValueError, "rank 0 has seq_len 8.*rank 1 has seq_len 9", shard_plan, seq_len=8 + rank)

    plan = shard_plan(seq_len=8)
    q, k, v = torch.randn(1, 4, 4, 16), torch.randn(1, 2, 4, 16), torch.randn(1, 2, 4, 16)

    def call(query=q, key=k, value=v, plan=plan, **options):
        return context_attention(query, key, value, plan, **options)

    raises(TypeError, "plan: NoneType, wanted a ShardPlan", call, plan=None)
    raises(TypeError, "query: list, wanted a Tensor", call, [])
    raises(ValueError, "query: 3 dimensions, wanted 4", call, q[0])
    raises(ValueError, "key: 3 rows, wanted 4, as the plan has them", call, key=k[:, :, :3])
    raises(ValueError, "value: dtype torch.float64, wanted torch.float32", call, value=v.double())
    raises(ValueError, "key: device meta", call, key=k.to("meta"))
    raises(ValueError, "key: 2 heads, wanted a divisor of the 3 heads", call, q[:, :3])
    raises(ValueError, "value: 1 heads, wanted 2 as key", call, value=v[:, :1])
    raises(ValueError, "key: head_dim 8, wanted 16", call, key=k[..., :8])
    raises(ValueError, "batch 2 and 1, wanted 1", call, key=k.expand(2, -1, -1, -1))
    raises(ValueError, r"sinks: shape \[3\], wanted \[4\]", call, sinks=torch.zeros(3))
    raises(ValueError, "window: left is -1", call, window=(-1, 0))
    raises(TypeError, "scale: 'x', wanted a number", call, scale="x")
    many = shard_plan(seq_len=8, method="ulysses")
    raises(ValueError, "query: 1 heads, wanted at least the Ulysses degree 2", call, q[:, :1], k[:, :1], v[:, :1], many)
    raises(ValueError, "x: 7 rows along axis 2, wanted 8", plan.shard, torch.zeros(1, 1, 7), 2)
    raises(ValueError, "dim: 3, wanted an axis", plan.shard, torch.zeros(1, 1, 8), 3)

    # One rank is wrong, all raise: that rank its own error, the others with its rank and reason.
    text = "key: 3 rows" if rank == 1 else "rank 1 raised ValueError: key: 3 rows"
    raises(ValueError, text, call, key=k[:, :, :3] if rank == 1 else k)
    raises(ValueError, "wanted the same on all ranks", call, causal=rank == 1)
    raises(ValueError, "requires_grad", call, q.clone().requires_grad_(rank == 1))
    wanted = [x.clone().requires_grad_(n == rank) for n, x in enumerate((q, k, v))]
    raises(ValueError, "requires_grad", call, *wanted)
    raises((TypeError, ValueError), "query: list, wanted a Tensor", call, [] if rank == 0 else q)
    assert call().shape == (1, 4, 4, 16)  # and the group is still in step


def test_errors():
    ranks.run(2, check_errors)


def check_absent() -> None:
    """Rank 1 does not come: rank 0 says for whom it waited. Or it fails in the middle: rank 0 says why."""
    plan = shard_plan(seq_len=8)
    q = torch.randn(1, 2, 4, 16)
    if dist.get_rank() == 0:
        raises(RuntimeError, "context_attention: rank 0 waited for the others", context_attention, q, q, q, plan)
    else:
        time.sleep(4)


def check_failure() -> None:
    plan = shard_plan(seq_len=8)
    q = torch.randn(1, 2, 4, 16)
    if dist.get_rank() == 0:
        text = r"step 0 of rank 0, which waits for ranks \[1\](.|\n)*rank 1, context_attention: OSError: no memory"
        raises(RuntimeError, text, context_attention, q, q, q, plan)
    else:
        with mock.patch("flashsoftmax.distributed.context._forward", side_effect=OSError("no memory")):
            raises(OSError, "no memory", context_attention, q, q, q, plan)
        time.sleep(4)


@pytest.mark.parametrize("check", [check_absent, check_failure])
def test_a_rank_that_does_not_come(check):
    ranks.run(2, check, timeout=3)


# Decode


@dataclass
class Cache:
    kv_lens: tuple[int, ...]
    interleave: int = 1
    rows: int = 1
    page_size: int | None = None
    dtype: torch.dtype = torch.float32
    options: dict = field(default_factory=dict)
    has_slopes: bool = False
    has_sinks: bool = False


def caches(n: int) -> list[Cache]:
    return [
        Cache((50, 1, 0, 7)),
        Cache((50, 1, 0, 7), interleave=4, page_size=3, has_sinks=True),
        Cache((50, 33), interleave=64, options={"softcap": 3.0}),
        Cache((1000, 300), interleave=16, dtype=torch.bfloat16, has_sinks=True),
        Cache((50, 20, 5), interleave=2, rows=5, options={"causal": True}),
        Cache((50, 20, 5), rows=3, options={"window": (9, 0)}, has_slopes=True, has_sinks=True),
        Cache((200, 3), interleave=8, options={"window": (20, 2)}, page_size=16),
        Cache((40, 8), rows=20, options={"causal": True}, dtype=torch.float64),
    ]


def check_cache(cache: Cache) -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    batch, longest = len(cache.kv_lens), max(cache.kv_lens)
    query = torch.randn(batch, 4, cache.rows, 16, generator=generator).to(cache.dtype)
    key, value = torch.randn(2, batch, 2, longest, 16, generator=generator).to(cache.dtype).unbind()
    options = dict(cache.options)
    if cache.has_slopes:
        options["alibi_slopes"] = torch.rand(4, generator=generator)
    if cache.has_sinks:
        options["sinks"] = torch.randn(4, generator=generator)
    tokens = [i for i in range(longest) if i // cache.interleave % n == rank]
    slots = len(tokens) + 5  # the unused ones hold NaN, and so do tokens beyond kv_lens
    local = []
    for x in (key, value):
        part = x.new_full((batch, 2, slots, 16), torch.nan)
        part[:, :, : len(tokens)] = x[:, :, tokens]
        for b, length in enumerate(cache.kv_lens):
            part[b, :, sum(i < length for i in tokens) :] = torch.nan
        local.append(part)
    kv_lens, table = torch.tensor(cache.kv_lens), {}
    if cache.page_size:
        pages = -(-slots // cache.page_size)
        table["block_table"] = torch.arange(batch * pages).view(batch, pages)
        pad = pages * cache.page_size - slots
        local = [
            torch.nn.functional.pad(x, (0, 0, 0, pad), value=torch.nan)
            .view(batch, 2, pages, cache.page_size, 16)
            .transpose(1, 2)
            .flatten(0, 1)
            .transpose(1, 2)
            for x in local
        ]
    actual = decode_over_ranks(
        query, *local, kv_lens=kv_lens, interleave=cache.interleave, return_lse=True, **options, **table
    )
    everywhere = [[torch.empty_like(x) for _ in range(n)] for x in actual]
    for xs, x in zip(everywhere, actual, strict=True):
        dist.all_gather(xs, x.contiguous())
        assert_same_bits(xs, [x] * n)
    whole = query.double(), key.double(), value.double()
    exact = reference.attention(*whole, kv_lens=kv_lens, **options)
    naive = reference.attention(query, key, value, kv_lens=kv_lens, **options)
    for name, x, e, y in zip(("out", "lse"), actual, exact, naive, strict=True):
        assert_accurate(f"{name} of {cache}", x, e, y, slack=2)


def check_caches() -> None:
    for cache in caches(dist.get_world_size()):
        check_cache(cache)
    q, kv_lens = torch.randn(2, 4, 1, 16), torch.tensor([5, 3])
    k = torch.randn(2, 2, 4, 16)
    for kind, text, changes in (
        (ValueError, "interleave: 0, wanted at least 1", {"interleave": 0}),
        (TypeError, "interleave: float", {"interleave": 1.0}),
        (TypeError, "kv_lens: list, wanted a Tensor", {"kv_lens": [5, 3]}),
        (ValueError, r"kv_lens: shape \[1\]", {"kv_lens": kv_lens[:1]}),
        (ValueError, "query: requires_grad is True", {"query": q.clone().requires_grad_()}),
        (ValueError, "kv_lens", {"kv_lens": torch.tensor([100, 3])}),
        (ValueError, "wanted the same on all ranks", {"interleave": 1 + dist.get_rank()}),
    ):
        raises(kind, text, decode_over_ranks, **({"query": q, "key": k, "value": k, "kv_lens": kv_lens} | changes))
    compiled = torch.compile(decode_over_ranks, backend="aot_eager", fullgraph=True)
    assert_same_bits(compiled(q, k, k, kv_lens=kv_lens), decode_over_ranks(q, k, k, kv_lens=kv_lens))


@pytest.mark.parametrize("n", [2, 3])
def test_decode(n):
    ranks.run(n, check_caches)


@pytest.mark.parametrize("page_size", [None, 8])
def test_decode_on_one_rank_is_the_plain_call(page_size):
    query, key = torch.randn(2, 4, 3, 16), torch.randn(2, 2, 40, 16)
    kv_lens = torch.tensor([40, 17])
    options = {"causal": True, "window": (20, 0), "sinks": torch.randn(4), "alibi_slopes": torch.rand(4)}
    plain = attention(query, key, key, kv_lens=kv_lens, return_lse=True, **options)
    if page_size:
        key = key.view(2, 2, 5, 8, 16).transpose(1, 2).flatten(0, 1).transpose(1, 2)
        options["block_table"] = torch.arange(10).view(2, 5)
    split = decode_over_ranks(query, key, key, kv_lens=kv_lens, return_lse=True, **options)
    assert_same_bits(split, plain)
