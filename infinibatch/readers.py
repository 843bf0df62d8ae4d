"""Functions from a chunk reference to the chunk's items, for ``read_chunk_fn``, and the finding of chunks.

A chunk reference is a path, or where the package ``fsspec`` is installed a URL of any kind that it knows, such as
``s3://bucket/chunk.gz``. Compression is recognised by a file's first bytes, never by its name. Two kinds of error
come out of a reader: what cannot be reached or read is an ``OSError`` (``FileNotFoundError``, ``PermissionError``, …),
what was read and is wrong (damaged, cut off, in another encoding) is a ``ValueError``. Both name the file, and the
items before the damage are delivered first.
"""

import codecs
import errno
import glob
import io
import json
import mmap
import operator
import os
import re
import stat
import struct
import zlib
from array import array
from bisect import bisect_right
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import accumulate, chain, islice
from time import perf_counter
from typing import (
    IO,
    Any,
    Callable,
    Dict,
    Generator,
    Iterable,
    Iterator,
    List,
    NoReturn,
    Optional,
    Sequence,
    Set,
    Tuple,
    TypeVar,
    Union,
    overload,
)

__all__ = [
    "MappedLines",
    "find_chunks",
    "read_arrow",
    "read_csv",
    "read_jsonl",
    "read_lines",
    "read_parquet",
    "read_tar",
    "skip_errors",
]

R = TypeVar("R")
T = TypeVar("T")

_Path = Union[str, "os.PathLike[str]"]

_BLOCK_SIZE = 1 << 18  # decompressed bytes held at a time
_PIECE_SIZE = 1 << 17  # compressed bytes read at a time

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"([0-9]+)\.\.([0-9]+)")


# ---------------------------------------------------------------------------------------------------------------------
# Finding chunks
# ---------------------------------------------------------------------------------------------------------------------


def find_chunks(pattern: Union[_Path, Sequence[_Path]]) -> List[str]:
    """Find the files that one or several patterns describe, in natural order: chunk 2 before chunk 10.

    A pattern is a path with the wildcards of ``glob`` (``*``, ``?``, ``[0-9]``, and ``**`` for any depth of folders)
    and with braces: ``{000..199}`` counts, keeping the leading zeros, ``{train,extra}`` lists. A name that the braces
    spell out without a wildcard has to exist, so that a missing chunk is noticed here and not by fewer data. A path
    that exists as it is written is taken so. Folders are left out, and a file that several patterns match comes once.

    With the package ``fsspec``, patterns may be URLs (``s3://bucket/part-{00..99}.gz``, ``memory://*.txt``), in which
    the same holds for braces and wildcards.

    Cost: the folders are listed once; one look at the disk (or one request) for each file.

    Args:
        pattern: A path, URL or pattern (str or ``PathLike``), or a list of them.

    Returns:
        The paths, at least one; the order does not depend on the file system or on the order of the patterns.

    Raises:
        FileNotFoundError: Nothing matches a pattern, or a name that braces spell out is missing.
        TypeError: ``pattern`` is neither a path nor a list of paths.
        ValueError: ``pattern`` is an empty list, or a URL of an unknown kind.
        ImportError: A pattern is a URL, and ``fsspec``, or what it needs for this kind, is not installed.
        OSError: A server cannot be reached.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in ["part-10.txt", "part-2.txt", "part-1.txt"]:
    ...         open(os.path.join(folder, name), "w").close()
    ...     [os.path.basename(path) for path in find_chunks(os.path.join(folder, "part-*.txt"))]
    ['part-1.txt', 'part-2.txt', 'part-10.txt']
    """
    patterns = [pattern] if isinstance(pattern, (str, os.PathLike)) else pattern
    if not isinstance(patterns, (list, tuple)) or not all(isinstance(one, (str, os.PathLike)) for one in patterns):
        raise TypeError("pattern must be a path (str or PathLike) or a list of paths, got {!r}".format(pattern))
    if not patterns:
        raise ValueError("pattern must hold at least one path, got {!r}".format(pattern))
    found: Set[str] = set()
    for one in patterns:
        found.update(_matches(os.fspath(one)))
    return sorted(found, key=_natural)


def _matches(pattern: str) -> List[str]:
    files = _Remote(pattern) if _is_remote(pattern) else _Local()
    if files.exists(pattern):
        names = [pattern]
    else:
        names = []
        for spelled in _expand_braces(pattern):
            if glob.escape(spelled) != spelled:
                names += files.glob(spelled)
            elif files.exists(spelled):
                names.append(spelled)
            else:
                origin = "" if spelled == pattern else " (of the pattern {!r})".format(pattern)
                raise FileNotFoundError("no such file: {!r}{}".format(spelled, origin))
    found = [name for name in names if not files.isdir(name)]
    if not found:
        raise FileNotFoundError("no file matches the pattern {!r}".format(pattern))
    return found


def _expand_braces(pattern: str) -> Iterator[str]:
    """Yield what the braces spell out, one by one: `{0..999999999}` is noticed at the first file that is missing."""
    for braces in _BRACES.finditer(pattern):  # the innermost ones; those around them follow by recursion
        content = braces.group(1)
        span = _RANGE.fullmatch(content)
        if span:
            ends = span.groups()
            padded = any(len(end) > 1 and end.startswith("0") for end in ends)
            width = max(map(len, ends)) if padded else 1
            first, last = sorted(map(int, ends))
            options: Iterable[str] = ("{:0{}d}".format(number, width) for number in range(first, last + 1))
        elif "," in content:
            options = content.split(",")
        else:
            continue
        before, after = pattern[: braces.start()], pattern[braces.end() :]
        for option in options:
            yield from _expand_braces(before + option + after)
        return
    yield pattern


class _Local:
    """Where files are looked for."""

    exists = staticmethod(os.path.exists)
    isdir = staticmethod(os.path.isdir)

    def glob(self, pattern: str) -> List[str]:
        return glob.glob(pattern, recursive=True)


class _Remote:
    """The same, by a package that knows the protocol of a URL."""

    def __init__(self, url: str) -> None:
        with _reaching(url):
            self._system, _ = _import_fsspec().core.url_to_fs(url)
        self._protocol = url[: url.index("://") + 3]

    def exists(self, url: str) -> bool:
        with _reaching(url):
            return bool(self._system.exists(url))

    def isdir(self, url: str) -> bool:
        with _reaching(url):
            return bool(self._system.isdir(url))

    def glob(self, pattern: str) -> List[str]:
        if "::" in pattern:
            raise ValueError("wildcards need a URL of one protocol, got {!r}".format(pattern))
        with _reaching(pattern):
            names = self._system.glob(pattern)
        # Most systems leave the protocol out.
        return [name if "://" in name else self._protocol + name for name in names]


