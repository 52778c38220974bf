"""What the compiler made of the CUDA kernels, without a GPU: no spills, enough blocks at a time, a lean main loop."""

import pytest
import torch

import interpreter
from bench import kernels
from flashsoftmax import attention, build
from flashsoftmax.build import cuda_reason
from flashsoftmax.library import ARGUMENTS
from operators import attention_backward

SHARED_BYTES = 99 * 1024
"""What a block may have on every GPU from sm_80 on."""
MULTIPROCESSOR_BYTES = 164 * 1024 - 1024
"""Of an sm_80, without the 1 KiB a block that is the system's."""


@pytest.fixture(scope="module")
def machine_code():
    library = build.library("_CUDA")
    if library is None:
        pytest.skip(f"no CUDA kernels: {cuda_reason()}")
    try:
        kernels.cuobjdump()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    return [kernel for arch in ("sm_80", "sm_90") for kernel in kernels.kernels(library, arch)]


def test_every_kernel_is_there_for_both(machine_code):
    names = {arch: {kernel.name for kernel in machine_code if kernel.arch == arch} for arch in ("sm_80", "sm_90")}
    assert names["sm_80"] == names["sm_90"]
    assert sum("forward" in name for name in names["sm_80"]) == 9  # three dtypes, three head dims


def test_nothing_is_spilled(machine_code):
    assert not [kernel for kernel in machine_code if kernel.local_bytes]


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_at_most_three_other_instructions_for_each_mma(machine_code, arch, dtype):
    """In the main loop of the forward at head dim 128: so the tensor cores are what limits it."""
    (kernel,) = [x for x in machine_code if x.arch == arch and x.name == f"forward_kernel<{dtype}, 128>"]
    size, mmas = kernel.loop
    assert (size - mmas) / mmas <= 3


@pytest.fixture(scope="module", params=[64, 128, 256])
def launches(request):
    """Of forward, decode and backward in bfloat16 and float32."""
    operators = interpreter.operators()
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        for rows in (1, 40):
            q = torch.randn(1, 2, rows, request.param, dtype=dtype)
            k = torch.randn(1, 2, 40, request.param, dtype=dtype)
            values = dict.fromkeys(ARGUMENTS["attention"]) | {"query": q, "key": k, "value": k}
            values |= {"max_seqlen_q": rows, "max_seqlen_k": 40, "scale": 0.1, "softcap": 0.0, "dropout_p": 0.0}
            with interpreter.session() as run:
                out, lse, lse_error = operators.attention(**values)
                operators.attention_backward(**attention_backward(values, out, None, out, lse, lse_error))
            found += run.launches
    return found


@pytest.mark.interpreted
@pytest.mark.skipif(interpreter.unavailable() is not None, reason=str(interpreter.unavailable()))
class TestResources:
    def test_shared_memory_is_there_on_every_gpu(self, launches):
        assert max(launch.shared_bytes for launch in launches) <= SHARED_BYTES

    def test_two_blocks_of_the_forward_fit(self, launches):
        forward = [launch for launch in launches if "forward_kernel" in launch.kernel]
        assert len(forward) == 2
        assert all(2 * launch.shared_bytes <= MULTIPROCESSOR_BYTES for launch in forward)

    def test_the_main_loops_have_no_bank_conflicts(self, launches):
        """In 16 bits; products of float32 read rows whose columns share banks."""
        for launch in launches:
            if "bfloat16" in launch.kernel:
                assert launch.conflicts <= 0.02 * sum(banks.wavefronts for banks in launch.shared.values()), launch


@pytest.mark.interpreted
@pytest.mark.skipif(interpreter.unavailable() is not None, reason=str(interpreter.unavailable()))
def test_decode_reads_the_cache_once():
    """The 8 query heads of a key head share it: bytes of keys and values, and little else."""
    q, k, v = torch.randn(1, 8, 1, 128), *torch.randn(2, 1, 1, 1000, 128)
    q, k, v = (x.reshape(1, -1, x.shape[-2], 128).bfloat16() for x in (q, k, v))
    values = dict.fromkeys(ARGUMENTS["attention"]) | {"query": q, "key": k, "value": v, "split_size": 256}
    values |= {"max_seqlen_q": 1, "max_seqlen_k": 1000, "scale": 0.1, "softcap": 0.0, "dropout_p": 0.0}
    with interpreter.session() as run:
        interpreter.operators().attention(**values)
    split, *_ = run.launches
    cache = 2 * k.numel() * k.element_size()
    assert cache <= split.bytes_read <= 1.05 * cache
    assert attention(q, k, v).shape == q.shape
