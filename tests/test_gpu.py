"""What only a GPU has: streams, graphs, several devices, tensors beyond 2^31 elements, lengths that nobody reads.

The rest of the tests runs there too: each that takes `device`.
"""

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
