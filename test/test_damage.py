"""Every format, cut off at 200 places and with single bytes changed at 200 more."""

import bz2
import gzip
import io
import json
import lzma
import random
import re
import tarfile
import unittest
from unittest import mock

import test_readers
from test_formats import needs_pyarrow, pyarrow

from infinibatch import readers
from infinibatch.iterators import NativeCheckpointableIterator, SelectManyIterator
from infinibatch.readers import read_arrow, read_csv, read_jsonl, read_lines, read_parquet, read_tar, skip_errors

NUM_ITEMS = 30
NUM_PLACES = 200

NAMES = ["name {}\u2028\x85".format(i) * (i % 4) + str(i) for i in range(NUM_ITEMS)]


def text():
    return "".join(name + "\n" for name in NAMES).encode("utf-8")


def jsonl():
    return "".join(json.dumps({"id": i, "name": name}) + "\n" for i, name in enumerate(NAMES)).encode("ascii")


def csv():
    rows = ['{},"{}\n""{}"""\r\n'.format(i, name, i) for i, name in enumerate(NAMES)]
    return ("id,name\r\n" + "".join(rows)).encode("utf-8")


def tar(format=tarfile.PAX_FORMAT, long="long" * 40):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as file:
        for i in range(NUM_ITEMS):
            folder = long if i % 5 == 0 else "a"
            for field, data in [("txt", b"text %d" % i), ("bin", b"\xff" * i)]:
                member = tarfile.TarInfo("{}/{:03}.{}".format(folder, i, field))
                member.size = len(data)
                file.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def table():
    return pyarrow.table(
        {
            "id": list(range(NUM_ITEMS)),
            "name": NAMES,
            "list": [None if i % 7 == 0 else [i] * (i % 3) for i in range(NUM_ITEMS)],
            "nested": [{"a": i, "b": None} for i in range(NUM_ITEMS)],
        }
    )


def parquet(compression):
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table(), buffer, compression=compression, row_group_size=8)
    return buffer.getvalue()


def arrow(opener):
    buffer = io.BytesIO()
    with opener(buffer, table().schema) as writer:
        for batch in table().to_batches(8):
            writer.write_batch(batch)
    return buffer.getvalue()


class DamageTestCase(test_readers.ReaderTestCase):
    PLACE = "(line|row|header|member|offset) "

    def check(self, read, whole, damaged, name, may_differ=False):
        """Check what comes of a damaged chunk, and what comes around it where errors are skipped."""
        expected = list(read(self.write(whole, "whole." + name)))
        self.assertEqual(len(expected), NUM_ITEMS)
        for number, data in enumerate(damaged):
            path = self.write(data, "damaged." + name)
            items, error = [], None
            try:
                for item in read(path):
                    items.append(item)
            except (OSError, ValueError) as caught:
                error = str(caught)
            for item in items:
                if isinstance(item, dict) and "__file__" in item:
                    item["__file__"] = self.path("whole." + name)
            with self.subTest(name=name, number=number, error=error):
                if error is not None:
                    self.assertRegex(error, "^" + re.escape(path) + ", " + self.PLACE)
                if not may_differ:
                    self.assertEqual(items, expected[: len(items)])
                    self.assertTrue(error is not None or items == expected)
                if number % 10 == 0:
                    self.check_skipping(read, name, len(items), error)

    def check_skipping(self, read, name, num_items, error):
        reports = []
        whole, damaged = self.path("whole." + name), self.path("damaged." + name)

        def make():
            reader = skip_errors(read, log=reports.append)
            return SelectManyIterator(NativeCheckpointableIterator([whole, damaged, whole]), reader)

        items = list(make())
        self.assertEqual(len(items), 2 * NUM_ITEMS + num_items)
        self.assertEqual(len(reports), error is not None)
        if error is not None:
            self.assertIn(error, reports[0])
            self.assertTrue(reports[0].startswith("{}: skipped from item {} on, ".format(damaged, num_items)))
        end = NUM_ITEMS + num_items  # where the damage is
        for position in {0, NUM_ITEMS, max(NUM_ITEMS, end - 1), end, end + 1, len(items)}:
            first, second = make(), make()
            for _ in range(position):
                next(first)
            second.setstate(json.loads(json.dumps(first.getstate())))
            self.assertEqual(list(second), items[position:])

    def cuts(self, data):
        """The beginnings of the data, without those that are nothing or all of it."""
        step = max(1, len(data) // NUM_PLACES)
        return [data[:end] for end in range(1, len(data), step)]

    def flips(self, data):
        """The data with one byte changed."""
        rng = random.Random(len(data))
        for _ in range(NUM_PLACES):
            changed = bytearray(data)
            changed[rng.randrange(len(data))] ^= rng.randrange(1, 256)
            yield bytes(changed)


COMPRESSIONS = [(name, suffix) for name, suffix in [("gzip", "gz"), ("bzip2", "bz2"), ("xz", "xz"), ("zstd", "zst")]]
COMPRESS = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress}
if test_readers.zstandard is not None:
    # zstd has a checksum only where the writer asks for it, as the program zstd does.
    COMPRESS["zstd"] = lambda data: test_readers.zstandard.ZstdCompressor(write_checksum=True).compress(data)


