"""Whether a submission can be queued: decided before anything is computed for it."""

from __future__ import annotations

from collections.abc import Iterator

from stopway_core import names
from stopway_core.config import PlannerConfig
from stopway_core.events import Refused
from stopway_core.replica import Replica
from stopway_core.requests import RequestTable
from stopway_core.types import Deadlines, Submission

REFUSE_DRAIN = "this group is draining; send the request again"


def refusal(
    now: float, submission: Submission, config: PlannerConfig, requests: RequestTable
) -> Refused | None:
    """Why a submission can't be queued whatever else there is; ``None`` when it can."""
    uid = submission.uid
    # First: one that is sent twice must not be told that it was refused.
    if uid in requests or requests.finished(uid) is not None:
        return Refused(uid, 409, "duplicate", f"request {uid} is known here already")
    if any(child in requests for child in _children(submission)):
        return Refused(uid, 409, "duplicate", f"a choice of {uid} is known here already")
    age = now - submission.minted_at
    if age > config.submit_age_s:
        return Refused(
            uid,
            503,
            "attempt_expired",
            f"this attempt was made {age:.0f} s ago; the bound is {config.submit_age_s:.0f} s. "
            "Check the clocks, then send the request again",
        )
    prompt = len(submission.prompt)
    if prompt < 1:
        return Refused(uid, 400, "empty_prompt", "the prompt has no tokens")
    if prompt >= config.max_model_len:
        return Refused(
            uid,
            400,
            "context_length_exceeded",
            f"the prompt has {prompt} tokens and the model's context is "
            f"{config.max_model_len}; at least one must be left for the answer",
        )
    return None


def _children(submission: Submission) -> Iterator[str]:
    if submission.choices > 1:
        for index in range(submission.choices):
            yield names.child_uid(submission.uid, index)


def capacity_refusal(
    submission: Submission, replica: Replica, waiting: int, waiting_max: int
) -> Refused | None:
    """Why a submission can never fit, or not now."""
    uid = submission.uid
    total = replica.ledger.blocks.total
    needed = replica.blocks_of(len(submission.prompt) + 1)
    if needed > total:
        return Refused(
            uid,
            400,
            "kv_capacity_exceeded",
            f"the prompt needs {needed} KV blocks and this group has {total}; shorten it to "
            f"at most {total * replica.block_size - 1} tokens",
        )
    if waiting + submission.choices > waiting_max:
        return Refused(uid, 429, "queue_full", f"{waiting} requests are waiting; try later")
    return None


def length_max(submission: Submission, model_len_max: int, replica: Replica) -> int:
    """Tokens at which a choice ends: what it asked for, the context, or all the blocks."""
    capacity = replica.ledger.blocks.total * replica.block_size
    asked = len(submission.prompt) + submission.params.max_tokens
    return min(asked, model_len_max, capacity)


def tightest(asked: Deadlines, service: Deadlines) -> Deadlines:
    """The deadlines that hold: a request's own may only be tighter than the service's."""

    def least(a: float | None, b: float | None) -> float | None:
        return b if a is None else a if b is None else min(a, b)

    return Deadlines(
        least(asked.queue, service.queue),
        least(asked.first_token, service.first_token),
        least(asked.total, service.total),
    )
