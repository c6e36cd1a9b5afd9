"""The leader's side of the frames between it and its front."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stopway_core.events import Event, Hit, LeaseLost, Mode, Submit
from stopway_core.planner import Planned
from stopway_core.types import Deadlines, SamplingParams, Submission
from stopway_core.wire import Frame, FrameKind, encode

if TYPE_CHECKING:
    from stopway_engine.control.leader import Leader


def receive(leader: Leader, frame: Frame) -> None:
    """Take one frame from the front; the front is of this pod and is trusted to be well-formed."""
    body = frame.body
    if "submit" in body:
        submission = submission_of(body["submit"], frame.arrays[0].tolist())
        leader.seen_gateway(submission.gateway)
        leader.add_event(Submit(submission))
    elif "stop" in body:
        leader.on_stop_entry(body["stop"])
    elif "hit" in body:
        key, keep = body["hit"]
        leader.add_event(Hit(key, keep))
    elif "lease_lost" in body:
        leader.lease_lost(body["lease_lost"])
    elif "mode" in body:
        leader.set_mode(Mode(body["mode"]))
    elif "ledger" in body:
        leader.to_front({"ledger": body["ledger"], "snapshot": snapshot(leader)})


def hello(leader: Leader) -> dict[str, Any]:
    """The body of the first frame to a front, before any other word of this leader."""
    config, planner = leader.config, leader.planner
    return {
        "hello": {
            "group": config.group,
            "epoch": leader.epoch,
            "max_model_len": planner.config.max_model_len,
            "total_blocks": leader.replica.ledger.blocks.total,
            "block_size": config.block_size,
            "ranks": config.world,
            "draining": leader.state == "draining",
        },
        "mode": planner.mode,
    }


def submit_frame(submission: Submission) -> bytes:
    """The frame that ``receive`` turns back into ``submission``."""
    params = submission.params
    body = {
        "uid": submission.uid,
        "attempt": submission.attempt,
        "tenant": submission.tenant,
        "params": {name: getattr(params, name) for name in params.__dataclass_fields__},
        "minted_at": submission.minted_at,
        "choices": submission.choices,
        "priority": submission.priority,
        "grammar": submission.grammar,
        "deadlines": [
            submission.deadlines.queue,
            submission.deadlines.first_token,
            submission.deadlines.total,
        ],
        "conversation": submission.conversation,
        "salt": submission.salt,
        "traceparent": submission.traceparent,
        "gateway": submission.gateway,
    }
    return encode(FrameKind.FRONT_IN, {"submit": body}, [submission.prompt])


def submission_of(body: dict[str, Any], prompt: list[int]) -> Submission:
    """The submission in a frame's body."""
    fields = dict(body)
    params = dict(fields.pop("params"))
    params["stop_token_ids"] = tuple(params["stop_token_ids"])
    return Submission(
        prompt=tuple(prompt),
        params=SamplingParams(**params),
        deadlines=Deadlines(*fields.pop("deadlines")),
        **fields,
    )


def leases_lost(gateways: set[str]) -> list[Event]:
    """The events of a front that has gone, in an order that does not depend on hashing."""
    return [LeaseLost(gateway) for gateway in sorted(gateways)]


def outputs_frame(
    planned: Planned | None, receipts: list[dict[str, Any]], load: dict[str, int] | None
) -> tuple[dict[str, Any], list[list[int]]]:
    """What one turn has for the front: JSON, and two parallel arrays, keys and tokens.

    ``load`` has the figures of ``names.LOAD``, when one of them has changed.
    """
    body: dict[str, Any] = {}
    arrays: list[list[int]] = []
    if receipts:
        body["receipts"] = receipts
    if load is not None:
        body["load"] = load
    if planned is not None:
        outputs = planned.outputs
        arrays = [outputs.keys, outputs.tokens]
        if any(outputs.logprobs):
            body["logprobs"] = [item and item.to_json() for item in outputs.logprobs]
        if outputs.accepted:
            body["accepted"] = [[a.uid, a.keys] for a in outputs.accepted]
        if outputs.refused:
            body["refused"] = [[r.uid, r.status, r.code, r.message] for r in outputs.refused]
        if outputs.ended:
            body["ended"] = [
                {
                    "key": e.key,
                    "outcome": e.outcome.value,
                    "reason": e.reason.value,
                    "prompt_tokens": e.prompt_tokens,
                    "keep": e.keep,
                    "cached_tokens": e.cached_tokens,
                    "discarded_tokens": e.discarded_tokens,
                    "drafted_tokens": e.drafted_tokens,
                    "accepted_tokens": e.accepted_tokens,
                    "message": e.message,
                }
                for e in outputs.ended
            ]
    return body, arrays


def snapshot(leader: Leader) -> dict[str, Any]:
    """The ledger and the queue, for ``/debug/ledger``; raises nothing, checks everything."""
    replica, planner = leader.replica, leader.planner
    try:
        replica.check()
        check = "ok"
    except AssertionError as error:
        check = str(error)
    requests = [
        {
            "uid": choice.uid,
            "rid": choice.rid,
            "state": choice.state.value,
            "tokens": len(choice.tokens),
            "blocks": len(choice.seq.blocks) if choice.seq is not None else 0,
        }
        for choice in planner.requests.by_key.values()
    ]
    return {
        **replica.snapshot(),
        "group": leader.config.group,
        "epoch": leader.epoch,
        "ranks": leader.config.world,
        "check": check,
        "running": planner.running,
        "waiting": planner.waiting,
        "requests": requests[:1000],
        "max_batch_tokens": planner.config.max_batch_tokens,
        "step_times": [[*step, round(seconds, 6)] for *step, seconds in leader.step_times],
    }
