"""The CUDA kernels, run by the interpreter: what nvcc makes of them, on the CPU, with every access checked."""

from functools import partial
from itertools import count

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import interpreter
from cases import CASES
from checks import check_backward, check_forward
from flashsoftmax import attention

pytestmark = pytest.mark.skipif(interpreter.unavailable() is not None, reason=str(interpreter.unavailable()))

MOST_SCORES = 120_000
"""Of a case that runs here: an interpreted GPU is some million times slower."""

SMALL = [case for case in CASES if case.batch * case.heads[0] * case.rows * case.keys <= MOST_SCORES]


class Interpreted(TorchDispatchMode):
    """Each operator of flashsoftmax runs on the interpreter, each time in another order of warps and copies."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds = count()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "flashsoftmax":
            with interpreter.session(seed=next(self.seeds)):
                return getattr(torch.ops.flashsoftmax_interpreted, op._opname).default(*args, **(kwargs or {}))
        return op(*args, **(kwargs or {}))


@pytest.fixture
def interpreted():
    interpreter.operators()
    with Interpreted() as mode:
        yield mode


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_forward(case, dtype, interpreted):
    check_forward(case.call(attention), partial(case.inputs, dtype))


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_backward(case, dtype, interpreted):
    check_backward(case.call(attention), partial(case.inputs, dtype))
