"""What callers pass in place of plain tensors and numbers: CausalBias, nested tensors, subclasses, numpy, tracers."""

import warnings

import numpy as np
import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close

from checks import assert_same_bits
from flashsoftmax import attention, attention_varlen, merge


@pytest.fixture
def qkv():
    return torch.randn(2, 4, 20, 8), torch.randn(2, 2, 33, 8), torch.randn(2, 2, 33, 6)


class TestCausalBias:
    """Its memory holds nothing: what it means is in its variant and lengths."""

    @pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
    @pytest.mark.parametrize(("rows", "keys"), [(20, 20), (20, 33), (33, 20), (1, 9), (9, 1)])
    def test_is_the_mask_that_it_stands_for(self, bias, rows, keys):
        q, k = torch.randn(2, 4, rows, 8), torch.randn(2, 2, keys, 8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of rows that see no key, which are NaN elsewhere
            bias = bias(rows, keys)
        dense = torch.ones(rows, keys, dtype=torch.bool).tril(0 if bias.variant.name == "UPPER_LEFT" else keys - rows)
        lens = torch.tensor([keys, keys // 2])
        for options in (
            {},
            {"window": (3, 1)},
            {"causal": True},
            {"q_offset": 2, "window": (4, None)},
            {"kv_lens": lens},
        ):
            found = attention(q, k, k, bias, return_lse=True, **options)
            assert_close(found, attention(q, k, k, dense, return_lse=True, **options))
            assert type(found[0]) is torch.Tensor
        slopes = torch.rand(4)
        assert_close(attention(q, k, k, bias, alibi_slopes=slopes), attention(q, k, k, dense, alibi_slopes=slopes))

    def test_builds_no_mask(self, qkv):
        class NoMask(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, op, types, args=(), kwargs=None):
                if op.namespace == "flashsoftmax":
                    assert not any(isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in args)
                return op(*args, **(kwargs or {}))

        bias = causal_lower_right(20, 33)
        with NoMask():
            attention(*qkv, bias)

    def test_of_other_lengths(self, qkv):
        with pytest.raises(ValueError, match=r"attn_mask.*\[33, 33\].*\[20, 33\]"):
            attention(*qkv, causal_upper_left(33, 33))


class TestSubclasses:
    class Named(torch.Tensor):
        pass

    class Symbolic(torch.Tensor):
        """Stands for something that its memory does not hold, as CausalBias does."""

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return super().__torch_function__(func, types, args, kwargs)

    def test_a_plain_subclass_is_read(self, qkv):
        q, k, v = qkv
        found = attention(q.as_subclass(self.Named), k, v)
        assert type(found) is self.Named
        assert_same_bits(found.as_subclass(torch.Tensor), attention(q, k, v))

    def test_a_mask_of_another_kind_raises(self, qkv):
        with pytest.raises(TypeError, match="attn_mask: Symbolic"):
            attention(*qkv, torch.zeros(20, 33).as_subclass(self.Symbolic))

    def test_parameters(self, qkv):
        q, k, v = map(torch.nn.Parameter, qkv)
        assert type(attention(q, k, v, torch.nn.Parameter(torch.zeros(20, 33)))) is torch.Tensor


class TestNumbers:
    @pytest.mark.parametrize("number", [np.float64, np.float32, np.array, torch.tensor], ids=lambda f: f.__name__)
    def test_floats(self, number, qkv):
        found = attention(*qkv, scale=number(0.25), softcap=number(2.0))
        assert_same_bits(found, attention(*qkv, scale=0.25, softcap=2.0))

    @pytest.mark.parametrize("number", [np.int64, np.int32, np.uint8, torch.tensor], ids=lambda f: f.__name__)
    def test_integers(self, number, qkv):
        options = {"q_offset": 3, "split_size": 5}
        expected = attention(*qkv, window=(4, 1), **options)
        found = attention(*qkv, window=(number(4), number(1)), **{name: number(x) for name, x in options.items()})
        assert_same_bits(found, expected)
        x, cu = torch.randn(9, 2, 8), torch.tensor([0, 4, 9])
        lengths = {"max_seqlen_q": number(5), "max_seqlen_k": number(5)}
        assert_same_bits(
            attention_varlen(x, x, x, cu, cu, **lengths),
            attention_varlen(x, x, x, cu, cu, max_seqlen_q=5, max_seqlen_k=5),
        )


class TestSlopesAndSinks:
    def test_slopes_that_are_a_parameter(self, qkv):
        slopes = torch.nn.Parameter(torch.rand(4))
        expected = attention(*qkv, alibi_slopes=slopes.detach())
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert_same_bits(attention(*qkv, alibi_slopes=slopes), expected)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_in_16_bits_beside_float32(self, dtype, qkv):
        """As autocast leaves them where norms return float32."""
        narrow = {"sinks": torch.randn(4).to(dtype).requires_grad_(), "alibi_slopes": torch.rand(4).to(dtype)}
        wide = {name: x.detach().float().requires_grad_(name == "sinks") for name, x in narrow.items()}
        found, expected = attention(*qkv, **narrow), attention(*qkv, **wide)
        assert_same_bits(found, expected)
        with torch.autocast("cpu", dtype):
            assert attention(*qkv, **narrow).dtype == dtype
        found.sum().backward()
        expected.sum().backward()
        assert_same_bits(narrow["sinks"].grad, wide["sinks"].grad.to(dtype))


class TestNested:
    LENGTHS = ((3, 5), (1, 9), (7, 2))

    @staticmethod
    def jagged(parts):
        return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True).transpose(1, 2)

    def test_each_sequence_by_itself(self):
        q_parts = [torch.randn(n, 4, 8) for n, _ in self.LENGTHS]
        k_parts = [torch.randn(n, 2, 8) for _, n in self.LENGTHS]
        q, k = self.jagged(q_parts), self.jagged(k_parts)
        out, lse = attention(q, k, k, causal=True, sinks=torch.ones(4), return_lse=True)
        assert out.is_nested and out.layout == torch.jagged and (out + q).shape == q.shape
        for n, (a, b) in enumerate(zip(q_parts, k_parts, strict=True)):
            a, b = (x.transpose(0, 1)[None] for x in (a, b))
            expected = attention(a, b, b, causal=True, sinks=torch.ones(4), return_lse=True)
            assert_close((out.unbind()[n], lse.unbind()[n]), tuple(x[0] for x in expected))

    def test_gradients(self):
        parts = [torch.randn(n, 4, 8) for n, _ in self.LENGTHS]
        leaf = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
        x = leaf.transpose(1, 2)
        attention(x, x, x).values().square().sum().backward()
        for part, grad in zip(parts, leaf.grad.unbind(), strict=True):
            part = part.requires_grad_()
            y = part.transpose(0, 1)[None]
            attention(y, y, y).square().sum().backward()
            assert_close(grad, part.grad)

    def test_what_is_refused(self):
        parts = [torch.randn(n, 2, 8) for n in (3, 5)]
        jagged, dense = self.jagged(parts), torch.randn(2, 2, 5, 8)
        strided = torch.nested.nested_tensor([x.transpose(0, 1) for x in parts])
        rows_second = torch.nested.nested_tensor(parts, layout=torch.jagged)
        for name, arguments in {
            "query: a nested tensor of layout torch.strided": (strided, strided, strided),
            "key: not a nested tensor": (jagged, dense, dense),
            "query: not a nested tensor": (dense, jagged, jagged),
            "query: nested tensor of shape": (rows_second, jagged, jagged),
            "value: other offsets": (jagged, jagged, self.jagged([torch.randn(4, 2, 8) for _ in "ab"])),
            "attn_mask": (jagged, jagged, jagged, torch.ones(5, 5)),
        }.items():
            with pytest.raises(ValueError, match=name):
                attention(*arguments)


def test_symbolic_tracing_sees_one_call(qkv):
    class Block(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v, causal=True, window=(3, None))

    traced = torch.fx.symbolic_trace(Block())
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"] == [attention]
    assert_same_bits(traced(*qkv), Block()(*qkv))


def test_function_modes_see_the_calls(qkv):
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Mode():
        out, lse = attention(*qkv, return_lse=True)
        merge([out], [lse])
    assert [x for x in seen if x in (attention, merge)] == [attention, merge]