def _natural(path: str) -> Tuple[List[Union[int, str]], str]:
    # Splitting at a group gives texts at even and digits at odd places, so that equal places always compare.
    parts: List[Union[int, str]] = list(re.split("([0-9]+)", path))
    parts[1::2] = map(int, parts[1::2])
    return parts, path


# ---------------------------------------------------------------------------------------------------------------------
# Skipping what is damaged
# ---------------------------------------------------------------------------------------------------------------------


def skip_errors(
    read_chunk_fn: Callable[[R], Iterable[T]], log: Optional[Callable[[str], Any]] = None
) -> Callable[[R], Iterable[T]]:
    """Make a reader that goes on with the next chunk where a chunk is damaged.

    The items before the damage are delivered, then the chunk ends there, and ``log`` gets a text that says which chunk
    it is, how many items came before the damage, and the error. The result is deterministic as long as the chunk is,
    so that a checkpoint from before or behind the damage restores exactly. A chunk that is missing or cannot be opened
    counts as damaged, too.

    What says nothing of the chunk is not skipped: ``KeyboardInterrupt`` and ``SystemExit``, ``MemoryError``,
    ``ImportError``, ``NameError``, ``StopIteration``, and that the process or the system has no more files or memory.

    Cost: some nanoseconds an item. Items are asked for ahead of the consumer, one at first, then as many as the reader
    gives in a millisecond, up to 1000.

    Args:
        read_chunk_fn: Any function from a chunk reference to the chunk's items.
        log: A function that takes a text, such as ``print``; None: the warnings of the logger ``infinibatch.readers``.

    Returns:
        A function like ``read_chunk_fn``; it can be pickled if that and ``log`` can be.

    Raises:
        TypeError: ``read_chunk_fn`` or ``log`` is not callable.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "chunk.jsonl")
    ...     with open(path, "w") as file:
    ...         _ = file.write('{"a": 1}\\n{"a": 2\\n{"a": 3}\\n')
    ...     reports = []
    ...     list(skip_errors(read_jsonl, log=reports.append)(path))
    [{'a': 1}]
    >>> print(reports[0].replace(folder, "folder"))
    folder/chunk.jsonl: skipped from item 1 on, ValueError: folder/chunk.jsonl, line 2: not JSON: ...
    """
    for name, value in (("read_chunk_fn", read_chunk_fn), ("log", log)):
        if not callable(value) and (name, value) != ("log", None):
            raise TypeError("{} must be callable, got {!r}".format(name, value))
    return partial(_undamaged, read_chunk_fn, log)


_NO_DAMAGE = (ImportError, MemoryError, NameError, StopIteration)
_NO_DAMAGE_ERRNO = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def _undamaged(
    read_chunk_fn: Callable[[R], Iterable[T]], log: Optional[Callable[[str], Any]], chunk_ref: R
) -> Iterable[T]:
    try:
        items = read_chunk_fn(chunk_ref)
        if isinstance(items, (list, tuple)):  # nothing in it can fail any more, and it can be entered anywhere
            return items
        rest = iter(items)
    except Exception as error:
        _skip(error, 0, log, chunk_ref)
        return ()
    return chain.from_iterable(_runs_before_damage(rest, log, chunk_ref))


def _runs_before_damage(items: Iterator[T], log: Optional[Callable[[str], Any]], chunk_ref: Any) -> Iterator[List[T]]:
    num_items = 0
    size = 1
    while True:
        run: List[T] = []
        begin = perf_counter()
        damage: Optional[Exception] = None
        try:
            run.extend(islice(items, size))
        except Exception as error:
            damage = error
        elapsed = perf_counter() - begin
        num_items += len(run)
        yield run
        if damage is not None:
            _skip(damage, num_items, log, chunk_ref)
        if len(run) < size:
            return
        if elapsed < 1e-3:
            size = min(2 * size, 1000)


def _skip(error: Exception, num_items: int, log: Optional[Callable[[str], Any]], chunk_ref: Any) -> None:
    if isinstance(error, _NO_DAMAGE) or isinstance(error, OSError) and error.errno in _NO_DAMAGE_ERRNO:
        raise error
    if log is None:
        import logging

        log = logging.getLogger(__name__).warning
    log("{}: skipped from item {} on, {}: {}".format(chunk_ref, num_items, type(error).__name__, error))


# ---------------------------------------------------------------------------------------------------------------------
# Text
# ---------------------------------------------------------------------------------------------------------------------


def read_lines(path: _Path, encoding: str = "utf-8") -> Iterator[str]:
    r"""Read the lines of a text file that may be compressed.

    Lines end at ``\n`` or ``\r\n`` and nowhere else: U+2028, U+0085, a form feed or a lone carriage return are part of
    a line, unlike with ``str.splitlines``. The line ends are not part of the items, and an empty last line is none.
    A byte order mark stays, as with ``open``, unless the encoding (``utf-8-sig``, ``utf-16``) takes it.

    gzip (any number of members, zeros behind them), bzip2, xz and zstd (any number of frames) are decompressed on the
    way. zstd needs Python 3.14 or the package ``zstandard``.

    Cost: about 256 KiB of text is held at a time, and its lines; a longer line is held as a whole. The file is opened
    by the first ``next()`` and closed when the iterator ends, fails or is dropped.

    Args:
        path: The file, as str or ``PathLike``.
        encoding: Any text encoding that Python knows.

    Returns:
        An iterator over the lines, as str.

    Raises:
        TypeError: ``path`` is no path.
        ValueError: Python does not know ``encoding``. While iterating, naming file and line: what follows is damaged,
            cut off, or not in this encoding.
        OSError: While iterating: the file is missing, or cannot be opened or read.
        ImportError: While iterating: nothing that is installed decompresses this file; says what does.

    >>> import gzip, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "chunk.txt.gz")
    ...     with gzip.open(path, "wb") as file:
    ...         _ = file.write("one\r\ntwo\u2028still two\n".encode("utf-8"))
    ...     list(read_lines(path))
    ['one', 'two\u2028still two']
    """
    return chain.from_iterable(_line_runs(_checked(path), _new_decoder(encoding), encoding))


