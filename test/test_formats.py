"""Readers of JSON lines, CSV, tar, Parquet, Arrow and memory-mapped lines."""

import bz2
import codecs
import csv
import errno
import gc
import gzip
import importlib
import io
import json
import lzma
import os
import pathlib
import pickle
import random
import re
import sys
import tarfile
import tracemalloc
import unittest
from unittest import mock

import test_readers

from infinibatch import readers
from infinibatch.iterators import FilterIterator, NativeCheckpointableIterator, SelectManyIterator
from infinibatch.readers import (
    MappedLines,
    read_arrow,
    read_csv,
    read_jsonl,
    read_lines,
    read_parquet,
    read_tar,
    skip_errors,
)
from infinibatch.testing import check_iterator

COMPRESS = test_readers.COMPRESS

try:
    pyarrow = importlib.import_module("pyarrow")
    importlib.import_module("pyarrow.parquet")
except ImportError:
    pyarrow = None

needs_pyarrow = unittest.skipIf(pyarrow is None, "needs the package pyarrow")


class FormatTestCase(test_readers.ReaderTestCase):
    def until_error(self, items, error_type=ValueError):
        read = []
        with self.assertRaises(error_type) as caught:
            for item in items:
                read.append(item)
        return read, str(caught.exception)

    def assertFails(self, items, expected, *message):
        """Check the items before an error, and its message, of which each part is a pattern or, as a path, literal."""
        read, text = self.until_error(items)
        self.assertEqual(read, expected)
        self.assertRegex(text, "".join(message))


