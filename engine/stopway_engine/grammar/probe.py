"""A trial of one grammar, in a process of its own: ``python -m stopway_engine.grammar.probe``.

Reads the grammar on stdin, compiles it over single bytes and takes a walk through it; prints what
went wrong, or nothing. The library bounds most of what a grammar may use; this bounds the rest,
such as an intersection of many expressions, whose emptiness takes exponential time to see.
"""

from __future__ import annotations

import resource
import sys

from llguidance import LLMatcher, LLTokenizer

from stopway_engine.grammar.spec import EXIT_MEMORY, limits

CPU_SECONDS_MAX = 2
MEMORY_BYTES_MAX = 1 << 30
STEPS = 48


def trial(source: str) -> str:
    """Why ``source`` cannot be used; empty when it compiles and its first steps work."""
    matcher = LLMatcher(LLTokenizer("byte"), source, log_level=0, limits=limits())
    for step in range(STEPS):
        if matcher.is_error() or matcher.is_stopped():
            break
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        tokens = [i for i in range(mask.bit_length()) if mask >> i & 1]
        if not tokens or matcher.is_error():
            break
        matcher.consume_token(tokens[step * 7919 % len(tokens)])  # here and there
    return matcher.get_error()


def restrict() -> None:
    """Bound this process: what runs here is native code over what a client sent.

    At the end of its time comes SIGXCPU, a second before SIGKILL, which may be anybody's.
    """
    for limit, soft, hard in (
        (resource.RLIMIT_CPU, CPU_SECONDS_MAX, CPU_SECONDS_MAX + 1),
        (resource.RLIMIT_AS, MEMORY_BYTES_MAX, MEMORY_BYTES_MAX),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_NOFILE, 0, 0),  # beyond those that are open
        (resource.RLIMIT_FSIZE, 0, 0),
    ):
        resource.setrlimit(limit, (soft, hard))


def main() -> None:
    """The process."""
    restrict()
    try:
        problem = trial(sys.stdin.buffer.read().decode())
    except MemoryError:
        sys.exit(EXIT_MEMORY)
    sys.stdout.buffer.write(problem.encode())


if __name__ == "__main__":
    main()
