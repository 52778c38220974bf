"""What only a GPU has: streams, graphs, several devices, tensors beyond 2^31 elements, lengths that nobody reads.

The rest of the tests runs there too: each that takes `device`.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate

import pytest
import torch
from torch.testing import assert_close

import reference
from checks import assert_same_bits
from flashsoftmax import attention, attention_paged, attention_varlen, merge

GPU = torch.device("cuda")
NAMES = ("interpreted", "cuda")
ON_GPU = pytest.mark.parametrize(
    "device", [pytest.param(x, marks=getattr(pytest.mark, x)) for x in NAMES], indirect=True
)


def on_gpu(test):
    return pytest.mark.cuda(pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")(test))


def inputs(batch=2, rows=200, keys=300, dim=64, dtype=torch.bfloat16, device=GPU):
    query = torch.randn(batch, 4, rows, dim, dtype=dtype, device=device)
    return query, *torch.randn(2, batch, 2, keys, dim, dtype=dtype, device=device).unbind()


@on_gpu
@pytest.mark.parametrize("rows", [1, 200])
def test_another_stream(rows):
    """The call is ordered after what its stream did before, and needs nothing of the default stream."""
    q, k, v = inputs(rows=rows)
    expected = attention(q, k, v, causal=True)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = torch.zeros_like(q)
        torch.cuda._sleep(50_000_000)
        late.copy_(q)
        out = attention(late, k, v, causal=True)
    stream.synchronize()
    assert_same_bits(out, expected)


@on_gpu
@pytest.mark.parametrize("rows", [1, 200])
def test_cuda_graph(rows):
    """Replays with what the inputs hold by then; forward, merge and backward."""
    q, k, v = (x.requires_grad_() for x in inputs(rows=rows))
    lens = torch.tensor([300, 123], device=GPU)

    def step():
        out, lse = attention(q, k, v, kv_lens=lens, return_lse=True)
        out, _ = merge([out, out], [lse, lse])
        return out.detach(), *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    step()  # what is done once, such as the choice of shared memory, is done
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in (q, k, v):
            x.copy_(torch.randn_like(x))
        lens.copy_(torch.tensor([17, 300]))
    graph.replay()
    assert_same_bits(captured, step())


@on_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_second_device():
    q, k, v = inputs()
    other = torch.device("cuda", 1)
    assert torch.cuda.current_device() == 0
    out = attention(*(x.to(other) for x in (q, k, v)), causal=True)
    assert out.device == other
    assert_same_bits(out.to(GPU), attention(q, k, v, causal=True))


@on_gpu
@pytest.mark.parametrize("rows", [1, 130])
def test_offsets_beyond_32_bits(rows):
    """The last of many heads lies more than 2^31 elements behind the first."""
    heads, keys, dim = 260, 130_000, 64
    if torch.cuda.mem_get_info()[0] < 3 * heads * keys * dim * 2:
        pytest.skip("too little memory")
    key = torch.randn(1, 1, keys, dim, dtype=torch.bfloat16, device=GPU).repeat(1, heads, 1, 1)
    query = torch.randn(1, 1, rows, dim, dtype=torch.bfloat16, device=GPU).repeat(1, heads, 1, 1)
    out = attention(query, key, key)
    assert_same_bits(out, out[:, :1].expand_as(out))
    expected = reference.attention(*(x[:, :1].double() for x in (query, key, key)))[0]
    assert_close(out[:, -1:].double(), expected, rtol=0.02, atol=0.02)


@on_gpu
def test_more_heads_than_a_grid_is_high():
    q, k, v = torch.randn(3, 70_000, 1, 2, 8, dtype=torch.float16, device=GPU).unbind()
    out = attention(q, k, v)
    assert_same_bits(out[-3:], attention(q[-3:], k[-3:], v[-3:]))


@ON_GPU
class TestLengthsOnTheGPU:
    """Not read by default: a bad one makes its own sequence NaN. FLASHSOFTMAX_CHECK=1 reads and refuses it."""

    @pytest.mark.parametrize("rows", [1, 40])
    @pytest.mark.parametrize("bad", [-1, 301, 2**40])
    def test_kv_lens(self, rows, bad, device, monkeypatch):
        q, k, v = inputs(rows=rows, device=device)
        lens = torch.tensor([100, bad], device=device)
        out, lse = attention(q, k, v, kv_lens=lens, return_lse=True)
        assert_same_bits(out[:1], attention(q[:1], k[:1], v[:1], kv_lens=lens[:1]))
        assert out[1].isnan().all()
        assert lse[1].isnan().all()
        monkeypatch.setenv("FLASHSOFTMAX_CHECK", "1")
        with pytest.raises(ValueError, match="kv_lens"):
            attention(q, k, v, kv_lens=lens)

    @pytest.mark.parametrize("rows", [1, 40])
    @pytest.mark.parametrize("name", ["kv_starts", "q_lens"])
    @pytest.mark.parametrize("bad", [-1, -(2**40)])
    def test_starts_and_query_lengths(self, rows, name, bad, device, monkeypatch):
        q, k, v = inputs(rows=rows, device=device)
        lens = {name: torch.tensor([1, bad], device=device)}
        out, lse = attention(q, k, v, **lens, return_lse=True)
        assert_same_bits(out[:1], attention(q[:1], k[:1], v[:1], **{name: lens[name][:1]}))
        assert out[1].isnan().all()
        assert lse[1].isnan().all()
        monkeypatch.setenv("FLASHSOFTMAX_CHECK", "1")
        with pytest.raises(ValueError, match=name):
            attention(q, k, v, **lens)

    @pytest.mark.parametrize("bad", [41, 2**40])
    def test_more_queries_than_there_are(self, bad, device):
        q, k, v = inputs(rows=40, device=device)
        out = attention(q, k, v, q_lens=torch.tensor([40, bad], device=device))
        assert out[0].isfinite().all()
        assert out[1].isnan().all()

    def test_a_step_over_pages(self, device):
        """The sequences with a bad length or page are NaN, whichever kernel takes them; the others are as they were."""
        lens_q = (1, 1, 20, 20, 1, 20)
        query = torch.randn(sum(lens_q), 4, 64, device=device)
        pages = torch.randn(2, 8, 16, 2, 64, device=device)
        table = torch.tensor([[0, 1, 2]] * 6, device=device)
        cu = torch.tensor([0, *accumulate(lens_q)], device=device)
        arguments = {"cu_seqlens_q": cu, "max_seqlen_q": 20, "causal": True}
        lens = torch.full((6,), 40, device=device)
        expected = attention_varlen(query, *pages, block_table=table, kv_lens=lens, **arguments).split(lens_q)
        lens[1], lens[2], table[4, 1], table[5, 2] = -1, 49, 8, -1
        found = attention_varlen(query, *pages, block_table=table, kv_lens=lens, **arguments).split(lens_q)
        for b in (0, 3):
            assert_same_bits(found[b], expected[b])
        for b in (1, 2, 4, 5):
            assert found[b].isnan().all()

    def test_page_ids(self, device, monkeypatch):
        q = torch.randn(2, 4, 1, 64, device=device)
        pages = torch.randn(2, 8, 16, 2, 64, device=device)
        table = torch.tensor([[0, 1, 2], [3, 8, 4]], device=device)
        out = attention_paged(q, *pages, table, torch.tensor([40, 40], device=device))
        assert out[0].isfinite().all()
        assert out[1].isnan().all()
        monkeypatch.setenv("FLASHSOFTMAX_CHECK", "1")
        with pytest.raises(ValueError, match="block_table"):
            attention_paged(q, *pages, table, torch.tensor([40, 40], device=device))

    def test_rows_behind_the_last_sequence(self, device):
        x = torch.randn(12, 2, 64, device=device, requires_grad=True)
        cu = torch.tensor([0, 3, 8], device=device)
        out, lse = attention_varlen(x, x, x, cu, cu, max_seqlen_q=5, max_seqlen_k=5, return_lse=True)
        assert not out[8:].any()
        assert (lse[:, 8:] == -torch.inf).all()
        assert not torch.autograd.grad(out.sum(), x)[0][8:].any()

    @pytest.mark.parametrize("most", [0, 1, 20, 100])
    def test_a_sequence_longer_than_its_maximum(self, device, most):
        """All its rows are NaN, in the output and in the query's gradient: also those behind the maximum."""
        x = torch.randn(310, 2, 16, device=device, requires_grad=True)
        cu = torch.tensor([0, 300, 310 if most >= 10 else 300], device=device)
        out, lse = attention_varlen(x, x, x, cu, cu, max_seqlen_q=most, max_seqlen_k=310, return_lse=True)
        assert out[:300].isnan().all()
        assert lse[:, :300].isnan().all()
        assert out[300:].isfinite().all()
        query = x.detach().requires_grad_()
        found = attention_varlen(query, x.detach(), x.detach(), cu, cu, max_seqlen_q=most, max_seqlen_k=310)
        (gradient,) = torch.autograd.grad(found.sum(), query)
        assert gradient[:300].isnan().all()
        assert gradient[300:].isfinite().all()

    @pytest.mark.parametrize("most", [2**40, 2**56, 2**63 - 1])
    def test_a_maximum_beyond_the_rows_there_are(self, device, most):
        x = torch.randn(70, 2, 16, device=device, requires_grad=True)
        cu = torch.tensor([0, 30, 70], device=device)

        def call(most):
            out = attention_varlen(x, x, x, cu, cu, max_seqlen_q=most, max_seqlen_k=most)
            return out.detach(), *torch.autograd.grad(out.sum(), x)

        assert_same_bits(call(most), call(40))

    @pytest.mark.parametrize("most", [1, 40])
    def test_more_blocks_than_a_grid_has(self, device, most):
        x = torch.zeros(1, 1, 8, device=device).expand(1, 2**16, 8)
        cu = torch.zeros(2**16 + 1, dtype=torch.int64, device=device)
        with pytest.raises(ValueError, match="more than 2147483647"):
            attention_varlen(x, x, x, cu, cu, max_seqlen_q=most, max_seqlen_k=1)

    @pytest.mark.parametrize("rows", [1, 3, 40], ids=["one", "decode", "tiled"])
    @pytest.mark.parametrize("split_size", [128, 1024])
    def test_pages_that_no_query_sees(self, device, rows, split_size):
        """A window has moved on: pages before it are freed, as are pages behind the last query's end."""
        page_size, keys = 16, 320
        q = torch.randn(2, 4, rows, 64, device=device)
        key_pages, value_pages = torch.randn(2, 2 * keys // page_size, page_size, 2, 64, device=device)
        table = torch.arange(2 * keys // page_size, device=device).view(2, -1)
        lens = torch.tensor([keys, keys - 5], device=device)
        call = partial(attention_paged, q, key_pages, value_pages, kv_lens=lens, split_size=split_size)
        options = {"window": (50, 0), "q_offset": 200, "return_lse": True}
        expected = call(block_table=table, **options)
        seen = torch.arange(table.shape[1], device=device)
        seen = (seen >= 150 // page_size) & (seen <= (200 + rows - 1) // page_size)
        for unused in (-1, 10**6):
            assert_same_bits(call(block_table=torch.where(seen, table, unused), **options), expected)
        hole = torch.where(torch.arange(table.shape[1], device=device) == 200 // page_size, -1, table)
        assert all(x.isnan().all() for x in call(block_table=hole, **options))


@on_gpu
def test_threads_with_queries_in_groups_of_other_sizes():
    """A kernel's limit of shared memory is one for all threads of the host."""
    q, k, v = inputs(rows=1)
    many = q.repeat_interleave(16, 1)
    expected = attention(q, k, v), attention(many, k, v)

    def call(n):
        return all(torch.equal(attention((q, many)[n % 2], k, v), expected[n % 2]) for _ in range(500))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(8)))
