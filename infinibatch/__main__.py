"""The command line: `python -m infinibatch COMMAND`; `--help` behind a command tells what it does."""

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from functools import partial
from itertools import chain, groupby, islice, repeat
from operator import itemgetter
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

from infinibatch import checkpoint
from infinibatch.datasets import bump_seed, chunked_dataset_iterator
from infinibatch.iterators import (
    BlockwiseShuffleIterator,
    BucketedReadaheadBatchIterator,
    Checkpoint,
    CheckpointableIterator,
    InfinitePermutationSourceIterator,
    MapIterator,
    NativeCheckpointableIterator,
    SelectManyIterator,
    ZipIterator,
    _advance_iterator,
)
from infinibatch.readers import _byte_lines, _split_lines, find_chunks, read_lines

_STREAM_HELP = """\
Write the lines of a corpus that may be larger than memory to standard output, shuffled: the files in random order,
their lines within a buffer. Files may be gzip, bzip2, xz or zstd; lines are UTF-8.

With --batch-size or --max-tokens, lines of similar length are gathered into batches, and a batch is one line of
output: a JSON list of its lines.

With --checkpoint, the next run with the same files and options goes on where this one stopped, so that the outputs of
all runs, one behind the other, are those of a single run. The position is saved at the end and at --limit, on Ctrl-C
and SIGTERM, when the reader of a pipe goes, on an error, and every few seconds. After a crash or SIGKILL the next run
repeats what was written since the last of these times. Lines that a pipe had taken and its reader never read count as
written: where it matters, use --limit rather than `| head`.
"""


