"""Operators that PyTorch knows: autograd, torch.compile, vmap, autocast, fake tensors, pickling."""

import copy
import functools
import pickle

import pytest
import torch
from torch.autograd import gradcheck
from torch.library import opcheck
from torch.testing import assert_close
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import operators
from cases import Case, case
from checks import assert_same_bits, differentiable, gradients, random_gradients
from flashsoftmax import attention, attention_paged, attention_varlen, merge
from operators import integers

WRT = ["query", "key", "value"]


SAMPLES = {
    "plain": lambda: operators.attention(),
    "heads-in-rows": lambda: operators.attention(layout="heads-in-rows"),
    "dim-not-last": lambda: operators.attention(layout="dim-not-last"),
    "band": lambda: operators.attention(window_left=3, window_right=0, q_offset=2, split_size=4, softcap=2.0),
    "bool-mask": lambda: operators.attention(attn_mask=torch.rand(2, 4, 5, 9) < 0.7),
    "bias-and-mask": lambda: operators.attention(
        attn_mask=torch.rand(2, 1, 1, 9) < 0.7, attn_bias=torch.randn(1, 4, 5, 9)
    ),
    "bias": lambda: operators.attention(attn_bias=torch.randn(2, 4, 5, 9), sinks=torch.randn(4)),
    "lengths": lambda: operators.attention(kv_lens=integers(9, 4), alibi_slopes=torch.rand(2, 4)),
    "varlen": lambda: operators.attention("varlen"),
    "paged": lambda: operators.attention("paged"),
}


def leaves(arguments):
    """The arguments, those that have a gradient asking for one."""
    wrt = () if arguments["block_table"] is not None else differentiable(arguments)
    return tuple(x.requires_grad_() if name in wrt else x for name, x in arguments.items())


class TestOpcheck:
    @pytest.mark.parametrize("sample", SAMPLES)
    def test_attention(self, sample):
        opcheck(torch.ops.flashsoftmax.attention.default, leaves(SAMPLES[sample]()))

    @pytest.mark.parametrize("sample", [name for name in SAMPLES if name != "paged"])
    @pytest.mark.parametrize("of", ["out", "lse", "both"])
    def test_attention_backward(self, sample, of):
        forward = SAMPLES[sample]()
        out, lse, lse_error = torch.ops.flashsoftmax.attention(*forward.values())
        grads = torch.randn_like(out) if of != "lse" else None, torch.randn_like(lse) if of != "out" else None
        arguments = operators.attention_backward(forward, *grads, out, lse, lse_error)
        opcheck(torch.ops.flashsoftmax.attention_backward.default, tuple(arguments.values()))

    def test_merge(self):
        states = ([torch.randn(2, 3, 4, 5, requires_grad=True) for _ in range(3)],)
        states += ([torch.randn(2, 3, 4, requires_grad=True) for _ in range(3)],)
        opcheck(torch.ops.flashsoftmax.merge.default, states)
        outs, lses = ([x.detach() for x in side] for side in states)
        out, lse = merge(outs, lses)
        opcheck(torch.ops.flashsoftmax.merge_backward.default, (out, lse, outs, lses))
        opcheck(torch.ops.flashsoftmax.merge_backward.default, (out, None, outs, lses))

    def test_every_operator_is_here(self):
        names = [name.split("::") for name in torch._C._dispatch_get_all_op_names()]
        found = {name for namespace, name in names if namespace == "flashsoftmax"}
        assert found == {"attention", "attention_backward", "merge", "merge_backward", "append_kv", "rotary", "cpu_isa"}


