"""The command bench: how fast a pipeline is, and which of its stages takes the time."""

import argparse
import os
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

from infinibatch._console import at_least, interrupt_on_signals, progress
from infinibatch._stream import add_pipeline_options, batched, num_words, reader, shuffled
from infinibatch.iterators import (
    CheckpointableIterator,
    NativeCheckpointableIterator,
    PermutationSourceIterator,
    SelectManyIterator,
)
from infinibatch.readers import _PIECE_SIZE, _blocks, _open, find_chunks

_BENCH_HELP = """\
Measure how many lines a second come out of the pipeline that stream has with these options, and how its stages share
the time. Whole files are read, in the order of stream, until they hold --limit lines.

The pipeline is cut off behind each stage, and every part runs over the same files; a stage's time is what the part
that ends with it takes more than the part before. Each is run --repeat times, in turn, and the least time counts, as
what disturbs a measurement only adds to it. The files have been read once before, to count their lines: where they fit
into the system's memory, the disk does not count.
"""

_ENOUGH = 1.1  # times as fast, for a change to be worth its words


def add_bench(commands: Any) -> None:
    """Add the command bench."""
    parser = commands.add_parser(
        "bench",
        help="measure the pipeline of stream, and tell which stage to speed up",
        description=_BENCH_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_pipeline_options(parser)
    add = parser.add_argument
    add("--limit", type=at_least(1), default=200000, metavar="N", help="lines that are enough (%(default)s)")
    add("--repeat", type=at_least(1), default=3, metavar="N", help="runs of each part (%(default)s)")
    parser.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> int:
    interrupt_on_signals()
    paths, num_lines = _sample(options)
    if not num_lines:
        raise ValueError("there are no lines in {}".format(", ".join(options.files)))
    workers = options.workers or min(os.cpu_count() or 1, len(paths))
    buffer_size = max(1, options.buffer_size // 10)
    runs = _parts(paths, options) + [
        ("workers", lambda: _drain_singly(_pipeline(paths, options, workers=workers))),
        ("buffer", lambda: _drain_singly(_pipeline(paths, options, buffer_size=buffer_size))),
    ]
    with progress("runs", options.repeat * len(runs), amid_output=True) as advance:
        times = _least_times([run for _, run in runs], options.repeat, advance)
    with_workers, with_buffer = times[-2:]
    stages = _stages([name for name, _ in runs[:-2]], times[:-2])
    total = sum(seconds for _, seconds in stages)
    print("{:,} lines in {} file(s) of {:,} bytes".format(num_lines, len(paths), _read_files(paths)))
    print("{:,.0f} lines a second; of the time,".format(num_lines / max(total, 1e-9)))
    for name, seconds in stages:
        print("  {:4.0%}  {:8.3f} s  {}".format(seconds / max(total, 1e-9), seconds, name))
    print("with --workers {}: {:,.0f} lines a second".format(workers, num_lines / max(with_workers, 1e-9)))
    gains = {"workers": total / max(with_workers, 1e-9), "buffer": total / max(with_buffer, 1e-9)}
    print(_advice(stages, gains, workers, buffer_size))
    return 0


def _sample(options: argparse.Namespace) -> Tuple[List[str], int]:
    """Return the files that stream reads first, as many as are needed, and how many lines they hold."""
    read = reader(options)
    paths: List[str] = []
    num_lines = 0
    with progress("lines counted", None, amid_output=True) as advance:
        for path in PermutationSourceIterator(find_chunks(options.files), seed=options.seed):
            number = sum(1 for _ in read(path))
            advance(number)
            paths.append(path)
            num_lines += number
            if num_lines >= options.limit:
                break
    return paths, num_lines


def _pipeline(paths: List[str], options: argparse.Namespace, **changes: Any) -> CheckpointableIterator[Any]:
    changed = argparse.Namespace(**dict(vars(options), workers=0))
    vars(changed).update(changes)
    return batched(shuffled(paths, reader(options), changed), changed, num_words)


def _parts(paths: List[str], options: argparse.Namespace) -> List[Tuple[str, Callable[[], Any]]]:
    """Return the pipeline cut off behind each stage, with the stage's name."""
    alone = argparse.Namespace(**dict(vars(options), workers=0))
    read = reader(options)
    parts = [
        ("reading files", lambda: _read_files(paths)),
        ("decompressing", lambda: _decompress(paths)),
        (
            "splitting into lines" if options.format == "lines" else "parsing " + options.format,
            lambda: _drain(SelectManyIterator(NativeCheckpointableIterator(paths), read)),
        ),
        ("shuffling", lambda: _drain(shuffled(paths, read, alone))),
    ]
    if options.batch_size or options.max_tokens:
        parts.append(("batching", lambda: _drain(_pipeline(paths, options))))
    # Stages hand on items by the thousand; a consumer takes one at a time.
    parts.append(("handing out", lambda: _drain_singly(_pipeline(paths, options))))
    return parts


def _read_files(paths: List[str]) -> int:
    num_bytes = 0
    for path in paths:
        with _open(path) as file:
            num_bytes += sum(map(len, iter(lambda: file.read(_PIECE_SIZE), b"")))
    return num_bytes


def _decompress(paths: List[str]) -> None:
    for path in paths:
        with _open(path) as file:
            for _ in _blocks(file):
                pass


def _drain(items: CheckpointableIterator[Any]) -> None:
    with items:
        while True:
            run: List[Any] = []
            items._fill(run, 1000)
            if not run:
                return


def _drain_singly(items: CheckpointableIterator[Any]) -> None:
    with items:
        for _ in items:
            pass


def _least_times(runs: List[Callable[[], Any]], repeat: int, advance: Callable[[int], None]) -> List[float]:
    times: List[float] = [float("inf")] * len(runs)
    for _ in range(repeat):
        for i, run in enumerate(runs):
            begin = time.perf_counter()
            run()
            times[i] = min(times[i], time.perf_counter() - begin)
            advance(1)
    return times


def _stages(names: List[str], times: List[float]) -> List[Tuple[str, float]]:
    """Return what each stage takes, from what the pipeline takes that ends with it."""
    stages = []
    before = 0.0
    for name, seconds in zip(names, times):
        stages.append((name, max(0.0, seconds - before)))  # below nothing only by chance
        before = max(before, seconds)
    return stages


def _advice(
    stages: List[Tuple[str, float]], gains: Dict[str, float], workers: int, buffer_size: int
) -> str:
    """Return a recommendation: what takes most, and what was found to help or may."""
    shuffling = [name for name, _ in stages].index("shuffling")
    reading = sum(seconds for _, seconds in stages[:shuffling])
    slowest, most = max(stages[shuffling:], key=lambda stage: stage[1])
    words: List[Optional[str]]
    if reading >= most:
        slowest = max(stages[:shuffling], key=lambda stage: stage[1])[0]
        words = ["Reading takes most of the time, above all {}.".format(slowest)]
        if gains["workers"] >= _ENOUGH:
            words.append(
                "--workers {0} (num_workers={0}) was {1:.1f} times as fast.".format(workers, gains["workers"])
            )
        else:
            words.append("More --workers do not help here.")
        words.append(
            {
                "reading files": "A faster disk would, or files that are compressed more.",
                "decompressing": "Of the kinds of compression zstd is the fastest to undo, and no compression faster.",
                "splitting into lines": None,
            }.get(slowest, "Lines that need no parsing are read faster.")
        )
    elif slowest == "shuffling":
        words = ["Shuffling takes most of the time."]
        if gains["buffer"] >= _ENOUGH:
            words.append("--buffer-size {} was {:.1f} times as fast.".format(buffer_size, gains["buffer"]))
            words.append("See with plot whether that mixes enough.")
        else:
            words.append("A smaller buffer would not help; a PrefetchIterator behind it does it in another process.")
    elif slowest == "batching":
        words = ["Batching takes most of the time: above all, the counting of words."]
        words.append("In a program, let the items bring their length; a PrefetchIterator does all in another process.")
    else:
        words = ["Handing items out one by one takes most of the time, so there is little to speed up here."]
        words.append("Consumers that take batches pay less of it.")
    return " ".join(filter(None, words))
