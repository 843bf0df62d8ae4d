#!/usr/bin/env python3
"""Compare Infinibatch with plain Python that does the same job without checkpoints.

    python docs/benchmark/run.py                       # every case
    python docs/benchmark/run.py shuffle buckets       # some of them
    python docs/benchmark/run.py import --other FOLDER # beside the package in another folder

Runs under any supported interpreter, without other packages. Each case first checks that both sides yield as many
items, then runs them in turns. A ratio of 0.6 means that Infinibatch takes 0.6 of the plain code's time. Items are
consumed by a `for` loop on both sides: what the loop itself costs is in both.
"""

import argparse
import compileall
import gzip
import itertools
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from typing import Any, Callable, Dict, Iterable, Iterator, List, Tuple

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, ROOT)

from harness import Result, compare, drain, machine  # noqa: E402

from infinibatch import datasets, readers  # noqa: E402
from infinibatch import iterators as it  # noqa: E402

CHUNK = 10_000
BUDGET = 8_192  # characters in a batch


def make_lines(count: int) -> List[str]:
    """Make lines of 20 to 300 characters, each a string of its own as a reader would make it."""
    rng = random.Random(0)
    words = ["".join(rng.choice("etaoinshrdlu") for _ in range(rng.randint(2, 9))) for _ in range(1000)]
    return [" ".join(rng.choice(words) for _ in range(rng.randint(4, 44))) for _ in range(count)]


def make_chunks(count: int) -> List[List[str]]:
    lines = make_lines(count)
    return [lines[i : i + CHUNK] for i in range(0, count, CHUNK)]


def flat(chunks: List[List[str]]) -> "it.CheckpointableIterator[str]":
    return it.SelectManyIterator(it.NativeCheckpointableIterator(chunks))


# Plain Python


def plain_shuffle(items: Iterable[Any], block_size: int) -> Iterator[Any]:
    rng, items = random.Random(1), iter(items)
    while True:
        block = list(itertools.islice(items, block_size))
        if not block:
            return
        rng.shuffle(block)
        yield from block


