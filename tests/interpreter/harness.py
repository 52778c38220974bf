"""Runs single PTX instructions on tensors, one element per lane."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import Module, session

REGISTERS = {
    1: ("b16", "u8"),
    2: ("b16", "b16"),
    4: ("b32", "b32"),
    8: ("b64", "b64"),
}  # by size: the class, and the type for ld

HEADER = ".version 8.0\n.target sm_80\n.address_size 64\n"


def kernel(body: str, parameters: int, shared_bytes: int = 0) -> Module:
    """A kernel named k, whose parameters are pointers p0, p1, ..."""
    declared = ", ".join(f".param .u64 p{n}" for n in range(parameters))
    registers = ".reg .pred %p<20>; .reg .b16 %h<50>; .reg .b32 %r<200>; .reg .b64 %d<50>;"
    shared = f".shared .align 128 .b8 s[{shared_bytes}];" if shared_bytes else ""
    return Module(f"{HEADER}.visible .entry k({declared}) {{\n{registers}\n{shared}\n{body}\nret;\n}}\n")


def lane_pointer(parameter: int, size: int, register: int) -> str:
    """Code that sets %d<register> to the address of the thread's element, of size bytes, in a parameter's array."""
    return (
        f"ld.param.u64 %d{register}, [p{parameter}]; mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x;"
        f"mov.u32 %r2, %ntid.x; mad.lo.u32 %r0, %r1, %r2, %r0;"
        f"mad.wide.u32 %d{register}, %r0, {size}, %d{register};\n"
    )


def execute(instruction: str, inputs: Sequence[Tensor], out: torch.dtype, seed: int = 0) -> Tensor:
    """The result of an instruction, whose operands are written {d}, {a}, {b}, {c}, for each element of the inputs."""
    count = inputs[0].numel()
    result = torch.empty(count, dtype=out)
    body, names = "", {}
    for n, x in enumerate(inputs):
        size = x.element_size()
        kind, load = REGISTERS[size]
        name = f"%{ {'b16': 'h', 'b32': 'r', 'b64': 'd'}[kind] }{10 + n}"
        body += lane_pointer(n, size, n) + f"ld.global.{load} {name}, [%d{n}];\n"
        names["abc"[n]] = name
    kind, store = REGISTERS[result.element_size()]
    names["d"] = f"%{ {'b16': 'h', 'b32': 'r', 'b64': 'd'}[kind] }20"
    for key, name in names.items():
        instruction = instruction.replace(f"{{{key}}}", name)
    body += instruction + "\n" + lane_pointer(len(inputs), result.element_size(), 30)
    body += f"st.global.{store} [%d30], {names['d']};\n"
    module = kernel(body, len(inputs) + 1)
    assert not module.unknown(), module.unknown()
    with session(seed) as run:
        for n, x in enumerate(inputs):
            run.input("abc"[n], x)
        run.output("d", result)
        module.launch("k", (count // 32,), (32,), [*inputs, result])
    return result
