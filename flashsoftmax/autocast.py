"""Autocast: query, key and value take the dtype in force, as in torch's own attention."""

from __future__ import annotations

from typing import Any

import torch

from .library import ARGUMENTS, OPERATORS

DEVICES = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


def cast(device: str, inputs: tuple[Any, ...]) -> list[Any]:
    """The arguments of the operator attention in the dtype of autocast on this device."""
    dtype = torch.get_autocast_dtype(device)
    values = dict(zip(ARGUMENTS["attention"], inputs, strict=True))
    operands = {name: values[name] for name in ("query", "key", "value")}
    values |= {name: x if x.dtype == torch.float64 else x.to(dtype) for name, x in operands.items()}
    return list(values.values())


def _register(device: str, key: str) -> None:
    @torch.library.impl("flashsoftmax::attention", key)
    def attention(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))):
            return OPERATORS["attention"](*cast(device, args))


for _device, _key in DEVICES.items():
    _register(_device, _key)
