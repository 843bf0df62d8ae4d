"""The command split: files cut into compressed chunks, with a manifest."""

import argparse
import contextlib
import json
import os
import struct
import zlib
from collections import deque
from functools import partial
from itertools import chain, groupby, repeat
from operator import itemgetter
from typing import Any, Callable, Iterator, List, Tuple, TypeVar

from infinibatch import checkpoint
from infinibatch._console import at_least, interrupt_on_signals, num_bytes, progress
from infinibatch.iterators import Checkpoint
from infinibatch.readers import _byte_lines, _split_lines, find_chunks

T = TypeVar("T")

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

_SHUFFLE_MEMORY = 256 << 20  # bytes of lines that are shuffled in memory
_PILE_BITS = 6  # what is larger goes to two to the power of this temporary files, which are open at once

_LEVEL = 6  # of compression, as gzip's own
_PART_SIZE = 1 << 20  # bytes that one thread compresses at a time
_WINDOW_SIZE = 1 << 15  # bytes that deflate looks back
_GZIP_HEADER = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"  # without time and name, so that the same lines give the same file


def add_split(commands: Any) -> None:
    """Add the command split."""
    parser = commands.add_parser(
        "split",
        help="cut files into compressed chunks",
        description=_SPLIT_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("inputs", nargs="+", metavar="INPUT", help="paths, quoted patterns, or - for standard input")
    add("--out", required=True, metavar="DIR", help="the folder to be made")
    sizes = parser.add_mutually_exclusive_group(required=True)
    sizes.add_argument("--lines", type=at_least(1), metavar="N", help="chunks of N lines")
    sizes.add_argument(
        "--bytes", type=num_bytes, metavar="N", help="chunks of at most N bytes (64M: 64 * 1024 * 1024), or one line"
    )
    sizes.add_argument(
        "--chunks", type=at_least(1), metavar="N", help="N chunks whose numbers of lines differ by at most one"
    )
    add("--shuffle", action="store_true", help="put the lines in random order")
    add("--seed", type=int, default=0, metavar="S", help="another number gives another order (%(default)s)")
    add("--plain", action="store_true", help="do not compress the chunks")
    add("--threads", type=at_least(1), metavar="N", help="how many compress; the chunks are the same (one a core)")
    parser.set_defaults(run=_split, parser=parser)


def _split(options: argparse.Namespace) -> int:
    if options.inputs.count("-") > 1:
        options.parser.error("- stands for standard input, which can be read only once")
    interrupt_on_signals()
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
                    with _naming_what_is_written(folder):
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
        suffix = _suffix(paths[0]) + ("" if options.plain else ".gz")
        chunks = _write_chunks(folder, pieces, suffix, 0 if options.plain else options.threads or _num_cores())
        if not chunks:
            raise ValueError("there are no lines in {}".format(", ".join(options.inputs)))
        manifest: Checkpoint = {"num_chunks": len(chunks)}
        for key in ("num_lines", "num_bytes"):
            manifest[key] = sum(chunk[key] for chunk in chunks)
        manifest["chunks"] = chunks
        path = os.path.join(folder, "manifest.json")
        with _naming_what_is_written(path), open(path, "x") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
    print("{num_chunks} chunks: {num_lines} lines, {num_bytes} bytes".format(**manifest))
    return 0


def _num_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))  # those that this process may use
    except AttributeError:
        return os.cpu_count() or 1


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
            with _naming_what_is_written(folder):
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


def _write_chunks(
    folder: str, pieces: Iterator[Tuple[int, List[bytes]]], suffix: str, num_threads: int
) -> List[Checkpoint]:
    """Write the chunks, compressed in threads unless their number is 0, and return what the manifest says of each."""
    parts = _parts(pieces)
    results = _in_threads(_deflated, parts, num_threads) if num_threads else map(_stored, parts)
    chunks = []
    for number, group in groupby(results, itemgetter(0)):
        name = "chunk-{:05d}{}".format(number, suffix)
        path = os.path.join(folder, name)
        num_lines, num_bytes, crc = 0, 0, 0
        with _naming_what_is_written(path), open(path, "xb") as file:
            if num_threads:
                file.write(_GZIP_HEADER)
            for _, lines, data, stored in group:
                num_lines += lines
                num_bytes += len(data)
                crc = zlib.crc32(data, crc)
                file.write(stored)
            if num_threads:
                file.write(struct.pack("<LL", crc & 0xFFFFFFFF, num_bytes & 0xFFFFFFFF))
            file_size = file.tell()
            file.flush()
            os.fsync(file.fileno())
        chunks.append({"name": name, "num_lines": num_lines, "num_bytes": num_bytes, "file_size": file_size})
    return chunks


# Of a chunk: its number, how many lines begin or end here (it only matters that they add up), these bytes, the bytes
# before them that a match may reach back to, and whether they are the last.
_Part = Tuple[int, int, bytes, bytes, bool]


def _parts(pieces: Iterator[Tuple[int, List[bytes]]]) -> Iterator[_Part]:
    """Cut the chunks at the same places however their lines arrive, so that the compressed bytes are the same."""
    for number, group in groupby(pieces, itemgetter(0)):
        window, rest, num_lines = b"", b"", 0
        for _, lines in group:
            data = rest + b"".join(lines)
            num_lines += len(lines)
            begin = 0
            while len(data) - begin > _PART_SIZE:
                part = data[begin : begin + _PART_SIZE]
                yield number, num_lines, part, window, False
                window, num_lines = part[-_WINDOW_SIZE:], 0
                begin += _PART_SIZE
            rest = data[begin:]
        yield number, num_lines, rest, window, True


def _stored(part: _Part) -> Tuple[int, int, bytes, bytes]:
    number, num_lines, data, _, _ = part
    return number, num_lines, data, data


def _deflated(part: _Part) -> Tuple[int, int, bytes, bytes]:
    number, num_lines, data, window, last = part
    # With the window as its dictionary, and flushed to a whole byte, a part continues the one before.
    compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, -15, zdict=window)
    stored = compressor.compress(data) + compressor.flush(zlib.Z_FINISH if last else zlib.Z_SYNC_FLUSH)
    return number, num_lines, data, stored


def _in_threads(function: Callable[[Any], T], arguments: Iterator[Any], num_threads: int) -> Iterator[T]:
    """Yield the results in order, computing them ahead; zlib lets go of the interpreter's lock meanwhile."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(num_threads) as pool:
        futures: Any = deque()
        try:
            for argument in arguments:
                futures.append(pool.submit(function, argument))
                if len(futures) > 2 * num_threads:
                    yield futures.popleft().result()
            while futures:
                yield futures.popleft().result()
        finally:
            for future in futures:
                future.cancel()


@contextlib.contextmanager
def _naming_what_is_written(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:  # write() does not know the name; reading names its own
            raise OSError(error.errno, error.strerror, path) from error
        raise


def _shown(unit: str, runs: Iterator[List[bytes]]) -> Iterator[List[bytes]]:
    """Yield the runs, showing progress."""
    with progress(unit, None, amid_output=True) as advance:
        for run in runs:
            yield run
            advance(len(run))
