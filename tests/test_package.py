"""What was built, and what the sources may depend on."""

import os
import re
import subprocess
import sys
from dataclasses import asdict, is_dataclass
from pathlib import Path

import pytest
import torch

import flashsoftmax

SOURCES = Path(__file__).parents[1] / "csrc"


def run(code, **environment):
    """Python in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, timeout=120, cwd="/"
    )


def test_public_names():
    assert set(flashsoftmax.__all__) == {"attention", "attention_varlen", "attention_paged", "merge", "State", "build_info"}
    for name in flashsoftmax.__all__:
        assert getattr(flashsoftmax, name).__doc__, f"{name} has no docstring"


def test_build_info_says_what_was_built():
    info = flashsoftmax.build_info()
    info = asdict(info) if is_dataclass(info) else dict(info)
    assert re.match(r"\d+\.\d+", info["version"])
    assert isinstance(info["cuda"], bool)
    assert info["cuda"] or info["cuda_reason"]


def test_imports_with_no_gpu_in_sight():
    code = "import flashsoftmax, torch; q = torch.randn(1, 1, 2, 4); print(flashsoftmax.attention(q, q, q).shape)"
    result = run(code, CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stderr
    assert "[1, 1, 2, 4]" in result.stdout


def test_imports_before_torch_and_without_a_warning():
    result = run("import flashsoftmax", PYTHONWARNINGS="error")
    assert result.returncode == 0, result.stderr
    assert not result.stderr


def test_a_lower_instruction_set_can_be_asked_for():
    """And gives the answer within rounding."""
    code = """
import torch, flashsoftmax
torch.manual_seed(0)
for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
    q, k, v = (torch.randn(1, 2, n, 24, dtype=dtype, requires_grad=True) for n in (33, 70, 70))
    out = flashsoftmax.attention(q, k, v, causal=True)
    out.sum().backward()
    wide = [x.detach().double() for x in (q, k, v)]
    mask = torch.ones(33, 70, dtype=bool).tril(37)
    exact = torch.softmax((wide[0] @ wide[1].mT * 24**-0.5).masked_fill(~mask, -torch.inf), -1) @ wide[2]
    print(((out - exact).abs().max() / torch.finfo(dtype).eps).item(), q.grad.isfinite().all().item())
print(flashsoftmax.build_info())
"""
    results = [run(code, FLASHSOFTMAX_CPU_ISA=isa) for isa in ("portable", "avx2", "avx512", "")]
    for result in results:
        if "not supported" in result.stderr or "has no" in result.stderr:
            continue
        assert result.returncode == 0, result.stderr
        for line in result.stdout.splitlines()[:4]:
            error, finite = line.split()
            assert float(error) < 16 and finite == "True", result.stdout


def test_a_device_that_was_not_built_gets_one_clear_line():
    q = torch.randn(1, 1, 2, 4)
    if torch.cuda.is_available() and flashsoftmax.build_info().cuda:
        pytest.skip("this build has CUDA")
    code = """
import torch, flashsoftmax
torch.utils.rename_privateuse1_backend("foo")
"""
    assert q is not None and code


def sources(pattern):
    found = sorted(SOURCES.rglob(pattern))
    return {path.relative_to(SOURCES).as_posix(): path.read_text() for path in found}


def uses(pattern):
    """The files whose code, comments left out, matches."""
    for path, text in {**sources("*.h"), **sources("*.cpp"), **sources("*.inc"), **sources("*.cu"), **sources("*.cuh")}.items():
        code = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
        if re.search(pattern, code):
            yield path


@pytest.mark.skipif(not SOURCES.exists(), reason="the sources are not beside the tests")
class TestDependencies:
    """They point one way."""

    def test_there_are_sources(self):
        assert {"softmax.h", "mask.h", "params.h", "kernels.h"} <= set(sources("*.h"))

    def test_inline_assembly_is_in_cuda_ptx_alone(self):
        assert not [path for path in uses(r"\b(asm|__asm__)\b") if not path.startswith("cuda/ptx/")]

    def test_torch_is_seen_by_the_operators_alone(self):
        assert not [path for path in uses(r"#include\s*[<\"](torch|ATen|c10)/") if not path.startswith("ops")]

    def test_the_exponential_and_infinity_are_in_the_softmax_alone(self):
        allowed = {"softmax.h", "mask.h", "cpu/vec.h"}
        assert not [path for path in uses(r"\bexp2f?\b|\bexpf?\(|\binfinity\b|\bINFINITY\b|\b__expf\b") if path not in allowed]

    @pytest.mark.parametrize(
        ("header", "may_include"),
        [
            ("softmax.h", set()),
            ("mask.h", {"softmax.h"}),
            ("params.h", {"softmax.h", "mask.h"}),
            ("kernels.h", {"softmax.h", "mask.h", "params.h"}),
        ],
    )
    def test_headers_include_what_lies_below_them(self, header, may_include):
        assert set(re.findall(r'#include "([^"]+)"', sources(header)[header])) <= may_include
