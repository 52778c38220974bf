"""flashsoftmax as the kernels of torch's scaled_dot_product_attention and varlen_attn."""

import logging
import math
import threading
from itertools import permutations

import pytest
import torch
from torch import nn
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl, list_flash_attention_impls
from torch.nn.attention.bias import causal_upper_left
from torch.nn.attention.varlen import AuxRequest, varlen_attn, varlen_attn_out
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.testing import assert_close

import flashsoftmax.integrations.torch as integration
import reference
from checks import assert_accurate, assert_same_bits
from flashsoftmax import attention, attention_varlen
from operators import integers

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
MASKS = {
    "none": lambda dtype: None,
    "bool": lambda dtype: torch.rand(2, 4, 37, 53) < 0.7,
    "bool-2d": lambda dtype: torch.rand(37, 53) < 0.7,
    "bool-keys": lambda dtype: torch.rand(2, 1, 1, 53) < 0.7,
    "float": lambda dtype: torch.randn(2, 4, 37, 53, dtype=dtype),
    "float-heads": lambda dtype: torch.randn(1, 4, 37, 53, dtype=dtype),
    "float-rows": lambda dtype: torch.randn(2, 1, 37, 1, dtype=dtype),
    "float-transposed": lambda dtype: torch.randn(53, 37, dtype=dtype).T,
    "float-expanded": lambda dtype: torch.randn(2, 1, 1, 53, dtype=dtype).expand(2, 4, 37, 53),
}


@pytest.fixture
def enabled():
    with integration.enabled():
        yield


