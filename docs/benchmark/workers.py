#!/usr/bin/env python3
"""Compare the stages that work in other processes with pipes, queues and loops that do the same job.

    python docs/benchmark/workers.py                 # every case, some minutes
    python docs/benchmark/workers.py lines map       # some of them

Runs under any supported interpreter; `arrays` needs NumPy, and takes PyTorch if it is there. Each case runs what it
compares in turns, each round beginning with another one, and measures time on the wall: work in two processes at once
is what these stages are for. So it needs two idle cores, or many rounds to catch moments when they are idle. Ratios are
those of the fastest rounds. Everything from starting the processes to the last item counts.
"""

import functools
import gzip
import itertools
import multiprocessing
import os
import pickle
import random
import sys
import tempfile
import time
from typing import Any, Callable, Dict, Iterable, Iterator, List

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, ROOT)

from harness import Job, case_parser, compare, drain, machine  # noqa: E402

from infinibatch import datasets, readers  # noqa: E402
from infinibatch import iterators as it  # noqa: E402

FORK = multiprocessing.get_context("fork")
PROTOCOL = min(pickle.HIGHEST_PROTOCOL, 5)


def report(case: str, count: int, rounds: int, jobs: Dict[str, Job], targets: Dict[str, Any]) -> None:
    """Run the jobs in turns and print what each took, beside the first one.

    Args:
        case: name of the comparison
        count: number of items in each job
        rounds: number of rounds
        jobs: the baseline, then what is compared with it
        targets: for some of the jobs, the largest ratio to the baseline that is good enough
    """
    for result in compare(jobs, rounds, time.perf_counter):
        target = targets.get(result.name)
        missed = target is not None and result.ratio > target
        print(
            "| {} | {} | {:.2f} | {:.2f} | {:.2f} | {}{} |".format(
                case,
                result.name,
                result.minimum / count * 1e6,
                result.ratio,
                result.median_ratio,
                "" if target is None else "{:.2f}".format(target),
                " MISSED" if missed else "",
            ),
            flush=True,
        )


# What one would write by hand