class TestGradcheck:
    """In float64, over every feature, lse included."""

    @pytest.mark.parametrize("rows", [2, 17], ids=["decode", "tiled"])
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"causal": True, "heads": (4, 2)},
            {"window": (2, 1), "q_offset": 1},
            {"scale": 0.7, "softcap": 1.2},
            {"alibi": True},
            {"sinks": True},
            {"mask": "bool", "softcap": 1.2},
            {"mask": "float-2d", "sinks": True},
            {"mask": "float-keys"},
            {"batch": 2, "kv_lens": (5, 2), "causal": True, "q_offset": 3},
            {"softcap": 1.2, "alibi": True, "sinks": True, "mask": "float-3d", "window": (4, 0)},
        ],
        ids=lambda options: "-".join(options) or "plain",
    )
    def test_attention(self, options, rows):
        sizes = {"rows": rows, "keys": 5, "dim": 3, "value_dim": 2}
        inputs = Case("", **sizes | options).inputs(torch.float64)
        names = differentiable(inputs)
        inputs |= {name: inputs[name].nan_to_num() for name in names}

        def function(*tensors):
            out, lse = attention(**inputs | dict(zip(names, tensors, strict=True)), return_lse=True)
            return out, lse.masked_fill(lse.isinf(), 0)

        assert gradcheck(function, [inputs[name].requires_grad_() for name in names])

    def test_varlen(self):
        q, k, v = (torch.randn(7, heads, 3, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
        cu_q, cu_k = integers(0, 4, 4, 7), integers(0, 2, 5, 7)

        def function(q, k, v):
            return attention_varlen(q, k, v, cu_q, cu_k, max_seqlen_q=4, max_seqlen_k=3, window=(3, 3), return_lse=True)

        assert gradcheck(function, (q, k, v))


@pytest.mark.parametrize("name", ["heads-6-2", "mask-bool", "decode-lengths", "all-features"])
def test_one_gradient_is_that_of_detached_inputs(name):
    """Asking for gradients changes no bit of the result."""
    inputs, call = case(name).inputs(torch.float32), case(name).call(attention)
    expected = call(**inputs)
    found = call(**inputs | {name: inputs[name].detach().requires_grad_() for name in WRT})
    assert_same_bits([x.detach() for x in found], expected)


class TestFake:
    """Shapes, dtypes and strides are known without computing."""

    @staticmethod
    def described(*tensors):
        return [(x.shape, x.dtype, x.stride(), x.device) for x in tensors]

    def run(self, function, *tensors):
        from torch._subclasses.fake_tensor import FakeTensorMode

        real = self.described(*function(*tensors))
        with FakeTensorMode() as mode:
            fake = self.described(*function(*(mode.from_tensor(x) for x in tensors)))
        assert fake == real

    @pytest.mark.parametrize("rows", [0, 1, 2, 33])
    @pytest.mark.parametrize("heads", [1, 2, 16])
    @pytest.mark.parametrize("transposed", [(), (0,), (2,), (0, 1, 2)], ids=str)
    def test_attention(self, transposed, heads, rows, dtype):
        shapes = [(2, rows, heads, 8), (2, 21, heads, 8), (2, 21, heads, 6)]
        tensors = [torch.randn(b, h, s, d, dtype=dtype) for b, s, h, d in shapes]
        for i in transposed:
            tensors[i] = torch.randn(shapes[i], dtype=dtype).transpose(1, 2)

        def function(q, k, v):
            tensors = [x.requires_grad_() for x in (q, k, v)]
            out, lse = attention(*tensors, causal=True, return_lse=True)
            grads = torch.ones_like(out), torch.ones_like(lse)
            return out, lse, *torch.autograd.grad((out, lse), tensors, grads)

        self.run(function, *(x.requires_grad_() for x in tensors))

    def test_varlen(self, dtype):
        q, k, v = (torch.randn(7, heads, 8, dtype=dtype) for heads in (4, 2, 2))
        options = {"max_seqlen_q": 4, "max_seqlen_k": 4, "return_lse": True}
        for query in (q, torch.randn(4, 7, 8, dtype=dtype).transpose(0, 1)):
            self.run(lambda *x: attention_varlen(*x, x[-1], **options), query, k, v, integers(0, 3, 7))

    def test_paged(self, dtype):
        pages = torch.randn(5, 4, 2, 8, dtype=dtype)
        tensors = torch.randn(2, 4, 3, 8, dtype=dtype), pages, pages, integers([0, 1], [4, 2]), integers(8, 5)
        self.run(lambda *x: attention_paged(*x, return_lse=True), *tensors)

    def test_merge(self, dtype):
        outs, lses = torch.randn(3, 2, 4, 5, 8, dtype=dtype), torch.randn(3, 2, 4, 5)
        self.run(merge, outs, lses)
        self.run(lambda *x: merge(x[:2], x[2:]), outs[0], outs[1].mT.contiguous().mT, lses[0], lses[1])
        self.run(merge, outs[:, 0].transpose(1, 2), lses[:, 0])

    def test_the_meta_device(self):
        q, k, v = (torch.empty(2, heads, 5, 8, device="meta") for heads in (4, 2, 2))
        out, lse = attention(q, k, v, causal=True, return_lse=True)
        assert out.shape == (2, 4, 5, 8) and lse.shape == (2, 4, 5) and out.is_meta and lse.is_meta


class TestCompile:
    @pytest.fixture(autouse=True)
    def fresh(self):
        torch.use_deterministic_algorithms(False)
        torch.compiler.reset()

    def test_forward_and_backward_with_transposed_tensors(self):
        """Query and key contiguous, value and the upstream gradient transposed, an odd length."""
        q, k = (torch.randn(2, 16, 65, 64, requires_grad=True) for _ in range(2))
        v = torch.randn(2, 65, 16, 64, requires_grad=True).transpose(1, 2)
        grad = torch.randn(2, 65, 16, 64).transpose(1, 2)

        def function(q, k, v):
            return attention(q * 1.5, k, v, causal=True)

        expected = function(q, k, v)
        found = torch.compile(function, fullgraph=True)(q, k, v)
        assert found.stride() == expected.stride()
        assert_close(found, expected)
        v.retain_grad()
        assert_close(*(torch.autograd.grad(x, (q, k, v), grad) for x in (found, expected)))

    def test_dynamic_shapes_with_lse_mask_and_sinks(self):
        @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
        def compiled(q, k, v, mask, sinks):
            return attention(q, k, v, mask, sinks=sinks, window=(30, 0), softcap=5.0, return_lse=True)

        torch._dynamo.config.error_on_recompile, before = True, torch._dynamo.config.error_on_recompile
        try:
            for batch, rows, keys in [(2, 20, 40), (3, 33, 70), (4, 5, 41)]:
                tensors = [torch.randn(batch, 6, n, 8, requires_grad=True) for n in (rows, keys, keys)]
                tensors += [torch.randn(rows, keys, requires_grad=True), torch.randn(6, requires_grad=True)]
                expected = attention(*tensors[:4], sinks=tensors[4], window=(30, 0), softcap=5.0, return_lse=True)
                found = compiled(*tensors)
                assert_close(found, expected)
                grads = [torch.randn_like(x) for x in expected]
                assert_close(*(torch.autograd.grad(x, tensors, grads) for x in (found, expected)))
        finally:
            torch._dynamo.config.error_on_recompile = before

    def test_varlen_paged_and_merge(self):
        @torch.compile(fullgraph=True, backend="aot_eager")
        def compiled(q, cu, pages, table, lens):
            tokens = attention_varlen(q, q, q, cu, cu, max_seqlen_q=4, max_seqlen_k=4, causal=True)
            paged = tokens[None].transpose(1, 2), pages, pages, table, lens
            states = [attention_paged(*paged, causal=causal, return_lse=True) for causal in (True, False)]
            return merge(*zip(*states, strict=True))

        tokens, pages = torch.randn(7, 4, 8), torch.randn(5, 4, 2, 8)
        arguments = tokens, integers(0, 3, 7), pages, integers([0, 4, 2]), integers(11)
        assert_close(compiled(*arguments), compiled._torchdynamo_orig_callable(*arguments))

    @pytest.mark.parametrize(
        "call",
        [
            lambda n, q, k, cu: attention(q, k, k, causal=True, q_offset=n - 5),
            lambda n, q, k, cu: attention(q, k, k, window=(n, 0)),
            lambda n, q, k, cu: attention(q, k, k, split_size=n + 1),
            lambda n, q, k, cu: attention_varlen(
                *(x[0].transpose(0, 1) for x in (q, k, k)), cu, 5 * cu, max_seqlen_q=n + 4, max_seqlen_k=n + 20
            ),
        ],
        ids=["q_offset", "window", "split_size", "max_seqlen"],
    )
    def test_integers_do_not_recompile(self, call):
        graphs = []

        def backend(graph, examples):
            graphs.append(graph)
            return graph

        compiled = torch.compile(call, backend=backend, fullgraph=True)
        q, k, cu = torch.randn(1, 2, 7, 8), torch.randn(1, 2, 35, 8), integers(0, 3, 7)
        for n in range(20):
            assert_same_bits(compiled(n, q, k, cu), call(n, q, k, cu))
        assert len(graphs) <= 3

    def test_a_length_from_item(self):
        def function(x, cu):
            longest = cu.diff().max().item()
            return attention_varlen(x, x, x, cu, cu, max_seqlen_q=longest, max_seqlen_k=longest)

        x, cu = torch.randn(9, 2, 8), integers(0, 4, 9)
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
            assert_same_bits(compiled(x, cu), function(x, cu))

    def test_autocast_inside(self):
        @torch.compile(fullgraph=True, backend="aot_eager")
        def compiled(q, k, v):
            with torch.autocast("cpu", torch.bfloat16):
                return attention(q, k, v)

        q, k, v = torch.randn(3, 1, 2, 9, 8).unbind()
        assert_same_bits(compiled(q, k, v), attention(*(x.bfloat16() for x in (q, k, v))))


class TestExport:
    class Decoder(torch.nn.Module):
        def forward(self, q, k):
            return attention(q, k, k, causal=True, q_offset=k.shape[2] - q.shape[2])

    class Selected(torch.nn.Module):
        def forward(self, q, k, keep):
            return attention(q[:, :, keep.nonzero().squeeze(-1)], k, k, causal=True, q_offset=3)

    def test_a_position_of_shapes_stays_dynamic(self):
        lengths = ({2: torch.export.Dim("rows", max=500)}, {2: torch.export.Dim("keys", max=500)})
        samples = torch.randn(1, 2, 7, 8), torch.randn(1, 2, 40, 8)
        exported = torch.export.export(self.Decoder(), samples, dynamic_shapes=lengths)
        for rows, keys in ((7, 40), (30, 33), (3, 90)):
            q, k = torch.randn(1, 2, rows, 8), torch.randn(1, 2, keys, 8)
            assert_same_bits(exported.module()(q, k), self.Decoder()(q, k))

    @pytest.mark.parametrize("transposed", [False, True])
    def test_a_number_of_queries_that_depends_on_data(self, transposed):
        q, k = torch.randn(1, 2, 7, 8), torch.randn(1, 2, 40, 8)
        if transposed:
            q = q.transpose(1, 2).contiguous().transpose(1, 2)
        exported = torch.export.export(self.Selected(), (q, k, torch.rand(7) < 0.5))
        for keep in (torch.rand(7) < 0.5, torch.arange(7) == 2, torch.arange(7) < 7, torch.arange(7) > 9):
            assert_same_bits(exported.module()(q, k, keep), self.Selected()(q, k, keep))


class TestVmap:
    @pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (1, 0, 0), (None, 2, 4), (-1, 0, None)], ids=str)
    def test_attention(self, in_dims):
        tensors = [torch.randn(2, heads, n, 8) for heads, n in ((4, 5), (2, 7), (2, 7))]
        tensors = [x if d is None else torch.stack([x, x + 1, 2 * x], d) for x, d in zip(tensors, in_dims, strict=True)]

        def function(q, k, v):
            return attention(q, k, v, causal=True, return_lse=True)

        self.check(function, in_dims, tensors)

    def test_mask_sinks_and_lengths(self):
        q, k, v = torch.randn(3, 2, 2, 5, 8), torch.randn(3, 2, 2, 7, 8), torch.randn(2, 2, 7, 8)
        rest = torch.rand(3, 5, 7) < 0.6, torch.randn(3, 2), torch.tensor([[7, 3], [1, 0], [5, 5]])

        def function(q, k, v, mask, sinks, kv_lens):
            return attention(q, k, v, mask, sinks=sinks, kv_lens=kv_lens, return_lse=True)

        self.check(function, (0, 0, None, 0, 0, 0), (q, k, v, *rest))
        self.check(function, (0, None, None, None, None, None), (q, k[0], v, *(x[0] for x in rest)))
        self.check(function, (None, 0, None, 0, None, None), (q[0], k, v, rest[0], *(x[0] for x in rest[1:])))

    def test_float_masks_of_any_rank(self):
        q, k, v = torch.randn(3, 2, 2, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
        for shape in ((5, 7), (2, 1, 7), (2, 1, 5, 7)):
            self.check(attention, (0, None, None, 0), (q, k, v, torch.randn(3, *shape)))

    def test_varlen(self):
        q, k, v = torch.randn(3, 7, 4, 8), torch.randn(3, 9, 2, 8), torch.randn(9, 2, 6)

        def function(q, k, v, cu):
            return attention_varlen(q, k, v, cu, integers(0, 4, 9), max_seqlen_q=5, max_seqlen_k=5, return_lse=True)

        self.check(function, (0, 0, None, None), (q, k, v, integers(0, 3, 7)))
        self.check(function, (0, 0, None, 0), (q, k, v, integers([0, 3, 7], [0, 2, 7], [0, 5, 7])))

    def test_paged(self):
        q, pages = torch.randn(3, 2, 4, 3, 8), torch.randn(3, 5, 4, 2, 8)
        table = integers([[0, 1], [4, 2]], [[1, 1], [0, 2]], [[3, 2], [4, 2]])
        lens = integers([8, 5], [1, 2], [0, 8])

        def function(*x):
            return attention_paged(*x, return_lse=True)

        self.check(function, (0, 0, 0, 0, 0), (q, pages, pages, table, lens))
        self.check(function, (0, None, None, 0, 0), (q, pages[0], pages[0], table, lens))
        self.check(function, (0, None, 0, None, None), (q, pages[0], pages, table[0], lens[0]))

    @pytest.mark.parametrize("in_dims", [(0, 0), (1, 0), (0, None)], ids=str)
    def test_merge(self, in_dims):
        outs, lses = torch.randn(3, 3, 2, 4, 5, 8), torch.randn(3, 3, 2, 4, 5)
        self.check(merge, in_dims, (outs, lses if in_dims[1] is not None else lses[0]))

    @pytest.mark.filterwarnings("error:There is a performance drop")
    def test_an_empty_batch_and_a_mask_for_all(self):
        x = torch.randn(3, 0, 4, 5, 8)
        assert torch.vmap(lambda q: attention(q, q, q, torch.zeros(1, 1, 1, 1)))(x).shape == x.shape

    def test_it_is_not_a_loop(self):
        torch.vmap(attention)(*torch.randn(3, 3, 1, 2, 5, 8))

    def test_gradients_through_vmap(self):
        q, k, v = (torch.randn(3, 1, 2, 5, 8, requires_grad=True) for _ in range(3))
        out = torch.vmap(attention)(q, k, v)
        grad = torch.randn_like(out)
        expected = torch.stack([attention(*x) for x in zip(q, k, v, strict=True)])
        assert_close(*(torch.autograd.grad(x, (q, k, v), grad) for x in (out, expected)))

    @staticmethod
    def check(function, in_dims, tensors):
        def part(i):
            return function(*(x if d is None else x.select(d, i) for x, d in zip(tensors, in_dims, strict=True)))

        found, parts = torch.vmap(function, in_dims)(*tensors), [part(i) for i in range(3)]
        if isinstance(found, torch.Tensor):
            found, parts = [found], [[part] for part in parts]
        assert_close(list(found), list(map(torch.stack, zip(*parts, strict=True))))


class TestAutocast:
    @pytest.mark.parametrize("target", [torch.bfloat16, torch.float16])
    def test_mixed_dtypes_become_one(self, target):
        q, k, v = torch.randn(3, 1, 2, 9, 8).unbind()
        v = v.bfloat16()
        leaves = [x.requires_grad_() for x in (q, k, v)]
        mask, sinks = torch.randn(9, 9), torch.randn(2)
        with torch.autocast("cpu", target):
            out, lse = attention(*leaves, mask, sinks=sinks, return_lse=True)
        assert (out.dtype, lse.dtype) == (target, torch.float32)
        expected = attention(*(x.detach().to(target) for x in (q, k, v)), mask.to(target), sinks=sinks)
        assert_close(out, expected, rtol=2 * torch.finfo(target).eps, atol=torch.finfo(target).eps)
        out.sum().backward()
        assert [x.grad.dtype for x in leaves] == [torch.float32, torch.float32, torch.bfloat16]

    def test_varlen_and_paged(self):
        q, cu, pages = torch.randn(7, 4, 8), integers(0, 3, 7), torch.randn(5, 4, 2, 8)
        with torch.autocast("cpu", torch.bfloat16):
            assert attention_varlen(q, q, q, cu, cu, max_seqlen_q=4, max_seqlen_k=4).dtype == torch.bfloat16
            query = torch.randn(1, 4, 3, 8)
            assert attention_paged(query, pages, pages.half(), integers([0]), integers(4)).dtype == torch.bfloat16

    def test_float64_lengths_and_bool_masks_are_left_alone(self):
        q, k, v = torch.randn(3, 1, 2, 9, 8, dtype=torch.float64).unbind()
        options = {"attn_mask": torch.rand(9, 9) < 0.5, "kv_lens": torch.tensor([5])}
        expected = attention(q, k, v, **options)
        with torch.autocast("cpu", torch.bfloat16):
            assert_same_bits(attention(q, k, v, **options), expected)

    def test_off_by_default_and_when_disabled(self):
        q, k, v = torch.randn(3, 1, 2, 9, 8).unbind()
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
            assert attention(q, k, v).dtype == torch.float32
        with pytest.raises(ValueError, match="value"):
            attention(q, k, v.bfloat16())


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.merge = attention, merge
        self.sinks = torch.nn.Parameter(torch.zeros(2))

    def forward(self, q, k, v):
        return self.attention(q, k, v, causal=True, sinks=self.sinks)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_a_module_that_holds_the_functions_is_copied(copied):
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
    block = Block()
    assert_same_bits(copied(block)(q, k, v), block(q, k, v))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
class TestWhatAutogradCannotDo:
    """Says so, rather than giving a wrong answer."""

    def test_double_backward(self):
        q, k, v = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3))
        (gradient,) = torch.autograd.grad(attention(q, k, v).square().sum(), q, create_graph=True)
        with pytest.raises(NotImplementedError, match="double backward"):
            gradient.sum().backward()

    def test_double_backward_of_merge(self):
        outs, lses = (torch.randn(2, 1, 2, 5, *dim, requires_grad=True) for dim in ((8,), ()))
        (gradient,) = torch.autograd.grad(merge(outs, lses)[0].square().sum(), lses, create_graph=True)
        with pytest.raises(NotImplementedError, match="double backward"):
            gradient.sum().backward()

    @pytest.mark.parametrize("which", [0, 1, 2])
    def test_forward_mode(self, which):
        tensors = list(torch.randn(3, 1, 2, 5, 8))
        with torch.autograd.forward_ad.dual_level():
            tensors[which] = torch.autograd.forward_ad.make_dual(tensors[which], torch.ones(1, 2, 5, 8))
            with pytest.raises(NotImplementedError, match="forward-mode"):
                attention(*tensors)

    def test_jvp(self):
        tensors = tuple(torch.randn(3, 1, 2, 5, 8))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            torch.func.jvp(attention, tensors, tensors)

    def test_forward_mode_of_merge(self):
        outs, lses = torch.randn(2, 1, 2, 5, 8), torch.randn(2, 1, 2, 5)
        with torch.autograd.forward_ad.dual_level():
            outs = torch.autograd.forward_ad.make_dual(outs, torch.ones_like(outs))
            with pytest.raises(NotImplementedError, match="forward-mode"):
                merge(outs, lses)

    @pytest.mark.parametrize("name", ["alibi_slopes", "sinks", "attn_mask"])
    def test_forward_mode_of_an_option(self, name):
        q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
        x = torch.rand(2) if name != "attn_mask" else torch.rand(5, 5)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            with pytest.raises(NotImplementedError, match="forward-mode"):
                attention(q, k, v, **{name: dual})

    @pytest.mark.parametrize("name", ["query", "value", "alibi_slopes"])
    def test_forward_mode_of_the_operator(self, name):
        arguments = operators.attention(alibi_slopes=torch.rand(4))
        with torch.autograd.forward_ad.dual_level():
            x = arguments[name]
            arguments[name] = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            with pytest.raises(NotImplementedError, match="forward-mode"):
                torch.ops.flashsoftmax.attention(**arguments)

    def test_gradients_of_slopes(self):
        arguments = operators.attention(alibi_slopes=torch.rand(4, requires_grad=True))
        with pytest.raises(NotImplementedError, match="alibi_slopes"):
            torch.ops.flashsoftmax.attention(**arguments)[0].sum().backward()


