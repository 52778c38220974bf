"""Shows the bytes that attention moves: predicted by formula, counted in the kernels, and measured."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from .support import counted, style, watched
from .support.command import Run, markdown_table, number, parser, size, table
from .support.contenders import DEFAULT, OURS
from .support.once import task
from .support.roofs import GPUS, Roof, this_cpu
from .support.shapes import DTYPES, Shape
from .support.traffic_model import PIPELINES, Kernel

LENGTHS = (512, 2048, 8192, 32768, 131072)
DIMS = (64, 128)
HEADS_KV = (32, 8)
WINDOW = 4095
KINDS = ("full", "causal", "windowed", "decode")
MEASURED_LENGTHS = (1024, 2048, 4096, 8192, 16384)
MEASURED = (OURS, DEFAULT, "torch math", "naive")
COLORS = (style.OURS, style.PEER, style.MATH, style.NAIVE)
LOOKS = {
    "unfused": (style.NAIVE, "-"),
    "two-pass": (style.MATH, "-"),
    OURS: (style.OURS, "-"),
}


def shape_of(kind: str, length: int, dim: int, heads_kv: int) -> Shape:
    if kind == "decode":
        return Shape("decode", 1, 32, heads_kv, 1, length, dim)
    return Shape(
        "forward", 1, 32, heads_kv, length, length, dim, kind != "full", WINDOW if kind == "windowed" else None
    )


def predicted(
    kind: str, shape: Shape, dtype: str, pipeline: str, kernels: Sequence[Kernel], roofs: Sequence[Roof]
) -> dict[str, Any]:
    distinct, flops = sum(k.distinct for k in kernels), sum(k.flops for k in kernels)
    intensity = flops / distinct
    return {
        "case": kind,
        **asdict(shape),
        "dtype": dtype,
        "pipeline": pipeline,
        "distinct_bytes": distinct,
        "asked_bytes": sum(k.asked for k in kernels),
        "flops": flops,
        "flop_per_byte": intensity,
        **{f"{roof.name} bound by": roof.side(intensity, dtype) for roof in roofs},
        # Kernels run one after another, so their times add up.
        **{f"{roof.name} floor, s": sum(roof.floor(k.distinct, k.flops, dtype) for k in kernels) for roof in roofs},
    }


def model(dtypes: Sequence[str], lengths: Sequence[int], roofs: Sequence[Roof]) -> Iterator[dict[str, Any]]:
    for dtype, kind, heads_kv, dim, length in product(dtypes, KINDS, HEADS_KV, DIMS, lengths):
        shape = shape_of(kind, length, dim, heads_kv)
        for pipeline, kernels_of in PIPELINES.items():
            yield predicted(kind, shape, dtype, pipeline, kernels_of(shape, DTYPES[dtype]), roofs)


def measure(run: Run, dtype: str) -> list[dict[str, Any]]:
    """Peak memory, and bytes from the counters that can be read on this machine."""
    device = run.options.device
    lengths = MEASURED_LENGTHS[:2] if run.options.quick else MEASURED_LENGTHS
    shapes = [Shape("forward", 1, 1, 1, length, length, 64) for length in lengths]
    shapes += [Shape("decode", 1, 32, 8, 1, length, 128) for length in lengths]
    no_perf, no_ncu = watched.no_perf(), watched.no_ncu(device)
    results = []
    for shape, contender in run.track("measuring", list(product(shapes, MEASURED)), lambda x: f"{x[1]}, {x[0]}"):
        told, without = (task(shape, dtype, contender, device, run.options.threads, call) for call in (True, False))
        found = {
            "peak memory": watched.peak_memory(told),
            "last-level cache misses": watched.counted_by_perf(told, without)
            if no_perf is None
            else watched.Measured(None, no_perf),
            "DRAM, by ncu": watched.counted_by_ncu(told) if no_ncu is None else watched.Measured(None, no_ncu),
        }
        for what, measured in found.items():
            named = {"what": what, "contender": contender, "dtype": dtype}
            results.append({"machine": str(run.machine), **named, **asdict(shape), **asdict(measured)})
    return results


def model_rows(
    results: Sequence[Mapping[str, Any]], lengths: Sequence[int], dims: Sequence[int] = DIMS
) -> tuple[list[str], list[list[str]]]:
    """The table of predictions."""
    roofs = [key.removesuffix(" bound by") for key in results[0] if key.endswith(" bound by")]
    header = ["predicted", "dtype", "heads q/kv", "dim", "tokens", "unfused", "two-pass", "ours"]
    header += ["unfused / ours", "ours, asked", "FLOP/byte, unfused", "FLOP/byte, ours", "ours is limited by"]
    header += ["H200 floor, unfused", "H200 floor, ours"]
    rows = []
    count = len(PIPELINES)
    for at in range(0, len(results), count):
        unfused, two_pass, fused = results[at : at + count]
        if fused["keys"] not in lengths or fused["dim"] not in dims:
            continue
        by_memory = [roof for roof in roofs if fused[f"{roof} bound by"] == "memory"]
        by = "arithmetic" if not by_memory else "memory" if by_memory == roofs else f"memory: {', '.join(by_memory)}"
        rows.append(
            [
                fused["case"],
                fused["dtype"],
                f"{fused['heads']}/{fused['heads_kv']}",
                f"{fused['dim']}",
                f"{fused['keys']:,}",
                size(unfused["distinct_bytes"]),
                size(two_pass["distinct_bytes"]),
                size(fused["distinct_bytes"]),
                f"{number(unfused['distinct_bytes'] / fused['distinct_bytes'])}x",
                size(fused["asked_bytes"]),
                number(unfused["flop_per_byte"]),
                number(fused["flop_per_byte"]),
                by,
                duration(unfused["H200 floor, s"]),
                duration(fused["H200 floor, s"]),
            ]
        )
    return header, rows


def duration(seconds: float) -> str:
    return f"{number(seconds * 1e3)} ms" if seconds >= 1e-3 else f"{number(seconds * 1e6)} us"


def measured_rows(results: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Bytes beyond the inputs: a row per shape, a column per contender. What could not be measured has no row."""
    found: dict[tuple[str, str, str], dict[str, str]] = {}
    for r in results:
        if r["bytes"] is not None:
            key = (r["what"], r["kind"], f"{r['queries']} x {r['keys']}")
            found.setdefault(key, {})[r["contender"]] = size(r["bytes"])
    rows = [[*key, *(row.get(name, "") for name in MEASURED)] for key, row in found.items()]
    return ["measured", "kind", "queries x keys", *MEASURED], rows


