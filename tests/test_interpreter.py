"""The interpreter itself: instructions against reference results, correct kernels, and kernels with planted faults."""

import functools
import math
import re
import subprocess
import sys
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

import interpreter
from interpreter.harness import execute, kernel, lane_pointer

pytestmark = pytest.mark.skipif(interpreter.unavailable() is not None, reason=str(interpreter.unavailable()))

FIXTURES = Path(interpreter.__file__).parent / "fixtures"
SEEDS = range(4)
INF, NAN = math.inf, math.nan


# ------------------------------------------------------------------------------------------------------------ integers


def integers(dtype: torch.dtype, count: int = 256) -> torch.Tensor:
    """Random integers; half of them extremes and small numbers."""
    limits = torch.iinfo(dtype)
    edges = [limits.min, limits.min + 1, limits.max, limits.max - 1, 0, 1, 2, 3, 31, 32, 33, 63, 64]
    x = torch.randint(limits.min, limits.max, (count,), dtype=dtype)
    where = torch.randperm(count)[: count // 2]
    x[where] = torch.tensor(edges, dtype=dtype)[torch.randint(len(edges), (count // 2,))]
    return x


def wrapped(value: int, bits: int, signed: bool) -> int:
    value %= 1 << bits
    return value - (1 << bits) if signed and value >> (bits - 1) else value


def truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def bits_of(value: int, bits: int) -> str:
    return format(value % (1 << bits), f"0{bits}b")


DTYPE_OF = {16: torch.int16, 32: torch.int32, 64: torch.int64}

BINARY = {
    "add": lambda a, b, n: a + b,
    "sub": lambda a, b, n: a - b,
    "mul.lo": lambda a, b, n: a * b,
    "mul.hi": lambda a, b, n: a * b >> n,
    "div": lambda a, b, n: truncated(a, b) if b else None,
    "rem": lambda a, b, n: a - b * truncated(a, b) if b else None,
    "min": lambda a, b, n: min(a, b),
    "max": lambda a, b, n: max(a, b),
}
TERNARY = {
    "mad.lo": lambda a, b, c, n: a * b + c,
    "mad.hi": lambda a, b, c, n: (a * b >> n) + c,
    "sad": lambda a, b, c, n: abs(a - b) + c,
}
BITWISE = {"and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b}


@pytest.mark.parametrize("type", ["u16", "s16", "u32", "s32", "u64", "s64"])
class TestIntegers:
    def run(self, type, text, operands, reference, bits=None):
        bits, signed = bits or int(type[1:]), type[0] == "s"
        got = execute(text, operands, DTYPE_OF[bits]).tolist()
        values = [[wrapped(v, 8 * x.element_size(), signed) for v in x.tolist()] for x in operands]
        for result, *arguments in zip(got, *values, strict=True):
            wanted = reference(*arguments)
            if wanted is not None:
                assert wrapped(result, bits, signed) == wrapped(wanted, bits, signed), arguments

    @pytest.mark.parametrize("operation", BINARY)
    def test_binary(self, type, operation):
        n = int(type[1:])
        x = [integers(DTYPE_OF[n]) for _ in range(2)]
        self.run(type, f"{operation}.{type} {{d}}, {{a}}, {{b}};", x, lambda a, b: BINARY[operation](a, b, n))

    @pytest.mark.parametrize("operation", TERNARY)
    def test_ternary(self, type, operation):
        n = int(type[1:])
        x = [integers(DTYPE_OF[n]) for _ in range(3)]
        text = f"{operation}.{type} {{d}}, {{a}}, {{b}}, {{c}};"
        self.run(type, text, x, lambda a, b, c: TERNARY[operation](a, b, c, n))

    def test_wide(self, type):
        n = int(type[1:])
        if n == 64:
            return
        a, b, c = integers(DTYPE_OF[n]), integers(DTYPE_OF[n]), integers(DTYPE_OF[2 * n])
        self.run(type, f"mul.wide.{type} {{d}}, {{a}}, {{b}};", [a, b], lambda a, b: a * b, 2 * n)
        text = f"mad.wide.{type} {{d}}, {{a}}, {{b}}, {{c}};"
        self.run(type, text, [a, b, c], lambda a, b, c: a * b + c, 2 * n)

    def test_shifts(self, type):
        n = int(type[1:])
        a, b = integers(DTYPE_OF[n]), torch.randint(0, 70, (256,), dtype=torch.int32)
        self.run(type, f"shr.{type} {{d}}, {{a}}, {{b}};", [a, b], lambda a, b: a >> b)
        self.run(type, f"shl.b{n} {{d}}, {{a}}, {{b}};", [a, b], lambda a, b: a << b)

    def test_bitwise(self, type):
        n = int(type[1:])
        x = [integers(DTYPE_OF[n]) for _ in range(2)]
        for name, reference in BITWISE.items():
            self.run(type, f"{name}.b{n} {{d}}, {{a}}, {{b}};", x, reference)
        self.run(type, f"not.b{n} {{d}}, {{a}};", x[:1], lambda a: ~a)
        if type[0] == "s":
            self.run(type, f"neg.{type} {{d}}, {{a}};", x[:1], lambda a: -a)
            self.run(type, f"abs.{type} {{d}}, {{a}};", x[:1], abs)

    def test_counting(self, type):
        n = int(type[1:])
        if n == 16:
            return
        a = integers(DTYPE_OF[n])
        self.run(type, f"popc.b{n} {{d}}, {{a}};", [a], lambda a: bits_of(a, n).count("1"), 32)
        self.run(type, f"clz.b{n} {{d}}, {{a}};", [a], lambda a: (bits_of(a, n) + "1").index("1"), 32)
        self.run(type, f"brev.b{n} {{d}}, {{a}};", [a], lambda a: int(bits_of(a, n)[::-1], 2))

        def leading(a):
            return n - 1 - bits_of(~a if a < 0 else a, n).index("1") if a not in (0, -1) else -1

        self.run(type, f"bfind.{type} {{d}}, {{a}};", [a], leading, 32)

    def test_fields(self, type):
        n = int(type[1:])
        if n == 16:
            return
        a = integers(DTYPE_OF[n])
        position, length = (torch.randint(0, n, (256,), dtype=torch.int32) for _ in range(2))

        def field(a, p, k):
            return wrapped(a >> p, k, type[0] == "s") if k else 0

        def inserted(a, p, k):
            mask = ((1 << k) - 1) << p
            return (5 & ~mask) | ((a << p) & mask)

        self.run(type, f"bfe.{type} {{d}}, {{a}}, {{b}}, {{c}};", [a, position, length], field)
        self.run(type, f"bfi.b{n} {{d}}, {{a}}, 5, {{b}}, {{c}};", [a, position, length], inserted)


def unsigned(x: torch.Tensor) -> list[int]:
    return [v % (1 << 8 * x.element_size()) for v in x.tolist()]


@pytest.mark.parametrize("table", [0x00, 0xE8, 0x96, 0xC0, 0x3C, 0x1B, 0xFF])
def test_lop3(table):
    x = [integers(torch.int32) for _ in range(3)]
    got = unsigned(execute(f"lop3.b32 {{d}}, {{a}}, {{b}}, {{c}}, {table};", x, torch.int32))
    for result, a, b, c in zip(got, *map(unsigned, x), strict=True):
        wanted = [table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1 for i in range(32)]
        assert result == sum(bit << i for i, bit in enumerate(wanted))


def test_prmt():
    a, b, selector = (integers(torch.int32) for _ in range(3))
    got = unsigned(execute("prmt.b32 {d}, {a}, {b}, {c};", [a, b, selector], torch.int32))
    for result, x, y, s in zip(got, unsigned(a), unsigned(b), unsigned(selector), strict=True):
        source = x.to_bytes(4, "little") + y.to_bytes(4, "little")
        nibbles = [s >> 4 * i & 15 for i in range(4)]
        wanted = [(255 if source[n & 7] & 0x80 else 0) if n & 8 else source[n] for n in nibbles]
        assert result == int.from_bytes(bytes(wanted), "little")


@pytest.mark.parametrize("mode", ["l.wrap", "l.clamp", "r.wrap", "r.clamp"])
def test_funnel_shift(mode):
    low, high, n = integers(torch.int32), integers(torch.int32), torch.randint(0, 64, (256,), dtype=torch.int32)
    got = unsigned(execute(f"shf.{mode}.b32 {{d}}, {{a}}, {{b}}, {{c}};", [low, high, n], torch.int32))
    for result, a, b, count in zip(got, unsigned(low), unsigned(high), n.tolist(), strict=True):
        count = count % 32 if "wrap" in mode else min(count, 32)
        both = b << 32 | a
        assert result == ((both << count >> 32) if mode[0] == "l" else both >> count) % (1 << 32)


def test_carry_chain():
    a, b = integers(torch.int64), integers(torch.int64)
    halves = "mov.b64 {{%r30, %r31}}, {a}; mov.b64 {{%r32, %r33}}, {b};".replace("{{", "{").replace("}}", "}")
    join = "mov.b64 {d}, {%r34, %r35};"
    got = execute(halves + "add.cc.u32 %r34, %r30, %r32; addc.u32 %r35, %r31, %r33;" + join, [a, b], torch.int64)
    assert got.equal(a + b)
    got = execute(halves + "sub.cc.u32 %r34, %r30, %r32; subc.u32 %r35, %r31, %r33;" + join, [a, b], torch.int64)
    assert got.equal(a - b)


def test_carries_of_products():
    """A 128-bit product of 64-bit numbers, from 32-bit halves."""
    a, b = integers(torch.int64), integers(torch.int64)
    text = (
        "mov.b64 {%r30, %r31}, {a}; mov.b64 {%r32, %r33}, {b};"
        "mul.lo.u32 %r34, %r30, %r32; mul.hi.u32 %r35, %r30, %r32;"
        "mad.lo.cc.u32 %r35, %r30, %r33, %r35; madc.hi.u32 %r36, %r30, %r33, 0;"
        "mad.lo.cc.u32 %r35, %r31, %r32, %r35; madc.hi.cc.u32 %r36, %r31, %r32, %r36; addc.u32 %r37, 0, 0;"
        "mad.lo.cc.u32 %r36, %r31, %r33, %r36; madc.hi.u32 %r37, %r31, %r33, %r37;"
    )
    for low, high in ((34, 35), (36, 37)):
        got = unsigned(execute(text + f"mov.b64 {{d}}, {{%r{low}, %r{high}}};", [a, b], torch.int64))
        shift = 64 * (low > 34)
        products = (x * y >> shift for x, y in zip(unsigned(a), unsigned(b), strict=True))
        assert got == [product % (1 << 64) for product in products]


def test_dot_of_bytes():
    a, b, c = (integers(torch.int32) for _ in range(3))
    got = execute("dp4a.s32.s32 {d}, {a}, {b}, {c};", [a, b, c], torch.int32)
    products = (a.view(torch.int8).long() * b.view(torch.int8).long()).view(-1, 4).sum(1)
    assert got.equal((c.long() + products).to(torch.int32))


# -------------------------------------------------------------------------------------------------------------- floats


def floats(dtype: torch.dtype, count: int = 512) -> torch.Tensor:
    """Random floats of all magnitudes; a quarter of them special values."""
    info = torch.finfo(dtype)
    edges = [
        0.0,
        -0.0,
        INF,
        -INF,
        NAN,
        1.0,
        -1.0,
        info.tiny,
        -info.tiny / 4,
        info.max,
        info.min,
        info.eps,
        0.5,
        2.5,
        3.5,
    ]
    x = (torch.randn(count, dtype=torch.float64) * 2.0 ** torch.randint(-8, 9, (count,))).to(dtype)
    where = torch.randperm(count)[: count // 4]
    x[where] = torch.tensor(edges, dtype=dtype)[torch.randint(len(edges), (count // 4,))]
    return x


def same(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.equal(got.isnan(), wanted.isnan()) and torch.equal(
        torch.where(got.isnan(), 0, got.double()), torch.where(wanted.isnan(), 0, wanted.double())
    )


def assert_rounded(rounding: str, exact: Fraction | int, got, below, above) -> None:
    """below, above: the floats next to the result."""
    got, below, above = (Fraction(x.item()) for x in (got, below, above))
    match rounding:
        case "rn":
            assert abs(got - exact) <= min(abs(below - exact), abs(above - exact))
        case "rm":
            assert got <= exact < above
        case "rp":
            assert below < exact <= got
        case "rz":
            assert abs(got) <= abs(exact) < max(abs(above), abs(below))


FLOAT_TYPES = {"f32": torch.float32, "f64": torch.float64}
FLOATING = {"add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b}


@pytest.mark.parametrize("type", FLOAT_TYPES)
class TestFloats:
    @pytest.mark.parametrize("operation", FLOATING)
    def test_arithmetic(self, type, operation):
        a, b = (floats(FLOAT_TYPES[type]) for _ in range(2))
        got = execute(f"{operation}.{type} {{d}}, {{a}}, {{b}};", [a, b], FLOAT_TYPES[type])
        assert same(got, FLOATING[operation](a, b))

    @pytest.mark.parametrize("operation", [*FLOATING, "fma", "div"])
    @pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
    def test_rounding(self, type, operation, rounding):
        dtype = FLOAT_TYPES[type]
        a, b, c = (torch.randn(256, dtype=dtype) for _ in range(3))
        operands, text = ([a, b, c], "{a}, {b}, {c}") if operation == "fma" else ([a, b], "{a}, {b}")
        got = execute(f"{operation}.{rounding}.{type} {{d}}, {text};", operands, dtype)
        exact = {
            **{name: lambda x, f=f: f(*x) for name, f in FLOATING.items()},
            "fma": lambda x: x[0] * x[1] + x[2],
            "div": lambda x: x[0] / x[1],
        }[operation]
        down, up = (torch.nextafter(got, torch.full_like(got, limit)) for limit in (-INF, INF))
        for *x, g, below, above in zip(*operands, got, down, up, strict=True):
            assert_rounded(rounding, exact([Fraction(v.item()) for v in x]), g, below, above)

    def test_extremes(self, type):
        a, b = (floats(FLOAT_TYPES[type]) for _ in range(2))
        for name, reference in {"min": torch.fmin, "max": torch.fmax}.items():
            got = execute(f"{name}.{type} {{d}}, {{a}}, {{b}};", [a, b], FLOAT_TYPES[type])
            assert same(got, reference(a, b))

    def test_signs(self, type):
        a, b = (floats(FLOAT_TYPES[type]) for _ in range(2))
        assert same(execute(f"neg.{type} {{d}}, {{a}};", [a], a.dtype), -a)
        assert same(execute(f"abs.{type} {{d}}, {{a}};", [a], a.dtype), a.abs())
        got = execute(f"copysign.{type} {{d}}, {{a}}, {{b}};", [a, b], a.dtype)
        assert same(got, torch.copysign(b, a))

    def test_roots(self, type):
        a = floats(FLOAT_TYPES[type])
        with np.errstate(invalid="ignore"):
            roots = torch.from_numpy(np.sqrt(a.numpy()))
        assert same(execute(f"sqrt.rn.{type} {{d}}, {{a}};", [a], a.dtype), roots)
        assert same(execute(f"rcp.rn.{type} {{d}}, {{a}};", [a], a.dtype), 1 / a)

    def test_properties(self, type):
        a = floats(FLOAT_TYPES[type])
        tests = {"finite": torch.isfinite, "infinite": torch.isinf, "notanumber": torch.isnan}
        for name, reference in tests.items():
            text = f"testp.{name}.{type} %p0, {{a}}; selp.b32 {{d}}, 1, 0, %p0;"
            assert execute(text, [a], torch.int32).bool().equal(reference(a))


def test_zeros_are_ordered():
    a, b = torch.tensor([0.0, -0.0] * 16), torch.tensor([-0.0, 0.0] * 16)
    assert not execute("max.f32 {d}, {a}, {b};", [a, b], torch.float32).signbit().any()
    assert execute("min.f32 {d}, {a}, {b};", [a, b], torch.float32).signbit().all()


def test_flushing():
    a = torch.tensor([1e-39, -1e-39, 1e-20, 1.0] * 8)
    b = torch.tensor([1.0, 1.0, 1e-20, 1e-39] * 8)
    assert (execute("mul.f32 {d}, {a}, {b};", [a, b], torch.float32) != 0).all()
    flushed = execute("mul.ftz.f32 {d}, {a}, {b};", [a, b], torch.float32)
    assert (flushed == 0).all() and flushed[:4].signbit().tolist() == [False, True, False, False]


def test_saturation():
    a, b = floats(torch.float32), floats(torch.float32)
    got = execute("add.sat.f32 {d}, {a}, {b};", [a, b], torch.float32)
    assert same(got, (a + b).clamp(0, 1).nan_to_num(0))


APPROXIMATE = {
    "ex2.approx.ftz.f32": torch.exp2,
    "lg2.approx.f32": torch.log2,
    "rcp.approx.f32": torch.reciprocal,
    "rsqrt.approx.f32": torch.rsqrt,
    "sqrt.approx.f32": torch.sqrt,
    "tanh.approx.f32": torch.tanh,
    "sin.approx.f32": torch.sin,
    "cos.approx.f32": torch.cos,
}


@pytest.mark.parametrize("operation", APPROXIMATE)
def test_approximations(operation):
    a = floats(torch.float32)
    got, wanted = execute(f"{operation} {{d}}, {{a}};", [a], torch.float32), APPROXIMATE[operation](a.double()).float()
    wanted = torch.where(wanted.abs() < torch.finfo(torch.float32).tiny, 0, wanted) if "ftz" in operation else wanted
    torch.testing.assert_close(got, wanted, rtol=2e-7, atol=0 if "sin" not in operation else 1e-7, equal_nan=True)


HALVES = {"f16": torch.float16, "bf16": torch.bfloat16}


def exact_in_double(operation: str, *x: torch.Tensor) -> torch.Tensor:
    x = [v.double() for v in x]
    return {"fma": lambda: x[0] * x[1] + x[2], **{n: lambda f=f: f(*x[:2]) for n, f in FLOATING.items()}}[operation]()


@pytest.mark.parametrize("type", HALVES)
@pytest.mark.parametrize("operation", [*FLOATING, "fma"])
class TestHalves:
    def operands(self, type, operation):
        x = [floats(HALVES[type], 1024) for _ in range(3 if operation == "fma" else 2)]
        return x, ", ".join("{" + name + "}" for name in "abc"[: len(x)])

    def rounded(self, type, x):
        if type == "f16":
            with np.errstate(over="ignore"):
                return torch.from_numpy(x.numpy().astype(np.float16))
        # Round to odd first, so that rounding to bfloat16 cannot meet a tie that x is not.
        near = x.float()
        inexact = (near.double() != x) & x.isfinite() & near.isfinite() & (near.view(torch.int32) % 2 == 0)
        toward = torch.where(near.double() < x, INF, -INF).float()
        return torch.where(inexact, torch.nextafter(near, toward), near).to(torch.bfloat16)

    def test_single(self, type, operation):
        x, names = self.operands(type, operation)
        got = execute(f"{operation}.rn.{type} {{d}}, {names};", x, HALVES[type])
        assert same(got, self.rounded(type, exact_in_double(operation, *x)))

    def test_pairs(self, type, operation):
        x, names = self.operands(type, operation)
        packed = [v.view(torch.int32) for v in x]
        got = execute(f"{operation}.rn.{type}x2 {{d}}, {names};", packed, torch.int32).view(HALVES[type])
        assert same(got, self.rounded(type, exact_in_double(operation, *x)))


COMPARISONS = {
    "eq": torch.eq,
    "ne": lambda a, b: (a != b) & ~a.isnan() & ~b.isnan(),
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "equ": lambda a, b: (a == b) | a.isnan() | b.isnan(),
    "neu": torch.ne,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: ~a.isnan() & ~b.isnan(),
    "nan": lambda a, b: a.isnan() | b.isnan(),
}


@pytest.mark.parametrize("comparison", COMPARISONS)
@pytest.mark.parametrize("type", FLOAT_TYPES)
def test_comparison(comparison, type):
    a, b = (floats(FLOAT_TYPES[type]) for _ in range(2))
    b = torch.where(torch.rand(b.shape) < 0.3, a, b)
    wanted = COMPARISONS[comparison](a, b)
    select = "selp.b32 {d}, 1, 0, %p0; @%p1 add.s32 {d}, {d}, 2;"
    got = execute(f"setp.{comparison}.{type} %p0|%p1, {{a}}, {{b}}; {select}", [a, b], torch.int32)
    assert got.equal(torch.where(wanted, 1, 2).to(torch.int32))


@pytest.mark.parametrize("combination", ["and", "or", "xor"])
def test_combined_comparison(combination):
    a, b = integers(torch.int32), integers(torch.int32)
    text = f"setp.gt.s32 %p2, {{a}}, 5; setp.lt.{combination}.s32 %p0|%p1, {{a}}, {{b}}, !%p2;"
    got = execute(text + "selp.b32 {d}, 1, 0, %p0; @%p1 add.s32 {d}, {d}, 2;", [a, b], torch.int32)
    combine = {"and": torch.logical_and, "or": torch.logical_or, "xor": torch.logical_xor}[combination]
    p, q = combine(a < b, a <= 5), combine(a >= b, a <= 5)
    assert got.equal((p.int() + 2 * q.int()).to(torch.int32))


def test_unsigned_comparison():
    a, b = integers(torch.int32), integers(torch.int32)
    wanted = [x < y for x, y in zip(unsigned(a), unsigned(b), strict=True)]
    for name in ("lt.u32", "lo.u32"):
        got = execute(f"setp.{name} %p0, {{a}}, {{b}}; selp.u32 {{d}}, 1, 0, %p0;", [a, b], torch.int32)
        assert got.bool().tolist() == wanted


# --------------------------------------------------------------------------------------------------------- conversions


@pytest.mark.parametrize("mode", ["rzi", "rmi", "rpi", "rni"])
@pytest.mark.parametrize("to", ["s32", "u32", "s64", "u8"])
def test_float_to_integer(mode, to):
    a = torch.cat([floats(torch.float32), torch.randn(512) * 300, torch.arange(-16, 16) / 2])
    bits, signed = int(to[1:]), to[0] == "s"
    register = {"u8": torch.int32}.get(to) or DTYPE_OF[bits]
    got = execute(f"cvt.{mode}.{to}.f32 {{d}}, {{a}};", [a], register).tolist()
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    round_of = {"rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil, "rni": round}[mode]
    for x, result in zip(a.tolist(), got, strict=True):
        if math.isnan(x):
            wanted = 1 << 63 if bits == 64 else 0
        else:
            wanted = (high if x > 0 else low) if math.isinf(x) else min(max(round_of(x), low), high)
        assert result % (1 << 64) == wanted % (1 << 64) or result % (1 << 32) == wanted, x


@pytest.mark.parametrize("type", ["s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
def test_integer_to_float(type, rounding):
    bits, signed = int(type[1:]), type[0] == "s"
    a = integers(DTYPE_OF[bits])
    got = execute(f"cvt.{rounding}.f32.{type} {{d}}, {{a}};", [a], torch.float32)
    for x, g in zip(a.tolist(), got, strict=True):
        near = [torch.nextafter(g, torch.tensor(limit)) for limit in (-INF, INF)]
        assert_rounded(rounding, wrapped(x, bits, signed), g, *near)


@pytest.mark.parametrize("type", HALVES)
def test_halves(type):
    a, b = floats(torch.float32), floats(torch.float32)
    dtype = HALVES[type]
    narrow = execute(f"cvt.rn.{type}.f32 {{d}}, {{a}};", [a], dtype)
    assert same(narrow, a.to(dtype))
    assert same(execute(f"cvt.f32.{type} {{d}}, {{a}};", [narrow], torch.float32), narrow.float())
    packed = execute(f"cvt.rn.{type}x2.f32 {{d}}, {{a}}, {{b}};", [a, b], torch.int32).view(dtype).view(-1, 2)
    assert same(packed[:, 1], a.to(dtype)) and same(packed[:, 0], b.to(dtype))  # the first goes up
    positive = execute(f"cvt.rn.relu.{type}x2.f32 {{d}}, {{a}}, {{b}};", [a, b], torch.int32).view(dtype).view(-1, 2)
    assert same(positive[:, 1], a.relu().to(dtype))


@pytest.mark.parametrize("to", ["s32", "u32", "s64"])
@pytest.mark.parametrize("of", ["s8", "u8", "s16", "u16"])
def test_widening(to, of):
    bits, signed = int(of[1:]), of[0] == "s"
    a = integers(torch.int32)
    got = execute(f"cvt.{to}.{of} {{d}}, {{a}};", [a], DTYPE_OF[int(to[1:])]).tolist()
    assert [g % (1 << 64) % (1 << int(to[1:])) for g in got] == [
        wrapped(x, bits, signed) % (1 << int(to[1:])) for x in a.tolist()
    ]


def test_saturating_conversion():
    a = integers(torch.int32)
    got = execute("cvt.sat.s8.s32 {d}, {a};", [a], torch.int32)
    assert got.equal(a.clamp(-128, 127))
    got = execute("cvt.sat.u8.s32 {d}, {a};", [a], torch.int32)
    assert got.equal(a.clamp(0, 255))


def test_double():
    a = floats(torch.float64)
    assert same(execute("cvt.rn.f32.f64 {d}, {a};", [a], torch.float32), a.float())
    b = floats(torch.float32)
    assert same(execute("cvt.f64.f32 {d}, {a};", [b], torch.float64), b.double())


def test_tf32():
    a = torch.randn(256)
    got = execute("cvt.rna.tf32.f32 {d}, {a};", [a], torch.float32)
    assert ((got.view(torch.int32) & 0x1FFF) == 0).all() and ((got - a).abs() <= a.abs() * 2**-11).all()


# -------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    "vector, type, register", [("", "b32", "r"), (".v2", "b32", "r"), (".v4", "b32", "r"), (".v2", "b64", "d")]
)
@pytest.mark.parametrize("space", ["global", "shared"])
def test_vectors(vector, type, register, space):
    width = int(vector[2:] or 1)
    size = width * int(type[1:]) // 8
    x, y = (
        torch.randint(-(2**31), 2**31, (64 * size // 4,), dtype=torch.int32),
        torch.empty(64 * size // 4, dtype=torch.int32),
    )
    names = "{" + ", ".join(f"%{register}{40 + n}" for n in range(width)) + "}" if vector else f"%{register}40"
    body = lane_pointer(0, size, 0) + lane_pointer(1, size, 1) + f"ld.global.nc.L2::128B{vector}.{type} {names}, [%d0];"
    if space == "shared":
        body += f"mov.u32 %r60, s; mad.lo.u32 %r60, %r0, {size}, %r60; st.shared{vector}.{type} [%r60], {names};"
        body += f"ld.volatile.shared{vector}.{type} {names}, [%r60];"
    body += f"st.global{vector}.{type} [%d1], {names};"
    module = kernel(body, 2, 2048)
    with interpreter.session() as run:
        run.input("x", x)
        run.output("y", y)
        module.launch("k", (2,), (32,), [x, y])
    assert y.equal(x)
    counts = run.launches[0]
    assert counts.bytes_read == counts.distinct_bytes_read == counts.bytes_written == 64 * size
    assert counts.sectors == counts.ideal_sectors == 2 * 64 * size // 32
    assert counts.conflicts == 0


@pytest.mark.parametrize("type", ["s8", "u8", "s16", "u16"])
def test_narrow_loads(type):
    bits = int(type[1:])
    x, y = integers(torch.int32, 64), torch.empty(64, dtype=torch.int32)
    body = lane_pointer(0, 4, 0) + lane_pointer(1, 4, 1) + f"ld.global.{type} %r40, [%d0]; st.global.b32 [%d1], %r40;"
    with interpreter.session() as run:
        run.input("x", x)
        run.output("y", y)
        kernel(body, 2).launch("k", (2,), (32,), [x, y])
    assert y.tolist() == [wrapped(v, bits, type[0] == "s") for v in x.tolist()]


ATOMICS = {
    "add.u32": lambda x: sum(x),
    "min.s32": lambda x: min([*x, 0]),
    "max.s32": lambda x: max([*x, 0]),
    "or.b32": lambda x: np.bitwise_or.reduce(np.array(x)),
    "xor.b32": lambda x: np.bitwise_xor.reduce(np.array(x)),
}


@pytest.mark.parametrize("operation", ATOMICS)
@pytest.mark.parametrize("seed", SEEDS)
def test_atomics(operation, seed):
    x, y = integers(torch.int32, 256), torch.zeros(1, dtype=torch.int32)
    text = f"ld.global.b32 %r40, [%d0]; ld.param.u64 %d1, [p1]; red.global.{operation} [%d1], %r40;"
    module = kernel(lane_pointer(0, 4, 0) + text, 2)
    with interpreter.session(seed) as run:
        run.input("x", x)
        interpreter.build.core().declare_output("y", y.data_ptr(), [1], [1], 4)
        interpreter.build.core().host_write(y.data_ptr(), 4)
        module.launch("k", (4,), (64,), [x, y])
    assert y.item() == wrapped(int(ATOMICS[operation](x.tolist())), 32, True)


@pytest.mark.parametrize("size", [4, 8, 16])
@pytest.mark.parametrize("form", ["whole", "part", "ignored"])
def test_cp_async(size, form):
    x, y = torch.randint(0, 256, (32 * size,), dtype=torch.uint8), torch.empty(32 * size, dtype=torch.uint8)
    extra = {"whole": "", "part": ", %r61", "ignored": ", %p0"}[form]
    words = size // 4
    body = lane_pointer(0, size, 0) + lane_pointer(1, size, 1)
    body += f"mov.u32 %r60, s; mad.lo.u32 %r60, %r0, {size}, %r60; rem.u32 %r61, %r0, {size + 1};"
    body += "setp.lt.u32 %p0, %r0, 7;"
    body += f"cp.async.{'cg' if size == 16 else 'ca'}.shared.global [%r60], [%d0], {size}{extra};"
    body += "cp.async.commit_group; cp.async.wait_group 0;"
    body += "".join(f"ld.shared.b32 %r70, [%r60+{4 * n}]; st.global.b32 [%d1+{4 * n}], %r70;" for n in range(words))
    with interpreter.session() as run:
        run.input("x", x)
        run.output("y", y)
        kernel(body, 2, 1024).launch("k", (1,), (32,), [x, y])
    wanted = x.clone().view(32, size)
    for lane in range(32):
        kept = {"whole": size, "part": lane % (size + 1), "ignored": 0 if lane < 7 else size}[form]
        wanted[lane, kept:] = 0
    assert y.view(32, size).equal(wanted)


# --------------------------------------------------------------------------------------------------------------- warps


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("width", [32, 16, 8])
def test_shuffle(mode, width):
    a, b = integers(torch.int32, 32), torch.randint(0, 32, (32,), dtype=torch.int32)
    clamp = (32 - width) << 8 | (0 if mode == "up" else 31)
    text = f"shfl.sync.{mode}.b32 {{d}}|%p0, {{a}}, {{b}}, {clamp}, -1; @!%p0 add.s32 {{d}}, {{d}}, 1;"
    got = execute(text, [a, b], torch.int32).tolist()
    for lane in range(32):
        first, n = lane // width * width, b[lane].item()
        source = {"up": lane - n, "down": lane + n, "bfly": lane ^ n, "idx": first | (n & (width - 1))}[mode]
        inside = source >= first if mode == "up" else source < first + width
        assert got[lane] == wrapped(a[source if inside else lane].item() + (not inside), 32, True)


def test_votes():
    a = torch.tensor([1, 0, 1, 1] * 8, dtype=torch.int32)
    p = "setp.ne.s32 %p0, {a}, 0;"
    assert execute(p + "vote.sync.ballot.b32 {d}, %p0, -1;", [a], torch.int32).eq(wrapped(0xDDDDDDDD, 32, True)).all()
    for mode, wanted in {"any": 1, "all": 0, "uni": 0}.items():
        got = execute(p + f"vote.sync.{mode}.pred %p1, %p0, -1; selp.b32 {{d}}, 1, 0, %p1;", [a], torch.int32)
        assert got.eq(wanted).all()
    got = execute("match.any.sync.b32 {d}, {a}, -1;", [a], torch.int32)
    assert unsigned(got) == [0xDDDDDDDD, 0x22222222, 0xDDDDDDDD, 0xDDDDDDDD] * 8
    got = execute("redux.sync.add.s32 {d}, {a}, -1;", [a], torch.int32)
    assert got.eq(24).all()
    got = execute("elect.sync {d}|%p0, -1; @%p0 mov.b32 {d}, 77;", [a], torch.int32)
    assert got.tolist() == [77] + [0] * 31


def test_groups_of_lanes():
    """The halves of a warp shuffle at the same time, each with its own mask."""
    a = torch.arange(32, dtype=torch.int32)
    text = "setp.lt.s32 %p0, {a}, 16; selp.b32 %r40, 65535, -65536, %p0; shfl.sync.bfly.b32 {d}, {a}, 1, 31, %r40;"
    assert execute(text, [a], torch.int32).equal(a ^ 1)


class TestControl:
    @pytest.fixture(scope="class")
    @classmethod
    def module(cls):
        return interpreter.compile(FIXTURES / "control.cu")

    def run(self, module, name, x, y, seed, threads=64):
        with interpreter.session(seed) as run:
            run.input("x", x)
            run.output("y", y)
            module.launch(name, (-(-x.numel() // threads),), (threads,), [x, y, x.numel()], shared=8)
        return y

    @pytest.mark.parametrize("seed", SEEDS)
    def test_loops(self, module, seed):
        x = torch.arange(1, 151, dtype=torch.int32)

        def steps(v):
            count = 0
            while v != 1:
                v, count = 3 * v + 1 if v % 2 else v // 2, count + 1
            return count

        assert self.run(module, "collatz", x, torch.empty_like(x), seed).tolist() == [steps(v) for v in x.tolist()]

    @pytest.mark.parametrize("seed", SEEDS)
    def test_switch(self, module, seed):
        x = torch.arange(200, dtype=torch.int32)
        cases = [
            lambda v: v * 3 - 1, lambda v: v ^ 0x55, lambda v: v << 3, lambda v: v.bit_count(), lambda v: v // 7,
            lambda v: -v, lambda v: v | 0xFF, lambda v: v % 11, lambda v: 42,
        ]  # fmt: skip
        got = self.run(module, "switched", x, torch.empty_like(x), seed)
        assert got.tolist() == [cases[v % 9](v) for v in x.tolist()]

    @pytest.mark.parametrize("seed", SEEDS)
    def test_calls(self, module, seed):
        x = torch.randn(100)

        def called(v, n):
            for _ in range(n):
                v = math.fsum([v * 1.5, 1])
            return v / 2 if v > 100 else v

        got = self.run(module, "calls", x, torch.empty_like(x), seed)
        wanted = torch.tensor([called(v, i % 7) + called(-v, i % 3) for i, v in enumerate(x.tolist())])
        torch.testing.assert_close(got, wanted)

    @pytest.mark.parametrize("seed", SEEDS)
    def test_turns(self, module, seed):
        x = torch.arange(64, dtype=torch.int32)
        assert self.run(module, "turns", x, torch.empty_like(x), seed).eq(x.sum()).all()

    def test_reductions(self, module):
        x, y = torch.arange(-20, 76, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
        with interpreter.session() as run:
            run.input("x", x)
            interpreter.build.core().declare_output("y", y.data_ptr(), [5], [1], 4)
            interpreter.build.core().host_write(y.data_ptr(), 20)
            module.launch("reductions", (1,), (96,), [x, y, 96])
        assert y.tolist() == [x.sum().item(), max(part.sum().item() for part in x.split(32)), 75, 1, 1]


# ------------------------------------------------------------------------------------------------------------ matrices


def matrix_kernel(body: str, words_in: list[int], words_out: int, shared_bytes: int = 0) -> interpreter.Module:
    """Each lane loads words_in[n] words of parameter n, all to %r100, %r101, ..., and stores words_out of %r50, ..."""
    text, register = "", 100
    for n, words in enumerate(words_in):
        text += lane_pointer(n, 4 * words, n)
        for word in range(words):
            text += f"ld.global.b32 %r{register}, [%d{n}+{4 * word}];\n"
            register += 1
    text += body + lane_pointer(len(words_in), 4 * words_out, 20)
    text += "".join(f"st.global.b32 [%d20+{4 * word}], %r{50 + word};\n" for word in range(words_out))
    return kernel(text, len(words_in) + 1, shared_bytes)


def run_matrices(module, inputs, out):
    assert not module.unknown(), module.unknown()
    with interpreter.session() as run:
        for n, x in enumerate(inputs):
            run.input(f"x{n}", x)
        run.output("out", out)
        module.launch("k", (1,), (32,), [*inputs, out])
    return run.launches[0]


def fragments(
    matrix: torch.Tensor, rows: int, columns: int, blocks: list[tuple[int, int]], packed: int
) -> torch.Tensor:
    """The registers [32, len(blocks)] that a warp holds blocks of a matrix in, each of rows x columns at (row, column).
    Lane 4 g + t has row g of a block, and `packed` columns from packed * t on."""
    lanes = torch.arange(32)
    registers = []
    for row, column in blocks:
        block = matrix[row : row + rows, column : column + columns].reshape(rows, columns // packed, packed)
        registers.append(block[lanes // 4, lanes % 4])
    return torch.stack(registers, 1).contiguous()


MMA = {
    # dtype, K, and columns of a block and of a register; see PTX ISA, "Matrix Fragments for mma"
    "m16n8k16.row.col.f32.f16.f16.f32": (torch.float16, 16, 8, 2),
    "m16n8k16.row.col.f32.bf16.bf16.f32": (torch.bfloat16, 16, 8, 2),
    "m16n8k8.row.col.f32.f16.f16.f32": (torch.float16, 8, 8, 2),
    "m16n8k8.row.col.f32.bf16.bf16.f32": (torch.bfloat16, 8, 8, 2),
    "m16n8k8.row.col.f32.tf32.tf32.f32": (torch.float32, 8, 4, 1),
    "m16n8k4.row.col.f32.tf32.tf32.f32": (torch.float32, 4, 4, 1),
}


@pytest.mark.parametrize("form", MMA)
@pytest.mark.parametrize("swapped", [False, True])
def test_mma(form, swapped):
    dtype, k, step, packed = MMA[form]
    a, b, c = torch.randint(-8, 9, (16, k)), torch.randint(-8, 9, (8, k)), torch.randint(-8, 9, (16, 8)).float()
    a_registers = fragments(a.to(dtype), 8, step, [(r, col) for col in range(0, k, step) for r in (0, 8)], packed)
    b_registers = fragments(b.to(dtype), 8, step, [(0, col) for col in range(0, k, step)], packed)
    c_registers = fragments(c, 8, 8, [(0, 0), (8, 0)], 2)
    na, nb = a_registers.shape[1], b_registers.shape[1]
    names = [f"%r{100 + n}" for n in range(na + nb + 4)]
    order = names[:na]
    if swapped:  # the result must be wrong
        order = [order[1], order[0], *order[2:]]
    operands = ", ".join("{" + ", ".join(group) + "}" for group in (order, names[na : na + nb], names[na + nb :]))
    text = f"mma.sync.aligned.{form} {{%r50, %r51, %r52, %r53}}, {operands};"
    out = torch.empty(32, 2, 2)
    counts = run_matrices(matrix_kernel(text, [na, nb, 4], 4), [a_registers, b_registers, c_registers], out)
    wanted = fragments((a @ b.T).float() + c, 8, 8, [(0, 0), (8, 0)], 2)
    assert out.equal(wanted) != swapped
    assert counts.mmas == 1


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("store", [False, True])
def test_matrices_in_shared_memory(count, transposed, store):
    """Each matrix is 8 rows of 16 bytes; ldmatrix.x1, .x2 and .x4 take the addresses of lanes 0-7, 0-15, 0-31."""
    matrices = torch.arange(64 * count, dtype=torch.int16).view(count, 8, 8)
    order = torch.randperm(8 * count)  # where each row lies
    lane_rows = torch.zeros(32, dtype=torch.int32)
    lane_rows[: 8 * count] = order.to(torch.int32) * 16
    stored = torch.empty(8 * count, 8, dtype=torch.int16)
    stored[order] = matrices.view(-1, 8)
    trans = ".trans" if transposed else ""
    names = "{" + ", ".join(f"%r{(110 if store else 50) + n}" for n in range(count)) + "}"
    seen = matrices.mT.contiguous() if transposed else matrices
    registers = torch.stack([fragments(m, 8, 8, [(0, 0)], 2)[:, 0] for m in seen], 1).contiguous()  # [32, count, 2]
    address = "mov.u32 %r60, s; add.u32 %r61, %r60, %r100;"
    per_lane = count  # words of the stored rows that each lane moves: 8 * count rows of 4 words
    own = f"mad.lo.u32 %r62, %r0, {4 * per_lane}, %r60;"
    if store:
        text = (
            address + f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r61], {names}; bar.warp.sync -1;" + own
        )
        text += "".join(f"ld.shared.b32 %r{50 + n}, [%r62+{4 * n}];" for n in range(per_lane))
        inputs, out, wanted = (
            [lane_rows, *[registers[:, n].contiguous() for n in range(count)]],
            torch.empty_like(stored),
            stored,
        )
        words = [1] * (1 + count)
        text = "".join(f"mov.b32 %r{110 + n}, %r{101 + n};" for n in range(count)) + text
    else:
        text = address + own + "".join(f"st.shared.b32 [%r62+{4 * n}], %r{101 + n};" for n in range(per_lane))
        text += f"bar.warp.sync -1; ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {names}, [%r61];"
        inputs, out, wanted, words = [lane_rows, stored], torch.empty_like(registers), registers, [1, per_lane]
    run_matrices(matrix_kernel(text, words, count, 512), inputs, out)
    assert out.flatten().equal(wanted.flatten())


@pytest.mark.parametrize("row", [16, 64, 128, 144])
def test_conflicts_of_rows(row):
    """Eight rows of 16 bytes: at a stride of 128 bytes all use the same banks, at 144 bytes each uses its own."""
    x, y = torch.zeros(32, dtype=torch.int32), torch.empty(32, 4, dtype=torch.int32)
    text = f"mov.u32 %r60, s; rem.u32 %r61, %r0, 8; mad.lo.u32 %r61, %r61, {row}, %r60;"
    text += "mov.b32 %r62, %r0; st.shared.v4.b32 [%r61], {%r62, %r62, %r62, %r62}; bar.warp.sync -1;"
    text += "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r50, %r51, %r52, %r53}, [%r61];"
    with pytest.raises(interpreter.Fault, match="another of its lanes"):  # several lanes write each row
        run_matrices(matrix_kernel(text, [1], 4, 2048), [x], y)
    text = text.replace("st.shared", "setp.lt.u32 %p0, %r0, 8; @%p0 st.shared")
    counts = run_matrices(matrix_kernel(text, [1], 4, 2048), [x], y)
    in_the_same_banks = max([r * (row // 16) % 8 for r in range(8)].count(g) for g in range(8))
    assert counts.shared["ldmatrix"].wavefronts == 4 * in_the_same_banks
    assert counts.shared["ldmatrix"].ideal == 4


# ------------------------------------------------------------------------------------------------------ planted faults

FAULTS = {
    "lost_barrier": "race on shared memory.*(reads what|overwrites what) warp",
    "lost_second_barrier": "race on shared memory.*(reads what|overwrites what) warp",
    "lost_syncwarp": "race on shared memory.*another of its lanes wrote, without __syncwarp",
    "wait_too_short": "cp.async.*has not been waited for",
    "wait_without_barrier": "race on shared memory.*(not been waited for|without a barrier)",
    "refilled_too_early": "race on shared memory.*overwrites what",
    "off_by_one": "global (read|write).*out of bounds.*end of x|out of bounds.*after the end",
    "out_of_shared": "shared write of 4 bytes out of bounds",
    "misaligned": "misaligned global access of 8 bytes",
    "write_to_input": "write to an input: x",
    "two_blocks_one_address": "another block of the same launch wrote the same address: y",
    "reads_of_another_block": "race on global memory.*reads what block|uninitialised global memory",
    "reads_unwritten_output": "read of uninitialised global memory: y",
    "uninitialised_shared": "use of uninitialised shared memory",
    "uninitialised_register": "uninitialised register",
    "diverged_barrier": "lanes of a warp wait for each other|deadlock",
    "deadlock": "deadlock",
    "shuffles_with_absent_lane": "shfl from lane 20",
    "trapped": "trap",
}


class TestFaults:
    @pytest.fixture(scope="class")
    @classmethod
    def module(cls):
        return interpreter.compile(FIXTURES / "faults.cu")

    def launch(self, module, name, seed=0, extra=(), limit=1 << 32):
        two_blocks = name in ("two_blocks_one_address", "reads_of_another_block", "off_by_one")
        x, y = torch.randn(512), torch.empty(256 if name.startswith("wait_too") else 128)
        if name in ("two_blocks_one_address", "off_by_one", "reads_of_another_block"):
            x, y = x[:128].clone(), y
        if name in ("two_blocks_one_address",):
            y = y[:64].clone()
        threads = 64 if two_blocks else 128
        with interpreter.session(seed, max_instructions=limit) as run:
            run.input("x", x)
            run.output("y", y)
            shared = {"out_of_shared": 512, "wait_too_short": 4096, "uninitialised_shared": 512}.get(name, 2048)
            module.launch(
                name,
                (2 if not name.startswith("off") and two_blocks else 3 if two_blocks else 1,),
                (threads,),
                [x, y, *extra],
                shared,
            )
        return run

    @pytest.mark.parametrize("seed", SEEDS)
    @pytest.mark.parametrize("name", FAULTS)
    def test_fault(self, module, name, seed):
        with pytest.raises(interpreter.Fault, match=f"(?s){FAULTS[name]}") as caught:
            self.launch(module, name, seed, (128,) if name == "off_by_one" else ())
        report = str(caught.value)
        lines = (FIXTURES / "faults.cu").read_text().splitlines()
        begin = next(n for n, line in enumerate(lines) if f" {name}(" in line)
        end = next(n for n in range(begin, len(lines)) if lines[n] == "}")
        here = [n + 1 for n in range(begin, end) if "// here" in lines[n]]
        assert any(f"fixtures/faults.cu:{n}\n" in report or f"faults.cu:{n}," in report for n in here)
        assert f"kernel  {name}" in report and "PTX     line" in report and "block   (" in report

    def test_no_fault(self, module):
        for seed in SEEDS:
            assert self.launch(module, "fine", seed).launches[0].conflicts == 0

    def test_no_end(self, module):
        with pytest.raises(interpreter.Fault, match="no end"):
            self.launch(module, "no_end", limit=10_000)

    def test_unwritten_output(self, module):
        with pytest.raises(interpreter.Fault, match=r"y\[17\], of shape \[128\], was never written"):
            self.launch(module, "unwritten_output")

    def test_nothing_runs_after_a_fault(self, module):
        x, y = torch.randn(128), torch.empty(128)
        with pytest.raises(interpreter.Fault, match="lost_barrier"), interpreter.session():
            pass_on = [x, y]
            interpreter.build.core().declare_input("x", x.data_ptr(), [128], [1], 4)
            interpreter.build.core().declare_output("y", y.data_ptr(), [128], [1], 4)
            module.launch("lost_barrier", (1,), (128,), pass_on, 2048)
            module.launch("trapped", (1,), (128,), pass_on, 2048)

    def test_padding_between_rows(self, module):
        x, buffer = torch.randn(4, 40), torch.full((4, 40), 7.0)
        y = buffer[:, :37]
        for columns, fault in ((37, None), (38, "between the elements of y")):
            try:
                with interpreter.session() as run:
                    run.input("x", x)
                    run.output("y", y)
                    module.launch("strided_rows", (4,), (32,), [x, y, 40, columns])
                assert fault is None
            except interpreter.Fault as caught:
                assert fault is not None and fault in str(caught)
        assert (buffer[:, 38:] == 7).all()

    @pytest.mark.parametrize("row, passes", [(32, 32), (33, 1), (36, 4)])
    def test_bank_conflicts(self, module, row, passes):
        x, y = torch.randn(32, 32), torch.empty(32, 32)
        with interpreter.session() as run:
            run.input("x", x)
            run.output("y", y)
            module.launch("transpose", (1,), (32, 4), [x, y, row], 4 * 32 * 36)
        banks = run.launches[0].shared
        assert y.equal(x.T)
        assert banks["st.shared"].conflicts == 0
        assert banks["ld.shared"].wavefronts == 32 * passes and banks["ld.shared"].ideal == 32


# ------------------------------------------------------------------------------- correct kernels, and faulty neighbours

compiled = functools.cache(lambda source: interpreter.compile(FIXTURES / source))


def run_fixture(source, name, seed=0, blocks=1, threads=128, shared=8192, x=None, y=None, arguments=()):
    x, y = torch.randn(512) if x is None else x, torch.empty(blocks * threads) if y is None else y
    with interpreter.session(seed) as run:
        run.input("x", x)
        run.output("y", y)
        compiled(source).launch(name, (blocks,), (threads,), [x, y, *arguments], shared)
    return x, y


@contextmanager
def faulty(source, name, message):
    """Expects a fault with this message, at a line marked with the kernel's name."""
    with pytest.raises(interpreter.Fault, match=f"(?s){message}") as caught:
        yield
    lines = (FIXTURES / source).read_text().splitlines()
    here = [n for n, line in enumerate(lines, 1) if re.search(rf"// fault:.*\b{name}\b", line)]
    places = re.search(r"\n  source  (.*)", str(caught.value))[1]  # the line, and where its function was inlined
    assert any(re.search(rf"{source}:{n}\b", places) for n in here), caught.value


def assert_fault(source, name, message, **options):
    with faulty(source, name, message):
        run_fixture(source, name, **options)


@pytest.mark.parametrize("seed", SEEDS)
class TestAsyncCopies:
    def test_groups_of_each_lane(self, seed):
        x, y = run_fixture("async.cu", "each_lane_waits", seed)
        assert y.equal(x[::4])

    def test_lanes_that_do_not_wait(self, seed):
        assert_fault("async.cu", "even_lanes_do_not_wait", "cp.async of warp . has not been waited for", seed=seed)


class TestUninitialised:
    def test_masked_rows(self):
        x, y = run_fixture("uninitialised.cu", "multiplies_rows", threads=32, y=torch.empty(11, 8))
        sums = x.half().float()[: 11 * 16].view(11, 16).sum(1, keepdim=True)
        torch.testing.assert_close(y, sums.expand(11, 8))

    def test_replaced_values(self):
        x, y = run_fixture("uninitialised.cu", "replaces_values")
        wanted = torch.where(torch.arange(128) < 100, 2 * x[:128] - 1, 0)
        assert y.equal(wanted)

    @pytest.mark.parametrize("name", ["stores_value", "passes_value_on", "branches_on_value", "indexes_with_value"])
    def test_used_values(self, name):
        message = r"use of uninitialised shared memory: .* was read at shared \+ \d+ bytes, by \S*uninitialised.cu:\d+"
        assert_fault("uninitialised.cu", name, message)

    def test_unmasked_row(self):
        options = {"threads": 32, "y": torch.empty(12, 8)}
        assert_fault("uninitialised.cu", "multiplies_too_many_rows", "use of uninitialised shared memory", **options)

    def test_local_memory(self):
        x, y = run_fixture("uninitialised.cu", "reads_local", arguments=[1])
        torch.testing.assert_close(y, x[1:8].sum().expand(128))
        assert_fault("uninitialised.cu", "reads_local", "use of uninitialised local memory", arguments=[2])

    def test_padding_of_a_copy(self):
        x, y = run_fixture("uninitialised.cu", "copies_padding", arguments=[1])
        assert y.equal(x[:128])


@pytest.mark.parametrize("seed", SEEDS)
class TestRaces:
    def test_same_values(self, seed):
        x, y = run_fixture("races.cu", "same_values", seed)
        assert y.equal(torch.cat([x[1:2], (x[0] + x[:4]).repeat_interleave(32)[1:]]))

    @pytest.mark.parametrize(
        "name, other", [("values_of_lanes", "another of its lanes"), ("values_of_warps", "warp .")]
    )
    def test_different_values(self, name, other, seed):
        assert_fault("races.cu", name, f"race on shared memory: warp . writes what {other} wrote", seed=seed)

    def test_values_in_global_memory(self, seed):
        x, y = run_fixture("races.cu", "takes_turns", seed)
        first, *others = x[:128].view(4, 32)
        for row in others:
            first = row + first.roll(-1)
        assert y.equal(first.repeat(4))
        message = "race on global memory: this lane writes what lane .* of its warp wrote, without __syncwarp"
        assert_fault("races.cu", "lanes_to_global", message, seed=seed)
        message = "race on global memory: warp . {} what warp . {}"
        assert_fault("races.cu", "warps_to_global", message.format("writes", "wrote, without a barrier"), seed=seed)
        assert_fault("races.cu", "reads_from_global", message.format("reads", "wrote, without a barrier"), seed=seed)

    def test_ends_of_a_copy(self, seed):
        x, y = run_fixture("races.cu", "source_kept", seed, y=torch.empty(512))
        x.view(-1, 4)[:, 0] += 1
        assert y.equal(x)
        message = "race on global memory: a write to the source of a cp.async of warp . that has not been waited for: y"
        assert_fault("races.cu", "source_overwritten", message, seed=seed, y=torch.empty(512))
        message = "writes where a cp.async of warp . has not been waited for"
        assert_fault("races.cu", "destination_overwritten", message, seed=seed)


class TestBlocks:
    BLOCKS, THREADS = 7, 64

    @pytest.fixture(params=SEEDS)
    def run(self, request):
        def run(name, *, cooperative=False):
            x = torch.randn(self.BLOCKS * self.THREADS)
            y, flags = torch.zeros_like(x), torch.zeros(self.BLOCKS + 1, dtype=torch.int32)
            with interpreter.session(request.param, max_instructions=10_000_000) as run:
                run.input("x", x)
                run.memory("y", y)
                run.memory("flags", flags)
                launch = compiled("blocks.cu").launch
                launch(name, (self.BLOCKS,), (self.THREADS,), [x, y, flags], cooperative=cooperative)
            return x.view(self.BLOCKS, self.THREADS), y

        return run

    def test_last_block(self, run):
        x, y = run("last_block")
        torch.testing.assert_close(y[: self.BLOCKS + 1], torch.cat([x.sum().view(1), x.sum(1)]))
        message = "race on global memory: this block reads what block . of the same launch wrote: y"
        with faulty("blocks.cu", "last_block_without_fence", message):
            run("last_block_without_fence")

    def test_atomic_sums(self, run):
        x, y = run("adds")
        torch.testing.assert_close(y[:2], x.sum().expand(2))
        message = "race on global memory: this block reads what (several blocks|block .) of the same launch wrote: y"
        with faulty("blocks.cu", "adds_without_fence", message):
            run("adds_without_fence")

    def test_fences_before_a_barrier(self, run):
        x, y = run("fenced_by_all_threads")
        assert y.equal(x.flatten() + 1)

    def test_chained_blocks(self, run):
        x, y = run("chained_sums_released")
        torch.testing.assert_close(y[: self.BLOCKS], x.sum(1).cumsum(0))
        message = "race on global memory: this block reads what block . of the same launch wrote: y"
        with faulty("blocks.cu", "chained_sums_relaxed", message):
            run("chained_sums_relaxed")

    def test_barrier_of_the_grid(self, run):
        x, y = run("grid_barrier", cooperative=True)
        assert y.equal(x.roll(-3, 0).flatten())

    def test_no_end(self, run):
        message = r"no end: every thread .* waits for what none writes:.*block ., warp .*reads flags \+ \d+ bytes"
        with faulty("blocks.cu", "waits_for_nobody", message):
            run("waits_for_nobody")


@pytest.mark.parametrize("gap", [0, 1, 16])
def test_neighbouring_tensors(gap):
    """x, z and y lie in one allocation, with gaps between. An access beyond x must not count as one to z."""
    whole = torch.randn(300 + 2 * gap)
    x, z, y = (whole[begin : begin + 100] for begin in (0, 100 + gap, 200 + 2 * gap))

    def run(first, count):
        with interpreter.session() as run:
            run.input("x", x)
            run.input("z", z)
            run.output("y", y)
            compiled("bounds.cu").launch("copies", (1,), (32,), [x, y, first, count])

    run(0, 100)
    assert y.equal(x)
    with faulty("bounds.cu", "copies", f"global read .* out of bounds .*: {4 * gap} bytes after the end of x, .* in z"):
        run(100 + gap, 1)


def test_calls_by_pointer():
    for n in (0, 1):
        x, y = run_fixture("calls.cu", "calls_by_pointer", arguments=[n])
        x = x[:128]
        twice, plus_one = 2 * x, torch.where(x > 0, x + 1, x)
        of_maps = torch.where((torch.arange(128) + n) % 2 == 0, twice, plus_one)
        torch.testing.assert_close(y, of_maps + [plus_one, twice][n] + 3)
    assert not compiled("calls.cu").unknown()
    with faulty("calls.cu", "calls_nothing", "a call of 16, which is no function"):
        run_fixture("calls.cu", "calls_nothing", arguments=[1])


def test_printf(capfd):
    run_fixture("calls.cu", "prints", arguments=[2])
    wanted = "thread {}:  1.50 2.500000e+00 1099511627778 c%\n"
    assert capfd.readouterr().out == "".join(wanted.format(thread) for thread in (5, 37, 69, 101))


def test_value_that_cannot_be_read():
    text = ".version 8.0\n.target sm_80\n.address_size 64\n.global .u64 table[2] = {0, missing};\n"
    with pytest.raises(RuntimeError, match=r"PTX line 4: .*address of missing"):
        interpreter.Module(text)


@pytest.mark.parametrize("seed", SEEDS)
class TestMbarriers:
    def test_copies(self, seed):
        x, y = run_fixture("mbarriers.cu", "waits_for_copies", seed)
        assert y.equal(x[:128])
        assert_fault("mbarriers.cu", "does_not_wait_for_copies", "race on shared memory|uninitialised", seed=seed)

    def test_rounds(self, seed):
        x, y = run_fixture("mbarriers.cu", "rounds", seed)
        rows = x[:128].view(4, 32)
        torch.testing.assert_close(y, (2 * rows.sum(0) + sum(range(8))).roll(-1).repeat(4))
        message = "race on shared memory: warp . (reads|writes) .* without a barrier|use of uninitialised shared memory"
        assert_fault("mbarriers.cu", "reads_too_early", message, seed=seed)

    def test_missing_arrival(self, seed):
        message = r"no end: every thread .* reads shared \+ \d+ bytes"
        assert_fault("mbarriers.cu", "waits_for_too_many", message, seed=seed)


FRAGMENTS = {
    # M, N, K, types of A and B, and of C and D
    "half_float": (16, 16, 16, torch.float16, torch.float32),
    "half_half": (16, 16, 16, torch.float16, torch.float16),
    "half_tall": (32, 8, 16, torch.float16, torch.float32),
    "half_wide": (8, 32, 16, torch.float16, torch.float32),
    "bfloat_float": (16, 16, 16, torch.bfloat16, torch.float32),
    "bfloat_tall": (32, 8, 16, torch.bfloat16, torch.float32),
    "tf32_float": (16, 16, 8, torch.float32, torch.float32),
    "double_double": (8, 8, 4, torch.float64, torch.float64),
    "byte_int": (16, 16, 16, torch.int8, torch.int32),
}


@pytest.mark.parametrize("name", FRAGMENTS)
def test_fragments(name):
    m, n, k, of, to = FRAGMENTS[name]
    a, b, c = (torch.randint(-8, 9, size) for size in ((m, k), (n, k), (m, n)))
    tensors = [a.to(of), b.to(of), c.to(to), torch.empty(m, n, dtype=to)]
    with interpreter.session() as run:
        for n, x in enumerate(tensors[:3]):
            run.input("abc"[n], x)
        run.output("d", tensors[3])
        compiled("fragments.cu").launch(name, (1,), (32,), tensors)
    assert tensors[3].equal((2 * (a @ b.T + c)).to(to))
    assert run.launches[0].mmas == 1


@pytest.mark.parametrize(
    "instruction, why",
    [
        ("frobnicate.b32 %r1, %r2;", "unknown opcode"),
        ("add.wrong.s32 %r1, %r2, %r3;", "unknown modifier .wrong"),
        ("add.s32 %r1, %d2, %r3;", "another width"),
        ("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%r1}, {%r2}, {%r3}, {%r4};", "unsupported"),
    ],
)
def test_unknown_instruction(instruction, why):
    module = kernel(instruction, 0)
    assert why in module.unknown()[0]
    with pytest.raises(interpreter.Fault, match=f"illegal instruction[^$]*{why}"), interpreter.session():
        module.launch("k")


def test_unknown_instructions_that_nobody_executes_do_no_harm():
    module = kernel("mov.u32 %r1, %tid.x; setp.gt.u32 %p0, %r1, 100; @%p0 frobnicate.b32 %r1;", 0)
    with interpreter.session() as run:
        module.launch("k")
    assert run.launches[0].instructions == 3


def test_launch_outside_of_a_session():
    kernel("mov.u32 %r1, 0;", 0).launch("k")
    with interpreter.session():
        pass


def test_command_line():
    command = [sys.executable, "-m", "tests.interpreter"]
    root = Path(interpreter.__file__).parents[2]
    done = subprocess.run([*command, "forward", "--case", "65x65-dim-96"], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    assert "forward_kernel" in done.stdout and "global bytes read" in done.stdout