class TestJsonLines(FormatTestCase):
    def test_values_of_any_kind_come_in_order(self):
        values = [{"a": [1, 2.5, None], "ä": "\u2028\x85\r"}, [], "text", 3, True, None, {"b": {"c": "𝄞"}}]
        for ascii_only in [True, False]:
            text = "".join(json.dumps(value, ensure_ascii=ascii_only) + "\n" for value in values)
            for name, compress in COMPRESS.items():
                with self.subTest(ascii_only=ascii_only, compression=name):
                    path = self.write(compress(text.encode("utf-8")))
                    self.assertEqual(list(read_jsonl(path)), values)

    def test_blank_lines_and_white_space_and_byte_order_mark_are_passed_over(self):
        path = self.write(b'\xef\xbb\xbf\n{"a": 1}\r\n \t\n\n  [2] \n\n3')
        self.assertEqual(list(read_jsonl(path)), [{"a": 1}, [2], 3])

    def test_file_without_values_gives_nothing(self):
        for data in [b"", b"\n", b" \r\n\t"]:
            with self.subTest(data=data):
                self.assertEqual(list(read_jsonl(self.write(data))), [])

    def test_bad_line_gives_the_values_before_then_an_error_with_its_number(self):
        cases = [
            (b'{"a": 1', r"Expecting ',' delimiter, column 8"),
            (b"{'a': 1}", "Expecting property name enclosed in double quotes, column 2"),
            (b'{"a": 1} {"a": 2}', "Extra data, column 10"),
            (b"1, 2", "Extra data, column 2"),
            (b'{"a": "\x01"}', "Invalid control character at, column 8"),
            (b"[" * 200000, "recursion"),
            (b"\xa0", "0xa0 is not utf-8"),
            ("\u00a0".encode("utf-8"), "Expecting value, column 1"),
        ]
        for bad, pattern in cases:
            for before in [0, 6]:
                with self.subTest(bad=bad[:20], before=before):
                    data = b'\n{"a": 0}\n' * (before // 2) + bad + b'\n{"a": 9}\n'
                    path = self.write(gzip.compress(data), "bad.jsonl.gz")
                    self.assertFails(
                        read_jsonl(path),
                        [{"a": 0}] * (before // 2),
                        re.escape(path),
                        ", line %d: " % (before + 1),
                        ".*",
                        pattern,
                    )

    def test_line_numbers_count_over_blocks(self):
        lines = [b'{"number": %d}' % number for number in range(500)]
        with mock.patch.multiple(readers, _BLOCK_SIZE=100):
            for bad in [0, 6, 250, 499]:
                with self.subTest(bad=bad):
                    path = self.write(b"\n".join(lines[:bad] + [b"{"] + lines[bad + 1 :]))
                    expected = [{"number": number} for number in range(bad)]
                    self.assertFails(read_jsonl(path), expected, re.escape(path), ", line %d: not JSON" % (bad + 1))

    def test_cut_off_file_gives_its_values_then_an_error(self):
        data = gzip.compress(b"".join(b'{"number": %d}\n' % number for number in range(1000)))
        path = self.write(data[:-10])
        values, text = self.until_error(read_jsonl(path))
        self.assertEqual(values, [{"number": number} for number in range(len(values))])
        self.assertGreater(len(values), 900)
        self.assertRegex(text, re.escape(path) + ", line {}: .*too early".format(len(values) + 1))

    def test_skipping_errors_keeps_the_values_of_all_other_lines_before_the_damage_and_other_chunks(self):
        paths = [self.write(b"1\n2\n3\n", "a"), self.write(b"4\n5\n{\n6\n", "b"), self.write(b"7\n8\n", "c")]
        reports = []
        read = skip_errors(read_jsonl, reports.append)
        self.assertEqual([list(read(path)) for path in paths], [[1, 2, 3], [4, 5], [7, 8]])
        self.assertEqual(len(reports), 1)
        self.assertRegex(reports[0], re.escape(paths[1]) + ": skipped from item 2 on, .*line 3")

    def test_file_is_closed_after_an_error(self):
        path = self.write(b"1\n{\n")
        values = read_jsonl(path)
        with mock.patch.object(readers, "open", create=True) as opening:
            file = open(path, "rb")
            opening.return_value = file
            with self.assertRaises(ValueError) as caught:
                list(values)
            self.assertTrue(file.closed)
            del caught

    def test_missing_file_and_bad_arguments(self):
        missing = self.path("nowhere")
        self.assertIn(missing, self.until_error(read_jsonl(missing), FileNotFoundError)[1])
        with self.assertRaisesRegex(TypeError, "path must be a str or PathLike, got 3"):
            read_jsonl(3)


class TestCsv(FormatTestCase):
    def rows(self, text, *args, **options):
        return [dict(row) for row in read_csv(self.write(text.encode("utf-8")), *args, **options)]

    def test_rows_are_dicts_by_the_names_of_the_header(self):
        text = "a,b\r\n1,2\r\n\r\n3,\r\n"
        for name, compress in COMPRESS.items():
            with self.subTest(compression=name):
                rows = list(read_csv(self.write(compress(text.encode("utf-8")))))
                self.assertEqual(rows, [{"a": "1", "b": "2"}, {"a": "3", "b": ""}])
                self.assertEqual(list(rows[0]), ["a", "b"])

    def test_newlines_within_quotes_are_kept(self):
        for newline in ["\n", "\r\n", "\r", "\n\n"]:
            with self.subTest(newline=newline):
                rows = self.rows('a,b\n"1{0}{0}x",2\n"3","{0}"\n'.format(newline))
                self.assertEqual(rows, [{"a": "1{0}{0}x".format(newline), "b": "2"}, {"a": "3", "b": newline}])

    def test_line_ends_of_any_system_end_rows(self):
        for newline in ["\n", "\r\n", "\r"]:
            for last in ["", newline]:
                with self.subTest(newline=newline, last=last):
                    self.assertEqual(
                        self.rows(newline.join(["a", "1", "\u2028\x85"]) + last), [{"a": "1"}, {"a": "\u2028\x85"}]
                    )

    def test_blocks_of_any_size_give_what_the_csv_module_gives(self):
        rng = random.Random(4)
        pieces = ["x", ",", '"', "\n", "\r\n", "\r", "ä", " "]
        for trial in range(300):
            fields = [["".join(rng.choice(pieces) for _ in range(rng.randrange(6))) for _ in "ab"] for _ in range(4)]
            out = io.StringIO(newline="")
            newline = rng.choice(["\n", "\r\n", "\r"])
            csv.writer(out, lineterminator=newline, quoting=csv.QUOTE_ALL).writerows([["a", "b"]] + fields)
            size = rng.randrange(1, 30)
            with self.subTest(trial=trial, text=out.getvalue(), size=size), mock.patch.object(
                readers, "_BLOCK_SIZE", size
            ):
                self.assertEqual(self.rows(out.getvalue()), [dict(zip("ab", row)) for row in fields])

    def test_file_whose_lines_end_at_carriage_returns_is_not_read_at_once(self):
        path = self.write(b"a\r" + b"1\r" * 5000)
        with open(path, "rb", buffering=0) as file:
            opening = mock.patch.object(readers, "open", lambda *_: file, create=True)
            with opening, mock.patch.object(readers, "_BLOCK_SIZE", 100):
                rows = read_csv(path)
                next(rows)
                self.assertLess(file.tell(), 500)
                self.assertEqual(len(list(rows)), 4999)

    def test_options_are_those_of_the_csv_module(self):
        self.assertEqual(self.rows("a;b\n'1;';2\n", delimiter=";", quotechar="'"), [{"a": "1;", "b": "2"}])
        self.assertEqual(self.rows("a\tb\n1\t2\n", dialect="excel-tab"), [{"a": "1", "b": "2"}])
        self.assertEqual(self.rows("1,2\n", fieldnames=["x", "y"]), [{"x": "1", "y": "2"}])
        self.assertEqual(
            self.rows("1,2,3\n4\n", fieldnames=["x", "y"], restkey="more", restval="-"),
            [{"x": "1", "y": "2", "more": ["3"]}, {"x": "4", "y": "-"}],
        )
        self.assertEqual(self.rows("1,2,3\n", fieldnames=["x"], restkey=None), [{"x": "1", None: ["2", "3"]}])

    def test_byte_order_mark_is_passed_over_and_encodings_are_decoded(self):
        path = self.write(b"\xef\xbb\xbfa\n\xc3\xa4\n")
        self.assertEqual(list(read_csv(path)), [{"a": "ä"}])
        path = self.write("a\nä\n".encode("utf-16"))
        self.assertEqual(list(read_csv(path, "utf-16")), [{"a": "ä"}])

    def test_empty_file_gives_nothing(self):
        for text in ["", "a,b\n", "\n\na,b"]:
            with self.subTest(text=text):
                self.assertEqual(self.rows(text), [])

    def test_unclosed_quote_is_an_error_after_the_rows_before_it(self):
        good = ["{},x".format(number) for number in range(1, 10001)]
        for number in [5, 10000]:
            with self.subTest(row=number):
                lines = ["number,text"] + good
                lines[number] = '{},"x'.format(number)
                path = self.write("\n".join(lines).encode("utf-8") + b"\n", "quote.csv")
                expected = [{"number": str(i), "text": "x"} for i in range(1, number)]
                place = r", row {} \(line {}\): ".format(number, number + 1)
                self.assertFails(read_csv(path), expected, re.escape(path), place, ".*a quote .*not closed")

    def test_unclosed_quote_in_a_large_file_is_noticed_at_the_limit_of_a_field(self):
        lines = b'number,text\n1,"x\n' + b"%d,x\n" * 2000000
        path = self.write(gzip.compress(lines, 1))
        rows = read_csv(path)
        with open(path, "rb") as file, mock.patch.object(readers, "open", lambda *_: file, create=True):
            with mock.patch.multiple(readers, _BLOCK_SIZE=1 << 16, _PIECE_SIZE=1 << 10):
                self.assertFails(
                    rows,
                    [],
                    re.escape(path),
                    r", row 1 \(line 2\): field larger than .* \(131072\)",
                    "; a quote that is not closed, or raise csv.field_size_limit",
                )

    def test_field_beyond_the_limit_is_read_where_the_limit_is_raised(self):
        text = "a,b\n{},y\n".format("x" * 200000)
        path = self.write(text.encode("utf-8"))
        self.assertFails(read_csv(path), [], re.escape(path), r", row 1 \(line 2\): field larger")
        limit = csv.field_size_limit(1000000)
        try:
            self.assertEqual(self.rows(text), [{"a": "x" * 200000, "b": "y"}])
        finally:
            csv.field_size_limit(limit)

    def test_row_of_another_length_is_an_error(self):
        path = self.write(b'a,b\n1,2\n"3\n",4\n5,6,7\n')
        rows = [{"a": "1", "b": "2"}, {"a": "3\n", "b": "4"}]
        self.assertFails(read_csv(path), rows, re.escape(path), r", row 3 \(line 5\): 3 fields instead of 2; restkey=")
        path = self.write(b"a,b\n1\n")
        self.assertFails(read_csv(path), [], re.escape(path), r", row 1 \(line 2\): 1 fields instead of 2; restval=")

    def test_doubled_name_is_an_error(self):
        path = self.write(b"a,b,a\n1,2,3\n")
        self.assertFails(
            read_csv(path), [], re.escape(path), r", header \(line 1\): two fields are named 'a'; fieldnames"
        )
        self.assertEqual(len(list(read_csv(path, fieldnames=["a", "b", "c"]))), 2)
        with self.assertRaisesRegex(ValueError, "two fields are named 'x'"):
            read_csv(path, fieldnames=["x", "x"])

    def test_bytes_that_cannot_be_decoded_are_an_error_after_the_rows_before(self):
        for start in [b"", b"\xef\xbb\xbf"]:
            with self.subTest(start=start):
                path = self.write(start + b"a,b\n1,2\n3,\xff\n")
                self.assertFails(
                    read_csv(path),
                    [{"a": "1", "b": "2"}],
                    re.escape(path),
                    r", row 2 \(line 3\): 0xff is not utf-8-sig",
                )

    def test_strict_quotes_are_an_option(self):
        path = self.write(b'a,b\n"1"x,2\n')
        self.assertEqual([row["a"] for row in read_csv(path)], ["1x"])
        self.assertFails(read_csv(path, strict=True), [], re.escape(path), ", row 1 .*expected after '\"'")

    def test_bad_arguments_are_refused_at_once(self):
        with self.assertRaisesRegex(TypeError, "path must be a str or PathLike, got 3"):
            read_csv(3)
        with self.assertRaisesRegex(ValueError, "encoding must be .*, got 'klingon'"):
            read_csv("chunk", "klingon")
        for options in [{"delimeter": ";"}, {"delimiter": ";;"}, {"quoting": 17}]:
            with self.subTest(options=options), self.assertRaisesRegex(TypeError, "[dD]elimiter|delimeter|quoting"):
                read_csv("chunk", **options)
        with self.assertRaisesRegex(ValueError, "options must be those of the module csv: unknown dialect"):
            read_csv("chunk", dialect="klingon")


class TarTestCase(FormatTestCase):
    def tar(self, members, tar_format=tarfile.GNU_FORMAT):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tar_format) as tar:
            for name, data in members:
                member = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
        return out.getvalue()

    def special(self, name, kind, **attributes):
        member = tarfile.TarInfo(name)
        member.type = kind
        for key, value in attributes.items():
            setattr(member, key, value)
        return member

    def samples(self, members, **options):
        return list(read_tar(self.write(self.tar(members, **options))))


class TestTar(TarTestCase):
    def test_samples_come_in_file_order_with_the_bytes_of_their_members(self):
        rng = random.Random(6)
        members, expected = [], []
        for number in [3, 1, 2]:
            sample = {"__key__": "dir/{}".format(number), "__file__": self.path("chunk")}
            for field, size in [("jpg", rng.choice([0, 511, 512, 513])), ("json", 7), ("cls", 1 << 12)]:
                sample[field] = bytes(rng.randrange(256) for _ in range(size))
                members.append(("dir/{}.{}".format(number, field), sample[field]))
            expected.append(sample)
        for name, compress in COMPRESS.items():
            for tar_format in [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]:
                with self.subTest(compression=name, format=tar_format):
                    samples = list(read_tar(self.write(compress(self.tar(members, tar_format)))))
                    self.assertEqual(samples, expected)
                    self.assertEqual([list(sample) for sample in samples], [list(sample) for sample in expected])

    def test_name_is_split_at_the_first_dot_behind_the_last_slash(self):
        cases = {
            "a.seg.png": ("a", "seg.png"),
            "22.05.png": ("22", "05.png"),
            "Track 2.0.mp3": ("Track 2", "0.mp3"),
            "./a.jpg": ("a", "jpg"),
            "././a/b.jpg": ("a/b", "jpg"),
            "a.d/b.e/c.tar.gz": ("a.d/b.e/c", "tar.gz"),
            "a.JPG": ("a", "jpg"),
            "ä€.jpg": ("ä€", "jpg"),
            "/abs/a.jpg": ("/abs/a", "jpg"),
        }
        for name, (key, field) in cases.items():
            for tar_format in [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]:
                with self.subTest(name=name, format=tar_format):
                    (sample,) = self.samples([(name, b"x")], tar_format=tar_format)
                    self.assertEqual(sample, {"__key__": key, "__file__": self.path("chunk"), field: b"x"})

    def test_members_that_belong_to_no_sample_are_passed_over(self):
        members = [
            ("README", b"text" * 400),
            ("a.txt", b"1"),
            (".DS_Store", b"x"),
            ("sub/._a.txt", b"x"),
            (self.special("dir.d", tarfile.DIRTYPE), b""),
            (self.special("dir.e/", tarfile.DIRTYPE), b""),
            (self.special("link.txt", tarfile.SYMTYPE, linkname="a.txt"), b""),
            (self.special("pipe.txt", tarfile.FIFOTYPE), b""),
            (self.special("device.txt", tarfile.CHRTYPE), b""),
            ("b.txt", b"2"),
        ]
        samples = self.samples(members)
        self.assertEqual([(sample["__key__"], sample["txt"]) for sample in samples], [("a", b"1"), ("b", b"2")])

    def test_long_names(self):
        for length in [90, 99, 100, 101, 155, 256, 257, 1000]:
            for folders in [False, True]:
                key = ("d" * 40 + "/") * (length // 41) * folders
                key += "k" * (length - len(key))
                for tar_format in [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]:
                    with self.subTest(length=length, folders=folders, format=tar_format):
                        try:
                            data = self.tar([(key + ".jpg", b"1"), (key + ".json", b"2"), ("b.jpg", b"3")], tar_format)
                        except ValueError:
                            self.assertEqual(tar_format, tarfile.USTAR_FORMAT)  # which has no room for it
                            continue
                        first, second = read_tar(self.write(data))
                        self.assertEqual((first["__key__"], first["jpg"], first["json"]), (key, b"1", b"2"))
                        self.assertEqual((second["__key__"], second["jpg"]), ("b", b"3"))

    def test_long_links_do_not_disturb(self):
        for tar_format in [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]:
            link = self.special("n" * 150, tarfile.SYMTYPE, linkname="l" * 300)
            with self.subTest(format=tar_format):
                (sample,) = self.samples([(link, b""), ("a.txt", b"1")], tar_format=tar_format)
                self.assertEqual((sample["__key__"], sample["txt"]), ("a", b"1"))

    def test_size_may_be_binary_or_in_a_pax_header(self):
        whole = bytearray(self.tar([("a.txt", b"12345"), ("b.txt", b"6")]))
        whole[124:136] = b"\x80" + bytes(10) + b"\x05"
        self.set_checksum(whole, 0)
        self.assertEqual([sample["txt"] for sample in read_tar(self.write(bytes(whole)))], [b"12345", b"6"])
        member = tarfile.TarInfo("a.txt")
        member.pax_headers = {"size": "5", "comment": "x=y\nz"}
        whole = bytearray(self.tar([(member, b"12345"), ("b.txt", b"6")], tarfile.PAX_FORMAT))
        whole[1024 + 124 : 1024 + 136] = b"00000000000\0"
        self.set_checksum(whole, 1024)
        self.assertEqual([sample["txt"] for sample in read_tar(self.write(bytes(whole)))], [b"12345", b"6"])

    def set_checksum(self, data, offset, signed=False):
        header = data[offset : offset + 512]
        header[148:156] = b" " * 8
        total = sum(header) - 256 * signed * sum(byte > 127 for byte in header)
        data[offset + 148 : offset + 156] = b"%06o\0 " % total

    def test_what_gnu_headers_have_in_the_place_of_a_prefix_is_no_name(self):
        data = bytearray(self.tar([("a.txt", b"1")]))
        data[345:357] = b"14755234523\0"  # the time of access
        self.set_checksum(data, 0)
        self.assertEqual([sample["__key__"] for sample in read_tar(self.write(bytes(data)))], ["a"])

    def test_checksum_of_signed_bytes_is_accepted(self):
        data = bytearray(self.tar([("ä.txt", b"1")]))
        self.set_checksum(data, 0, signed=True)
        self.assertEqual([sample["__key__"] for sample in read_tar(self.write(bytes(data)))], ["ä"])

    def test_tars_one_behind_the_other_are_read_as_one(self):
        data = self.tar([("a.txt", b"1")]) + self.tar([("b.txt", b"2")])
        self.assertEqual([sample["txt"] for sample in read_tar(self.write(data))], [b"1", b"2"])

    def test_empty_tar_gives_nothing(self):
        self.assertEqual(self.samples([]), [])

    def test_missing_field_is_an_error_that_lists_the_fields(self):
        (sample,) = self.samples([("22.05.png", b"1"), ("22.json", b"2")])
        with self.assertRaisesRegex(KeyError, "no field 'png' in sample '22' of .*chunk, which has: 05.png, json"):
            sample["png"]
        self.assertIsNone(sample.get("png"))
        copy = pickle.loads(pickle.dumps(sample))
        self.assertEqual((type(copy), copy), (type(sample), sample))
        with self.assertRaisesRegex(KeyError, "which has: 05.png"):
            copy["png"]

    def test_one_member_is_in_memory_at_a_time(self):
        size = 1 << 20
        members = [("{}.bin".format(number), bytes(size)) for number in range(30)]
        path = self.write(self.tar(members + [("no-field", bytes(30 * size)), ("30.bin", b"x")]))
        gc.collect()
        tracemalloc.start()
        try:
            self.assertEqual(sum(len(sample["bin"]) for sample in read_tar(path)), 30 * size + 1)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        self.assertLess(peak, 6 * size)

    def test_blocks_of_any_size_give_the_same_samples(self):
        data = self.tar([("{}.txt".format(number), b"x" * number * 37) for number in range(20)])
        expected = list(read_tar(self.write(data)))
        for size in [1, 7, 511, 512, 513, 1000, 4096]:
            with self.subTest(size=size), mock.patch.object(readers, "_BLOCK_SIZE", size):
                self.assertEqual(list(read_tar(self.write(data))), expected)

    def test_bad_arguments_are_refused_at_once(self):
        with self.assertRaisesRegex(TypeError, "path must be a str or PathLike, got None"):
            read_tar(None)


class TestDamagedTar(TarTestCase):
    MEMBERS = [("{}.{}".format(n, field), field.encode("ascii") * 200) for n in range(8) for field in ["jpg", "txt"]]

    def test_tar_cut_off_anywhere_gives_whole_samples_then_an_error(self):
        data = self.tar(self.MEMBERS)
        expected = list(read_tar(self.write(data)))
        content = data.rstrip(b"\0")
        content_end = len(content) + -len(content) % 512
        for cut in sorted({0, 1, 100, content_end} | set(range(300, content_end, 256))):
            path = self.write(data[:cut])
            with self.subTest(cut=cut):
                samples, text = self.until_error(read_tar(path))
                self.assertEqual(samples, expected[: len(samples)])
                self.assertGreaterEqual(len(samples), cut // 3072 - 1)  # 3072 bytes each
                place = r", (member '\d\.(jpg|txt)' \()?offset (\d+)\)?: the tar ends too early"
                match = re.match(re.escape(path) + place, text)
                self.assertTrue(match, text)
                self.assertEqual(int(match.group(3)) % 512, 0)
                self.assertLessEqual(int(match.group(3)), cut)

    def test_compressed_tar_cut_off_is_an_error_that_names_file_and_member(self):
        for name, compress in [("gzip", gzip.compress), ("bzip2", lambda data: bz2.compress(data, 1))]:
            with self.subTest(compression=name):
                data = compress(self.tar([("{}.bin".format(n), os.urandom(5000)) for n in range(50)]))
                path = self.write(data[: len(data) // 2])
                samples, text = self.until_error(read_tar(path))
                self.assertRegex(text, re.escape(path) + r", member '\d+.bin' \(offset \d+\): .*too early")

    def test_damaged_header_is_an_error_and_not_the_end(self):
        data = self.tar(self.MEMBERS)
        for offset, value, pattern in [
            (3072 * 2 + 5, b"x", "no tar header here: its checksum is wrong"),
            (3072 * 2 + 148, b"9", "no tar header here: .* is no octal number"),
            (3072 * 2, bytes(range(256)) * 2, "no tar header here"),
        ]:
            with self.subTest(offset=offset):
                path = self.write(data[:offset] + value + data[offset + len(value) :])
                samples, text = self.until_error(read_tar(path))
                self.assertEqual([sample["__key__"] for sample in samples], ["0"])
                self.assertRegex(text, re.escape(path) + r", offset 6144: " + pattern)

    def test_file_that_is_no_tar_is_an_error(self):
        path = self.write(b"some text, long enough to be a header" * 100)
        self.assertFails(read_tar(path), [], re.escape(path), ", offset 0: no tar header here")

    def test_members_that_are_no_neighbours_are_an_error(self):
        path = self.write(self.tar([("a.jpg", b""), ("b.jpg", b""), ("a.json", b""), ("b.json", b"")]))
        samples, text = self.until_error(read_tar(path))
        self.assertEqual([sample["__key__"] for sample in samples], ["a"])
        self.assertRegex(text, re.escape(path) + r", member 'a.json' \(offset 1024\): .*sample 'a'.*neighbours")

    def test_doubled_member_is_an_error(self):
        for second in ["b.jpg", "./b.jpg", "b.JPG"]:
            with self.subTest(second=second):
                path = self.write(self.tar([("a.jpg", b"0"), ("b.jpg", b"1"), (second, b"2"), ("c.jpg", b"3")]))
                samples, text = self.until_error(read_tar(path))
                self.assertEqual([sample["__key__"] for sample in samples], ["a"])
                self.assertRegex(text, re.escape(path) + r", member '{}' .*'b' has the field 'jpg'".format(second))

    def test_same_key_in_two_files_is_no_error(self):
        paths = [self.write(self.tar([("a.jpg", b"1")]), name) for name in ["x.tar", "y.tar"]]
        samples = SelectManyIterator(NativeCheckpointableIterator(paths), read_tar)
        self.assertEqual([(sample["__key__"], sample["__file__"]) for sample in samples], [("a", p) for p in paths])

    def test_content_that_is_elsewhere_is_an_error(self):
        sparse = tarfile.TarInfo("s.txt")
        sparse.pax_headers = {"GNU.sparse.major": "1"}
        cases = [
            (self.special("l.txt", tarfile.LNKTYPE, linkname="a.txt"), tarfile.GNU_FORMAT, "it is a hard link"),
            (self.special("s.txt", tarfile.GNUTYPE_SPARSE), tarfile.GNU_FORMAT, "it is a sparse file"),
            (sparse, tarfile.PAX_FORMAT, "it is a sparse file"),
        ]
        for member, tar_format, pattern in cases:
            with self.subTest(pattern=pattern, format=tar_format):
                path = self.write(self.tar([("a.txt", b"1"), (member, b""), ("b.txt", b"2")], tar_format))
                samples, text = self.until_error(read_tar(path))
                self.assertRegex(text, re.escape(path) + ", member '[ls].txt' .*" + pattern)

    def test_damaged_pax_header_is_an_error(self):
        member = tarfile.TarInfo("a.txt")
        member.pax_headers = {"comment": "text"}
        data = self.tar([(member, b"1")], tarfile.PAX_FORMAT)
        for old, new in [
            (b"16 comment", b"99 comment"),
            (b"16 comment", b"xx comment"),
            (b"=text\n", b"+text\n"),
            (b"16 comment", b"00 comment"),
        ]:
            with self.subTest(new=new):
                self.assertIn(old, data)
                path = self.write(data.replace(old, new))
                self.assertFails(read_tar(path), [], re.escape(path), ", offset 0: damaged pax header")

    def test_skipping_errors_goes_on_with_the_next_file(self):
        data = self.tar(self.MEMBERS)
        duplicates = self.tar([("x.jpg", b"0"), ("y.jpg", b"1"), ("y.jpg", b"2")])
        for bad, num_before in [(data[:10000], 3), (duplicates, 1)]:
            with self.subTest(num_before=num_before):
                paths = [self.write(data, "1.tar"), self.write(bad, "2.tar"), self.write(data, "3.tar")]
                reports = []

                def make(paths=paths, reports=reports):
                    read = skip_errors(read_tar, reports.append)
                    return SelectManyIterator(NativeCheckpointableIterator(paths), read)

                counts = [0, 0, 0]
                for sample in make():
                    counts[paths.index(sample["__file__"])] += 1
                self.assertEqual(counts, [8, num_before, 8])
                self.assertEqual(len(reports), 1)
                self.assertRegex(reports[0], "2.tar: skipped from item {} on, ValueError: .*2.tar".format(num_before))
                check_iterator(make, through_json=False)


class TestMappedLines(FormatTestCase):
    TEXTS = ["", "\n", "a", "a\n", "\n\nb", "a\r\nb\r\n", "a\rb\r", "ä\u2028\x85\n€\n", "x" * 5000 + "\ny\n", "\r\n"]

    def test_lines_are_those_of_read_lines(self):
        for text in self.TEXTS:
            for size in [1, 3, 1 << 20]:
                with self.subTest(text=text[:20], size=size), mock.patch.object(readers, "_BLOCK_SIZE", size):
                    path = self.write(text.encode("utf-8"), "text{}-{}".format(self.TEXTS.index(text), size))
                    expected = list(read_lines(path))
                    for _ in range(2):  # without an index, and with one
                        lines = MappedLines(path)
                        self.assertEqual(len(lines), len(expected))
                        self.assertEqual(list(lines), expected)
                        self.assertEqual([lines[i] for i in range(len(lines))], expected)
                        self.assertEqual(lines[:], expected)

    def test_slices_and_negative_indices_are_those_of_a_list(self):
        expected = ["line {}".format(number) for number in range(20)]
        lines = MappedLines(self.write("\n".join(expected).encode("utf-8")))
        for index in [
            slice(3, 7),
            slice(None, None, 3),
            slice(None, None, -1),
            slice(-5, None),
            slice(7, 3),
            slice(15, 99),
            slice(99, 100),
            slice(2, 2),
            0,
            19,
            -1,
            -20,
        ]:
            with self.subTest(index=index):
                self.assertEqual(lines[index], expected[index])
        for index in [20, -21]:
            with self.subTest(index=index), self.assertRaisesRegex(IndexError, "range of 20 lines, got " + str(index)):
                lines[index]
        self.assertRaises(TypeError, lambda: lines["3"])
        self.assertIn("line 7", lines)
        self.assertEqual(lines.index("line 7"), 7)
        self.assertEqual(list(reversed(lines)), expected[::-1])

    def test_any_line_is_reached_without_reading_those_before(self):
        path = self.write(b"".join(b"line %d\n" % number for number in range(50000)))
        lines = MappedLines(path)
        for number in [0, 25000, 49999]:
            touched = []
            data = lines._data

            class Recording:
                def __getitem__(self, index, data=data, touched=touched):
                    value = data[index]
                    touched.append(len(value) if isinstance(index, slice) else 1)
                    return value

            lines._data = Recording()
            try:
                self.assertEqual(lines[number], "line {}".format(number))
            finally:
                lines._data = data
            self.assertLess(sum(touched), 20)

    def test_index_is_kept_beside_the_data_and_hidden(self):
        path = self.write(b"a\nb\n", "lines.txt")
        MappedLines(path)
        self.assertEqual(sorted(os.listdir(self.folder)), [".lines.txt.index", "lines.txt"])
        self.assertEqual(readers.find_chunks(self.path("*")), [path])
        with mock.patch.object(MappedLines, "_find_lines", side_effect=AssertionError("made anew")):
            self.assertEqual(list(MappedLines(path)), ["a", "b"])

    def test_stale_or_damaged_index_is_made_anew(self):
        text = b"one\ntwo\nthree\n" * 3000

        def grow(path, index):
            with open(path, "ab") as file:
                file.write(b"four\n")

        def rewrite(path, index):
            with open(path, "r+b") as file:
                file.write(b"on\ne")

        def rewrite_at_the_same_time(path, index):
            status = os.stat(path)
            rewrite(path, index)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

        def touch(path, index):
            status = os.stat(path)
            with open(path, "r+b") as file:  # in the middle, where the ends do not show it
                file.seek(20000)
                file.write(b"\n\n\n\n")
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1000000000))

        def truncate_index(path, index):
            os.truncate(index, os.path.getsize(index) - 8)

        def truncate_to(size):
            return lambda path, index: os.truncate(index, size)

        def foreign(path, index):
            with open(index, "wb") as file:
                file.write(b"no index of lines at all" * 10)

        def remove(path, index):
            os.remove(index)

        changes = [
            grow,
            rewrite,
            rewrite_at_the_same_time,
            touch,
            truncate_index,
            truncate_to(0),
            truncate_to(5),
            truncate_to(48),
            foreign,
            remove,
        ]
        for number, change in enumerate(changes):
            with self.subTest(change=change.__name__, number=number):
                path = self.write(text, "lines{}".format(number))
                index = self.path(".lines{}.index".format(number))
                MappedLines(path)
                change(path, index)
                lines = MappedLines(path)
                self.assertEqual([lines[i] for i in range(len(lines))], list(read_lines(path)))
                with mock.patch.object(MappedLines, "_find_lines", side_effect=AssertionError("made anew")):
                    self.assertEqual(list(MappedLines(path)), list(read_lines(path)))

    def test_two_sets_joined_give_both_in_order(self):
        texts = [b"a\nb\n", b"c\nd"]
        paths = [self.write(text, "set{}".format(number)) for number, text in enumerate(texts)]
        joined = self.write(texts[0] + texts[1], "joined")
        lines = SelectManyIterator(NativeCheckpointableIterator(paths), MappedLines)
        self.assertEqual(list(lines), ["a", "b", "c", "d"])
        self.assertEqual(list(MappedLines(joined)), ["a", "b", "c", "d"])
        # The index of the first, beside the joined data.
        with open(self.path(".set0.index"), "rb") as file:
            self.write(file.read(), ".joined.index")
        self.assertEqual(list(MappedLines(joined)), ["a", "b", "c", "d"])

    def test_wrong_offsets_in_an_index_are_an_error_that_names_the_files(self):
        path = self.write(b"one\ntwo\nthree\nfour\n", "lines")
        index = self.path(".lines.index")
        MappedLines(path)
        with open(index, "r+b") as file:
            file.seek(40 + 8)
            file.write((6).to_bytes(8, sys.byteorder))  # the second line begins at 4
        lines = MappedLines(path)
        for item in [0, 1, slice(0, 1), slice(1, 3)]:
            with self.subTest(item=item):
                with self.assertRaisesRegex(ValueError, re.escape(path) + ", line [12]: .*" + re.escape(index)):
                    lines[item]
        self.assertEqual(lines[:2], ["one", "two"])
        self.assertEqual(lines[2:], ["three", "four"])

    def test_index_is_written_whole_or_not_at_all(self):
        path = self.write(b"a\nb\n", "lines")
        for function in ["fsync", "replace"]:
            for error in [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()]:
                with self.subTest(function=function, error=error), mock.patch.object(os, function, side_effect=error):
                    if isinstance(error, OSError):
                        self.assertEqual(list(MappedLines(path)), ["a", "b"])
                    else:
                        self.assertRaises(KeyboardInterrupt, MappedLines, path)
                self.assertEqual(os.listdir(self.folder), ["lines"])

    def test_index_is_in_memory_where_the_folder_cannot_be_written(self):
        path = self.write(b"a\nb\n", "lines")

        def refuse(name, mode="r", *args):
            if "r" not in mode:
                raise PermissionError(errno.EACCES, "Permission denied", name)
            return open(name, mode, *args)

        with mock.patch.object(readers, "open", refuse, create=True):
            self.assertEqual(MappedLines(path)[1], "b")
        self.assertEqual(os.listdir(self.folder), ["lines"])

    def test_pickles_by_path(self):
        path = self.write(b"a\nb\n" * 10000)
        data = pickle.dumps(MappedLines(path))
        self.assertLess(len(data), 300)
        self.assertEqual(pickle.loads(data)[1], "b")
        self.assertEqual(repr(pickle.loads(data)), "MappedLines({!r})".format(path))

    def test_lines_before_undecodable_bytes_come_first(self):
        path = self.write(b"".join(b"line %d\n" % number for number in range(1000)) + b"\xff\nmore\n")
        lines = MappedLines(path)
        self.assertFails(
            lines,
            ["line {}".format(number) for number in range(1000)],
            re.escape(path),
            ", line 1001: 0xff is not utf-8: invalid start byte",
        )
        self.assertEqual(lines[1001], "more")
        for index in [1000, slice(0, 1002)]:
            with self.subTest(index=index), self.assertRaisesRegex(ValueError, ", line 1001: 0xff is not utf-8"):
                lines[index]

    def test_pipeline_enters_at_any_position(self):
        paths = [self.write(b"".join(b"%d %d\n" % (n, i) for i in range(7)), "part{}".format(n)) for n in range(3)]
        expected = [line for path in paths for line in read_lines(path)]
        check_iterator(
            lambda: SelectManyIterator(NativeCheckpointableIterator(paths), MappedLines), expected, pickles=True
        )

    def test_what_cannot_be_mapped_is_refused(self):
        for name, compress in COMPRESS.items():
            if name != "plain":
                path = self.write(compress(b"a\n"))
                with self.subTest(compression=name):
                    with self.assertRaisesRegex(ValueError, re.escape(path) + " is {} data".format(name)):
                        MappedLines(path)
        with self.assertRaisesRegex(ValueError, "is zstd data; MappedLines needs a plain text file"):
            MappedLines(self.write(b"\x28\xb5\x2f\xfd" + bytes(20)))
        with self.assertRaisesRegex(FileNotFoundError, "nowhere"):
            MappedLines(self.path("nowhere"))
        with self.assertRaisesRegex(TypeError, "path must be a str or PathLike, got 3"):
            MappedLines(3)
        if os.path.exists("/dev/null"):
            with self.assertRaisesRegex(ValueError, "/dev/null is no regular file"):
                MappedLines("/dev/null")

    def test_path_like_is_accepted(self):
        self.assertEqual(MappedLines(pathlib.Path(self.write(b"a\n")))[0], "a")


NASTY = ["a", "bc", " ", "é", "𝄞", "\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\ufeff"]
NASTY += ['"', "'", ",", ";", "\\", "\t"]
LINE_ENDS = ["\r", "\n", "\r\n"]


def nasty_text(rng, pieces, length=12):
    return "".join(rng.choice(pieces) for _ in range(rng.randrange(length)))


class TestRoundTrips(FormatTestCase):
    """Generated data, written by each format's own writer, come back as they were."""

    def openers(self):
        """Yield functions that open a compressed file to write or to append another member."""
        yield "gzip", gzip.open
        yield "bzip2", bz2.open
        yield "xz", lzma.open
        if test_readers.zstandard is not None:
            yield "zstd", lambda path, mode: test_readers.zstandard.ZstdCompressor().stream_writer(open(path, mode))

    def test_lines_of_several_members(self):
        for name, opener in self.openers():
            rng = random.Random(name)
            for trial in range(10):
                lines = [nasty_text(rng, NASTY + ["\r"]).rstrip("\r") for _ in range(rng.randrange(50))]
                data = "".join(line + rng.choice(["\n", "\r\n"]) for line in lines).encode("utf-8")
                if lines and lines[-1]:
                    data = data[: len(data) - rng.randrange(2)].rstrip(b"\r")  # perhaps without its last end
                path = self.path("{}-{}".format(name, trial))
                cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(4)))
                for begin, end in zip([0] + cuts, cuts + [len(data)]):
                    with opener(path, "ab") as file:
                        file.write(data[begin:end])
                with self.subTest(compression=name, trial=trial):
                    self.assertEqual(list(read_lines(path)), lines)

    def test_json_values(self):
        rng = random.Random(1)

        def value(depth):
            kind = rng.randrange(7 if depth else 5)
            if kind < 5:
                text = nasty_text(rng, NASTY + LINE_ENDS + ["\0", "\ud800"])
                return [None, rng.random() < 0.5, rng.randrange(-(10**25), 10**25), rng.gauss(0, 1e9), text][kind]
            if kind == 5:
                return [value(depth - 1) for _ in range(rng.randrange(4))]
            return {nasty_text(rng, NASTY + LINE_ENDS): value(depth - 1) for _ in range(rng.randrange(4))}

        values = [value(3) for _ in range(300)]
        with gzip.open(self.path("a.jsonl"), "wt", encoding="ascii") as file:
            for one in values:
                json.dump(one, file)
                file.write("\n")
        self.assertEqual(list(read_jsonl(self.path("a.jsonl"))), values)
        text = "\n".join(json.dumps(one, ensure_ascii=False) for one in values if "\ud800" not in str(one))
        path = self.write(codecs.BOM_UTF8 + text.encode("utf-8", "ignore"))  # a lone surrogate in a key goes
        self.assertEqual(len(list(read_jsonl(path))), text.count("\n") + 1)

    def test_csv_rows_of_any_dialect(self):
        rng = random.Random(2)
        for trial in range(40):
            options = {
                "delimiter": rng.choice([",", ";", "\t"]),
                "quotechar": rng.choice(['"', "'"]),
                "lineterminator": rng.choice(["\r\n", "\n"]),
                "quoting": rng.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC]),
            }
            names = ["first", "second", 'the "third"'][: rng.randrange(1, 4)]
            # The writer leaves a lone carriage return without quotes unless its own line ends hold one.
            unsafe = options["lineterminator"] == "\n" and options["quoting"] == csv.QUOTE_MINIMAL
            pieces = NASTY + (["\n"] if unsafe else LINE_ENDS)
            rows = [{name: nasty_text(rng, pieces) for name in names} for _ in range(20)]
            with open(self.path("a.csv"), "w", newline="", encoding=rng.choice(["utf-8", "utf-8-sig"])) as file:
                writer = csv.DictWriter(file, names, **options)
                writer.writeheader()
                writer.writerows(rows)
            with self.subTest(trial=trial, options=options):
                read = {name: options[name] for name in ("delimiter", "quotechar")}
                self.assertEqual([dict(row) for row in read_csv(self.path("a.csv"), **read)], rows)

    def samples(self, rng):
        fields = ["jpg", "json", "seg.png", "05.txt"]
        for number in range(30):
            key = "{}{:05}".format(rng.choice(["", "a/", "a.b/", "ä\u2028/", "long" * 60 + "/"]), number)
            yield key, {name: os.urandom(rng.choice([0, 1, 511, 512, 513, 3000])) for name in fields[: number % 4 + 1]}

    def test_tar_of_any_format(self):
        rng = random.Random(3)
        for format in [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]:
            for mode in ["w", "w:gz", "w:bz2", "w:xz"]:
                samples = list(self.samples(rng))
                with tarfile.open(self.path("a.tar"), mode, format=format, encoding="utf-8") as tar:
                    for key, fields in samples:
                        for name, data in fields.items():
                            member = tarfile.TarInfo("{}.{}".format(key, name))
                            member.size = len(data)
                            tar.addfile(member, io.BytesIO(data))
                with self.subTest(format=format, mode=mode):
                    self.check_samples(self.path("a.tar"), samples)

    def check_samples(self, path, samples):
        read = list(read_tar(path))
        self.assertEqual([sample.pop("__key__") for sample in read], [key for key, _ in samples])
        self.assertEqual({sample.pop("__file__") for sample in read}, {path})
        self.assertEqual(read, [fields for _, fields in samples])
        self.assertEqual([list(sample) for sample in read], [list(fields) for _, fields in samples])

    def test_samples_that_webdataset_wrote_and_what_it_reads_of_them(self):
        try:
            webdataset = importlib.import_module("webdataset")
        except ImportError:
            self.skipTest("needs the package webdataset")
        samples = [(key, fields) for key, fields in self.samples(random.Random(4))]
        for name in ["a.tar", "a.tar.gz"]:
            path = self.path(name)
            with webdataset.TarWriter(path) as writer:
                for key, fields in samples:
                    writer.write(dict(fields, __key__=key))
            samples.sort()
            with self.subTest(name=name):
                read = list(read_tar(path))
                self.assertEqual(sorted(sample["__key__"] for sample in read), [key for key, _ in samples])
                for sample in read:
                    fields = dict(samples)[sample["__key__"]]
                    self.assertEqual({name: sample[name] for name in list(sample)[2:]}, fields)

    @needs_pyarrow
    def test_tables_with_nulls_nested_columns_and_groups_of_any_size(self):
        rng = random.Random(5)

        def some(make):
            return None if rng.random() < 0.2 else make()

        for trial in range(10):
            rows = [
                {
                    "text": some(lambda: nasty_text(rng, NASTY + LINE_ENDS + ["\0"])),
                    "number": some(lambda: rng.randrange(-(1 << 63), 1 << 63)),
                    "bytes": some(lambda: os.urandom(rng.randrange(20))),
                    "list": some(lambda: [some(lambda: [rng.random()]) for _ in range(rng.randrange(3))]),
                    "struct": some(lambda: {"a": some(lambda: "ä"), "b": {"c": some(lambda: True)}}),
                    "nothing": None,
                }
                for _ in range(rng.randrange(1, 80))
            ]
            schema = pyarrow.schema(
                [
                    ("text", pyarrow.string()),
                    ("number", pyarrow.int64()),
                    ("bytes", pyarrow.binary()),
                    ("list", pyarrow.list_(pyarrow.list_(pyarrow.float64()))),
                    ("struct", pyarrow.struct([("a", "string"), ("b", pyarrow.struct([("c", pyarrow.bool_())]))])),
                    ("nothing", pyarrow.null()),
                ]
            )
            columns = [pyarrow.array([row[name] for row in rows], schema.field(name).type) for name in schema.names]
            table = pyarrow.Table.from_arrays(columns, schema=schema)
            cuts = sorted({0, len(rows)} | {rng.randrange(len(rows)) for _ in range(3)})
            parts = [table.slice(begin, end - begin) for begin, end in zip(cuts, cuts[1:])]
            compression = rng.choice(["none", "snappy", "zstd", "gzip"])
            path = self.path("a.parquet")
            with pyarrow.parquet.ParquetWriter(path, schema, compression=compression) as writer:
                for part in parts:
                    writer.write_table(part)
            with self.subTest(trial=trial, format="parquet", compression=compression):
                self.assertEqual(list(read_parquet(path)), rows)
            for opener in [pyarrow.ipc.new_file, pyarrow.ipc.new_stream]:
                path = self.path("a.arrow")
                with opener(path, schema) as writer:
                    for part in parts:
                        writer.write_table(part)
                with self.subTest(trial=trial, format=opener.__name__):
                    self.assertEqual(list(read_arrow(path)), rows)

    def test_lines_of_fifty_megabytes(self):
        long = "\u2028x\x85" * (10 << 20)  # six bytes each
        for compress in [bytes, lambda data: gzip.compress(data, 1)]:
            path = self.write(compress(("a\n" + long + "\r\nb").encode("utf-8")))
            self.assertTrue(list(read_lines(path)) == ["a", long, "b"])  # assertEqual would show them
        path = self.write(json.dumps([long], ensure_ascii=False).encode("utf-8") + b"\n1\n")
        self.assertTrue(list(read_jsonl(path)) == [[long], 1])
        path = self.write(('a,b\n1,"' + long + '\n"\n').encode("utf-8"))
        before = csv.field_size_limit(1 << 30)
        try:
            self.assertTrue([dict(row) for row in read_csv(path)] == [{"a": "1", "b": long + "\n"}])
        finally:
            csv.field_size_limit(before)


