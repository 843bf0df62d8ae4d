#!/usr/bin/env python3
"""Compare Infinibatch with plain Python that does the same job without checkpoints.

    python docs/benchmark/run.py                         # every case
    python docs/benchmark/run.py shuffle buckets         # some of them
    python docs/benchmark/run.py classes --other FOLDER  # beside the package in another folder, such as an old version

Runs under any supported interpreter, without other packages. Each case first checks that all sides yield as many
items, then runs them in turns. A ratio of 0.6 means that Infinibatch takes 0.6 of the plain code's time. Items are
consumed by a `for` loop on every side: what the loop itself costs is in all figures.
"""

import compileall
import gzip
import importlib
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
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Tuple

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from harness import Result, case_parser, compare, drain, machine  # noqa: E402

CHUNK = 10_000
BUDGET = 8_192  # characters in a batch


class Package(NamedTuple):
    """One installation of Infinibatch."""

    it: Any  # its module `iterators`
    datasets: Any


def load(folder: str) -> Package:
    """Import the package from the folder, whichever other one is imported already."""

    def forget() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == "infinibatch"]:
            del sys.modules[name]

    forget()
    sys.path.insert(0, folder)
    try:
        package = Package(
            importlib.import_module("infinibatch.iterators"), importlib.import_module("infinibatch.datasets")
        )
    finally:
        sys.path.remove(folder)
    found = os.path.dirname(os.path.dirname(os.path.abspath(package.it.__file__)))
    if not os.path.samefile(found, folder):
        sys.exit("{} holds no package named infinibatch: found it in {}".format(folder, found))
    return package


class Arguments(NamedTuple):
    count: int
    rounds: int
    other: str
    packages: List[Package]  # the first is this one, the second the other one, if any


class Row(NamedTuple):
    """A line of the table: a job in plain Python, and a function that does it with a package."""

    case: str
    count: int
    plain: Callable[[], Iterable[Any]]
    ours: Callable[[Package], Iterable[Any]]
    target: float = 0.0  # for the ratio; 0: none is set
    new: bool = False  # whether the case needs more than the interface of 0.1.1
    clock: Callable[[], float] = time.process_time


def measure(row: Row, arguments: Arguments) -> None:
    """Run a row and print it."""
    packages = arguments.packages[:1] if row.new else arguments.packages
    jobs = {"plain": row.plain}
    for number, package in enumerate(packages):
        jobs["ours {}".format(number)] = lambda package=package: row.ours(package)  # type: ignore[misc]
    lengths = [sum(1 for _ in make()) for make in jobs.values()]
    if len(set(lengths)) > 1:
        sys.exit("{}: plain Python yields {} items, Infinibatch {}".format(row.case, lengths[0], lengths[1:]))
    timed = {name: (lambda make=make: drain(make())) for name, make in jobs.items()}  # type: ignore[misc]
    plain, *results = compare(timed, arguments.rounds, row.clock)
    print(line(row, arguments, plain, results), flush=True)


def line(row: Row, arguments: Arguments, plain: Result, results: List[Result]) -> str:
    cells = [row.case, "{:.0f}".format(plain.minimum / row.count * 1e9)]
    cells += ["{:.2f} ({:.2f})".format(result.ratio, result.median_ratio) for result in results]
    if len(results) < len(arguments.packages):
        cells.append("")
    missed = row.target and min(results[0].ratio, results[0].median_ratio) > row.target
    cells.append("{:.2f}{}".format(row.target, " MISSED" if missed else "") if row.target else "")
    return "| {} |".format(" | ".join(cells))


# ---------------------------------------------------------------------------------------------------------------------
# Data
# ---------------------------------------------------------------------------------------------------------------------


def make_lines(count: int) -> List[str]:
    """Make lines of 20 to 300 characters, each a string of its own as a reader would make it."""
    rng = random.Random(0)
    words = ["".join(rng.choice("etaoinshrdlu") for _ in range(rng.randint(2, 9))) for _ in range(1000)]
    return [" ".join(rng.choice(words) for _ in range(rng.randint(4, 44))) for _ in range(count)]


