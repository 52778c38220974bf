"""Describes the machine of a measurement, and writes the files of results."""

from __future__ import annotations

import csv
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from flashsoftmax import build_info

ROOT = Path(__file__).parents[2]


@cache
def cpu_model() -> str:
    """The processor's name; on x86 with family and model number, because some names do not show the generation."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    pairs = (line.partition(":") for line in lines)
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    name = fields.get("model name", platform.machine())
    named = {"family": "cpu family", "model": "model"}
    numbers = [f"{short} {fields[field]}" for short, field in named.items() if field in fields]
    return f"{name} ({', '.join(numbers)})" if numbers else name


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of the checkout, with "-dirty" if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


@dataclass(frozen=True)
class Machine:
    cpu: str
    cores: int
    threads: int
    instructions: str
    """The CPU instruction set that our kernels use."""
    gpu: str | None
    system: str
    versions: dict[str, str]
    commit: str | None

    @classmethod
    def here(cls, device: str) -> Machine:
        info = build_info()
        versions = {
            "flashsoftmax": info.version,
            "python": platform.python_version(),
            "torch": torch.__version__,
            **{name: found for name in ("flash_attn", "flashinfer-python") if (found := installed(name))},
        }
        return cls(
            cpu=cpu_model(),
            cores=os.cpu_count() or 1,
            threads=torch.get_num_threads(),
            instructions=info.cpu,
            gpu=torch.cuda.get_device_name() if device == "cuda" else None,
            system=platform.platform(),
            versions=versions,
            commit=commit(),
        )

    def __str__(self) -> str:
        where = self.gpu or f"{self.cpu}, {self.threads} threads, {self.instructions}"
        return f"{where}, torch {self.versions['torch']}"


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def write_json(path: Path, record: Mapping[str, object]) -> None:
    path.write_text(json.dumps(record, indent=1) + "\n")


def write_csv(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    rows = list(rows)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)
