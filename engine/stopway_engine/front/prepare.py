"""A request until the leader hears of it: its grammar is checked, and its prompt tokenized.

Both wait for threads while its deadlines run; the leader counts only from its arrival there.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from stopway_core.admission import tightest
from stopway_core.types import DEADLINE_REASONS, Deadlines, Reason
from stopway_engine.config import PodConfig
from stopway_engine.front.checks import GrammarChecks
from stopway_engine.front.requests import Rejected, check_grammar, check_size, prompt_tokens
from stopway_engine.tokenizer import TextCodec

TOKENIZERS = 2  # threads; each may take a core for as long as a prompt takes


class Clock:
    """How long a request may still take, since it came to the front."""

    def __init__(self, message: Mapping[str, Any], config: PodConfig) -> None:
        """It has come. Its deadlines are its own or, where they are tighter, the service's."""
        came = time.monotonic()
        limits = tightest(Deadlines(**(message.get("deadlines") or {})), config.deadlines)
        self._ends = {
            name: came + limit
            for name in DEADLINE_REASONS
            if (limit := getattr(limits, name)) is not None
        }
        # The leader refuses an attempt that is too old: that must not be for having waited here.
        left = config.submit_age_s - (time.time() - message["minted_at"])
        self._patience_ends = came + left / 2 if left > 0 else math.inf

    @property
    def ends_at(self) -> float:
        """When it must be with the leader (``time.monotonic``)."""
        return min([*self._ends.values(), self._patience_ends])

    def left(self) -> Deadlines:
        """Seconds that are left of each deadline. Raises ``Rejected`` when one is spent."""
        now = time.monotonic()
        left = {name: end - now for name, end in self._ends.items()}
        if left and min(left.values()) <= 0:
            raise self.rejected()
        return Deadlines(**left)

    def rejected(self) -> Rejected:
        """Why it cannot go on after ``ends_at``."""
        name, end = min(self._ends.items(), key=lambda item: item[1], default=("", math.inf))
        if self._patience_ends < end:
            return Rejected(
                "too many requests are being prepared here; try later",
                status=429,
                code="queue_full",
                param=None,
            )
        reason = DEADLINE_REASONS[name]
        return Rejected(
            f"the {name} deadline passed before the request could be queued",
            status=429 if reason is Reason.DEADLINE_QUEUE else 504,
            code=reason.value,
            param=None,
        )


class Preparation:
    """The threads that prepare requests, and who waits for them."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        # Of their own, so that long prompts queue behind one another and before nothing else.
        self._tokenizing = ThreadPoolExecutor(TOKENIZERS, "tokenize")
        # A bad grammar may take seconds: it keeps waiting other grammars, and no prompt.
        self.checks = GrammarChecks(check_grammar)

    async def tokens(
        self,
        message: Mapping[str, Any],
        lease: str,
        clock: Clock,
        limit: int,
        check_wanted: Callable[[], None],
    ) -> list[int]:
        """The prompt's tokens, at most ``limit``, once its grammar is known to be good.

        ``check_wanted`` is called after each wait. Raises ``Rejected``, as that may.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(clock.ends_at):
                if message.get("grammar"):
                    check_size(message["prompt"], self._codec, limit)
                    await self.checks.check(message, lease)
                    check_wanted()
                tokens = await loop.run_in_executor(
                    self._tokenizing, prompt_tokens, message, self._codec, limit
                )
        except TimeoutError:
            raise clock.rejected() from None
        check_wanted()
        return tokens
