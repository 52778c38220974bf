"""Writes a directory that the `kernels` library loads as a kernel of the Hugging Face hub.

    python -m flashsoftmax.integrations.hub DIRECTORY
    LOCAL_KERNELS="flashsoftmax/flash-softmax=DIRECTORY" python program.py

The program names the kernel: ``from_pretrained(..., attn_implementation="flashsoftmax/flash-softmax",
allow_all_kernels=True)``. Models then take their path for FlashAttention, with padding-free training and continuous
batching. The directory holds no code of its own: it hands out the functions of the installed flashsoftmax.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

NAME = "flash-softmax"
FUNCTIONS = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")

MODULE = """\"\"\"FlashAttention's functions, from the installed flashsoftmax.\"\"\"

from flashsoftmax.integrations.flash_attn import {names}

__all__ = {all}
"""


def write(directory: str | Path) -> list[Path]:
    """Writes a variant for the CPU and one for CUDA; returns their directories."""
    paths = []
    for backend in ("cpu", "cuda"):
        path = Path(directory) / "build" / f"torch-{backend}"
        path.mkdir(parents=True, exist_ok=True)
        (path / "__init__.py").write_text(MODULE.format(names=", ".join(FUNCTIONS), all=json.dumps(FUNCTIONS)))
        metadata = {
            "id": f"_flash_softmax_{backend}",
            "name": NAME,
            "version": 1,
            "license": "BSD-3-Clause",
            "python-depends": [],
            "backend": {"type": backend},
        }
        (path / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
        paths.append(path)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m flashsoftmax.integrations.hub", description=__doc__.split("\n")[0])
    parser.add_argument("directory", type=Path, help="where to write; for LOCAL_KERNELS")
    for path in write(parser.parse_args().directory):
        print(path)


if __name__ == "__main__":
    main()
