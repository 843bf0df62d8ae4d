"""The command split: what the chunks hold, and what is left when it does not end well."""

import collections
import gzip
import json
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import unittest
import zlib
from unittest import mock

import test_main

from infinibatch import _split, readers
from infinibatch.readers import find_chunks


class TestSplit(test_main.CommandTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        rng = random.Random(3)
        cls.lines = [b'{"number": %d, "text": "%s"}\r\n' % (i, b"\x85y\xff" * rng.randrange(40)) for i in range(300)]
        cls.lines[7] = b"\n"
        cls.lines[-1] = cls.lines[-1].rstrip()  # no newline at the end
        cls.data = b"".join(cls.lines)
        cls.input = os.path.join(cls.folder, "corpus.jsonl.gz")
        with gzip.open(cls.input, "wb") as file:
            file.write(cls.data)

    def setUp(self):
        super().setUp()
        self.out = os.path.join(self.own_folder, "out")

    def split(self, *args, inputs=None, out=None):
        """Return the chunks' contents, after looking at them and the manifest."""
        out = out or self.out
        status, text, err = self.run_command("split", *(inputs or [self.input]), "--out", out, *args)
        self.assertEqual((status, err), (0, ""))
        return self.read_split(out, text)

    def read_split(self, out, text):
        self.assertEqual(os.listdir(os.path.dirname(out)), [os.path.basename(out)])  # and nothing hidden
        with open(os.path.join(out, "manifest.json"), encoding="utf-8") as file:
            manifest = json.load(file)
        names = find_chunks(os.path.join(out, "chunk-*"))
        self.assertEqual([os.path.basename(name) for name in names], [chunk["name"] for chunk in manifest["chunks"]])
        self.assertEqual(len(os.listdir(out)), len(names) + 1)
        chunks = []
        for name, chunk in zip(names, manifest["chunks"]):
            with (gzip.open if name.endswith(".gz") else open)(name, "rb") as file:
                chunks.append(file.read())
            self.assertEqual(chunk["num_bytes"], len(chunks[-1]))
            self.assertEqual(chunk["num_lines"], len(chunks[-1].split(b"\n")) - chunks[-1].endswith(b"\n"))
            self.assertEqual(chunk["file_size"], os.path.getsize(name))
        self.assertEqual(manifest["num_chunks"], len(chunks))
        self.assertEqual(manifest["num_lines"], sum(chunk["num_lines"] for chunk in manifest["chunks"]))
        self.assertEqual(manifest["num_bytes"], sum(map(len, chunks)))
        summary = "{} chunks: {} lines, {} bytes".format(
            len(chunks), manifest["num_lines"], manifest["num_bytes"]
        )
        self.assertEqual(text.decode("utf-8").strip(), summary)
        return chunks

    def count(self, chunk):
        return len(chunk.split(b"\n")) - (not chunk or chunk.endswith(b"\n"))

    def test_chunks_of_a_number_of_lines_hold_the_bytes_of_the_input(self):
        for number in [1, 80, 99, 100, 300, 400]:
            with self.subTest(lines=number):
                chunks = self.split("--lines", number)
                self.assertEqual(b"".join(chunks), self.data)
                expected = [number] * (300 // number) + [300 % number] * bool(300 % number)
                self.assertEqual([self.count(chunk) for chunk in chunks], expected)
                shutil.rmtree(self.out)

    def test_chunks_of_a_number_of_bytes_are_as_full_as_lines_allow(self):
        for size, number in [("1", 1), ("100", 100), ("5k", 5120), ("1M", 1 << 20)]:
            with self.subTest(bytes=size):
                chunks = self.split("--bytes", size)
                self.assertEqual(b"".join(chunks), self.data)
                for chunk, following in zip(chunks, chunks[1:] + [b""]):
                    self.assertTrue(len(chunk) <= number or self.count(chunk) == 1)
                    if following:
                        self.assertGreater(len(chunk) + len(b"".join(following.partition(b"\n")[:2])), number)
                shutil.rmtree(self.out)

    def test_number_of_chunks_is_met_with_lines_that_differ_by_at_most_one(self):
        for number in [1, 7, 300]:
            with self.subTest(chunks=number):
                chunks = self.split("--chunks", number)
                self.assertEqual(b"".join(chunks), self.data)
                expected = [300 // number + (i < 300 % number) for i in range(number)]
                self.assertEqual([self.count(chunk) for chunk in chunks], expected)
                shutil.rmtree(self.out)
        self.assertFails(
            "at most the number of lines, 300, got 301", "split", self.input, "--out", self.out, "--chunks", 301
        )
        self.assertEqual(os.listdir(self.own_folder), [])

    def test_standard_input_gives_the_same_as_a_file(self):
        for options in [["--lines", 80], ["--bytes", "4K"], ["--chunks", 7], ["--chunks", 7, "--shuffle"]]:
            with self.subTest(options=options):
                expected = self.split(*options)
                shutil.rmtree(self.out)
                with open(self.input, "rb") as file:
                    with self.start("split", "-", "--out", self.out, *options, stdin=file) as process:
                        text, err = process.stdout.read(), process.stderr.read()
                self.assertEqual((process.returncode, err), (0, b""))
                self.assertEqual(self.read_split(self.out, text), expected)
                shutil.rmtree(self.out)

    def test_the_same_input_gives_the_same_files(self):
        for options in [[], ["--shuffle"], ["--plain"]]:
            contents = []
            for _ in range(2):
                self.split("--lines", 60, *options)
                files = {}
                for name in sorted(os.listdir(self.out)):
                    with open(os.path.join(self.out, name), "rb") as file:
                        files[name] = file.read()
                contents.append(files)
                shutil.rmtree(self.out)
            with self.subTest(options=options):
                self.assertEqual(contents[0], contents[1])

    def test_names_follow_the_first_input(self):
        plain = os.path.join(self.folder, "plain")
        with open(plain, "wb") as file:
            file.write(self.data)
        for path, options, name in [
            (self.input, [], "chunk-00000.jsonl.gz"),
            (self.input, ["--plain"], "chunk-00000.jsonl"),
            (plain, [], "chunk-00000.txt.gz"),
            (plain, ["--plain"], "chunk-00000.txt"),
        ]:
            with self.subTest(name=name):
                self.assertEqual(self.split("--chunks", 1, *options, inputs=[path]), [self.data])
                self.assertEqual(sorted(os.listdir(self.out)), [name, "manifest.json"])
                shutil.rmtree(self.out)

    def test_inputs_are_joined_in_the_order_given_without_joining_lines(self):
        other = os.path.join(self.folder, "another")
        with open(other, "wb") as file:
            file.write(b"one\ntwo")
        empty = os.path.join(self.folder, "empty")
        open(empty, "wb").close()
        for inputs, expected in [
            ([self.input, other], self.data + b"\none\ntwo"),
            ([other, self.input], b"one\ntwo\n" + self.data),
            ([other, empty], b"one\ntwo"),
            ([empty, other, empty, other], b"one\ntwo\none\ntwo"),
        ]:
            with self.subTest(inputs=inputs):
                self.assertEqual(b"".join(self.split("--lines", 1000, inputs=inputs)), expected)
                shutil.rmtree(self.out)
        self.assertFails("there are no lines in ", "split", empty, "--out", self.out, "--lines", 1)

    def test_shuffling_keeps_every_line_once_and_depends_on_the_seed(self):
        orders = []
        for memory, options in [(1 << 28, []), (1 << 28, ["--seed", 1]), (20000, []), (20000, []), (1, [])]:
            with self.subTest(memory=memory, options=options):
                with mock.patch.object(_split, "_SHUFFLE_MEMORY", memory), mock.patch.object(_split, "_PILE_BITS", 3):
                    chunks = self.split("--chunks", 4, "--shuffle", *options)
                order = b"".join(chunks).split(b"\n")
                self.assertEqual(order.pop(), b"")
                self.assertEqual(sorted(order), sorted(self.data.split(b"\n")))
                orders.append(order)
                shutil.rmtree(self.out)
        self.assertEqual(orders[2], orders[3])
        for i, j in [(0, 1), (0, 2), (2, 4)]:
            self.assertNotEqual(orders[i], orders[j])
        for order in orders:  # lines end up anywhere
            places = [order.index(line.rstrip(b"\n")) for line in self.lines[10:110]]
            self.assertLess(min(places), 60)
            self.assertGreater(max(places), 240)

    def test_every_order_is_equally_likely_also_through_temporary_files(self):
        counts = collections.Counter()
        for memory in [1 << 28, 1]:
            for seed in range(300):
                with mock.patch.object(_split, "_SHUFFLE_MEMORY", memory), mock.patch.object(_split, "_PILE_BITS", 1):
                    lines = iter([[b"a\n", b"b\n"], [b"c\n"]])
                    runs = _split._shuffled_runs(lines, random.Random(seed), self.own_folder)
                    counts[memory, b"".join(line for run in runs for line in run)] += 1
        self.assertEqual(len(counts), 12)
        for order, count in counts.items():
            with self.subTest(order=order):
                self.assertTrue(20 < count < 80, count)  # 50 with a deviation of 6.5

    def test_folder_that_holds_something_is_refused_and_an_empty_one_taken(self):
        os.mkdir(self.out)
        self.assertEqual(b"".join(self.split("--lines", 1000)), self.data)
        self.assertFails(
            "--out must be a new or an empty folder, got .*out", "split", self.input, "--out", self.out, "--lines", 1
        )
        self.assertEqual(sorted(os.listdir(self.out)), ["chunk-00000.jsonl.gz", "manifest.json"])
        file = os.path.join(self.own_folder, "file")
        open(file, "wb").close()
        self.assertFails("--out must be a new or an empty folder", "split", self.input, "--out", file, "--lines", 1)

    def test_current_folder_and_mounts_are_refused(self):
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(os, "curdir", folder):
            self.assertFails("can be replaced", "split", self.input, "--out", folder, "--lines", 1)
            self.assertEqual(os.listdir(folder), [])
        with mock.patch.object(os.path, "ismount", return_value=True):
            self.assertFails("can be replaced", "split", self.input, "--out", self.out, "--lines", 1)

    def test_missing_folders_above_are_made(self):
        out = os.path.join(self.own_folder, "a", "b", "out")
        self.assertEqual(b"".join(self.split("--lines", 1000, out=out)), self.data)

    def test_damaged_input_is_an_error_and_leaves_nothing(self):
        cut = os.path.join(self.folder, "cut.gz")
        with open(self.input, "rb") as whole, open(cut, "wb") as file:
            file.write(whole.read()[:-10])
        for options in [[], ["--shuffle"]]:
            with self.subTest(options=options):
                self.assertFails(
                    "^infinibatch: error: {}, line [0-9]+: .*too early".format(re.escape(cut)),
                    "split",
                    cut,
                    "--out",
                    self.out,
                    "--lines",
                    100,
                    *options,
                )
                self.assertEqual(os.listdir(self.own_folder), [])

    def test_bad_options_are_usage_errors(self):
        cases = [
            (["--lines", 0], "--lines: must be at least 1, got 0"),
            (["--bytes", "0"], "--bytes: must be at least 1, got 0"),
            (["--bytes", "12Q"], "--bytes: must be an integer, got '12Q'"),
            (["--bytes", "M"], "--bytes: must be an integer, got ''"),
            (["--chunks", -1], "--chunks: must be at least 1, got -1"),
            ([], "one of the arguments --lines --bytes --chunks is required"),
            (["--lines", 1, "--chunks", 1], "not allowed with"),
            (["-", "-", "--lines", 1], "only once"),
        ]
        for options, pattern in cases:
            with self.subTest(options=options):
                self.assertFails(pattern, "split", self.input, *options, "--out", self.out, status=2)
        self.assertFails("nowhere", "split", "nowhere-*", "--lines", 1, "--out", self.out)

    def begin(self, *options):
        """Start a run and wait until it has written chunks, but leave it without the rest of its input."""
        rng = random.Random(8)
        lines = b"".join(b"%0800x\n" % rng.getrandbits(3200) for _ in range(4000))
        process = self.start("split", "-", "--out", self.out, "--threads", 1, *options, stdin=subprocess.PIPE)
        process.stdin.write(lines)
        process.stdin.flush()
        hidden = os.path.join(self.own_folder, ".out.incomplete")
        while "--shuffle" not in options and not (os.path.isdir(hidden) and len(os.listdir(hidden)) > 1):
            self.assertIsNone(process.poll())
        return process, lines

    @unittest.skipUnless(test_main.POSIX, "needs signals")
    def test_interrupted_run_leaves_nothing(self):
        for number, status in [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]:
            with self.subTest(signal=number):
                process, _ = self.begin("--lines", 500)
                process.send_signal(number)
                _, err = process.communicate()
                self.assertEqual((process.returncode, err), (status, b""))
                self.assertEqual(os.listdir(self.own_folder), [])
                self.assertEqual(b"".join(self.split("--lines", 1000)), self.data)
                shutil.rmtree(self.out)

    @unittest.skipUnless(test_main.POSIX, "needs signals")
    def test_killed_run_leaves_nothing_that_looks_like_a_chunk_and_the_next_one_starts_anew(self):
        process, _ = self.begin("--lines", 500)
        process.kill()
        process.communicate()
        self.assertEqual(os.listdir(self.own_folder), [".out.incomplete"])
        for pattern in ["*", "*/*", "**/*", "**/*.gz", "out/*"]:
            with self.subTest(pattern=pattern), self.assertRaises(FileNotFoundError):
                find_chunks(os.path.join(self.own_folder, pattern))
        self.assertEqual(b"".join(self.split("--lines", 1000)), self.data)

    @unittest.skipUnless(test_main.POSIX, "needs locks")
    def test_second_run_at_once_is_refused_and_does_not_disturb_the_first(self):
        process, lines = self.begin("--lines", 500)
        self.assertFails("another run is at work", "split", self.input, "--out", self.out, "--lines", 1)
        text, err = process.communicate()
        self.assertEqual((process.returncode, err), (0, b""))
        self.assertEqual(b"".join(self.read_split(self.out, text)), lines)

    def test_chunks_do_not_depend_on_the_number_of_threads_or_on_how_the_input_arrives(self):
        plain = os.path.join(self.folder, "pieces")
        with open(plain, "wb") as file:
            file.write(self.data)
        files = []
        with mock.patch.object(_split, "_PART_SIZE", 500), mock.patch.object(_split, "_WINDOW_SIZE", 200):
            for threads, path, block_size in [(1, self.input, 1 << 20), (4, self.input, 1 << 20), (3, plain, 700)]:
                with mock.patch.object(readers, "_BLOCK_SIZE", block_size):
                    chunks = self.split("--lines", 70, "--threads", threads, inputs=[path])
                self.assertEqual(b"".join(chunks), self.data)
                names = [name for name in sorted(os.listdir(self.out)) if name.startswith("chunk")]
                files.append([])
                for name in names:
                    with open(os.path.join(self.out, name), "rb") as file:
                        files[-1].append(file.read())
                shutil.rmtree(self.out)
        self.assertEqual(files[0], files[1])
        self.assertEqual(files[0], files[2])

    def test_parts_of_a_chunk_are_one_gzip_member_that_reaches_back_into_the_part_before(self):
        rng = random.Random(4)
        block = b"%01000x" % rng.getrandbits(4000)  # compresses to half of it, or to nothing as a repetition
        for number in [0, 1, 999, 1000, 1001, 5000]:
            data = (block * 6)[:number] + b"\n"
            with self.subTest(number=number), mock.patch.object(_split, "_PART_SIZE", 1000):
                part_sizes = [len(stored) for _, _, _, stored in map(_split._deflated, _split._parts([(0, [data])]))]
                self.assertEqual(len(part_sizes), max(1, -(-len(data) // 1000)))
                self.assertTrue(all(size < 100 for size in part_sizes[1:-1]), part_sizes)
                path = os.path.join(self.folder, "one")
                with open(path, "wb") as file:
                    file.write(data)
                self.assertEqual(self.split("--lines", 1, inputs=[path]), [data])
                with open(os.path.join(self.out, "chunk-00000.txt.gz"), "rb") as file:
                    decompressor = zlib.decompressobj(31)
                    self.assertEqual(decompressor.decompress(file.read()), data)
                self.assertTrue(decompressor.eof)
                self.assertEqual(decompressor.unused_data, b"")
                shutil.rmtree(self.out)

    def test_few_parts_are_in_memory_at_a_time(self):
        made = []

        def pieces():
            for number in range(100):
                made.append(number)
                yield number, [b"line\n"]

        results = _split._in_threads(_split._deflated, _split._parts(pieces()), 2)
        next(results)
        self.assertLess(len(made), 8)
        self.assertEqual(len(list(results)), 99)

    def test_parts_are_compressed_at_the_same_time(self):
        barrier = threading.Barrier(3, timeout=60)

        def function(number):
            barrier.wait()  # goes on only when three are here
            return number

        self.assertEqual(list(_split._in_threads(function, iter(range(9)), 3)), list(range(9)))

    def test_error_in_the_input_ends_the_threads(self):
        def parts():
            yield 0, 1, b"line\n", b"", True
            raise ValueError("damaged")

        before = threading.active_count()
        with self.assertRaisesRegex(ValueError, "damaged"):
            list(_split._in_threads(_split._deflated, parts(), 2))
        self.assertEqual(threading.active_count(), before)

    @unittest.skipUnless(test_main.POSIX, "needs limits of the system")
    def test_full_disk_is_a_plain_error_that_names_the_file(self):
        # A limit to the size of files fails like a full disk, from the same calls.
        code = (
            "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
            "from infinibatch.__main__ import main; sys.exit(main())"
        )
        rng = random.Random(5)
        large = os.path.join(self.own_folder, "large")
        with open(large, "wb") as file:
            file.write(b"".join(b"%0800x\n" % rng.getrandbits(3200) for _ in range(200)))
        hidden = os.path.join(os.path.realpath(self.own_folder), ".out.incomplete")
        for options, name in [([], "chunk-00000.txt.gz"), (["--plain"], "chunk-00000.txt")]:
            with self.subTest(options=options):
                args = ["split", large, "--out", self.out, "--lines", 150] + options
                with self.start(*args, code=code) as process:
                    out, err = process.communicate()
                self.assertEqual((process.returncode, out), (1, b""))
                self.assertRegex(
                    err.decode("utf-8"),
                    "^infinibatch: error: .*: {}\n$".format(re.escape(repr(os.path.join(hidden, name)))),
                )
                self.assertEqual(os.listdir(self.own_folder), ["large"])

    def test_full_disk_for_temporary_files_names_their_folder(self):
        class FullFile:
            def writelines(self, lines):
                raise OSError(28, "No space left on device")

            def __enter__(self):
                return self

            def __exit__(self, *error):
                pass

        with mock.patch.object(_split, "_pile", lambda folder: FullFile()):
            with mock.patch.object(_split, "_SHUFFLE_MEMORY", 1):
                self.assertFails(
                    "No space left on device: .*\\.out\\.incomplete",
                    "split", self.input, "--out", self.out, "--lines", 100, "--shuffle",
                )  # fmt: skip
        self.assertEqual(os.listdir(self.own_folder), [])

    @unittest.skipUnless(test_main.POSIX, "needs permissions")
    def test_folder_that_cannot_be_written_is_a_plain_error_that_names_it(self):
        # Root may write anywhere, so another user runs it.
        code = (
            "import os, sys, concurrent.futures.thread\n"
            "from infinibatch.__main__ import _parser, main\n"
            "_parser().parse_args()\n"  # imports what that other user perhaps may not read
            "if os.getuid() == 0: os.setuid(65534)\n"
            "sys.exit(main())"
        )
        os.chmod(self.own_folder, 0o555)
        self.addCleanup(os.chmod, self.own_folder, 0o755)
        args = ["split", "-", "--out", self.out, "--lines", 1]
        with self.start(*args, code=code, stdin=subprocess.PIPE) as process:
            out, err = process.communicate(b"a line\n")
        self.assertEqual((process.returncode, out), (1, b""))
        self.assertRegex(err.decode("utf-8"), "^infinibatch: error: .*Permission denied: '.*out[^']*'\n$")
        self.assertEqual(os.listdir(self.own_folder), [])

    @unittest.skipUnless(test_main.POSIX, "needs signals")
    def test_killed_at_any_call_of_the_system_it_leaves_no_chunk_or_all_and_the_next_run_completes_it(self):
        code = (
            "import builtins, io, os, signal, sys\n"
            "from infinibatch import __main__, _split, checkpoint\n"
            "left = int(sys.argv.pop())\n"
            "def counting(function):\n"
            "    def call(*args, **options):\n"
            "        global left\n"
            "        left -= 1\n"
            "        if left < 0:\n"
            "            os.kill(os.getpid(), signal.SIGKILL)\n"
            "        return function(*args, **options)\n"
            "    return call\n"
            "for name in ['makedirs', 'open', 'listdir', 'fsync', 'rename', 'rmdir', 'remove', 'close']:\n"
            "    setattr(os, name, counting(getattr(os, name)))\n"
            "_split.open = counting(open)\n"
            "sys.exit(__main__.main())"
        )
        expected = self.split("--lines", 150)
        shutil.rmtree(self.out)
        os.mkdir(self.out)
        num_killed = num_incomplete = 0
        for number in range(100):
            args = ["split", self.input, "--out", self.out, "--lines", 150, number]
            with self.start(*args, code=code) as process:
                text, err = process.communicate()
            if process.returncode == 0:
                break
            self.assertEqual((process.returncode, err), (-signal.SIGKILL, b""))
            num_killed += 1
            with self.subTest(number=number):
                for pattern in ["*", "**/*", "out/*", "**/*.gz"]:
                    try:
                        found = find_chunks(os.path.join(self.own_folder, pattern))
                    except FileNotFoundError:
                        num_incomplete += 1
                    else:  # killed behind the renaming
                        self.assertEqual(len([name for name in found if name.endswith(".gz")]), len(expected))
            if os.path.isdir(self.out) and os.listdir(self.out):
                shutil.rmtree(self.out)
        self.assertEqual(self.read_split(self.out, text), expected)
        self.assertGreater(num_killed, 15)
        self.assertGreater(num_incomplete, 40)

    def test_chunks_are_those_that_stream_reads(self):
        self.split("--lines", 10, inputs=self.paths)
        status, out, err = self.run_command("stream", os.path.join(self.out, "chunk-*"))
        self.assertEqual((status, err), (0, ""))
        self.assertEqual(sorted(out.decode("utf-8").split("\n")[:-1]), sorted(self.corpus))


if __name__ == "__main__":
    unittest.main()
