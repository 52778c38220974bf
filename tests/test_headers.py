"""csrc/softmax.h, mask.h and dropout.h themselves: compiled on their own, against Python's State and brute force."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import shutil
import subprocess
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import reference
from flashsoftmax import State, dropout_mask

SOURCE = Path(__file__).with_name("headers.cpp")
WARNINGS = ["-Wall", "-Wextra", "-Werror"]
SKIP, PARTIAL, FULL = range(3)
INF = math.inf


def tool(name: str, *places: str | None) -> str:
    path = shutil.which(name, path=os.pathsep.join(filter(None, (*places, os.environ.get("PATH")))))
    return path or pytest.skip(f"no {name} on this machine")


def compile_with(*command: str | Path) -> None:
    environment = {name: x for name, x in os.environ.items() if name != "LD_PRELOAD"}  # of a sanitizer
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("headers") / "headers.so"
    compiler = os.environ.get("CXX") or tool("g++")
    compile_with(*compiler.split(), "-std=c++17", "-O2", *WARNINGS, "-shared", "-fPIC", SOURCE, "-o", library)
    loaded = ctypes.CDLL(str(library))
    for name in ("first", "end", "first_query", "end_query", "unbounded", "cell_queries", "cell_keys"):
        getattr(loaded, name).restype = ctypes.c_int64
    for name in ("limit", "kept"):
        getattr(loaded, name).restype = ctypes.c_uint32
    return loaded


def test_both_headers_compile_for_host_and_device(tmp_path: Path) -> None:
    home = os.environ.get("CUDA_HOME")
    nvcc = tool("nvcc", home and f"{home}/bin", "/usr/local/cuda/bin")
    warnings = ["-Werror", "all-warnings", "-Xcompiler", ",".join(WARNINGS)]
    compile_with(nvcc, "-x", "cu", "-std=c++17", "-c", *warnings, SOURCE, "-o", tmp_path / "headers.o")


# --- softmax.h ---

TYPES = {torch.float32: (ctypes.c_float, "float"), torch.float64: (ctypes.c_double, "double")}


def attend(headers: ctypes.CDLL, s: torch.Tensor, v: torch.Tensor, block: int, split: bool) -> list[float]:
    """[m, l, output, lse] of one row."""
    ctype, suffix = TYPES[s.dtype]
    result = torch.empty(4, dtype=s.dtype)
    pointers = [ctypes.cast(x.data_ptr(), ctypes.POINTER(ctype)) for x in (s, v, result)]
    n, size = ctypes.c_int64(len(s)), ctypes.c_int64(block)
    getattr(headers, f"attend_{suffix}")(*pointers[:2], n, size, ctypes.c_bool(split), pointers[2])
    values: list[float] = result.tolist()
    return values


@pytest.mark.parametrize("split", [False, True], ids=["running", "merged"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shift", [0.0, -300.0, -5e4, 1e5])
def test_recurrence_is_the_same_as_state(headers: ctypes.CDLL, dtype: torch.dtype, shift: float, split: bool) -> None:
    torch.manual_seed(0)
    scores = (shift + 30 * torch.randn(1000, dtype=torch.float64)).to(dtype)
    values = torch.randn(1000, dtype=dtype)
    scores[128:192] = -INF
    tolerance = 64 * torch.finfo(dtype).eps
    for peak in (0, 500, 999):
        scores[peak] = shift + 120
        for block in (1, 7, 64, 1000):
            blocks = zip(scores.split(block), values[:, None].split(block), strict=True)
            state = functools.reduce(State.merge, (State.of(s, v) for s, v in blocks))
            m, l, output, lse = attend(headers, scores, values, block, split)  # noqa: E741
            assert state.output.item() == pytest.approx(output, rel=tolerance)
            assert state.lse.item() == pytest.approx(lse, rel=tolerance)
            if not split:
                assert m == state.m
                assert state.l.item() == pytest.approx(l, rel=tolerance)


@pytest.mark.parametrize("split", [False, True], ids=["running", "merged"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_guard_swallows_no_nan(headers: ctypes.CDLL, dtype: torch.dtype, split: bool) -> None:
    values = torch.arange(1, 7, dtype=dtype)
    masked = torch.full((6,), -INF, dtype=dtype)
    for block in (1, 2, 6):
        assert attend(headers, masked, values, block, split)[2:] == [0, -INF]
        for at in range(6):
            one, nan = masked.clone(), masked.clone()
            one[at], nan[at] = -3, math.nan
            assert attend(headers, one, values, block, split)[2:] == [at + 1, -3]
            assert all(math.isnan(x) for x in attend(headers, nan, values, block, split)[2:])
            nan = torch.zeros_like(nan).index_fill(0, torch.tensor(at), math.nan)
            assert all(math.isnan(x) for x in attend(headers, nan, values, block, split)[2:])
    assert attend(headers, masked[:0], values[:0], 1, split)[2:] == [0, -INF]


def test_largest_weight_is_exactly_one(headers: ctypes.CDLL) -> None:
    """A row of scores near 1e11 keeps its output: no change of units moves its maximum."""
    for dtype in TYPES:
        scores = torch.tensor([1.41767e11], dtype=dtype)
        score = scores.item()
        assert attend(headers, scores, torch.ones(1, dtype=dtype), 1, False) == [score, 1, 1, score]


# --- mask.h: scores ---


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("softcap", [0.0, 2.5])
def test_score(headers: ctypes.CDLL, dtype: torch.dtype, softcap: float) -> None:
    ctype, suffix = TYPES[dtype]
    result = (ctype * 2)()
    for dot, scale, slope, distance, bias in (
        (3.0, 0.5, 0.0, 7.0, 0.0),
        (3.0, 0.5, 0.25, 7.0, -1.5),
        (-8.0, 0.125, 0.3, -5.0, 0.75),  # a key after the query: still pulled down
        (-8.0, 0.125, 0.3, -2.5, 0.0),  # not the integer abs
        (-8.0, 0.125, 0.3, 0.0, 0.0),
    ):
        getattr(headers, f"score_{suffix}")(*map(ctype, (dot, scale, softcap, slope, distance, bias)), result)
        capped = softcap * math.tanh(dot * scale / softcap) if softcap else dot * scale
        derivative = 1 - math.tanh(dot * scale / softcap) ** 2 if softcap else 1
        expected = (capped - slope * abs(distance) + bias, derivative)
        assert tuple(result) == pytest.approx(expected, rel=8 * torch.finfo(dtype).eps)


# --- mask.h: the band ---


Rule = tuple[int, int, int, int]  # q_offset, left, right, kv_len


@st.composite
def bands(draw: st.DrawFn) -> Rule:
    bound = st.one_of(st.integers(0, 12), st.just(1 << 60))
    return draw(st.integers(-20, 40)), draw(bound), draw(bound), draw(st.integers(0, 24))


def visible(i: int, j: int, band: Rule) -> bool:
    q_offset, left, right, kv_len = band
    return i + q_offset - left <= j <= i + q_offset + right and 0 <= j < kv_len


@hypothesis.settings(max_examples=500)
@hypothesis.given(bands(), st.integers(0, 10), st.integers(1, 8), st.integers(0, 30), st.integers(1, 12))
def test_verdict(headers: ctypes.CDLL, band: Rule, i0: int, rows: int, j0: int, keys: int) -> None:
    i1, j1 = i0 + rows, j0 + keys
    seen = [visible(i, j, band) for i in range(i0, i1) for j in range(j0, j1)]
    verdict = headers.verdict(*map(ctypes.c_int64, (i0, i1, j0, j1, *band)))
    if verdict == SKIP:
        assert not any(seen)
    assert (verdict == FULL) == all(seen)
    if j1 <= band[3]:  # a tile cut to the keys there are: nothing that could be skipped is looked at
        assert (verdict == SKIP) == (not any(seen))


@hypothesis.given(bands(), st.integers(0, 10))
def test_first_and_end(headers: ctypes.CDLL, band: Rule, i: int) -> None:
    first, end = (f(*map(ctypes.c_int64, (i, *band))) for f in (headers.first, headers.end))
    assert [j for j in range(40) if first <= j < end] == [j for j in range(40) if visible(i, j, band)]


@hypothesis.given(bands(), st.integers(0, 23), st.integers(1, 12))
def test_first_and_end_query(headers: ctypes.CDLL, band: Rule, j0: int, keys: int) -> None:
    band = (*band[:3], 24)  # the keys of a tile are there
    j1 = min(j0 + keys, 24)
    first, end = (f(*map(ctypes.c_int64, (j, *band))) for f, j in ((headers.first_query, j0), (headers.end_query, j1)))
    seen = [i for i in range(70) if any(visible(i, j, band) for j in range(j0, j1))]
    assert [i for i in range(70) if first <= i < end] == seen


@hypothesis.settings(max_examples=500)
@hypothesis.given(bands(), st.data())
def test_verdict_of_band_and_map(headers: ctypes.CDLL, band: Rule, data: st.DataObject) -> None:
    queries, keys = headers.cell_queries(), headers.cell_keys()
    band = (band[0], *band[1:3], 4 * keys)
    heads, rows, columns = (data.draw(st.sampled_from([1, n])) for n in (2, 3, 4))  # 1: broadcast
    cells = data.draw(st.lists(st.sampled_from([SKIP, PARTIAL, FULL]), min_size=24, max_size=24))
    strides = (rows * columns if heads > 1 else 0, columns if rows > 1 else 0, int(columns > 1))
    i0, j0 = data.draw(st.integers(0, 3 * queries - 1)), data.draw(st.integers(0, 4 * keys - 1))
    i1, j1 = data.draw(st.integers(i0 + 1, 3 * queries)), data.draw(st.integers(j0 + 1, 4 * keys))
    array = (ctypes.c_uint8 * 24)(*cells)
    verdict = headers.verdict_of_map(array, *map(ctypes.c_int64, (heads, *strides, i0, i1, j0, j1, *band)))
    met = {
        cells[h * strides[0] + i * strides[1] + j * strides[2]]
        for h in range(heads)
        for i in range(i0 // queries, (i1 - 1) // queries + 1)
        for j in range(j0 // keys, (j1 - 1) // keys + 1)
    }
    in_band = headers.verdict(*map(ctypes.c_int64, (i0, i1, j0, j1, *band)))
    assert (verdict == SKIP) == (in_band == SKIP or met == {SKIP})
    assert (verdict == FULL) == (in_band == FULL and met == {FULL})


def test_unbounded_does_not_overflow(headers: ctypes.CDLL) -> None:
    far = headers.unbounded()
    assert far == 1 << 60
    for q_offset in (-far, 0, far):
        for left, right in ((far, far), (far, 0), (0, far)):
            verdict = headers.verdict(*map(ctypes.c_int64, (0, 1 << 40, 0, 64, q_offset, left, right, 64)))
            seen = [visible(i, j, (q_offset, left, right, 64)) for i in (0, (1 << 40) - 1) for j in (0, 63)]
            assert verdict == (FULL if all(seen) else PARTIAL if any(seen) else SKIP)


# --- dropout.h ---

KNOWN_ANSWERS = [  # of Random123 (Salmon et al., 2011): counter, key, words of Philox-4x32-10
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(
    headers: ctypes.CDLL, counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    result = (ctypes.c_uint32 * 4)()
    headers.words((ctypes.c_uint32 * 4)(*counter), (ctypes.c_uint32 * 2)(*key), result)
    assert tuple(result) == words
    assert reference.philox(counter, key) == words


@pytest.mark.parametrize("p", [2.0**-40, 0.1, 0.5, 0.9, 1 - 2.0**-40, 1.0])
def test_limit(headers: ctypes.CDLL, p: float) -> None:
    """limit + 1 words of 2^32 drop a weight."""
    assert headers.limit(ctypes.c_double(p)) + 1 == max(1, round(p * 2**32))


@pytest.mark.parametrize("seed", [(0, 0), (1, 0), (0, 1), (-1, -(2**63)), (2**62 + 1, 2**33)])
def test_kept_weights_are_those_of_the_mask(headers: ctypes.CDLL, seed: tuple[int, int]) -> None:
    shape, p = (2, 3, 4, 11), 0.4
    mask = dropout_mask(*shape, p, torch.tensor(seed))
    assert torch.equal(mask, reference.kept(shape, p, *seed))
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, shape)).tolist():
        bits = headers.kept(
            *map(ctypes.c_int64, (*seed, b, h)), ctypes.c_double(p), *map(ctypes.c_uint32, (i, j // 4 * 4))
        )
        assert bool(bits >> j % 4 & 1) == mask[b, h, i, j]
