"""The commands stream and skip, and the pipeline that bench and plot look at, too."""

import argparse
import contextlib
import json
import os
import sys
import time
from itertools import chain, islice
from typing import Any, Callable, Iterator, List, Optional, Tuple

from infinibatch import checkpoint
from infinibatch._console import at_least, interrupt_on_signals, note, progress, seconds, signals_put_off
from infinibatch.datasets import bump_seed, chunked_dataset_iterator
from infinibatch.iterators import (
    BucketedReadaheadBatchIterator,
    Checkpoint,
    CheckpointableIterator,
    _advance_iterator,
)
from infinibatch.readers import _json_runs, find_chunks, read_csv, read_lines

_STREAM_HELP = """\
Write the lines of a corpus that may be larger than memory to standard output, shuffled: the files in random order,
their lines within a buffer. Files may be gzip, bzip2, xz or zstd; lines are UTF-8.

With --format jsonl, lines are checked to be JSON, and blank ones are passed over. With --format csv, each row becomes
a line: a JSON object, whose keys are the names in the file's first row.

With --batch-size or --max-tokens, lines of similar length are gathered into batches, and a batch is one line of
output: a JSON list of its lines as text, or with --format jsonl or csv of the values.

With --checkpoint, the next run with the same files and options goes on where this one stopped, so that the outputs of
all runs, one behind the other, are those of a single run. The position is saved at the end and at --limit, on Ctrl-C
and SIGTERM, when the reader of a pipe goes, on an error, and every few seconds. After a crash or SIGKILL the next run
repeats what was written since the last of these times. Lines that a pipe had taken and its reader never read count as
written: where it matters, use --limit rather than `| head`. Any number of --workers goes on with it.
"""

_SKIP_HELP = """\
Move a checkpoint that stream wrote: the next run goes on behind N more lines (or batches), which are never written.
Use it to leave out a stretch of data that does harm.

Only a chunk itself tells how many lines it holds. So those that lie in between are read, but nothing is made of their
lines; nothing before the position is read.
"""


# ---------------------------------------------------------------------------------------------------------------------
# The pipeline
# ---------------------------------------------------------------------------------------------------------------------


