"""Generates text with a random Llama-like model of transformers, once with torch's attention and once with ours.

    python examples/generate.py --prompt 4096 --new-tokens 32

Prints the time of the prompt (prefill) and the tokens per second after it, the best of some alternated runs. The
weights are random, so the text means nothing; the work is that of a trained model of this size.
"""

from __future__ import annotations

import argparse
import time

import torch
import transformers
from rich.console import Console
from rich.table import Table

from flashsoftmax.integrations.transformers import register


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    sizes = {"layers": 4, "hidden": 512, "heads": 8, "kv-heads": 2, "head-dim": 64, "vocabulary": 1024}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="size of the model")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of the prompt")
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens to generate")
    parser.add_argument("--cache", choices=["dynamic", "static"], default="dynamic", help="kind of the KV cache")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="of the model")
    parser.add_argument("--device", default="cpu", help="where the model runs")
    parser.add_argument("--runs", type=int, default=3, help="runs of each, of which the best counts")
    return parser.parse_args()


def build(options: argparse.Namespace) -> transformers.PreTrainedModel:
    config = transformers.LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        head_dim=options.head_dim,
        max_position_embeddings=options.prompt + options.new_tokens,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).to(options.device, getattr(torch, options.dtype)).eval()


class Clock(transformers.StoppingCriteria):
    """Notes when each token is ready. Never stops."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        self.times.append(time.perf_counter() + 0 * input_ids[0, -1].item())  # waits for a GPU
        return torch.zeros(input_ids.size(0), dtype=torch.bool, device=input_ids.device)


def generate(
    model: transformers.PreTrainedModel, prompt: torch.Tensor, options: argparse.Namespace
) -> tuple[torch.Tensor, float, float]:
    """(the new tokens, seconds of prefill, seconds per step after it)."""
    clock = Clock()
    tokens = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=options.new_tokens,
        do_sample=False,
        cache_implementation=None if options.cache == "dynamic" else options.cache,
        stopping_criteria=[clock],
    )
    start, first, *_, last = clock.times
    return tokens[:, prompt.size(1) :], first - start, (last - first) / (options.new_tokens - 1)


def main() -> None:
    options = arguments()
    if options.new_tokens < 2:
        raise SystemExit("--new-tokens: wanted at least 2, for the time between them")
    torch.manual_seed(0)
    model = build(options)
    prompt = torch.randint(1, options.vocabulary, (options.batch, options.prompt), device=options.device)
    names = {"sdpa": "torch's attention", register(): "flashsoftmax"}
    runs: dict[str, list[tuple[torch.Tensor, float, float]]] = {name: [] for name in names}
    for _ in range(options.runs):
        for name in names:
            model.set_attn_implementation(name)
            runs[name].append(generate(model, prompt, options))

    table = Table(title=f"{options.layers} layers, {options.dtype}, batch {options.batch}, prompt {options.prompt}")
    for column in ("attention", "prefill, s", "tokens/s", "prefill", "decode"):
        table.add_column(column, justify="left" if column == "attention" else "right")
    best = {name: (min(x[1] for x in results), min(x[2] for x in results)) for name, results in runs.items()}
    base = best["sdpa"]
    for name, (prefill, step) in best.items():
        speedups = f"{base[0] / prefill:.2f}x", f"{base[1] / step:.2f}x"
        table.add_row(names[name], f"{prefill:.3f}", f"{options.batch / step:.1f}", *speedups)
    Console().print(table)
    ours, theirs = (results[0][0] for results in reversed(runs.values()))
    print(f"{int((ours == theirs).sum())} of {ours.numel()} new tokens are the same")


if __name__ == "__main__":
    main()
