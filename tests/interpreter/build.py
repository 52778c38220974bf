"""Compiles the interpreter and the kernels. Results are cached by a hash of their sources, command and machine."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from flashsoftmax.toolkit import output, toolkits

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
TORCH = Path(torch.__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "flashsoftmax-interpreter"

CXX = ["-O3", "-g0", "-fPIC", "-Wall", "-Wextra"]
# -frounding-math: or the compiler would compute constants with the default rounding rather than the instruction's.
CORE = ["-std=c++20", *CXX, "-march=native", "-fwrapv", "-frounding-math", "-fno-strict-aliasing"]
OPERATORS = ["-std=c++17", "-O1", *CXX[1:], "-fvisibility=hidden", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
NVCC = ["-std=c++17", "-O3", "-lineinfo", "-gencode=arch=compute_80,code=compute_80"]


class BuildError(RuntimeError):
    pass


@cache
def cuda_home() -> Path | None:
    """The directory of the first CUDA 13 toolkit."""
    return next((home for home, release in toolkits() if release.startswith("13.")), None)


@cache
def unavailable() -> str | None:
    """Why the interpreter cannot run here, or None if it can."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"the interpreter wants Linux on x86_64, this is {platform.system()} on {platform.machine()}"
    if cuda_home() is None:
        return "there is no nvcc of CUDA 13"
    version = re.search(r"\d+", output("g++", "-dumpversion")) if shutil.which("g++") else None
    if version is None or int(version[0]) < 11:
        return "there is no g++ of 11 or later"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "there are no headers of Python"
    return None


def closure(source: Path) -> list[Path]:
    """A file and, recursively, those it includes with quotes."""
    found: dict[Path, None] = {}
    queue = [source.resolve()]
    while queue:
        file = queue.pop()
        if file in found or not file.exists():
            continue
        found[file] = None
        queue += [
            (file.parent / name).resolve() for name in re.findall(r'^\s*#\s*include\s+"(.+?)"', file.read_text(), re.M)
        ]
    return sorted(found)


@cache
def machine() -> str:
    """What compiled files depend on besides their sources: tools and CPU."""
    flags = re.search(r"^flags.*$", Path("/proc/cpuinfo").read_text(), re.M)
    return f"{torch.__version__} {cuda_home()} {output('g++', '-dumpfullversion')} {flags and flags[0]}"


def hashed(command: Sequence[str], files: Sequence[Path]) -> str:
    digest = hashlib.sha256(f"{machine()} {command}".encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def locked() -> Iterator[None]:
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def made(name: str, command: Sequence[str], files: Sequence[Path], suffix: str) -> Path:
    """The output of a command, "OUT" in it, unless it is in the cache. files: its inputs."""
    to = CACHE / f"{name}-{hashed(command, files)}{suffix}"
    if to.exists():
        to.touch()
        return to
    partial = to.with_name(f"{to.stem}.{os.getpid()}{suffix}")
    done = subprocess.run(
        [str(partial) if word == "OUT" else word for word in command], capture_output=True, text=True, cwd=ROOT
    )
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    partial.rename(to)
    return to


def compiled(source: Path, flags: Sequence[str]) -> Path:
    home = cuda_home()
    if source.suffix == ".cu":
        tool = [f"{home}/bin/nvcc", *NVCC, "--compress-mode=none", "-Xcompiler=-fPIC,-fvisibility=hidden", *flags]
    else:
        tool = ["g++", *flags]
    return made(source.stem, [*tool, "-c", str(source), "-o", "OUT"], closure(source), ".o")


def symbols(objects: Sequence[Path], *options: str) -> set[str]:
    return set(re.findall(r"\b_ZN\w+$", output("nm", *options, *objects), re.M))


def stand_ins(objects: Sequence[Path], errors: Sequence[str]) -> Path:
    """Replaces the functions of files that do not compile by ones that raise the compiler's error."""
    missing = sorted(symbols(objects, "--undefined-only") - symbols(objects, "--defined-only"))
    text = f"#include <stdexcept>\nstatic const char* errors = {json.dumps(chr(10).join(errors))};\n"
    ours = (name for name in missing if name.startswith("_ZN12flashsoftmax"))
    text += "".join(f'extern "C" void {name}() {{ throw std::runtime_error(errors); }}\n' for name in ours)
    source = CACHE / f"stand_ins-{hashlib.sha256(text.encode()).hexdigest()[:16]}.cpp"
    source.write_text(text)
    return compiled(source, CXX)


def library(name: str, sources: Sequence[tuple[Path, Sequence[str]]], linked: Sequence[str]) -> Path:
    def compiled_or_error(source: tuple[Path, Sequence[str]]) -> Path | BuildError:
        try:
            return compiled(*source)
        except BuildError as error:
            if source[0].suffix != ".cu":
                raise
            return error

    with locked(), ThreadPoolExecutor(max(1, min(2, len(os.sched_getaffinity(0))))) as pool:
        results = list(pool.map(compiled_or_error, sources))
        objects = [result for result in results if isinstance(result, Path)]
        if len(objects) < len(results):
            objects.append(stand_ins(objects, [str(error) for error in results if isinstance(error, BuildError)]))
        command = ["g++", "-shared", "-o", "OUT", *map(str, objects), "-Wl,-Bsymbolic", *linked]
        return made(name, command, objects, ".so")


def torch_flags() -> list[str]:
    return [f"-isystem{TORCH}/include", f"-isystem{TORCH}/include/torch/csrc/api/include"]


def core_library() -> Path:
    python = [
        *CORE[:1],
        "-O1",
        *CXX[1:],
        "-fno-strict-aliasing",
        *torch_flags(),
        f"-isystem{sysconfig.get_path('include')}",
    ]
    python += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    files = sorted((HERE / "core").glob("*.cpp"))
    sources = [(file, python if file.stem == "bindings" else CORE) for file in files if file.stem != "runtime"]
    return library("core", sources, [f"-L{TORCH}/lib", "-lc10", f"-Wl,-rpath,{TORCH}/lib"])


@cache
def core() -> ModuleType:
    path = core_library()
    loader = importlib.machinery.ExtensionFileLoader("core", str(path))
    spec = importlib.util.spec_from_file_location("core", path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def launcher_library(name: str, sources: Sequence[Path], flags: Sequence[str] = ()) -> Path:
    """A library of .cu and .cpp files, linked to the interpreter as its CUDA runtime."""
    core()
    runtime = HERE / "core/runtime.cpp"
    own = ["-std=c++20", *CXX, f"-isystem{cuda_home()}/include"]
    files: list[tuple[Path, Sequence[str]]] = [(runtime, own)]
    files += [(file, flags if file.suffix == ".cu" else [*OPERATORS, *torch_flags(), *flags]) for file in sources]
    linked = [str(core_library()), f"-L{TORCH}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{TORCH}/lib"]
    return library(name, files, ["-Wl,--no-as-needed", *linked])


def ptx(source: Path, flags: Sequence[str] = ()) -> str:
    """The PTX of a .cu file."""
    command = [f"{cuda_home()}/bin/nvcc", "-ptx", *NVCC, *flags, str(source), "-o", "OUT"]
    with locked():
        return made(source.stem, command, closure(source), ".ptx").read_text()
