"""Executes the PTX of CUDA kernels on the CPU, and checks what they do.

    import interpreter                                    # tests/ is on the path of pytest

    interpreter.operators()                               # builds what changed, registers flashsoftmax_interpreted
    with interpreter.session(seed=0) as run:
        out, lse = torch.ops.flashsoftmax_interpreted.attention(...)     # on CPU tensors, the schema of flashsoftmax
    print(run.launches[0])                                # what each kernel did: see Launched

The launchers of csrc/cuda run unchanged: the CUDA runtime that they call is the interpreter. Its device pointers are
host pointers, and everything runs synchronously. With seed 0, a session runs warps and blocks in order; every other
seed interleaves them differently. The first error of a kernel ends the session and raises Fault, which names the
kernel, the line of CUDA and of PTX, the block and the thread. Errors are

- accesses out of bounds or misaligned. A pointer belongs to one tensor: an access that leaves it is an error even if it
  lands in another tensor, and so is one between a tensor's rows;
- writes to an input, outputs that are not written, reads of global memory that nobody wrote;
- uses of uninitialised registers, shared or local memory: in an address, a branch, an atomic or a vote, or stored to
  global memory. Merely to load, copy or compute with such a value is no error;
- races on shared and global memory between lanes, warps or blocks: accesses without a barrier, __syncwarp, mbarrier,
  acquire and release, or fence and atomic between them. Threads of one block may store equal values to one address;
- cp.async that is not waited for, or whose source or destination is overwritten before that;
- deadlock, barriers that not all threads reach, spin loops that wait for what no thread writes;
- instructions, or modifiers of instructions, that the interpreter does not know.

Kernels from any .cu file:

    module = interpreter.compile("kernel.cu")             # or interpreter.Module(ptx)
    with interpreter.session() as run:
        run.input("x", x)                                 # a tensor that kernels may read
        run.output("y", y)                                # one that they must write; poisoned with NaN
        module.launch("kernel", grid=(2, 1, 1), block=(128,), shared=0, arguments=[x, y, 3, 0.5])
                                                          # int: int32, float: float32; other types: bytes
    library = interpreter.load("name", ["kernel.cu", "launcher.cpp"])    # a ctypes library with its own launchers

Without nvcc or g++, `unavailable()` says what is missing, and everything else raises RuntimeError.
From the command line: python -m tests.interpreter --help
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import build
from .build import BuildError, unavailable

__all__ = ["Banks", "BuildError", "Fault", "Launched", "Module", "Run", "compile", "load", "operators", "session"]
__all__ += ["unavailable"]

NAMESPACE = "flashsoftmax_interpreted"


class Fault(RuntimeError):
    """An error of a kernel. The message is the whole report."""


@dataclass(frozen=True)
class Banks:
    """Accesses to shared memory by one kind of instruction, and the passes over the banks that they took."""

    accesses: int
    wavefronts: int
    ideal: int

    @property
    def conflicts(self) -> int:
        return self.wavefronts - self.ideal


@dataclass(frozen=True)
class Launched:
    """Counts of one launch. Bytes and sectors (of 32 bytes) are those of global memory."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    instructions: int  # of warps
    by_kind: dict[str, int]
    mmas: int
    shared: dict[str, Banks]
    bytes_read: int
    bytes_written: int
    distinct_bytes_read: int
    distinct_bytes_written: int
    global_accesses: int  # of warps
    sectors: int
    ideal_sectors: int

    @property
    def conflicts(self) -> int:
        return sum(banks.conflicts for banks in self.shared.values())


def _place(x: Tensor) -> tuple[int, list[int], list[int], int]:
    return x.data_ptr(), list(x.shape), list(x.stride()), x.element_size()


@dataclass
class Run:
    """A session: its launches so far, and the tensors that it may access."""

    launches: list[Launched] = field(default_factory=list)
    _outputs: dict[str, Tensor] = field(default_factory=dict)

    def input(self, name: str, x: Tensor) -> None:
        build.core().declare_input(name, *_place(x))

    def output(self, name: str, x: Tensor) -> None:
        """An output: every element must be written before the session ends."""
        x.view(torch.uint8).fill_(0xFF) if x.is_contiguous() and x.dim() else x.fill_(float("nan"))
        build.core().declare_output(name, *_place(x))
        self._outputs[name] = x

    def memory(self, name: str, x: Tensor) -> None:
        """A tensor that has values and may be read and written."""
        build.core().declare_memory(name, *_place(x))

    def check_written(self, outputs: dict[str, Tensor]) -> None:
        for name, x in outputs.items():
            index = build.core().unwritten(*_place(x))
            if index >= 0 and not build.core().failed():
                at = list(torch.unravel_index(torch.tensor(index), x.shape)) if x.dim() else []
                raise Fault(f"{name}{[int(i) for i in at]}, of shape {list(x.shape)}, was never written")

    def check(self) -> None:
        self._outputs, outputs = {}, self._outputs
        self.check_written(outputs)