def _checked(path: _Path) -> str:
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError("path must be a str or PathLike, got {!r}".format(path))
    return os.fspath(path)


def _new_decoder(encoding: str) -> codecs.IncrementalDecoder:
    try:
        io.TextIOWrapper(io.BytesIO(), encoding)  # refuses codecs that are no text encodings, such as rot13
        return codecs.getincrementaldecoder(encoding)()
    except (LookupError, TypeError) as error:
        raise ValueError("encoding must be a text encoding that Python knows, got {!r}".format(encoding)) from error


def _is_remote(path: str) -> bool:
    return "://" in path


def _open(path: str) -> IO[bytes]:
    """Open a file, or what a URL refers to."""
    if not _is_remote(path):
        return open(path, "rb")
    with _reaching(path):
        # Not all that is opened so reads as many bytes as it is asked for; what is buffered does.
        return io.BufferedReader(_import_fsspec().open(path, "rb").open(), _PIECE_SIZE)


_pid = os.getpid()


def _import_fsspec() -> Any:
    global _pid
    import importlib

    try:
        for module in ("fsspec.core", "fsspec.asyn"):
            importlib.import_module(module)
    except ImportError as error:
        raise ImportError("URLs need the package 'fsspec' ({})".format(error)) from error
    fsspec: Any = importlib.import_module("fsspec")
    if _pid != os.getpid():
        # Its thread is not in a forked process, where older releases would wait for it for ever.
        fsspec.asyn.reset_lock()
        _pid = os.getpid()
    return fsspec


@contextmanager
def _reaching(url: str) -> Iterator[None]:
    """Let every error name the URL; those of protocols are of many types."""
    try:
        yield
    except (FileNotFoundError, PermissionError) as error:
        raise type(error)(error.errno or errno.ENOENT, error.strerror or str(error), url) from error
    except (ImportError, ValueError) as error:
        raise type(error)("{}: {}".format(url, error)) from error
    except MemoryError:
        raise
    except Exception as error:
        raise OSError("{}: cannot be reached: {}: {}".format(url, type(error).__name__, error)) from error


