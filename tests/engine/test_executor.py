"""A whole rank: greedy text, seeded sampling, steps without samples, bad inputs."""

import pytest

from stopway_core.types import RowWork, SamplingParams, StepWork
from stopway_engine.collective import LocalCollective
from stopway_engine.executor import Executor
from stopway_engine.modelspec import read_spec, resolve_model
from stopway_engine.numerics import Numerics
from stopway_engine.parallel import plan_shards
from stopway_engine.tokenizer import load_codec

pytestmark = pytest.mark.model
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def codec():
    return load_codec(resolve_model("builtin:smollm2"))


@pytest.fixture(scope="module", params=list(Numerics))
def executor(request):
    path = resolve_model("builtin:smollm2")
    executor = Executor(
        path,
        plan_shards(read_spec(path), 1, 1)[0],
        numerics=request.param,
        device="cpu",
        threads=1,
        num_blocks=256,
        collective=LocalCollective(),
    )
    executor.warmup(rows_max=3, chunk=40)
    yield executor
    executor.close()


def generate(executor: Executor, prompts: list[list[int]], count: int, params: SamplingParams):
    """Tokens of each prompt, all decoded together."""
    histories = [list(prompt) for prompt in prompts]
    starts = [0] * len(prompts)
    for step in range(count):
        rows = []
        for i, history in enumerate(histories):
            blocks = list(range(8 * i, 8 * i + 8))
            tokens = history[starts[i] :]
            rows.append(RowWork(i, starts[i], tokens, blocks, 1, params, history, len(prompts[i])))
        result = executor.run(StepWork(step, rows))
        assert result is not None and result.step == step
        for i, token in enumerate(result.tokens):
            starts[i] = len(histories[i])
            histories[i].append(token)
    return [history[len(p) :] for history, p in zip(histories, prompts, strict=True)]


def ask(codec, question: str) -> list[int]:
    return codec.chat([{"role": "user", "content": question}])


def test_the_capital_of_france(executor, codec):
    alone = generate(executor, [ask(codec, "What is the capital of France?")], 8, GREEDY)
    assert "Paris" in codec.decode(alone[0])


def test_a_batch_answers_each(executor, codec):
    questions = ["What is the capital of France?", "What is 1+1?", "Say hello."]
    prompts = [ask(codec, question) for question in questions]
    together = generate(executor, prompts, 8, GREEDY)
    assert "Paris" in codec.decode(together[0])
    if executor._model.invariant:
        assert together == [generate(executor, [prompt], 8, GREEDY)[0] for prompt in prompts]


def test_a_seed_repeats_a_run(executor, codec):
    prompt = ask(codec, "Tell me a story.")
    runs = [
        generate(executor, [prompt], 6, SamplingParams(temperature=1.0, top_p=0.95, seed=seed))
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]


def test_only_sampled_rows_have_tokens(executor):
    def row(rid: int, samples: int) -> RowWork:
        return RowWork(rid, 0, [5, 6, 7], [rid], samples, GREEDY, [5, 6, 7], 3)

    result = executor.run(StepWork(4, [row(0, 0), row(1, 1), row(2, 0)]))
    assert result is not None and len(result.tokens) == 1 and result.logprobs == []
    result = executor.run(StepWork(5, [row(0, 0)]))
    assert result is not None and result.tokens == []


def test_rows_must_fit_their_blocks(executor):
    with pytest.raises(AssertionError, match="table too short"):
        executor.run(StepWork(0, [RowWork(0, 16, [5], [3], 1, GREEDY, [5] * 17, 1)]))
    with pytest.raises(AssertionError):
        executor.run(StepWork(0, []))
