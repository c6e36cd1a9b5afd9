"""A disturbed request is answered as if it were alone: token for token, in ``invariant`` mode."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="function")]


def story(topic: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Tell a story about a {topic}."}]


TOPICS = ("dragon", "lighthouse", "sailor")


@pytest.mark.parametrize("tensor", [1, 2])
async def test_preempted_and_disturbed_equals_undisturbed(
    tensor: int, stack_of: Callable[..., Any], eventually: Any
) -> None:
    """Too few blocks for all of them at once, and neighbours that are stopped on the way."""
    body = {"max_tokens": 40, "ignore_eos": True}
    async with stack_of(tensor=tensor, numerics="invariant", kv_blocks=12) as api:
        alone = {topic: await api.text(story(topic), **body) for topic in TOPICS}
        before = preemptions(api.stack.spans_dir)

        async def neighbour(index: int) -> None:
            async with api.stream(story(f"stranger {index}"), max_tokens=100) as stream:
                await stream.read(3 + 4 * index)

        together, *_ = await asyncio.gather(
            asyncio.gather(*[api.text(story(topic), **body) for topic in TOPICS]),
            *[neighbour(index) for index in range(2)],
        )
        assert dict(zip(TOPICS, together, strict=True)) == alone
        await api.assert_idle()

        async def preempted() -> bool:
            return preemptions(api.stack.spans_dir) > before

        await eventually(preempted, 30.0, "somebody is preempted: else the test is void")


def preemptions(spans_dir: Path) -> int:
    """How often requests were preempted, by the spans of those that have ended."""
    written = [path.read_text() for path in spans_dir.glob("*")]
    # What has no end yet is still being written.
    whole = [text[: text.rfind("\n") + 1] for text in written]
    spans = [json.loads(line) for text in whole for line in text.splitlines()]
    decodes = [span for span in spans if span["name"] == "request.decode"]
    return sum(span["attributes"]["stopway.preemptions"] for span in decodes)
