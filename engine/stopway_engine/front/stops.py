"""The stops that this front has passed on or has heard a receipt of, over the ends of epochs."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from stopway_core.names import trace_id_of

KEEP_MAX = 20_000
TERMINAL = ("reclaimed", "already_finished")

Receipt = dict[str, Any]


class FrontStops:
    """An epoch that ends resolves all its stops: nothing of it can run any more.

    They are *stopped* when it ends, and *reclaimed* when a new epoch has formed, which proves that
    every process of the old one has gone (a rank says HELLO only when its predecessor is gone).
    """

    def __init__(self, group: str, publish: Callable[[Receipt], None]) -> None:
        self._group = group
        self._publish = publish
        self._receipts: OrderedDict[str, Receipt] = OrderedDict()
        self._ended: dict[str, Receipt] = {}  # of an epoch that ended, not reclaimed yet
        self._entries: OrderedDict[str, dict[str, Any]] = OrderedDict()  # that came here
        self._held: dict[str, dict[str, Any]] = {}  # of them, for the leader when there is one

    def passed(self, entry: dict[str, Any], *, sent: bool) -> bool:
        """A stop goes to the leader (``sent``), or waits for one. False when it is resolved."""
        stop_id = entry["stop_id"]
        receipt = self._receipts.get(stop_id)
        if receipt is not None and receipt["status"] in TERMINAL:
            self._publish(receipt)
            return False
        self._entries[stop_id] = entry
        if len(self._entries) > KEEP_MAX:
            self._entries.popitem(last=False)
        if receipt is None and not sent:
            self._held[stop_id] = entry
        return True

    def take_held(self) -> list[dict[str, Any]]:
        """The stops that waited for an epoch."""
        held, self._held = self._held, {}
        return list(held.values())

    def receipt(self, receipt: Receipt) -> None:
        """The leader has said how far a stop is."""
        stop_id = receipt["stop_id"]
        self._receipts[stop_id] = receipt
        self._receipts.move_to_end(stop_id)
        if len(self._receipts) > KEEP_MAX:
            self._receipts.popitem(last=False)
        self._publish(receipt)

    def epoch_ended(self, epoch: int) -> None:
        """Everything that the epoch had to stop is stopped, by its end."""
        for stop_id, entry in self._entries.items():
            if stop_id not in self._receipts and stop_id not in self._held:
                self._ended[stop_id] = _blank(entry, self._group, epoch)
        for stop_id, receipt in self._receipts.items():
            if receipt["status"] not in TERMINAL:
                self._ended[stop_id] = receipt
        for stop_id, receipt in list(self._ended.items()):
            ended = {
                **receipt,
                "status": "stopped",
                "epoch_ended": True,
                "pending_on": [f"the processes of epoch {epoch}"],
            }
            self._ended[stop_id] = ended
            self.receipt(ended)

    def epoch_goes_on(self) -> None:
        """Only the link to the leader had broken: what it has to say is asked for again."""
        for stop_id in self._ended:
            if stop_id in self._entries:
                self._held[stop_id] = self._entries[stop_id]
        self._ended.clear()

    def epoch_formed(self) -> None:
        """The processes of the ended epoch are gone: with them all that they held."""
        now = time.time()
        ended, self._ended = self._ended, {}
        for receipt in ended.values():
            ranks = [
                {
                    **part,
                    "stopped_at": part["stopped_at"] or now,
                    "reclaimed_at": part["reclaimed_at"] or now,
                }
                for part in receipt["ranks"]
            ]
            self.receipt({**receipt, "status": "reclaimed", "pending_on": [], "ranks": ranks})


def _blank(entry: dict[str, Any], group: str, epoch: int) -> Receipt:
    return {
        "stop_id": entry["stop_id"],
        "group": group,
        "epoch": epoch,
        "status": "stopped",
        "reason": entry["reason"],
        "tenant": entry["tenant"],
        "trace_id": trace_id_of(entry["traceparent"]),
        "outcome": {"finished": 0, "stopped": 0, "failed": 0, "unknown": 0},
        "request_ids": [],
        "count": 0,
        "turn_effective": None,
        "tokens_discarded": 0,
        "blocks_reclaimed": 0,
        "blocks_cached": 0,
        "blocks_lent": 0,
        "epoch_ended": True,
        "pending_on": [],
        "ranks": [],
    }