def make_chunks(count: int) -> List[List[str]]:
    lines = make_lines(count)
    return [lines[i : i + CHUNK] for i in range(0, count, CHUNK)]


def write_chunks(folder: str, count: int) -> List[str]:
    paths = []
    for number, chunk in enumerate(make_chunks(count)):
        paths.append(os.path.join(folder, "{:03}.gz".format(number)))
        with gzip.open(paths[-1], "wb") as file:
            file.write("".join(line + "\n" for line in chunk).encode("utf-8"))
    return paths


# ---------------------------------------------------------------------------------------------------------------------
# What one would write by hand
# ---------------------------------------------------------------------------------------------------------------------


def blocks_of(items: Iterable[Any], size: int) -> Iterator[List[Any]]:
    items = iter(items)
    return iter(lambda: list(itertools.islice(items, size)), [])


def plain_shuffle(items: Iterable[Any], block_size: int) -> Iterator[Any]:
    rng = random.Random(1)
    for block in blocks_of(items, block_size):
        rng.shuffle(block)
        yield from block


def plain_buckets(items: Iterable[str], read_ahead: int) -> Iterator[List[str]]:
    rng = random.Random(1)
    for window in blocks_of(items, read_ahead):
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


def read_chunk(path: str) -> List[str]:
    """A reader as it would be written for any version."""
    with open(path, "rb") as file:
        return gzip.decompress(file.read()).decode("utf-8").split("\n")[:-1]


def plain_permutations(items: List[Any], number: int) -> Iterator[Any]:
    rng = random.Random(1)
    for _ in range(number):
        order = list(items)
        rng.shuffle(order)
        yield from order


def plain_swaps(items: Iterable[Any], size: int) -> Iterator[Any]:
    rng, slots = random.Random(1), []
    items = iter(items)
    slots = list(itertools.islice(items, size))
    for item in items:
        slot = rng.randrange(size)
        old, slots[slot] = slots[slot], item
        yield old
    yield from slots


def plain_packs(documents: Iterable[List[int]], size: int) -> Iterator[List[int]]:
    pack: List[int] = []
    for document in documents:
        pack += document
        while len(pack) >= size:
            yield pack[:size]
            pack = pack[size:]
    if pack:
        yield pack


def in_turn(sources: List[Iterable[Any]]) -> Iterator[Any]:
    return itertools.chain.from_iterable(zip(*sources))


def add_random(rng: random.Random, item: int) -> float:
    return item + rng.random()


def add_up(total: int, item: int) -> Tuple[int, int]:
    return total + item, total + item


def longest_first(package: Package, lines: Any, read_ahead: int) -> Any:
    return package.it.BucketedReadaheadBatchIterator(
        lines, read_ahead, key=len, batch_size=lambda line: BUDGET // len(line), seed=1
    )


# ---------------------------------------------------------------------------------------------------------------------
# Cases
# ---------------------------------------------------------------------------------------------------------------------


def shuffle(arguments: Arguments) -> Iterator[Row]:
    """Chunks in memory, flattened and shuffled in blocks."""
    count, chunks = arguments.count, make_chunks(arguments.count)
    for block_size in (10_000, 100_000):
        yield Row(
            "shuffle, blocks of {:,}".format(block_size),
            count,
            lambda: plain_shuffle(itertools.chain.from_iterable(chunks), block_size),  # noqa: B023
            lambda package: package.it.BlockwiseShuffleIterator(
                package.it.SelectManyIterator(package.it.NativeCheckpointableIterator(chunks)),
                block_size,  # noqa: B023
                seed=1,
            ),
            0.65,
        )


