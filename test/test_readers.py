"""Readers: lines of text files however they are compressed, and the finding of chunks."""

import bz2
import codecs
import gc
import gzip
import importlib
import importlib.util
import io
import lzma
import os
import pathlib
import pickle
import random
import re
import sys
import tarfile
import tempfile
import tracemalloc
import unittest
import warnings
import zlib
from unittest import mock

from infinibatch import readers
from infinibatch.iterators import NativeCheckpointableIterator, ParallelSelectManyIterator, SelectManyIterator
from infinibatch.readers import find_chunks, read_lines, skip_errors
from infinibatch.testing import check_iterator

try:
    zstandard = importlib.import_module("zstandard")
except ImportError:
    zstandard = None

try:
    fsspec = importlib.import_module("fsspec")
except ImportError:
    fsspec = None

COMPRESS = {"plain": bytes, "gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress}
if zstandard is not None:
    COMPRESS["zstd"] = lambda data: zstandard.ZstdCompressor().compress(data)

# An empty frame that a decoder of zstd is to skip.
SKIPPABLE_FRAME = b"\x50\x2a\x4d\x18\x00\x00\x00\x00"


def split(text):
    """What read_lines promises, said in another way."""
    lines = [line[:-1] if line.endswith("\r") else line for line in text.split("\n")[:-1]]
    rest = text[text.rfind("\n") + 1 :]
    return lines + [rest] if rest else lines


class ReaderTestCase(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, data, name="chunk"):
        path = self.path(name)
        with open(path, "wb") as file:
            file.write(data)
        return path

    def read_until_error(self, path, error_type, **options):
        lines = []
        with self.assertRaises(error_type) as caught:
            for line in read_lines(path, **options):
                lines.append(line)
        return lines, caught.exception


class TestLines(ReaderTestCase):
    def test_lines_end_at_newline_and_carriage_return_newline_only(self):
        cases = {
            "": [],
            "\n": [""],
            "a": ["a"],
            "a\n": ["a"],
            "a\n\n": ["a", ""],
            "a\r\nb\r\n": ["a", "b"],
            "a\r\r\nb": ["a\r", "b"],
            "a\rb\n": ["a\rb"],
            "a\r": ["a\r"],
            "\r\n": [""],
            "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1ei\n": ["a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1ei"],
            "a\0b\n": ["a\0b"],
        }
        for text, expected in cases.items():
            for name, compress in COMPRESS.items():
                with self.subTest(text=text, compression=name):
                    self.assertEqual(list(read_lines(self.write(compress(text.encode("utf-8"))))), expected)

    def test_compression_is_recognised_by_content_not_by_name(self):
        for name, compress in COMPRESS.items():
            for suffix in [".gz", ".bz2", ".xz", ".zst", ".txt", ""]:
                with self.subTest(compression=name, suffix=suffix):
                    path = self.write(compress("eins\nzwölf\n".encode("utf-8")), "chunk" + suffix)
                    self.assertEqual(list(read_lines(path)), ["eins", "zwölf"])

    def test_text_that_begins_like_compressed_data_is_text(self):
        for text in ["BZh", "BZh9", "BZh91 is no magic number", "(", "P*M", "\x1f"]:
            with self.subTest(text=text):
                self.assertEqual(list(read_lines(self.write(text.encode("utf-8")))), [text])

    def test_all_members_are_read_and_zero_padding_is_skipped(self):
        for name, compress in COMPRESS.items():
            if name == "plain":
                continue
            for padding in [b"", b"\0" * 4, b"\0" * 512]:
                with self.subTest(compression=name, padding=len(padding)):
                    # A line runs across the border of two members, and one member is empty.
                    members = [compress(data) for data in (b"a\nb", b"", b"c\nd\n", b"e\n")]
                    path = self.write(padding.join(members) + padding)
                    self.assertEqual(list(read_lines(path)), ["a", "bc", "d", "e"])

    def test_zero_padding_of_many_pieces_is_skipped(self):
        path = self.write(gzip.compress(b"a\n") + b"\0" * (readers._PIECE_SIZE * 2 + 1) + gzip.compress(b"b\n"))
        self.assertEqual(list(read_lines(path)), ["a", "b"])

    @unittest.skipUnless("zstd" in COMPRESS, "needs the package zstandard")
    def test_zstd_frames_to_be_skipped_are_skipped(self):
        frame = COMPRESS["zstd"](b"a\n")
        path = self.write(SKIPPABLE_FRAME + frame + SKIPPABLE_FRAME + frame)
        self.assertEqual(list(read_lines(path)), ["a", "a"])

    def test_bzip2_without_content_is_recognised(self):
        self.assertEqual(list(read_lines(self.write(bz2.compress(b"")))), [])

    def test_any_text_encoding_is_split_at_characters_not_bytes(self):
        # U+0A0D, U+0D0A and U+0A0A hold the bytes of line ends in UTF-16 and UTF-32.
        lines = ["\u0a0d\u0d0a\u0a0a", "", "plain", "\u0100\u0a00"]
        for encoding in ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be", "utf-8-sig", "utf-7", "gb18030"]:
            for end in ["\n", "\r\n"]:
                with self.subTest(encoding=encoding, end=end):
                    path = self.write("".join(line + end for line in lines).encode(encoding))
                    self.assertEqual(list(read_lines(path, encoding)), lines)
        path = self.write("ä\nb\n".encode("cp037"))  # where a newline is the byte 0x25
        self.assertEqual(list(read_lines(path, encoding="cp037")), ["ä", "b"])

    def test_byte_order_mark_stays_unless_the_encoding_takes_it(self):
        path = self.write(codecs.BOM_UTF8 + b"a\nb\n")
        self.assertEqual(list(read_lines(path)), ["\ufeffa", "b"])
        self.assertEqual(list(read_lines(path, "utf-8-sig")), ["a", "b"])

    def test_path_like_is_accepted(self):
        self.assertEqual(list(read_lines(pathlib.Path(self.write(b"a\n")))), ["a"])

    def test_characters_and_line_ends_across_a_block_border_stay_whole(self):
        special = "€\r\n𝄞\r\n"
        for before in range(readers._BLOCK_SIZE + 16 - len(special.encode("utf-8")), readers._BLOCK_SIZE + 17):
            text = "x" * before + special + "y"
            for name in ["plain", "gzip"]:
                with self.subTest(before=before, compression=name):
                    compressed = gzip.compress(text.encode("utf-8"), 1) if name == "gzip" else text.encode("utf-8")
                    self.assertEqual(list(read_lines(self.write(compressed))), ["x" * before + "€", "𝄞", "y"])

    def test_blocks_of_any_size_give_the_same_lines(self):
        rng = random.Random(7)
        alphabet = ["a", "bc", "\r", "\n", "\r\n", "é", "€", "𝄞", "\u2028", "\u0a0d"]
        for trial in range(150):
            text = "".join(rng.choice(alphabet) for _ in range(rng.randrange(80)))
            name = rng.choice(sorted(COMPRESS))
            encoding = rng.choice(["utf-8", "utf-16", "utf-32-le", "gb18030"])
            sizes = {"_BLOCK_SIZE": rng.randrange(1, 20), "_PIECE_SIZE": rng.randrange(16, 100)}
            with self.subTest(trial=trial, text=text, compression=name, encoding=encoding, sizes=sizes):
                path = self.write(COMPRESS[name](text.encode(encoding)))
                with mock.patch.multiple(readers, **sizes):
                    self.assertEqual(list(read_lines(path, encoding)), split(text))

    def test_memory_stays_at_a_few_blocks(self):
        line = "0123456789" * 100
        data = (line + "\n").encode("utf-8") * 3000
        # Levels at which the decompressors themselves hold little; zstandard sets no limit to what one piece becomes.
        for name, compressed in [
            ("plain", data),
            ("gzip", gzip.compress(data)),
            ("bzip2", bz2.compress(data, 1)),
            ("xz", lzma.compress(data, preset=0)),
        ]:
            with self.subTest(compression=name):
                path = self.write(compressed)
                with mock.patch.multiple(readers, _BLOCK_SIZE=1 << 15, _PIECE_SIZE=1 << 12):
                    tracemalloc.start()
                    try:
                        self.assertTrue(all(read == line for read in read_lines(path)))
                        peak = tracemalloc.get_traced_memory()[1]
                    finally:
                        tracemalloc.stop()
                self.assertLess(peak, len(data) // 4)

    def test_compressed_data_are_read_as_they_are_needed(self):
        # Data that become forty times as large: more than a block out of every piece.
        rng = random.Random(2)
        data = b"".join((b"%0512x\n" % rng.getrandbits(2048)) * 80 for _ in range(50))
        for name, compress in [
            ("gzip", gzip.compress),
            ("bzip2", lambda data: bz2.compress(data, 1)),
            ("xz", lzma.compress),
        ]:
            with self.subTest(compression=name):
                path = self.write(compress(data))
                with open(path, "rb") as file:
                    opening = mock.patch.object(readers, "open", lambda *_, file=file: file, create=True)
                    with opening, mock.patch.multiple(readers, _BLOCK_SIZE=1 << 12, _PIECE_SIZE=1 << 10):
                        lines = read_lines(path)
                        for _ in range(2000):
                            next(lines)
                        self.assertLess(file.tell(), 0.7 * os.path.getsize(path))
                        self.assertEqual(len(list(lines)), 2000)

    def test_reading_is_lazy(self):
        path = self.write(b"a\n")
        lines = read_lines(path)
        os.remove(path)
        with self.assertRaisesRegex(FileNotFoundError, re.escape(repr(path))):
            next(lines)


class TestFilesAreClosed(ReaderTestCase):
    def opened_by(self, use):
        opened = []

        def recording_open(*args, **options):
            opened.append(open(*args, **options))
            return opened[-1]

        with mock.patch.object(readers, "open", recording_open, create=True), warnings.catch_warnings():
            warnings.simplefilter("error")
            use()
            gc.collect()
        self.assertEqual(len(opened), 1)
        return opened[0]

    def test_file_is_closed_at_the_end(self):
        path = self.write(b"a\nb")
        lines = read_lines(path)
        self.assertTrue(self.opened_by(lambda: list(lines)).closed)

    def test_file_is_closed_when_the_iterator_is_dropped(self):
        path = self.write(gzip.compress(b"a\nb\n"))
        self.assertTrue(self.opened_by(lambda: next(read_lines(path))).closed)

    def test_file_is_closed_after_an_error(self):
        path = self.write(b"a\n\xff\n")
        lines = read_lines(path)
        self.assertTrue(self.opened_by(lambda: self.assertRaises(ValueError, list, lines)).closed)

    def test_iterator_that_was_never_used_opens_nothing(self):
        path = self.write(b"a\n")
        with mock.patch.object(readers, "open", create=True) as opening:
            read_lines(path)
            gc.collect()
        opening.assert_not_called()


class TestDamagedFiles(ReaderTestCase):
    LINES = ["line {} {}".format(i, zlib.crc32(str(i).encode("ascii"))) for i in range(5000)]
    DATA = "".join(line + "\n" for line in LINES).encode("utf-8")

    def setUp(self):
        super().setUp()
        smaller = mock.patch.object(readers, "_PIECE_SIZE", 1 << 12)  # so that the files above have many pieces
        smaller.start()
        self.addCleanup(smaller.stop)

    def check(self, path, lines, error, *patterns):
        self.assertEqual(lines, self.LINES[: len(lines)])
        self.assertRegex(str(error), "^" + re.escape("{}, line {}: ".format(path, len(lines) + 1)))
        for pattern in patterns:
            self.assertRegex(str(error), pattern)
        self.assertIsNotNone(error.__cause__)

    def test_truncated_file_gives_its_lines_then_an_error(self):
        for name, compress in COMPRESS.items():
            if name == "plain":
                continue
            whole = compress(self.DATA)
            for cut in [1, 10, len(whole) // 2, len(whole) - 17]:
                with self.subTest(compression=name, cut=cut):
                    path = self.write(whole[:-cut], "cut." + name)
                    lines, error = self.read_until_error(path, ValueError)
                    self.check(path, lines, error, name + " data end too early")
                    if name == "gzip":
                        text = zlib.decompressobj(31).decompress(whole[:-cut])
                        self.assertEqual(len(lines), text.count(b"\n"))

    def test_damaged_deflate_block_gives_every_line_before_it(self):
        for num_lines in [0, 1, 30, len(self.LINES)]:
            with self.subTest(num_lines=num_lines):
                compressor = zlib.compressobj(6, zlib.DEFLATED, 31)
                good = compressor.compress("".join(line + "\n" for line in self.LINES[:num_lines]).encode("utf-8"))
                path = self.write(good + compressor.flush(zlib.Z_FULL_FLUSH) + b"\xff" * 300)
                lines, error = self.read_until_error(path, ValueError)
                self.assertEqual(len(lines), num_lines)
                self.check(path, lines, error, "damaged gzip data: .*invalid block type")
                self.assertIsInstance(error.__cause__, zlib.error)

    def test_damage_behind_the_first_member_gives_that_member(self):
        for name, compress in COMPRESS.items():
            if name == "plain":
                continue
            with self.subTest(compression=name):
                path = self.write(compress(self.DATA) + b"no member of anything")
                lines, error = self.read_until_error(path, ValueError)
                self.assertEqual(len(lines), len(self.LINES))
                self.check(path, lines, error, "damaged {} data".format(name))

    def test_wrong_checksum_is_noticed_at_the_end(self):
        data = bytearray(gzip.compress(self.DATA))
        data[-5] ^= 1
        path = self.write(bytes(data))
        lines, error = self.read_until_error(path, ValueError)
        self.assertEqual(len(lines), len(self.LINES))
        self.check(path, lines, error, "damaged gzip data: .*incorrect (data|length) check")

    def test_flipped_bytes_never_pass_as_good_data(self):
        whole = gzip.compress(self.DATA[:6000])
        rng = random.Random(3)
        for trial in range(25):
            data = bytearray(whole)
            data[rng.randrange(10, len(data) - 8)] ^= 1 << rng.randrange(8)
            with self.subTest(trial=trial):
                path = self.write(bytes(data))
                first = self.read_until_error(path, ValueError)
                self.assertEqual(first[0], self.read_until_error(path, ValueError)[0])
                self.assertIn(path, str(first[1]))

    def test_bytes_that_are_no_utf_8_give_the_lines_before_then_an_error(self):
        for name, compress in COMPRESS.items():
            for num_lines in [0, 6, len(self.LINES)]:
                with self.subTest(compression=name, num_lines=num_lines):
                    good = "".join(line + "\n" for line in self.LINES[:num_lines]).encode("utf-8")
                    path = self.write(compress(good + b"bad \xe2\x82 byte\nnever read\n"))
                    lines, error = self.read_until_error(path, ValueError)
                    self.assertEqual(len(lines), num_lines)
                    self.check(path, lines, error, "0xe282 is not utf-8: invalid continuation byte")
                    self.assertIsInstance(error.__cause__, UnicodeDecodeError)

    def test_character_cut_off_at_the_end_is_an_error(self):
        for encoding, data in {"utf-8": b"a\nb\n\xe2\x82", "utf-16-le": b"a\0\n\0b\0\n\0\x01"}.items():
            with self.subTest(encoding=encoding):
                path = self.write(data)
                lines, error = self.read_until_error(path, ValueError, encoding=encoding)
                self.assertEqual(lines, ["a", "b"])
                self.assertRegex(str(error), re.escape(path) + ", line 3: .* is not " + encoding)

    def test_undecodable_bytes_are_located_for_blocks_of_any_size(self):
        data = "é\n€\n𝄞\n".encode("utf-8") + b"x\xffy\n"
        for size in range(1, len(data)):
            with self.subTest(size=size), mock.patch.object(readers, "_BLOCK_SIZE", size):
                path = self.write(gzip.compress(data))
                lines, error = self.read_until_error(path, ValueError)
                self.assertEqual(lines, ["é", "€", "𝄞"])
                self.assertRegex(str(error), "line 4: 0xff is not utf-8")

    def test_byte_order_mark_is_taken_before_undecodable_bytes_too(self):
        path = self.write(codecs.BOM_UTF8 + b"a\nb\xff\n")
        lines, error = self.read_until_error(path, ValueError, encoding="utf-8-sig")
        self.assertEqual(lines, ["a"])
        self.assertRegex(str(error), re.escape(path) + ", line 2: 0xff is not utf-8-sig")

    def test_utf_16_without_its_byte_order_mark_names_the_file(self):
        path = self.write("a\n".encode("utf-16-be"))
        error = self.read_until_error(path, ValueError, encoding="utf-16")[1]
        self.assertRegex(str(error), re.escape(path) + ", line 1: .*BOM")

    def test_missing_and_unreadable_files_name_the_file(self):
        missing = self.path("nowhere.txt")
        self.assertIn(missing, str(self.read_until_error(missing, FileNotFoundError)[1]))
        if os.name == "posix":
            self.assertIn(self.folder, str(self.read_until_error(self.folder, IsADirectoryError)[1]))

    def test_failing_read_names_file_and_line_and_keeps_its_type(self):
        path = self.write(b"a\nb\n")

        class FailingFile:
            def __init__(self, error):
                self.answers = [b"a\nb\nc", error]

            def __enter__(self):
                return self

            def __exit__(self, *exception):
                pass

            def read(self, size):
                answer = self.answers.pop(0)
                if isinstance(answer, bytes):
                    return answer
                raise answer

        for error in [OSError(5, "Input/output error"), TimeoutError(110, "Connection timed out")]:
            with self.subTest(error=error):
                with mock.patch.object(readers, "open", lambda *_, error=error: FailingFile(error), create=True):
                    lines, raised = self.read_until_error(path, OSError)
                self.assertEqual(lines, ["a", "b"])
                self.assertIs(type(raised), type(error))
                self.assertEqual((raised.errno, raised.filename), (error.errno, path))
                self.assertIn("{} (at line 3)".format(error.strerror), str(raised))
                self.assertIs(raised.__cause__, error)

    def test_zstd_without_a_package_says_which_one_to_install(self):
        path = self.write(b"\x28\xb5\x2f\xfd" + bytes(20))
        with mock.patch.dict(sys.modules, {"zstandard": None, "compression.zstd": None}):
            error = self.read_until_error(path, ImportError)[1]
        self.assertIn(path, str(error))
        self.assertRegex(str(error), "needs the package 'zstandard'")

    @unittest.skipUnless(os.name == "posix", "needs named pipes")
    def test_damage_in_a_pipe_is_an_error_too(self):
        import threading

        path = self.path("pipe")
        os.mkfifo(path)
        data = gzip.compress(b"a\n") + b"garbage"
        writer = threading.Thread(target=pathlib.Path(path).write_bytes, args=(data,))
        writer.start()
        lines, error = self.read_until_error(path, ValueError)
        writer.join()
        self.assertEqual(lines, ["a"])
        self.assertRegex(str(error), re.escape(path) + ", line 2: damaged gzip data")


class TestReadLinesArguments(unittest.TestCase):
    def test_bad_arguments_are_refused_at_once(self):
        with self.assertRaisesRegex(TypeError, "path must be a str or PathLike, got 3"):
            read_lines(3)
        with self.assertRaisesRegex(ValueError, "encoding must be .*, got 'klingon'"):
            read_lines("chunk", encoding="klingon")
        for encoding in ["rot13", "zip", 3, None]:
            with self.subTest(encoding=encoding):
                with self.assertRaisesRegex(ValueError, "encoding must be a text .*, got {!r}$".format(encoding)):
                    read_lines("chunk", encoding=encoding)


class TestSkipErrors(ReaderTestCase):
    """What skip_errors makes of a reader whose chunks are lists: items, or an error to be raised."""

    def read(self, chunk):
        for item in chunk:
            if isinstance(item, BaseException):
                raise item
            yield item

    def test_items_before_the_damage_come_then_the_chunk_ends(self):
        for number in [0, 1, 2, 3, 100, 5000]:
            with self.subTest(number=number):
                reports = []
                chunk = list(range(number)) + [ValueError("bad %s"), 7]
                self.assertEqual(list(skip_errors(self.read, reports.append)(chunk)), list(range(number)))
                self.assertEqual(reports, ["{}: skipped from item {} on, ValueError: bad %s".format(chunk, number)])

    def test_chunk_without_damage_is_not_changed(self):
        items = [[], ["a"], [None] * 3000, iter("abc"), (), range(10), {1: 2}]
        for chunk in items:
            with self.subTest(chunk=repr(chunk)[:30]):
                expected = "abc" if chunk is items[3] else chunk
                read = skip_errors(lambda chunk: chunk, self.fail)
                self.assertEqual(list(read(chunk)), list(expected))

    def test_lists_are_handed_on_so_that_they_can_be_entered_anywhere(self):
        for chunk in [[1, 2], (1, 2)]:
            self.assertIs(skip_errors(lambda chunk: chunk)(chunk), chunk)

    def test_error_before_the_first_item_is_damage_too(self):
        def read(chunk):
            raise FileNotFoundError(2, "No such file or directory", chunk)

        reports = []
        self.assertEqual(list(skip_errors(read, reports.append)("part-1")), [])
        self.assertRegex(reports[0], "part-1: skipped from item 0 on, FileNotFoundError: .*No such file")
        self.assertEqual(list(skip_errors(len, reports.append)("part-2")), [])  # whose result is no iterable
        self.assertRegex(reports[1], "part-2: skipped from item 0 on, TypeError: ")

    def test_what_is_no_damage_passes(self):
        errors = [
            KeyboardInterrupt(),
            SystemExit(1),
            MemoryError(),
            ImportError("no module"),
            ModuleNotFoundError("no module"),
            NameError("misspelled"),
            UnboundLocalError("misspelled"),
            OSError(24, "Too many open files"),
            OSError(12, "Cannot allocate memory"),
        ]
        for error in errors:
            for before in [0, 3]:
                with self.subTest(error=error, before=before):
                    items = skip_errors(self.read, self.fail)(list(range(before)) + [error])
                    read = []
                    with self.assertRaises(type(error)) as caught:
                        for item in items:
                            read.append(item)
                    self.assertIs(caught.exception, error)
                    self.assertEqual(read, list(range(before)) if isinstance(error, Exception) else read)

            def fail(chunk, error=error):
                raise error

            with self.subTest(error=error), self.assertRaises(type(error)):
                skip_errors(fail, self.fail)(1)

    def test_stop_iteration_of_a_reader_is_no_end(self):
        def read(chunk):
            raise StopIteration(chunk)

        items = SelectManyIterator(NativeCheckpointableIterator([1]), skip_errors(read, self.fail))
        with self.assertRaisesRegex(RuntimeError, "StopIteration"):
            next(items)

    def test_runs_grow_however_slow_the_consumer_is(self):
        now, asked = [0.0], []
        read = skip_errors(lambda chunk: (asked.append(item) or item for item in chunk))
        with mock.patch.object(readers, "perf_counter", lambda: now[0]):
            items = iter(read(range(100)))
            for _ in range(30):
                next(items)
                now[0] += 1
        self.assertEqual(len(asked), 1 + 2 + 4 + 8 + 16)

    def test_damage_is_logged_as_a_warning_by_default(self):
        path = self.write(gzip.compress(b"a\nb\n")[:-10], "cut.gz")
        with self.assertLogs("infinibatch.readers", "WARNING") as logs:
            lines = list(skip_errors(read_lines)(path))
        self.assertEqual(len(logs.output), 1)
        pattern = re.escape(path) + ": skipped from item {0} on, ValueError: {1}, line {2}: the gzip data end too early"
        self.assertRegex(logs.output[0], pattern.format(len(lines), re.escape(path), len(lines) + 1))

    def test_resume_around_damage_is_exact(self):
        for name, compress in COMPRESS.items():
            if name == "plain":
                continue
            with self.subTest(compression=name):
                paths = []
                for chunk in "abc":
                    lines = "".join("{}{}\n".format(chunk, number) for number in range(12)).encode("utf-8")
                    data = compress(lines)
                    paths.append(self.write(data[:-10] if chunk == "b" else data, "{}.{}".format(chunk, name)))
                reports = []

                def make(paths=paths, reports=reports):
                    read = skip_errors(read_lines, reports.append)
                    return SelectManyIterator(NativeCheckpointableIterator(paths), read)

                items = list(make())
                self.assertEqual(len(reports), 1)
                self.assertIn(paths[1], reports[0])
                self.assertEqual(items[:12], ["a{}".format(number) for number in range(12)])
                self.assertEqual(items[-12:], ["c{}".format(number) for number in range(12)])
                middle = items[12:-12]
                self.assertEqual(middle, ["b{}".format(number) for number in range(12)][: len(middle)])
                check_iterator(make, items)

    def test_reader_of_other_processes_skips_too(self):
        paths = [self.write(data, name) for name, data in [("a", b"1\n"), ("b", b"2\n\xff\n"), ("c", b"3\n")]]
        read = skip_errors(read_lines, len)
        with ParallelSelectManyIterator(NativeCheckpointableIterator(paths), read, 2) as lines:
            self.assertEqual(list(lines), ["1", "2", "3"])

    def test_it_can_be_pickled(self):
        path = self.write(b"1\n\xff\n")
        read = pickle.loads(pickle.dumps(skip_errors(read_lines, len)))
        self.assertEqual(list(read(path)), ["1"])

    def test_items_are_not_asked_for_long_before_they_are_needed(self):
        asked = []

        def read(chunk):
            for number in range(100000):
                asked.append(number)
                yield number

        items = iter(skip_errors(read)("chunk"))
        next(items)
        self.assertEqual(len(asked), 1)
        for number in range(1, 1500):
            self.assertEqual(next(items), number)
            self.assertLessEqual(len(asked) - number, 1000)

    def test_error_of_the_log_function_is_raised(self):
        def log(text):
            raise ArithmeticError("disk full")

        with self.assertRaisesRegex(ArithmeticError, "disk full"):
            list(skip_errors(self.read, log)([1, ValueError("bad")]))

    def test_bad_arguments_are_refused(self):
        with self.assertRaisesRegex(TypeError, "read_chunk_fn must be callable, got 'x'"):
            skip_errors("x")
        with self.assertRaisesRegex(TypeError, "log must be callable, got 3"):
            skip_errors(read_lines, 3)


class TestFindChunks(ReaderTestCase):
    def make(self, *names):
        for name in names:
            path = self.path(name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            open(path, "w").close()

    def find(self, *patterns):
        found = find_chunks([self.path(pattern) for pattern in patterns])
        return [os.path.relpath(path, self.folder).replace(os.sep, "/") for path in found]

    def test_order_is_natural(self):
        self.make("c-10.gz", "c-2.gz", "c-1.gz", "c-2b.gz", "c-02.gz", "c-1000000000000000000000.gz", "c.gz")
        self.assertEqual(
            self.find("c*.gz"),
            ["c-1.gz", "c-02.gz", "c-2.gz", "c-2b.gz", "c-10.gz", "c-1000000000000000000000.gz", "c.gz"],
        )

    def test_numbers_compare_with_texts_at_any_place(self):
        self.make("1a", "a1", "b", "2", "10/x", "9/x")
        self.assertEqual(self.find("*", "*/*"), ["1a", "2", "9/x", "10/x", "a1", "b"])

    def test_wildcards(self):
        self.make("a1.txt", "a2.txt", "b1.txt", "sub/a3.txt", "sub/deep/a4.txt")
        cases = {
            "a*.txt": ["a1.txt", "a2.txt"],
            "?1.txt": ["a1.txt", "b1.txt"],
            "[!a]*.txt": ["b1.txt"],
            "**/a*.txt": ["a1.txt", "a2.txt", "sub/a3.txt", "sub/deep/a4.txt"],
        }
        for pattern, expected in cases.items():
            with self.subTest(pattern=pattern):
                self.assertEqual(self.find(pattern), expected)

    def test_braces(self):
        self.make("d-008.tar", "d-009.tar", "d-010.tar", "d-8.tar", "d-9.tar", "x.gz", "y.gz", "y.zst", "a{b}c")
        cases = {
            "d-{008..010}.tar": ["d-008.tar", "d-009.tar", "d-010.tar"],
            "d-{8..9}.tar": ["d-8.tar", "d-9.tar"],
            "d-{9..8}.tar": ["d-8.tar", "d-9.tar"],
            "{y,x}.gz": ["x.gz", "y.gz"],
            "{x,y}.*": ["x.gz", "y.gz", "y.zst"],
            "{d-{8..9}.tar,y.{gz,zst}}": ["d-8.tar", "d-9.tar", "y.gz", "y.zst"],
            "*.{gz,bz2,zst}": ["x.gz", "y.gz", "y.zst"],
            "{x,}{,y}.gz": None,
            "a{b}*": ["a{b}c"],
        }
        for pattern, expected in cases.items():
            with self.subTest(pattern=pattern):
                if expected is None:
                    self.assertRaises(FileNotFoundError, self.find, pattern)
                else:
                    self.assertEqual(self.find(pattern), expected)

    def test_several_patterns_give_each_file_once_in_one_order(self):
        self.make("a2", "a10", "b1")
        self.assertEqual(self.find("b*", "a10", "a*"), ["a2", "a10", "b1"])
        self.assertEqual(self.find("a*", "b*"), ["a2", "a10", "b1"])

    def test_path_that_exists_is_taken_literally(self):
        self.make("a[1].gz", "a1.gz", "b{1,2}", "b1", "b2")
        self.assertEqual(self.find("a[1].gz"), ["a[1].gz"])
        self.assertEqual(self.find("b{1,2}"), ["b{1,2}"])

    def test_folders_are_left_out(self):
        self.make("sub/a", "a")
        self.assertEqual(self.find("*"), ["a"])
        with self.assertRaisesRegex(FileNotFoundError, "no file matches the pattern .*sub"):
            self.find("sub")

    def test_str_and_path_like_are_accepted_alone_and_in_lists(self):
        self.make("a")
        path = self.path("a")
        for pattern in [path, pathlib.Path(path), [path], (pathlib.Path(path), path)]:
            with self.subTest(pattern=pattern):
                self.assertEqual(find_chunks(pattern), [path])

    def test_no_match_names_the_pattern(self):
        self.make("a-1.gz", "a-3.gz")
        for pattern in ["*.txt", "a-1.txt", "a-{1..3}.gz", "*.{txt,csv}"]:
            with self.subTest(pattern=pattern):
                with self.assertRaisesRegex(FileNotFoundError, re.escape(repr(self.path(pattern)))):
                    self.find("a-1.gz", pattern)

    def test_missing_name_within_braces_is_named(self):
        self.make("a-1.gz", "a-3.gz")
        with self.assertRaisesRegex(FileNotFoundError, re.escape(repr(self.path("a-2.gz")))):
            self.find("a-{1..3}.gz")

    def test_braces_are_spelled_out_one_by_one(self):
        self.make("a-1.gz", "a-2.gz")
        with self.assertRaisesRegex(FileNotFoundError, re.escape(repr(self.path("a-3.gz")))):
            self.find("a-{1..%d}.gz" % 10**15)

    def test_bad_arguments_are_refused(self):
        with self.assertRaisesRegex(ValueError, r"pattern must hold at least one path, got \[\]"):
            find_chunks([])
        for pattern in [3, b"a", [b"a"], None, [["a"]]]:
            with self.subTest(pattern=pattern), self.assertRaisesRegex(TypeError, "pattern must be a path .*, got "):
                find_chunks(pattern)


@unittest.skipIf(fsspec is None, "needs the package fsspec")
class TestRemote(ReaderTestCase):
    def setUp(self):
        super().setUp()
        self.memory = fsspec.filesystem("memory")
        self.addCleanup(self.memory.store.clear)

    def put(self, name, data):
        with fsspec.open("memory://" + name, "wb") as file:
            file.write(data)
        return "memory://" + name

    def serve(self):
        """Serve the folder over HTTP, and return its URL."""
        if importlib.util.find_spec("aiohttp") is None:
            self.skipTest("needs the package aiohttp")
        import http.server
        import threading

        folder = self.folder

        class Handler(http.server.SimpleHTTPRequestHandler):
            def translate_path(self, path):
                return os.path.join(folder, *path.split("/"))

            def log_message(self, *args):
                pass

        server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()

        def stop():
            server.shutdown()
            thread.join()
            server.server_close()

        self.addCleanup(stop)
        return "http://127.0.0.1:{}/".format(server.server_address[1])

    def test_urls_are_read_like_files(self):
        for name, compress in COMPRESS.items():
            with self.subTest(compression=name):
                url = self.put("/folder/" + name, compress("one\ntwö\r\nthree".encode("utf-8")))
                self.assertEqual(list(read_lines(url)), ["one", "twö", "three"])
        path = self.write(gzip.compress(b"a\nb\n"))
        self.assertEqual(list(read_lines("file://" + path)), ["a", "b"])
        self.assertEqual(list(readers.read_jsonl(self.put("/x.jsonl", b"1\n[2]\n"))), [1, [2]])
        self.assertEqual([dict(row) for row in readers.read_csv(self.put("/x.csv", b"a\n1\n"))], [{"a": "1"}])

    def test_other_formats_are_read_from_urls(self):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            member = tarfile.TarInfo("a.txt")
            member.size = 3
            tar.addfile(member, io.BytesIO(b"abc"))
        url = self.put("/x.tar", buffer.getvalue())
        self.assertEqual(list(readers.read_tar(url)), [{"__key__": "a", "__file__": url, "txt": b"abc"}])
        try:
            pyarrow = importlib.import_module("pyarrow")
            parquet = importlib.import_module("pyarrow.parquet")
        except ImportError:
            return
        table = pyarrow.table({"a": [1, 2, 3]})
        buffer = io.BytesIO()
        parquet.write_table(table, buffer)
        self.assertEqual(list(readers.read_parquet(self.put("/x.parquet", buffer.getvalue()))), table.to_pylist())
        buffer = io.BytesIO()
        with pyarrow.ipc.new_file(buffer, table.schema) as writer:
            writer.write_table(table)
        self.assertEqual(list(readers.read_arrow(self.put("/x.arrow", buffer.getvalue()))), table.to_pylist())

    def test_chunks_are_found_in_natural_order(self):
        for number in [1, 2, 10]:
            self.put("/a/part-{}.txt".format(number), b"line\n")
        self.put("/a/b/part-3.txt", b"line\n")
        found = find_chunks("memory://a/part-*.txt")
        self.assertEqual([url.rsplit("/", 1)[1] for url in found], ["part-1.txt", "part-2.txt", "part-10.txt"])
        self.assertEqual([list(read_lines(url)) for url in found], [["line"]] * 3)
        self.assertEqual(find_chunks("memory://a/part-{1..2}.txt"), ["memory://a/part-1.txt", "memory://a/part-2.txt"])
        self.assertTrue(any(url.endswith("/a/b/part-3.txt") for url in find_chunks("memory://a/**/part-*.txt")))
        path = self.write(b"line\n", "part-7.txt")
        self.assertEqual(find_chunks("file://" + self.path("part-[5-9].txt")), ["file://" + path])

    def test_missing_urls_are_named(self):
        self.put("/a/part-1.txt", b"line\n")
        for pattern, message in [
            ("memory://a/part-{1..2}.txt", "no such file: 'memory://a/part-2.txt' (of the pattern "),
            ("memory://a/none*", "no file matches the pattern 'memory://a/none*'"),
            ("memory://a", "no file matches the pattern 'memory://a'"),
        ]:
            with self.subTest(pattern=pattern), self.assertRaisesRegex(FileNotFoundError, re.escape(message)):
                find_chunks(pattern)
        lines, error = self.read_until_error("memory://nowhere", FileNotFoundError)
        self.assertEqual((lines, error.filename), ([], "memory://nowhere"))
        with self.assertRaisesRegex(ValueError, "wildcards need a URL of one protocol, got 'simplecache::memory://a/"):
            find_chunks("simplecache::memory://a/*")

    def test_unknown_protocol_is_an_error_that_names_the_url(self):
        for use in [find_chunks, lambda url: list(read_lines(url))]:
            with self.assertRaisesRegex(ValueError, "nonsense://a.*nonsense"):
                use("nonsense://a")

    def test_damage_is_an_error_that_names_url_and_line(self):
        url = self.put("/cut.gz", gzip.compress(b"line\n" * 100)[:-9])
        lines, error = self.read_until_error(url, ValueError)
        self.assertGreater(len(lines), 0)
        self.assertRegex(str(error), "^" + re.escape("{}, line {}: the gzip data end".format(url, len(lines) + 1)))

    def test_errors_of_a_protocol_while_reading_are_os_errors_that_name_url_and_line(self):
        class ProtocolError(Exception):
            pass

        class Failing(io.BytesIO):
            def readinto(self, buffer):
                if self.tell() >= 3000:
                    raise ProtocolError("lost")
                return super().readinto(memoryview(buffer)[:100])

        opened = mock.Mock(**{"open.return_value": Failing(b"line\n" * 1000)})
        with mock.patch.object(fsspec, "open", return_value=opened), mock.patch.object(readers, "_BLOCK_SIZE", 500):
            lines, error = self.read_until_error("memory://x", OSError)
        self.assertGreater(len(lines), 300)
        self.assertRegex(str(error), "^memory://x, line {}: ProtocolError: lost$".format(len(lines) + 1))
        with mock.patch.object(fsspec, "open", side_effect=ProtocolError("no route")):
            _, error = self.read_until_error("memory://x", OSError)
        self.assertEqual(str(error), "memory://x: cannot be reached: ProtocolError: no route")

    def test_pipeline_over_urls_restores_exactly(self):
        urls = [self.put("/p/{}.txt".format(i), b"".join(b"%d.%d\n" % (i, j) for j in range(3))) for i in range(3)]

        def make():
            return SelectManyIterator(NativeCheckpointableIterator(urls), read_lines)

        check_iterator(make, ["{}.{}".format(i, j) for i in range(3) for j in range(3)])

    def test_http_is_read_in_this_and_in_other_processes(self):
        url = self.serve()
        for number in range(4):
            self.write(gzip.compress(b"".join(b"%d.%d\n" % (number, i) for i in range(5000))), "{}.gz".format(number))
        urls = [url + "{}.gz".format(number) for number in range(4)]
        self.assertEqual(find_chunks(url + "{0..3}.gz"), urls)
        expected = ["{}.{}".format(number, i) for number in range(4) for i in range(5000)]
        source = NativeCheckpointableIterator(urls)
        self.assertEqual(list(SelectManyIterator(source, read_lines)), expected)
        with ParallelSelectManyIterator(NativeCheckpointableIterator(urls), read_lines, 2) as lines:
            self.assertEqual(list(lines), expected)
        with self.assertRaisesRegex(FileNotFoundError, "nothing.gz"):
            list(read_lines(url + "nothing.gz"))

    def test_mapped_lines_need_a_file(self):
        with self.assertRaisesRegex(ValueError, "path must be a file that can be mapped, got the URL 'memory://a'"):
            readers.MappedLines("memory://a")


class TestRemoteWithoutFsspec(ReaderTestCase):
    def test_missing_package_is_named(self):
        with mock.patch.dict(sys.modules, dict.fromkeys(["fsspec", "fsspec.core", "fsspec.asyn"])):
            for use in [find_chunks, lambda url: list(read_lines(url))]:
                with self.assertRaisesRegex(ImportError, "^s3://bucket/a.gz: URLs need the package 'fsspec'"):
                    use("s3://bucket/a.gz")


if __name__ == "__main__":
    unittest.main()