@contextmanager
def _naming(path: str, place: Callable[[], str]) -> Iterator[None]:
    """Say in every error which file it comes from, and from where in it."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # not the system's, but made by a package
            raise OSError("{}, {}: {}".format(path, place(), error)) from error
        raise OSError(error.errno, "{} (at {})".format(error.strerror, place()), path) from error
    except (EOFError, ValueError) as error:
        raise ValueError("{}, {}: {}".format(path, place(), error)) from error.__cause__ or error
    except ImportError as error:
        raise ImportError("{}: {}".format(path, error)) from error
    except Exception as error:
        if not _is_remote(path) or isinstance(error, MemoryError):
            raise
        # Protocols have errors of many types.
        raise OSError("{}, {}: {}: {}".format(path, place(), type(error).__name__, error)) from error


def _line_runs(path: str, decoder: codecs.IncrementalDecoder, encoding: str) -> Generator[List[str], None, None]:
    """Yield the lines in runs of about a block, so that handing out one line costs no Python code."""
    num_lines = 0
    unfinished: List[str] = []  # of the line whose end is still to come: joined once, however long the line is
    with _open(path) as file, _naming(path, lambda: "line {}".format(num_lines + 1)):
        for text in _decoded(_blocks(file), decoder, encoding):
            unfinished.append(text)
            if "\n" in text:
                lines = _split("".join(unfinished))
                unfinished = [lines.pop()]
                num_lines += len(lines)
                yield lines
    last = "".join(unfinished)
    if last:
        yield [last]


def _byte_lines(path: str) -> Iterator[List[bytes]]:
    """Yield the lines of a file that may be compressed, with their newlines, in runs; "-" is standard input."""
    num_lines = 0
    is_input = path == "-"
    with open(0, "rb", closefd=False) if is_input else _open(path) as file:
        with _naming("standard input" if is_input else path, lambda: "line {}".format(num_lines + 1)):
            for lines in _split_lines(_blocks(file)):
                yield lines
                num_lines += len(lines)


def _split_lines(blocks: Iterable[bytes]) -> Iterator[List[bytes]]:
    unfinished: List[bytes] = []
    for block in blocks:
        unfinished.append(block)
        if b"\n" in block:
            lines = b"".join(unfinished).split(b"\n")
            unfinished = [lines.pop()]
            yield [line + b"\n" for line in lines]
    last = b"".join(unfinished)
    if last:
        yield [last]


def _split(text: str) -> List[str]:
    if "\r" in text:  # looking for it costs a thirtieth of replacing nothing
        text = text.replace("\r\n", "\n")
    return text.split("\n")


def _decoded(blocks: Iterable[bytes], decoder: codecs.IncrementalDecoder, encoding: str) -> Iterator[str]:
    for block, final in chain(((block, False) for block in blocks), [(b"", True)]):
        before = decoder.getstate()
        try:
            text = decoder.decode(block, final)
        except UnicodeDecodeError as error:
            # What could not be decoded began with what was left of the block before.
            decoder.setstate(before)
            yield decoder.decode(block[: max(0, error.start - len(error.object) + len(block))])
            raise ValueError(_undecodable(error, encoding)) from error
        yield text


def _undecodable(error: UnicodeDecodeError, encoding: str) -> str:
    return "0x{} is not {}: {}".format(error.object[error.start : error.end].hex(), encoding, error.reason)


def read_jsonl(path: _Path) -> Iterator[Any]:
    r"""Read the values of a JSON-lines file that may be compressed: one JSON value a line, in UTF-8.

    Lines of nothing but white space are passed over. Lines and compression are those of `read_lines`; a byte order
    mark is passed over.

    Cost: about 256 KiB of text is held at a time, and its values. The file is opened by the first ``next()`` and closed
    when the iterator ends, fails or is dropped.

    Args:
        path: The file, as str or ``PathLike``.

    Returns:
        An iterator over the values: dict, list, str, int, float, bool or None.

    Raises:
        TypeError: ``path`` is no path.
        ValueError: While iterating, naming file and line: a line is not JSON, or as for `read_lines`.
        OSError, ImportError: As for `read_lines`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "chunk.jsonl")
    ...     with open(path, "w") as file:
    ...         _ = file.write('{"text": "one"}\n\n{"text": "two"}\n')
    ...     list(read_jsonl(path))
    [{'text': 'one'}, {'text': 'two'}]
    """
    return chain.from_iterable(_json_runs(_checked(path), json.JSONDecoder().decode))


def _json_runs(path: str, decode: Callable[[str], Any]) -> Iterator[List[Any]]:
    num_lines = 0
    with closing(_line_runs(path, _new_decoder("utf-8-sig"), "utf-8")) as runs:
        for lines in runs:
            rest: Any = iter(lines)
            values: List[Any] = []
            damage: Optional[Exception] = None
            while rest.__length_hint__():
                try:
                    values.extend(map(decode, rest))
                except (ValueError, RecursionError) as error:
                    index = len(lines) - rest.__length_hint__() - 1
                    if lines[index].strip(" \t\r"):
                        damage = error
                        break
            yield values
            if damage is not None:
                reason = getattr(damage, "msg", damage)  # without the position, which would say line 1
                column = ", column {}".format(damage.colno) if isinstance(damage, json.JSONDecodeError) else ""
                raise ValueError(
                    "{}, line {}: not JSON: {}{}".format(path, num_lines + index + 1, reason, column)
                ) from damage
            num_lines += len(lines)


def read_csv(path: _Path, encoding: str = "utf-8-sig", **csv_options: Any) -> Iterator[Dict[Any, Any]]:
    r"""Read the rows of a CSV file that may be compressed, as dicts.

    The first row names the fields, unless ``fieldnames`` is given. Newlines within quotes are kept as they are; empty
    rows are passed over. Compression is that of `read_lines`.

    A row whose number of fields is not that of the names is an error, and so is a quote that is still open at the end
    of the file. One that is followed by much more text is found when its field exceeds ``csv.field_size_limit()``,
    131072 characters; set that higher for data whose fields are longer.

    Cost: about 256 KiB of text is held at a time, or a row if that is longer. The file is opened by the first
    ``next()`` and closed when the iterator ends, fails or is dropped.

    Args:
        path: The file, as str or ``PathLike``.
        encoding: Any text encoding that Python knows; ``utf-8-sig`` is UTF-8 with or without a byte order mark.
        csv_options: What ``csv.DictReader`` takes: ``fieldnames`` (list), ``dialect``, ``delimiter``, ``quotechar``
            and so on; ``restkey`` (under which a row's surplus fields come, as a list) and ``restval`` (what missing
            fields are), without which such rows are errors.

    Returns:
        An iterator over the rows: a dict of str from the names to the fields.

    Raises:
        TypeError: ``path`` is no path, or an option is none of the module ``csv``.
        ValueError: Python does not know ``encoding``, or the module ``csv`` the dialect. While iterating, naming file,
            row (the first behind the header is 1) and line: the row is wrong, two fields have one name, or as for
            `read_lines`.
        OSError, ImportError: As for `read_lines`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "chunk.csv")
    ...     with open(path, "w", newline="") as file:
    ...         _ = file.write('name,text\r\na,"two\nlines"\r\n')
    ...     for row in read_csv(path):
    ...         sorted(row.items())
    [('name', 'a'), ('text', 'two\nlines')]
    """
    import csv

    fieldnames = csv_options.pop("fieldnames", None)
    rest: Dict[str, Any] = {name: csv_options.pop(name) for name in ("restkey", "restval") if name in csv_options}
    names = None if fieldnames is None else _field_names(list(fieldnames))
    try:
        csv.reader([], **csv_options)
    except csv.Error as error:
        raise ValueError("the options must be those of the module csv: {}".format(error)) from error
    return _csv_rows(_checked(path), _new_decoder(encoding), encoding, names, rest, csv_options)


def _field_names(names: List[str]) -> List[str]:
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError("two fields are named {!r}; fieldnames=[…] gives them other names".format(twice))
    return names


def _csv_rows(
    path: str,
    decoder: codecs.IncrementalDecoder,
    encoding: str,
    names: Optional[List[str]],
    rest: Dict[str, Any],
    csv_options: Dict[str, Any],
) -> Iterator[Dict[Any, Any]]:
    import csv

    num_rows = 0
    first_line = 1
    ended = False

    def note_end() -> Iterator[str]:
        nonlocal ended
        ended = True
        yield from ()

    def place() -> str:
        return "{} (line {})".format("header" if names is None else "row {}".format(num_rows + 1), first_line)

    with _open(path) as file, _naming(path, place):
        lines = chain.from_iterable(_kept_lines(_decoded(_blocks(file), decoder, encoding)))
        reader = csv.reader(chain(lines, note_end()), **csv_options)
        while True:
            first_line = reader.line_num + 1
            try:
                fields = next(reader, None)
            except csv.Error as error:
                hint = "; a quote that is not closed, or raise csv.field_size_limit()" if "limit" in str(error) else ""
                raise ValueError("{}{}".format(error, hint)) from error
            if fields is None:
                return
            if ended:  # while a row was looked for, there was none; so this was within one
                raise ValueError("the file ends within the row: a quote is not closed")
            if not fields:
                continue
            if names is None:
                names = _field_names(fields)
                continue
            row: Dict[Any, Any] = dict(zip(names, fields))
            if len(fields) != len(names):
                option = "restkey" if len(fields) > len(names) else "restval"
                if option not in rest:
                    raise ValueError(
                        "{} fields instead of {}; {}=… would accept that".format(len(fields), len(names), option)
                    )
                if option == "restkey":
                    row[rest[option]] = fields[len(names) :]
                else:
                    row.update(dict.fromkeys(names[len(fields) :], rest[option]))
            yield row
            num_rows += 1


def _kept_lines(texts: Iterable[str]) -> Iterator[List[str]]:
    r"""Yield runs of lines that end at ``\n``, ``\r\n`` or ``\r``, and keep these."""
    unfinished: List[str] = []
    for text in texts:
        # A carriage return at the very end may be half of a line end.
        cut = text.rfind("\n") + 1 or text.rfind("\r", 0, -1) + 1
        unfinished.append(text[:cut] if cut else text)
        if cut:
            yield io.StringIO("".join(unfinished), newline="").readlines()
            unfinished = [text[cut:]]
    yield io.StringIO("".join(unfinished), newline="").readlines()


# ---------------------------------------------------------------------------------------------------------------------
# Tar
# ---------------------------------------------------------------------------------------------------------------------


def read_tar(path: _Path) -> Iterator[Dict[str, Any]]:
    r"""Read the samples of a tar file in the layout of WebDataset; the file may be compressed.

    Members that share their name up to the first dot behind the last slash are one sample; what follows that dot, in
    lower case, names a field. So ``a/22.05.png`` is the field ``05.png`` of the sample ``a/22``. Members without such
    a dot or with nothing before it (``README``, ``.DS_Store``), folders, symbolic links and devices are passed over.
    Several tar files one behind the other (``cat``) are read as one.

    A sample is a dict of the bytes of each member, in file order, behind ``'__key__'``, the common part of the names
    without a leading ``./``, and ``'__file__'``, the tar file. Asked for a field that it lacks, it raises a
    ``KeyError`` that lists those it has.

    Cost: about 256 KiB of data, one sample, and the keys of all samples of the file are held. The file is opened by the
    first ``next()`` and closed when the iterator ends, fails or is dropped.

    Args:
        path: The file, as str or ``PathLike``.

    Returns:
        An iterator over the samples.

    Raises:
        TypeError: ``path`` is no path.
        ValueError: While iterating, naming file and member or offset (in bytes, decompressed): a sample's members are
            not neighbours, or two have one name; the tar or its compression is damaged, cut off, or lacks its end
            marker; a hard link or a sparse file, whose content is elsewhere or elsewise.
        OSError, ImportError: As for `read_lines`.

    >>> import io, tarfile, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "chunk.tar")
    ...     with tarfile.open(path, "w") as tar:
    ...         for name, data in [("a.jpg", b"..."), ("a.json", b"{}"), ("b.jpg", b"!")]:
    ...             member = tarfile.TarInfo(name)
    ...             member.size = len(data)
    ...             tar.addfile(member, io.BytesIO(data))
    ...     samples = list(read_tar(path))
    >>> [(sample["__key__"], sample["jpg"]) for sample in samples]
    [('a', b'...'), ('b', b'!')]
    """
    return _tar_samples(_checked(path))


class _Sample(Dict[str, Any]):
    def __missing__(self, key: str) -> NoReturn:
        raise KeyError(
            "no field {!r} in sample {!r} of {}, which has: {}".format(
                key, self.get("__key__"), self.get("__file__"), ", ".join(list(self)[2:])
            )
        )


def _tar_samples(path: str) -> Iterator[Dict[str, Any]]:
    sample: Optional[_Sample] = None
    keys: Set[str] = set()
    with _open(path) as file:
        tar = _Tar(_blocks(file))
        with _naming(path, lambda: tar.place):
            for name, size in tar.members():
                key, field = _sample_key(name)
                if sample is not None and key == sample["__key__"]:
                    if field in sample:
                        raise ValueError("the sample {!r} has the field {!r} already".format(key, field))
                    sample[field] = tar.read(size)
                    continue
                if key in keys:
                    raise ValueError(
                        "it belongs to the sample {!r}, but other members lie between; members of one sample must be "
                        "neighbours, as in a tar whose names are sorted".format(key)
                    )
                if sample is not None:
                    yield sample
                    sample = None
                if key:
                    keys.add(key)
                    sample = _Sample(__key__=key, __file__=path)
                    sample[field] = tar.read(size)


def _sample_key(name: str) -> Tuple[str, str]:
    """Return key and field of a member; both are empty if it is part of no sample."""
    while name.startswith("./"):
        name = name[2:]
    begin = name.rfind("/") + 1
    dot = name.find(".", begin)
    return (name[:dot], name[dot + 1 :].lower()) if dot > begin else ("", "")


_TAR_BLOCK = 512


class _Tar:
    """The members of a tar file.

    Not the module ``tarfile``: that takes many kinds of damage for the end of the file.

    Args:
        blocks: The file's content.
    """

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._block = b""
        self._begin = 0  # of what is left of the block
        self._offset = 0  # in the file
        self.place = "offset 0"  # of what is read, for messages

    def read(self, size: int) -> bytes:
        """Return the next bytes, all of them."""
        data = self._block[self._begin : self._begin + size]
        self._begin += len(data)
        if len(data) < size:
            pieces = [data]
            missing = size - len(data)
            while missing:
                self._block = next(self._blocks, b"")
                if not self._block:
                    raise EOFError("the tar ends too early")
                pieces.append(self._block[:missing])
                self._begin = len(pieces[-1])
                missing -= self._begin
            data = b"".join(pieces)
        self._offset += size
        return data

    def pass_over(self, size: int) -> None:
        """Leave out the next bytes, all of them."""
        while size:
            if self._at_end():
                raise EOFError("the tar ends too early")
            step = min(size, len(self._block) - self._begin)
            self._begin += step
            self._offset += step
            size -= step

    def _at_end(self) -> bool:
        if self._begin == len(self._block):
            self._block, self._begin = next(self._blocks, b""), 0
        return not self._block

    def members(self) -> Iterator[Tuple[str, int]]:
        """Yield name and size of each regular file, which can then be read, and an empty name at an end marker."""
        marked = False
        extended: Dict[bytes, bytes] = {}  # what the next member's own header has no room for
        while True:
            self.place = "offset {}".format(self._offset)
            if self._at_end():
                if not marked:
                    raise EOFError("the tar ends too early: its end marker is missing")
                return
            header = self.read(_TAR_BLOCK)
            if not header.strip(b"\0"):
                if not marked:
                    yield "", 0
                marked = True
                continue
            marked = False
            _check_tar_header(header)
            kind, size = header[156:157], _tar_number(header[124:136])
            if kind in b"LKxXg":
                data = self.read(size + -size % _TAR_BLOCK)[:size]
                if kind == b"L":
                    extended[b"path"] = _until_zero(data)
                elif kind in b"xX":
                    extended.update(_pax_records(data))
                continue
            name = _tar_text(extended.get(b"path") or _tar_name(header))
            self.place = "member {!r} ({})".format(name, self.place)
            if kind == b"1":
                raise ValueError("it is a hard link; a tar without them is needed (GNU tar: --hard-dereference)")
            if kind == b"S" or any(key.startswith(b"GNU.sparse.") for key in extended):
                raise ValueError("it is a sparse file; a tar without them is needed")
            # Links, devices and folders have no content, whatever their size says.
            size = 0 if kind in b"23456" else _decimal(extended.get(b"size")) or size
            end = self._offset + size + -size % _TAR_BLOCK
            if kind not in b"23456VND" and not name.endswith("/"):
                yield name, size
            self.pass_over(end - self._offset)
            extended = {}


def _check_tar_header(header: bytes) -> None:
    number = _tar_number(header[148:156])
    counted = header[:148] + b" " * 8 + header[156:]  # the sum counts its own field as spaces
    if number == sum(counted):
        return
    if number != sum(counted) - 256 * sum(1 for byte in counted if byte > 127):  # old programs took bytes as signed
        raise ValueError("no tar header here: its checksum is wrong")


def _tar_number(field: bytes) -> int:
    if field[0] == 0x80:  # GNU: binary, for what octal digits cannot hold
        return int.from_bytes(field[1:], "big")
    digits = _until_zero(field).strip()
    if not re.fullmatch(b"[0-7]*", digits):
        raise ValueError("no tar header here: {!r} is no octal number".format(field))
    return int(digits or b"0", 8)


def _tar_name(header: bytes) -> bytes:
    name, prefix = _until_zero(header[:100]), _until_zero(header[345:500])
    # GNU's own layout, which ends its magic with a space, has other things in the place of the prefix.
    return prefix + b"/" + name if prefix and header[257:263] == b"ustar\0" else name


def _tar_text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _until_zero(data: bytes) -> bytes:
    return data.split(b"\0", 1)[0]


def _pax_records(data: bytes) -> Dict[bytes, bytes]:
    """Return what an extended header holds: records of the form "length key=value\n"."""
    records = {}
    while data.strip(b"\0"):
        length = _decimal(data.partition(b" ")[0])
        record = data[:length]
        key, equals, value = record.partition(b" ")[2][:-1].partition(b"=")
        if not length or len(record) < length or record[-1:] != b"\n" or not equals:
            raise ValueError("damaged pax header: {!r:.80}".format(record))
        records[key] = value
        data = data[length:]
    return records


def _decimal(digits: Optional[bytes]) -> int:
    return int(digits) if digits and digits.isdigit() else 0


# ---------------------------------------------------------------------------------------------------------------------
# Memory-mapped lines
# ---------------------------------------------------------------------------------------------------------------------


class MappedLines(Sequence[str]):
    r"""The lines of an uncompressed text file in UTF-8, as a sequence over the mapped file.

    Lines are those of `read_lines`, and any of them is as near as the first: a pipeline that reads chunks with
    ``MappedLines`` in place of `read_lines` restores within a chunk at once.

    Where each line begins is kept in a file beside the data, ``.NAME.index``, hidden so that patterns do not find it.
    It is made at the first use, written as a whole or not at all, and made anew if it does not fit the data: their
    size, time of modification, first and last bytes. Where the folder cannot be written, it is made in memory each
    time. The data must not change while they are mapped.

    Cost: the file is opened and read through once, to make the index of 8 bytes a line; later, opening costs the same
    whatever the size. Memory is that of the lines handed out; what the system keeps of the file it can take back. A
    slice, or iterating, is much cheaper per line than one line at a time.

    Args:
        path: The file, as str or ``PathLike``. Pickled, a ``MappedLines`` is this path.

    Raises:
        TypeError: ``path`` is no path.
        ValueError: The file is compressed, no regular file, or a URL. From reading a line, naming file and line: it is
            not UTF-8, or the data have been changed.
        OSError: The file is missing, or cannot be opened or mapped.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = os.path.join(folder.name, "chunk.txt")
    >>> with open(path, "w") as file:
    ...     _ = file.write("one\ntwo\nthree\n")
    >>> lines = MappedLines(path)
    >>> len(lines), lines[1], lines[-2:]
    (3, 'two', ['two', 'three'])
    >>> folder.cleanup()
    """

    def __init__(self, path: _Path) -> None:
        self._path = _checked(path)
        if _is_remote(self._path):
            raise ValueError("path must be a file that can be mapped, got the URL {!r}".format(self._path))
        with open(self._path, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("{} is no regular file".format(self._path))
            compression = _compression_name(file.read(16))
            if compression is not None:
                raise ValueError("{} is {} data; MappedLines needs a plain text file".format(self._path, compression))
            size = status.st_size
            self._data: Any = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b""
        folder, name = os.path.split(self._path)
        self._index_path = os.path.join(folder, ".{}.index".format(name))
        # Native byte order: what another machine wrote does not fit, and is made anew.
        ends = zlib.crc32(self._data[:4096] + self._data[-4096:])
        fingerprint = struct.pack("=16sqqq", b"infinibatch 1", size, status.st_mtime_ns, ends)
        self._offsets: Any = self._read_index(fingerprint)  # of each line, and of the end
        if self._offsets is None:
            self._offsets = self._find_lines()
            self._write_index(fingerprint)

    def _read_index(self, fingerprint: bytes) -> Any:
        try:
            with open(self._index_path, "rb") as file:
                index = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError):  # there is none, or it is empty
            return None
        begin = len(fingerprint)
        if index[:begin] != fingerprint or len(index) < begin + 8 or len(index) % 8:
            return None
        offsets = memoryview(index)[begin:].cast("Q")
        return offsets if offsets[0] == 0 and offsets[-1] == len(self._data) else None

    def _find_lines(self) -> "array[int]":
        offsets = array("Q", [0])
        for begin in range(0, len(self._data), _BLOCK_SIZE):
            lines = self._data[begin : begin + _BLOCK_SIZE].split(b"\n")
            lines.pop()
            ends = accumulate(chain([begin], [len(line) + 1 for line in lines]))
            offsets.extend(islice(ends, 1, None))
        if offsets[-1] < len(self._data):
            offsets.append(len(self._data))
        return offsets

    def _write_index(self, fingerprint: bytes) -> None:
        temporary = "{}.{}.tmp".format(self._index_path, os.urandom(6).hex())
        try:
            with open(temporary, "xb") as file:
                file.write(fingerprint)
                self._offsets.tofile(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._index_path)
        except BaseException as error:
            with suppress(OSError):
                os.remove(temporary)
            if not isinstance(error, OSError):  # which only costs that the index is made again
                raise

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> List[str]: ...

    def __getitem__(self, index: Union[int, slice]) -> Union[str, List[str]]:
        if isinstance(index, slice):
            begin, end, step = index.indices(len(self))
            if step == 1:
                return self._lines(begin, max(begin, end))
            return [self[i] for i in range(begin, end, step)]
        i = operator.index(index)
        if i < 0:
            i += len(self)
        if not 0 <= i < len(self):
            raise IndexError("index must be in the range of {} lines, got {}".format(len(self), index))
        return self._lines(i, i + 1)[0]

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(self._infinibatch_runs())

    def _infinibatch_runs(self, begin: int = 0) -> Iterator[List[str]]:
        """Yield lists of lines, from the given one on: cheaper than one line after the other."""
        end = begin
        while begin < len(self):
            if end <= begin:
                end = max(begin + 1, bisect_right(self._offsets, self._offsets[begin] + _BLOCK_SIZE) - 1)
            try:
                lines = self._lines(begin, end)
            except ValueError:
                if end == begin + 1:
                    raise
                end = (begin + end) // 2  # for the lines before the damage
            else:
                yield lines
                begin = end

    def _lines(self, begin: int, end: int) -> List[str]:
        if begin == end:
            return []
        start = self._offsets[begin]
        data: bytes = self._data[start : self._offsets[end]]
        try:
            lines = _split(data.decode("utf-8"))
        except UnicodeDecodeError as error:
            number = begin + data.count(b"\n", 0, error.start) + 1
            raise ValueError("{}, line {}: {}".format(self._path, number, _undecodable(error, "utf-8"))) from error
        if not lines[-1]:
            lines.pop()
        if len(lines) != end - begin or start and self._data[start - 1] != 10:
            raise ValueError(
                "{}, line {}: the data have been changed since they were opened, or their index {} is damaged".format(
                    self._path, begin + 1, self._index_path
                )
            )
        return lines

    def __reduce__(self) -> Any:
        return type(self), (self._path,)

    def __repr__(self) -> str:
        return "{}({!r})".format(type(self).__name__, self._path)


# ---------------------------------------------------------------------------------------------------------------------
# Parquet and Arrow
# ---------------------------------------------------------------------------------------------------------------------


_ROWS_AT_A_TIME = 1000  # made into Python objects


def read_parquet(path: _Path, columns: Optional[Sequence[str]] = None) -> Iterator[Dict[str, Any]]:
    """Read the rows of a Parquet file, as dicts from column to value. Needs the package ``pyarrow``.

    Cost: one row group is held, and 1000 rows of it as Python objects. The file is opened by the first ``next()`` and
    closed when the iterator ends, fails or is dropped.

    Args:
        path: The file, as str or ``PathLike``.
        columns: Names of the columns to read, in any order; None: all.

    Returns:
        An iterator over the rows, in file order.

    Raises:
        TypeError: ``path`` is no path, or ``columns`` is no list of str.
        ImportError: While iterating: ``pyarrow`` is not installed.
        ValueError: While iterating, naming the file: it is no Parquet file, damaged, or has no such column.
        OSError: While iterating: the file is missing, or cannot be opened or read.

    >>> next(read_parquet("nowhere.parquet"))  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
        ...
    FileNotFoundError: No such file or directory: 'nowhere.parquet'
    """
    if columns is not None:
        names = list(columns) if isinstance(columns, Iterable) else [columns]
        if isinstance(columns, str) or not all(isinstance(name, str) for name in names):
            raise TypeError("columns must be a list of str or None, got {!r}".format(columns))
        columns = names
    return chain.from_iterable(_parquet_runs(_checked(path), columns))


def _parquet_runs(path: str, columns: Optional[List[str]]) -> Iterator[List[Dict[str, Any]]]:
    with _open(path) as file, _naming_rows(path) as count:
        pyarrow = _import_pyarrow("Parquet")
        parquet = _open_parquet(pyarrow.parquet.ParquetFile, file)
        names = parquet.schema_arrow.names
        missing = [name for name in columns or () if name not in names]
        if missing:
            raise ValueError("no column {!r}, there are: {}".format(missing[0], ", ".join(names)))
        num_rows = 0
        for group in range(parquet.num_row_groups):
            for batch in parquet.iter_batches(_ROWS_AT_A_TIME, row_groups=[group], columns=columns):
                yield count(_rows(batch))
                num_rows += batch.num_rows
        if num_rows != parquet.metadata.num_rows:
            raise ValueError("damaged: there are {} rows instead of {}".format(num_rows, parquet.metadata.num_rows))


def _open_parquet(parquet_file: Any, file: IO[bytes]) -> Any:
    try:
        return parquet_file(file, page_checksum_verification=True)  # where pages have one, which is up to the writer
    except TypeError:  # before pyarrow 14
        return parquet_file(file)


def read_arrow(path: _Path) -> Iterator[Dict[str, Any]]:
    """Read the rows of an Arrow IPC file or stream, as dicts from column to value. Needs the package ``pyarrow``.

    Cost: one record batch is held, and 1000 rows of it as Python objects. The file is opened by the first ``next()``
    and closed when the iterator ends, fails or is dropped.

    Args:
        path: The file (Feather files of version 2 are such), as str or ``PathLike``.

    Returns:
        An iterator over the rows, in file order.

    Raises:
        TypeError: ``path`` is no path.
        ImportError: While iterating: ``pyarrow`` is not installed.
        ValueError: While iterating, naming the file: it is no Arrow file or stream, or damaged.
        OSError: While iterating: the file is missing, or cannot be opened or read.

    >>> next(read_arrow("nowhere.arrow"))  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
        ...
    FileNotFoundError: No such file or directory: 'nowhere.arrow'
    """
    return chain.from_iterable(_arrow_runs(_checked(path)))


def _arrow_runs(path: str) -> Iterator[List[Dict[str, Any]]]:
    with _open(path) as file, _naming_rows(path) as count:
        pyarrow = _import_pyarrow("Arrow")
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        if is_file:
            reader = pyarrow.ipc.open_file(file)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        else:
            batches = iter(pyarrow.ipc.open_stream(file))
        for batch in batches:
            for begin in range(0, batch.num_rows, _ROWS_AT_A_TIME):
                yield count(_rows(batch.slice(begin, _ROWS_AT_A_TIME)))


def _import_pyarrow(kind: str) -> Any:
    import importlib

    try:
        for module in ("pyarrow.parquet", "pyarrow.ipc"):
            importlib.import_module(module)
    except ImportError as error:
        raise ImportError("{} data need the package 'pyarrow' ({})".format(kind, error)) from error
    return importlib.import_module("pyarrow")


def _rows(batch: Any) -> List[Dict[str, Any]]:
    names = batch.schema.names
    if len(set(names)) < len(names):
        raise ValueError("two columns have the same name, of: {}".format(", ".join(names)))
    batch.validate(full=True)  # damaged offsets would make the next line read anywhere in memory
    columns = [column.to_pylist() for column in batch.columns]
    return [dict(zip(names, values)) for values in zip(*columns)]


@contextmanager
def _naming_rows(path: str) -> Iterator[Callable[[List[T]], List[T]]]:
    """Give a function that counts the rows, and say in every error where it comes from."""
    num_rows = 0

    def count(rows: List[T]) -> List[T]:
        nonlocal num_rows
        num_rows += len(rows)
        return rows

    with _naming(path, lambda: "row {}".format(num_rows + 1)):
        try:
            yield count
        except (OSError, LookupError, MemoryError, NotImplementedError, TypeError) as error:  # of damaged data, too
            if isinstance(error, OSError) and error.errno is not None:
                raise
            if isinstance(error, MemoryError) and not _asks_for_more_than_there_is(error):
                raise MemoryError("{}, row {}: {}".format(path, num_rows + 1, error)) from error
            raise ValueError(error) from error


def _asks_for_more_than_there_is(error: MemoryError) -> bool:
    """Return whether a package asked for more than any machine has, so that it is a length that is damaged."""
    size = re.search("size ([0-9]+)", str(error))
    return size is not None and int(size.group(1)) > 1 << 46


# ---------------------------------------------------------------------------------------------------------------------
# Compression
# ---------------------------------------------------------------------------------------------------------------------


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the content of a file, decompressed, in blocks that fit into memory."""
    head = file.read(16)
    compression = _find_compression(head)
    if compression is None:
        if _is_cut_off(head, getattr(file, "name", None)):
            raise EOFError("the compressed data end too early")
        while head:
            yield head
            head = file.read(_BLOCK_SIZE)
        return
    num_bytes = 0
    try:
        for block in _decompressed(file, head, compression):
            num_bytes += len(block)
            yield block
        return
    except ValueError:
        if not file.seekable():
            raise
        damaged_by = file.tell()
    # The call that met the damage gave nothing, not even what comes before it. So once more, in the same way up to
    # the piece that it met, then byte by byte.
    file.seek(len(head))
    for block in _decompressed(file, head, compression, damaged_by - compression.piece_size):
        if num_bytes < len(block):
            yield block[num_bytes:]
        num_bytes = max(0, num_bytes - len(block))