def buckets(arguments: Arguments) -> Iterator[Row]:
    """Shuffled lines, read ahead, sorted by length and cut into batches of so many characters."""
    count, chunks = arguments.count, make_chunks(arguments.count)

    def flat(package: Package) -> Any:
        return package.it.SelectManyIterator(package.it.NativeCheckpointableIterator(chunks))

    for read_ahead in (10_000, 100_000):
        yield Row(
            "shuffle and buckets, read-ahead {:,}".format(read_ahead),
            count,
            lambda: plain_buckets(plain_shuffle(itertools.chain.from_iterable(chunks), 100_000), read_ahead),  # noqa: B023
            lambda package: longest_first(
                package,
                package.it.BlockwiseShuffleIterator(flat(package), 100_000, seed=1),
                read_ahead,  # noqa: B023
            ),
            0.75,
        )
    yield Row(
        "buckets alone, read-ahead 10,000",
        count,
        lambda: plain_buckets(itertools.chain.from_iterable(chunks), 10_000),
        lambda package: longest_first(package, flat(package), 10_000),
        1.0,
    )


def gzip_lines(arguments: Arguments) -> Iterator[Row]:
    """The lines of gzip chunks through the standard pipeline, beside reading them; with workers, time on the wall."""
    count = arguments.count
    from infinibatch import readers

    with tempfile.TemporaryDirectory() as folder:
        paths = write_chunks(folder, count)

        def shuffled(package: Package, buffer_size: int, **options: Any) -> Iterator[str]:
            lines = package.datasets.chunked_dataset_iterator(paths, read_chunk, buffer_size, seed=1, **options)
            return itertools.islice(lines, count)

        def batches(package: Package, **options: Any) -> Iterator[List[str]]:
            options.update(num_epochs=1)
            lines = package.datasets.chunked_dataset_iterator(paths, readers.read_lines, 10_000, seed=1, **options)
            with lines:
                yield from longest_first(package, lines, 10_000)

        yield Row(
            "gzip lines, read_lines alone",
            count,
            lambda: plain_lines(paths),
            lambda package: itertools.chain.from_iterable(map(readers.read_lines, paths)),
            1.1,
            new=True,
        )
        for buffer_size in (10_000, 100_000):
            yield Row(
                "gzip lines, shuffled in blocks of {:,}, against reading them".format(buffer_size),
                count,
                lambda: plain_lines(paths),
                lambda package: shuffled(package, buffer_size),  # noqa: B023
                1.5,
            )
            yield Row(
                "gzip lines, shuffled in blocks of {:,}, against doing the same".format(buffer_size),
                count,
                lambda: plain_shuffle(plain_lines(paths), buffer_size),  # noqa: B023
                lambda package: shuffled(package, buffer_size),  # noqa: B023
                1.0,
            )
        number = sum(1 for _ in batches(arguments.packages[0]))
        for num_workers in (0, 1, 2):
            yield Row(
                "gzip lines, shuffled and in buckets, {} workers, against reading them".format(num_workers),
                count,
                lambda: itertools.islice(plain_lines(paths), count - number, None),  # all are read; as many come out
                lambda package: batches(package, num_workers=num_workers),  # noqa: B023
                new=True,
                clock=time.perf_counter,
            )


