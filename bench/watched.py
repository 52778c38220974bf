"""What is measured of a call from outside: memory, the processor's counters, and a GPU's through Nsight Compute."""

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
    """Bytes, or why there are none."""

    bytes: int | None
    absent: str | None = None


def run(task: str, before: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    command = [*before, sys.executable, "-m", "bench.once", task]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def failure(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr or done.stdout).strip().splitlines()
    return lines[-1] if lines else f"exit status {done.returncode}"


def peak_memory(task: str) -> Measured:
    """What a process of its own took for the call, beside the inputs."""
    done = run(task)
    if done.returncode:
        return Measured(None, failure(done))
    return Measured(json.loads(done.stdout.splitlines()[-1])["bytes"])


def no_perf() -> str | None:
    """Why perf cannot count what the last cache misses; None where it can."""
    if shutil.which("perf") is None:
        return "perf is not installed"
    done = subprocess.run(["perf", "stat", "-x,", "-e", "cache-misses", "true"], capture_output=True, text=True)
    found = done.stderr.partition(",")[0]
    if found.isdigit():
        return None
    if "not supported" in found:
        return "this processor, or the virtual machine, shows perf no cache-misses"
    return failure(done)


def counted_by_perf(task: str, task_without_call: str) -> Measured:
    """Lines that the last cache missed, in bytes: a process that calls less one that only makes the inputs."""
    lines = []
    for each in (task, task_without_call):
        done = run(each, ("perf", "stat", "-x,", "-e", "cache-misses"))
        counts = [line.split(",") for line in done.stderr.splitlines() if ",cache-misses" in line]
        if done.returncode or not counts or not counts[0][0].isdigit():
            return Measured(None, failure(done))
        lines.append(int(counts[0][0]))
    return Measured((lines[0] - lines[1]) * LINE_BYTES)


def no_ncu(device: str) -> str | None:
    """Why Nsight Compute cannot count DRAM bytes; None where it can."""
    if device != "cuda":
        return "no GPU"
    return None if shutil.which("ncu") else "ncu is not installed"


def counted_by_ncu(task: str) -> Measured:
    """DRAM bytes of every kernel of the call."""
    done = run(task, ("ncu", *NCU, "--print-units", "base"))
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    rows = [row for row in csv.DictReader(lines) if row.get("Metric Name", "").startswith("dram__bytes")]
    if done.returncode or not rows:
        return Measured(None, failure(done))
    return Measured(round(sum(float(row["Metric Value"].replace(",", "")) for row in rows)))