class _Compression:
    """How to undo one kind of compression.

    Args:
        name: Its name, for messages.
        new_decompressor: Makes the decompressor of one member; its ``decompress``, ``eof`` and ``unused_data`` are
            those of the standard library's.
        limited: Whether ``decompress`` takes a limit to what it returns. If not, it is given less at a time.
    """

    def __init__(self, name: str, new_decompressor: Callable[[], Any], limited: bool = True) -> None:
        self.name = name
        self.new_decompressor = new_decompressor
        self.limit = (_BLOCK_SIZE,) if limited else ()
        self.piece_size = _PIECE_SIZE if limited else _PIECE_SIZE >> 4


def _compression_name(head: bytes) -> Optional[str]:
    if head.startswith(b"\x1f\x8b\x08"):
        return "gzip"
    # The first three bytes alone could be text; behind them stands a block's magic number, or that of the end.
    if head.startswith(b"BZh") and head[4:10] in (b"1AY&SY", b"\x17rE8P\x90"):
        return "bzip2"
    if head.startswith(b"\xfd7zXZ\0"):
        return "xz"
    # A file may begin with a frame that is to be skipped, as those of parallel compressors do.
    if head.startswith(b"\x28\xb5\x2f\xfd") or re.match(rb"[\x50-\x5f]\x2a\x4d\x18", head):
        return "zstd"
    return None