def classes(arguments: Arguments) -> Iterator[Row]:
    """Each class alone over numbers in a list."""
    count = arguments.count
    numbers = list(range(count))
    paths = ["corpus/part-{:07}.gz".format(number) for number in range(count)]
    halves = [numbers[: count // 2], numbers[count // 2 : count // 2 * 2]]
    controls = [number % 2 for number in range(count // 2 * 2)]
    documents = [numbers[i : i + 37] for i in range(0, count, 37)]
    slow = sys.version_info < (3, 7)

    def of(package: Package, items: Any = numbers) -> Any:
        return package.it.NativeCheckpointableIterator(items)

    def add_randoms() -> Iterator[float]:
        rng = random.Random(1)
        for number in numbers:
            yield add_random(rng, number)

    def totals() -> Iterator[int]:
        total = 0
        for number in numbers:
            total, item = add_up(total, number)
            yield item

    def is_odd(number: int) -> int:
        return number & 1

    plain: Dict[str, Tuple[Callable[[], Iterable[Any]], Callable[[Package], Iterable[Any]], float]] = {
        "NativeCheckpointableIterator": (lambda: iter(numbers), of, 0),
        "ChunkedSourceIterator": (lambda: iter(numbers), lambda p: p.it.ChunkedSourceIterator(numbers), 0),
        "InfinitePermutationSourceIterator, 3 passes": (
            lambda: plain_permutations(paths, 3),
            lambda p: itertools.islice(p.it.InfinitePermutationSourceIterator(paths, seed=1), 3 * count),
            1.2,
        ),
        "SelectManyIterator, 37 items each": (
            lambda: itertools.chain.from_iterable(documents),
            lambda p: p.it.SelectManyIterator(of(p, documents)),
            0,
        ),
        "MapIterator": (lambda: map(str, numbers), lambda p: p.it.MapIterator(of(p), str), 0),
        "SamplingRandomMapIterator": (
            add_randoms,
            lambda p: p.it.SamplingRandomMapIterator(of(p), add_random, seed=1),
            2.5,
        ),
        "RandomIterator": (
            lambda: (rng.random() for rng in [random.Random(1)] for _ in range(count)),
            lambda p: itertools.islice(p.it.RandomIterator(seed=1), count),
            0,
        ),
        "RecurrentIterator": (totals, lambda p: p.it.RecurrentIterator(of(p), add_up, 0), 0),
        "ZipIterator of two": (lambda: zip(*halves), lambda p: p.it.ZipIterator(*[of(p, half) for half in halves]), 0),
        "MultiplexIterator of two": (
            lambda: (next(sources[i]) for sources in [list(map(iter, halves))] for i in controls),
            lambda p: p.it.MultiplexIterator(of(p, controls), [of(p, half) for half in halves]),
            0,
        ),
        "WindowedIterator, width 5": (
            lambda: zip(*(numbers[i:] for i in range(5))),
            lambda p: p.it.WindowedIterator(of(p), 5),
            3.5 if slow else 3.0,
        ),
        "FixedBatchIterator, 100 items": (
            lambda: (numbers[i : i + 100] for i in range(0, count, 100)),
            lambda p: p.it.FixedBatchIterator(of(p), 100),
            3.5 if slow else 3.0,
        ),
        "BufferedShuffleIterator, 1,000 slots": (
            lambda: plain_swaps(numbers, 1_000),
            lambda p: p.it.BufferedShuffleIterator(of(p), 1_000, seed=1),
            0,
        ),
    }
    new: Dict[str, Tuple[Callable[[], Iterable[Any]], Callable[[Package], Iterable[Any]]]] = {
        "FilterIterator, every second": (lambda: filter(is_odd, numbers), lambda p: p.it.FilterIterator(of(p), is_odd)),
        "TakeIterator": (lambda: itertools.islice(numbers, count - 1), lambda p: p.it.TakeIterator(of(p), count - 1)),
        "ChainIterator of two": (
            lambda: itertools.chain(*halves),
            lambda p: p.it.ChainIterator(*[of(p, half) for half in halves]),
        ),
        "EnumerateIterator": (lambda: enumerate(numbers), lambda p: p.it.EnumerateIterator(of(p))),
        "PermutationSourceIterator": (
            lambda: plain_permutations(paths, 1),
            lambda p: p.it.PermutationSourceIterator(paths, seed=1),
        ),
        "MixIterator of two, in turn": (
            lambda: in_turn(halves),  # type: ignore[arg-type]
            lambda p: p.it.MixIterator([of(p, half) for half in halves], until="drained"),
        ),
        "PackIterator, 37 tokens to 1,000": (
            lambda: plain_packs(documents, 1_000),
            lambda p: p.it.PackIterator(of(p, documents), 1_000),
        ),
        "ShardedIterator, 16 shards": (
            lambda: in_turn([numbers[i : count // 16 * 16 : 16] for i in range(16)]),
            lambda p: p.it.ShardedIterator(lambda n, shard: of(p, numbers[shard : count // 16 * 16 : n]), 16),
        ),
    }
    for case, (by_hand, ours, target) in plain.items():
        yield Row(case, count, by_hand, ours, target)
    for case, (by_hand, ours) in new.items():
        yield Row(case, count, by_hand, ours, new=True)


class CountingReader:
    """Read chunks from memory and count them."""

    def __init__(self, chunks: List[List[str]]) -> None:
        self.chunks = chunks
        self.read = 0

    def __call__(self, number: int) -> List[str]:
        self.read += 1
        return self.chunks[number]


def standard_pipelines(
    package: Package, reader: CountingReader
) -> Iterator[Tuple[str, Callable[[], Any], Callable[[Any], int]]]:
    """Yield name, constructor, and the number of lines in an item."""
    references = list(range(len(reader.chunks)))

    def lines() -> Any:
        return package.datasets.chunked_dataset_iterator(references, reader, buffer_size=50_000, seed=1)

    yield "shuffled lines", lines, lambda line: 1
    yield "shuffled lines in buckets", lambda: longest_first(package, lines(), 10_000), len


def resume(arguments: Arguments) -> Iterator[Row]:
    """Restoring at 10, 50 and 90 % of an epoch: what is read again, and how long the first item takes."""
    reader = CountingReader(make_chunks(arguments.count))
    for number, package in enumerate(arguments.packages):
        for name, make, lines_in in standard_pipelines(package, reader):
            for percent in (10, 50, 90):
                original, done = make(), 0
                start = time.perf_counter()
                while done < percent / 100 * arguments.count:
                    done += lines_in(next(original))
                whole = time.perf_counter() - start
                checkpoint, following = original.getstate(), next(original)
                if not number:
                    checkpoint = json.loads(json.dumps(checkpoint))
                times = []
                for _ in range(arguments.rounds):
                    restored, reader.read = make(), 0
                    start = time.perf_counter()
                    restored.setstate(checkpoint)
                    first = next(restored)
                    times.append(time.perf_counter() - start)
                    if first != following:
                        sys.exit("{}: restored to another item".format(name))
                print(
                    "{}{}, restored at {} % of {} chunks: {} chunks read again, first item after {:.1f} ms; "
                    "reading from the start took {:.0f} ms".format(
                        "the other Infinibatch: " if number else "",
                        name,
                        percent,
                        len(reader.chunks),
                        reader.read,
                        min(times) * 1e3,
                        whole * 1e3,
                    )
                )
    return iter(())


def state(arguments: Arguments) -> Iterator[Row]:
    """The cost and size of a checkpoint."""
    for number, package in enumerate(arguments.packages):
        for name, make, _ in standard_pipelines(package, CountingReader(make_chunks(arguments.count))):
            iterator = make()
            times, size = [], 0
            for _ in range(300):
                drain(itertools.islice(iterator, 7))
                start = time.perf_counter()
                checkpoint = iterator.getstate()
                times.append(time.perf_counter() - start)
                size = max(size, len(json.dumps(checkpoint)))
            print(
                "{}{}: getstate() takes {:.1f} us (median {:.1f}), {:,} bytes as JSON".format(
                    "the other Infinibatch: " if number else "",
                    name,
                    min(times) * 1e6,
                    statistics.median(times) * 1e6,
                    size,
                )
            )
    return iter(())


def child_time() -> float:
    """Return the CPU time of all processes that were started and have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def import_time(arguments: Arguments) -> Iterator[Row]:
    """The CPU time of starting an interpreter and importing the package, with compiled modules, without `site`."""

    def start(folder: str, code: str) -> Callable[[], Any]:
        path = "import sys; sys.path.insert(0, {!r})\n".format(folder)
        return lambda: subprocess.check_call([sys.executable, "-S", "-E", "-c", path + code])

    with tempfile.TemporaryDirectory() as folder:
        jobs = {"bare interpreter": start(folder, "")}
        for name, source in (("Infinibatch", ROOT), ("the other Infinibatch", arguments.other)):
            if source:
                copy = os.path.join(folder, name)
                shutil.copytree(os.path.join(source, "infinibatch"), os.path.join(copy, "infinibatch"))
                compileall.compile_dir(copy, quiet=1)
                jobs["and import infinibatch.datasets of " + name] = start(copy, "import infinibatch.datasets")
        for result in compare(jobs, max(arguments.rounds, 15), child_time):
            print("{}: {:.1f} ms (median {:.1f})".format(result.name, result.minimum * 1e3, result.median * 1e3))
    return iter(())


def scale(arguments: Arguments) -> Iterator[Row]:
    """Start and memory against the number of chunks, to ten million, with the shuffle of their names."""
    for count in (1_000, 100_000, 1_000_000, 10_000_000):
        paths = ["part-{:08}.gz".format(number) for number in range(count)]
        for number, package in enumerate(arguments.packages):
            start = time.process_time()
            source = package.it.InfinitePermutationSourceIterator(paths, seed=1)
            built = time.process_time()
            next(source)
            first = time.process_time()
            source.getstate()
            stated = time.process_time()
            peak = 0.0
            if count <= 1_000_000:  # to trace memory takes several times longer
                tracemalloc.start()
                drain(itertools.islice(package.it.InfinitePermutationSourceIterator(paths, seed=1), 2 * count + 1))
                peak = tracemalloc.get_traced_memory()[1] / sys.getsizeof(paths)
                tracemalloc.stop()
            print(
                "{}{:,} chunks: built in {:.1f} ms, first name after {:.1f} ms more, getstate() {:.1f} ms{}".format(
                    "the other Infinibatch: " if number else "",
                    count,
                    (built - start) * 1e3,
                    (first - built) * 1e3,
                    (stated - first) * 1e3,
                    "; holds {:.2f} lists of references beside the one given".format(peak) if peak else "",
                ),
                flush=True,
            )
    return iter(())


def memory(arguments: Arguments) -> Iterator[Row]:
    """The most memory held while most of an epoch is read, against the size of the corpus."""

    def read_chunk(number: int) -> List[str]:
        return ["{:08} {:03} ".format(number, line) + "x" * (line % 100) for line in range(1_000)]

    for count in (max(arguments.count // part, 1) for part in (100_000, 10_000, 1_000)):
        for number, package in enumerate(arguments.packages):
            tracemalloc.start()
            lines = package.datasets.chunked_dataset_iterator(list(range(count)), read_chunk, 5_000, seed=1)
            total = sum(map(len, itertools.islice(longest_first(package, lines, 2_000), 8 * count)))
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            print(
                "{}{:,} chunks of 1,000 lines, shuffled in blocks of 5,000 and in buckets of 2,000: at most {:.1f} MiB "
                "held, in batches of {:.0f} lines".format(
                    "the other Infinibatch: " if number else "", count, peak / (1 << 20), total / (8 * count)
                ),
                flush=True,
            )
    return iter(())


CASES: Dict[str, Callable[[Arguments], Iterator[Row]]] = {
    "shuffle": shuffle,
    "buckets": buckets,
    "gzip": gzip_lines,
    "classes": classes,
    "import": import_time,
    "resume": resume,
    "state": state,
    "scale": scale,
    "memory": memory,
}


def main() -> None:
    parser = case_parser(__doc__, CASES, items=500_000, rounds=7)
    parser.add_argument("--other", default="", help="folder with another `infinibatch` package, 0.1.1 or newer")
    options = parser.parse_args()
    packages = [load(options.other)] if options.other else []
    arguments = Arguments(options.items, options.rounds, options.other, [load(ROOT)] + packages)
    print("{}; {:,} items, {} rounds".format(machine(), arguments.count, arguments.rounds))
    print("| case | plain, ns per item | Infinibatch |{} target |".format(" the other one |" if packages else ""))
    print("| --- | --- | --- |{} --- |".format(" --- |" if packages else ""))
    for name in options.cases:
        for row in CASES[name](arguments):
            measure(row, arguments)


if __name__ == "__main__":
    main()
