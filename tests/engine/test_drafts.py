"""Drafts are verified in one step: right ones are kept, and no output depends on them."""

import random

import pytest
import torch

from stopway_core.types import RowWork, SamplingParams, StepWork
from stopway_engine.executor import Executor
from stopway_engine.sampler import lanes_of, sample
from stopway_engine.verify import sample_rows

VOCAB = 50


def row_of(tokens: list[int], samples: int, params: SamplingParams) -> RowWork:
    """A row at position 3 whose history was appended to since the step began."""
    return RowWork(1, 3, tokens, [0], samples, params, [7, 8, 9, 40, 41, 42, 43], 2)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(temperature=1.0, seed=5, logprobs=0),
        SamplingParams(temperature=0.8, seed=9, top_p=0.9, min_tokens=4),
        SamplingParams(temperature=0.7, seed=1, presence_penalty=1.0, repetition_penalty=1.3),
    ],
)
@pytest.mark.parametrize("right", [0, 1, 3])
def test_samples_are_kept_to_the_first_wrong_draft(params, right):
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    expected, logprobs = [], []
    for i in range(4):  # one by one, each fed to the next
        row = row_of([4, *expected], 1, params)
        tokens, more = sample(logits[i : i + 1].clone(), lanes_of([row]), eos=(1,))
        expected += tokens
        logprobs += more
    drafts = [token if i < right else (token + 1) % VOCAB for i, token in enumerate(expected[:3])]
    (kept,) = sample_rows(logits.clone(), [row_of([4, *drafts], 4, params)], (1,), None)
    assert kept.tokens == expected[: right + 1]
    assert kept.logprobs == logprobs[: right + 1]


def generate(
    executor: Executor, prompt: list[int], count: int, params: SamplingParams, drafts=None
) -> list[int]:
    """``count`` tokens; ``drafts`` says what to guess after each known token."""
    history, start, steps = list(prompt), 0, 0
    while len(history) < len(prompt) + count:
        known = history[start:]
        guess = drafts(len(history)) if drafts and start else []
        samples = 1 + len(guess)
        row = RowWork(
            1, start, known + guess, list(range(8)), samples, params, history, len(prompt)
        )
        neighbour = RowWork(
            2, start, [5], list(range(20, 28)), 1, SamplingParams(temperature=0.0), [5] * 200, 1
        )
        result = executor.run(StepWork(steps, [neighbour, row]))
        assert result is not None
        kept = result.tokens[1:]
        assert result.counts == ([1, len(kept)] if guess else [])
        start = len(history) + len(kept) - 1
        history += kept
        steps += 1
    generate.steps = steps  # type: ignore[attr-defined]
    return history[len(prompt) : len(prompt) + count]


@pytest.mark.model
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.9, seed=3),
        SamplingParams(temperature=0.9, seed=3, frequency_penalty=0.7, repetition_penalty=1.2),
    ],
    ids=["greedy", "seeded", "penalized"],
)
def test_output_with_drafts_is_the_output_without(invariant_executor, params):
    prompt = [random.Random(1).randrange(1000, 40000) for _ in range(20)]
    expected = generate(invariant_executor, prompt, 24, params)
    rng = random.Random(2)

    def drafts(known: int) -> list[int]:
        follow = expected[known - len(prompt) :][: rng.randrange(6)]
        if follow and rng.random() < 0.5:
            follow[rng.randrange(len(follow))] += 1
        return follow

    assert generate(invariant_executor, prompt, 24, params, drafts) == expected
    assert generate.steps < 20  # type: ignore[attr-defined]
