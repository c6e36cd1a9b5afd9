"""Every shape of a group answers, cancels with a receipt of every rank, and balances its books."""

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="function")]

SHAPES = [
    pytest.param({"tensor": 1, "pipeline": 1}, id="tp1"),
    pytest.param({"tensor": 2, "pipeline": 1, "ranks_per_pod": 1}, id="tp2-two-pods"),
    pytest.param({"tensor": 3, "pipeline": 1}, id="tp3-uneven"),
    pytest.param({"tensor": 1, "pipeline": 2, "ranks_per_pod": 1}, id="pp2-two-pods"),
    pytest.param({"tensor": 2, "pipeline": 2, "ranks_per_pod": 2}, id="tp2-pp2"),
]


@pytest.mark.parametrize("shape", SHAPES)
async def test_answers_and_stops(
    shape: dict[str, int], stack_of: Callable[..., Any], prompts: dict[str, Any]
) -> None:
    ranks = shape["tensor"] * shape["pipeline"]
    patient = {"STOPWAY_CUT_WAIT_S": "60"}  # so that the usage is the leader's, however late
    async with stack_of(**shape, gateway_env=patient) as api:
        assert "Paris" in await api.text(prompts["capital"])
        async with api.stream(max_tokens=2000, ignore_eos=True) as stream:
            await stream.read(5)
            receipt = await api.cancel(stream.uid)
            await stream.read()
        assert (stream.finish_reason, stream.stop_reason) == ("abort", "client_cancel")
        assert stream.done
        assert receipt["status"] == "reclaimed"
        assert receipt["outcome"] == "stopped"
        assert receipt["request_ids"] == [stream.uid]
        assert not receipt["pending_on"]
        (group,) = receipt["groups"]
        assert [part["rank"] for part in group["ranks"]] == list(range(ranks))
        assert [part["stage"] for part in group["ranks"]] == [
            rank // shape["tensor"] for rank in range(ranks)
        ]
        for part in group["ranks"]:
            assert part["turn_noticed"] <= group["turn_effective"]
            assert part["noticed_at"] <= part["stopped_at"] <= part["reclaimed_at"]
        assert group["blocks_reclaimed"] + group["blocks_cached"] > 0
        assert stream.usage["completion_tokens"] >= stream.chunks > 0
        # Tokens on their way to the client when it was cut: computed, kept and not delivered.
        kept = (await api.get(f"/v1/requests/{stream.uid}"))["completion_tokens"]
        undelivered = kept - stream.usage["completion_tokens"]
        discarded = group["tokens_discarded"] + undelivered
        assert undelivered >= 0
        assert stream.usage["stopway"]["discarded_tokens"] == discarded
        await api.assert_idle()
        # t01, t06: one trace, with each rank's phases once, whatever way the stop took.
        names = {f"stop.{phase}" for phase in ("notice", "in_flight", "reclaim", "handoff")}
        spans = await api.spans(receipt["trace_id"], {"stop", *names}, len(names) * ranks + 1)
        for name in sorted(names):
            seen = [s.attributes["stopway.rank"] for s in spans if s.name == name]
            assert sorted(seen) == list(range(ranks)), (name, seen)
        assert sum(s.name == "stop" for s in spans) == 1
        assert {s.trace_id for s in spans} == {receipt["trace_id"]}
