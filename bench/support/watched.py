"""Measures a call from outside its process: memory, the processor's counters, and a GPU's by Nsight Compute."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from .record import ROOT

LINE_BYTES = 64
NCU = ("--profile-from-start", "off", "--metrics", "dram__bytes_read.sum,dram__bytes_write.sum", "--csv")


@dataclass(frozen=True)
class Measured:
    """A number of bytes, or the reason why there is none."""

    bytes: int | None
    absent: str | None = None


def run(task: str, before: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    command = [*before, sys.executable, "-m", "bench.support.once", task]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def failure(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr or done.stdout).strip().splitlines()
    return lines[-1] if lines else f"exit status {done.returncode}"


def peak_memory(task: str) -> Measured:
    """Peak memory of the call beyond its inputs, in a process of its own."""
    done = run(task)
    if done.returncode:
        return Measured(None, failure(done))
    return Measured(json.loads(done.stdout.splitlines()[-1])["bytes"])


def no_perf() -> str | None:
    """Why perf cannot count misses of the last-level cache; None if it can."""
    if shutil.which("perf") is None:
        return "perf is not installed"
    done = subprocess.run(["perf", "stat", "-x,", "-e", "cache-misses", "true"], capture_output=True, text=True)
    found = done.stderr.partition(",")[0]
    if found.isdigit():
        return None
    if "not supported" in found:
        return "perf sees no cache-misses counter on this processor or virtual machine"
    return failure(done)


def counted_by_perf(task: str, task_without_call: str) -> Measured:
    """Bytes of the cache lines that the last-level cache missed.

    The misses of a process that only makes the inputs are subtracted.
    """
    lines = []
    for each in (task, task_without_call):
        done = run(each, ("perf", "stat", "-x,", "-e", "cache-misses"))
        counts = [line.split(",") for line in done.stderr.splitlines() if ",cache-misses" in line]
        if done.returncode or not counts or not counts[0][0].isdigit():
            return Measured(None, failure(done))
        lines.append(int(counts[0][0]))
    return Measured((lines[0] - lines[1]) * LINE_BYTES)


def no_ncu(device: str) -> str | None:
    """Why Nsight Compute cannot count DRAM bytes; None if it can."""
    if device != "cuda":
        return "no GPU"
    return None if shutil.which("ncu") else "ncu is not installed"


def counted_by_ncu(task: str) -> Measured:
    """DRAM bytes of all kernels of the call."""
    done = run(task, ("ncu", *NCU, "--print-units", "base"))
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    rows = [row for row in csv.DictReader(lines) if row.get("Metric Name", "").startswith("dram__bytes")]
    if done.returncode or not rows:
        return Measured(None, failure(done))
    return Measured(round(sum(float(row["Metric Value"].replace(",", "")) for row in rows)))