class TestMemory(FormatTestCase):
    def test_values_and_rows_are_held_a_block_at_a_time(self):
        text = "0123456789" * 100
        for read, line, item in [
            (read_jsonl, json.dumps({"text": text}), {"text": text}),
            (lambda path: read_csv(path, fieldnames=["id", "text"]), '1,"{}"'.format(text), {"id": "1", "text": text}),
        ]:
            data = (line + "\n").encode("ascii") * 3000
            path = self.write(gzip.compress(data, 1))
            with mock.patch.multiple(readers, _BLOCK_SIZE=1 << 15, _PIECE_SIZE=1 << 12):
                tracemalloc.start()
                try:
                    number = 0
                    for value in read(path):
                        self.assertEqual(value, item)
                        number += 1
                    peak = tracemalloc.get_traced_memory()[1]
                finally:
                    tracemalloc.stop()
            self.assertEqual(number, 3000)
            self.assertLess(peak, len(data) // 4)

    def test_entering_mapped_lines_at_ten_million_reads_no_more_than_a_run(self):
        number = 10**7
        path = self.write(b"\n" * number + b"last\n")
        lines = MappedLines(path)
        read = []

        class Recording:
            def __init__(self, data):
                self.data = data

            def __getitem__(self, index):
                value = self.data[index]
                read.append(index)
                return value

        lines._data, lines._offsets = Recording(lines._data), Recording(lines._offsets)
        pipeline = SelectManyIterator(NativeCheckpointableIterator([path]), lambda _: lines)
        counts = []
        for position, expected in [(0, ""), (number, "last")]:
            with mock.patch.object(Recording, "__len__", lambda self: number + 2, create=True):
                pipeline.setstate({"source_state": {"num_items_yielded": 0}, "flattened_items_yielded": position})
                del read[:]
                self.assertEqual(next(pipeline), expected)
            counts.append(len(read))
        # A search in halves for the end of a run of lines, and little else.
        self.assertLess(max(counts), 40)


class TableTestCase(FormatTestCase):
    def table(self, num_rows, first=0):
        return pyarrow.table(
            {
                "number": list(range(first, first + num_rows)),
                "text": ["text {}".format(number) for number in range(first, first + num_rows)],
                "list": [[number] * (number % 3) for number in range(first, first + num_rows)],
            }
        )


@needs_pyarrow
class TestParquet(TableTestCase):
    def parquet(self, table, name="chunk.parquet", **options):
        path = self.path(name)
        pyarrow.parquet.write_table(table, path, **options)
        return path

    def test_rows_of_all_row_groups_come_once_in_order(self):
        table = self.table(17)
        path = self.path("groups.parquet")
        with pyarrow.parquet.ParquetWriter(path, table.schema) as writer:
            writer.write_table(table.slice(0, 10))
            writer.write_table(table.slice(10))
        for size in [1, 3, 7, 10, 1000]:
            with self.subTest(size=size), mock.patch.object(readers, "_ROWS_AT_A_TIME", size):
                self.assertEqual(list(read_parquet(path)), table.to_pylist())

    def test_columns_are_chosen_by_name(self):
        path = self.parquet(self.table(5))
        self.assertEqual(list(read_parquet(path, ["text"])), [{"text": "text {}".format(n)} for n in range(5)])
        self.assertEqual(list(next(read_parquet(path, ("list", "number"))).items()), [("list", []), ("number", 0)])
        self.assertFails(
            read_parquet(path, ["txet"]), [], re.escape(path), ".*no column 'txet', .*: number, text, list"
        )

    def test_resume_behind_a_filter_goes_on_within_the_row_group(self):
        paths = [self.parquet(self.table(1000, 1000 * n), "{}.parquet".format(n)) for n in range(2)]

        def make():
            rows = SelectManyIterator(NativeCheckpointableIterator(paths), read_parquet)
            return FilterIterator(rows, lambda row: row["number"] % 2 == 0)

        rows = make()
        self.assertEqual([next(rows)["number"] for _ in range(10)], list(range(0, 20, 2)))
        state = json.loads(json.dumps(rows.getstate()))
        resumed = make()
        resumed.setstate(state)
        self.assertEqual([row["number"] for row in resumed], list(range(20, 2000, 2)))

    def test_one_row_group_is_in_memory_at_a_time(self):
        size = 4 << 20
        path = self.path("large.parquet")
        column = pyarrow.array([os.urandom(1 << 12) for _ in range(size >> 12)])
        table = pyarrow.table({"data": column})
        with pyarrow.parquet.ParquetWriter(path, table.schema, compression="none", use_dictionary=False) as writer:
            for _ in range(50):
                writer.write_table(table)
        read = [0]

        class Counting(io.FileIO):
            def readinto(self, buffer):
                number = super().readinto(buffer)
                read[0] += number
                return number

            def read(self, size=-1):
                data = super().read(size)
                read[0] += len(data)
                return data

        before = pyarrow.total_allocated_bytes()
        peak = 0
        with mock.patch.object(readers, "open", lambda path, mode: Counting(path), create=True):
            for number, row in enumerate(read_parquet(path)):
                self.assertEqual(len(row["data"]), 1 << 12)
                if number == 0:
                    self.assertLess(read[0], 1.5 * size)
                peak = max(peak, pyarrow.total_allocated_bytes() - before)
        self.assertEqual(number + 1, 50 * table.num_rows)
        self.assertLess(peak, 3 * size)

    def test_damaged_file_is_an_error_that_names_it(self):
        path = self.parquet(self.table(1000), compression="gzip", row_group_size=100)
        with open(path, "rb") as file:
            whole = file.read()
        for name, data in [
            ("cut", whole[:-10]),
            ("empty", b""),
            ("text", b"no table" * 100),
            ("page", whole[:3000] + b"\xff" * 500 + whole[3500:]),
        ]:
            with self.subTest(damage=name):
                path = self.write(data, name + ".parquet")
                rows, text = self.until_error(read_parquet(path))
                self.assertEqual([row["number"] for row in rows], list(range(len(rows))))
                self.assertRegex(text, "^" + re.escape(path) + ", row {}: ".format(len(rows) + 1))
                reports = []
                self.assertEqual(list(skip_errors(read_parquet, reports.append)(path)), rows)
                self.assertEqual(len(reports), 1)


@needs_pyarrow
class TestArrow(TableTestCase):
    def arrow(self, table, opener, name="chunk.arrow", size=10, **options):
        path = self.path(name)
        with opener(path, table.schema, **options) as writer:
            for batch in table.to_batches(size):
                writer.write_batch(batch)
        return path

    def test_rows_of_files_and_streams_come_once_in_order(self):
        table = self.table(25)
        for opener in [pyarrow.ipc.new_file, pyarrow.ipc.new_stream]:
            path = self.arrow(table, opener)
            for size in [3, 10, 1000]:
                with self.subTest(opener=opener.__name__, size=size):
                    with mock.patch.object(readers, "_ROWS_AT_A_TIME", size):
                        self.assertEqual(list(read_arrow(path)), table.to_pylist())

    def test_resume_behind_a_filter_goes_on_within_the_record_batch(self):
        paths = [self.arrow(self.table(30, 30 * n), pyarrow.ipc.new_file, str(n), size=30) for n in range(2)]

        def make():
            rows = SelectManyIterator(NativeCheckpointableIterator(paths), read_arrow)
            return FilterIterator(rows, lambda row: row["number"] % 2 == 0)

        with mock.patch.object(readers, "_ROWS_AT_A_TIME", 7):
            check_iterator(make, [row for row in self.table(60).to_pylist() if row["number"] % 2 == 0])

    def test_one_record_batch_is_in_memory_at_a_time(self):
        size = 1 << 20
        table = pyarrow.table({"data": pyarrow.array([os.urandom(1 << 12) for _ in range(20 * size >> 12)])})
        for opener in [pyarrow.ipc.new_file, pyarrow.ipc.new_stream]:
            with self.subTest(opener=opener.__name__):
                path = self.arrow(table, opener, size=size >> 12)
                tracemalloc.start()
                before = pyarrow.total_allocated_bytes()
                peak = 0
                try:
                    for row in read_arrow(path):
                        self.assertEqual(len(row["data"]), 1 << 12)
                        peak = max(peak, pyarrow.total_allocated_bytes() - before)
                    peak += tracemalloc.get_traced_memory()[1]
                finally:
                    tracemalloc.stop()
                self.assertLess(peak, 8 * size)

    def test_damaged_file_is_an_error_that_names_it(self):
        for opener in [pyarrow.ipc.new_file, pyarrow.ipc.new_stream]:
            with open(self.arrow(self.table(1000), opener), "rb") as file:
                whole = file.read()
            for name, data in [("cut", whole[: len(whole) // 2]), ("empty", b""), ("text", b"no table" * 100)]:
                with self.subTest(opener=opener.__name__, damage=name):
                    path = self.write(data, name + ".arrow")
                    rows, text = self.until_error(read_arrow(path))
                    self.assertEqual([row["number"] for row in rows], list(range(len(rows))))
                    self.assertRegex(text, "^" + re.escape(path) + ", row {}: ".format(len(rows) + 1))

    def test_two_columns_of_one_name_are_an_error(self):
        table = pyarrow.Table.from_arrays([pyarrow.array([1]), pyarrow.array([2])], ["a", "a"])
        path = self.arrow(table, pyarrow.ipc.new_file)
        self.assertFails(read_arrow(path), [], re.escape(path), ", row 1: two columns have the same name, of: a, a")


class TestTablesWithoutPyarrow(FormatTestCase):
    def test_missing_package_is_named(self):
        path = self.write(b"PAR1")
        names = ["pyarrow", "pyarrow.parquet", "pyarrow.ipc"]
        for read, kind in [(read_parquet, "Parquet"), (read_arrow, "Arrow")]:
            with self.subTest(kind=kind), mock.patch.dict(sys.modules, dict.fromkeys(names)):
                text = self.until_error(read(path), ImportError)[1]
                self.assertRegex(text, re.escape(path) + ": {} data need the package 'pyarrow'".format(kind))
                with self.assertRaises(ImportError):  # which is no damage
                    list(skip_errors(read)(path))

    def test_missing_file_and_bad_arguments(self):
        path = self.path("nowhere.parquet")
        for read in [read_parquet, read_arrow]:
            with self.subTest(read=read.__name__):
                self.assertIn(path, self.until_error(read(path), FileNotFoundError)[1])
                with self.assertRaisesRegex(TypeError, "path must be a str or PathLike, got 3"):
                    read(3)
        for columns in ["text", [3], b"text", 3]:
            with self.subTest(columns=columns), self.assertRaisesRegex(TypeError, "columns must be a list of str"):
                read_parquet(path, columns)


if __name__ == "__main__":
    unittest.main()