class TestFunc:
    """torch.func: its transforms give what autograd and loops give."""

    @pytest.fixture
    def tensors(self):
        q, k, v = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 6)
        return {"query": q, "key": k, "value": v, "attn_mask": torch.randn(5, 7), "sinks": torch.randn(4)}

    @staticmethod
    def loss(tensors):
        out, lse = attention(**tensors, causal=True, return_lse=True)
        return out.square().sum() + lse.sum()

    def expected(self, tensors):
        leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
        grads = torch.autograd.grad(self.loss(leaves), list(leaves.values()))
        return dict(zip(leaves, grads, strict=True))

    def test_grad(self, tensors):
        assert_same_bits(torch.func.grad(self.loss)(tensors), self.expected(tensors))

    def test_vjp(self, tensors):
        loss, vjp = torch.func.vjp(self.loss, tensors)
        assert_same_bits(loss, self.loss(tensors))
        assert_same_bits(vjp(torch.ones(()))[0], self.expected(tensors))

    def test_jacrev(self, tensors):
        def function(x):
            return torch.nn.functional.scaled_dot_product_attention(x, tensors["key"], tensors["key"], enable_gqa=True)

        def ours(x):
            return attention(x, tensors["key"], tensors["key"])

        assert_close(torch.func.jacrev(ours)(tensors["query"]), torch.func.jacrev(function)(tensors["query"]))

    @pytest.mark.parametrize("shared", [(), ("sinks",), ("key", "value"), ("query", "attn_mask", "sinks")], ids=str)
    def test_vmap_of_grad(self, tensors, shared):
        batch = {name: x if name in shared else torch.stack([x, x + 1, 2 * x]) for name, x in tensors.items()}
        dims = {name: None if name in shared else 0 for name in batch}
        found = torch.vmap(torch.func.grad(self.loss), (dims,))(batch)
        each = [self.expected({name: x if name in shared else x[i] for name, x in batch.items()}) for i in range(3)]
        for name in found:
            assert_close(found[name], torch.stack([x[name] for x in each]))

    def test_vmap_of_grad_without_sinks_is_not_a_loop(self, tensors):
        calls = []

        class Count(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, op, types, args=(), kwargs=None):
                calls.extend([op._opname] if op.namespace == "flashsoftmax" else [])
                return op(*args, **(kwargs or {}))

        del tensors["sinks"]
        with Count():
            torch.vmap(torch.func.grad(self.loss))({name: torch.stack([x] * 3) for name, x in tensors.items()})
        assert calls == ["attention", "attention_backward"]

    def test_autocast(self):
        q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)

        def inside(q):
            with torch.autocast("cpu", torch.bfloat16):
                return attention(q, k, v).float().sum()

        leaf = q.clone().requires_grad_()
        inside(leaf).backward()
        assert_same_bits(torch.func.grad(inside)(q), leaf.grad)
        with torch.autocast("cpu", torch.bfloat16):
            assert_same_bits(torch.func.grad(lambda q: attention(q, k, v).float().sum())(q), leaf.grad)

    def test_merge(self):
        def loss(outs, lses):
            out, lse = merge(outs, lses)
            return out.square().sum() + lse.sum()

        outs, lses = torch.randn(3, 2, 1, 4, 5, 8), torch.randn(3, 2, 1, 4, 5)
        each = []
        for pair in zip(outs, lses, strict=True):
            leaves = [x.clone().requires_grad_() for x in pair]
            each.append(torch.autograd.grad(loss(*leaves), leaves))
            assert_same_bits(torch.func.grad(loss, (0, 1))(*pair), each[-1])
        found = torch.vmap(torch.func.grad(loss, (0, 1)))(outs, lses)
        assert_close(found, tuple(torch.stack(x) for x in zip(*each, strict=True)))

    @pytest.mark.parametrize("transform", [torch.func.jacfwd, torch.func.hessian])
    def test_forward_mode_and_double_backward_say_no(self, transform, tensors):
        with pytest.raises(NotImplementedError, match=r"forward-mode|double backward"):
            transform(self.loss)(tensors)


