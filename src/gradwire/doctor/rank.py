"""One rank that measures its links, as a process: ``python -m gradwire.doctor.rank {}``."""

from __future__ import annotations

from gradwire.collectives.rank import report, run_rank
from gradwire.doctor.links import measure_links

__all__ = ["main"]


def main() -> None:
    """Measure as the rank the environment says."""
    run_rank(lambda rank, ranks: report(rank, event="links", **measure_links(rank, ranks).as_json()))


if __name__ == "__main__":
    main()
