"""Builds two libraries: _C (schemas, checks, CPU) always, and _CUDA where there is an nvcc.

FLASHSOFTMAX_CUDA      auto (default): build _CUDA if that is possible; 1: fail if it is not; 0: leave it out
CUDA_HOME              the CUDA toolkit; else that of the nvcc on PATH, else that of the build requirements
TORCH_CUDA_ARCH_LIST   GPU architectures as PyTorch spells them; default 8.0+PTX;9.0
MAX_JOBS               files compiled at a time; default: what cores and memory allow
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from runpy import run_path

import torch
from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.errors import SetupError
from torch.utils import cpp_extension

CUDA = os.environ.get("FLASHSOFTMAX_CUDA", "auto")
ARCHS = os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0+PTX;9.0")
RECORD = {"torch": torch.__version__}  # of this build, for build_info()
GIB_PER_JOB = 1.5

STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000"  # of torch 2.10: loads in every later one
CXX = ["-std=c++17", "-O3", "-g0", "-Wall", "-Wextra", "-fvisibility=hidden", STABLE_ABI]
CXX += [
    "-ffp-contract=off"
]  # products are rounded before they are added to; csrc/cpu asks for an fma where it wants one
CXX += [f"-isystem{folder}" for folder in cpp_extension.include_paths()]
NVCC = ["-std=c++17", "-O3", "-lineinfo", "-Xcompiler=-Wall,-Wextra,-fvisibility=hidden"]
NVCC += ["-Xptxas=--warn-on-spills,--warn-on-local-memory-usage"]
NVCC += ["-U__CUDA_NO_HALF_CONVERSIONS__", "-U__CUDA_NO_BFLOAT16_CONVERSIONS__"]  # which torch defines for all


def jobs() -> int:
    """Compilers that the cores and the free memory allow, within a container's limit."""
    gib = [int(kib) / 2**20 for kib in re.findall(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())]
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and limit.read_text().strip().isdigit():
        gib.append((int(limit.read_text()) - int(used.read_text())) / 2**30)
    return max(1, min(len(os.sched_getaffinity(0)), int(min(gib) / GIB_PER_JOB)))


def cuda_toolkit() -> tuple[Path, str]:
    """Home and release of the first toolkit that fits torch."""
    wanted = (torch.version.cuda or "13").split(".")[0]
    others = []
    for home, release in run_path("flashsoftmax/toolkit.py")["toolkits"]():
        if release.split(".")[0] == wanted:
            return home, release
        others.append(f", {home}/bin/nvcc is of CUDA {release}")
    raise SetupError(f"there was no nvcc of CUDA {wanted}" + "".join(others))


def library(name: str, *sources: str, **options: object) -> Extension:
    files = sorted(str(file) for pattern in sources for file in Path("csrc").glob(pattern))
    return cpp_extension.CppExtension(f"flashsoftmax.{name}", files, py_limited_api=True, **options)


def cpu_library() -> Extension:
    return library("_C", "ops/cpu.cpp", "cpu/*.cpp", extra_compile_args=CXX)


def cuda_library(home: Path) -> Extension:
    """Holds the CUDA runtime in itself: so it needs no libcudart, and builds against a CPU torch too."""
    cpp_extension.CUDA_HOME = str(home)
    folders = home / "lib64", home / "lib", *home.glob("targets/*/lib")
    return library(
        "_CUDA",
        "ops/cuda.cpp",
        "cuda/**/*.cu",
        extra_compile_args={"cxx": [*CXX, "-DUSE_CUDA"], "nvcc": NVCC},
        extra_link_args=[
            *(f"-L{folder}" for folder in folders),
            *("-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lcudart_static", "-lrt", "-lpthread", "-ldl"),
        ],
    )


def libraries() -> list[Extension]:
    try:
        if CUDA == "0":
            raise SetupError("FLASHSOFTMAX_CUDA was 0")
        home, release = cuda_toolkit()
        both = [cpu_library(), cuda_library(home)]
        RECORD.update(nvcc=release, archs=ARCHS)
        return both
    except SetupError as error:
        if CUDA == "1":
            raise SetupError(f"FLASHSOFTMAX_CUDA is 1, but {error}") from None
        RECORD.update(cuda_reason=str(error))
        return [cpu_library()]


class Build(build):
    def run(self) -> None:
        shutil.rmtree(self.build_base, ignore_errors=True)  # nothing of an earlier build gets into this one
        super().run()


class BuildLibraries(cpp_extension.BuildExtension):
    """Goes on without a CUDA library that does not build, and records the build beside what did."""

    def build_extensions(self) -> None:
        os.environ.setdefault("MAX_JOBS", str(jobs()))
        try:
            super().build_extensions()
        except Exception as error:
            if CUDA == "1" or len(self.extensions) == 1:
                raise
            RECORD.update(cuda_reason=f"it did not build: {error}")
            self.extensions = self.extensions[:1]
            super().build_extensions()

    def run(self) -> None:
        super().run()
        package = Path(self.get_ext_fullpath("flashsoftmax._C")).parent
        if "cuda_reason" in RECORD:
            for stale in package.glob("_CUDA.*"):
                stale.unlink()
        RECORD.update(version=self.distribution.get_version())
        (package / "_build.json").write_text(json.dumps(RECORD, indent=2) + "\n")


setup(
    ext_modules=libraries(),
    cmdclass={"build": Build, "build_ext": BuildLibraries},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
