"""``make mutants``: change one line of ``src/`` at a time, and see whether a test fails.

Exit status 1 says that more mutants survived than ``--allow``.
"""

import argparse
import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.copies import end_all
from tests.mutants.draw import Mutant, draw, sources
from tests.mutants.trial import TIERS, Tests, Verdict, check_unmutated, judge


def main() -> int:
    options, pytest_options = _parser().parse_known_args()
    drawn = dict(enumerate(draw(options.number, options.seed, sources()), 1))
    chosen = {number: mutant for number, mutant in drawn.items() if not options.only or number in options.only}
    if options.survivors:
        alive = {_identity(entry) for entry in json.loads(options.survivors.read_text()) if not entry["killed_by"]}
        chosen = {number: mutant for number, mutant in chosen.items() if _identity(_entry(mutant)) in alive}
    if options.list:
        for number, mutant in chosen.items():
            print(_described(number, mutant))
        return 0
    if not chosen:
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that copies and their processes are cleared up
    print(f"{len(chosen)} mutants, tier {options.tier}; first their nearest tests without a mutant", flush=True)
    tests = Tests(options.tier, options.nearest, options.limit, tuple(pytest_options))
    check_unmutated(list(chosen.values()), tests)
    verdicts = _judge_all(chosen, tests, options)
    print("\n" + table(chosen, verdicts))
    survivors = sum(not verdict.killed_by for verdict in verdicts.values())
    print(f"\n{len(chosen) - survivors} of {len(chosen)} killed")
    return int(survivors > options.allow)


def table(mutants: dict[int, Mutant], verdicts: dict[int, Verdict]) -> str:
    """Return what came of each mutant, in Markdown."""
    rows = [f"| {n} | `{mutants[n].place}` | {mutants[n].kind} | {verdicts[n]} |" for n in sorted(verdicts)]
    return "\n".join(["| | where | what | |", "|---|---|---|---|", *rows])


def _judge_all(mutants: dict[int, Mutant], tests: Tests, options: argparse.Namespace) -> dict[int, Verdict]:
    verdicts: dict[int, Verdict] = {}

    def one(number: int) -> None:
        verdicts[number] = judge(mutants[number], tests)
        print(
            f"{len(verdicts)}/{len(mutants)}  {_described(number, mutants[number])}\n  {verdicts[number]}", flush=True
        )
        if options.json:
            entries = [_entry(mutants[n]) | {"number": n, **vars(verdicts[n])} for n in sorted(verdicts)]
            options.json.write_text(json.dumps(entries, indent=1) + "\n")

    pool = ThreadPoolExecutor(options.jobs)
    try:
        list(pool.map(one, mutants))
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        end_all()
        raise
    return verdicts


def _entry(mutant: Mutant) -> dict[str, object]:
    return {name: str(value) if name == "path" else value for name, value in vars(mutant).items()}


def _identity(entry: dict[str, object]) -> tuple[object, ...]:
    return entry["path"], entry["function"], entry["before"], entry["after"]


def _described(number: int, mutant: Mutant) -> str:
    return f"{number}  {mutant.place}  {mutant.kind}\n  - {mutant.before.strip()}\n  + {mutant.after.strip()}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__, epilog="Other options are pytest's."
    )
    parser.add_argument("--number", type=int, default=40, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="mutants at a time")
    parser.add_argument("--tier", choices=TIERS, default="first", help="the tests to run")
    parser.add_argument("--nearest", action="store_true", help="run the nearest tests alone")
    parser.add_argument("--limit", type=float, metavar="S", help="seconds for a mutant, if not three times the tier's")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="mutants to run, by number")
    parser.add_argument("--survivors", type=Path, metavar="FILE", help="run what survived in a file of --json")
    parser.add_argument("--list", action="store_true", help="show the drawn mutants, and run nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts as they come")
    parser.add_argument("--allow", type=int, default=4, help="survivors that are no failure")
    return parser


if __name__ == "__main__":
    sys.exit(main())
