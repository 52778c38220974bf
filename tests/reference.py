"""Dense attention, short enough to be believed.

`attention` computes in the dtype of its query and lets autograd find the gradients. In float64 it is the
reference. In the dtype under test it is the naive computation, whose error measures what error is allowed.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad


def scores(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    q_offset: int | None = None,
    kv_lens: Tensor | None = None,
    kv_starts: Tensor | None = None,
    q_lens: Tensor | None = None,
    attn_bias: Tensor | None = None,
    reordered: bool = False,
) -> Tensor:
    """[batch, heads, rows, keys + 1]. The last key is the sink, of score -inf where there is none."""
    (batch, heads, rows, dim), keys, device = query.shape, key.shape[2], query.device
    lengths = torch.full((batch,), keys) if kv_lens is None else kv_lens
    lengths = lengths.to(device).view(batch, 1, 1, 1)
    used = (torch.full((batch,), rows) if q_lens is None else q_lens).to(device).view(batch, 1, 1, 1)
    starts = (torch.zeros(batch) if kv_starts is None else kv_starts).to(device).view(batch, 1, 1, 1)
    i, j = torch.arange(rows, device=device)[:, None], torch.arange(keys, device=device)
    distance = i + (lengths - used if q_offset is None else q_offset) - j
    left, right = window or (None, None)
    right = 0 if causal else right
    visible = (starts <= j) & (j < lengths)
    if left is not None:
        visible = visible & (distance <= left)
    if right is not None:
        visible = visible & (distance >= -right)

    query = query.masked_fill(i >= used, 0)  # not read
    k = per_query_head(query, key, kv_lens, kv_starts).mT
    s = sum(query[..., d, None] * k[..., None, d, :] for d in range(dim)) if reordered else query @ k
    s = s * (max(dim, 1) ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if alibi_slopes is not None:
        s = s - alibi_slopes.to(s)[..., None, None] * distance.abs()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        visible = visible & attn_mask
    elif attn_mask is not None:
        s = s + attn_mask.to(s)
    if attn_bias is not None:
        s = s + attn_bias.to(s)
    s = s.masked_fill(~visible, -torch.inf)
    sink = torch.full((heads,), -torch.inf) if sinks is None else sinks
    s = torch.cat([s, sink.to(s).view(-1, 1, 1).expand(batch, heads, rows, 1)], -1)
    return s.masked_fill(i >= used, -torch.inf)


def per_query_head(query: Tensor, x: Tensor, kv_lens: Tensor | None, kv_starts: Tensor | None) -> Tensor:
    """Keys or values as each query head reads them: 0 outside [kv_starts, kv_lens), where nothing is read."""
    j = torch.arange(x.shape[2], device=x.device)
    if kv_lens is not None:
        x = x.masked_fill((j >= kv_lens.to(x.device)[:, None])[:, None, :, None], 0)
    if kv_starts is not None:
        x = x.masked_fill((j < kv_starts.to(x.device)[:, None])[:, None, :, None], 0)
    return x.repeat_interleave(query.shape[1] // x.shape[1], 1)


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox-4x32-10, as Salmon et al. write it ("Parallel random numbers: as easy as 1, 2, 3", 2011)."""
    (r0, l0, r1, l1), (k0, k1) = counter, key
    for _ in range(10):
        (high0, low0), (high1, low1) = divmod(r0 * 0xD2511F53, 2**32), divmod(r1 * 0xCD9E8D57, 2**32)
        r0, l0, r1, l1 = high1 ^ l0 ^ k0, low1, high0 ^ l1 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return r0, l0, r1, l1


@cache
def kept(shape: tuple[int, int, int, int], dropout_p: float, seed: int, offset: int) -> Tensor:
    """The weights of this shape that dropout keeps, one by one."""
    dropped, seed, offset = max(1, int(dropout_p * 2**32 + 0.5)), seed % 2**64, offset % 2**64
    mask = torch.empty(shape, dtype=torch.bool)
    for b in range(shape[0]):
        for h in range(shape[1]):
            *key, c2, c3 = philox((offset % 2**32, offset // 2**32, b, h), (seed % 2**32, seed // 2**32))
            for i in range(shape[2]):
                words = [x for j in range(0, shape[3], 4) for x in philox((j // 4, i, c2, c3), tuple(key))]
                mask[b, h, i] = torch.tensor([x >= dropped for x in words[: shape[3]]], dtype=torch.bool)
    return mask


def dropout_factors(
    s: Tensor, dropout_p: float, dropout_seed: Tensor | None, kv_starts: Tensor | None
) -> Tensor | None:
    """What weights [batch, heads, rows, keys + 1] are multiplied by: keys count from kv_starts, the sink is kept."""
    if dropout_p == 0:
        return None
    mask = kept((*s.shape[:3], s.shape[3] - 1), dropout_p, *dropout_seed.tolist()).to(s)
    if kv_starts is not None:
        numbers = (torch.arange(mask.shape[3]) - kv_starts.cpu()[:, None]).clamp(min=0).to(s.device)
        mask = mask.gather(3, numbers[:, None, None].expand_as(mask))
    return pad(mask if dropout_p == 1 else mask / (1 - dropout_p), (0, 1), value=1)


def attention(
    query,
    key,
    value,
    attn_mask=None,
    *,
    dropout_p=0.0,
    dropout_seed=None,
    reordered=False,
    textbook=False,
    **options,
):
    """(out, lse). `reordered` sums over dims one by one and over keys from the last to the first."""
    s = scores(query, key, attn_mask, reordered=reordered, **options)
    factors = dropout_factors(s, dropout_p, dropout_seed, options.get("kv_starts"))
    v = pad(per_query_head(query, value, options.get("kv_lens"), options.get("kv_starts")), (0, 0, 0, 1))
    if textbook:
        with torch.no_grad():
            other = scores(query, key, attn_mask, reordered=not reordered, **options)
            lse = torch.logsumexp(other.to(torch.promote_types(s.dtype, torch.float32)), -1)
        return Textbook.apply(s, v, lse, factors)
    masked = (s == -torch.inf).all(-1, keepdim=True)
    s = s.masked_fill(masked, 0)
    p = torch.softmax(s, -1).masked_fill(masked, 0)
    p = p if factors is None else p * factors
    out = p.flip(-1) @ v.flip(-2) if reordered else p @ v
    return out, torch.logsumexp(s, -1).masked_fill(masked[..., 0], -torch.inf)


class Textbook(torch.autograd.Function):
    """The textbook's backward, densely: P = e^(S - lse), dS = P (dP - sum(dO O) + dlse).

    S and lse come from different sums, as a backward sums in another order than the forward before it.
    """

    @staticmethod
    def forward(ctx, s, v, lse, factors=None):
        p = torch.exp(s.to(lse.dtype) - lse[..., None]).masked_fill(lse[..., None] == -torch.inf, 0).to(s.dtype)
        factors = torch.ones((), dtype=s.dtype, device=s.device) if factors is None else factors
        out = (p * factors) @ v
        ctx.save_for_backward(p, v, out, factors)
        return out, lse.clone()

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        p, v, out, factors = ctx.saved_tensors
        delta = (grad_out * out).sum(-1) - grad_lse.to(p.dtype)
        return p * (factors * (grad_out @ v.mT) - delta[..., None]), (p * factors).mT @ grad_out, None, None