def add_pipeline_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what is read and how."""
    add = parser.add_argument
    add(
        "files",
        nargs="+",
        metavar="FILES",
        help="paths, or quoted patterns such as 'data-{000..199}.gz' or 'a/**/*.xz'",
    )
    add("--format", choices=sorted(_READERS), default="lines", help="what the files hold (%(default)s)")
    add("--buffer-size", type=at_least(1), default=100000, metavar="N", help="lines shuffled together (%(default)s)")
    add("--seed", type=int, default=0, metavar="S", help="another number gives another order (%(default)s)")
    batches = parser.add_mutually_exclusive_group()
    batches.add_argument("--batch-size", type=at_least(1), metavar="N", help="batches of N lines")
    batches.add_argument(
        "--max-tokens", type=at_least(1), metavar="N", help="batches of at most N words, padding included"
    )
    add("--workers", type=at_least(0), default=0, metavar="N", help="processes that read files (%(default)s)")


def shuffled(
    paths: List[str],
    read: Callable[[str], Any],
    options: argparse.Namespace,
    epochs: int = 1,
    rank: int = 0,
    world: int = 1,
) -> CheckpointableIterator[Any]:
    """Return the items of all files, shuffled as the options say."""
    return chunked_dataset_iterator(
        paths,
        read,
        options.buffer_size,
        seed=options.seed,
        num_instances=world,
        instance_rank=rank,
        num_workers=options.workers,
        num_epochs=epochs or None,
    )


def batched(
    items: CheckpointableIterator[Any], options: argparse.Namespace, count: Callable[[Any], int]
) -> CheckpointableIterator[Any]:
    """Return batches of items with similar numbers of words, or the items themselves if no batches are wanted."""
    if not options.batch_size and not options.max_tokens:
        return items

    def size(longest: Any) -> int:
        return int(options.max_tokens // max(1, count(longest)))

    return BucketedReadaheadBatchIterator(
        items,
        read_ahead=options.buffer_size,
        key=count,
        batch_size=options.batch_size or size,
        seed=bump_seed(options.seed, 2),
    )


def reader(options: argparse.Namespace) -> Callable[[str], Iterator[str]]:
    """Return the function from a file to its items, of which each is one line of text."""
    return _READERS[options.format]


def num_words(line: str) -> int:
    """Return how many words a line has, between white space."""
    return len(line.split())


def _json_lines(path: str) -> Iterator[str]:
    decode = json.JSONDecoder().decode

    def checked(line: str) -> str:
        decode(line)
        return line  # as it is: numbers and escapes need not come back from JSON as they were written

    return chain.from_iterable(_json_runs(path, checked))


def _csv_lines(path: str) -> Iterator[str]:
    return (json.dumps(row, ensure_ascii=False) for row in read_csv(path))


_READERS = {"lines": read_lines, "jsonl": _json_lines, "csv": _csv_lines}


# ---------------------------------------------------------------------------------------------------------------------
# stream
# ---------------------------------------------------------------------------------------------------------------------


def add_stream(commands: Any) -> None:
    """Add the command stream."""
    parser = commands.add_parser(
        "stream",
        help="write the lines of files in random order, and go on after an interruption",
        description=_STREAM_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_pipeline_options(parser)
    add = parser.add_argument
    add("--epochs", type=at_least(0), default=1, metavar="N", help="times to read the corpus; 0: endless (%(default)s)")
    add("--limit", type=at_least(0), metavar="N", help="stop after N lines or batches")
    add("--rank", type=at_least(0), metavar="R", help="write the part of rank R, from 0")
    add("--world", type=at_least(1), metavar="N", help="of N ranks")
    add("--checkpoint", metavar="FILE", help="where to keep the position")
    add("--save-every", type=seconds, default=10, metavar="SECONDS", help="how often to save it (%(default)s)")
    parser.set_defaults(run=_stream, parser=parser)


def _stream(options: argparse.Namespace) -> int:
    if (options.rank is None) != (options.world is None):
        options.parser.error("--rank and --world belong together")
    options.rank, options.world = options.rank or 0, options.world or 1
    if options.rank >= options.world:
        options.parser.error("--rank must be less than --world, got {} of {}".format(options.rank, options.world))

    interrupt_on_signals()
    paths = find_chunks(options.files)
    if 0 < options.epochs * len(paths) <= options.rank:
        text = "rank {0.rank} of {0.world} gets nothing of {1} file(s) in {0.epochs} epoch(s)"
        note(text.format(options, len(paths)))
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(_Writer(paths, options))
        resumed = options.checkpoint is not None and os.path.exists(options.checkpoint)
        if resumed:
            checkpoint.load(writer, options.checkpoint)
        if options.checkpoint is not None:
            checkpoint.save(writer, options.checkpoint)  # before any output: a name that cannot be written shows now
            stack.callback(_save_undisturbed, writer, options.checkpoint)
        advance = stack.enter_context(progress(writer.unit, options.limit))
        last_saved = time.monotonic()
        num_written = 0
        try:
            for number in writer:
                num_written += number
                advance(number)
                if options.checkpoint is not None and time.monotonic() - last_saved >= options.save_every:
                    writer.flush()
                    checkpoint.save(writer, options.checkpoint)
                    last_saved = time.monotonic()
        except KeyboardInterrupt:
            writer.finish_line()
            raise
        if resumed and num_written == 0 and options.limit != 0:
            note("{} stands at the end: nothing is left".format(options.checkpoint))
    return 0


def _save_undisturbed(writer: "_Writer", path: str) -> None:
    with signals_put_off():  # an interrupt here would leave a position that lies before what is written
        checkpoint.save(writer, path)


# What has to be the same in a run that goes on from another one's position.
_SETTINGS = ("format", "buffer_size", "seed", "epochs", "batch_size", "max_tokens", "rank", "world")


def _spelled(name: str, value: Any) -> str:
    option = "--" + name.replace("_", "-")
    return "no " + option if value is None else "{} {}".format(option, value)


def _encode_line(line: str) -> bytes:
    return line.encode("utf-8") + b"\n"


def _encode_batch(batch: List[str]) -> bytes:
    return json.dumps(batch, ensure_ascii=False).encode("utf-8") + b"\n"


def _encode_values(batch: List[str]) -> bytes:
    return "[{}]\n".format(", ".join(batch)).encode("utf-8")


class _Writer(CheckpointableIterator[int]):
    """Write items to standard output; each step writes a block of them and yields their number.

    The state is behind the last item that is out as a whole, whatever interrupts the writing and wherever. So the
    position is kept in one attribute, which a signal finds either old or new: the source's state before the block,
    the number of items before it, the block's bytes, and how many of them each `os.write` took.

    Args:
        paths: The files.
        options: Those of the pipeline, `limit` (items to write until the end; None: all) and `_SETTINGS`.
    """

    def __init__(self, paths: List[str], options: argparse.Namespace) -> None:
        in_batches = options.batch_size or options.max_tokens
        items = shuffled(paths, reader(options), options, options.epochs, options.rank, options.world)
        self._source_iterator = batched(items, options, num_words)
        self._encode: Callable[[Any], bytes] = _encode_line
        if in_batches:
            self._encode = _encode_batch if options.format == "lines" else _encode_values
        self.unit = "batches" if in_batches else "lines"
        self._block_size = 8 if in_batches else 500
        self._limit: Optional[int] = options.limit
        self._settings = {name: getattr(options, name) for name in _SETTINGS}
        # For skip, from whatever folder; not compared, since files may be moved.
        self._files = [name if "://" in name else os.path.abspath(name) for name in options.files]
        self._descriptor = sys.stdout.fileno()
        self.setstate(None)

    def getstate(self) -> Checkpoint:
        source_state, num_before, data, written = self._position
        num_out = data.count(b"\n", 0, sum(written))
        return {
            "settings": self._settings,
            "files": self._files,
            "num_written": num_before + num_out,
            "source_state": source_state,
            "num_after": num_out,
        }

    def setstate(self, checkpoint: Optional[Checkpoint]) -> None:
        num_before, num_after, source_state = 0, 0, None
        if checkpoint is not None:
            try:
                settings, num_before = checkpoint["settings"], checkpoint["num_written"]
                source_state, num_after = checkpoint["source_state"], checkpoint["num_after"]
            except (KeyError, TypeError):
                raise ValueError("not a checkpoint of the command stream") from None
            for name, value in self._settings.items():
                if settings.get(name) != value:
                    raise ValueError(
                        "it belongs to a run with {}, this one has {}; give the same options, or another file".format(
                            _spelled(name, settings.get(name)), _spelled(name, value)
                        )
                    )
        self._source_iterator.setstate(source_state)
        _advance_iterator(self._source_iterator, num_after)
        self._position: Tuple[Any, int, bytes, List[int]] = (self._source_iterator.getstate(), num_before, b"", [])
        self._num_left = self._limit

    def __next__(self) -> int:
        source_state, num_before = self._source_iterator.getstate(), self.getstate()["num_written"]
        number = self._block_size if self._num_left is None else min(self._block_size, self._num_left)
        items: List[Any] = []
        try:
            items.extend(islice(self._source_iterator, number))
        except Exception:
            if not items:
                raise
            # What came before the error is written first; the next step meets the error again.
        if not items:
            raise StopIteration
        data = b"".join(map(self._encode, items))
        self._position = (source_state, num_before, data, [])
        self._write(len(data))
        if self._num_left is not None:
            self._num_left -= len(items)
        return len(items)

    def _write(self, end: int) -> None:
        _, _, data, written = self._position
        while sum(written) < end:
            # All in C: no signal can be handled between the writing and the noting of what was written.
            written.extend(map(os.write, [self._descriptor], [data[sum(written) : end]]))

    def finish_line(self) -> None:
        """Write the rest of a line that an interruption has cut in two."""
        _, _, data, written = self._position
        if sum(written):
            with contextlib.suppress(BrokenPipeError):
                self._write(data.find(b"\n", sum(written) - 1) + 1)

    def flush(self) -> None:
        """Bring what was written to disk, as far as it is a file."""
        with contextlib.suppress(OSError):
            os.fsync(self._descriptor)

    @property
    def num_written(self) -> int:
        """How many items are behind this position."""
        return int(self.getstate()["num_written"])

    def pass_over(self, number: int, advance: Callable[[int], None]) -> None:
        """Go on behind so many items without writing them, or raise if there are not as many."""
        num_before = self.num_written
        left = number
        while left:
            passed = self._source_iterator._skip(min(left, 10000))
            if not passed:
                raise ValueError("only {:,} {} are left, not {:,}".format(number - left, self.unit, number))
            left -= passed
            advance(passed)
        self._position = (self._source_iterator.getstate(), num_before + number, b"", [])


# ---------------------------------------------------------------------------------------------------------------------
# skip
# ---------------------------------------------------------------------------------------------------------------------


def add_skip(commands: Any) -> None:
    """Add the command skip."""
    parser = commands.add_parser(
        "skip",
        help="move a checkpoint of stream on, past lines or batches that are not wanted",
        description=_SKIP_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a file written by stream; it is replaced")
    parser.add_argument("number", type=at_least(0), metavar="N", help="how many lines (or batches) to leave out")
    parser.add_argument("files", nargs="*", metavar="FILES", help="where the files are now, if they were moved")
    parser.set_defaults(run=_skip)


def _skip(options: argparse.Namespace) -> int:
    interrupt_on_signals()
    state = checkpoint.read(options.checkpoint)
    try:
        settings = {name: state["settings"][name] for name in _SETTINGS}
        files = options.files or state["files"]
    except (KeyError, TypeError):
        raise ValueError(
            "{}: not a checkpoint of the command stream, which alone tells from which files it comes; in a program, "
            "load it and call next()".format(options.checkpoint)
        ) from None
    with _Writer(find_chunks(files), argparse.Namespace(files=files, workers=0, limit=None, **settings)) as writer:
        checkpoint.load(writer, options.checkpoint)
        with progress(writer.unit, options.number, amid_output=True) as advance:
            writer.pass_over(options.number, advance)
        checkpoint.save(writer, options.checkpoint)
        print("passed over {:,} {}, {:,} since the start".format(options.number, writer.unit, writer.num_written))
    return 0
