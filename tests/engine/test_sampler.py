"""Draws depend on (logits, params, seed, position) only; filters, penalties, log probabilities."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stopway_core.types import RowWork, SamplingParams
from stopway_engine.numerics import NonFiniteError
from stopway_engine.sampler import lanes_of, sample, uniform

VOCAB = 300


def row(params: SamplingParams, history: list[int] = [5, 6, 7], prompt_len: int = 2) -> RowWork:  # noqa: B006
    return RowWork(0, len(history) - 1, history[-1:], [0], 1, params, history, prompt_len)


def logits_of(seed: int, n: int = 1) -> torch.Tensor:
    return torch.randn(n, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def draw(logits: torch.Tensor, params: SamplingParams, **kwargs) -> int:
    return sample(logits.clone(), lanes_of([row(params, **kwargs)]))[0][0]


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 1000]),
    top_p=st.sampled_from([0.1, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.2]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.sampled_from([-1, 0, 3]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(PARAMS, min_size=1, max_size=6), st.integers(0, 2**31), st.randoms())
def test_a_draw_does_not_depend_on_the_batch(params, seed, random):
    logits = logits_of(seed, len(params))
    rows = [row(p, history=[i, 3, 4, 4], prompt_len=1 + i % 3) for i, p in enumerate(params)]
    alone = [sample(logits[i : i + 1].clone(), lanes_of([rows[i]])) for i in range(len(rows))]
    order = list(range(len(rows)))
    random.shuffle(order)
    tokens, logprobs = sample(logits[order].clone(), lanes_of([rows[i] for i in order]))
    assert tokens == [alone[i][0][0] for i in order]
    if logprobs:
        for i, found in zip(order, logprobs, strict=True):
            assert found == (alone[i][1][0] if alone[i][1] else None)


@settings(max_examples=60, deadline=None)
@given(PARAMS, st.integers(0, 2**31), st.integers(1, 50))
def test_a_draw_is_within_its_filters(params, seed, position):
    logits = logits_of(seed)
    plain = SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
    )
    token = draw(logits, plain, history=[1] * position, prompt_len=1)
    if not params.temperature:
        assert token == int(logits.argmax())
        return
    probs = torch.softmax(logits[0].double() / params.temperature, -1)
    rank = int((probs > probs[token]).sum())
    assert not params.top_k or rank < params.top_k
    assert probs[token] >= params.min_p * probs.max() * (1 - 1e-6)
    if params.top_p < 1 and not params.top_k and not params.min_p:
        assert float(probs[probs > probs[token]].sum()) < params.top_p + 1e-9


def test_draws_follow_the_distribution():
    logits = torch.full((1, 8), -math.inf)
    logits[0, [1, 4, 6]] = torch.tensor([0.6, 0.3, 0.1]).log()
    counts = Counter(
        draw(logits, SamplingParams(seed=seed), history=[0] * 9, prompt_len=1)
        for seed in range(3000)
    )
    assert set(counts) == {1, 4, 6}
    for token, share in ((1, 0.6), (4, 0.3), (6, 0.1)):
        assert counts[token] / 3000 == pytest.approx(share, abs=0.03)


def test_uniform_is_spread_over_seeds_and_positions():
    values = [uniform(seed, position) for seed in range(40) for position in range(40)]
    assert len(set(values)) == 1600 and all(0 <= value < 1 for value in values)
    assert sum(values) / 1600 == pytest.approx(0.5, abs=0.03)
    assert uniform(2**64 + 3, 1) == uniform(3, 1)


def test_penalties_follow_the_api():
    logits = torch.zeros(1, 8)
    logits[0, :5] = torch.tensor([5.0, 4.9, 4.8, 4.7, -4.0])
    greedy = {"temperature": 0.0}
    history = [0, 0, 1, 1, 2]  # prompt 0 0, output 1 1 2
    found = draw(logits, SamplingParams(**greedy, presence_penalty=1.0), history=history)
    assert found == 0  # the prompt is not penalized
    logits[0, 0] = 0.0
    assert draw(logits, SamplingParams(**greedy, presence_penalty=0.05), history=history) == 1
    assert draw(logits, SamplingParams(**greedy, frequency_penalty=0.15), history=history) == 3
    assert draw(logits, SamplingParams(**greedy, repetition_penalty=1.5), history=history) == 3
    # A history that is longer than the position (the next tokens are known) is not read further.
    work = RowWork(0, 1, [0], [0], 1, SamplingParams(**greedy, presence_penalty=9), history, 2)
    assert sample(logits.clone(), lanes_of([work]))[0] == [1]


def test_min_tokens_holds_the_end_back():
    logits = torch.zeros(1, 8)
    logits[0, [2, 5, 6]] = torch.tensor([9.0, 8.0, 7.0])
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(5,))
    for history, token in (([1, 1], 6), ([1, 1, 6], 6), ([1, 1, 6, 6], 2)):
        assert sample(logits.clone(), lanes_of([row(params, history)]), eos=(2, 999))[0] == [token]


def test_logprobs_are_of_the_raw_logits():
    logits = logits_of(1)
    params = SamplingParams(temperature=0.5, presence_penalty=1.0, logprobs=4, seed=3)
    tokens, logprobs = sample(logits.clone(), lanes_of([row(params)]))
    expected = torch.log_softmax(logits[0], -1)
    assert logprobs[0] is not None
    assert logprobs[0].logprob == pytest.approx(float(expected[tokens[0]]))
    values, ids = expected.topk(4)
    assert [token for token, _ in logprobs[0].top] == ids.tolist()
    assert [value for _, value in logprobs[0].top] == pytest.approx(values.tolist())
    mixed = [row(SamplingParams(temperature=0.0)), row(SamplingParams(logprobs=0))]
    _, logprobs = sample(logits_of(2, 2), lanes_of(mixed))
    assert logprobs[0] is None and logprobs[1] is not None and logprobs[1].top == []


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_without_a_finite_maximum_are_an_error(value, temperature):
    logits = logits_of(0, 2)
    logits[1, 7] = value
    rows = [row(SamplingParams(temperature=temperature)) for _ in range(2)]
    with pytest.raises(NonFiniteError, match="no finite maximum"):
        sample(logits, lanes_of(rows))


def test_ties_at_a_cut_are_kept():
    logits = torch.zeros(1, 8)
    params = [SamplingParams(top_k=1, seed=seed) for seed in range(60)]
    assert {draw(logits, p) for p in params} == set(range(8))
    assert sample(torch.empty(0, 8), []) == ([], [])


@pytest.mark.parametrize("logprobs", [-1, 3])
@pytest.mark.parametrize("temperature", [0.0, 2e-5, 1.0])
@pytest.mark.parametrize("penalty", [1e-320, 1e-40, 1e-36, 1e-3, 1e30])
def test_no_parameter_of_a_client_makes_a_logit_infinite(
    penalty: float, temperature: float, logprobs: int
) -> None:
    """A rank that fails on one request's wish takes everybody's requests with it."""
    params = SamplingParams(
        temperature=temperature, repetition_penalty=penalty, logprobs=logprobs, seed=1
    )
    for seed in range(5):
        assert 0 <= draw(logits_of(seed), params) < VOCAB