def absent(results: Sequence[Mapping[str, Any]]) -> list[str]:
    found = dict.fromkeys((r["what"], r["absent"]) for r in results if r["absent"])
    return [f"not measured: {what}: {reason}" for what, reason in found]


def draw_bytes(axes: Axes, results: Sequence[Mapping[str, Any]], kind: str) -> None:
    for name, (color, _) in LOOKS.items():
        line = [r for r in results if r["pipeline"] == name and r["case"] == kind]
        keys = [r["keys"] for r in line]
        axes.plot(keys, [r["distinct_bytes"] / 2**20 for r in line], color=color, marker="o", markersize=4)
        axes.plot(keys, [r["asked_bytes"] / 2**20 for r in line], color=color, linestyle=(0, (1, 1.5)), linewidth=1.2)
    style.powers(axes, {r["keys"] for r in results})
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda x, _: size(x * 2**20))
    axes.set_title(f"{kind}, predicted", loc="left")
    axes.set_xlabel("tokens")


def draw_roofs(axes: Axes, results: Sequence[Mapping[str, Any]], roofs: Sequence[Roof], dtype: str) -> None:
    """Plots the attainable rate over FLOP per byte; the cases are marked on the roof of the H200."""
    xs = [2.0**x for x in range(-1, 18)]
    named: dict[float, list[str]] = {}
    for roof in roofs:
        xs_here = sorted([*xs, roof.ridge(dtype)])
        rates = [min(roof.peak[dtype], x * roof.bandwidth) / 1e12 for x in xs_here]
        axes.plot(xs_here, rates, color=style.TEXT, linewidth=1, alpha=0.8)
        named.setdefault(rates[-1], []).append(f"{roof.name} {roof.ridge(dtype):.0f}")
    for rate, names in named.items():
        axes.text(xs[-1] * 1.3, rate, ", ".join(names), fontsize=8, va="center")
    on = next(roof for roof in roofs if roof.name == "H200")
    for name, (color, _) in LOOKS.items():
        for r in results:
            if r["pipeline"] == name and r["case"] in ("full", "decode"):
                x = r["flop_per_byte"]
                marker = "o" if r["case"] == "full" else "s"
                rate = min(on.peak[dtype], x * on.bandwidth) / 1e12
                axes.plot([x], [rate], color=color, marker=marker, markersize=5, linestyle="none", alpha=0.8)
    axes.set_xscale("log", base=10)
    axes.set_yscale("log", base=10)
    axes.set_title("roofs and ridges; circles full, squares decode", loc="left")
    axes.set_xlabel("FLOP per byte")
    axes.set_ylabel("TFLOP/s")