_SPLIT_HELP = """\
Cut the lines of files, or of standard input, into chunk-00000.txt.gz, chunk-00001.txt.gz and so on: files of which one
fits into memory. The inputs may be gzip, bzip2, xz or zstd, and are taken one behind the other, in the order given. The
chunks hold their bytes unchanged; only where an input without a newline at its end is followed by another, one is
added. manifest.json lists the chunks with their lines, bytes and size on disk. The same inputs and options give the
same files.

With --shuffle, the lines are in random order, every order being equally likely, however large the corpus is: what does
not fit into memory waits in temporary files beside DIR, which need as much room as the lines.

DIR must be new, or empty. It appears only when all is done: until then, everything is in a hidden folder beside it,
.DIR.incomplete, which an interrupted run removes. If a run is killed, that folder stays, and the next run to the same
DIR starts anew in its place.
"""


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run one command and return its exit status.

    Args:
        argv: The arguments behind the program's name; None: those of this process.
    """
    options = _parser().parse_args(argv)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt as interrupt:
        return 128 + (interrupt.args[0] if interrupt.args else signal.SIGINT)
    except BrokenPipeError:
        # What the interpreter flushes when it ends must not fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13  # as a shell reports SIGPIPE
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        _note("error: {}".format(error))
        return int(options.error_status)


def _note(message: str) -> None:
    print("infinibatch: " + " ".join(message.split("\n")), file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m infinibatch", description="Checkpointable iterators over data sets larger than memory."
    )
    parser.set_defaults(error_status=1)
    commands = parser.add_subparsers(metavar="COMMAND", dest="command")
    commands.required = True

    stream = commands.add_parser(
        "stream",
        help="write the lines of files in random order, and go on after an interruption",
        description=_STREAM_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = stream.add_argument
    add(
        "files",
        nargs="+",
        metavar="FILES",
        help="paths, or quoted patterns such as 'data-{000..199}.gz' or 'a/**/*.xz'",
    )
    add("--buffer-size", type=_at_least(1), default=100000, metavar="N", help="lines shuffled together (%(default)s)")
    add("--seed", type=int, default=0, metavar="S", help="another number gives another order (%(default)s)")
    add(
        "--epochs", type=_at_least(0), default=1, metavar="N", help="times to read the corpus; 0: endless (%(default)s)"
    )
    add("--limit", type=_at_least(0), metavar="N", help="stop after N lines or batches")
    batches = stream.add_mutually_exclusive_group()
    batches.add_argument("--batch-size", type=_at_least(1), metavar="N", help="batches of N lines")
    batches.add_argument(
        "--max-tokens", type=_at_least(1), metavar="N", help="batches whose longest line times their size is N words"
    )
    add("--rank", type=_at_least(0), metavar="R", help="write the part of rank R, from 0")
    add("--world", type=_at_least(1), metavar="N", help="of N ranks")
    add("--checkpoint", metavar="FILE", help="where to keep the position")
    add("--save-every", type=_seconds, default=10, metavar="SECONDS", help="how often to save it (%(default)s)")
    stream.set_defaults(run=_stream, parser=stream)

    show = commands.add_parser("show", help="tell where each stage of a checkpoint stands")
    show.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a file written by stream or infinibatch.checkpoint.save"
    )
    show.set_defaults(run=_show)

    diff = commands.add_parser(
        "diff",
        help="tell in which stages two checkpoints differ",
        description="Tell in which stages two checkpoints differ. The exit status is 0 if they are the same, 1 if they "
        "differ, 2 if one cannot be read.",
    )
    diff.add_argument("first", metavar="A", help="a checkpoint, as for show")
    diff.add_argument("second", metavar="B", help="another one")
    diff.set_defaults(run=_diff, error_status=2)

    split = commands.add_parser(
        "split",
        help="cut files into compressed chunks",
        description=_SPLIT_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = split.add_argument
    add("inputs", nargs="+", metavar="INPUT", help="paths, quoted patterns, or - for standard input")
    add("--out", required=True, metavar="DIR", help="the folder to be made")
    sizes = split.add_mutually_exclusive_group(required=True)
    sizes.add_argument("--lines", type=_at_least(1), metavar="N", help="chunks of N lines")
    sizes.add_argument(
        "--bytes", type=_num_bytes, metavar="N", help="chunks of at most N bytes (64M: 64 * 1024 * 1024), or one line"
    )
    sizes.add_argument(
        "--chunks", type=_at_least(1), metavar="N", help="N chunks whose numbers of lines differ by at most one"
    )
    add("--shuffle", action="store_true", help="put the lines in random order")
    add("--seed", type=int, default=0, metavar="S", help="another number gives another order (%(default)s)")
    add("--plain", action="store_true", help="do not compress the chunks")
    split.set_defaults(run=_split, parser=split)

    demo = commands.add_parser("demo", help="watch a pipeline being killed and resumed on a small corpus")
    demo.add_argument("--train", metavar="FOLDER", help=argparse.SUPPRESS)
    demo.set_defaults(run=_demo)
    return parser


def _at_least(minimum: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError("must be an integer, got {!r}".format(text)) from None
        if value < minimum:
            raise argparse.ArgumentTypeError("must be at least {}, got {}".format(minimum, value))
        return value

    return number


def _num_bytes(text: str) -> int:
    unit = text[-1:].upper()
    if unit in ("K", "M", "G", "T"):
        return _at_least(1)(text[:-1]) << 10 * ("KMGT".index(unit) + 1)
    return _at_least(1)(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError("must be a number, got {!r}".format(text)) from None
    if not value >= 0:
        raise argparse.ArgumentTypeError("must be at least 0, got {}".format(text))
    return value


# ---------------------------------------------------------------------------------------------------------------------
# show
# ---------------------------------------------------------------------------------------------------------------------


def _show(options: argparse.Namespace) -> int:
    print(checkpoint.show(options.checkpoint))
    return 0


# ---------------------------------------------------------------------------------------------------------------------
# diff
# ---------------------------------------------------------------------------------------------------------------------


def _diff(options: argparse.Namespace) -> int:
    differences = checkpoint.diff(options.first, options.second)
    if differences:
        print(differences)
    return 1 if differences else 0


# ---------------------------------------------------------------------------------------------------------------------
# stream
# ---------------------------------------------------------------------------------------------------------------------


def _stream(options: argparse.Namespace) -> int:
    rank, world = options.rank or 0, options.world or 1
    if (options.rank is None) != (options.world is None):
        options.parser.error("--rank and --world belong together")
    if rank >= world:
        options.parser.error("--rank must be less than --world, got {} of {}".format(rank, world))

    _interrupt_on_signals()
    paths = find_chunks(options.files)
    lines = _shuffled_lines(paths, options.buffer_size, options.seed, options.epochs, rank, world)
    batched = options.batch_size or options.max_tokens
    writer = _Writer(
        _batches(lines, options) if batched else lines,
        encode=_encode_batch if batched else _encode_line,
        block_size=8 if batched else 500,
        limit=options.limit,
        settings={
            "buffer_size": options.buffer_size,
            "seed": options.seed,
            "epochs": options.epochs,
            "batch_size": options.batch_size,
            "max_tokens": options.max_tokens,
            "rank": rank,
            "world": world,
        },
    )
    resumed = options.checkpoint is not None and os.path.exists(options.checkpoint)
    if resumed:
        checkpoint.load(writer, options.checkpoint)
    if 0 < options.epochs * len(paths) <= rank:
        _note("rank {} of {} gets nothing of {} file(s) in {} epoch(s)".format(rank, world, len(paths), options.epochs))

    with contextlib.ExitStack() as stack:
        if options.checkpoint is not None:
            checkpoint.save(writer, options.checkpoint)  # before any output: a name that cannot be written shows now
            stack.callback(checkpoint.save, writer, options.checkpoint)
        advance = stack.enter_context(_progress("batches" if batched else "lines", options.limit))
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
            _note("{} stands at the end: nothing is left".format(options.checkpoint))
    return 0


def _interrupt_on_signals() -> None:
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:  # under nohup it is not
            signal.signal(number, _interrupt)


def _interrupt(signum: int, frame: Any) -> None:
    raise KeyboardInterrupt(signum)


def _shuffled_lines(
    paths: List[str], buffer_size: int, seed: int, epochs: int, rank: int, world: int
) -> CheckpointableIterator[str]:
    """Return what `chunked_dataset_iterator` reads, ending behind a number of epochs if that is not 0."""
    source = InfinitePermutationSourceIterator(paths, seed=seed, num_instances=world, instance_rank=rank)
    chunks: CheckpointableIterator[str] = source
    if epochs:
        share = NativeCheckpointableIterator(range(rank, epochs * len(paths), world))
        chunks = MapIterator(ZipIterator(share, source), itemgetter(1))
    return BlockwiseShuffleIterator(SelectManyIterator(chunks, read_lines), buffer_size, bump_seed(seed))


def _batches(lines: CheckpointableIterator[str], options: argparse.Namespace) -> CheckpointableIterator[List[str]]:
    def size(longest: str) -> int:
        return int(options.max_tokens // max(1, _num_words(longest)))

    return BucketedReadaheadBatchIterator(
        lines,
        read_ahead=options.buffer_size,
        key=_num_words,
        batch_size=options.batch_size or size,
        seed=bump_seed(options.seed, 2),
    )


def _num_words(line: str) -> int:
    return len(line.split())


def _encode_line(line: str) -> bytes:
    return line.encode("utf-8") + b"\n"


def _encode_batch(batch: List[str]) -> bytes:
    return json.dumps(batch, ensure_ascii=False).encode("utf-8") + b"\n"


def _spelled(name: str, value: Any) -> str:
    option = "--" + name.replace("_", "-")
    return "no " + option if value is None else "{} {}".format(option, value)


class _Writer(CheckpointableIterator[int]):
    """Write items to standard output; each step writes a block of them and yields their number.

    The state is behind the last item that is out as a whole, whatever interrupts the writing and wherever. So the
    position is kept in one attribute, which a signal finds either old or new: the source's state before the block,
    the number of items before it, the block's bytes, and how many of them each `os.write` took.

    Args:
        source: The items.
        encode: Makes the bytes of an item, which end with their only newline.
        block_size: Items written at once.
        limit: Items to write until the end; None: all.
        settings: What has to be the same in a run that goes on from this one's state.
    """

    def __init__(
        self,
        source: CheckpointableIterator[Any],
        encode: Callable[[Any], bytes],
        block_size: int,
        limit: Optional[int],
        settings: Checkpoint,
    ) -> None:
        self._source_iterator = source
        self._encode = encode
        self._block_size = block_size
        self._limit = limit
        self._settings = settings
        self._descriptor = sys.stdout.fileno()
        self.setstate(None)

    def getstate(self) -> Checkpoint:
        source_state, num_before, data, written = self._position
        num_out = data.count(b"\n", 0, sum(written))
        return {
            "settings": self._settings,
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


@contextlib.contextmanager
def _progress(unit: str, total: Optional[int], amid_output: bool = False) -> Iterator[Callable[[int], None]]:
    """Give a function to report progress to; it is shown if there is a terminal that the output does not go to."""
    if not sys.stderr.isatty() or sys.stdout.isatty() and not amid_output:
        yield lambda number: None
        return
    import importlib

    try:
        bar = importlib.import_module("tqdm").tqdm(total=total, unit=" " + unit, unit_scale=True, file=sys.stderr)
    except ImportError:
        bar = _PlainProgress(unit)
    try:
        yield bar.update
    finally:
        bar.close()


class _PlainProgress:
    """What is used of `tqdm.tqdm`, on one plain line."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._number = 0
        self._started = self._shown = time.monotonic()

    def update(self, number: int) -> None:
        self._number += number
        if time.monotonic() - self._shown >= 0.5:
            self._show("")

    def close(self) -> None:
        self._show("\n")

    def _show(self, end: str) -> None:
        self._shown = time.monotonic()
        rate = self._number / max(self._shown - self._started, 1e-3)
        sys.stderr.write("\r{:,} {}, {:,.0f}/s {}".format(self._number, self._unit, rate, end))
        sys.stderr.flush()


