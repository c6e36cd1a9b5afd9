"""Rows whose request ends in the middle of a step leave it; nobody else's result changes."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from stopway_core.leaving import SHARED_ROWS_MIN
from stopway_core.types import DROPPED, RowWork, SamplingParams, StepWork
from stopway_engine.batch import build_batch
from stopway_engine.executor import Executor
from stopway_engine.leaving import Stayed, Watch

PARAMS = SamplingParams(temperature=0.0, logprobs=3)
CPU = torch.device("cpu")


def row_of(rid: int, start: int, count: int, samples: int = 1) -> RowWork:
    tokens = [random.Random(f"{rid} {i}").randrange(1000, 40000) for i in range(start + count)]
    blocks = list(range(8 * rid, 8 * rid + 8))
    return RowWork(rid, start, tokens[start:], blocks, samples, PARAMS, tokens, 1)


def batch_of(rows: list[RowWork], *, invariant: bool = False):
    return build_batch(rows, 16, torch.float32, CPU, invariant=invariant)


@contextmanager
def before_layer(executor: Executor, number: int, act: Callable[[], None]) -> Iterator[list[int]]:
    """Within, ``act`` runs before a layer; yields how many batch rows each layer had."""
    layers, widths = executor._model._layers, []

    def wrap(i, layer):
        def run(step, index, hidden):
            if i == number:
                act()
            widths.append(step.batch.n)
            layer(step, index, hidden)

        return run

    executor._model._layers = [wrap(i, layer) for i, layer in enumerate(layers)]
    yield widths
    executor._model._layers = layers


def end(*rows: RowWork) -> None:
    for row in rows:
        row.pulse.beats = False


@pytest.mark.model
def test_the_others_go_on_bit_by_bit(invariant_executor):
    run = invariant_executor.run

    def rows():
        return [row_of(0, 0, 30), row_of(1, 40, 1), row_of(2, 0, 50), row_of(3, 9, 3, 3)]

    before = [row_of(1, 0, 40, 0), row_of(3, 0, 9, 0)]
    run(StepWork(1, before))
    expected = run(StepWork(2, [row for row in rows() if row.rid != 2]))
    run(StepWork(3, before))
    disturbed = rows()
    with before_layer(invariant_executor, 4, lambda: end(disturbed[2])) as widths:
        found = run(StepWork(4, disturbed))
    assert widths == [84] * 5 + [34] * 25
    assert expected is not None and found is not None
    assert found.counts == [1, 1, 1, len(found.tokens) - 3]
    assert found.tokens[2] == DROPPED and found.logprobs[2] is None
    del found.tokens[2], found.logprobs[2]
    assert [found.tokens, found.logprobs] == [expected.tokens, expected.logprobs]
    # What they wrote is the same, too: the next step reads it.
    follow = [row_of(0, 30, 1), row_of(1, 41, 1)]
    again = run(StepWork(5, follow))
    run(StepWork(6, before))
    run(StepWork(7, [row for row in rows() if row.rid != 2]))
    undisturbed = run(StepWork(8, follow))
    assert again is not None and undisturbed is not None
    assert again.logprobs == undisturbed.logprobs


@pytest.mark.model
def test_when_nobody_is_left_nothing_more_is_computed(invariant_executor):
    rows = [row_of(0, 0, 30), row_of(1, 0, 20, 0), row_of(2, 0, 3)]
    with before_layer(invariant_executor, 7, lambda: end(*rows)) as widths:
        result = invariant_executor.run(StepWork(1, rows))
    assert len(widths) == 8
    assert result is not None and result.tokens == [DROPPED, DROPPED]
    with before_layer(invariant_executor, 0, lambda: None) as widths:
        result = invariant_executor.run(StepWork(2, rows))
    assert widths == [] and result is not None and result.tokens == [DROPPED, DROPPED]


@pytest.mark.model
def test_a_row_that_does_not_sample_leaves_no_trace(invariant_executor):
    rows = [row_of(0, 0, 30, 0), row_of(1, 0, 5)]
    end(rows[0])
    result = invariant_executor.run(StepWork(1, rows))
    assert result is not None and len(result.tokens) == 1 and result.tokens[0] >= 0


def test_rows_leave_only_where_it_pays():
    rows = [row_of(i, 0, 1) for i in range(7)] + [row_of(7, 0, 2)]
    batch, watch = batch_of(rows), Watch(1, CPU)
    assert watch.gone(rows, batch, None) == set()
    end(rows[3], rows[5])
    assert watch.gone(rows, batch, None) == set()  # two of nine
    end(rows[7])
    assert watch.gone(rows, batch, None) == {3, 5, 7}


def test_ranks_of_a_stage_tell_each_other_in_large_steps_only():
    watch, width = Watch(2, CPU), 4
    small = [row_of(0, 0, SHARED_ROWS_MIN - 1)]
    assert watch.bits(0, small, batch_of(small), width) is None
    large = [row_of(i, 0, 10) for i in range(6)]
    batch = batch_of(large)
    end(large[0], large[2], large[5])
    assert watch.gone(large, batch, None) == set()  # what this rank alone knows
    bits = watch.bits(0, large, batch, width)
    assert bits is not None and bits.tolist() == [[1.0, 0.0, 1.0, 0.0]]
    heard = bits + torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    assert watch.gone(large, batch, heard) == {0, 2}
    on_cuda = Watch(2, torch.device("cuda"))
    said = [on_cuda.bits(i, large, batch, width) is not None for i in range(6)]
    assert not any(said)


def test_the_next_stage_gets_a_residual_of_the_whole_shape():
    rows = [row_of(0, 0, 3), row_of(1, 9, 1), row_of(2, 0, 2), row_of(3, 30, 1)]
    whole = batch_of(rows, invariant=True)
    hidden = torch.randn(whole.padded, 4)
    stayed = Stayed(list(rows), whole, hidden, [0, 1, 2, 3])
    assert stayed.spread(whole) is hidden
    for gone, places in (({1}, [0, 2, 3]), ({0, 2}, [2])):
        stayed.drop(gone, lambda left: batch_of(left, invariant=True))
        assert stayed.places == places and [row.rid for row in stayed.rows] == places
    spread = stayed.spread(whole)
    first, count = whole.spans[2]
    assert torch.equal(spread[first : first + count], hidden[first : first + count])
    assert spread.shape == hidden.shape and int((spread != 0).any(1).sum()) == count
    stayed.drop({0}, lambda left: batch_of(left))
    assert not stayed.spread(whole).any()


@pytest.mark.parametrize("tp", [1, 2])
def test_where_rows_do_not_leave_nobody_looks(tp: int) -> None:
    rows = [row_of(0, 0, SHARED_ROWS_MIN)]
    batch = batch_of(rows)
    end(*rows)
    for leaves in (True, False):
        watch = Watch(tp, CPU, leaves=leaves)
        bits = watch.bits(0, rows, batch, 64)
        assert (bits is not None) == (leaves and tp > 1)
        assert watch.gone(rows, batch, bits) == ({0} if leaves else set())
