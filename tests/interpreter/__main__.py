"""Runs one case of tests/cases.py on the interpreter, and prints the counts of its kernels or the first fault."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

import interpreter  # noqa: E402
from cases import CASES, Case  # noqa: E402

console = Console()
DEFAULT = {"forward": "65x65-dim-96", "decode": "decode-1", "backward": "heads-6-2", "merge": "17x1"}  # ids of cases
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def attention_arguments(case: Case, dtype: torch.dtype) -> dict[str, object]:
    """The operator's arguments for a case."""
    inputs = case.inputs(dtype)
    query, key, value = inputs["query"], inputs["key"], inputs["value"]
    left, right = inputs["window"] or (None, None)
    mask = inputs.get("attn_mask")
    if mask is not None:
        mask = mask.expand(*query.shape[:3], key.shape[2])
    statistics = {name: x.float() for name in ("alibi_slopes", "sinks") if (x := inputs.get(name)) is not None}
    scale = inputs["scale"] if inputs["scale"] is not None else query.shape[-1] ** -0.5
    return {
        "query": query,
        "key": key,
        "value": value,
        "attn_mask": mask if mask is not None and mask.dtype == torch.bool else None,
        "attn_bias": mask if mask is not None and mask.dtype != torch.bool else None,
        "alibi_slopes": statistics.get("alibi_slopes"),
        "sinks": statistics.get("sinks"),
        "kv_lens": inputs.get("kv_lens"),
        "kv_starts": None,
        "q_lens": None,
        "cu_seqlens_q": None,
        "cu_seqlens_k": None,
        "block_table": None,
        "max_seqlen_q": query.shape[2],
        "max_seqlen_k": key.shape[2],
        "scale": scale,
        "softcap": inputs["softcap"] or 0.0,
        "window_left": left,
        "window_right": 0 if inputs["causal"] else right,
        "q_offset": inputs["q_offset"],
        "split_size": case.split_size,
        "dropout_p": 0.0,
        "dropout_seed": None,
    }


def run_case(kernel: str, case: Case, dtype: torch.dtype, seed: int) -> list[interpreter.Launched]:
    operators = interpreter.operators()
    if kernel == "merge":
        outs = [torch.randn(case.batch, case.heads[0], case.rows, case.dim).to(dtype) for _ in range(3)]
        lses = [torch.randn(case.batch, case.heads[0], case.rows) for _ in outs]
        with interpreter.session(seed) as run:
            out, lse = operators.merge(outs, lses)
            operators.merge_backward(torch.ones_like(out), torch.ones_like(lse), outs, lses)
        return run.launches
    arguments = attention_arguments(case, dtype)
    with interpreter.session(seed) as run:
        out, lse, lse_error = operators.attention(**arguments)
    if kernel == "backward":
        arguments = {name: x for name, x in arguments.items() if name not in ("block_table", "split_size")}
        with interpreter.session(seed) as run:
            operators.attention_backward(
                grad_out=torch.randn_like(out),
                grad_lse=torch.randn_like(lse),
                out=out,
                lse=lse,
                lse_error=lse_error,
                bias_grad=arguments["attn_bias"] is not None,
                **arguments,
            )
    return run.launches


def show(launched: interpreter.Launched) -> None:
    x = launched
    console.print(f"[bold]{x.kernel}[/]", highlight=False)
    facts = Table(box=None, show_header=False, padding=(0, 2))
    facts.add_row("grid, block", f"{x.grid}, {x.block}, {x.shared_bytes:,} bytes of shared memory")
    facts.add_row("instructions", f"{x.instructions:,} of warps, {x.mmas:,} of them mma")
    facts.add_row("global bytes read", f"{x.bytes_read:,}, {x.distinct_bytes_read:,} distinct")
    facts.add_row("global bytes written", f"{x.bytes_written:,}, {x.distinct_bytes_written:,} distinct")
    facts.add_row("sectors", f"{x.sectors:,}, ideally {x.ideal_sectors:,}, of {x.global_accesses:,} accesses")
    for kind, banks in sorted(x.shared.items()):
        facts.add_row(kind, f"{banks.accesses:,} accesses, {banks.wavefronts:,} passes, {banks.conflicts:,} conflicts")
    most = sorted(x.by_kind.items(), key=lambda item: -item[1])[:12]
    facts.add_row("by kind", ", ".join(f"{kind} {count:,}" for kind, count in most))
    console.print(facts, highlight=False)


def main() -> None:
    ids = [case.id for case in CASES]
    parser = argparse.ArgumentParser(prog="python -m tests.interpreter", description=__doc__)
    parser.add_argument("kernel", choices=sorted(DEFAULT))
    parser.add_argument("--case", choices=ids, metavar="ID", help="of tests/cases.py; few rows are decoded")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0, help="0: warps and blocks in order; others interleave them")
    parser.add_argument("--list", action="store_true", help="the ids of the cases, and nothing else")
    arguments = parser.parse_args()
    if arguments.list:
        print(*ids, sep="\n")
        return
    if reason := interpreter.unavailable():
        sys.exit(reason)
    case = CASES[ids.index(arguments.case or DEFAULT[arguments.kernel])]
    torch.manual_seed(0)
    try:
        for launched in run_case(arguments.kernel, case, DTYPES[arguments.dtype], arguments.seed):
            show(launched)
    except interpreter.Fault as fault:
        console.print(f"[bold red]fault[/]: {fault}", highlight=False, soft_wrap=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
