"""Loads torch.ops.flashsoftmax and knows its operators and the names of their arguments."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from . import build


def _load() -> None:
    core = os.environ.get("FLASHSOFTMAX_LIBRARY") or build.library("_C")
    torch.ops.load_library(str(core))
    if build.cuda_reason() is None:
        torch.ops.load_library(str(build.library("_CUDA")))


_load()

NAMES = (
    "attention",
    "attention_backward",
    "attention_out",
    "attention_backward_out",
    "merge",
    "merge_backward",
    "append_kv",
    "rotary",
)
OPERATORS = {name: getattr(torch.ops.flashsoftmax, name).default for name in NAMES}
ARGUMENTS = {name: tuple(x.name for x in op._schema.arguments) for name, op in OPERATORS.items()}
"""The names of each operator's arguments, in the order of its schema."""


OMITTED = {"max_seqlen_q": 0, "max_seqlen_k": 0, "softcap": 0.0, "dropout_p": 0.0, "bias_grad": False}
"""The values of omitted arguments of which None is not allowed."""


_PLACES = {name: {x: n for n, x in enumerate(arguments)} for name, arguments in ARGUMENTS.items()}
_ALL_OMITTED = {name: [OMITTED.get(x) for x in arguments] for name, arguments in ARGUMENTS.items()}


def listed(name: str, arguments: dict[str, Any]) -> list[Any]:
    """An operator's arguments in the order of its schema. Omitted ones are None, or as in OMITTED."""
    places, values = _PLACES[name], _ALL_OMITTED[name].copy()
    for argument, x in arguments.items():
        values[places[argument]] = x
    return values


def statistics(dtype: torch.dtype) -> torch.dtype:
    """The dtype of lse, of all sums, and of what is added to scores: float32, for float64 float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def flattened(args: Iterable[Any]) -> list[Any]:
    """The arguments, with the elements of a list or tuple in its place."""
    return [x for arg in args for x in (arg if isinstance(arg, (list, tuple)) else (arg,))]


def _missing_on_cuda(name: str) -> Callable[..., Any]:
    """A stand-in for a missing CUDA kernel: it raises an error with the reason."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        reason = build.cuda_reason() or "the CUDA library does not contain it"
        raise NotImplementedError(f"flashsoftmax::{name} has no CUDA kernel: {reason}")

    return kernel


for _name in NAMES:
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"flashsoftmax::{_name}", "CUDA"):
        torch.library.impl(f"flashsoftmax::{_name}", "CUDA")(_missing_on_cuda(_name))
