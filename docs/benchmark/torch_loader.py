#!/usr/bin/env python3
"""Compare a pipeline that has workers of its own with one that runs in workers of PyTorch's DataLoader.

    python docs/benchmark/torch_loader.py                  # every case, some minutes
    python docs/benchmark/torch_loader.py light --rounds 3

Needs PyTorch. All ways read the same gzip files of text lines, shuffle them, and make batches of padded tensors; the
consumer either takes them at once (`light`), or works for a millisecond on each, as a training step does (`step`).
Time is that on the wall from starting the processes to the last batch, so it needs two idle cores.
"""

import functools
import gzip
import os
import random
import sys
import tempfile
import time
import warnings
from typing import Any, Callable, Dict, Iterable, List

import torch
from torch.utils.data import DataLoader

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, ROOT)

from harness import Job, case_parser, compare, machine  # noqa: E402

from infinibatch import datasets, iterators, readers  # noqa: E402
from infinibatch.torch import IterableDataset  # noqa: E402

BATCH = 64
WORK_MS = {"light": 0.0, "step": 1.0}  # what the consumer does with each batch, in milliseconds


def make_corpus(folder: str, count: int) -> List[str]:
    rng = random.Random(0)
    words = ["".join(rng.choice("etaoinshrdlu") for _ in range(rng.randint(2, 9))) for _ in range(1000)]
    paths = []
    for chunk in range(20):
        paths.append(os.path.join(folder, "chunk-{}.gz".format(chunk)))
        with gzip.open(paths[-1], "wt", encoding="utf-8") as file:
            for _ in range(count // 20):
                print(" ".join(rng.choice(words) for _ in range(rng.randint(4, 44))), file=file)
    return paths


def collate(lines: List[str]) -> torch.Tensor:
    """Make one tensor of the characters' numbers, padded with zeros."""
    width = max(map(len, lines))
    return torch.frombuffer(
        bytearray(b"".join(line.encode("latin-1").ljust(width, b"\0") for line in lines)), dtype=torch.uint8
    ).view(len(lines), width)


def make_lines(paths: List[str], num_instances: int = 1, instance_rank: int = 0, num_workers: int = 0) -> Any:
    return datasets.chunked_dataset_iterator(
        paths, readers.read_lines, 10_000, seed=1, num_epochs=1, num_workers=num_workers,
        num_instances=num_instances, instance_rank=instance_rank)  # fmt: skip


def make_batches(paths: List[str], num_instances: int = 1, instance_rank: int = 0, num_workers: int = 0) -> Any:
    lines = make_lines(paths, num_instances, instance_rank, num_workers)
    return iterators.MapIterator(iterators.FixedBatchIterator(lines, BATCH), collate)


def of_items(paths: List[str], num_workers: int) -> Iterable[Any]:
    """The usual way: the data set yields lines, and DataLoader makes the batches."""
    dataset = IterableDataset(functools.partial(make_lines, paths))
    return DataLoader(dataset, BATCH, num_workers=num_workers, collate_fn=collate)


def of_batches(paths: List[str], num_workers: int) -> Iterable[Any]:
    """The pipeline makes the batches, in workers of DataLoader."""
    return DataLoader(IterableDataset(functools.partial(make_batches, paths)), None, num_workers=num_workers)


def own(paths: List[str], num_workers: int, prefetch: bool) -> Iterable[Any]:
    """The pipeline reads chunks in workers of its own, and works ahead in another one."""
    batches = make_batches(paths, num_workers=num_workers)
    with iterators.PrefetchIterator(batches, 16) if prefetch else batches as batches:
        yield from batches


def ways(paths: List[str]) -> Dict[str, Callable[[], Iterable[Any]]]:
    return {
        "DataLoader, 2 workers, lines": lambda: of_items(paths, 2),
        "DataLoader, 2 workers, batches": lambda: of_batches(paths, 2),
        "DataLoader, 1 worker, batches": lambda: of_batches(paths, 1),
        "no workers": lambda: own(paths, 0, False),
        "PrefetchIterator": lambda: own(paths, 0, True),
        "chunked_dataset_iterator(num_workers=2)": lambda: own(paths, 2, False),
        "both": lambda: own(paths, 2, True),
    }


def consume(make: Callable[[], Iterable[Any]], milliseconds: float) -> int:
    """Read all batches, work on each, and return the number of lines."""
    count = 0
    for batch in make():
        count += len(batch)
        end = time.perf_counter() + milliseconds / 1000
        while time.perf_counter() < end:
            pass
    return count


def main() -> None:
    arguments = case_parser(__doc__, WORK_MS, items=200_000, rounds=5).parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(machine(), "PyTorch", torch.__version__)
    print("| case | way | µs a line | ratio | median ratio |\n| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        paths = make_corpus(folder, arguments.items)
        for case in arguments.cases:
            jobs: Dict[str, Job] = {}
            for name, way in ways(paths).items():
                jobs[name] = functools.partial(consume, way, WORK_MS[case])
            counts = {job() for job in jobs.values()} if case == "light" else {arguments.items}
            if counts != {arguments.items}:
                sys.exit("the ways yield {} lines, not {}".format(counts, arguments.items))
            for result in compare(jobs, arguments.rounds, time.perf_counter):
                print(
                    "| {} | {} | {:.2f} | {:.2f} | {:.2f} |".format(
                        case, result.name, result.minimum / arguments.items * 1e6, result.ratio, result.median_ratio
                    ),
                    flush=True,
                )


if __name__ == "__main__":
    main()