class TestCompressed(DamageTestCase):
    FORMATS = [("txt", text, read_lines), ("jsonl", jsonl, read_jsonl), ("csv", csv, read_csv), ("tar", tar, read_tar)]

    def each(self):
        for name, make, read in self.FORMATS:
            for compression, suffix in COMPRESSIONS:
                if compression in COMPRESS and (name == "txt" or compression == "gzip"):
                    yield read, COMPRESS[compression](make()), "{}.{}".format(name, suffix)

    def test_cut_off_anywhere_it_gives_whole_items_then_an_error(self):
        for read, data, name in self.each():
            self.check(read, data, self.cuts(data), name)

    def test_changed_bytes_never_pass_without_an_error(self):
        for read, data, name in self.each():
            for changed in self.flips(data):
                path = self.write(changed, "changed." + name)
                items = []
                try:
                    for item in read(path):
                        items.append(item)
                except (OSError, ValueError) as error:
                    self.assertRegex(str(error), "^" + re.escape(path) + ", " + self.PLACE)
                else:  # changed where it does not matter, such as a time
                    self.assertEqual(items, list(read(self.write(data, "changed." + name))))

    def test_changed_bytes_are_skipped_with_what_follows_in_the_chunk_alone(self):
        for read, data, name in self.each():
            self.check(read, data, list(self.flips(data))[::4], name, may_differ=True)

    @unittest.skipUnless("zstd" in COMPRESS, "needs the package zstandard")
    def test_zstd_is_among_them(self):
        self.assertIn("txt.zst", [name for _, _, name in self.each()])