class _Operators(TorchDispatchMode):
    """Declares the tensors that an operator is called with, and checks that its results are written."""

    def __init__(self, run: Run) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.run = run

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch would load its compiler, seconds of it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != NAMESPACE:
            return func(*args, **kwargs)
        core = build.core()
        core.clear_memory()
        schema = {argument.name: argument for argument in func._schema.arguments}
        named = dict(zip(schema, args, strict=False)) | kwargs
        for name, value in named.items():
            written = schema[name].alias_info is not None and schema[name].alias_info.is_write
            for n, x in enumerate(value if isinstance(value, list | tuple) else [value]):
                if isinstance(x, Tensor) and x.numel():
                    declare = self.run.memory if written else self.run.input
                    declare(f"{name}[{n}]" if isinstance(value, list | tuple) else name, x)
        deterministic: Any = torch.utils.deterministic  # would fill what the operator allocates
        fill, deterministic.fill_uninitialized_memory = deterministic.fill_uninitialized_memory, False
        core.record_allocations(True)
        try:
            result = func(*args, **kwargs)
        finally:
            core.record_allocations(False)
            deterministic.fill_uninitialized_memory = fill
        if not core.failed():
            results = result if isinstance(result, list | tuple) else [result]
            self.run.check_written({f"output {n}": x for n, x in enumerate(results) if x is not None and x.numel()})
        return result


@contextmanager
def session(seed: int = 0, *, max_instructions: int = 1 << 32) -> Iterator[Run]:
    """Raises the first fault of the kernels that run in it."""
    core = build.core()
    core.begin(seed, max_instructions)
    run = Run()
    error: BaseException | None = None
    try:
        with _Operators(run):
            yield run
        run.check()
    except BaseException as caught:
        error = caught
    fault: str | None = core.end()
    for launched in core.launches():
        shared = {kind: Banks(*counts) for kind, counts in launched.pop("shared").items()}
        run.launches.append(Launched(shared=shared, **launched))
    if fault is not None:
        raise Fault(fault.replace(f"{build.ROOT}/", "")) from error
    if error is not None:
        raise error


class Module:
    """The kernels of a PTX text."""

    def __init__(self, ptx: str) -> None:
        self.ptx = ptx
        self._module = build.core().Module(ptx)

    @property
    def kernels(self) -> list[str]:
        return list(self._module.kernels())

    def unknown(self) -> list[str]:
        """The statements of the kernels that the interpreter cannot execute."""
        return [text for kernel in self.kernels for text in self._module.unknown(kernel)]

    def launch(
        self,
        kernel: str,
        grid: Sequence[int] = (1,),
        block: Sequence[int] = (32,),
        arguments: Sequence[Tensor | int | float | bytes] = (),
        shared: int = 0,
        cooperative: bool = False,
    ) -> None:
        """kernel: its name, or a part of it that no other has. cooperative: all blocks are resident at once."""
        names = [name for name in self.kernels if name == kernel] or [name for name in self.kernels if kernel in name]
        if len(names) != 1:
            raise ValueError(f"kernel: {kernel!r} is in {len(names)} of {self.kernels}, wanted 1")
        self._module.launch(names[0], list(grid), list(block), shared, [_bytes(x) for x in arguments], cooperative)


def _bytes(x: Tensor | int | float | bytes) -> bytes:
    if isinstance(x, Tensor):
        return struct.pack("<Q", x.data_ptr())
    if isinstance(x, int):
        return struct.pack("<i", x) if x < 1 << 31 else struct.pack("<I", x)
    return struct.pack("<f", x) if isinstance(x, float) else x


def _wanted() -> None:
    if reason := unavailable():
        raise RuntimeError(reason)


def compile(source: str | Path, flags: Sequence[str] = ()) -> Module:
    """Compiles a .cu file to its kernels."""
    _wanted()
    return Module(build.ptx(Path(source).resolve(), flags))


def load(name: str, sources: Sequence[str | Path], flags: Sequence[str] = ()) -> ctypes.CDLL:
    """A library of .cu and .cpp files, linked to the interpreter as its CUDA runtime."""
    _wanted()
    return ctypes.CDLL(str(build.launcher_library(name, [Path(source).resolve() for source in sources], flags)))


@cache
def operators() -> Any:
    """torch.ops.flashsoftmax_interpreted, built from the current sources."""
    _wanted()
    sources = [build.HERE / "operators.cpp", *sorted((build.ROOT / "csrc/cuda").rglob("*.cu"))]
    torch.ops.load_library(str(build.launcher_library("operators", sources)))
    return getattr(torch.ops, NAMESPACE)
