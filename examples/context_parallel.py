"""Trains a tiny transformer on documents that are split over ranks, and compares its loss with that of one process.

    torchrun --nproc-per-node 2 examples/context_parallel.py

Packed documents of uneven lengths are one long sequence. Every rank has some rows of each document, all layers work on
these rows alone, and only attention talks to other ranks. Runs on CPUs (gloo), or on one GPU per rank (NCCL).
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Callable
from itertools import accumulate

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from flashsoftmax import attention_varlen
from flashsoftmax.distributed import context_attention, shard_plan

VOCABULARY, WIDTH, HEADS, KEY_HEADS, LAYERS = 64, 64, 4, 2, 2
LENGTHS = (97, 1, 40, 256, 13)  # any lengths: nothing is padded
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of x [rows, heads, dim]. Positions are those in the whole document, not those in the shard."""
    half = x.size(2) // 2
    frequencies = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = positions[:, None, None] * frequencies
    first, second = x.split(half, 2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], 2)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        dim = WIDTH // HEADS
        self.sizes = (HEADS, KEY_HEADS, KEY_HEADS)
        self.project = nn.Linear(WIDTH, sum(self.sizes) * dim, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)])

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        projected = self.project(self.norms[0](x)).unflatten(1, (sum(self.sizes), -1))
        q, k, v = projected.split(self.sizes, 1)  # [rows, heads, dim]
        x = x + self.out(attend(rotate(q, positions), rotate(k, positions), v).flatten(1))
        out: Tensor = x + self.mlp(self.norms[1](x))
        return out


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, positions, attend)
        logits: Tensor = self.head(x)
        return logits


def documents() -> tuple[Tensor, Tensor]:
    """Tokens, and the token that follows each; the last one of a document has no label (-100)."""
    tokens = [torch.randint(VOCABULARY, (8,)).repeat(length // 8 + 1)[:length] for length in LENGTHS]
    labels = [torch.cat([x[1:], torch.tensor([-100])]) for x in tokens]
    return torch.cat(tokens), torch.cat(labels)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--method", choices=("ring", "gather", "ulysses"), default="ring")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)  # the same parameters and documents on all ranks
    model = Transformer().to(device)
    alone = copy.deepcopy(model)  # is trained on the whole sequence, for comparison
    tokens, labels = (x.to(device) for x in documents())
    count = (labels >= 0).sum()

    # What is split: tokens, labels and positions. The plan says which rows this rank has.
    starts = [0, *accumulate(LENGTHS)]
    plan = shard_plan(cu_seqlens=starts, method=options.method)
    my_tokens, my_labels, my_positions = plan.shard(tokens, 0), plan.shard(labels, 0), plan.positions.to(device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return context_attention(q, k, v, plan, causal=True)

    # The same for one process.
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).to(device)
    cu_seqlens, longest = torch.tensor(starts, dtype=torch.int32, device=device), max(LENGTHS)

    def attend_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_varlen(
            q, k, v, cu_seqlens, cu_seqlens, max_seqlen_q=longest, max_seqlen_k=longest, causal=True
        )

    optimizers = [torch.optim.AdamW(x.parameters(), lr=3e-3) for x in (model, alone)]
    for r in range(dist.get_world_size()):
        if r == rank:
            print(f"rank {r}: {my_tokens.numel()} of {tokens.numel()} tokens", flush=True)
        dist.barrier()
    if rank == 0:
        print(f"\n step  {plan.size} ranks  1 process  difference")
    for step in range(options.steps):
        # Each rank's loss is the sum over its rows, divided by the number of all labels: the losses add up.
        loss = F.cross_entropy(model(my_tokens, my_positions, attend), my_labels, reduction="sum") / count
        loss.backward()
        for parameter in model.parameters():  # and so do the gradients
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        total = loss.detach().clone()
        dist.all_reduce(total)

        loss_alone = F.cross_entropy(alone(tokens, positions, attend_alone), labels, reduction="sum") / count
        loss_alone.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            print(f"{step:5}  {total:7.5f}  {loss_alone:9.5f}  {total - loss_alone:10.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
