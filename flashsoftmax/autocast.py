"""Autocast: query, key and value take the dtype in force, as in torch's own attention."""

from __future__ import annotations

from typing import Any

import torch

from .library import ARGUMENTS, OPERATORS


def _register(device: str, key: str) -> None:
    @torch.library.impl("flashsoftmax::attention", key)
    def attention(*args: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)
        values = dict(zip(ARGUMENTS["attention"], args, strict=True))
        operands = {name: values[name] for name in ("query", "key", "value")}
        values |= {name: x if x.dtype == torch.float64 else x.to(dtype) for name, x in operands.items()}
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))):
            return OPERATORS["attention"](*values.values())


_register("cpu", "AutocastCPU")
_register("cuda", "AutocastCUDA")