def operands(rows=37, keys=53, heads=4, heads_kv=4, dim=24, dtype=torch.float32, batch=2):
    shapes = (batch, heads, rows, dim), (batch, heads_kv, keys, dim), (batch, heads_kv, keys, dim)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def events(function):
    """The operators that run during a call, those inside of other operators too."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    return {event.name for event in profile.events()}


def with_gradients(function, *inputs):
    out = function(*inputs)
    return out, *torch.autograd.grad(out, inputs, torch.ones_like(out).cumsum(-1) / out.size(-1))


def stored(order, *shape):
    """A tensor of this shape whose axes lie in memory in this order."""
    x = torch.randn([shape[axis] for axis in order])
    return x.permute([order.index(axis) for axis in range(len(shape))])


class TestRegistry:
    def test_torch_lists_it_and_activates_it(self):
        assert "flashsoftmax" in list_flash_attention_impls()
        q, k, v = operands()
        assert "flashsoftmax::attention_out" not in events(lambda: sdpa(q, k, v))
        activate_flash_attention_impl("flashsoftmax")
        try:
            assert "flashsoftmax::attention_out" in events(lambda: sdpa(q, k, v))
            integration.enable()
            assert current_flash_attention_impl() == "flashsoftmax"
        finally:
            integration.disable()
        assert current_flash_attention_impl() is None

    def test_disabled_it_leaves_torchs_bits(self):
        q, k, v = operands()
        before = with_gradients(sdpa, q, k, v)
        with integration.enabled():
            inside = with_gradients(sdpa, q, k, v)
            assert not torch.equal(inside[0], before[0])  # bits that differ show who computed them
        assert_same_bits(with_gradients(sdpa, q, k, v), before)

    def test_contexts_nest_and_survive_errors(self):
        with integration.enabled():
            with pytest.raises(ZeroDivisionError), integration.enabled():
                raise ZeroDivisionError
            assert current_flash_attention_impl() == "flashsoftmax"
        assert current_flash_attention_impl() is None
        integration.disable()
        integration.disable()

    def test_another_implementation_comes_back(self, monkeypatch):
        class Other:
            def remove(self):
                pass

        implementations = {**torch.nn.attention._registry._FLASH_ATTENTION_IMPLS, "other": Other}
        monkeypatch.setattr(torch.nn.attention._registry, "_FLASH_ATTENTION_IMPLS", implementations)
        activate_flash_attention_impl("other")
        with integration.enabled():
            assert current_flash_attention_impl() == "flashsoftmax"
        assert current_flash_attention_impl() == "other"
        torch.nn.attention.restore_flash_attention_impl()

    def test_what_it_does_not_take_goes_to_torch_counted_and_logged_once(self, caplog, enabled):
        q, k, v = operands(dim=300)
        reason = "_scaled_dot_product_flash_attention_for_cpu: head_dim is over 256"
        before = integration.fallbacks().get(reason, 0)
        integration._fallbacks.pop(reason, None)
        with caplog.at_level(logging.WARNING):
            inside = with_gradients(sdpa, q, k, v)
            assert_same_bits(sdpa(q, k, v), inside[0])
        assert integration.fallbacks()[reason] == 2
        integration._fallbacks[reason] += before
        assert sum(reason in record.getMessage() for record in caplog.records) == 1
        integration.disable()
        assert_same_bits(inside, with_gradients(sdpa, q, k, v))
        integration.enable()

    def test_dropout_takes_torchs_math(self, enabled):
        q, k, v = operands()
        assert "flashsoftmax::attention_out" not in events(lambda: sdpa(q, k, v, dropout_p=0.5))

    def test_two_threads(self, enabled):
        inputs = [operands(rows) for rows in (37, 60)]
        expected = [with_gradients(sdpa, *x) for x in inputs]
        found = [[], []]

        def work(n):
            for _ in range(20):
                found[n].append(with_gradients(sdpa, *inputs[n]))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for n in range(2):
            assert len(found[n]) == 20
            for results in found[n]:
                assert_same_bits(results, expected[n])


class TestValues:
    @pytest.mark.parametrize("mask", MASKS)
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_masks(self, enabled, dtype, mask):
        inputs = operands(dtype=dtype)
        attn_mask = MASKS[mask](dtype)

        def all_of(function, dtype):
            q, k, v = (x.detach().to(dtype).requires_grad_() for x in inputs)
            is_float = attn_mask is not None and attn_mask.is_floating_point()
            m = attn_mask.to(dtype) if is_float else attn_mask
            return with_gradients(lambda q, k, v: function(q, k, v, m), q, k, v)

        def dense(*inputs):
            return reference.attention(*inputs)[0]

        assert "flashsoftmax::attention_out" in events(lambda: sdpa(*inputs, attn_mask))
        exact, naive = all_of(dense, torch.float64), all_of(dense, dtype)
        found = all_of(sdpa, dtype)
        for name, x, right, rough in zip(("out", "query", "key", "value"), found, exact, naive, strict=True):
            if dtype == torch.float64:
                assert_close(x, right, atol=1e-13, rtol=1e-13)
            else:
                assert_accurate(name, x, right, rough)

    @pytest.mark.parametrize(("rows", "keys"), [(37, 37), (37, 53), (53, 37), (1, 9), (17, 1), (1, 1), (130, 300)])
    @pytest.mark.parametrize(("heads", "heads_kv"), [(4, 4), (6, 2), (3, 1)])
    def test_causal_is_aligned_at_the_first_key(self, enabled, rows, keys, heads, heads_kv):
        inputs = operands(rows, keys, heads, heads_kv)
        found = with_gradients(lambda q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True, scale=0.3), *inputs)
        expected = with_gradients(lambda q, k, v: attention(q, k, v, causal=True, q_offset=0, scale=0.3), *inputs)
        assert_same_bits(found[0], expected[0])
        assert_close(found[1:], expected[1:], atol=2e-5, rtol=2e-5)

    @pytest.mark.parametrize("dim", [1, 3, 8, 100, 256])
    def test_head_dims(self, enabled, dim):
        inputs = operands(dim=dim)
        assert_same_bits(sdpa(*inputs), attention(*inputs))

    @pytest.mark.parametrize("mask", ["bool", "float"])
    def test_a_row_without_keys_is_0_as_in_torch(self, mask):
        q, k, v = operands(9, 9)
        visible = torch.rand(9, 9) < 0.8
        visible[4] = False
        attn_mask = visible if mask == "bool" else torch.zeros(9, 9).masked_fill(~visible, -math.inf)
        torchs = with_gradients(lambda q, k, v: sdpa(q, k, v, attn_mask), q, k, v)
        with integration.enabled():
            ours = with_gradients(lambda q, k, v: sdpa(q, k, v, attn_mask), q, k, v)
        assert_close(ours, torchs)
        assert (ours[0][:, :, 4] == 0).all() and (ours[1][:, :, 4] == 0).all()

    @pytest.mark.parametrize("mask", ["none", "without-keys"])
    @pytest.mark.parametrize("enabled_in", ["forward", "backward"])
    def test_forward_and_backward_may_be_of_different_kernels(self, enabled_in, mask):
        q, k, v = operands(9, 9)
        attn_mask = None if mask == "none" else (torch.rand(9, 9) < 0.8).tril(-1)
        expected = with_gradients(lambda q, k, v: sdpa(q, k, v, attn_mask), q, k, v)[1:]
        if enabled_in == "forward":
            with integration.enabled():
                out = sdpa(q, k, v, attn_mask)
        else:
            out = sdpa(q, k, v, attn_mask)
            integration.enable()
        grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out).cumsum(-1) / out.size(-1))
        integration.disable()
        assert_close(grads, expected)

    @pytest.mark.parametrize("shape", [(0, 4, 5, 8), (2, 0, 5, 8), (2, 4, 0, 8), (2, 4, 5, 0)])
    def test_empty(self, shape):
        x = torch.randn(shape, requires_grad=True)
        torchs = with_gradients(lambda x: sdpa(x, x, x), x)
        with integration.enabled():
            ours = with_gradients(lambda x: sdpa(x, x, x), x)
        assert_same_bits(ours, torchs)

    def test_no_keys(self):
        q, k, v = operands(5, 0)
        torchs = sdpa(q, k, v)
        with integration.enabled():
            assert_same_bits(sdpa(q, k, v), torchs)

    def test_errors_stay_torchs(self, enabled):
        q, k, v = operands(5, 5)
        with pytest.raises(RuntimeError, match="same dtype"):
            sdpa(q, k.double(), v)
        with pytest.raises(RuntimeError, match="is_causal"):
            sdpa(q, k, v, torch.ones(5, 5, dtype=torch.bool), is_causal=True)
        with pytest.raises(RuntimeError, match="Accept only 4 dims"):
            FORWARD(q[0], k[0], v[0])


class TestLayouts:
    """The strides are those of torch's kernels, which compiled graphs rely on; nothing is copied."""

    @pytest.mark.parametrize("heads_kv", [4, 2])
    @pytest.mark.parametrize("order", [(*first, 3) for first in permutations(range(3))], ids=str)
    def test_every_order_of_the_axes(self, order, heads_kv):
        query, key, value = (stored(order, 2, heads, rows, 8) for heads, rows in ((4, 5), (heads_kv, 9), (heads_kv, 9)))
        self.check(query, key, value)

    @pytest.mark.parametrize("axis", [0, 1, 2])
    def test_expanded(self, axis):
        shapes = [2, 4, 5, 8], [2, 4, 9, 8], [2, 4, 9, 8]
        self.check(*(torch.randn([*s[:axis], 1, *s[axis + 1 :]]).expand(s) for s in shapes))

    def test_a_part_of_a_larger_tensor(self):
        self.check(*(torch.randn(2, 9, 3, 4, 20)[:, :, n, :, 3:11].transpose(1, 2) for n in range(3)))

    def test_one_batch_one_head(self):
        self.check(*(torch.randn(1, 9, 1, 8).transpose(1, 2) for _ in range(3)))

    def check(self, query, key, value):
        def run():
            out, lse = FORWARD(query, key, value, 0.0, True)
            return out, lse, *BACKWARD(torch.ones_like(out), query, key, value, out, lse, 0.0, True)

        torchs = run()
        with integration.enabled():
            ours, used = run(), events(run)
        assert {"flashsoftmax::attention_out", "flashsoftmax::attention_backward_out"} <= used
        assert not used & {"aten::copy_", "aten::clone", "aten::contiguous", "aten::_to_copy"}
        assert_close(ours, torchs)
        assert [x.stride() for x in ours] == [x.stride() for x in torchs]

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
    def test_the_dtype_of_lse(self, enabled, dtype):
        q, k, v = (x.detach() for x in operands(dtype=dtype))
        real = FORWARD(q, k, v)
        meta = FORWARD(*(x.to("meta") for x in (q, k, v)))
        assert [(x.dtype, x.shape, x.stride()) for x in real] == [(x.dtype, x.shape, x.stride()) for x in meta]
        assert_close(real[1], attention(q, k, v, return_lse=True)[1])


