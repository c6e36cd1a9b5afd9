"""``python -m stopway_sim [--seed S] [--seeds N]``: run worlds, print what they met."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter

from stopway_core.lifecycle import State
from stopway_core.types import Reason
from stopway_sim.failure import SimFailure
from stopway_sim.world import run_seed

STATES = ("unborn", "queued", "prefilling", "decoding", "preempted")
assert set(STATES) >= {state.value for state in State} - {"ended"}


def table(coverage: Counter[str]) -> str:
    """What ended requests in which state, as text."""
    rows = [f"{'ended by':<20}" + "".join(f"{state:>12}" for state in STATES)]
    for reason in Reason:
        counts = [coverage[f"end {state} x {reason.value}"] for state in STATES]
        if any(counts):
            rows.append(f"{reason.value:<20}" + "".join(f"{count or '.':>12}" for count in counts))
    rows.append("")
    for name, count in sorted(coverage.items()):
        if not name.startswith("end "):
            rows.append(f"{name:<40}{count:>8}")
    return "\n".join(rows)


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit code: 1 when a world failed."""
    parser = argparse.ArgumentParser(prog="stopway_sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many worlds")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    args = parser.parse_args(argv)
    coverage: Counter[str] = Counter()
    digests: dict[int, str] = {}
    failed: dict[int, str] = {}
    for seed in range(args.seed, args.seed + args.seeds):
        try:
            report = run_seed(seed)
        except SimFailure as failure:
            failed[seed] = str(failure)
            print(failure, file=sys.stderr)
            continue
        digests[seed] = report.fingerprint
        coverage.update(report.coverage)
    if args.json:
        print(json.dumps({"runs": digests, "coverage": dict(coverage), "failed": failed}))
    else:
        for seed, digest in list(digests.items())[:10]:
            print(f"seed {seed}: {digest}")
        print(table(coverage))
        print(f"{len(digests)} worlds held, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
