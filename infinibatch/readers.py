"""Functions from a chunk reference to the chunk's items, for ``read_chunk_fn``, and the finding of chunks.

A chunk reference is a path. Compression is recognised by a file's first bytes, never by its name. Two kinds of error
come out of a reader: what cannot be reached or read is an ``OSError`` (``FileNotFoundError``, ``PermissionError``, …),
what was read and is wrong (damaged, cut off, in another encoding) is a ``ValueError``. Both name the file, and the
items before the damage are delivered first.
"""

import codecs
import glob
import os
import re
from itertools import chain
from typing import IO, Any, Callable, Iterable, Iterator, List, Optional, Sequence, Set, Tuple, Union

__all__ = ["find_chunks", "read_lines"]

_Path = Union[str, "os.PathLike[str]"]

_BLOCK_SIZE = 1 << 20  # decompressed bytes held at a time
_PIECE_SIZE = 1 << 17  # compressed bytes read at a time

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"([0-9]+)\.\.([0-9]+)")


def find_chunks(pattern: Union[_Path, Sequence[_Path]]) -> List[str]:
    """Find the files that one or several patterns describe, in natural order: chunk 2 before chunk 10.

    A pattern is a path with the wildcards of ``glob`` (``*``, ``?``, ``[0-9]``, and ``**`` for any depth of folders)
    and with braces: ``{000..199}`` counts, keeping the leading zeros, ``{train,extra}`` lists. A name that the braces
    spell out without a wildcard has to exist, so that a missing chunk is noticed here and not by fewer data. A path
    that exists as it is written is taken so. Folders are left out, and a file that several patterns match comes once.

    Cost: the folders are listed once; one look at the disk for each file.

    Args:
        pattern: A path or pattern (str or ``PathLike``), or a list of them.

    Returns:
        The paths, at least one; the order does not depend on the file system or on the order of the patterns.

    Raises:
        FileNotFoundError: Nothing matches a pattern, or a name that braces spell out is missing.
        TypeError: ``pattern`` is neither a path nor a list of paths.
        ValueError: ``pattern`` is an empty list.

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
    if os.path.exists(pattern):
        names = [pattern]
    else:
        names = []
        for spelled in _expand_braces(pattern):
            if glob.escape(spelled) != spelled:
                names += glob.glob(spelled, recursive=True)
            elif os.path.exists(spelled):
                names.append(spelled)
            else:
                origin = "" if spelled == pattern else " (of the pattern {!r})".format(pattern)
                raise FileNotFoundError("no such file: {!r}{}".format(spelled, origin))
    files = [name for name in names if not os.path.isdir(name)]
    if not files:
        raise FileNotFoundError("no file matches the pattern {!r}".format(pattern))
    return files


def _expand_braces(pattern: str) -> List[str]:
    for braces in _BRACES.finditer(pattern):  # the innermost ones; those around them follow by recursion
        content = braces.group(1)
        span = _RANGE.fullmatch(content)
        if span:
            ends = span.groups()
            padded = any(len(end) > 1 and end.startswith("0") for end in ends)
            width = max(map(len, ends)) if padded else 1
            first, last = sorted(map(int, ends))
            options = ["{:0{}d}".format(number, width) for number in range(first, last + 1)]
        elif "," in content:
            options = content.split(",")
        else:
            continue
        before, after = pattern[: braces.start()], pattern[braces.end() :]
        return [name for option in options for name in _expand_braces(before + option + after)]
    return [pattern]


def _natural(path: str) -> Tuple[List[Union[int, str]], str]:
    # Splitting at a group gives texts at even and digits at odd places, so that equal places always compare.
    parts: List[Union[int, str]] = list(re.split("([0-9]+)", path))
    parts[1::2] = map(int, parts[1::2])
    return parts, path


def read_lines(path: _Path, encoding: str = "utf-8") -> Iterator[str]:
    r"""Read the lines of a text file that may be compressed.

    Lines end at ``\n`` or ``\r\n`` and nowhere else: U+2028, U+0085, a form feed or a lone carriage return are part of
    a line, unlike with ``str.splitlines``. The line ends are not part of the items, and an empty last line is none.
    A byte order mark stays, as with ``open``, unless the encoding (``utf-8-sig``, ``utf-16``) takes it.

    gzip (any number of members, zeros behind them), bzip2, xz and zstd (any number of frames) are decompressed on the
    way. zstd needs Python 3.14 or the package ``zstandard``.

    Cost: about 1 MiB of text at a time is held, and its lines; a longer line is held as a whole. The file is opened by
    the first ``next()`` and closed when the iterator ends, fails or is dropped.

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
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError("path must be a str or PathLike, got {!r}".format(path))
    try:
        decoder = codecs.getincrementaldecoder(encoding)()
    except LookupError as error:
        raise ValueError("encoding must be a text encoding that Python knows, got {!r}".format(encoding)) from error
    return chain.from_iterable(_line_runs(os.fspath(path), decoder, encoding))


def _line_runs(path: str, decoder: codecs.IncrementalDecoder, encoding: str) -> Iterator[List[str]]:
    """Yield the lines in runs of about a block, so that handing out one line costs no Python code."""
    num_lines = 0
    unfinished: List[str] = []  # of the line whose end is still to come: joined once, however long the line is
    with open(path, "rb") as file:
        try:
            for text in _decoded(_blocks(file), decoder, encoding):
                unfinished.append(text)
                if "\n" in text:
                    lines = "".join(unfinished).replace("\r\n", "\n").split("\n")
                    unfinished = [lines.pop()]
                    num_lines += len(lines)
                    yield lines
        except OSError as error:
            raise OSError(error.errno, "{} (at line {})".format(error.strerror, num_lines + 1), path) from error
        except (EOFError, ValueError) as error:
            raise ValueError("{}, line {}: {}".format(path, num_lines + 1, error)) from error.__cause__ or error
        except ImportError as error:
            raise ImportError("{}: {}".format(path, error)) from error
    last = "".join(unfinished)
    if last:
        yield [last]


def _decoded(blocks: Iterable[bytes], decoder: codecs.IncrementalDecoder, encoding: str) -> Iterator[str]:
    for block, final in chain(((block, False) for block in blocks), [(b"", True)]):
        try:
            text = decoder.decode(block, final)
        except UnicodeDecodeError as error:
            # A failed call leaves the decoder as it was; its input began with what was left of the block before.
            yield decoder.decode(block[: max(0, error.start - len(error.object) + len(block))])
            broken = "0x" + "".join(map("{:02x}".format, error.object[error.start : error.end]))
            raise ValueError("{} is not {}: {}".format(broken, encoding, error.reason)) from error
        yield text


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the content of a file, decompressed, in blocks that fit into memory."""
    head = file.read(16)
    compression = _find_compression(head)
    if compression is None:
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


def _find_compression(head: bytes) -> Optional[_Compression]:
    if head.startswith(b"\x1f\x8b\x08"):
        import zlib

        return _Compression("gzip", lambda: zlib.decompressobj(31))
    # The first three bytes alone could be text; behind them stands a block's magic number, or that of the end.
    if head.startswith(b"BZh") and head[4:10] in (b"1AY&SY", b"\x17rE8P\x90"):
        import bz2

        return _Compression("bzip2", bz2.BZ2Decompressor)
    if head.startswith(b"\xfd7zXZ\0"):
        import lzma

        return _Compression("xz", lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ))
    # A file may begin with a frame that is to be skipped, as those of parallel compressors do.
    if head.startswith(b"\x28\xb5\x2f\xfd") or re.match(rb"[\x50-\x5f]\x2a\x4d\x18", head):
        return _find_zstd()
    return None


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
