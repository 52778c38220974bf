"""Counts the bytes that the CUDA kernels move while the interpreter of tests/ executes them on the CPU."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from flashsoftmax.library import ARGUMENTS

from .command import number
from .shapes import DTYPES, Shape
from .traffic_model import Kernel, ours

Case = tuple[Shape, str]


def unavailable() -> str | None:
    """Why nothing can be counted here; None if it can."""
    try:
        reason: str | None = import_module("tests.interpreter").unavailable()
    except ImportError as error:
        return f"tests/interpreter does not import ({error}); run from the root of the repository"
    return reason


def cases(quick: bool) -> list[Case]:
    """All masks, grouped heads, lengths that end within a tile, each tile size, one split and several."""
    shapes = [
        Shape("forward", 1, 1, 1, 256, 256, 64),
        Shape("forward", 1, 1, 1, 256, 256, 64, True),
        Shape("decode", 1, 4, 1, 1, 600, 64),
        Shape("decode", 1, 4, 1, 1, 2100, 64),
    ]
    more = [
        Shape("forward", 1, 1, 1, 2048, 2048, 128, True),
        Shape("forward", 1, 1, 1, 384, 384, 64, True, 100),
        Shape("forward", 1, 4, 2, 150, 190, 128, True),
        Shape("forward", 2, 2, 1, 100, 300, 72),
        Shape("forward", 1, 1, 1, 70, 90, 256, True),
        Shape("decode", 2, 8, 2, 1, 1500, 128),
        Shape("decode", 1, 4, 1, 9, 1200, 80, True, 700),
    ]
    found = [(shape, "bfloat16") for shape in (shapes if quick else shapes + more)]
    return found if quick else [*found, (shapes[1], "float32"), (more[1], "float32"), (shapes[3], "float32")]


def count(shape: Shape, dtype: str) -> list[dict[str, Any]]:
    """For each kernel of the call: the bytes of the model, and the bytes counted."""
    interpreter = import_module("tests.interpreter")
    operators = interpreter.operators()
    query, key, value, _ = shape.inputs(DTYPES[dtype], "cpu")
    arguments = dict.fromkeys(ARGUMENTS["attention"]) | {"query": query, "key": key, "value": value}
    arguments |= {"max_seqlen_q": shape.queries, "max_seqlen_k": shape.keys}
    arguments |= {"scale": 1 / math.sqrt(shape.dim), "softcap": 0.0, "dropout_p": 0.0}
    arguments |= {"window_left": shape.window, "window_right": 0 if shape.causal else None}
    with interpreter.session() as run:
        operators.attention(**arguments)
    kernels = ours(shape, DTYPES[dtype])
    return [record(shape, dtype, *pair) for pair in zip(kernels, run.launches, strict=True)]


def record(shape: Shape, dtype: str, kernel: Kernel, launched: Any) -> dict[str, Any]:
    model = {
        "model_asked_read": sum(moved.asked for moved in kernel.reads.values()),
        "model_asked_written": sum(moved.asked for moved in kernel.writes.values()),
        "model_distinct_read": sum(moved.distinct for moved in kernel.reads.values()),
        "model_distinct_written": sum(moved.distinct for moved in kernel.writes.values()),
    }
    counted = {
        "counted_asked_read": launched.bytes_read,
        "counted_asked_written": launched.bytes_written,
        "counted_distinct_read": launched.distinct_bytes_read,
        "counted_distinct_written": launched.distinct_bytes_written,
    }
    return {
        "shape": str(shape),
        "dtype": dtype,
        "kernel": kernel.name,
        "launched": launched.kernel,
        **model,
        **counted,
        "agree": list(model.values()) == list(counted.values()),
        "sectors": launched.sectors,
        "ideal_sectors": launched.ideal_sectors,
        "instructions": launched.instructions,
        "mmas": launched.mmas,
    }


def rows(results: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    header = ["counted", "dtype", "kernel", "asked: read", "asked: written", "distinct: read", "distinct: written"]
    header += ["as predicted", "32-byte sectors", "ideal sectors"]
    counts = ("counted_asked_read", "counted_asked_written", "counted_distinct_read", "counted_distinct_written")
    return header, [
        [
            r["shape"],
            r["dtype"],
            r["kernel"],
            *(f"{r[name]:,}" for name in counts),
            "to the byte" if r["agree"] else "NO",
            number(r["sectors"]),
            number(r["ideal_sectors"]),
        ]
        for r in results
    ]
