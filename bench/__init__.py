"""Benchmarks: `python -m bench` lists them."""

BENCHMARKS = {
    "throughput": "time of attention beside every peer that is there, and beside what the machine can do",
    "traffic": "bytes that attention moves: by formula, counted, and measured where something here can measure them",
    "accuracy": "error against float64 of ours, of every peer that is there, and of two broken recurrences",
    "recurrence": "the pictures of docs/recurrence.md, from real runs",
    "kernels": "what the compiler made of the CUDA kernels: registers, spills, instructions for each MMA",
    "gpu_check": "the whole check of a machine with a GPU",
    "report": "the latest results as docs/results.md",
}
"""Modules with main(argv)."""
