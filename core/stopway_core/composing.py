"""A turn while it is being made."""

from __future__ import annotations

from dataclasses import dataclass, field

from stopway_core.events import Outputs
from stopway_core.ledger import Dropped
from stopway_core.turn import StopEntry, Turn
from stopway_core.types import Stop


@dataclass(slots=True)
class Composing:
    """What a turn has so far, for the replicas and for the front; ``now`` in Unix seconds."""

    now: float
    turn: Turn
    outputs: Outputs = field(default_factory=Outputs)
    drops: dict[int, tuple[Dropped, int]] = field(default_factory=dict)  # by rid
    entries: dict[str, StopEntry] = field(default_factory=dict)  # those of the turn, by stop id
    marks: bool = False  # somebody is to end in a later turn, which this one must come before

    def entry(self, stop: Stop) -> StopEntry:
        """The entry of ``stop`` in this turn, made when there is none yet."""
        entry = self.entries.get(stop.stop_id)
        if entry is None:
            entry = self.entries[stop.stop_id] = StopEntry(stop.stop_id, stop.traceparent, [])
            self.turn.stops.append(entry)
        return entry
