"""Calls one contender once, in a process that `watched` measures from outside: python -m bench.support.once TASK."""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .contenders import OURS, Peer, ours, peers, results
from .shapes import DTYPES, Shape


def task(shape: Shape, dtype: str, contender: str, device: str, threads: int, call: bool = True) -> str:
    known = {"contender": contender, "dtype": dtype, "device": device, "threads": threads, "call": call}
    return json.dumps({"shape": asdict(shape), **known})


def peak(device: str) -> int:
    """Most bytes held at a time so far: by the process, or by torch on the GPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.exists():  # on Linux, ru_maxrss includes the parent's peak
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def main(given: dict[str, Any]) -> None:
    """Prints the peak memory of the call beyond its inputs, in bytes."""
    shape, device = Shape(**given["shape"]), given["device"]
    torch.set_num_threads(given["threads"])
    peer = {OURS: Peer(ours), **peers(device)}[given["contender"]]
    small = Shape(shape.kind, 1, shape.group, 1, min(shape.queries, 64), 64, shape.dim, shape.causal, shape.window)
    with peer.within():
        results(
            peer.attend, small.inputs(DTYPES[given["dtype"]], device), small
        )  # loads libraries and kernels before the measurement
    inputs = shape.inputs(DTYPES[given["dtype"]], device)
    before = peak(device)
    if given["call"]:
        with peer.within():
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.profiler.start()
            results(peer.attend, inputs, shape)
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.profiler.stop()
    print(json.dumps({"bytes": peak(device) - before}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
