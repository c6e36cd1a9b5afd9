"""Which cell takes a request: the gateway's rule, by an estimate of what is outstanding.

The real gateway knows when a request ends. To simulate cells apart from each other (and in several
processes), the whole fleet's requests are routed first, in one pass in which a request ends when
this estimate says so: its prefill, and its tokens at the step time of the rows that are then
estimated to run there, or its client's giving up. That is the one approximation between cells; in
a cell everything is simulated.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from stopway_sim.fleet.config import FleetConfig
from stopway_sim.fleet.workload import Spec


class Router:
    """Conversation affinity, then the fewest outstanding tokens, then the lowest cell."""

    def __init__(self, config: FleetConfig) -> None:
        self._config = config
        self._homes: dict[int, int] = {}
        self._outstanding = [0] * config.cells
        self._rows = [0] * config.cells
        # (tokens, cell) by the least; an entry that is not the current count is dead.
        self._least = [(0, cell) for cell in range(config.cells)]
        # (estimated end, cell, tokens, answers)
        self._ends: list[tuple[float, int, int, int]] = []
        size = config.groups // config.cells
        self._down = [(f.at_s, f.at_s + f.down_s, f.group // size) for f in config.faults]

    def place(self, spec: Spec) -> int:
        """The cell for ``spec``; calls come in the order of arrival."""
        now = spec.arrival_s
        while self._ends and self._ends[0][0] <= now:
            _, cell, tokens, answers = heapq.heappop(self._ends)
            self._add(cell, -tokens, -answers)
        down = {cell for start, end, cell in self._down if start <= now < end}
        home = self._homes.get(spec.conversation) if spec.conversation >= 0 else None
        cell = home if home is not None and home not in down else self._fewest(down)
        if spec.conversation >= 0:
            self._homes[spec.conversation] = cell
        tokens = spec.prompt_len + spec.choices * spec.output
        self._add(cell, tokens, spec.choices)
        end = now + self._stay_s(spec, self._rows[cell], self._outstanding[cell])
        heapq.heappush(self._ends, (end, cell, tokens, spec.choices))
        return cell

    def _add(self, cell: int, tokens: int, rows: int) -> None:
        self._outstanding[cell] += tokens
        self._rows[cell] += rows
        heapq.heappush(self._least, (self._outstanding[cell], cell))

    def _fewest(self, down: set[int]) -> int:
        if len(down) == len(self._outstanding):
            down = set()  # all are: the gateway waits for one
        aside: list[tuple[int, int]] = []
        while True:
            tokens, cell = self._least[0]
            if tokens != self._outstanding[cell]:
                heapq.heappop(self._least)
            elif cell in down:
                aside.append(heapq.heappop(self._least))
            else:
                break
        for entry in aside:
            heapq.heappush(self._least, entry)
        return cell

    def _stay_s(self, spec: Spec, rows: int, outstanding: int) -> float:
        """Seconds from its arrival to its end, in a cell with so many rows and tokens."""
        cost, prompt = self._config.cost, spec.prompt_len
        rows = min(rows, cost.max_running)
        context = min(outstanding, cost.blocks * cost.block_size)
        chunk = min(prompt, cost.max_batch_tokens)
        steps = -(-prompt // chunk)
        pairs = prompt * (prompt - chunk) // 2  # of all chunks
        prefill = cost.step_s(0, chunk) * steps + cost.prefill_pair_s * pairs
        token_s = cost.step_s(rows, 0, context)
        stay = prefill + token_s * spec.output
        if spec.cancel_after_s is not None:
            stay = min(stay, spec.cancel_after_s)
        if spec.cancel_after_tokens is not None:
            tokens = spec.cancel_after_tokens / spec.choices
            stay = min(stay, prefill + token_s * tokens)
        return stay


def route(config: FleetConfig, specs: Sequence[Spec]) -> list[list[Spec]]:
    """The requests of each cell, by arrival."""
    router = Router(config)
    cells: list[list[Spec]] = [[] for _ in range(config.cells)]
    for spec in specs:
        cells[router.place(spec)].append(spec)
    return cells
