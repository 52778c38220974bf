"""Benchmarks and checks. Each module in this folder is a command, `python -m bench NAME`; the rest is in bench/support.

A command has a function main(argv).
"""

COMMANDS = {
    "throughput": "Times attention beside every installed peer and beside the limit of the machine",
    "traffic": "Shows the bytes that attention moves: predicted by formula, counted in the kernels, and measured",
    "accuracy": "Measures the error against float64 of ours, of every installed peer, and of two broken recurrences",
    "scaling": "Predicts the time of attention over 2 to 1,024 ranks, by ring, gather and Ulysses",
    "recurrence": "Draws the pictures of docs/recurrence.md, from real runs",
    "sharding": "Draws the picture of docs/sequence-parallel.md, from a real plan",
    "kernels": "Lists registers, spills and instructions per MMA of the compiled CUDA kernels",
    "gpu_check": "Checks a machine with a GPU, in one command",
    "report": "Writes docs/results.md from the latest results",
}
"""What each command does: the first line of its docstring and of its --help."""