# ---------------------------------------------------------------------------------------------------------------------
# split
# ---------------------------------------------------------------------------------------------------------------------

_SHUFFLE_MEMORY = 256 << 20  # bytes of lines that are shuffled in memory
_PILE_BITS = 6  # what is larger goes to two to the power of this temporary files, which are open at once


def _split(options: argparse.Namespace) -> int:
    if options.inputs.count("-") > 1:
        options.parser.error("- stands for standard input, which can be read only once")
    _interrupt_on_signals()
    paths: List[str] = []
    for name in options.inputs:
        paths += [name] if name == "-" else find_chunks(name)

    with _new_folder(options.out) as folder, contextlib.ExitStack() as stack:
        read = partial(_joined_lines, paths, options.shuffle)
        sizes: Iterator[int] = repeat(options.lines)
        if options.chunks:
            if not all(map(os.path.isfile, paths)):  # what comes through a pipe does not come twice
                pile = stack.enter_context(_pile(folder))
                for run in read():
                    pile.writelines(run)
                read = partial(_lines_of_pile, pile)
            num_lines = sum(map(len, _shown("lines counted", read())))
            if num_lines < options.chunks:
                raise ValueError(
                    "--chunks must be at most the number of lines, {}, got {}".format(num_lines, options.chunks)
                )
            size, num_longer = divmod(num_lines, options.chunks)
            sizes = chain(repeat(size + 1, num_longer), repeat(size))
        runs = _shown("lines read", read())
        if options.shuffle:
            import random

            runs = _shown("lines written", _shuffled_runs(runs, random.Random(options.seed), folder))
        pieces = _cut_by_bytes(runs, options.bytes) if options.bytes else _cut_by_number(runs, sizes)
        chunks = _write_chunks(folder, pieces, _suffix(paths[0]) + ("" if options.plain else ".gz"), options.plain)
        if not chunks:
            raise ValueError("there are no lines in {}".format(", ".join(options.inputs)))
        manifest: Checkpoint = {"num_chunks": len(chunks)}
        for key in ("num_lines", "num_bytes"):
            manifest[key] = sum(chunk[key] for chunk in chunks)
        manifest["chunks"] = chunks
        with open(os.path.join(folder, "manifest.json"), "x") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
    print("{num_chunks} chunks with {num_lines} lines of {num_bytes} bytes".format(**manifest))
    return 0


