"""Times several calls in one process, in turns."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

SAMPLE_SECONDS = 0.01
"""Shortest sample: shorter calls are repeated to fill it."""

PAUSE_SECONDS = 0.03
"""Pause before a sample: the threads of the previous call spin for a while, and took half of the machine meanwhile."""


@dataclass(frozen=True)
class Timed:
    call: Callable[[], object]
    within: Callable[[], AbstractContextManager[object]] = nullcontext
    """A context that is entered before the clock starts."""


def seconds(timed: Timed, device: str, repeats: int = 1) -> float:
    """Seconds per call, averaged over the repeats."""
    synchronize: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    with timed.within():
        synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            timed.call()
        synchronize()
        return (time.perf_counter() - start) / repeats


def interleaved(calls: Mapping[str, Timed], device: str, rounds: int) -> dict[str, list[float]]:
    """Seconds per call of each contender in each round; a round times every contender once, in random order.

    So all contenders see the same drift of the clock, and none always follows the same other one.
    """
    for timed in calls.values():
        seconds(timed, device)
    repeats = {name: math.ceil(SAMPLE_SECONDS / seconds(timed, device)) for name, timed in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(calls), len(calls)):
            time.sleep(PAUSE_SECONDS)
            times[name].append(seconds(calls[name], device, repeats[name]))
    return times
