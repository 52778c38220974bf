"""Where a CUDA toolkit may be: for the build, so it imports nothing of the package, and for the tests."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path


def output(*command: object) -> str:
    """What a command prints."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    return done.stdout + done.stderr


def from_pypi() -> Iterator[Path]:
    """Where the packages of PyPI put the tools of CUDA 13."""
    if nvidia := importlib.util.find_spec("nvidia"):
        yield from (Path(folder) / "cu13" for folder in nvidia.submodule_search_locations or ())


def cuda_homes() -> Iterator[Path]:
    """In order of preference."""
    if home := os.environ.get("CUDA_HOME"):
        yield Path(home)
    if nvcc := shutil.which("nvcc"):  # may be a wrapper script: nvcc itself knows where it lives
        log = output(nvcc, "--dryrun", "-c", "x.cu")
        yield from (Path(top).resolve() for top in re.findall(r"TOP=(.+)", log))
    yield from from_pypi()


def toolkits() -> Iterator[tuple[Path, str]]:
    """Homes of the toolkits that have an nvcc, and their releases."""
    for home in cuda_homes():
        nvcc = home / "bin" / "nvcc"
        if nvcc.exists():
            yield from ((home, release) for release in re.findall(r"release ([\d.]+)", output(nvcc, "--version")))