@contextlib.contextmanager
def _new_folder(path: str) -> Iterator[str]:
    """Give a hidden folder, which takes the given name in the end, or goes if anything fails."""
    path = os.path.realpath(path)
    folder = os.path.join(os.path.dirname(path), ".{}.incomplete".format(os.path.basename(path)))
    if os.path.lexists(path) and (not os.path.isdir(path) or os.listdir(path)):
        raise ValueError("--out must be a new or an empty folder, got {}".format(path))
    if os.path.ismount(path) or path == os.path.realpath(os.curdir):
        raise ValueError("--out must be a folder that can be replaced, not a mount or the current one: {}".format(path))
    os.makedirs(folder, exist_ok=True)
    with _alone_in(folder):
        try:
            _remove_files(folder)  # of a run that was killed
            yield folder
            checkpoint._flush_folder(folder)
            if os.path.isdir(path):
                os.rmdir(path)
            os.rename(folder, path)
        except BaseException:
            with contextlib.suppress(OSError):
                _remove_files(folder)
                os.rmdir(folder)
            raise
        checkpoint._flush_folder(os.path.dirname(path))


def _remove_files(folder: str) -> None:
    for name in os.listdir(folder):
        os.remove(os.path.join(folder, name))


@contextlib.contextmanager
def _alone_in(folder: str) -> Iterator[None]:
    """Let no second run work in the same folder. What guards it ends with the process, however that ends."""
    try:
        import fcntl
    except ImportError:  # Windows, where two runs at once are not noticed
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError("another run is at work in {}".format(folder)) from None
        if not os.path.samestat(os.fstat(descriptor), os.stat(folder)):  # it has been renamed since
            raise ValueError("another run was at work in {}".format(folder))
        yield
    finally:
        os.close(descriptor)


def _joined_lines(paths: List[str], close_last: bool) -> Iterator[List[bytes]]:
    """Yield the lines of all files, in runs; no two lines grow together where a file lacks its last newline."""
    unfinished = b""
    for path in paths:
        for run in _byte_lines(path):
            if unfinished:
                yield [unfinished + b"\n"]
                unfinished = b""
            if not run[-1].endswith(b"\n"):
                unfinished = run.pop()
            if run:
                yield run
    if unfinished:
        yield [unfinished + b"\n" if close_last else unfinished]