class TestPyTorch:
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_compile(self, enabled, is_causal):
        """Without arithmetic around the call, so that torch has no code to compile."""

        def function(q, k, v):
            return sdpa(q.transpose(1, 2), k, v, None if is_causal else mask, is_causal=is_causal).transpose(1, 2)

        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, dynamic=True)
        for rows in (37, 41):
            q, k, v = operands(rows, rows, dim=16)
            inputs = q.detach().transpose(1, 2).contiguous().requires_grad_(), k, v
            mask = torch.randn(rows, rows)
            expected = with_gradients(function, *inputs)
            assert_same_bits(with_gradients(compiled, *inputs), expected)
            used = events(lambda inputs=inputs: with_gradients(compiled, *inputs))
            assert {"flashsoftmax::attention_out", "flashsoftmax::attention_backward_out"} <= used

    def test_autocast(self, enabled):
        q, k, v = operands()
        with torch.autocast("cpu", torch.bfloat16):
            out, *grads = with_gradients(sdpa, q, k, v)
        assert out.dtype == torch.bfloat16 and all(x.dtype == torch.float32 for x in grads)
        assert_same_bits(out, attention(*(x.bfloat16() for x in (q, k, v))))

    def test_inference_mode(self, enabled):
        q, k, v = (x.detach() for x in operands())
        with torch.inference_mode():
            assert_same_bits(sdpa(q, k, v), attention(q, k, v))

    def test_functorch(self, enabled):
        q, k, v = (x.detach() for x in operands())
        expected = with_gradients(lambda q: sdpa(q, k, v), q.clone().requires_grad_())[1]
        weights = torch.ones(24).cumsum(-1) / 24
        assert_close(torch.func.grad(lambda q: (sdpa(q, k, v) * weights).sum())(q), expected)
        stacked = torch.stack([q, 2 * q])
        assert_close(torch.vmap(lambda q: sdpa(q, k, v))(stacked), torch.stack([sdpa(x, k, v) for x in stacked]))

    def test_causal_bias(self, enabled):
        q, k, v = operands(9, 9)
        assert_same_bits(sdpa(q, k, v, causal_upper_left(9, 9)), attention(q, k, v, causal=True))

    @pytest.mark.parametrize("training", [True, False])
    @pytest.mark.parametrize("batch_first", [True, False])
    def test_multihead_attention(self, training, batch_first):
        module = nn.MultiheadAttention(32, 4, batch_first=batch_first).train(training)
        x = torch.randn(7, 7, 32, requires_grad=True)
        padding = torch.zeros(7, 7, dtype=torch.bool)
        padding[:, -2:] = True
        self.check(lambda x: module(x, x, x, key_padding_mask=padding, need_weights=False)[0], x, module, training)

    @pytest.mark.parametrize("training", [True, False])
    def test_transformer_encoder(self, training):
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
        x = torch.randn(3, 11, 32, requires_grad=True)
        mask = nn.Transformer.generate_square_subsequent_mask(11)
        self.check(lambda x: module(x, mask=mask, is_causal=True), x, module, training)

    def check(self, function, x, module, training):
        inputs = (x, *module.parameters())

        def run():
            out = function(x)
            return out, *torch.autograd.grad(out.square().sum(), inputs)

        torchs = run()
        with integration.enabled():
            if training:
                assert "flashsoftmax::attention_backward_out" in events(run)
            assert_close(run(), torchs, atol=1e-4, rtol=1e-4)
            with torch.inference_mode():
                assert_close(function(x), torchs[0], atol=1e-5, rtol=1e-5)


