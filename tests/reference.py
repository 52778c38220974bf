"""Dense attention, short enough to be believed.

`attention` computes in the dtype of its query and lets autograd find the gradients. In float64 it is the
reference. In the dtype under test it is the naive computation, whose error measures what error is allowed.
"""

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


def attention(query, key, value, attn_mask=None, *, reordered=False, textbook=False, **options):
    """(out, lse). `reordered` sums over dims one by one and over keys from the last to the first."""
    s = scores(query, key, attn_mask, reordered=reordered, **options)
    v = pad(per_query_head(query, value, options.get("kv_lens"), options.get("kv_starts")), (0, 0, 0, 1))
    if textbook:
        with torch.no_grad():
            other = scores(query, key, attn_mask, reordered=not reordered, **options)
            lse = torch.logsumexp(other.to(torch.promote_types(s.dtype, torch.float32)), -1)
        return Textbook.apply(s, v, lse)
    masked = (s == -torch.inf).all(-1, keepdim=True)
    s = s.masked_fill(masked, 0)
    p = torch.softmax(s, -1).masked_fill(masked, 0)
    out = p.flip(-1) @ v.flip(-2) if reordered else p @ v
    return out, torch.logsumexp(s, -1).masked_fill(masked[..., 0], -torch.inf)


class Textbook(torch.autograd.Function):
    """The textbook's backward, densely: P = e^(S - lse), dS = P (dP - sum(dO O) + dlse).

    S and lse come from different sums, as a backward sums in another order than the forward before it.
    """

    @staticmethod
    def forward(ctx, s, v, lse):
        p = torch.exp(s.to(lse.dtype) - lse[..., None]).masked_fill(lse[..., None] == -torch.inf, 0).to(s.dtype)
        out = p @ v
        ctx.save_for_backward(p, v, out)
        return out, lse.clone()

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        p, v, out = ctx.saved_tensors
        delta = (grad_out * out).sum(-1) - grad_lse.to(p.dtype)
        return p * (grad_out @ v.mT - delta[..., None]), p.mT @ grad_out, None
