"""Time several ways of doing one job against each other, in turns within one process."""

import argparse
import gc
import platform
import statistics
import sys
import time
from typing import Any, Callable, Dict, Iterable, List, NamedTuple

Job = Callable[[], Any]


class Result(NamedTuple):
    """What one job took beside the first one of its comparison, the baseline."""

    name: str
    minimum: float  # seconds for the whole job
    median: float
    ratio: float  # of the minima, to the baseline
    median_ratio: float  # median of the ratios within each round


def compare(jobs: Dict[str, Job], rounds: int, clock: Callable[[], float] = time.process_time) -> List[Result]:
    """Run each job once per round after one round of warm-up; the first job is the baseline.

    A round runs every job once, each round beginning with another one, so that whatever slows the machine down for a
    while slows all of them. CPU time is measured where the work is this process's own: other processes disturb it less
    than they disturb the time on the wall.
    """
    names = list(jobs)
    times: Dict[str, List[float]] = {name: [] for name in names}
    for turn in range(-1, rounds):
        for position in range(len(names)):
            name = names[(turn + position) % len(names)]
            gc.collect()
            start = clock()
            jobs[name]()
            elapsed = clock() - start
            if turn >= 0:
                times[name].append(elapsed)
    baseline = times[names[0]]
    return [
        Result(
            name,
            min(times[name]),
            statistics.median(times[name]),
            min(times[name]) / min(baseline),
            statistics.median(ours / theirs for ours, theirs in zip(times[name], baseline)),
        )
        for name in names
    ]


def drain(items: Iterable[Any]) -> None:
    """Read all items with a `for` loop, as a program does that trains."""
    for _ in items:
        pass


def case_parser(description: str, cases: Iterable[str], items: int, rounds: int) -> argparse.ArgumentParser:
    """Return a parser of the names of cases, all if none is given, and of how much to measure."""

    def case(name: str) -> str:
        if name not in names:
            raise argparse.ArgumentTypeError("no such case: {}".format(name))
        return name

    names = list(cases)
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = "of {}; default: all".format(", ".join(names))
    parser.add_argument("cases", nargs="*", type=case, default=names, metavar="CASE", help=what)
    parser.add_argument("--items", type=int, default=items, help="items of a case's data (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=rounds, help="timed rounds (default: %(default)s)")
    return parser


def machine() -> str:
    """Name the interpreter and the processor."""
    processor = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            processor = next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return "{} {} on {}, {}".format(
        platform.python_implementation(), sys.version.split()[0], processor, platform.system()
    )
