"""The options that the functions of attention share: their names, types and defaults, and what the operator gets."""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable
from typing import Any, SupportsFloat, SupportsIndex, TypeAlias, TypedDict, TypeVar

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias
from torch.overrides import handle_torch_function, has_torch_function

from .library import flattened, statistics

Window: TypeAlias = tuple[int | None, int | None]
Function = TypeVar("Function", bound=Callable[..., Any])


class ScoreOptions(TypedDict, total=False):
    """Keyword options of every function of attention, those over ranks too. attention's docstring explains each.

    Numbers may be Python's, numpy's, tensors of one element, or symbolic.
    """

    causal: bool
    window: Window | None
    scale: SupportsFloat | None
    softcap: SupportsFloat | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None


class Options(ScoreOptions, total=False):
    """Keyword options of attention, attention_varlen and attention_paged."""

    q_offset: SupportsIndex | None
    kv_starts: Tensor | None
    split_size: SupportsIndex | None
    dropout_p: SupportsFloat | None
    dropout_seed: Tensor | None


SCORE_NAMES = tuple(ScoreOptions.__annotations__)
NAMES = tuple(Options.__annotations__)
PER_HEAD = ("alibi_slopes", "sinks")
"""Options that are a tensor [Hq]; alibi_slopes may be [B, Hq]."""

UNSET = {
    **dict.fromkeys(("alibi_slopes", "sinks", "scale", "window_left", "window_right")),
    **dict.fromkeys(("q_offset", "kv_starts", "split_size", "dropout_seed")),
    "softcap": 0.0,
    "dropout_p": 0.0,
}
"""The operator's arguments if no option is given."""
_LAYOUTS = (torch.strided, torch.jagged)


def entry_point(function: Function, options: type = Options) -> Function:
    """Decorates a public function: __torch_function__ sees its calls, and its signature lists all its options."""
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    if len(parameters) < len(signature.parameters):
        for name, hint in options.__annotations__.items():
            default = False if name == "causal" else None
            shown = getattr(hint, "__forward_arg__", hint)
            parameters.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=shown)
            )

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        inputs = flattened((*args, *kwargs.values()))
        # The __torch_function__ of a CausalBias would make the result one too.
        if has_torch_function(inputs) and not any(isinstance(x, CausalBias) for x in inputs):
            return handle_torch_function(wrapper, inputs, *args, **kwargs)
        return function(*args, **kwargs)

    wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]


def complete(query: Tensor, options: Options | ScoreOptions, names: tuple[str, ...] = NAMES) -> dict[str, Any]:
    """Converts the options to the operator's arguments. names: those that the caller takes."""
    completed = UNSET.copy()
    causal = False
    for name, x in options.items():
        if name not in names:
            raise TypeError(f"{name}: not an option; the options are {', '.join(names)}")
        if name == "causal":
            causal = _check_bool(name, x)
        elif x is None:
            continue
        elif name == "window":
            completed["window_left"], completed["window_right"] = _bounds(x)
        else:
            completed[name] = _CONVERTED[name](name, x) if name in _CONVERTED else _per_head(name, x, query)
    if causal:
        completed["window_right"] = 0
    if completed["scale"] is None:
        completed["scale"] = default_scale(query)
    return completed


def default_scale(query: Tensor) -> float:
    """1 / sqrt(head_dim)"""
    return 1.0 / math.sqrt(max(query.size(-1) if query.dim() else 1, 1))


def check_int(name: str, x: object) -> Any:
    """x as an int, or as it is where it is symbolic or None."""
    if x is None or isinstance(x, torch.SymInt):
        return x
    value: Any = x
    if type(x) is not int:
        is_bool = isinstance(x, bool) or getattr(x, "dtype", None) in (torch.bool, "bool")
        if isinstance(x, Tensor) and x.numel() == 1 and not x.is_floating_point() and not is_bool:
            value = x.item()  # symbolic under torch.compile
        elif is_bool or isinstance(x, Tensor) or not hasattr(x, "__index__"):
            raise TypeError(f"{name}: {x!r}, wanted an int")
        else:
            try:
                value = operator.index(x)
            except TypeError:  # a numpy array of more than no dimensions
                raise TypeError(f"{name}: {x!r}, wanted an int") from None
    if _is_concrete(value) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{name}: {value}, wanted a 64-bit integer")
    return value


def check_float(name: str, x: object) -> Any:
    """x as a float, or as it is where it is symbolic or None."""
    if x is None or type(x) is float or isinstance(x, (torch.SymInt, torch.SymFloat)):
        return x
    if isinstance(x, Tensor):
        if x.requires_grad:
            raise ValueError(f"{name}: requires_grad is True, wanted False: it has no gradient")
        if x.numel() == 1 and not x.is_complex():
            return x.item()
    elif not isinstance(x, (str, bytes, bytearray)):
        try:
            return float(x)  # type: ignore[arg-type]
        except OverflowError:
            raise ValueError(f"{name}: {x!r}, wanted a number in the range of float64") from None
        except (TypeError, ValueError):
            pass
    raise TypeError(f"{name}: {x!r}, wanted a number")


def _check_bool(name: str, x: object) -> bool:
    if not isinstance(x, (bool, torch.SymBool)) and type(x).__name__ not in ("bool", "bool_"):
        raise TypeError(f"{name}: {x!r}, wanted a bool")
    return bool(x)


def _is_concrete(x: object) -> bool:
    """Whether x is an int that may be compared. Under torch.compile a comparison would fix its value in the graph."""
    return type(x) is int and not torch.compiler.is_compiling()


def check_tensor(name: str, x: object) -> Tensor:
    """x, if it is a dense or a jagged Tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: {type(x).__name__}, wanted a Tensor")
    if x.layout not in _LAYOUTS:
        raise ValueError(f"{name}: layout {x.layout}, wanted torch.strided")
    return x


def _bounds(window: object) -> Window:
    if not (isinstance(window, (tuple, list)) and len(window) == 2):
        raise TypeError(f"window: {window!r}, wanted a pair (left, right) of int or None")
    left, right = (check_int(f"window: {side}", bound) for side, bound in zip(("left", "right"), window, strict=True))
    for side, bound in (("left", left), ("right", right)):
        if _is_concrete(bound) and bound < 0:
            raise ValueError(f"window: {side} is {bound}, wanted at least 0, or None for no bound")
    return left, right


def _per_head(name: str, x: object, query: Tensor) -> Tensor:
    x = check_tensor(name, x)
    wanted = statistics(query.dtype)
    if x.dtype not in (wanted, torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"{name}: dtype {x.dtype}, wanted {wanted}, or float16 or bfloat16")
    if name == "alibi_slopes" and x.requires_grad and torch.is_grad_enabled():
        raise ValueError("alibi_slopes: requires_grad is True, wanted False (or no_grad): slopes have no gradient")
    return x.to(wanted)


_CONVERTED: dict[str, Callable[[str, object], Any]] = {
    **dict.fromkeys(("scale", "softcap", "dropout_p"), check_float),
    **dict.fromkeys(("q_offset", "split_size"), check_int),
    **dict.fromkeys(("kv_starts", "dropout_seed"), check_tensor),
}
"""How an option becomes an argument of the operator. The others: causal, window, and those of PER_HEAD."""