_MAGIC = {".gz": b"\x1f\x8b\x08", ".bz2": b"BZh91AY&SY", ".xz": b"\xfd7zXZ\0", ".zst": b"\x28\xb5\x2f\xfd"}


def _is_cut_off(head: bytes, name: Any) -> bool:
    """Return whether a file ends within what it would be recognised by, as far as its name tells."""
    magic = _MAGIC.get(os.path.splitext(str(name))[1].lower(), b"")
    if magic[:3] == b"BZh":
        magic = magic[:3] + head[3:4] + magic[4:]  # the level
    return 0 < len(head) < len(magic) and magic.startswith(head)


def _find_compression(head: bytes) -> Optional[_Compression]:
    name = _compression_name(head)
    if name == "gzip":
        return _Compression(name, lambda: zlib.decompressobj(31))
    if name == "bzip2":
        import bz2

        return _Compression(name, bz2.BZ2Decompressor)
    if name == "xz":
        import lzma

        return _Compression(name, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ))
    return None if name is None else _find_zstd()


def _find_zstd() -> _Compression:
    import importlib

    try:
        return _Compression("zstd", importlib.import_module("compression.zstd").ZstdDecompressor)
    except ImportError:
        pass
    try:
        package = importlib.import_module("zstandard")
    except ImportError as error:
        raise ImportError("zstd data needs the package 'zstandard', or Python 3.14") from error
    return _Compression("zstd", lambda: package.ZstdDecompressor().decompressobj(), limited=False)