def _pile(folder: str) -> Any:
    """Return a temporary file, which is gone when the process is."""
    import tempfile

    return tempfile.TemporaryFile(dir=folder)


def _lines_of_pile(pile: Any) -> Iterator[List[bytes]]:
    pile.seek(0)
    return _split_lines(iter(lambda: pile.read(1 << 20), b""))


def _shuffled_runs(runs: Iterator[List[bytes]], rng: Any, folder: str) -> Iterator[List[bytes]]:
    """Yield all lines, in an order of which each is equally likely."""
    lines: List[bytes] = []
    size = 0
    for run in runs:
        lines += run
        size += sum(map(len, run)) + 50 * len(run)
        if size > _SHUFFLE_MEMORY and len(lines) > 1:
            break
    else:
        rng.shuffle(lines)
        yield from (lines[begin : begin + 10000] for begin in range(0, len(lines), 10000))
        return
    # Each line goes to a pile drawn at random, and then each pile is shuffled, in the same way.
    with contextlib.ExitStack() as stack:
        piles = [stack.enter_context(_pile(folder)) for _ in range(1 << _PILE_BITS)]
        while lines:
            shares: List[List[bytes]] = [[] for _ in piles]
            for line in lines:
                shares[rng.getrandbits(_PILE_BITS)].append(line)
            for pile, share in zip(piles, shares):
                pile.writelines(share)
            lines = next(runs, [])
        for pile in piles:
            yield from _shuffled_runs(_lines_of_pile(pile), rng, folder)
            pile.close()


def _cut_by_number(runs: Iterator[List[bytes]], sizes: Iterator[int]) -> Iterator[Tuple[int, List[bytes]]]:
    """Yield runs of lines behind the number of their chunk."""
    number, left = -1, 0
    for run in runs:
        begin = 0
        while begin < len(run):
            if not left:
                number, left = number + 1, next(sizes)
            end = min(begin + left, len(run))
            yield number, run[begin:end]
            left -= end - begin
            begin = end


def _cut_by_bytes(runs: Iterator[List[bytes]], limit: int) -> Iterator[Tuple[int, List[bytes]]]:
    number, size = 0, 0
    for run in runs:
        begin = 0
        for i, line in enumerate(run):
            if size and size + len(line) > limit:
                if begin < i:
                    yield number, run[begin:i]
                number, size, begin = number + 1, 0, i
            size += len(line)
        yield number, run[begin:]


def _suffix(path: str) -> str:
    base, suffix = os.path.splitext(path)
    if suffix in (".gz", ".bz2", ".xz", ".zst"):
        suffix = os.path.splitext(base)[1]
    return suffix or ".txt"


def _write_chunks(folder: str, pieces: Iterator[Tuple[int, List[bytes]]], suffix: str, plain: bool) -> List[Checkpoint]:
    """Write the chunks, and return what the manifest says of each."""
    import zlib

    chunks = []
    for number, group in groupby(pieces, itemgetter(0)):
        name = "chunk-{:05d}{}".format(number, suffix)
        num_lines, num_bytes = 0, 0
        # In the layout of gzip, but without time and name, so that the same lines give the same file.
        compressor = None if plain else zlib.compressobj(6, zlib.DEFLATED, 31)
        with open(os.path.join(folder, name), "xb") as file:
            for _, lines in group:
                data = b"".join(lines)
                num_lines += len(lines)
                num_bytes += len(data)
                file.write(data if compressor is None else compressor.compress(data))
            if compressor is not None:
                file.write(compressor.flush())
            file_size = file.tell()
            file.flush()
            os.fsync(file.fileno())
        chunks.append({"name": name, "num_lines": num_lines, "num_bytes": num_bytes, "file_size": file_size})
    return chunks


def _shown(unit: str, runs: Iterator[List[bytes]]) -> Iterator[List[bytes]]:
    """Yield the runs, showing progress."""
    with _progress(unit, None, amid_output=True) as advance:
        for run in runs:
            yield run
            advance(len(run))


# ---------------------------------------------------------------------------------------------------------------------
# demo
# ---------------------------------------------------------------------------------------------------------------------

_NUM_CHUNKS = 20
_LINES_PER_CHUNK = 250
_NUM_LINES = _NUM_CHUNKS * _LINES_PER_CHUNK
_KILL_AFTER = 137  # batches; not where a checkpoint is written


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


if __name__ == "__main__":
    sys.exit(main())
