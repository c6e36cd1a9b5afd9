"""What the front refuses before it spends time on it, and that time spent stops nobody else."""

import threading
import time

import pytest

from stopway_engine.front.requests import Rejected, prompt_tokens
from stopway_engine.modelspec import resolve_model
from stopway_engine.tokenizer import TextCodec, load_codec

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return load_codec(resolve_model("builtin:smollm2"))


def test_a_text_that_cannot_fit_is_refused_untokenized(
    codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> list[int]:
        raise AssertionError("it was tokenized first")

    monkeypatch.setattr(codec, "encode", never)
    monkeypatch.setattr(codec, "chat", never)
    text = "a b" * 1_350_000
    for prompt in ({"text": text}, {"messages": [{"role": "user", "content": text}]}):
        with pytest.raises(Rejected, match=r"4050000 bytes.*8192") as refused:
            prompt_tokens({"prompt": prompt}, codec, 8192)
        assert refused.value.code == "context_length_exceeded"


def test_too_many_token_ids_are_refused_with_both_numbers(codec: TextCodec) -> None:
    with pytest.raises(Rejected, match=r"9000 tokens.*8192"):
        prompt_tokens({"prompt": {"tokens": [1] * 9000}}, codec, 8192)
    for bad in (-1, codec.vocab_size, 2**40):
        with pytest.raises(Rejected, match="token ids must be"):
            prompt_tokens({"prompt": {"tokens": [1, bad]}}, codec, 8192)


def test_no_text_that_could_fit_is_refused(codec: TextCodec) -> None:
    """The longest token, as often as the context has room for it."""
    assert codec.piece_bytes_max >= 16
    text = " " * (codec.piece_bytes_max * 64)
    assert len(prompt_tokens({"prompt": {"text": text}}, codec, 64)) >= 1


def test_tokenizing_leaves_the_interpreter_to_others(codec: TextCodec) -> None:
    """Other threads get on while a long text is tokenized: the front serves everybody."""
    done = threading.Event()
    text = "lighthouse keeper " * 40_000
    thread = threading.Thread(target=lambda: (codec.encode(text), done.set()))
    thread.start()
    turns = 0
    while not done.is_set():
        turns += 1
        time.sleep(0.001)
    thread.join()
    assert turns > 5
