"""Fixtures of the end-to-end tests. What each gives is in README.md."""

import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from support import evidence, progress, stack
from support.faults import Faults
from support.jaeger import Jaeger
from support.jaeger_server import serve_jaeger
from support.operator import Operator, installed_operator
from support.progress import say

# Files of the cluster are no tests, and its cache has all of Debian's.
collect_ignore = ["cluster"]


def pytest_configure(config: pytest.Config) -> None:
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        progress.uncaptured = capture.global_and_fixture_disabled
    # A run that is told to end takes its cluster down first.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[evidence.FAILED] = True
    spaces = [v for v in getattr(item, "funcargs", {}).values() if isinstance(v, stack.Namespace)]
    for space in spaces if report.failed and report.when != "teardown" else ():
        kept = evidence.keep(space.kubectl, item.nodeid)
        say(f"what its namespace looked like is in {kept}")
    return report


@pytest.fixture(scope="session")
def cluster() -> Iterator[stack.Cluster]:
    """The cluster under test. Without one: a skip with the reason, in CI (CI=true) an error."""
    try:
        with stack.cluster() as found:
            yield found
    except stack.Unavailable as reason:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def operator(cluster: stack.Cluster) -> Iterator[Operator]:
    """The operator, as the manifests install it, for one file of tests."""
    with installed_operator(cluster) as found:
        yield found


@pytest.fixture
def namespace(cluster: stack.Cluster, request: pytest.FixtureRequest) -> Iterator[stack.Namespace]:
    """A namespace of this test. It must be deletable at the end; a failure's logs are kept."""
    with stack.new_namespace(cluster, request.node.name) as made:
        yield made


@pytest.fixture
def faults(cluster: stack.Cluster) -> Iterator[Faults]:
    """Ways to break nodes and links; whatever is still broken at the end is mended."""
    if cluster.faults is None:
        pytest.skip("nodes of a cluster of KUBECONFIG are not ours to break")
    yield cluster.faults
    cluster.faults.heal()


@pytest.fixture(scope="session")
def jaeger(cluster: stack.Cluster) -> Iterator[Jaeger]:
    """A real Jaeger in the cluster, and its query API."""
    with serve_jaeger(cluster) as found:
        yield found
