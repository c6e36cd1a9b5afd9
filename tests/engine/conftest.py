"""A whole rank in invariant mode, which several modules compare runs on; a front and its ends."""

from collections.abc import Iterator

import pytest

from stopway_engine.collective import LocalCollective
from stopway_engine.config import PodConfig
from stopway_engine.executor import Executor
from stopway_engine.front.hub import Hub
from stopway_engine.grammar.matchers import GrammarTable
from stopway_engine.modelspec import read_spec, resolve_model
from stopway_engine.numerics import Numerics
from stopway_engine.parallel import plan_shards

from .front_ends import SECRET, Codec, Engine, FakeSession


@pytest.fixture(scope="session")
def grammars() -> GrammarTable:
    """What ``invariant_executor`` reads; a test fills the slots that it uses."""
    return {}


@pytest.fixture(scope="session")
def invariant_executor(grammars: GrammarTable) -> Iterator[Executor]:
    """The model on one thread, with 64 blocks."""
    path = resolve_model("builtin:smollm2")
    executor = Executor(
        path,
        plan_shards(read_spec(path), 1, 1)[0],
        numerics=Numerics.INVARIANT,
        device="cpu",
        threads=1,
        num_blocks=64,
        collective=LocalCollective(),
        overlap=True,
        grammars=grammars,
    )
    yield executor
    executor.close()


@pytest.fixture
def hub() -> Hub:
    """A front's hub that no leader has called yet."""
    config = PodConfig(secret=SECRET)
    return Hub(config, Codec(), lambda receipt: None)


@pytest.fixture
def session(hub: Hub) -> FakeSession:
    """A gateway's session, open."""
    session = FakeSession()
    hub.open(session)
    return session


@pytest.fixture
def engine(hub: Hub, session: FakeSession) -> Engine:
    """The leader rank of ``hub``, in epoch 1."""
    engine = Engine(hub)
    engine.connect(1)
    return engine
