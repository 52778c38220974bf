import functools
import itertools
import os

import pytest

# Thousands of small calls, on machines that have other work too: a thread that waits must not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import interpreter
from flashsoftmax import attention, merge, ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@functools.cache
def no_cuda(operator: str) -> str | None:
    """Why `operator` cannot run on a GPU here, or None where it can."""
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    x = torch.zeros(1, 1, 1, 8, device="cuda")
    calls = {
        "attention": lambda: attention(x, x, x),
        "merge": lambda: merge([x], [x[..., 0]]),
        "append_kv": lambda: ops.append_kv(x, x.clone(), x, x, kv_lens=x.new_zeros(1, dtype=torch.int64)),
    }
    try:
        calls[operator]()
    except NotImplementedError as error:
        return str(error)
    return None


class Interpreted(TorchDispatchMode):
    """The operators' CUDA kernels run on the interpreter: each call with warps and copies in another order."""

    def __init__(self):
        super().__init__()
        self.seeds = itertools.count()

    @classmethod
    def _should_skip_dynamo(cls):
        """Torch asks this. Answering True would make it import its compiler, which takes seconds."""
        return False

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if op.namespace != "flashsoftmax":
            return op(*args, **kwargs)
        with interpreter.session(seed=next(self.seeds)):
            return getattr(interpreter.operators(), op._opname).default(*args, **kwargs)


DEVICES = ["cpu", *(pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("interpreted", "cuda"))]


@pytest.fixture(params=DEVICES)
def device(request):
    """Every available device. A module that tests another operator than attention sets OPERATOR."""
    if request.param == "interpreted":
        if reason := interpreter.unavailable():
            pytest.skip(reason)
        with Interpreted():
            yield torch.device("cpu")
        return
    reason = no_cuda(getattr(request.module, "OPERATOR", "attention")) if request.param == "cuda" else None
    if reason:
        pytest.skip(reason)
    yield torch.device(request.param)


def pytest_collection_modifyitems(config, items):
    """A module's on_interpreter(**parameters) says which of its tests the interpreter runs too: it is slow."""

    def is_wanted(item):
        parameters = getattr(item, "callspec", None) and item.callspec.params
        if not parameters or parameters.get("device") != "interpreted" or not hasattr(item.module, "on_interpreter"):
            return True
        return item.module.on_interpreter(**parameters)

    wanted = [item for item in items if is_wanted(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(wanted)])
    items[:] = wanted


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request):
    return request.param


@pytest.fixture(autouse=True)
def seeded_and_poisoned():
    """Random numbers are the same in every run; memory that torch hands out uninitialised holds NaN."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def threads():
    """Sets the number of threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
