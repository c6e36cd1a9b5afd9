"""``python -m stopway_sim [--seed S] [--seeds N]``: run worlds, print what they met.

``python -m stopway_sim table`` writes docs/stops.md anew: when a stop takes effect, as measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from stopway_sim import coverage, table
from stopway_sim.runs import run_many

SHOWN = 10  # digests that are printed


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit code: 1 when a world failed, 2 when none was asked for."""
    parser = argparse.ArgumentParser(prog="stopway_sim", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("worlds", "table"), default="worlds")
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many worlds")
    parser.add_argument("--workers", type=int, default=0, help="processes (0: one for each core)")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--out", type=Path, default=Path("docs/stops.md"), help="of the table")
    args = parser.parse_args(argv)
    if args.seeds < 1:
        print(f"{args.seeds} worlds show nothing: give 1 or more as SEEDS", file=sys.stderr)
        return 2
    if args.what == "table":
        args.out.write_text(table.document(), encoding="utf-8")
        print(f"wrote {args.out}")
        return 0
    runs = run_many(args.seed, args.seeds, args.workers)
    for failure in runs.failed.values():
        print(failure, file=sys.stderr)
    if args.json:
        document = {"runs": runs.digests, "coverage": runs.coverage, "failed": runs.failed}
        print(json.dumps(document))
    else:
        for seed, digest in list(runs.digests.items())[:SHOWN]:
            print(f"seed {seed}: {digest}")
        print(coverage.report(runs.coverage))
        print(f"{len(runs.digests)} worlds held, {len(runs.failed)} failed")
    return 1 if runs.failed else 0


if __name__ == "__main__":
    sys.exit(main())