def model_picture(results: Sequence[Mapping[str, Any]], roofs: Sequence[Roof], dtype: str, path: Path) -> None:
    some = [r for r in results if r["dtype"] == dtype and r["dim"] == 128 and r["heads_kv"] == 8]
    caption = f"{dtype}, 32 heads on 8, dim 128. Predicted, by formula; solid lines count each byte once per kernel"
    with style.picture(path, 2, 2, caption, size=(4.8, 2.7)) as (figure, grid):
        for axes, kind in zip((grid[0][0], grid[0][1], grid[1][0]), ("full", "windowed", "decode"), strict=True):
            draw_bytes(axes, some, kind)
        draw_roofs(grid[1][1], some, roofs, dtype)
        style.legend(figure, {**LOOKS, "asked by all threads": (style.TEXT, (0, (1, 1.5)))})


def measured_picture(results: Sequence[Mapping[str, Any]], machine: str, path: Path) -> None:
    """Plots the peak memory of the forward."""
    looks: dict[str, tuple[str, Any]] = dict(zip(MEASURED, ((c, "-") for c in COLORS), strict=True))
    some = [r for r in results if r["kind"] == "forward" and r["what"] == "peak memory" and r["bytes"]]
    with style.picture(path, 1, 1, f"measured: {machine}", size=(7, 3)) as (_, ((axes,),)):
        for name, (color, _) in reversed(looks.items()):
            line = [r for r in some if r["contender"] == name]
            heights = [r["bytes"] / 2**20 for r in line]
            axes.plot([r["keys"] for r in line], heights, color=color, marker="o", markersize=4)
        style.powers(axes, {r["keys"] for r in some})
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda x, _: size(x * 2**20))
        axes.set_title(f"peak memory beyond the inputs, {results[0]['dtype']}, 1 head, dim 64", loc="left")
        axes.set_xlabel("tokens")
        style.legend(axes, looks)


def roof_lines(roofs: Sequence[Roof], dtypes: Sequence[str]) -> Iterator[str]:
    for roof in roofs:
        of = "; ".join(
            f"{d} {number(roof.peak[d] / 1e12)} TFLOP/s, ridge {roof.ridge(d):.0f} FLOP/byte" for d in dtypes
        )
        yield f"{roof.name}: {number(roof.bandwidth / 1e9)} GB/s; {of} ({roof.source})"


def model_page(record: Mapping[str, Any]) -> Iterator[str]:
    """A part of docs/results.md, as are the pages below."""
    some = [r for r in record["results"] if r["dtype"] == "bfloat16"] or record["results"]
    yield from markdown_table(*model_rows(some, (2048, 8192, 131072), dims=(128,)))


def roofs_page(record: Mapping[str, Any]) -> Iterator[str]:
    header = ["machine", "dtype", "GB/s", "TFLOP/s", "ridge, FLOP/byte", "source"]
    rows = [
        [r["name"], r["dtype"], number(r["bandwidth"] / 1e9), number(r["peak"] / 1e12), number(r["ridge"]), r["source"]]
        for r in record["results"]
    ]
    yield from markdown_table(header, rows, left=2)


def counted_page(record: Mapping[str, Any]) -> Iterator[str]:
    yield from markdown_table(*counted.rows(record["results"]), left=3)


def measured_page(record: Mapping[str, Any]) -> Iterator[str]:
    yield from markdown_table(*measured_rows(record["results"]), left=3)
    yield ""
    yield from (f"- {line}" for line in absent(record["results"]))


def main(argv: Sequence[str]) -> None:
    options = parser("traffic")
    options.set_defaults(dtype=["bfloat16"])
    run = Run.start(options, argv)
    dtypes, quick = run.options.dtype, run.options.quick
    roofs = [*GPUS, this_cpu()]
    run.say(*roof_lines(roofs, dtypes))
    run.write("traffic-roofs", [
        {**asdict(roof), "dtype": d, "peak": roof.peak[d], "ridge": roof.ridge(d)} for roof in roofs for d in dtypes
    ])  # fmt: skip

    results = list(model(dtypes, LENGTHS[:3] if quick else LENGTHS, roofs))
    path = run.write("traffic-model", results)
    model_picture(results, roofs, dtypes[0], path)
    run.console.width = 220
    run.console.print(table(*model_rows(results, LENGTHS, (128,) if quick else DIMS)))
    run.wrote(path)

    reason = counted.unavailable()
    if reason is None:
        cases = run.track("counting", counted.cases(quick), lambda case: f"{case[1]}, {case[0]}")
        counts = [kernel for case in cases for kernel in counted.count(*case)]
        path = run.write("traffic-counted", counts)
        run.console.print(table(*counted.rows(counts), left=3))
        run.wrote(path)
    else:
        run.say(f"not counted: {reason}")

    measurements = measure(run, dtypes[0])
    path = run.write(f"traffic-{run.options.device}-measured", measurements)
    measured_picture(measurements, str(run.machine), path)
    run.console.print(table(*measured_rows(measurements), left=3))
    run.say(*absent(measurements))
    run.wrote(path)


if __name__ == "__main__":
    main(sys.argv[1:])