def plain_buckets(items: Iterable[str], read_ahead: int) -> Iterator[List[str]]:
    rng, items = random.Random(1), iter(items)
    while True:
        window = list(itertools.islice(items, read_ahead))
        if not window:
            return
        window.sort(key=len, reverse=True)
        batches, start = [], 0
        while start < len(window):
            end = start + max(1, BUDGET // len(window[start]))
            batches.append(window[start:end])
            start = end
        rng.shuffle(batches)
        yield from batches


def plain_lines(paths: List[str]) -> Iterator[str]:
    for path in paths:
        with open(path, "rb") as file:
            yield from gzip.decompress(file.read()).decode("utf-8").split("\n")[:-1]


# Cases


def report(case: str, count: int, results: List[Result], target: float) -> None:
    plain, ours = results
    print(
        "| {} | {:.0f} | {:.0f} | {:.2f} | {:.2f} | {:.2f} |{}".format(
            case,
            plain.minimum / count * 1e9,
            ours.minimum / count * 1e9,
            ours.ratio,
            ours.median_ratio,
            target,
            "" if min(ours.ratio, ours.median_ratio) <= target else " MISSED",
        ),
        flush=True,
    )


def versus(
    case: str,
    count: int,
    rounds: int,
    target: float,
    plain: Callable[[], Iterable[Any]],
    ours: Callable[[], Iterable[Any]],
) -> None:
    expected, got = sum(1 for _ in plain()), sum(1 for _ in ours())
    if expected != got:
        sys.exit("{}: plain Python yields {} items, Infinibatch {}".format(case, expected, got))
    report(case, count, compare({"plain": lambda: drain(plain()), "ours": lambda: drain(ours())}, rounds), target)


def shuffle(count: int, rounds: int, other: str) -> None:
    """Chunks in memory, flattened and shuffled in blocks."""
    chunks = make_chunks(count)
    for block_size in (10_000, 100_000):
        versus(
            "shuffle, blocks of {:,}".format(block_size),
            count,
            rounds,
            0.65,
            lambda: plain_shuffle(itertools.chain.from_iterable(chunks), block_size),  # noqa: B023
            lambda: it.BlockwiseShuffleIterator(flat(chunks), block_size, seed=1),  # noqa: B023
        )


def buckets(count: int, rounds: int, other: str) -> None:
    """Shuffled lines, read ahead, sorted by length and cut into batches of so many characters."""
    chunks = make_chunks(count)
    for read_ahead in (10_000, 100_000):
        versus(
            "shuffle and buckets, read-ahead {:,}".format(read_ahead),
            count,
            rounds,
            0.75,
            lambda: plain_buckets(plain_shuffle(itertools.chain.from_iterable(chunks), 100_000), read_ahead),  # noqa: B023
            lambda: it.BucketedReadaheadBatchIterator(
                it.BlockwiseShuffleIterator(flat(chunks), 100_000, seed=1),
                read_ahead,  # noqa: B023
                key=len,
                batch_size=lambda line: BUDGET // len(line),
                seed=1,
            ),
        )
    versus(
        "buckets alone, read-ahead 10,000",
        count,
        rounds,
        1.0,
        lambda: plain_buckets(itertools.chain.from_iterable(chunks), 10_000),
        lambda: it.BucketedReadaheadBatchIterator(
            flat(chunks), 10_000, key=len, batch_size=lambda line: BUDGET // len(line), seed=1
        ),
    )


def gzip_lines(count: int, rounds: int, other: str) -> None:
    """The lines of gzip chunks through the standard pipeline, beside reading them in order."""
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for number, chunk in enumerate(make_chunks(count)):
            paths.append(os.path.join(folder, "{:03}.gz".format(number)))
            with gzip.open(paths[-1], "wb") as file:
                file.write("".join(line + "\n" for line in chunk).encode("utf-8"))
        versus(
            "gzip lines, read_lines alone",
            count,
            rounds,
            1.1,
            lambda: plain_lines(paths),
            lambda: itertools.chain.from_iterable(map(readers.read_lines, paths)),
        )

        def shuffled() -> Iterator[str]:
            lines = datasets.chunked_dataset_iterator(paths, readers.read_lines, buffer_size=100_000, seed=1)
            return itertools.islice(lines, count)

        versus(
            "gzip lines, read and shuffled, against reading them",
            count,
            rounds,
            1.5,
            lambda: plain_lines(paths),
            shuffled,
        )
        versus(
            "gzip lines, read and shuffled, against doing the same",
            count,
            rounds,
            1.0,
            lambda: plain_shuffle(plain_lines(paths), 100_000),
            shuffled,
        )


def one_random(rng: random.Random, item: int) -> float:
    return item + rng.random()


def sampling(count: int, rounds: int, other: str) -> None:
    """A transform that draws one random number for each item."""
    numbers = list(range(count))

    def plain() -> Iterator[float]:
        rng = random.Random(1)
        for number in numbers:
            yield one_random(rng, number)

    versus(
        "SamplingRandomMapIterator",
        count,
        rounds,
        2.5,
        plain,
        lambda: it.SamplingRandomMapIterator(it.NativeCheckpointableIterator(numbers), one_random, seed=1),
    )


def windows(count: int, rounds: int, other: str) -> None:
    """Windows and batches of fixed size over a list."""
    numbers = list(range(count))
    target = 3.5 if sys.version_info < (3, 7) else 3.0
    versus(
        "WindowedIterator, width 5",
        count,
        rounds,
        target,
        lambda: zip(*(numbers[i:] for i in range(5))),
        lambda: it.WindowedIterator(it.NativeCheckpointableIterator(numbers), 5),
    )
    versus(
        "FixedBatchIterator, 100 items",
        count,
        rounds,
        target,
        lambda: (numbers[i : i + 100] for i in range(0, count, 100)),
        lambda: it.FixedBatchIterator(it.NativeCheckpointableIterator(numbers), 100),
    )


def permutation(count: int, rounds: int, other: str) -> None:
    """An endless source of shuffled paths, and the memory that it takes beside the list."""
    paths = ["corpus/part-{:07}.gz".format(number) for number in range(count)]

    def plain() -> Iterator[str]:
        rng = random.Random(1)
        for _ in range(3):
            order = list(paths)
            rng.shuffle(order)
            yield from order

    versus(
        "InfinitePermutationSourceIterator",
        3 * count,
        rounds,
        1.2,
        plain,
        lambda: itertools.islice(it.InfinitePermutationSourceIterator(paths, seed=1), 3 * count),
    )
    tracemalloc.start()
    drain(itertools.islice(it.InfinitePermutationSourceIterator(paths, seed=1), 2 * count + 1))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    lists = peak / sys.getsizeof(paths)
    print(
        "InfinitePermutationSourceIterator holds {:.2f} lists of references beside the one given, target 2.00{}".format(
            lists, "" if lists < 2.1 else " MISSED"
        )
    )


def child_time() -> float:
    """Return the CPU time of all processes that were started and have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def import_time(count: int, rounds: int, other: str) -> None:
    """The CPU time of starting an interpreter and importing the package, with compiled modules, without `site`."""

    def start(folder: str, code: str) -> Callable[[], Any]:
        path = "import sys; sys.path.insert(0, {!r})\n".format(folder)
        return lambda: subprocess.check_call([sys.executable, "-S", "-E", "-c", path + code])

    with tempfile.TemporaryDirectory() as folder:
        jobs = {"bare interpreter": start(folder, "")}
        for name, source in (("Infinibatch", ROOT), ("the other Infinibatch", other)):
            if source:
                copy = os.path.join(folder, name)
                shutil.copytree(os.path.join(source, "infinibatch"), os.path.join(copy, "infinibatch"))
                compileall.compile_dir(copy, quiet=1)
                jobs["and import infinibatch.datasets of " + name] = start(copy, "import infinibatch.datasets")
        for result in compare(jobs, max(rounds, 15), child_time):
            print("{}: {:.1f} ms (median {:.1f})".format(result.name, result.minimum * 1e3, result.median * 1e3))


class CountingReader:
    """Read chunks from memory and count them."""

    def __init__(self, chunks: List[List[str]]) -> None:
        self.chunks = chunks
        self.read = 0

    def __call__(self, number: int) -> List[str]:
        self.read += 1
        return self.chunks[number]


def standard_pipelines(reader: CountingReader) -> Iterator[Tuple[str, Callable[[], Any], Callable[[Any], int]]]:
    """Yield name, constructor, and the number of lines in an item."""
    references = list(range(len(reader.chunks)))

    def lines() -> Any:
        return datasets.chunked_dataset_iterator(references, reader, buffer_size=50_000, seed=1)

    def batches() -> Any:
        return it.BucketedReadaheadBatchIterator(
            lines(), 10_000, key=len, batch_size=lambda line: BUDGET // len(line), seed=1
        )

    yield "shuffled lines", lines, lambda line: 1
    yield "shuffled lines in buckets", batches, len


def resume(count: int, rounds: int, other: str) -> None:
    """Restoring at 90 % of an epoch: what is read again, and how long the first item takes."""
    reader = CountingReader(make_chunks(count))
    for name, make, lines_in in standard_pipelines(reader):
        original, done = make(), 0
        while done < 0.9 * count:
            done += lines_in(next(original))
        checkpoint, following = json.loads(json.dumps(original.getstate())), next(original)
        times = []
        for _ in range(rounds):
            restored, reader.read = make(), 0
            start = time.perf_counter()
            restored.setstate(checkpoint)
            first = next(restored)
            times.append(time.perf_counter() - start)
            if first != following:
                sys.exit("{}: restored to another item".format(name))
        print(
            "{}, restored at 90 % of {} chunks: {} chunks read again, first item after {:.1f} ms".format(
                name, len(reader.chunks), reader.read, min(times) * 1e3
            )
        )


def state(count: int, rounds: int, other: str) -> None:
    """The cost and size of a checkpoint."""
    for name, make, _ in standard_pipelines(CountingReader(make_chunks(count))):
        iterator = make()
        times, size = [], 0
        for _ in range(300):
            drain(itertools.islice(iterator, 7))
            start = time.perf_counter()
            checkpoint = iterator.getstate()
            times.append(time.perf_counter() - start)
            size = max(size, len(json.dumps(checkpoint)))
        print(
            "{}: getstate() takes {:.1f} us (median {:.1f}), {:,} bytes as JSON".format(
                name, min(times) * 1e6, statistics.median(times) * 1e6, size
            )
        )


CASES: Dict[str, Callable[[int, int, str], None]] = {
    "shuffle": shuffle,
    "buckets": buckets,
    "gzip": gzip_lines,
    "sampling": sampling,
    "windows": windows,
    "permutation": permutation,
    "import": import_time,
    "resume": resume,
    "state": state,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="of " + ", ".join(CASES) + "; all if none is named")
    parser.add_argument("--items", type=int, default=500_000, help="items of a case's data (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds (default: %(default)s)")
    parser.add_argument("--other", default="", help="folder with another `infinibatch` package, for `import`")
    arguments = parser.parse_args()
    unknown = set(arguments.cases) - set(CASES)
    if unknown:
        parser.error("no such case: {}".format(", ".join(sorted(unknown))))
    print("{}; {:,} items, {} rounds".format(machine(), arguments.items, arguments.rounds))
    print("| case | plain, ns per item | Infinibatch | ratio | median ratio | target |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in arguments.cases or CASES:
        CASES[name](arguments.items, arguments.rounds, arguments.other)


if __name__ == "__main__":
    main()
