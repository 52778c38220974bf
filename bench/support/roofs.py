"""The limits of machines: memory bandwidth, peak arithmetic rate per dtype, and links between GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from .limits import limit
from .record import cpu_model
from .shapes import DTYPES, Shape
from .timing import interleaved


@dataclass(frozen=True)
class Roof:
    name: str
    bandwidth: float
    """Bytes per second."""
    peak: dict[str, float]
    """FLOP per second for each dtype, without sparsity. float32 is the rate of the FMA units, which our kernels use."""
    source: str

    def ridge(self, dtype: str) -> float:
        """FLOP per byte at which both limits meet: below it memory is the limit, above it arithmetic."""
        return self.peak[dtype] / self.bandwidth

    def side(self, intensity: float, dtype: str) -> str:
        return "memory" if intensity < self.ridge(dtype) else "arithmetic"

    def floor(self, moved: float, flops: float, dtype: str) -> float:
        """The least time, in seconds."""
        return max(moved / self.bandwidth, flops / self.peak[dtype])


def gpu(name: str, bandwidth: float, half: float, single: float, source: str) -> Roof:
    return Roof(name, bandwidth, {"float32": single, "bfloat16": half, "float16": half}, source)


GPUS = (
    gpu("A100", 2.039e12, 312e12, 19.5e12, "A100 80GB SXM data sheet, https://www.nvidia.com/en-us/data-center/a100/"),
    gpu("H100", 3.35e12, 989e12, 67e12, "H100 SXM data sheet, https://www.nvidia.com/en-us/data-center/h100/"),
    gpu("H200", 4.8e12, 989e12, 67e12, "H200 SXM data sheet, https://www.nvidia.com/en-us/data-center/h200/"),
    gpu("B200", 8e12, 2250e12, 80e12, "DGX B200 data sheet / 8, https://www.nvidia.com/en-us/data-center/dgx-b200/"),
)


@dataclass(frozen=True)
class Link:
    name: str
    bandwidth: float
    """Bytes per second of one GPU, in each direction."""
    latency: float
    """Seconds before the first byte of an exchange arrives."""
    source: str


NCCL = "latency: NCCL's ring model, https://github.com/NVIDIA/nccl/blob/01afd20/src/graph/tuning.cc"
NVLINK = Link(
    "NVLink 4",
    450e9,
    (8.4 + 3.4) * 1e-6,
    "900 GB/s in both directions together, H200 data sheet, https://www.nvidia.com/en-us/data-center/h200/; " + NCCL,
)
INFINIBAND = Link(
    "InfiniBand NDR",
    50e9,
    (8.4 + 9.6) * 1e-6,
    "one port of 400 Gb/s per GPU, DGX H100 user guide, https://docs.nvidia.com/dgx/dgxh100-user-guide/; " + NCCL,
)


def this_cpu(keys: int = 2**19, rounds: int = 41) -> Roof:
    """Measures this CPU: a read of keys and values far larger than the cache, and multiply-adds."""
    read = Shape("decode", 1, 8, 8, 1, keys, 128)
    compute = Shape("forward", 1, 1, 1, 64, 64, 64)

    def rate(shape: Shape, dtype: str) -> float:
        inputs = shape.inputs(DTYPES[dtype], "cpu")  # kept in a variable: the timed read uses their memory
        best = limit(shape, inputs, "cpu")
        return best.work / min(interleaved({"limit": best.timed}, "cpu", rounds)["limit"])

    bandwidth = rate(read, "bfloat16")
    return Roof("this CPU", bandwidth, {dtype: rate(compute, dtype) for dtype in DTYPES}, f"measured, {cpu_model()}")
