"""Structured output of the real model: every token allowed, with drafts and after preemptions."""

import json
import re
import select
from collections.abc import Callable

import pytest

from stopway_core.types import REJECTED, RowWork, SamplingParams, StepWork
from stopway_engine.executor import Executor
from stopway_engine.grammar.compiler import GrammarCompiler
from stopway_engine.grammar.matchers import Matchers
from stopway_engine.grammar.spec import canonical
from stopway_engine.modelspec import resolve_model
from stopway_engine.tokenizer import load_codec

pytestmark = pytest.mark.model

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "likes": {"type": "array", "items": {"enum": ["tea", "bread"]}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
TEXTS = {
    1: {"json_schema": SCHEMA},
    2: {"regex": r"(\d{2}-){3}x"},
    3: {"choice": ["positive", "negative", "neutral"]},
    4: {"json_object": True},
    6: {"lark": "start: /[a-z]{2}/ <|im_start|>"},
}
SEEDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.5, seed=1),
    SamplingParams(temperature=1.5, seed=2, repetition_penalty=1.3, presence_penalty=0.5),
]


@pytest.fixture(scope="module")
def codec():
    return load_codec(resolve_model("builtin:smollm2"))


@pytest.fixture(scope="module")
def compiler(codec, grammars):
    compiler = GrammarCompiler(lambda: codec)
    compiler.table = grammars
    compiler.start()
    yield compiler
    compiler.finish(10)


def take(compiler: GrammarCompiler, count: int) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    while len(found) < count:
        assert select.select([compiler], [], [], 60)[0], "nothing was compiled"
        found += compiler.take()
    return found


@pytest.fixture(scope="module")
def compiled(compiler):
    for slot in (1, 2, 3, 4, 6):
        compiler.compile(slot, canonical(TEXTS[slot]))
    assert take(compiler, 5) == [(slot, "") for slot in (1, 2, 3, 4, 6)]


@pytest.fixture(scope="module")
def prompt(codec):
    return codec.chat([{"role": "user", "content": "Describe a person named Ann, as JSON."}])


class Run:
    """One request with a grammar, its rid new at each admission."""

    rids = 100

    def __init__(self, executor: Executor, prompt: list[int], slot: int, params: SamplingParams):
        self.executor, self.slot, self.params = executor, slot, params
        self.prompt_len, self.tokens, self.steps = len(prompt), list(prompt), 0
        self.rejected = False
        self.admit()

    def admit(self) -> None:
        """Begin anew, as after a preemption: all that is known is fed again."""
        Run.rids += 1
        self.rid, self.start = Run.rids, 0

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    def step(self, drafts: list[int] | None = None) -> None:
        drafts = drafts or []
        fed = self.tokens[self.start :] + drafts
        row = RowWork(
            self.rid,
            self.start,
            fed,
            list(range(16)),
            1 + len(drafts),
            self.params,
            self.tokens,
            self.prompt_len,
            grammar=self.slot,
        )
        result = self.executor.run(StepWork(self.steps, [row]))
        assert result is not None
        self.start = len(self.tokens) + len(result.tokens) - 1
        self.steps += 1
        self.rejected = result.tokens[-1] == REJECTED
        self.tokens += [token for token in result.tokens if token >= 0]

    def finish(self, most: int = 120) -> list[int]:
        while not self.rejected and self.tokens[-1] != 2 and len(self.output) < most:
            self.step()
        return self.output


def whole(run: Run, codec) -> str:
    output = run.finish()
    assert output[-1] == 2 and 2 not in output[:-1], "the grammar's end is the text's end"
    return codec.decode(output)


@pytest.mark.parametrize("params", SEEDS)
def test_output_matches_its_schema(compiled, invariant_executor, codec, prompt, params):
    text = whole(Run(invariant_executor, prompt, 1, params), codec)
    value = json.loads(text)
    assert list(value) == ["name", "age", "likes"]
    assert isinstance(value["name"], str) and len(value["name"]) <= 12
    assert isinstance(value["age"], int) and 0 <= value["age"] <= 150
    assert len(value["likes"]) <= 3 and set(value["likes"]) <= {"tea", "bread"}


@pytest.mark.parametrize("params", SEEDS)
def test_expressions_and_choices(compiled, invariant_executor, codec, prompt, params):
    text = whole(Run(invariant_executor, prompt, 2, params), codec)
    assert re.fullmatch(r"(\d{2}-){3}x", text)
    text = whole(Run(invariant_executor, prompt, 3, params), codec)
    assert text in {"positive", "negative", "neutral"}


def test_a_special_token_can_be_asked_for(compiled, invariant_executor, codec, prompt):
    output = Run(invariant_executor, prompt, 6, SEEDS[0]).finish()
    assert output[-2:] == [codec.encode("<|im_start|>", special=True)[0], 2]


