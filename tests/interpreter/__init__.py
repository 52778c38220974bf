"""The GPU that we test on: executes the PTX that nvcc makes of our kernels on the CPU, and checks what they do.

    import interpreter                                    # tests/ is on the path of pytest

    interpreter.operators()                               # builds what changed, registers flashsoftmax_interpreted
    with interpreter.session(seed=0) as run:
        out, lse = torch.ops.flashsoftmax_interpreted.attention(...)     # on CPU tensors, the schema of flashsoftmax
    print(run.launches[0])                                # what each kernel did: see Launched

The launchers of csrc/cuda run as they are: the CUDA runtime that they call is the interpreter, whose device pointers
are pointers of the host, and whose streams run what they are given at once. A session begins with a seed: 0 runs warps
and blocks in order, each other seed interleaves them in its own way. What a kernel must not do raises Fault, which says
what, in which kernel, at which line of CUDA and of PTX, block and thread, and leaves the session:

- global memory: out of the bounds of a tensor (also between its rows), misaligned, a write to an input, a read of what
  nobody wrote, an output that was not written; two blocks of one launch at one address, unless they only read or are
  atomic;
- shared memory: out of bounds, misaligned, a read of what nobody wrote, races between warps and between the lanes of a
  warp, cp.async that was not waited for;
- registers that have no value, where that decides on an address, a branch or what is stored;
- barriers that not all reach, lanes that wait for each other, deadlock;
- an instruction, or a modifier of one, that the interpreter does not know.

Kernels without an operator, from a test or a file of one's own:

    module = interpreter.compile("kernel.cu")             # or interpreter.Module(ptx)
    with interpreter.session() as run:
        run.input("x", x)                                 # tensors that it may read
        run.output("y", y)                                # or must write; poisoned with NaN
        module.launch("kernel", grid=(2, 1, 1), block=(128,), shared=0, arguments=[x, y, 3, 0.5])
                                                          # int: int32, float: float32; other types: bytes
    library = interpreter.load("name", ["kernel.cu", "launcher.cpp"])    # a ctypes library with launchers of its own

Without nvcc or g++ `unavailable()` says so, and everything else raises RuntimeError.
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
    """What a kernel did that it must not. The message is the whole report."""


@dataclass(frozen=True)
class Banks:
    """Accesses of shared memory by one kind of instruction, and the passes over the banks that they take."""

    accesses: int
    wavefronts: int
    ideal: int

    @property
    def conflicts(self) -> int:
        return self.wavefronts - self.ideal


@dataclass(frozen=True)
class Launched:
    """What one launch of a kernel did. Bytes and sectors (of 32 bytes) are of global memory."""

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
    """A session of the device."""

    launches: list[Launched] = field(default_factory=list)
    _outputs: dict[str, Tensor] = field(default_factory=dict)

    def input(self, name: str, x: Tensor) -> None:
        build.core().declare_input(name, *_place(x))

    def output(self, name: str, x: Tensor) -> None:
        """To be written whole before the session ends."""
        x.view(torch.uint8).fill_(0xFF) if x.is_contiguous() and x.dim() else x.fill_(float("nan"))
        build.core().declare_output(name, *_place(x))
        self._outputs[name] = x

    def memory(self, name: str, x: Tensor) -> None:
        """To be read and written."""
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
    """Tells the device of the tensors that an operator is called with, and checks what it returns."""

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
        named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        for name, value in named.items():
            for n, x in enumerate(value if isinstance(value, list | tuple) else [value]):
                if isinstance(x, Tensor) and x.numel():
                    self.run.input(f"{name}[{n}]" if isinstance(value, list | tuple) else name, x)
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
            self.run.check_written({f"output {n}": x for n, x in enumerate(results) if x.numel()})
        return result


@contextmanager
def session(seed: int = 0, *, max_instructions: int = 1 << 32) -> Iterator[Run]:
    """Everything that runs on the device until it ends. Raises the first fault of a kernel."""
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
    """The kernels of a text in PTX."""

    def __init__(self, ptx: str) -> None:
        self.ptx = ptx
        self._module = build.core().Module(ptx)

    @property
    def kernels(self) -> list[str]:
        return list(self._module.kernels())

    def unknown(self) -> list[str]:
        """What the interpreter does not know of the kernels."""
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
        """kernel: its name, or a part of it that no other has. cooperative: all blocks run at the same time."""
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
    """The kernels of a .cu file."""
    _wanted()
    return Module(build.ptx(Path(source).resolve(), flags))


def load(name: str, sources: Sequence[str | Path], flags: Sequence[str] = ()) -> ctypes.CDLL:
    """A library of .cu and .cpp files, whose CUDA runtime is the interpreter."""
    _wanted()
    return ctypes.CDLL(str(build.launcher_library(name, [Path(source).resolve() for source in sources], flags)))


@cache
def operators() -> Any:
    """torch.ops.flashsoftmax_interpreted, of the sources as they are."""
    _wanted()
    sources = [build.HERE / "operators.cpp", *sorted((build.ROOT / "csrc/cuda").rglob("*.cu"))]
    torch.ops.load_library(str(build.launcher_library("operators", sources)))
    return getattr(torch.ops, NAMESPACE)
