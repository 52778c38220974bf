"""State: the worked row, the monoid's laws, every order of merging, and what must not be left out."""

from __future__ import annotations

import functools
import operator
import pickle
import random
from collections.abc import Callable, Sequence

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

from flashsoftmax import State

INF = float("inf")
NAN = float("nan")
Pair = tuple[Tensor, Tensor]


def direct(scores: Tensor, values: Tensor) -> Pair:
    return scores.softmax(-1) @ values, scores.logsumexp(-1)


def relative_error(state: State, expected: Pair) -> float:
    pairs = zip((state.output, state.lse), expected, strict=True)
    return max(float(((a - b).abs() / b.abs().clamp(min=1)).max()) for a, b in pairs)


def row(scores: Sequence[float], dtype: torch.dtype = torch.float64) -> State:
    """One row over keys whose values are all different."""
    x = torch.tensor(scores, dtype=dtype)
    return State.of(x, torch.arange(1.0, 1 + 2 * len(x), dtype=dtype).view(-1, 2))


# --- the worked row ---


def test_worked_row() -> None:
    values = torch.tensor([[1.0], [2.0], [3.0], [4.0]], dtype=torch.float64)
    first = State.of(torch.tensor([3.0, 1.0], dtype=torch.float64), values[:2])
    second = State.of(torch.tensor([5.0, 2.0], dtype=torch.float64), values[2:])
    assert first.m == 3
    assert first.l.item() == pytest.approx(1.1353, abs=5e-5)
    both = first | second
    assert torch.exp(first.m - both.m).item() == pytest.approx(0.1353, abs=5e-5)
    assert both.m == 5
    assert both.l.item() == pytest.approx(1.2034, abs=5e-5)
    scores = torch.tensor([3.0, 1.0, 5.0, 2.0], dtype=torch.float64)
    assert relative_error(both, direct(scores, values)) < 1e-15


# --- every order ---

SIZES = (1, 64, 300, 7, 128, 250, 100, 150)  # 1,000 keys
HIDDEN = 3  # the block that is fully masked


def blocks(of: Callable[[Tensor, Tensor], State] = State.of) -> tuple[list[State], Pair]:
    """1,000 keys with scores of standard deviation 30, 5 rows, in uneven blocks; and the direct softmax."""
    scores = 30 * torch.randn(5, 1000, dtype=torch.float64)
    values = torch.randn(1000, 3, dtype=torch.float64)
    parts = scores.split(SIZES, -1)
    parts[HIDDEN].fill_(-INF)
    states = [of(s, v) for s, v in zip(parts, values.split(SIZES), strict=True)]
    return states, direct(scores, values)


def sequential(states: list[State]) -> State:
    return functools.reduce(operator.or_, states)


def backwards(states: list[State]) -> State:
    return sequential(states[::-1])


def shuffled(states: list[State]) -> State:
    return sequential(random.Random(1).sample(states, len(states)))


def tree(states: list[State]) -> State:
    half = len(states) // 2
    return tree(states[:half]) | tree(states[half:]) if half else states[0]


def from_empty(states: list[State]) -> State:
    return sequential([State.empty((5,), dim=3, dtype=torch.float64), *states])


ORDERS = (sequential, backwards, shuffled, tree, from_empty)


@pytest.mark.parametrize("order", ORDERS)
def test_order_does_not_matter(order: Callable[[list[State]], State]) -> None:
    states, expected = blocks()
    assert relative_error(order(states), expected) < 4e-15


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("block", range(4))
def test_maximum_in_each_block_in_turn(block: int, order: Callable[[list[State]], State]) -> None:
    scores, values = torch.randn(5, 12, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)
    scores[:, 3 * block + 1] = 40
    states = [State.of(s, v) for s, v in zip(scores.split(3, -1), values.split(3), strict=True)]
    assert relative_error(order(states), direct(scores, values)) < 1e-15


# --- the same check fails without the parts that are easily left out ---


class WithoutRescale(State):
    """Rescales l, and forgets the accumulator."""

    def merge(self, other: State) -> State:
        good = super().merge(other)
        return WithoutRescale(good.m, good.l, self.acc + other.acc, good.dtype)


class FromZero(State):
    """m starts at 0 instead of -inf."""

    @classmethod
    def of(cls, scores: Tensor, values: Tensor) -> State:
        weights, m = torch.exp(scores - 0), torch.zeros(scores.shape[:-1], dtype=scores.dtype)
        return cls(m, weights.sum(-1), weights @ values, values.dtype)


@pytest.mark.parametrize("order", [sequential, backwards, shuffled, tree])
def test_leaving_out_the_rescale_of_the_accumulator_fails(order: Callable[[list[State]], State]) -> None:
    states, expected = blocks(WithoutRescale.of)
    assert all(isinstance(s, WithoutRescale) for s in states)
    assert relative_error(order(states), expected) > 1e-3