CU_Q, CU_K = integers(0, 5, 5, 22, 40), integers(0, 9, 12, 32, 53)
LENGTHS = {"max_seqlen_q": 18, "max_seqlen_k": 21}


class TestVarlen:
    def operands(self, heads_kv=4, dtype=torch.float32):
        shapes = (40, 4, 24), (53, heads_kv, 24), (53, heads_kv, 24)
        return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]

    def ours(self, q, k, v, **options):
        return attention_varlen(q, k, v, CU_Q, CU_K, **LENGTHS, **options)

    def torchs(self, q, k, v, **options):
        return varlen_attn(q, k, v, CU_Q, CU_K, *LENGTHS.values(), **options)

    @pytest.mark.parametrize(
        ("window_size", "options"),
        [
            ((-1, -1), {}),
            ((-1, 0), {"causal": True}),
            ((4, 0), {"window": (4, 0)}),
            ((3, 2), {"window": (3, 2)}),
        ],
    )
    @pytest.mark.parametrize("heads_kv", [4, 2])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_it_is_attention_varlen(self, enabled, window_size, options, heads_kv, dtype):
        inputs = self.operands(heads_kv, dtype)
        more = {"window_size": window_size, "enable_gqa": heads_kv != 4, "scale": 0.3}
        found = with_gradients(lambda q, k, v: self.torchs(q, k, v, **more), *inputs)
        expected = with_gradients(lambda q, k, v: self.ours(q, k, v, scale=0.3, **options), *inputs)
        assert_same_bits(found[0], expected[0])
        assert_close(found[1:], expected[1:], atol=2e-5 if dtype == torch.float32 else 2e-2, rtol=2e-2)
        out, lse = self.torchs(*inputs, **more, return_aux=AuxRequest(lse=True))
        assert_same_bits((out, lse), self.ours(*inputs, scale=0.3, return_lse=True, **options))

    def test_the_strides_are_those_of_the_inputs(self, enabled):
        q, k, v = (stored((1, 0, 2), *x.shape).requires_grad_() for x in self.operands())
        out, *grads = with_gradients(self.torchs, q, k, v)
        assert [x.stride() for x in (out, *grads)] == [x.stride() for x in (q, q, k, v)]
        assert_same_bits(out, self.ours(q, k, v))

    def test_into_a_given_tensor(self, enabled):
        q, k, v = (x.detach() for x in self.operands())
        memory = torch.full((40, 6, 30), 7.0)
        out = memory[:, 1:5, 3:27]
        arguments = CU_Q, CU_K, *LENGTHS.values()
        result, lse = varlen_attn_out(out, q, k, v, *arguments, return_aux=AuxRequest(lse=True))
        assert result.data_ptr() == out.data_ptr()
        assert_same_bits((out, lse), self.ours(q, k, v, return_lse=True))
        out.fill_(7.0)
        assert (memory == 7).all()

    @pytest.mark.parametrize("given", [True, False], ids=["out", "new"])
    def test_pages(self, enabled, given):
        kv_lens, table = integers(9, 3, 20, 21), torch.randperm(16, dtype=torch.int32).view(4, 4)
        q, k, v = torch.randn(40, 4, 24), torch.randn(16, 6, 2, 24), torch.randn(16, 6, 2, 24)
        options = {"enable_gqa": True, "window_size": (-1, 0), "seqused_k": kv_lens, "block_table": table}
        arguments = q, k, v, CU_Q, None, *LENGTHS.values()
        out = torch.empty_like(q)
        found = varlen_attn_out(out, *arguments, **options) if given else varlen_attn(*arguments, **options)
        expected = attention_varlen(q, k, v, CU_Q, max_seqlen_q=18, kv_lens=kv_lens, block_table=table, causal=True)
        assert_same_bits(found, expected)

    def test_lengths_of_the_keys(self, enabled):
        q, k, v = (x.detach() for x in self.operands())
        kv_lens = integers(4, 3, 20, 7)
        assert_same_bits(self.torchs(q, k, v, seqused_k=kv_lens), self.ours(q, k, v, kv_lens=kv_lens))

    def test_compile(self, enabled):
        torch._dynamo.reset()
        inputs = self.operands()
        compiled = torch.compile(self.torchs, fullgraph=True)
        assert_close(with_gradients(compiled, *inputs), with_gradients(self.torchs, *inputs))

    def test_dense(self, enabled):
        """Without cum_seq the operator takes [B, S, H, D]; nested tensors call it so."""
        q, k, v = (x.detach().transpose(1, 2) for x in operands())
        arguments = q, k, v, None, None, 37, 53, 0.0, True
        out, lse, *state = torch.ops.aten._flash_attention_forward(*arguments, False)
        expected = attention(*(x.transpose(1, 2) for x in (q, k, v)), causal=True, return_lse=True)
        assert_same_bits((out.transpose(1, 2), lse), expected)
        backward = torch.ops.aten._flash_attention_backward
        grads = backward(torch.ones_like(out), q, k, v, out, lse, *arguments[3:], *state[:2])
        inputs = [x.transpose(1, 2).requires_grad_() for x in (q, k, v)]
        right = torch.autograd.grad(attention(*inputs, causal=True).sum(), inputs)
        assert_close([x.transpose(1, 2) for x in grads], list(right), atol=2e-5, rtol=2e-5)

    def test_float64_is_refused(self, enabled):
        with pytest.raises(NotImplementedError, match="the dtype is float64, and torch has no kernel"):
            self.torchs(*self.operands(dtype=torch.float64))

    def test_disabled_there_is_no_cpu_kernel(self):
        with pytest.raises(NotImplementedError):
            self.torchs(*self.operands())


