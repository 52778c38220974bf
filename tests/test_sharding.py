"""DTensor: calls split by batch or by heads need no communication; others are gathered."""

import os
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from flashsoftmax import attention, attention_varlen, merge

RANKS = 2


def run(rank: int, store: str) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.debug import CommDebugMode

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(0)

    def place(x, placement):
        return distribute_tensor(x.detach(), mesh, [placement]).requires_grad_(x.requires_grad)

    def call(q, k, v, mask, sinks, slopes, kv_lens):
        options = {"sinks": sinks, "alibi_slopes": slopes, "kv_lens": kv_lens, "causal": True}
        out, lse = attention(q, k, v, mask, return_lse=True, **options)
        return out, lse, (out.square().sum() + lse.exp().sum())

    shapes = (4, 8, 5, 16), (4, 4, 9, 16), (4, 4, 9, 16), (4, 8, 5, 9), (8,)
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    rest = torch.rand(8), torch.tensor([9, 3, 0, 5])
    *expected, loss = call(*tensors, *rest)
    loss.backward()
    for per_row, per_head, per_sequence in (
        (Shard(0), Replicate(), Shard(0)),
        (Shard(1), Shard(0), Replicate()),
        (Replicate(), Replicate(), Replicate()),
    ):
        placed = [place(x, per_row) for x in tensors[:4]] + [place(tensors[4], per_head)]
        options = place(rest[0], per_head), place(rest[1], per_sequence)
        with CommDebugMode() as communication:
            *found, loss = call(*placed, *options)
            loss.backward()
        assert communication.get_total_counts() == 0
        assert all(x.placements == (per_row,) for x in found)
        assert_close([x.full_tensor() for x in found], list(expected))
        assert_close([x.grad.full_tensor() for x in placed], [x.grad for x in tensors])

    # A mask and a bias that are broadcast differently; slopes, starts and lengths per sequence.
    def call_more(q, k, v, mask, bias, slopes, kv_starts, q_lens):
        options = {"alibi_slopes": slopes, "kv_starts": kv_starts, "q_lens": q_lens}
        return attention(q, k, v, mask, attn_bias=bias, **options).square().sum()

    more = [torch.rand(4, 1, 1, 9) < 0.8, torch.randn(1, 8, 5, 9, requires_grad=True), torch.rand(4, 8)]
    more += [torch.tensor([0, 4, 9, 1]), torch.tensor([5, 2, 3, 0])]
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    call_more(*leaves, *more).backward()
    for axis, places in (
        (Shard(0), (Shard(0), Replicate(), Shard(0), Shard(0))),
        (Shard(1), (Replicate(), Shard(1), Shard(1), Replicate())),
    ):
        placed = [place(x, axis) for x in leaves]
        others = [place(x, p) for x, p in zip(more, (*places, places[3]), strict=True)]
        with CommDebugMode() as communication:
            call_more(*placed, *others).backward()
        assert communication.get_total_counts() == 0
        assert_close([x.grad.full_tensor() for x in placed], [x.grad for x in leaves])
        assert_close(others[1].grad.full_tensor(), more[1].grad)

    # A mask for all heads: each rank has it whole, and a part of its gradient.
    mask = torch.randn(4, 1, 5, 9, requires_grad=True)
    call(*tensors[:3], mask, tensors[4], *rest)[2].backward()
    options = place(rest[0], Shard(0)), place(rest[1], Replicate())
    placed = [place(x, Shard(1)) for x in tensors[:3]], place(mask, Replicate()), place(tensors[4], Shard(0))
    call(*placed[0], *placed[1:], *options)[2].backward()
    assert placed[1].grad.placements[0].is_partial()
    assert_close(placed[1].grad.full_tensor(), mask.grad)

    # Key heads that do not divide over the ranks are gathered: query heads would lose theirs.
    q, k = torch.randn(2, 6, 5, 16), torch.randn(2, 3, 9, 16)
    assert_close(attention(place(q, Shard(1)), *[place(k, Shard(1))] * 2).full_tensor(), attention(q, k, k))

    # Dropout: the seed of the first rank; batch and heads are gathered, because the mask depends on their indices.
    torch.manual_seed(rank)
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    for placement in (Shard(0), Shard(1), Replicate()):
        placed = [place(x, placement) for x in (q, k, v)]
        torch.manual_seed(rank)
        found = attention(*placed, dropout_p=0.5).full_tensor()
        found.square().sum().backward()
        torch.manual_seed(0)
        expected = attention(q, k, v, dropout_p=0.5)
        grads = torch.autograd.grad(expected.square().sum(), (q, k, v))
        assert_close(found, expected)
        assert_close([x.grad.full_tensor() for x in placed], list(grads))
    torch.manual_seed(0)

    x, cu = torch.randn(7, 4, 8), torch.tensor([0, 3, 7])
    lengths = {"max_seqlen_q": 4, "max_seqlen_k": 4}
    found = attention_varlen(*[place(x, Shard(1))] * 3, *[place(cu, Replicate())] * 2, **lengths)
    assert found.placements == (Shard(1),)
    assert_close(found.full_tensor(), attention_varlen(x, x, x, cu, cu, **lengths))

    states = [torch.randn(3, 4, 8, 5, 16, requires_grad=True), torch.randn(3, 4, 8, 5, requires_grad=True)]
    expected = merge(*states)
    sum(x.square().sum() for x in expected).backward()
    for axis in (0, 1):
        placed = [[place(x.detach().requires_grad_(), Shard(axis)) for x in side.unbind()] for side in states]
        found = merge(*placed)
        assert all(x.placements == (Shard(axis),) for x in found)
        assert_close([x.full_tensor() for x in found], list(expected))
        sum(x.square().sum() for x in found).backward()
        for side, all_states in zip(placed, states, strict=True):
            assert_close(torch.stack([x.grad.full_tensor() for x in side]), all_states.grad)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # threads of gloo that outlive the group would abort a normal exit, now and then


@pytest.mark.skipif(not dist.is_available(), reason="torch has no distributed")
def test_two_ranks():
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (f"{folder}/store",), nprocs=RANKS)