class TestFlops:
    def count(self, call):
        with FlopCounterMode(display=False) as counter:
            call()
        return counter.get_total_flops()

    def test_as_torch_counts_its_own(self):
        def step(function):
            q, k, v = (torch.randn(2, 4, n, 8, requires_grad=True) for n in (5, 9, 9))
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                function(q, k, v)

        expected = self.count(lambda: step(torch.nn.functional.scaled_dot_product_attention))
        assert self.count(lambda: step(attention)) == expected == 2 * 2 * 4 * 5 * 9 * 16

    def test_the_backward_has_five_products(self):
        def step():
            q, k, v = (torch.randn(2, 4, n, d, requires_grad=True) for n, d in ((5, 8), (9, 8), (9, 6)))
            attention(q, k, v).sum().backward()

        assert self.count(step) == 2 * 2 * 4 * 5 * 9 * ((8 + 6) + (3 * 8 + 2 * 6))

    def test_varlen_counts_pairs_within_sequences(self):
        x, cu = torch.randn(7, 4, 8), integers(0, 3, 7)
        call = functools.partial(attention_varlen, x, x, x, cu, cu, max_seqlen_q=7, max_seqlen_k=7)
        assert self.count(call) == 2 * 4 * (9 + 16) * 16


def test_selective_checkpointing_keeps_the_output():
    """The operator's name is what a policy of selective activation checkpointing lists."""
    kept = functools.partial(create_selective_checkpoint_contexts, [torch.ops.flashsoftmax.attention.default])
    q, k, v = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3))
    out = torch.utils.checkpoint.checkpoint(attention, q, k, v, use_reentrant=False, context_fn=kept)
    found = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert_same_bits(found, torch.autograd.grad(attention(q, k, v).square().sum(), (q, k, v)))


def test_checkpointing():
    q, k, v = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3))
    out = torch.utils.checkpoint.checkpoint(attention, q, k, v, use_reentrant=False)
    grad = torch.randn_like(out)
    assert_same_bits(
        torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(attention(q, k, v), (q, k, v), grad)
    )


def test_no_grad_and_inference_mode():
    q, k, v = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3))
    expected = attention(q, k, v).detach()
    with torch.no_grad():
        assert not attention(q, k, v).requires_grad
    with torch.inference_mode():
        assert_same_bits(attention(q, k, v), expected)


def test_saved_tensors_are_guarded_against_writes():
    q, k, v = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3))
    scaled = q * 2
    out = attention(scaled, k, v)
    scaled.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_gradients_accumulate_over_two_calls_that_share_keys():
    inputs, call = case("heads-6-2").inputs(torch.float64), case("heads-6-2").call(attention)
    grads = random_gradients(call, inputs)
    single = gradients(call, inputs, grads, WRT)
    twice = gradients(lambda **x: [a + b for a, b in zip(call(**x), call(**x), strict=True)], inputs, grads, WRT)
    assert_close(twice, [2 * x for x in single])