def _decompressed(
    file: IO[bytes], head: bytes, compression: _Compression, bytewise_from: Optional[int] = None
) -> Iterator[bytes]:
    """Yield the content of all members, one after the other.

    Args:
        file: A compressed file, behind its head.
        head: The file's first bytes.
        compression: How it is compressed.
        bytewise_from: From which position on to decompress byte by byte.

    Raises:
        EOFError: The file ends within a member.
        ValueError: The data are damaged.
    """

    def read() -> bytes:
        if bytewise_from is not None and file.tell() >= bytewise_from:
            return file.read(1)
        return file.read(compression.piece_size)

    data = head
    while data:
        decompressor = compression.new_decompressor()
        while True:
            try:
                block: bytes = decompressor.decompress(data, *compression.limit)
            except MemoryError:
                raise
            except Exception as error:  # every module has an error of its own, derived from nothing in particular
                raise ValueError("damaged {} data: {}".format(compression.name, error)) from error
            if block:
                yield block
            if decompressor.eof:
                break
            # Input that the limit kept back is with zlib the caller's to give again, elsewhere the decompressor's.
            data = getattr(decompressor, "unconsumed_tail", b"")
            if not data and getattr(decompressor, "needs_input", True):
                data = read()
                if not data and not block:
                    raise EOFError("the {} data end too early".format(compression.name))
        # Zeros between members and behind the last one are padding.
        data = decompressor.unused_data.lstrip(b"\0")
        while not data:
            padding = read()
            if not padding:
                return
            data = padding.lstrip(b"\0")
