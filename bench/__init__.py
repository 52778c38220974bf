"""Benchmarks: python -m bench.throughput."""
