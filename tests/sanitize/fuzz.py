"""Valid calls of torch.ops.flashsoftmax with a few arguments spoilt. Each one raises or returns, and none may
read or write out of bounds: run.sh runs this under the sanitizers. `python fuzz.py [calls] [seed] [-v]`.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor

import flashsoftmax  # noqa: F401

Arguments = dict[str, Any]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OTHER_DTYPES = (*DTYPES, torch.bool, torch.int32, torch.int64, torch.uint8, torch.complex64)
SIZES = (0, 1, 2, 3, 5, 17, 33, 300)
INDICES = (torch.int32, torch.int64)
INTS = (-(2**63), -(2**62), -(2**31), -5, -1, 0, 1, 2, 7, 64, 1000, 2**31, 2**60, 2**62, 2**63 - 1)
FLOATS = (0.0, -1.0, 1.0, 1e-40, 1e30, float("inf"), float("nan"))


def tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if dtype == torch.bool:
        return torch.rand(shape) < 0.7
    return torch.randn(shape, dtype=torch.float32).to(dtype)


def lengths(count: int, most: int) -> Tensor:
    return torch.tensor([random.randint(0, most) for _ in range(count)], dtype=random.choice(INDICES))


def maybe(x: Any, p: float = 0.3) -> Any:
    return x if random.random() < p else None


OPTIONAL = ("attn_mask", "attn_bias", "alibi_slopes", "sinks", "kv_lens", "kv_starts", "q_lens")
OPTIONAL += ("cu_seqlens_q", "cu_seqlens_k", "block_table", "dropout_seed")


def attention() -> Arguments:
    batch, group, heads = (random.choice((1, 2, 3)) for _ in range(3))
    dim, dim_v = (random.choice((1, 3, 8, 64)) for _ in range(2))
    rows, keys = random.choice((1, 3, 16, 17, 70)), random.choice((1, 5, 64, 65, 300))
    dtype, kind = random.choice(DTYPES), random.choice(("dense", "varlen", "paged"))
    a: Arguments = dict.fromkeys(OPTIONAL)
    a["query"] = tensor((batch, group * heads, rows, dim), dtype)
    a["key"], a["value"] = (
        tensor((batch, heads, keys, dim), dtype),
        tensor((batch, heads, keys, dim_v), dtype),
    )
    a["kv_lens"] = maybe(lengths(batch, keys))
    if kind == "varlen":
        q_lens, k_lens = lengths(batch, rows), lengths(batch, keys)
        a["cu_seqlens_q"], a["cu_seqlens_k"] = (
            torch.nn.functional.pad(x.cumsum(0), (1, 0)).to(torch.int32) for x in (q_lens, k_lens)
        )
        a["query"] = tensor((1, group * heads, int(q_lens.sum()), dim), dtype)
        a["key"], a["value"] = (tensor((1, heads, int(k_lens.sum()), d), dtype) for d in (dim, dim_v))
        a["kv_lens"] = maybe(torch.minimum(k_lens, lengths(batch, keys)))
    elif kind == "paged":
        page, columns = random.choice((1, 4, 16)), random.choice((1, 3, 20))
        a["key"], a["value"] = (tensor((9, heads, page, d), dtype) for d in (dim, dim_v))
        a["block_table"] = torch.randint(9, (batch, columns), dtype=random.choice(INDICES))
        keys = page * columns
        a["kv_lens"] = lengths(batch, keys)
    a["kv_starts"] = maybe(lengths(batch, keys))
    if kind != "varlen":
        a["q_lens"] = maybe(lengths(batch, rows))
        scores = (batch, group * heads, rows, keys)
        mask = tensor(tuple(random.choice((1, n)) for n in scores), random.choice((torch.bool, dtype)))
        a["attn_mask" if mask.dtype == torch.bool else "attn_bias"] = maybe(mask.expand(scores))
        if a["attn_bias"] is None:
            a["attn_bias"] = maybe(tensor(tuple(random.choice((1, n)) for n in scores), dtype))
    statistics = torch.promote_types(dtype, torch.float32)
    a["alibi_slopes"], a["sinks"] = (maybe(tensor((group * heads,), statistics)) for _ in range(2))
    if a["alibi_slopes"] is not None and random.random() < 0.5:
        a["alibi_slopes"] = tensor((batch, group * heads), statistics)
    return a | {
        "max_seqlen_q": rows,
        "max_seqlen_k": keys,
        "scale": 0.3,
        "softcap": random.choice((0.0, 2.0)),
        "window_left": maybe(random.choice((0, 3, 100))),
        "window_right": maybe(random.choice((0, 3, 100))),
        "q_offset": maybe(random.choice((-3, 0, 5))),
        "split_size": maybe(random.choice((1, 16, 100))),
        "dropout_p": 0.0 if (seed := maybe(torch.randint(2**63 - 1, (2,)))) is None else random.choice((0.0, 0.3, 1.0)),
        "dropout_seed": seed,
    }


def attention_backward() -> Arguments:
    a = attention()
    while a["block_table"] is not None:
        a = attention()
    out, lse, lse_error = torch.ops.flashsoftmax.attention(**a)
    del a["block_table"], a["split_size"]
    grads = {"grad_out": maybe(torch.randn_like(out), 0.8), "grad_lse": maybe(torch.randn_like(lse), 0.8)}
    state = {"out": out, "lse": lse, "lse_error": maybe(lse_error, 0.8)}
    return a | grads | state | {"bias_grad": a["attn_bias"] is not None and random.random() < 0.5}


def merge() -> Arguments:
    shape = tuple(random.choice((1, 2, 5, 70)) for _ in range(3))
    dtype, dim, states = random.choice(DTYPES), random.choice((1, 64, 300)), random.randint(1, 4)
    statistics = torch.promote_types(dtype, torch.float32)
    lses = [tensor(shape, statistics) for _ in range(states)]
    return {"outs": [tensor((*shape, dim), dtype) for _ in range(states)], "lses": lses}


def merge_backward() -> Arguments:
    a = merge()
    out, lse = torch.ops.flashsoftmax.merge(**a)
    grads = {"grad_out": maybe(torch.randn_like(out), 0.8), "grad_lse": maybe(torch.randn_like(lse), 0.8)}
    return a | grads


def rotary_tables(dtype: torch.dtype, positions: int, dim: int) -> Arguments:
    table = (positions, random.randint(0, dim // 2)), random.choice((dtype, torch.promote_types(dtype, torch.float32)))
    interleaved = random.random() < 0.5
    return {"rotary_cos": tensor(*table), "rotary_sin": tensor(*table), "rotary_interleaved": interleaved}


def append_kv() -> Arguments:
    batch, heads, rows = (random.choice((1, 2, 3)) for _ in range(3))
    dim, dim_v = (random.choice((1, 3, 8, 64)) for _ in range(2))
    dtype, paged = random.choice(DTYPES), random.random() < 0.5
    slots, slot_rows, columns = (9, random.choice((1, 4, 16)), 20) if paged else (batch, 20, 1)
    a = {"key_cache": tensor((slots, heads, slot_rows, dim), dtype), "key": tensor((batch, heads, rows, dim), dtype)}
    a |= {"value_cache": tensor((slots, heads, slot_rows, dim_v), dtype)}
    a |= {"value": tensor((batch, heads, rows, dim_v), dtype), "kv_lens": lengths(batch, slot_rows * columns - rows)}
    a["block_table"] = torch.randint(9, (batch, columns), dtype=random.choice(INDICES)) if paged else None
    tables = rotary_tables(dtype, slot_rows * columns, dim)
    return a | (tables if random.random() < 0.5 else tables | {"rotary_cos": None, "rotary_sin": None})


def rotary() -> Arguments:
    query = tensor(tuple(random.choice((1, 3, 8)) for _ in range(4)), random.choice(DTYPES))
    a = {"query": query, "positions": lengths(query.size(0), 20), "same_position": random.random() < 0.5}
    return a | rotary_tables(query.dtype, 20 + query.size(2), query.size(3))


def spoil_tensor(x: Tensor) -> Tensor:
    axis = random.randrange(x.ndim) if x.ndim else 0
    size = random.choice(SIZES)
    if x.dtype in INDICES and x.ndim and x.numel() and x.is_contiguous() and random.random() < 0.6:
        x = x.clone()
        info = torch.iinfo(x.dtype)
        x.view(-1)[random.randrange(x.numel())] = min(max(random.choice(INTS), info.min), info.max)
        return x
    choice = random.randrange(8)
    if choice == 0:
        return x.to(random.choice(OTHER_DTYPES))
    if choice == 1:
        return x[None]
    if choice == 2:
        return torch.empty_like(x, device="meta")
    if not x.ndim:
        return x[None]
    if choice == 3:
        return x.select(axis, 0) if x.shape[axis] else x
    if choice == 4:
        return x.transpose(axis, random.randrange(x.ndim))
    if choice == 5:  # the same values, stored apart
        return x.unsqueeze(-1).expand(*x.shape, 2).contiguous()[..., 0]
    if choice == 6:  # all at one place
        return x.narrow(axis, 0, 1).expand(x.shape) if x.shape[axis] else x
    return x.new_zeros(*x.shape[:axis], size, *x.shape[axis + 1 :])


def spoil(x: Any) -> Any:
    if isinstance(x, Tensor):
        return spoil_tensor(x)
    if isinstance(x, list) and x:
        x = list(x)
        at = random.randrange(len(x))
        x[at : at + 1] = random.choice(([], [spoil(x[at])], [spoil(x[at])], [x[at], x[at]]))
        return x
    if isinstance(x, bool):
        return not x
    if isinstance(x, float):
        return random.choice(FLOATS)
    return random.choice(INTS) if x is None or isinstance(x, int) else x


def spoil_argument(a: Arguments) -> None:
    name = random.choice(list(a))
    if name.startswith("grad_") and a[name] is None:
        return
    if name in OPTIONAL and (a[name] is None or random.random() < 0.2):
        a[name] = None if a[name] is not None else lengths(random.choice((1, 2, 3)), 5)
        return
    a[name] = spoil(a[name])


def main(calls: int = 2000, seed: int = 0) -> None:
    results: Counter[str] = Counter()
    for call in range(calls):
        random.seed(f"{seed} {call}")
        torch.manual_seed(call)
        make = random.choice((attention, attention, attention_backward, merge, merge_backward, append_kv, rotary))
        arguments = make()
        spoilt = random.choice((0, 1, 1, 2, 3))
        for _ in range(spoilt):
            spoil_argument(arguments)
        if "-v" in sys.argv:
            print(call, make.__name__, end=" ", flush=True)  # a sanitizer may stop at this one
        try:
            getattr(torch.ops.flashsoftmax, make.__name__)(**arguments)
            result, message = "returned", ""
        except (ValueError, TypeError, IndexError, RuntimeError) as error:
            if not spoilt:
                raise
            result, message = type(error).__name__, str(error).splitlines()[0]
        if "-v" in sys.argv:
            print(result, message)
        results[f"{make.__name__}: {result}"] += 1
    print("\n".join(f"{count:6} {result}" for result, count in sorted(results.items())))


if __name__ == "__main__":
    main(*(int(x) for x in sys.argv[1:] if x != "-v"))
