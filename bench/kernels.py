"""Lists registers, spills and instructions per MMA of the compiled CUDA kernels: python -m bench.kernels.

Reads the machine code of the built library or of a given file, with cuobjdump (nvidia-cuda-cuobjdump on PyPI).
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from flashsoftmax import build
from flashsoftmax.toolkit import from_pypi


@dataclass(frozen=True)
class Kernel:
    name: str
    arch: str
    registers: int
    local_bytes: int
    """Memory per thread: its stack and spilled registers."""
    loop: tuple[int, int] | None
    """Instructions and MMAs of one iteration of the main loop; None if the kernel has no MMA."""


def cuobjdump() -> str:
    """Where the program is: on PATH or from PyPI."""
    folders = (home / "bin" for home in from_pypi())
    found = shutil.which("cuobjdump") or next(
        (str(x / "cuobjdump") for x in folders if (x / "cuobjdump").exists()), None
    )
    if found is None:
        raise FileNotFoundError(
            "no cuobjdump on PATH or from PyPI; run pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
        )
    return found


def dump(*options: str) -> str:
    return subprocess.run([cuobjdump(), *options], check=True, capture_output=True, text=True).stdout


GRADIENTS = ("query", "key", "value", "key and value")
"""What a backward kernel makes the gradients of, by its template argument `Wanted`."""


def readable(name: str) -> str:
    """The name and template arguments of a kernel, from its mangled name."""
    if not (filt := shutil.which("c++filt")):
        return name
    full = subprocess.run([filt, name], check=True, capture_output=True, text=True).stdout.strip()
    full = re.sub(r"\(anonymous namespace\)::|flashsoftmax::|cuda::|sm80::|^void ", "", full)
    full = re.sub(r"\(Wanted\)(\d)", lambda wanted: GRADIENTS[int(wanted[1])], full)
    return full.partition("(")[0].replace("__nv_bfloat16", "bf16").replace("__half", "f16")


@dataclass(frozen=True)
class Instruction:
    address: int
    text: str
    target: int | None
    """Where a branch goes; None if this is no branch."""
    falls: bool
    """Whether execution may go on with the next instruction."""


def instructions(code: str) -> list[Instruction]:
    found = []
    for address, predicate, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\d+ )?([A-Z][^;]*);", code):
        branch = re.match(r"BRA\S*\s+(?:[^,]+,\s*)?0x([0-9a-f]+)", text)
        conditional = bool(predicate) or (branch is not None and "," in text)
        ends = text.startswith(("BRA", "EXIT", "RET"))
        target = int(branch[1], 16) if branch else None
        found.append(Instruction(int(address, 16), text, target, conditional or not ends))
    return found


def order_from(begin: int, following: Sequence[Sequence[int]]) -> list[int]:
    """The instructions that `begin` can reach, in topological order if the back edges of loops are left out."""
    seen, order = {begin}, []
    stack = [(begin, iter(following[begin]))]
    while stack:
        node, rest = stack[-1]
        new = next((n for n in rest if n not in seen), None)
        if new is None:
            order.append(node)
            stack.pop()
        else:
            seen.add(new)
            stack.append((new, iter(following[new])))
    return order[::-1]


def main_loop(code: str) -> tuple[int, int] | None:
    """Instructions and MMAs of one iteration of the main loop, from the machine code of a kernel.

    The main loop is the one with the most MMAs. Its path with the most MMAs and asynchronous copies counts, and among
    equals the shortest: that is the path of a tile without a mask.
    """
    listing = instructions(code)
    at = {instruction.address: i for i, instruction in enumerate(listing)}
    following = [
        ([i + 1] if x.falls and i + 1 < len(listing) else []) + ([at[x.target]] if x.target in at else [])
        for i, x in enumerate(listing)
    ]
    begins = {at[x.target] for x in listing if x.target in at and x.target <= x.address}
    ways = []
    for begin in begins:
        order = order_from(begin, following)
        place = {node: n for n, node in enumerate(order)}
        # (MMAs, asynchronous copies, -instructions) of the best path from begin to each node.
        best: dict[int, tuple[int, int, int]] = {begin: (0, 0, 0)}
        for node in order:
            mmas, copies, size = best[node]
            text = listing[node].text
            way = (mmas + text.startswith(("HMMA", "WGMMA")), copies + text.startswith("LDGSTS"), size - 1)
            for n in following[node]:
                if n == begin:
                    ways.append(way)
                elif place[n] > place[node]:
                    best[n] = max(best.get(n, way), way)
    mmas, _, size = max(ways, default=(0, 0, 0))
    return (-size, mmas) if mmas else None


def kernels(library: Path, arch: str) -> Iterator[Kernel]:
    usage = dump("--dump-resource-usage", "-arch", arch, str(library))
    code = {}
    for section in re.split(r"\n\s*Function : ", dump("-sass", "-arch", arch, str(library)))[1:]:
        name, _, text = section.partition("\n")
        code[name.strip()] = text
    pattern = r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)"
    for name, registers, stack, local in re.findall(pattern, usage):
        yield Kernel(readable(name), arch, int(registers), int(stack) + int(local), main_loop(code.get(name, "")))


def rows(found: Sequence[Kernel]) -> Iterator[list[str]]:
    for kernel in sorted(found, key=lambda x: (x.arch, x.name)):
        size, mmas = kernel.loop or (0, 0)
        loop = [f"{size}", f"{mmas}", f"{(size - mmas) / mmas:.2f}"] if mmas else ["", "", ""]
        yield [kernel.name, kernel.arch, f"{kernel.registers}", f"{kernel.local_bytes}", *loop]


HEADERS = ["kernel", "arch", "registers", "local bytes", "loop instructions", "of them MMAs", "others per MMA"]


def markdown(found: Sequence[Kernel]) -> str:
    lines = [HEADERS, ["---"] * len(HEADERS), *rows(found)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("--library", type=Path, default=build.library("_CUDA"), help="default: the installed library")
    parser.add_argument(
        "--arch", default="sm_80,sm_90", help="architectures, separated by commas; default: %(default)s"
    )
    parser.add_argument("--out", type=Path, help="folder for kernels.md")
    options = parser.parse_args(argv)
    if options.library is None:
        parser.error(f"no CUDA kernels to read: {build.cuda_reason()}")
    found = [kernel for arch in options.arch.split(",") for kernel in kernels(options.library, arch)]
    table = Table(*HEADERS, box=box.SIMPLE_HEAD)
    for row in rows(found):
        table.add_row(*row)
    console = Console(highlight=False)
    console.width = max(console.width, 120)
    console.print(table)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        command = "python -m bench.kernels --out docs"
        (options.out / "kernels.md").write_text(
            f"# Registers and instructions of the CUDA kernels\n\n`{command}`\n\n{markdown(found)}"
        )
    return int(any(kernel.local_bytes for kernel in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
