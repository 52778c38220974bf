"""Dropout of weights: which ones, on whatever way the call goes; test_forward and test_backward have the numbers."""

import os
import subprocess
import sys

import pytest
import torch
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import flashsoftmax
from cases import Case
from checks import assert_same_bits
from flashsoftmax import attention, attention_paged, attention_varlen, dropout_mask

SEED = torch.tensor([20240229, -3])
ALL_DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def on_interpreter(**parameters):
    return parameters.get("dtype", torch.bfloat16) != torch.float64 and parameters.get("rows", 70) in (3, 70)


def seen(call, batch, heads, rows, keys, dtype=torch.float32, dim=8):
    """Which weights a call keeps: all are equal, and each value is another unit vector."""
    query, key = torch.zeros(batch, heads, rows, dim, dtype=dtype), torch.zeros(batch, heads, keys, dim, dtype=dtype)
    value = torch.eye(keys, dtype=dtype).expand(batch, heads, keys, keys)
    return call(query, key, value) != 0


class TestMask:
    @pytest.mark.parametrize("dtype", ALL_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
    @pytest.mark.parametrize("rows", [1, 3, 16, 17, 70, 300])
    def test_is_that_of_the_kernels(self, rows, dtype, device):
        found = seen(
            lambda *qkv: attention(*(x.to(device) for x in qkv), dropout_p=0.4, dropout_seed=SEED.to(device)),
            2, 2, rows, 133, dtype,
        )  # fmt: skip
        assert torch.equal(found.cpu(), dropout_mask(2, 2, rows, 133, 0.4, SEED))

    @pytest.mark.parametrize("rows", [3, 70])
    def test_starts_anew_in_each_sequence(self, rows, device):
        """Sequence b of a variable-length call is batch entry b of a padded one."""
        lens_q, lens_k = (rows, 1, rows // 2), (90, 40, 131)
        x = torch.zeros(sum(lens_q), 2, 8), torch.zeros(sum(lens_k), 2, 8)
        value = torch.cat([torch.eye(131)[:n] for n in lens_k])[:, None].expand(-1, 2, -1)
        cu = [torch.tensor([0, *torch.tensor(lens).cumsum(0)], device=device) for lens in (lens_q, lens_k)]
        lengths = {"max_seqlen_q": rows, "max_seqlen_k": 131}
        tensors = (t.to(device) for t in (*x, value))
        out = attention_varlen(*tensors, *cu, **lengths, dropout_p=0.4, dropout_seed=SEED.to(device))
        mask = dropout_mask(3, 2, rows, 131, 0.4, SEED)
        for b, found in enumerate(out.cpu().split(lens_q)):
            wanted = mask[b, :, : lens_q[b], : lens_k[b]]
            assert torch.equal(found.transpose(0, 1)[..., : lens_k[b]] != 0, wanted)

    def test_counts_keys_by_their_position_in_pages(self, device):
        value = torch.eye(128).view(8, 16, 1, 128).to(device)
        key, query = torch.zeros(8, 16, 1, 8, device=device), torch.zeros(1, 2, 5, 8, device=device)
        table = torch.tensor([[3, 7, 0, 1, 6, 2, 5, 4]], device=device)
        out = attention_paged(
            query, key, value, table, torch.tensor([100], device=device), dropout_p=0.4, dropout_seed=SEED.to(device)
        )
        found = torch.cat([out[..., 16 * page : 16 * page + 16] for page in table[0].tolist()], -1)[..., :100]
        assert torch.equal(found.cpu() != 0, dropout_mask(1, 2, 5, 100, 0.4, SEED))

    def test_of_nested_tensors(self):
        q, k = ([torch.randn(2, n, 8) for n in lens] for lens in ((20, 30), (41, 25)))
        nested = [
            torch.nested.nested_tensor([x.transpose(0, 1) for x in xs], layout=torch.jagged).transpose(1, 2)
            for xs in (q, k)
        ]
        options = {"dropout_p": 0.4, "dropout_seed": SEED}
        out = attention(nested[0], nested[1], nested[1], **options)
        rows = [torch.cat(xs, 1).transpose(0, 1) for xs in (q, k)]
        cu = torch.tensor([0, 20, 50]), torch.tensor([0, 41, 66])
        packed = attention_varlen(rows[0], rows[1], rows[1], *cu, max_seqlen_q=30, max_seqlen_k=41, **options)
        assert_same_bits(out.transpose(1, 2).values(), packed)

    @pytest.mark.parametrize("p", [0.01, 0.25, 0.5, 0.9])
    def test_keeps_the_share_that_was_asked_for(self, p):
        mask = dropout_mask(8, 8, 64, 64, p, SEED).double()
        deviation = (p * (1 - p) / mask.numel()) ** 0.5
        assert abs(mask.mean() - (1 - p)) < 4 * deviation
        for axis in range(4):  # in each batch, head, query and key too
            rest = [d for d in range(4) if d != axis]
            of_each = mask.mean(rest)
            assert (of_each - (1 - p)).abs().max() < 5 * deviation * of_each.numel() ** 0.5

    def test_neighbours_are_independent(self):
        mask = dropout_mask(8, 8, 64, 64, 0.5, SEED).double() - 0.5
        for axis in range(4):
            n = mask.shape[axis] - 1
            product = mask.narrow(axis, 0, n) * mask.narrow(axis, 1, n)
            assert abs(product.mean() * 4) < 4 * product.numel() ** -0.5

    def test_of_other_seeds_is_another(self):
        masks = [dropout_mask(1, 1, 40, 40, 0.5, torch.tensor(seed)) for seed in ((0, 0), (1, 0), (0, 1), (2**40, 0))]
        for n, mask in enumerate(masks):
            for other in masks[:n]:
                assert 0.4 < (mask == other).double().mean() < 0.6

    def test_of_p_0_and_1(self):
        assert dropout_mask(1, 2, 3, 5, 0.0, SEED).all()
        assert not dropout_mask(1, 2, 3, 5, 1.0, SEED).any()

    def test_does_not_depend_on_the_threads(self, threads):
        inputs = Case("", batch=2, rows=130, keys=2500, dim=8, dropout_p=0.3, split_size=256).inputs(torch.float32)
        results = []
        for count in (1, 2, 3):
            threads(count)
            results.append(attention(**inputs))
        assert_same_bits(results[1:], results[:1] * 2)


INSTRUCTION_SETS = """
import torch
from flashsoftmax import attention, dropout_mask
seed = torch.tensor([20240229, -3])
for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
    for rows in (3, 70):
        q, k = torch.zeros(1, 2, rows, 8, dtype=dtype), torch.zeros(1, 2, 133, 8, dtype=dtype)
        v = torch.eye(133, dtype=dtype).expand(1, 2, 133, 133).clone().requires_grad_()
        out = attention(q, k, v, dropout_p=0.4, dropout_seed=seed)
        mask = dropout_mask(1, 2, rows, 133, 0.4, seed)
        assert torch.equal(out != 0, mask), dtype
        grad = torch.autograd.grad(out, v, torch.eye(rows, 133, dtype=dtype).expand_as(out))[0]
        assert torch.equal(grad[..., :rows] != 0, mask.mT), dtype
"""


@pytest.mark.parametrize("name", ["portable", "AVX2", "AVX-512", "AVX-512-BF16"])
def test_the_mask_of_every_instruction_set(name):
    environment = os.environ | {"FLASHSOFTMAX_CPU_ISA": name}
    command = [sys.executable, "-c", INSTRUCTION_SETS]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    if "this processor has:" in result.stderr:
        pytest.skip(f"this processor has no {name}")
    assert result.returncode == 0, result.stderr


def tensors(rows=40, dtype=torch.float32, device="cpu"):
    return [torch.randn(2, 2, n, 16, device=device).to(dtype).requires_grad_() for n in (rows, 70, 70)]


def is_consistent(out, value, grad_of=torch.autograd.grad):
    """Whether forward and backward drop the same weights. out is linear in value: out . g = value . gradient(g)."""
    upstream = torch.randn_like(out)
    (grad,) = grad_of(out, value, upstream)
    return torch.allclose((out * upstream).sum().double(), (value * grad).sum().double(), rtol=1e-4, atol=1e-3)


class TestValues:
    @pytest.mark.parametrize("rows", [3, 40])
    def test_p_0_changes_no_bit_and_draws_nothing(self, rows, dtype):
        q, k, v = tensors(rows, dtype)
        state = torch.get_rng_state()
        plain, dropped = attention(q, k, v, return_lse=True), attention(q, k, v, return_lse=True, dropout_p=0.0)
        assert torch.equal(torch.get_rng_state(), state)
        assert_same_bits(dropped, plain)
        grads = [torch.autograd.grad(out, (q, k, v), torch.ones_like(out)) for out in (plain[0], dropped[0])]
        assert_same_bits(*grads)

    def test_p_1_gives_0(self, dtype, device):
        q, k, v = tensors(40, dtype, device)
        out, lse = attention(q, k, v, dropout_p=1.0, return_lse=True)
        assert not out.any() and lse.isfinite().all()
        for grad in torch.autograd.grad(out, (q, k, v), torch.randn_like(out)):
            assert not grad.any()

    def test_lse_is_that_of_all_weights(self, dtype, device):
        q, k, v = tensors(40, dtype, device)
        options = {"sinks": torch.randn(2, device=device), "return_lse": True}
        assert_same_bits(attention(q, k, v, dropout_p=0.5, **options)[1], attention(q, k, v, **options)[1])

    def test_the_sink_is_not_dropped(self, device):
        """Its weight lowers the others, whichever of them are kept."""
        q, k, v = tensors(20, device=device)
        options = {"dropout_p": 0.5, "dropout_seed": SEED.to(device)}
        plain, lse = attention(q, k, v, return_lse=True, **options)
        sinks = torch.tensor([3.0, -1.0], device=device)
        factor = torch.sigmoid(lse - sinks[:, None])
        assert_close(attention(q, k, v, sinks=sinks, **options), plain * factor[..., None])

    def test_the_mean_is_the_output_without_dropout(self):
        q, k, v = tensors(20)
        plain = attention(q, k, v)
        outs = torch.stack([attention(q, k, v, dropout_p=0.3) for _ in range(600)])
        error = (outs.mean(0) - plain).abs() / (outs.std(0) / 600**0.5)
        assert error.max() < 5 and error.square().mean().sqrt() < 1.2

    @pytest.mark.parametrize("rows", [3, 20])
    def test_gradcheck(self, rows):
        q, k, v = (torch.randn(1, 2, n, 3, dtype=torch.float64, requires_grad=True) for n in (rows, 7, 7))
        bias, sinks = torch.randn(1, 1, rows, 7, dtype=torch.float64), torch.randn(2, dtype=torch.float64)
        inputs = (q, k, v, bias.requires_grad_(), sinks.requires_grad_())

        def call(q, k, v, bias, sinks):
            options = {"sinks": sinks, "softcap": 2.0, "dropout_p": 0.4, "dropout_seed": SEED, "return_lse": True}
            return attention(q, k, v, bias, **options)

        assert torch.autograd.gradcheck(call, inputs)

    def test_a_masked_row_stays_0(self, device):
        q, k, v = tensors(20, device=device)
        mask = torch.ones(20, 70, dtype=torch.bool, device=device)
        mask[4] = False
        out = attention(q, k, v, mask, dropout_p=0.5)
        assert not out[:, :, 4].any()
        assert not torch.autograd.grad(out, q, torch.randn_like(out))[0][:, :, 4].any()


class TestSeed:
    def test_is_drawn_from_the_generator_of_torch(self):
        q, k, v = tensors()
        torch.manual_seed(5)
        first, second = attention(q, k, v, dropout_p=0.5), attention(q, k, v, dropout_p=0.5)
        torch.manual_seed(5)
        assert_same_bits(attention(q, k, v, dropout_p=0.5), first)
        assert not torch.equal(first, second)

    def test_is_the_same_in_the_backward(self, device):
        q, k, v = tensors(device=device)
        assert is_consistent(attention(q, k, v, dropout_p=0.5), v)

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_is_drawn_again_by_checkpointing(self, reentrant):
        q, k, v = tensors()
        out = checkpoint(lambda *qkv: attention(*qkv, dropout_p=0.5), q, k, v, use_reentrant=reentrant)
        upstream = torch.randn_like(out)
        out.backward(upstream)
        assert_close((out * upstream).sum(), (v * v.grad).sum(), rtol=1e-4, atol=1e-3)

    @pytest.mark.parametrize("grad", [False, True])
    def test_under_compile(self, grad):
        q, k, v = (x.requires_grad_(grad) for x in tensors())

        def call(q, k, v):
            return attention(q, k, v, dropout_p=0.5)

        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        torch.manual_seed(1)
        found, again = compiled(q, k, v), compiled(q, k, v)
        torch.manual_seed(1)
        assert_same_bits(found, call(q, k, v))
        assert not torch.equal(found, again)
        assert not grad or is_consistent(found, v)

    def test_under_export(self):
        class Module(torch.nn.Module):
            def forward(self, q, k, v):
                return attention(q, k, v, dropout_p=0.5)

        q, k, v = (x.detach() for x in tensors())
        exported = torch.export.export(Module(), (q, k, v)).module()
        torch.manual_seed(1)
        found = exported(q, k, v)
        torch.manual_seed(1)
        assert_same_bits(found, attention(q, k, v, dropout_p=0.5))

    @pytest.mark.parametrize("randomness", ["same", "different"])
    def test_under_vmap(self, randomness):
        """As torch.nn.functional.dropout has it."""
        q, k, v = (x.detach().expand(3, *x.shape) for x in tensors())

        def call(q, k, v):
            return attention(q, k, v, dropout_p=0.5)

        out = torch.vmap(call, randomness=randomness)(q, k, v)
        assert torch.equal(out[0], out[1]) == (randomness == "same")
        assert not torch.equal(out[0][0], out[0][1])

        def loss(q, k, v):
            return call(q, k, v).sum()

        grads = torch.vmap(torch.func.grad(loss, argnums=2), randomness=randomness)(q, k, v)
        assert torch.equal(grads[0], grads[1]) == (randomness == "same")

    def test_under_vmap_that_allows_no_randomness(self):
        q = torch.randn(3, 1, 2, 20, 8)
        with pytest.raises(RuntimeError, match="randomness"):
            torch.vmap(lambda x: attention(x, x, x, dropout_p=0.5))(q)


def test_flops_are_counted_as_without():
    from torch.utils.flop_counter import FlopCounterMode

    totals = []
    for p in (0.0, 0.5):
        with FlopCounterMode(display=False) as counter:
            attention(*tensors(), dropout_p=p).sum().backward()
        totals.append(counter.get_total_flops())
    assert totals[0] == totals[1] > 0


class TestErrors:
    @pytest.mark.parametrize("p", [-0.1, 1.1, float("nan"), float("inf")])
    @pytest.mark.parametrize("device", ["cpu", "meta"])
    def test_of_p(self, p, device):
        q = torch.zeros(1, 1, 20, 8, device=device)
        with pytest.raises(ValueError, match=r"dropout_p: .*, wanted 0 to 1"):
            attention(q, q, q, dropout_p=p)
        if device == "cpu":
            with pytest.raises(ValueError, match=r"dropout_p: .*, wanted 0 to 1"):
                dropout_mask(1, 1, 2, 3, p, SEED)

    @pytest.mark.parametrize("device", ["cpu", "meta"])
    @pytest.mark.parametrize(
        ("seed", "message"),
        [
            (torch.tensor([1, 2, 3]), r"dropout_seed: shape \[3\], wanted \[2\]"),
            (torch.tensor([1, 2], dtype=torch.int32), "dropout_seed: dtype int32, wanted int64"),
            (torch.tensor(1), r"dropout_seed: shape \[\], wanted \[2\]"),
        ],
    )
    def test_of_the_seed(self, seed, message, device):
        q = torch.zeros(1, 1, 20, 8, device=device)
        for p in (0.0, 0.5):
            with pytest.raises(ValueError, match=message):
                attention(q, q, q, dropout_p=p, dropout_seed=seed.to(device))

    def test_of_types(self):
        q = torch.zeros(1, 1, 20, 8)
        with pytest.raises(TypeError, match="dropout_seed: int, wanted a Tensor"):
            attention(q, q, q, dropout_p=0.5, dropout_seed=1)
        with pytest.raises(TypeError, match="dropout_p: 'a half', wanted a number"):
            attention(q, q, q, dropout_p="a half")
        with pytest.raises(ValueError, match=r"seed: .* wanted"):
            dropout_mask(1, 1, 2, 3, 0.5, torch.tensor([1.0, 2.0]))

    def test_the_operator_wants_a_seed(self):
        import operators

        with pytest.raises(ValueError, match="dropout_seed: missing, wanted with dropout_p"):
            torch.ops.flashsoftmax.attention(**operators.attention(dropout_p=0.5))


def test_it_is_in_the_signature():
    assert "dropout_p" in str(flashsoftmax.attention.__signature__)
