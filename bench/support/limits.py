"""The limits of the machine, as calls that are timed in turns with the contenders."""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch

from .record import cpu_model
from .shapes import Inputs, Shape
from .timing import Timed

SOURCE = Path(__file__).with_name("limits.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread")
STEPS = 2**21
READ_BYTES = 2**26


@dataclass(frozen=True)
class Limit:
    name: str
    work: float
    """FLOPs or bytes per call."""
    timed: Timed


@cache
def library() -> ctypes.CDLL | None:
    """limits.cpp, compiled on first use; None if it does not compile here."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if compiler is None:
        return None
    key = hashlib.sha256("\n".join((SOURCE.read_text(), cpu_model(), compiler, *FLAGS)).encode()).hexdigest()
    folder = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "flashsoftmax"
    path = folder / f"limits-{key[:16]}.so"
    if not path.exists():
        building = path.with_suffix(f".{os.getpid()}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(building)], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        building.replace(path)
    return ctypes.CDLL(str(path))


def multiply_adds(name: str) -> Limit | None:
    function = getattr(library(), name, None)
    if function is None:
        return None
    function.restype = ctypes.c_double
    call = partial(function, torch.get_num_threads(), ctypes.c_int64(STEPS))
    return Limit({"fma_float32": "fp32 FMA", "dot_bfloat16": "vdpbf16ps"}[name], call(), Timed(call))


def matrix_product(dtype: torch.dtype, device: str, size: int) -> Limit:
    a, b = torch.randn(2, size, size, dtype=dtype, device=device)
    name = f"torch matmul, {str(dtype).removeprefix('torch.')}"
    return Limit(name, 2 * size**3, Timed(partial(torch.matmul, a, b)))


def read(inputs: Inputs) -> Limit:
    """Reads every byte of the keys and values, in so many passes that the start of the threads takes no share."""
    key, value = inputs.key.detach(), inputs.value.detach()
    both = key.nbytes + value.nbytes
    function = getattr(library(), "read_both", None)
    if function is None:
        words = [x.view(torch.float32) for x in (key, value)]
        return Limit("torch sum", both, Timed(lambda: [x.sum() for x in words]))
    passes = math.ceil(READ_BYTES / both)
    starts = (ctypes.c_void_p(x.data_ptr()) for x in (key, value))
    call = partial(function, *starts, ctypes.c_int64(key.nbytes), torch.get_num_threads(), passes)
    return Limit("read of K and V", both * passes, Timed(call))


def copy(inputs: Inputs) -> Limit:
    source = torch.empty(2**30, dtype=torch.uint8, device=inputs.key.device)
    target = torch.empty_like(source)
    return Limit("device copy", 2 * source.nbytes, Timed(partial(target.copy_, source)))


def limit(shape: Shape, inputs: Inputs, device: str) -> Limit:
    """What limits this shape: memory for decode, arithmetic otherwise. On a CPU, float16 is computed in float32."""
    dtype = inputs.query.dtype
    if device == "cuda":
        return copy(inputs) if shape.kind == "decode" else matrix_product(dtype, device, 8192)
    if shape.kind == "decode":
        return read(inputs)
    if dtype == torch.bfloat16:
        return multiply_adds("dot_bfloat16") or matrix_product(dtype, device, 2048)
    return multiply_adds("fma_float32") or matrix_product(torch.float32, device, 2048)
