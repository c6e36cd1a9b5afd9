"""Which ranks are silent: a process that is stopped or stuck does not leave by itself."""

from __future__ import annotations

from collections.abc import Iterable

from stopway_engine.pod.children import RankProcess

START_S = 120.0  # a rank that has not said anything by then is silent


class Watchdog:
    """Looks at the ranks every ``period_s``.

    A look that comes late finds nobody silent: it was this process that stood still, and what they
    said meanwhile is still unread.
    """

    def __init__(self, peer_loss_s: float) -> None:
        self.period_s = min(1.0, peer_loss_s / 4)
        self._peer_loss_s = peer_loss_s
        self._looked_at: float | None = None

    def silent(self, ranks: Iterable[RankProcess], now: float) -> list[RankProcess]:
        """Those to be killed, at ``now`` (``time.monotonic``)."""
        looked_at, self._looked_at = self._looked_at, now
        if looked_at is not None and now - looked_at > 2 * self.period_s:
            return []
        return [
            rank
            for rank in ranks
            if rank.code is None
            and now - rank.heard_at > (START_S if rank.state == "starting" else self._peer_loss_s)
        ]
