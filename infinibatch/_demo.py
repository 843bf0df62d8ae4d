"""The command demo: a pipeline that is killed and resumed, on a small corpus."""

import argparse
import contextlib
import json
import os
import sys
from typing import Any, Iterator, List

from infinibatch import checkpoint
from infinibatch.datasets import chunked_dataset_iterator
from infinibatch.iterators import BucketedReadaheadBatchIterator, CheckpointableIterator
from infinibatch.readers import find_chunks, read_lines

_NUM_CHUNKS = 20
_LINES_PER_CHUNK = 250
_NUM_LINES = _NUM_CHUNKS * _LINES_PER_CHUNK
_KILL_AFTER = 137  # batches; not where a checkpoint is written


def add_demo(commands: Any) -> None:
    """Add the command demo."""
    parser = commands.add_parser(
        "demo",
        help="watch a pipeline being killed and resumed on a small corpus",
        description="Make a small corpus in a temporary folder, read it shuffled and in batches of like length in "
        "another process, kill that in mid-epoch, resume in a third one, and compare with a run that nothing "
        "interrupted.",
    )
    parser.add_argument("--train", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.set_defaults(run=_demo)


def _demo_pipeline(folder: str) -> CheckpointableIterator[List[str]]:
    chunks = find_chunks(os.path.join(folder, "chunk-*.txt.gz"))
    lines = chunked_dataset_iterator(chunks, read_lines, buffer_size=1000, seed=1)
    return BucketedReadaheadBatchIterator(
        lines, read_ahead=1000, key=len, batch_size=lambda longest: 2000 // len(longest), seed=2
    )


def _demo_training(folder: str) -> None:
    batches = _demo_pipeline(folder)
    position = os.path.join(folder, "position.json")
    if os.path.exists(position):
        checkpoint.load(batches, position)
    for step, batch in enumerate(batches, 1):
        print(json.dumps(batch), flush=True)  # in place of a training step
        if step % 25 == 0:
            checkpoint.save(batches, position)


def _demo(options: argparse.Namespace) -> int:
    if options.train:
        _demo_training(options.train)
        return 0

    import tempfile

    with tempfile.TemporaryDirectory(prefix="infinibatch-demo-") as folder:
        return 0 if _demonstrate(folder) else 1


def _demonstrate(folder: str) -> bool:
    """Kill a training process and resume it, saying so; return whether its batches are those of an unbroken one."""
    import inspect
    import textwrap

    corpus = _make_corpus(folder)
    print("A corpus: {:,} lines in {} gzip files, and a process that trains on it:\n".format(len(corpus), _NUM_CHUNKS))
    for function in (_demo_pipeline, _demo_training):
        print(textwrap.indent(inspect.getsource(function).replace("_demo_", ""), "    "))

    expected = _one_epoch(iter(_demo_pipeline(folder)))
    print(
        "Uninterrupted, an epoch has {} batches of lines of like length, the batches in random order:".format(
            len(expected)
        )
    )
    for number in range(3):
        _print_batch(number + 1, expected[number])

    print("\nA process starts, and is killed (SIGKILL) in mid-epoch.")
    with _training(folder) as process:
        killed = [json.loads(process.stdout.readline()) for _ in range(_KILL_AFTER)]
        process.kill()
        # What it had written beyond that is still in the pipe, the last line perhaps in part.
        killed += [json.loads(line) for line in process.stdout if line.endswith(b"\n")]
    killed = killed[: len(expected)]
    print("It got through {} batches. Its last checkpoint, position.json:\n".format(len(killed)))
    print(textwrap.indent(checkpoint.show(os.path.join(folder, "position.json")), "    "))

    print("\nA second process loads position.json and goes on to the end of the epoch.")
    with _training(folder) as process:
        first = json.loads(process.stdout.readline())
        saved = expected.index(first) if first in expected else 0
        resumed = [first] + [json.loads(process.stdout.readline()) for _ in range(len(expected) - saved - 1)]
        process.kill()
    print("It got {} batches. The first:".format(len(resumed)))
    _print_batch(saved + 1, first)

    again = len(killed) - saved
    checks = [
        (
            "batches 1 to {} of the first process and all of the second are the uninterrupted epoch".format(saved),
            saved > 0 and killed[:saved] + resumed == expected,
        ),
        (
            "each of the {:,} lines is in them, once".format(len(corpus)),
            sorted(line for batch in killed[:saved] + resumed for line in batch) == sorted(corpus),
        ),
        (
            "the {} batches between the last checkpoint and the kill came again, the same".format(again),
            again >= 0 and killed[saved:] == resumed[:again],
        ),
    ]
    print("\nCompared batch by batch, line by line:")
    for claim, holds in checks:
        print("    {}  {}".format("yes" if holds else "NO ", claim))
    return all(holds for _, holds in checks)


def _make_corpus(folder: str) -> List[str]:
    import gzip
    import random

    rng = random.Random(0)
    words = ["".join(rng.choice("aeioulmnrst") for _ in range(rng.randint(1, 9))) for _ in range(500)]
    corpus = []
    for chunk in range(_NUM_CHUNKS):
        lines = [" ".join(rng.choice(words) for _ in range(rng.randint(3, 30))) for _ in range(_LINES_PER_CHUNK)]
        lines = ["{}.{} {}".format(chunk, number, line) for number, line in enumerate(lines)]
        with gzip.open(os.path.join(folder, "chunk-{}.txt.gz".format(chunk)), "wb") as file:
            file.write("".join(line + "\n" for line in lines).encode("utf-8"))
        corpus += lines
    return corpus


def _one_epoch(batches: Iterator[List[str]]) -> List[List[str]]:
    # The corpus is a multiple of buffer and read-ahead, so that no batch reaches into the next epoch.
    epoch: List[List[str]] = []
    while sum(map(len, epoch)) < _NUM_LINES:
        epoch.append(next(batches))
    return epoch


def _print_batch(number: int, batch: List[str]) -> None:
    lengths = [len(line) for line in batch]
    print("    {:4d}: {} lines of {} to {} characters".format(number, len(batch), min(lengths), max(lengths)))


@contextlib.contextmanager
def _training(folder: str) -> Iterator[Any]:
    import subprocess

    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])))
    command = [sys.executable, "-m", "infinibatch", "demo", "--train", folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()
