"""Peers on the CPU that need not be installed: zentorch, the CPU kernels of vLLM, and OpenVINO.

What they ask for beside the call, a filled cache or a compiled model, is made by the first call and kept.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .shapes import Shape

PAGE = 128
"""Keys per page of vLLM's cache."""


def zentorch(query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
    import_module("zentorch")
    _refuse(shape, equal_heads=True, top_left=True)
    out: Tensor = torch.ops.zentorch.zentorch_sdpa(query, key, value, 0.0, shape.causal)[0]
    return out


def vllm(query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
    """vLLM reads keys and values from pages in a layout of its own. Filling them is not timed, nor is the scheduler."""
    _refuse(shape)
    cache = _filled_cache(key, value, shape)
    rows = query.transpose(1, 2).flatten(0, 1)
    out = torch.empty(rows.shape, dtype=rows.dtype)
    torch.ops._C.cpu_attention_with_kv_cache(
        rows,
        *cache.pages,
        out,
        cache.starts,
        cache.lengths,
        shape.dim**-0.5,
        shape.causal,
        None,
        -1,
        cache.table,
        0.0,
        cache.schedule,
        None,
        None,
    )
    per_sequence: Tensor = out.unflatten(0, (shape.batch, shape.queries))
    return per_sequence.transpose(1, 2)


def openvino(query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
    _refuse(shape, equal_heads=True, top_left=True)
    if shape.kind == "decode":
        raise NotImplementedError("the benchmark calls OpenVINO for prefill only")
    return _compiled(tuple(query.shape), tuple(key.shape), query.dtype, shape.causal, torch.get_num_threads())(
        query, key, value
    )


PEERS = {"zentorch": zentorch, "vllm": vllm, "openvino": openvino}


def _refuse(shape: Shape, equal_heads: bool = False, top_left: bool = False) -> None:
    """Raises for shapes that the benchmark does not give these peers."""
    if shape.kind == "forward + backward":
        raise NotImplementedError("it has no backward")
    if shape.shown not in ("", "causal"):
        raise NotImplementedError("the benchmark calls it without a window or a mask only")
    if equal_heads and shape.group > 1:
        raise NotImplementedError("it wants as many key heads as query heads")
    if top_left and shape.causal and shape.queries != shape.keys:
        raise NotImplementedError("it aligns the first query with the first key")


class _Cache:
    """Keys and values in vLLM's pages, sequence after sequence, and what its kernel must know of them."""

    def __init__(self, key: Tensor, value: Tensor, shape: Shape) -> None:
        _load_vllm()
        isa = "amx" if key.dtype == torch.bfloat16 and torch.cpu._init_amx() else "vec"
        if shape.dim % 32:
            isa = "vec16"
        columns = -(-shape.keys // PAGE)
        size = (shape.batch * columns, shape.heads_kv, PAGE, shape.dim)
        self.pages = torch.zeros(size, dtype=key.dtype), torch.zeros(size, dtype=key.dtype)
        self.table = torch.arange(size[0], dtype=torch.int32).view(shape.batch, columns)
        first_slot = torch.arange(shape.batch)[:, None] * columns * PAGE
        slots = (first_slot + torch.arange(shape.keys)).flatten()
        rows = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in (key, value))
        torch.ops._C.cpu_attn_reshape_and_cache(*rows, *self.pages, slots, isa)
        self.lengths = torch.full((shape.batch,), shape.keys, dtype=torch.int32)
        self.starts = torch.arange(shape.batch + 1, dtype=torch.int32) * shape.queries
        self.schedule = torch.ops._C.get_scheduler_metadata(
            shape.batch,
            shape.heads,
            shape.heads_kv,
            shape.dim,
            self.lengths,
            key.dtype,
            self.starts,
            shape.causal,
            -1,
            isa,
            True,
            None,
            "auto",
        )


_filled_cache = lru_cache(maxsize=1)(_Cache)


@cache
def _load_vllm() -> None:
    folders = getattr(find_spec("vllm"), "submodule_search_locations", None) or []
    torch.ops.load_library(str(Path(next(iter(folders))) / "_C.abi3.so"))


@lru_cache(maxsize=1)
def _compiled(
    query: tuple[int, ...], key: tuple[int, ...], dtype: torch.dtype, causal: bool, threads: int
) -> Callable[..., Tensor]:
    import numpy as np
    import openvino as ov  # type: ignore[import-not-found]
    from openvino import opset13 as ops

    kinds = {torch.float32: ov.Type.f32, torch.bfloat16: ov.Type.bf16, torch.float16: ov.Type.f16}
    kind = kinds[dtype]
    inputs = [ops.parameter(list(size), kind) for size in (query, key, key)]
    model = ov.Model([ops.scaled_dot_product_attention(*inputs, causal=causal)], inputs)
    hints = {"INFERENCE_PRECISION_HINT": kind, "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    request = ov.Core().compile_model(model, "CPU", hints).create_infer_request()

    def tensor(x: Tensor) -> Any:
        """Shares the memory of x."""
        if dtype == torch.bfloat16:
            return ov.Tensor(x.view(torch.int16).numpy().view(np.uint16), list(x.shape), kind)
        return ov.Tensor(x.numpy(), shared_memory=True)

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query)
        for index, x in enumerate((query, key, value)):
            request.set_input_tensor(index, tensor(x))
        request.set_output_tensor(0, tensor(out))
        request.infer()
        return out

    return call
