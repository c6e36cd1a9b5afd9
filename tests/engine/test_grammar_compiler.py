"""A compiler that cannot begin: a failure of the rank, and no grammar's."""

from __future__ import annotations

import select
import socket

import pytest

from stopway_engine.config import PodConfig
from stopway_engine.control.loop import ControlLoop, EpochEnded
from stopway_engine.exec_thread import ExecThread
from stopway_engine.grammar.compiler import CompilerError, GrammarCompiler
from stopway_engine.link import Link
from stopway_engine.tokenizer import TextCodec


def no_codec() -> TextCodec:
    raise OSError("no such model")


def no_runner() -> None:
    raise AssertionError("it was never started")


@pytest.fixture
def broken() -> GrammarCompiler:
    """Nobody has asked it for a grammar yet."""
    compiler = GrammarCompiler(no_codec)
    compiler.start()
    assert select.select([compiler], [], [], 60)[0], "it said nothing"
    return compiler


def test_a_codec_that_cannot_be_loaded_fails_no_grammar(broken: GrammarCompiler) -> None:
    broken.compile(1, '{"regex":"a"}')
    with pytest.raises(CompilerError, match=r"tokenizer \(no such model\)"):
        broken.take()
    assert broken.take() == [] and broken.table == {}


def test_it_ends_its_rank_at_once(broken: GrammarCompiler) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        pod = Link(ours, "supervise")
        config = PodConfig(secret="0123456789abcdef")
        loop = ControlLoop(config, 3, 1, pod, ExecThread(no_runner), broken)
        with pytest.raises(
            EpochEnded, match=r"rank 3 failed: the grammar compiler .*model's files"
        ):
            loop.run()
        loop.selector.close()
        pod.close()