@pytest.mark.parametrize("low", [-300.0, -1000.0, -5e4])
def test_all_scores_far_below_zero(low: float) -> None:
    scores = low + torch.arange(8, dtype=torch.float64) / 8
    values = torch.arange(16, dtype=torch.float64).view(8, 2)
    # FP64 still holds e^-300; FP32, in which the kernels keep their statistics, does not.
    for dtype, tolerance in ((torch.float64, 1e-15), (torch.float32, 1e-6)):
        s, v = scores.to(dtype), values.to(dtype)
        expected = direct(s.double(), v.double())
        assert relative_error(State.of(s[:3], v[:3]) | State.of(s[3:], v[3:]), expected) < tolerance
    started_at_zero = FromZero.of(scores.float(), values.float())
    assert started_at_zero.l == 0
    assert not torch.allclose(started_at_zero.output.double(), expected[0])


# --- the laws ---

score_lists = st.lists(st.one_of(st.floats(-1e4, 1e4), st.just(-INF)), min_size=0, max_size=6)


def same(a: State, b: State) -> bool:
    return torch.equal(a.m, b.m) and all(
        torch.allclose(x, y, rtol=1e-14, atol=1e-14)
        for x, y in ((a.l, b.l), (a.acc, b.acc), (a.output, b.output), (a.lse, b.lse))
    )


@hypothesis.given(score_lists)
def test_identity(scores: list[float]) -> None:
    state, empty = row(scores), State.empty(dim=2, dtype=torch.float64)
    for merged in (state | empty, empty | state):
        assert all(torch.equal(getattr(merged, name), getattr(state, name)) for name in ("m", "l", "acc"))


@hypothesis.given(score_lists, score_lists)
def test_commutative(a: list[float], b: list[float]) -> None:
    x, y = row(a) | row(b), row(b) | row(a)
    assert all(torch.equal(getattr(x, name), getattr(y, name)) for name in ("m", "l", "acc"))


@hypothesis.given(score_lists, score_lists, score_lists)
def test_associative(a: list[float], b: list[float], c: list[float]) -> None:
    x, y, z = row(a), row(b), row(c)
    assert same((x | y) | z, x | (y | z))


@hypothesis.given(score_lists, st.integers(0, 6))
def test_a_cut_anywhere_changes_nothing(scores: list[float], cut: int) -> None:
    s = torch.tensor(scores, dtype=torch.float64)
    v = torch.arange(1.0, 1 + 2 * len(s), dtype=torch.float64).view(-1, 2)
    assert same(State.of(s, v), State.of(s[:cut], v[:cut]) | State.of(s[cut:], v[cut:]))


# --- masked rows, NaN, infinities ---


def test_masked_rows_are_zero_and_minus_infinity() -> None:
    scores = torch.tensor([[-INF, -INF], [0.0, -INF]])
    state = State.of(scores, torch.tensor([[1.0], [2.0]]))
    for s in (state, state | state, state | State.empty((2,), dim=1)):
        assert s.output.tolist() == [[0.0], [1.0]]
        assert s.lse[0] == -INF
    assert state.lse[1] == 0
    none = State.of(torch.empty(4, 0), torch.empty(0, 3))
    assert none.output.equal(torch.zeros(4, 3))
    assert none.lse.equal(torch.full((4,), -INF))


def test_nan_makes_its_row_nan_and_no_other() -> None:
    scores = torch.tensor([[NAN, 1.0], [0.0, 1.0]])
    values = torch.ones(2, 1)
    nan, clean = State.of(scores, values), State.of(torch.zeros(2, 2), values)
    masked = State.of(torch.full((2, 2), -INF), values)
    for state in (nan, nan | clean, clean | nan, nan | masked, masked | nan):
        assert state.output[0].isnan()
        assert state.lse[0].isnan()
        assert state.output[1] == 1
        assert state.lse[1].isfinite()
    in_values = State.of(torch.zeros(1, 2), torch.tensor([[NAN, 1.0], [1.0, 1.0]])) | State.empty((1,), dim=2)
    assert in_values.output[0, 0].isnan()
    assert in_values.output[0, 1] == 1


def test_plus_infinity_is_nan_as_in_torch() -> None:
    scores = torch.tensor([INF, 0.0, -INF])
    assert State.of(scores, torch.ones(3, 1)).output.isnan().all()
    assert scores.softmax(-1).isnan().any()


def test_infinite_values_stay() -> None:
    state = State.of(torch.zeros(2), torch.tensor([[INF, 1.0], [1.0, -INF]]))
    assert state.output.tolist() == [INF, -INF]


# --- shapes and dtypes ---