def in_a_process(produce: Callable[[Any], None], channel: Any, consume: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    process = FORK.Process(target=produce, args=(channel,), daemon=True)
    process.start()
    yield from consume()
    process.join()


def piped(items: Iterable[Any], block: int) -> Iterator[Any]:
    """Yield items that another process sends through a pipe, so many in a message."""
    receiver, sender = FORK.Pipe(duplex=False)

    def produce(channel: Any) -> None:
        rest = iter(items)
        while True:
            message = list(itertools.islice(rest, block))
            channel.send_bytes(pickle.dumps(message, PROTOCOL))
            if not message:
                return

    def consume() -> Iterator[Any]:
        while True:
            message = pickle.loads(receiver.recv_bytes())
            if not message:
                return
            yield from message

    yield from in_a_process(produce, sender, consume)
    receiver.close()
    sender.close()


def queued(items: Iterable[Any], size: int) -> Iterator[Any]:
    """Yield items that another process puts into a queue one by one."""
    queue = FORK.Queue(size)

    def produce(channel: Any) -> None:
        for item in items:
            channel.put(item)
        channel.put(None)

    def consume() -> Iterator[Any]:
        while True:
            item = queue.get()
            if item is None:
                return
            yield item

    yield from in_a_process(produce, queue, consume)
    queue.close()
    queue.join_thread()


def prefetched(items: Any, buffer_size: int) -> Iterator[Any]:
    with it.PrefetchIterator(it.NativeCheckpointableIterator(items), buffer_size) as iterator:
        yield from iterator


def job(items: Callable[[], Iterable[Any]]) -> Job:
    return lambda: drain(items())


# Cases


def strings(case: str, items: List[str], rounds: int, target: float) -> None:
    jobs = {"pipe, blocks of 1000": job(lambda: piped(items, 1000))}
    targets = {}
    for size in (1_000, 10_000, 100_000):
        name = "PrefetchIterator, buffer {:,}".format(size)
        jobs[name] = job(functools.partial(prefetched, items, size))
        if size >= 10_000:
            targets[name] = target
    report(case, len(items), rounds, jobs, targets)


def lines(count: int, rounds: int) -> None:
    """Lines of about 110 characters, which are in memory already: what remains is to bring them over."""
    rng = random.Random(0)
    items = ["".join(rng.choice("etaoin shrdlu") for _ in range(rng.randint(60, 160))) for _ in range(count)]
    strings("lines of 110 characters", items, rounds, 1.2)


def short(count: int, rounds: int) -> None:
    """Strings of 8 characters."""
    strings("strings of 8 characters", ["{:08}".format(number) for number in range(count)], rounds, 2.2)


def queue(count: int, rounds: int) -> None:
    """Lines one at a time through a queue, beside buffers of the same size."""
    for size in (1, 2, 10, 100, 1_000, 10_000, 100_000):
        items = ["{:0110}".format(number) for number in range(min(count // 4, 400 * size + count // 50))]
        ours = "PrefetchIterator"
        jobs = {"multiprocessing.Queue": job(lambda: queued(items, size)), ours: job(lambda: prefetched(items, size))}  # noqa: B023
        report("lines, buffer {:,}".format(size), len(items), rounds, jobs, {ours: 1 / 15 if size >= 1_000 else 1.0})


class Arrays:
    """A sequence of arrays, each made when it is asked for."""

    def __init__(self, count: int) -> None:
        import numpy

        self.count, self.make = count, numpy.ones

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if index >= self.count:
            raise IndexError(index)
        return self.make((1024, 1024), dtype="float32")


def arrays(count: int, rounds: int) -> None:
    """NumPy arrays of 4 MiB, fresh ones, and tensors where PyTorch is installed."""
    try:
        items = Arrays(max(count // 2_000, 20))
    except ImportError:
        print("arrays: NumPy is missing", file=sys.stderr)
        return
    jobs = {
        "multiprocessing.Queue": job(lambda: queued(items, 8)),
        "pipe": job(lambda: piped(items, 1)),
        "PrefetchIterator": job(lambda: prefetched(items, 8)),
        "made and dropped in this process": job(lambda: items),
    }
    report("arrays of 4 MiB, buffer 8", len(items), rounds, jobs, {"PrefetchIterator": 1 / 5})
    try:
        import torch
    except ImportError:
        print("tensors: PyTorch is missing", file=sys.stderr)
        return

    class Tensors(torch.utils.data.IterableDataset):  # type: ignore[misc,name-defined,unused-ignore]
        def __iter__(self) -> Iterator[Any]:
            return map(torch.from_numpy, items)

        def __len__(self) -> int:
            return len(items)

    tensors = Tensors()

    def loaded() -> Iterable[Any]:
        return torch.utils.data.DataLoader(tensors, batch_size=None, num_workers=1, prefetch_factor=8)

    ours = "PrefetchIterator"
    jobs = {"DataLoader, 1 worker": job(loaded), ours: job(lambda: prefetched(tensors, 8))}
    report("tensors of 4 MiB, 8 ahead", len(items), rounds, jobs, {ours: 1 / 3})


def work(steps: int, item: Any) -> int:
    number = len(item) if isinstance(item, str) else item
    for _ in range(steps):
        number = (number * 1103515245 + 12345) & 0x7FFFFFFF
    return number


def steps_in(seconds: float) -> int:
    """Return how many steps of `work` take so long."""
    begin = time.perf_counter()
    work(200_000, 1)
    fastest = time.perf_counter() - begin
    for _ in range(10):
        begin = time.perf_counter()
        work(200_000, 1)
        fastest = min(fastest, time.perf_counter() - begin)
    return max(round(200_000 * seconds / fastest), 1)


def mapped(items: Any, transform: Callable[[Any], Any], number: int) -> Iterator[Any]:
    with it.ParallelMapIterator(it.NativeCheckpointableIterator(items), transform, 2, number) as iterator:
        yield from iterator


def two_halves(items: Any, transform: Callable[[Any], Any]) -> None:
    """Transform one half in each of two processes, and send nothing: what two cores can do at best."""

    def half(part: Any) -> None:
        for item in part:
            transform(item)

    middle = len(items) // 2
    processes = [FORK.Process(target=half, args=(part,)) for part in (items[:middle], items[middle:])]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def parallel_map(count: int, rounds: int) -> None:
    """A function of 200 microseconds, where two processes pay, and one of 2, where they do not."""
    slow, quick = functools.partial(work, steps_in(200e-6)), functools.partial(work, steps_in(2e-6))
    numbers = range(count)
    for name, transform, items, target in (
        ("200 us, numbers", slow, numbers[: max(count // 100, 2_000)], 1 / 1.8),
        ("2 us, numbers", quick, numbers[: count // 2], 4 / 3),
        ("2 us, short strings", quick, ["{:08}".format(number) for number in numbers[: count // 2]], 4 / 3),
    ):
        jobs = {"map() in this process": job(lambda: map(transform, items))}  # noqa: B023
        jobs["two processes, nothing sent"] = lambda: two_halves(items, transform)  # noqa: B023
        targets = {}
        for number in (50, 1_000):
            ours = "ParallelMapIterator, 2 processes, {:,} items each".format(number)
            jobs[ours] = job(functools.partial(mapped, items, transform, number))
            targets[ours] = target
        report("a function of " + name, len(items), rounds, jobs, targets)


def read_all(paths: Iterable[str]) -> None:
    for path in paths:
        drain(readers.read_lines(path))


def chunks(count: int, rounds: int) -> None:
    """Lines of gzip chunks, read by two processes: beside reading them here, and two that keep what they read."""
    size = 10_000
    with tempfile.TemporaryDirectory() as folder:
        rng = random.Random(0)
        words = ["".join(rng.choice("etaoinshrdlu") for _ in range(rng.randint(2, 9))) for _ in range(1000)]
        paths = []
        for chunk in range(max(count // size, 8)):
            paths.append(os.path.join(folder, "{:03}.gz".format(chunk)))
            with gzip.open(paths[-1], "wt", encoding="utf-8") as file:
                for _ in range(size):
                    file.write(" ".join(rng.choice(words) for _ in range(rng.randint(4, 44))) + "\n")

        def read(num_workers: int) -> Iterator[str]:
            with datasets.chunked_dataset_iterator(
                paths, readers.read_lines, 1, train=False, shuffle=False, num_workers=num_workers
            ) as iterator:
                yield from iterator

        def forked() -> None:
            processes = [FORK.Process(target=read_all, args=(paths[half::2],)) for half in (0, 1)]
            for process in processes:
                process.start()
            for process in processes:
                process.join()

        jobs = {
            "two readers, nothing sent": forked,
            "num_workers=2": job(lambda: read(2)),
            "num_workers=0": job(lambda: read(0)),
        }
        report("gzip lines", len(paths) * size, rounds, jobs, {"num_workers=2": 1 / 0.8})


def pace(count: int, rounds: int) -> None:
    """A producer of 10 ms an item beside a consumer of 11 ms: how long the consumer waits."""

    def slow(item: int) -> int:
        time.sleep(0.010)
        return item

    longest = []
    for _ in range(max(rounds // 3, 1)):
        waits = []
        with it.PrefetchIterator(it.MapIterator(it.NativeCheckpointableIterator(range(300)), slow), 8) as iterator:
            for _ in range(300):
                begin = time.perf_counter()
                next(iterator)
                waits.append(time.perf_counter() - begin)
                time.sleep(0.011)
        longest.append(max(waits[10:]))
    print(
        "waits of a consumer (11 ms an item) for a producer (10 ms), buffer 8, 300 items: "
        "longest {:.1f} ms in the best "
        "run, {:.1f} ms in the worst, target 50{}".format(
            min(longest) * 1e3, max(longest) * 1e3, "" if min(longest) < 0.05 else " MISSED"
        )
    )


def used(pids: Iterable[int], key: str) -> float:
    """Return mebibytes of memory; of what processes share each has its part if the key is Pss."""
    total = 0
    for pid in pids:
        with open("/proc/{}/smaps".format(pid)) as file:
            total += sum(int(line.split()[1]) for line in file if line.startswith(key + ":"))
    return total / 1024


def memory(count: int, rounds: int) -> None:
    """What worker processes hold: beside a list of two million strings, and over ten epochs."""

    def after_a_pass(start: str, sender: Any) -> None:
        items = ["number {}".format(number) for number in range(2_000_000)]
        source = it.NativeCheckpointableIterator(items)
        iterator: Any = it.MapIterator(source, len)
        if start:
            iterator = it.ParallelMapIterator(source, len, 4, 1000, start=start)
        for _ in range(len(items) - 1):
            next(iterator)
        pids = [os.getpid()] + [worker.pid for worker in getattr(iterator, "_workers", ())]
        sender.send([used([pid], "Pss") for pid in pids])
        iterator.close()

    alone = 0.0
    for start in ("", "fork", "spawn"):
        receiver, sender = FORK.Pipe(duplex=False)
        process = FORK.Process(target=after_a_pass, args=(start, sender))
        process.start()
        parts = receiver.recv()
        process.join()
        alone = alone or sum(parts)
        print(
            "a list of two million strings, {}: {:.0f} MiB ({}), {:.2f} times the single process".format(
                "4 processes, " + start if start else "one process",
                sum(parts),
                " + ".join("{:.0f}".format(part) for part in parts),
                sum(parts) / alone,
            )
        )

    def make(number: int) -> bytes:
        return bytes(10_000) + number.to_bytes(4, "big")

    source = it.MapIterator(it.InfinitePermutationSourceIterator(range(2_000)), make)
    with it.PrefetchIterator(source, 100) as iterator:
        sizes = []
        for _ in range(10):
            for _ in range(2_000):
                next(iterator)
            sizes.append(used([os.getpid(), iterator._workers[0].pid], "Rss"))
    print("prefetching, MiB after each of ten epochs: " + " ".join("{:.1f}".format(size) for size in sizes))


CASES: Dict[str, Callable[[int, int], None]] = {
    "lines": lines,
    "short": short,
    "queue": queue,
    "arrays": arrays,
    "map": parallel_map,
    "chunks": chunks,
    "pace": pace,
    "memory": memory,
}


def main() -> None:
    arguments = case_parser(__doc__, CASES, items=200_000, rounds=15).parse_args()
    print("{}; {:,} items, {} rounds".format(machine(), arguments.items, arguments.rounds))
    print("| case | how | us per item | ratio | median ratio | target |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in arguments.cases:
        CASES[name](arguments.items, arguments.rounds)


if __name__ == "__main__":
    main()
