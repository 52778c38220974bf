"""Every contender computes the same attention: layout, scale, causal alignment and shared key heads.

flash_attn and flashinfer need a GPU. Stand-ins with their signatures take their place, and compute by the reference.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))

import reference
from bench.support import contenders, cpu_peers
from bench.support.shapes import Shape

SHAPES = [
    Shape("forward", 2, 6, 2, 5, 5, 8),
    Shape("forward", 2, 6, 2, 5, 5, 8, causal=True),
    Shape("forward", 1, 6, 2, 3, 7, 8, causal=True),
    Shape("forward", 1, 4, 4, 7, 7, 8, causal=True),
    Shape("forward + backward", 2, 6, 2, 5, 7, 8, causal=True),
    Shape("decode", 2, 6, 2, 1, 7, 8),
    Shape("decode", 1, 6, 2, 1, 7, 8),
    Shape("decode", 1, 6, 2, 3, 7, 8, causal=True),
]
MODEL_SHAPES = [
    Shape("forward", 2, 4, 4, 130, 130, 64),
    Shape("forward", 1, 4, 4, 130, 130, 64, causal=True),
    Shape("forward", 2, 8, 2, 5, 300, 128, causal=True),
    Shape("decode", 2, 8, 2, 1, 300, 128),
    Shape("forward + backward", 1, 4, 4, 33, 33, 64),
]
WINDOWED = Shape("forward", 1, 6, 2, 5, 7, 8, causal=True, window=2)


def by_reference(q, k, v, causal=False, window=None):
    """Attention of [batch, heads, rows, dim] by tests/reference.py, which shares no code with the benchmarks."""
    assert q.shape[-1] == k.shape[-1] and k.shape == v.shape and q.shape[1] % k.shape[1] == 0
    return reference.attention(q, k, v, causal=causal, window=window)[0]


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """q [batch, rows, heads, dim], k and v [batch, keys, heads, dim]; causal is aligned to the bottom right."""
    return by_reference(*(x.transpose(1, 2) for x in (q, k, v)), causal).transpose(1, 2)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    """Layouts as above."""
    assert k_cache.stride(-1) == 1 and v_cache.stride(-1) == 1
    return flash_attn_func(q, k_cache, v_cache, causal=causal)


def heads_first(x, kv_layout):
    return {"HND": x, "NHD": x.transpose(0, 1)}[kv_layout][None]


def single_decode_with_kv_cache(
    q,
    k,
    v,
    kv_layout="NHD",
    pos_encoding_mode="NONE",
    use_tensor_cores=False,
    q_scale=None,
    k_scale=None,
    v_scale=None,
    window_left=-1,
    logits_soft_cap=None,
    sm_scale=None,
    rope_scale=None,
    rope_theta=None,
    return_lse=False,
):
    """q [heads, dim], k and v [heads, keys, dim] (HND)."""
    assert q.dim() == 2 and q.is_contiguous()
    return by_reference(q[None, :, None], heads_first(k, kv_layout), heads_first(v, kv_layout))[0, :, 0]


def single_prefill_with_kv_cache(
    q,
    k,
    v,
    scale_q=None,
    scale_k=None,
    scale_v=None,
    o_dtype=None,
    custom_mask=None,
    packed_custom_mask=None,
    causal=False,
    kv_layout="NHD",
    pos_encoding_mode="NONE",
    use_fp16_qk_reduction=False,
    sm_scale=None,
    window_left=-1,
    logits_soft_cap=None,
    rope_scale=None,
    rope_theta=None,
    backend="auto",
    return_lse=False,
):
    """q [rows, heads, dim], k and v [heads, keys, dim] (HND); causal is aligned to the bottom right."""
    k, v = heads_first(k, kv_layout), heads_first(v, kv_layout)
    return by_reference(q.transpose(0, 1)[None], k, v, causal)[0].transpose(0, 1)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    for name, functions in {
        "flash_attn": (flash_attn_func, flash_attn_with_kvcache),
        "flashinfer": (single_decode_with_kv_cache, single_prefill_with_kv_cache),
    }.items():
        module = ModuleType(name)
        for function in functions:
            setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["ours", "sdpa", "naive", "flash_attn", "flashinfer"])
def test_contenders_compute_the_same_attention(name, shape):
    attend = getattr(contenders, name)
    inputs = shape.inputs(torch.float32, "cpu")
    if name == "flashinfer" and (shape.batch > 1 or shape.kind == "forward + backward"):
        with pytest.raises(NotImplementedError, match="one sequence"):
            attend(*inputs[:3], shape)
        return
    expected = contenders.results(lambda q, k, v, shape: by_reference(q, k, v, shape.causal), inputs, shape)
    torch.testing.assert_close(contenders.results(attend, inputs, shape), expected)


@pytest.mark.parametrize("name", ["ours", "sdpa", "naive", "flash_attn", "flashinfer"])
def test_contenders_take_a_window_or_refuse_it(name):
    query, key, value, _ = WINDOWED.inputs(torch.float32, "cpu")
    attend = getattr(contenders, name)
    if name in ("flash_attn", "flashinfer"):
        with pytest.raises(NotImplementedError, match="without a window"):
            attend(query, key, value, WINDOWED)
        return
    expected = by_reference(query, key, value, causal=True, window=(2, None))
    torch.testing.assert_close(attend(query, key, value, WINDOWED), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", MODEL_SHAPES, ids=str)
@pytest.mark.parametrize("name", cpu_peers.PEERS)
def test_peers_on_the_cpu_compute_the_same_attention_or_refuse(name, shape, dtype):
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    inputs = shape.inputs(dtype, "cpu")
    try:
        out = contenders.results(cpu_peers.PEERS[name], inputs, shape)
    except NotImplementedError:
        assert shape.group > 1 or shape.queries != shape.keys or "backward" in shape.kind
        return
    expected = contenders.results(contenders.ours, inputs, shape)
    torch.testing.assert_close(out, expected, atol=1e-4 if dtype == torch.float32 else 2e-2, rtol=1e-2)


def test_a_peer_that_fails_is_reported():
    def fail(*_):
        assert False, "k_cache must have contiguous last dimension"  # noqa: B011

    timed = contenders.Timed(lambda: fail())
    reason = contenders.obstacle("a peer", contenders.Peer(fail), timed, SHAPES[0], "cpu")
    assert reason == "k_cache must have contiguous last dimension"