class TestPlain(DamageTestCase):
    def test_json_lines_cut_off_within_a_line(self):
        data = jsonl()
        cuts = [cut for cut in self.cuts(data) if not cut.endswith((b"}", b"\n"))]
        self.check(read_jsonl, data, cuts, "jsonl")

    def test_csv_cut_off_within_a_quote_or_before_it(self):
        data = csv()
        # Where only a line end is missing, or a file ends between rows, nobody can tell.
        cuts = [cut for cut in self.cuts(data) if b"\n" in cut and cut.count(b'"') % 2]
        self.assertGreater(len(cuts), NUM_PLACES // 2)
        self.check(read_csv, data, cuts, "csv")

    def test_text_cut_off_anywhere_keeps_the_lines_before(self):
        data = text()
        for cut in self.cuts(data):
            path = self.write(cut)
            lines, error = [], None
            try:
                for line in read_lines(path):
                    lines.append(line)
            except ValueError as caught:
                error = str(caught)  # within a character
                self.assertRegex(error, "^" + re.escape(path) + ", line ")
            num_whole = cut.count(b"\n")
            self.assertEqual(lines[:num_whole], NAMES[:num_whole])
            self.assertTrue(all(NAMES[num_whole].startswith(line) for line in lines[num_whole:]))

    def test_tar_cut_off_anywhere(self):
        for name, format in [("pax", tarfile.PAX_FORMAT), ("gnu", tarfile.GNU_FORMAT)]:
            data = tar(format)
            end = len(data.rstrip(b"\0"))  # behind it only the end marker, then padding
            cuts = [cut for cut in self.cuts(data) if len(cut) < end]
            self.check(read_tar, data, cuts, name + ".tar")

    def test_changed_byte_of_a_tar_is_an_error_or_in_the_content_of_one_member(self):
        data = tar(long="b")  # … nor of long names
        expected = list(read_tar(self.write(data)))
        num_errors = num_changed = 0
        for changed in self.flips(data):
            path = self.write(changed)
            samples = []
            try:
                for sample in read_tar(path):
                    samples.append(sample)
            except ValueError as error:
                num_errors += 1
                self.assertRegex(str(error), "^" + re.escape(path) + ", (member|offset) ")
                continue
            self.assertEqual([list(sample) for sample in samples], [list(sample) for sample in expected])
            num_different = 0
            for sample, good in zip(samples, expected):
                for field in list(good)[2:]:
                    self.assertEqual(len(sample[field]), len(good[field]))
                    num_different += sum(byte != other for byte, other in zip(sample[field], good[field]))
            self.assertLessEqual(num_different, 1)  # tar has no checksum of contents, …
            num_changed += num_different
        self.assertGreater(num_errors, NUM_PLACES // 3)
        self.assertGreater(num_changed, 0)


@needs_pyarrow
class TestTables(DamageTestCase):
    def read_all(self, read, data):
        """Return the rows and the error."""
        path = self.write(data)
        rows = []
        try:
            for row in read(path):
                rows.append(row)
        except (ValueError, MemoryError) as error:
            self.assertRegex(str(error), "^" + re.escape(path) + ", row {}: ".format(len(rows) + 1))
            return rows, error
        return rows, None

    def test_cut_off_anywhere_they_give_whole_rows_then_an_error(self):
        for name, data, read in [
            ("parquet", parquet("zstd"), read_parquet),
            ("file.arrow", arrow(pyarrow.ipc.new_file), read_arrow),
        ]:
            self.check(read, data, self.cuts(data), name)

    def test_stream_that_ends_between_messages_cannot_be_told_from_a_whole_one(self):
        data = arrow(pyarrow.ipc.new_stream)
        expected = list(read_arrow(self.write(data)))
        num_errors = 0
        for cut in self.cuts(data):
            rows, error = self.read_all(read_arrow, cut)
            self.assertEqual(rows, expected[: len(rows)])
            self.assertIn(len(rows), [0, 8, 16, 24, 30])
            num_errors += error is not None
        self.assertGreater(num_errors, NUM_PLACES * 0.9)

    def test_checksums_of_parquet_pages_are_looked_at(self):
        buffer = io.BytesIO()
        numbers = pyarrow.table({"number": list(range(5000))})
        options = {"compression": "none", "use_dictionary": False}
        try:
            pyarrow.parquet.write_table(numbers, buffer, write_page_checksum=True, **options)
            pyarrow.parquet.ParquetFile(buffer, page_checksum_verification=True)
        except TypeError:
            self.skipTest("needs a pyarrow that knows checksums of pages")
        data = bytearray(buffer.getvalue())
        place = data.index((4321).to_bytes(8, "little"))
        self.assertIsNone(self.read_all(read_parquet, data)[1])
        data[place] ^= 1
        rows, error = self.read_all(read_parquet, data)
        self.assertEqual(rows, numbers.to_pylist()[: len(rows)])
        self.assertRegex(str(error), "(?i)crc")

    def test_row_group_that_a_damaged_footer_leaves_out_is_missed(self):
        path = self.write(parquet("gzip"))

        def open_without_the_last_group(parquet_file, file):
            whole = parquet_file(file)
            return mock.Mock(
                wraps=whole, schema_arrow=whole.schema_arrow, metadata=whole.metadata, num_row_groups=3
            )

        with mock.patch.object(readers, "_open_parquet", open_without_the_last_group):
            rows = read_parquet(path)
            self.assertEqual([next(rows)["id"] for _ in range(24)], list(range(24)))
            with self.assertRaisesRegex(ValueError, re.escape(path) + ", row 25: .* 24 rows instead of 30"):
                next(rows)

    def test_changed_bytes_of_compressed_parquet_pages_are_an_error_or_in_names(self):
        data = parquet("gzip")
        expected = table().to_pylist()
        num_errors = 0
        for changed in self.flips(data):
            rows, error = self.read_all(read_parquet, changed)
            num_errors += error is not None
            if error is None:
                self.assertEqual([list(row.values()) for row in rows], [list(row.values()) for row in expected])
        self.assertGreater(num_errors, NUM_PLACES // 3)

    def test_changed_bytes_of_arrow_data_are_no_crash(self):
        # There is no checksum, but lengths and offsets into other memory must not be believed.
        for opener in [pyarrow.ipc.new_file, pyarrow.ipc.new_stream]:
            data = arrow(opener)
            num_errors = 0
            for changed in self.flips(data):
                rows, error = self.read_all(read_arrow, changed)
                self.assertTrue(all(len(row) == 4 for row in rows))
                num_errors += error is not None
            with self.subTest(opener=opener.__name__):
                self.assertGreater(num_errors, NUM_PLACES // 5)


class TestNamesThatTell(DamageTestCase):
    def test_file_that_ends_within_its_first_bytes_is_no_text_if_its_name_says_so(self):
        magics = [("a.gz", b"\x1f"), ("a.BZ2", b"BZh5"), ("a.bz2", b"BZh"), ("a.zst", b"("), ("a.xz", b"\xfd7")]
        for name, magic in magics:
            with self.subTest(name=name, magic=magic):
                path = self.write(magic, name)
                with self.assertRaisesRegex(ValueError, re.escape(path) + ", line 1: .* end too early"):
                    list(read_lines(path))
        for name, content in [("a.gz", b"(\n"), ("a.bz2", b"BZ!"), ("a.txt", b"BZh"), ("a.gz", b"")]:
            with self.subTest(name=name, content=content):
                self.assertEqual(list(read_lines(self.write(content, name))), content.decode("ascii").split())


if __name__ == "__main__":
    unittest.main()
