"""What was built, and what the sources may depend on."""

import os
import re
import subprocess
import sys
from dataclasses import asdict, is_dataclass
from pathlib import Path

import pytest

import flashsoftmax
import flashsoftmax.library

SOURCES = Path(__file__).parents[1] / "csrc"
SUFFIXES = (".h", ".cpp", ".inc", ".cu", ".cuh")


def run(code, **environment):
    """Python in a process of its own."""
    command, environment = [sys.executable, "-c", code], os.environ | environment
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_public_names():
    functions = {"attention", "attention_varlen", "attention_paged", "merge", "build_info"}
    assert set(flashsoftmax.__all__) == functions | {"State"}
    for name in flashsoftmax.__all__:
        assert getattr(flashsoftmax, name).__doc__, f"{name} has no docstring"


def test_build_info_says_what_was_built():
    info = flashsoftmax.build_info()
    info = asdict(info) if is_dataclass(info) else dict(info)
    assert re.match(r"\d+\.\d+", info["version"])
    assert isinstance(info["cuda"], bool)
    assert info["cuda"] or info["cuda_reason"]


def test_imports_with_no_gpu_in_sight():
    code = "import flashsoftmax, torch; q = torch.ones(1, 1, 2, 4); print(flashsoftmax.attention(q, q, q).sum())"
    result = run(code, CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stderr
    assert "tensor(8.)" in result.stdout


def test_imports_before_torch_and_without_a_warning():
    result = run("import flashsoftmax", PYTHONWARNINGS="error")
    assert result.returncode == 0, result.stderr
    assert not result.stderr


INSTRUCTION_SETS = """
import torch, flashsoftmax
torch.manual_seed(0)
mask = torch.ones(33, 70, dtype=bool).tril(37)
for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
    q, k, v = (torch.randn(1, 2, n, 24, dtype=dtype, requires_grad=True) for n in (33, 70, 70))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = flashsoftmax.attention(q, k, v, causal=True)
    exact = torch.softmax((wide[0] @ wide[1].mT * 24**-0.5).masked_fill(~mask, -torch.inf), -1) @ wide[2]
    last = flashsoftmax.attention(q[:, :, -1:], k, v)
    out.sum().backward()
    exact.sum().backward()
    pairs = [(out, exact), (last, exact[:, :, -1:]), *((x.grad, y.grad) for x, y in zip((q, k, v), wide))]
    for found, wanted in pairs:
        error = (found - wanted).abs().max() / wanted.abs().max() / torch.finfo(dtype).eps
        assert error < 16, (dtype, error)
"""


@pytest.mark.parametrize("name", ["portable", "AVX2", "AVX-512"])
def test_every_instruction_set(name):
    result = run(INSTRUCTION_SETS, FLASHSOFTMAX_CPU_ISA=name)
    if "this processor has:" in result.stderr:
        pytest.skip(f"this processor has no {name}")
    assert result.returncode == 0, result.stderr


def test_an_instruction_set_that_does_not_exist_is_refused():
    result = run(INSTRUCTION_SETS, FLASHSOFTMAX_CPU_ISA="MMX")
    assert result.returncode != 0 and "MMX" in result.stderr


@pytest.mark.parametrize("operator", flashsoftmax.library.NAMES)
def test_a_device_that_was_not_built_says_why_in_one_line(operator):
    """What a CUDA tensor gets from the kernel that stands in for a missing one; it can be called without a GPU."""
    with pytest.raises(NotImplementedError) as error:
        flashsoftmax.library._missing_on_cuda(operator)()
    reason = flashsoftmax.build_info().cuda_reason or "the CUDA library does not contain it"
    assert operator in str(error.value) and reason in str(error.value) and "\n" not in str(error.value)


def sources(pattern):
    found = sorted(path for path in SOURCES.rglob(pattern) if path.suffix in SUFFIXES)
    return {path.relative_to(SOURCES).as_posix(): path.read_text() for path in found}


def uses(pattern):
    """The files whose code, comments left out, matches."""
    for path, text in sources("*").items():
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
        assert not [path for path in uses(r"#include\s*[<\"](torch|ATen|c10)/") if not path.startswith("ops/")]

    def test_the_exponential_and_infinity_are_in_the_softmax_alone(self):
        pattern = r"\bexp2f?\b|\b_*expf?\(|\binfinity\b|\bINFINITY\b|\bHUGE_VALF?\b"
        assert set(uses(pattern)) <= {"softmax.h", "mask.h", "cpu/vec_math.h"}

    def test_kernels_know_no_score_feature_by_name(self):
        """mask.h computes them, params.h says which are on, the operators take them from the caller."""
        found = set(uses(r"(?i)alibi|slopes|softcap"))
        assert {"mask.h", "params.h"} <= found
        assert not [path for path in found - {"mask.h", "params.h"} if not path.startswith("ops/")]

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
