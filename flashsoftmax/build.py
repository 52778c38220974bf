"""What was built, what runs here, and the reason if CUDA does not."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from pkgutil import extend_path

import torch


@dataclass(frozen=True)
class BuildInfo:
    """What flashsoftmax was built with and what runs here; str() says it in three lines."""

    version: str
    torch: str
    """The torch that it was built with; it runs on any from 2.10 on."""
    cpu: str
    """The instruction set in use on the CPU."""
    cuda: bool
    """Whether the CUDA kernels are loaded."""
    cuda_reason: str | None
    """Why the CUDA kernels are not loaded."""
    nvcc: str | None
    archs: str | None
    """The GPU architectures that were compiled for."""

    def __str__(self) -> str:
        cuda = f"for {self.archs}, by nvcc {self.nvcc}" if self.cuda else f"none: {self.cuda_reason}"
        return (
            f"flashsoftmax {self.version}, built with torch {self.torch}\n"
            f"CPU kernels   {self.cpu}\n"
            f"CUDA kernels  {cuda}"
        )


def library(name: str) -> Path | None:
    """The file of a compiled library, "_C" or "_CUDA"; None where it was not built.

    It lies beside this file, or in the installed package where this is the checkout it was installed from.
    """
    folders = extend_path([str(Path(__file__).parent)], "flashsoftmax")
    spec = PathFinder.find_spec(f"flashsoftmax.{name}", folders)
    return Path(spec.origin) if spec and spec.origin else None


def build_record() -> dict[str, str]:
    """What setup.py left beside the libraries."""
    core = library("_C")
    if core is None:
        raise ImportError("flashsoftmax is not built: run `pip install .` in its folder")
    record: dict[str, str] = json.loads(core.with_name("_build.json").read_text())
    return record


def cuda_reason() -> str | None:
    """Why there are no CUDA kernels here; None where there are."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if library("_CUDA") is None:
        return f"flashsoftmax was built without CUDA: {build_record().get('cuda_reason', 'not recorded')}"
    return None


def build_info() -> BuildInfo:
    """What was built, what of it runs here, and why not more; print it, or read its fields."""
    record = build_record()
    reason = cuda_reason()
    return BuildInfo(
        version=record["version"],
        torch=record["torch"],
        cpu=torch.ops.flashsoftmax.cpu_isa(),
        cuda=reason is None,
        cuda_reason=reason,
        nvcc=record.get("nvcc"),
        archs=record.get("archs"),
    )
