"""Runs a function on several processes that are one gloo group."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

TIMEOUT = 120
"""Seconds that a rank waits for another."""


def run(ranks: int, function: Callable, *args, timeout: float = TIMEOUT) -> None:
    """function(*args) on each rank. Raises the error of the first rank that fails."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "flashsoftmax.distributed"])
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, f"{folder}/store", timeout, function, args)
        torch.multiprocessing.start_processes(_start, arguments, nprocs=ranks, start_method="forkserver")


def _start(rank: int, ranks: int, store: str, timeout: float, function: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=limit)
    function(*args)
    if timeout == TIMEOUT:  # else the function is about ranks that fail
        dist.barrier()
    os._exit(0)  # threads of gloo that outlive the group would abort a normal exit, now and then
