"""python -m flashsoftmax: what was built, and how attention does on this machine beside torch's own."""

from __future__ import annotations

import ctypes
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from . import attention, build_info

ROUNDS = 5
CHECKED_QUERIES = 64

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Case:
    name: str
    dtype: torch.dtype
    heads: int
    heads_kv: int
    queries: int
    keys: int
    dim: int

    @property
    def causal(self) -> bool:
        return self.name == "causal"

    @property
    def score_bytes(self) -> int:
        return self.heads * self.queries * self.keys * self.dtype.itemsize

    def tensors(self, device: str) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(0)
        q = torch.randn(1, self.heads, self.queries, self.dim, device=device)
        k, v = torch.randn(2, 1, self.heads_kv, self.keys, self.dim, device=device)
        return q.to(self.dtype), k.to(self.dtype), v.to(self.dtype)


CASES = (
    Case("causal", torch.float32, 8, 8, 2048, 2048, 64),
    Case("causal", torch.bfloat16, 8, 8, 2048, 2048, 64),
    Case("causal", torch.float16, 8, 8, 2048, 2048, 64),
    Case("causal", torch.bfloat16, 4, 1, 4096, 4096, 128),
    Case("full", torch.float32, 1, 1, 8192, 8192, 64),
    Case("decode", torch.float32, 32, 8, 1, 8192, 128),
    Case("decode", torch.bfloat16, 32, 8, 1, 32768, 128),
)


def naive(query: Tensor, key: Tensor, value: Tensor, last_key: Tensor | None) -> Tensor:
    """Attention that writes the score matrix; each query sees the keys up to its last_key."""
    group = query.shape[1] // key.shape[1]
    rows = query.unflatten(1, (-1, group)).flatten(2, 3)  # the query heads of a key head, one after another
    scores = rows @ key.mT * query.shape[-1] ** -0.5
    if last_key is not None:
        hidden = torch.arange(key.shape[2], device=key.device) > last_key.repeat(group)[:, None]
        scores = scores.masked_fill(hidden, -torch.inf)
    out: Tensor = scores.softmax(-1) @ value
    return out.view_as(query)


def largest_errors(case: Case, query: Tensor, key: Tensor, value: Tensor) -> tuple[float, float]:
    """Ours and the naive computation's in the same dtype, against FP64, over some of the queries."""
    some = torch.linspace(0, case.queries - 1, min(case.queries, CHECKED_QUERIES), device=query.device).long()
    last_key = some if case.causal else None
    exact = naive(query[:, :, some].double(), key.double(), value.double(), last_key)
    ours = attention(query, key, value, causal=case.causal)[:, :, some]
    theirs = naive(query[:, :, some], key, value, last_key)
    return (ours - exact).abs().max().item(), (theirs - exact).abs().max().item()


def seconds(call: Call, device: str) -> float:
    synchronize: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def process_bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def peak_bytes(call: Call, device: str) -> int | None:
    """The most memory that a call takes at a time, result included; None where that cannot be told."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    try:
        ctypes.CDLL(None).malloc_trim(0)  # or the call is served from memory that malloc kept, unseen
        Path("/proc/self/clear_refs").write_text("5")  # restarts the high-water mark
        before = process_bytes("VmRSS")
        call()
        return process_bytes("VmHWM") - before
    except (OSError, AttributeError):
        return None


def ratio_style(ratio: float) -> str:
    return f"[{'green' if ratio >= 1 else 'red'}]{ratio:.1f}x[/]"


def mib(size: int | None) -> str:
    return "?" if size is None else f"{size / 2**20:,.1f}"


def row(case: Case, device: str) -> list[str]:
    query, key, value = case.tensors(device)
    calls: list[Call] = [
        lambda: attention(query, key, value, causal=case.causal),
        lambda: scaled_dot_product_attention(query, key, value, is_causal=case.causal, enable_gqa=True),
    ]
    errors = largest_errors(case, query, key, value)
    peaks = [peak_bytes(call, device) for call in calls]
    rounds = [[seconds(call, device) for call in calls] for _ in range(ROUNDS)]  # in turns: clocks drift
    ours, torchs = (median(times) for times in zip(*rounds, strict=True))
    return [
        case.name,
        str(case.dtype).removeprefix("torch."),
        f"{case.heads}/{case.heads_kv}",
        f"{case.queries} x {case.keys}",
        f"{case.dim}",
        *(f"{error:.0e}" for error in errors),
        f"{ours * 1e3:.1f}",
        f"{torchs * 1e3:.1f}",
        ratio_style(torchs / ours),
        *(mib(peak) for peak in peaks),
        mib(case.score_bytes),
    ]


def results(device: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for header in ("", "dtype"):
        table.add_column(header)
    shape = ("heads\nq/kv", "queries\nx keys", "dim")
    measured = ("error", "naive's", "ms", "torch's", "", "peak\nMiB", "torch's", "scores\nunwritten\nMiB")
    for header in shape + measured:
        table.add_column(header, justify="right", no_wrap=True)
    for case in CASES:
        table.add_row(*row(case, device))
    return table


def best_device() -> tuple[str, str]:
    """Where attention runs here, and what to say about it."""
    cpu = f"the CPU, {torch.get_num_threads()} threads"
    if not torch.cuda.is_available():
        return "cpu", cpu
    try:
        attention(*torch.zeros(3, 1, 1, 1, 8, device="cuda"))
        return "cuda", torch.cuda.get_device_name()
    except NotImplementedError as error:
        return "cpu", f"{cpu}; {error}"


@torch.no_grad()
def main() -> None:
    device, description = best_device()
    console = Console(highlight=False)
    console.width = max(console.width, 110)  # of the table
    console.print(f"{build_info()}\nRuns on       {description}", markup=False)
    console.print(f"Python {platform.python_version()}, torch {torch.__version__}", markup=False)
    with console.status("measuring"):
        table = results(device)
    console.print(table)
    console.print("error: the largest against FP64, beside that of attention with a score matrix in the same dtype.")
    console.print(f"ms: median of {ROUNDS}, in turns with torch's scaled_dot_product_attention.")


if __name__ == "__main__":
    main()