def test_min_tokens_and_end_tokens_do_not_touch_a_grammar(
    compiled, invariant_executor, codec, prompt
):
    params = SamplingParams(temperature=0.0, min_tokens=100, stop_token_ids=(1,), logprobs=1)
    assert whole(Run(invariant_executor, prompt, 3, params), codec)


@pytest.mark.parametrize("params", SEEDS)
def test_a_preempted_request_goes_on_with_the_same_tokens(
    compiled, invariant_executor, prompt, params
):
    expected = Run(invariant_executor, prompt, 1, params).finish()
    run = Run(invariant_executor, prompt, 1, params)
    for count in range(1, len(expected), 9):
        run.finish(count)
        run.admit()
    assert run.finish() == expected


@pytest.mark.parametrize("params", SEEDS)
def test_drafts_change_no_token(compiled, invariant_executor, prompt, params):
    expected = Run(invariant_executor, prompt, 1, params).finish()
    run = Run(invariant_executor, prompt, 1, params)
    run.step()
    guesses: list[Callable[[list[int]], list[int]]] = [
        lambda right: right[:3],
        lambda right: [*right[:1], 5, 6],  # which are not allowed
        lambda right: [*right[:2], 28, 11],
        lambda right: [2],
        lambda right: [*right, 2, 2][:8],  # and on beyond the end
    ]
    while run.tokens[-1] != 2 and len(run.output) < 100:
        right = expected[len(run.output) :]
        run.step(guesses[run.steps % len(guesses)](right))
        got = run.output
        assert got == expected[: len(got)]
    assert run.output == expected[:100] and run.steps < len(expected)


def test_where_nothing_is_allowed_the_result_says_so(
    compiled, compiler, invariant_executor, prompt
):
    run = Run(invariant_executor, prompt, 99, SEEDS[0])  # nothing was compiled there
    assert run.finish() == [] and run.rejected
    run = Run(invariant_executor, prompt, 3, SEEDS[1])
    run.tokens += [5]  # output that no choice begins with
    run.step()
    assert run.rejected and run.output == [5]
    plain = Run(invariant_executor, prompt, 0, SEEDS[0])
    plain.step()
    assert not plain.rejected


def test_a_dead_end_is_rejected(compiled, compiler, invariant_executor, codec, prompt):
    """A grammar may turn out to have no way on: here a value that contains itself."""
    loop = {"type": "object", "properties": {"a": {"$ref": "#/x"}}, "required": ["a"]}
    compiler.compile(5, canonical({"json_schema": loop | {"x": {"$ref": "#/x"}}}))
    assert take(compiler, 1) == [(5, "")]
    run = Run(invariant_executor, prompt, 5, SEEDS[0])
    output = run.finish(20)
    assert run.rejected and "".join(codec.decode(output).split()) == '{"a":'
    guessing = Run(invariant_executor, prompt, 5, SEEDS[0])
    guessing.step()
    guessing.step([*output[1:3], 5])  # a wrong guess leads nowhere, but is none of the request's
    guessing.step([*output[len(guessing.output) :], 5])
    assert guessing.rejected and guessing.output == output


def test_matchers_are_forgotten_when_their_requests_leave(compiled, invariant_executor, prompt):
    matchers = invariant_executor._matchers
    run = Run(invariant_executor, prompt, 3, SEEDS[0])
    run.step()
    held = len(matchers)
    plain = RowWork(1, 0, prompt, list(range(16)), 1, SEEDS[0], prompt, len(prompt))
    invariant_executor.run(StepWork(9, [plain], left=[run.rid, 12345]))
    assert len(matchers) == held - 1


def test_a_row_may_be_beyond_what_its_matcher_has_seen(compiled, codec, grammars):
    """Whatever happened to a step's result, the matcher is where its row is."""
    matchers = Matchers(grammars, codec.vocab_size)
    word = codec.encode("positive")
    history = [9, 9, *word]

    def row(start: int) -> RowWork:
        tokens = history[start : start + 1]
        return RowWork(1, start, tokens, [0], 1, SEEDS[0], history, 2, grammar=3)

    (first,) = matchers.look_ahead(row(1))
    assert first[word[0]] and not first[5]
    (last,) = matchers.look_ahead(row(len(history) - 1))  # nothing was advanced in between
    assert last.nonzero()[0].tolist() == [2]


def test_the_compiler_says_what_is_wrong_and_goes_on(compiler, compiled, grammars):
    before = grammars[1]
    compiler.compile(8, canonical({"regex": "[a-"}))
    compiler.compile(9, canonical({"regex": "[a-c]+"}))
    compiler.forget(9)
    compiler.compile(9, canonical({"choice": ["x"]}))
    found = take(compiler, 3)
    assert [slot for slot, _ in found] == [8, 9, 9]
    assert "unclosed" in found[0][1] and found[1][1] == found[2][1] == ""
    assert 8 not in grammars and 9 in grammars and grammars[1] is before
    assert compiler.take() == []