def test_batched_and_broadcast() -> None:
    scores = torch.randn(2, 3, 5, 7, dtype=torch.float64)
    values = torch.randn(2, 3, 7, 4, dtype=torch.float64)
    state = State.of(scores, values[:, :, None])
    assert state.m.shape == state.l.shape == state.lse.shape == (2, 3, 5)
    assert state.acc.shape == state.output.shape == (2, 3, 5, 4)
    assert relative_error(state, direct(scores, values)) < 1e-14
    empty = State.empty((2, 3, 5), dim=4, dtype=torch.float64)
    assert same(empty | state, state)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    scores, values = (3 * torch.randn(4, 1000)).to(dtype), torch.randn(1000, 2).to(dtype)
    state = State.of(scores[:, :1], values[:1]) | State.of(scores[:, 1:], values[1:])
    assert {state.m.dtype, state.l.dtype, state.acc.dtype, state.lse.dtype} == {statistics}
    assert state.output.dtype == dtype
    output, lse = direct(scores.double(), values.double())
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(state.output.double(), output, rtol=eps, atol=8 * torch.finfo(statistics).eps)
    torch.testing.assert_close(state.lse.double(), lse, rtol=8 * torch.finfo(statistics).eps, atol=0)
    assert State.empty((4,), dim=2, dtype=dtype).output.dtype == dtype


def test_scores_may_be_wider_than_values() -> None:
    state = State.of(torch.zeros(1024), torch.ones(1024, 1, dtype=torch.bfloat16))
    assert state.l == 1024
    assert state.acc == 1024
    assert state.output == 1
    assert state.output.dtype == torch.bfloat16


def test_autocast_leaves_the_statistics_alone() -> None:
    scores, values = torch.randn(3, 9), torch.randn(9, 2)
    expected = State.of(scores, values)
    with torch.autocast("cpu", torch.bfloat16):
        assert State.of(scores, values).acc.equal(expected.acc)


@pytest.mark.parametrize("infinity", [INF, -INF])
def test_from_lse(infinity: float) -> None:
    scores, values = torch.randn(3, 8, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)
    halves = [State.of(scores[:, :5], values[:5]), State.of(scores[:, 5:], values[5:])]
    a, b = (State.from_lse(h.output, h.lse) for h in halves)
    assert relative_error(a | b, direct(scores, values)) < 1e-15
    unread = State.from_lse(torch.full((3, 2), NAN, dtype=torch.float64), torch.full((3,), infinity))
    assert same(a | unread, a)
    assert unread.output.equal(torch.zeros(3, 2, dtype=torch.float64))


def test_gradients() -> None:
    scores = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    values = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)

    def merged(s: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        state = State.of(s[:, :2], v[:2]) | State.of(s[:, 2:], v[2:])
        return state.output, state.lse

    def from_lse(s: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        halves = (State.of(s[:, :2], v[:2]), State.of(s[:, 2:], v[2:]))
        a, b = (State.from_lse(half.output, half.lse) for half in halves)
        return (a | b).output, (a | b).lse

    assert torch.autograd.gradcheck(merged, (scores, values))
    assert torch.autograd.gradcheck(from_lse, (scores, values))


def test_gradients_of_masked_rows_are_zero() -> None:
    scores = torch.tensor([[-INF, -INF, -INF], [-INF, 1.0, 2.0]], requires_grad=True)
    values = torch.ones(3, 1, requires_grad=True)
    state = State.of(scores[:, :1], values[:1]) | State.of(scores[:, 1:], values[1:])
    state.output.sum().backward(retain_graph=True)
    state.lse[0].backward()
    assert scores.grad is not None
    assert values.grad is not None
    assert scores.grad[0].equal(torch.zeros(3))
    assert scores.grad.isfinite().all()
    assert values.grad[0] == 0
    assert values.grad.isfinite().all()


def test_pickles_and_is_frozen() -> None:
    state = row([1.0, 2.0])
    assert same(pickle.loads(pickle.dumps(state)), state)
    with pytest.raises(AttributeError):
        state.m = state.l  # type: ignore[misc]


# --- errors name the argument, what was found and what is wanted ---


ones, of = torch.ones, State.of


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: of([1.0], ones(1, 1)), TypeError, r"scores: .*floating.* found list"),
        (lambda: of(ones(1), ones(1, 1).int()), TypeError, r"values: .* found torch.int32"),
        (lambda: of(ones(()), ones(1, 1)), ValueError, r"scores, values: .*found scores \[\]"),
        (lambda: of(ones(1), ones(1)), ValueError, r"found scores \[1\] and values \[1\]"),
        (lambda: of(ones(2), ones(3, 1)), ValueError, r"found scores \[2\] and values \[3, 1\]"),
        (lambda: of(ones(1), ones(3, 1)), ValueError, r"found scores \[1\] and values \[3, 1\]"),
        (lambda: of(ones(2, 5), ones(3, 5, 1)), ValueError, r"leading axes that broadcast"),
        (lambda: State.from_lse(ones(2, 5), ones(3)), ValueError, r"output, lse: .*\[2, 5\] and \[3\]"),
        (lambda: State.from_lse(ones(2, 5), None), TypeError, r"lse: .* found NoneType"),
        (lambda: State.empty(dim=1) | State.empty(dim=2), ValueError, r"other: wanted .* 1 .*found 2"),
        (lambda: State.empty(dim=1) | ones(1), TypeError, r"unsupported operand"),
    ],
)
def test_errors(call: Callable[[], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()