class TestCuda:
    """What CUDA tensors get, called directly: on the interpreter, and on a CPU."""

    @pytest.mark.parametrize("is_causal", [False, True])
    def test_scaled_dot_product_attention(self, device, is_causal):
        q, k, v = (x.detach().to(device, torch.bfloat16) for x in operands(9, 20, 4, 2, dim=32))
        q = stored((2, 0, 1, 3), 2, 4, 9, 32).to(device, torch.bfloat16)
        out, lse, _, _, max_q, max_k, seed, offset, debug_mask = integration._sdpa_cuda(q, k, v, 0.0, is_causal)
        grad = torch.ones_like(out)
        grads = integration._sdpa_cuda_backward(
            grad, q, k, v, out, lse, None, None, max_q, max_k, 0.0, is_causal, seed, offset
        )
        arguments = q.to("meta"), k.to("meta"), v.to("meta")
        meta = torch.ops.aten._scaled_dot_product_flash_attention(*arguments, 0.0, is_causal)
        for x, like in zip((out, lse, seed, offset, debug_mask), (*meta[:2], *meta[6:]), strict=True):
            assert (x.shape, x.dtype, x.stride()) == (like.shape, like.dtype, like.stride())
        assert [x.stride() for x in grads] == [x.stride() for x in (q, k, v)]
        inputs = [x.cpu().float().requires_grad_() for x in (q, k, v)]
        right = reference.attention(*inputs, causal=is_causal)[0]
        assert_close(out.cpu().float(), right, atol=2e-2, rtol=2e-2)
        right = torch.autograd.grad(right.sum(), inputs)
        assert_close([x.cpu().float() for x in grads], list(right), atol=4e-2, rtol=4e-2)

    def test_varlen(self, device):
        q, k, v = (torch.randn(rows, heads, 32, device=device).bfloat16() for rows, heads in ((9, 4), (20, 2), (20, 2)))
        cu = [integers(0, 4, 9).to(device), integers(0, 7, 20).to(device)]
        arguments = *cu, 5, 13, 0.0, True
        out, lse, seed, offset, _ = integration._flash(q, k, v, *arguments, False)
        grads = integration._flash_backward(torch.ones_like(out), q, k, v, out, lse, *arguments, seed, offset)
        inputs = [x.cpu().float().requires_grad_() for x in (q, k, v)]
        lengths = {"max_seqlen_q": 5, "max_seqlen_k": 13}
        right, right_lse = attention_varlen(*inputs, *(x.cpu() for x in cu), **lengths, causal=True, return_lse=True)
        assert_close(out.cpu().float(), right, atol=2e-2, rtol=2e-2)
        assert_close(lse.cpu(), right_lse, atol=2e-3, rtol=2e-3)
        right = torch.autograd.grad(right.sum(), inputs)
        assert_close([x.cpu().float() for x in grads], list(right), atol=4e-2, rtol=4e-2)

    def test_every_kernel_is_registered(self):
        def source(device, operator):
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", device):
                return None
            return str(torch.library.get_kernel(f"aten::{operator}", device))

        names = [(device, name) for device, functions in integration._IMPLEMENTATIONS.items() for name in functions]
        before = [source(*name) for name in names]
        with integration.enabled():
            assert all("flashsoftmax" in source(*name) for name in names)
        assert [source(*name) for name in names] == before
