"""
The command line, run as users run it: processes, pipes, signals.

INFINIBATCH_TEST_COMMANDS sets the number of random commands (60).
"""

import collections
import contextlib
import gzip
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

from test_workers import take_signals

from infinibatch import __main__ as cli
from infinibatch import _demo, _stream, checkpoint
from infinibatch.datasets import chunked_dataset_iterator
from infinibatch.iterators import NativeCheckpointableIterator, RecurrentIterator
from infinibatch.readers import read_lines

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
POSIX = os.name == "posix"
NUM_COMMANDS = int(os.environ.get("INFINIBATCH_TEST_COMMANDS", "60"))

# Progress is tqdm's where that is installed; this is how the command runs where it is not.
WITHOUT_TQDM = "import sys; sys.modules['tqdm'] = None; from infinibatch.__main__ import main; sys.exit(main())"


class CommandTestCase(unittest.TestCase):
    NUM_CHUNKS = 6
    LINES_PER_CHUNK = 100

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls._remove_folder = folder.cleanup
        cls.folder = folder.name
        rng = random.Random(1)
        cls.corpus = []
        cls.paths = []
        for chunk in range(cls.NUM_CHUNKS):
            lines = [
                "{}.{} {}".format(chunk, number, "wörd\u2028 \ry " * rng.randrange(20))
                for number in range(cls.LINES_PER_CHUNK - 1)
            ] + [""]
            cls.paths.append(os.path.join(cls.folder, "chunk-{}.gz".format(chunk)))
            with gzip.open(cls.paths[-1], "wb") as file:
                file.write("".join(line + "\n" for line in lines).encode("utf-8"))
            cls.corpus += lines

    @classmethod
    def tearDownClass(cls):
        cls._remove_folder()

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.own_folder = folder.name
        self.checkpoint = os.path.join(self.own_folder, "position.json")

    def start(self, *args, code=None, **options):
        start = ["-m", "infinibatch"] if code is None else ["-c", code]
        options.setdefault("env", dict(os.environ, PYTHONPATH=ROOT))
        options.setdefault("cwd", self.folder)
        options.setdefault("stdout", subprocess.PIPE)
        options.setdefault("stderr", subprocess.PIPE)
        if POSIX:
            options["preexec_fn"] = take_signals
        return subprocess.Popen([sys.executable] + start + [str(arg) for arg in args], **options)

    def run_command(self, *args, stdout=None):
        """Run in this process, which is faster; return status, output and errors."""
        numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
        handlers = {number: signal.getsignal(number) for number in numbers}
        before = os.getcwd()
        os.chdir(self.folder)
        try:
            with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.ExitStack() as stack:
                out = stdout or stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", newline=""))
                with contextlib.redirect_stdout(out):
                    try:
                        status = cli.main([str(arg) for arg in args])
                    except SystemExit as exit:  # out of argparse
                        status = exit.code
                if stdout is None:
                    out.seek(0)
                    return status, out.read().encode("utf-8"), err.getvalue()
                return status, None, err.getvalue()
        finally:
            os.chdir(before)
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def stream(self, *args, status=0, error=""):
        returned, out, err = self.run_command("stream", "chunk-*.gz", "--buffer-size", 50, *args)
        self.assertEqual(err, error)
        self.assertEqual(returned, status)
        return out

    def assertFails(self, pattern, *args, status=1):
        returned, out, err = self.run_command(*args)
        self.assertEqual((returned, out), (status, b""))
        self.assertRegex(err, pattern)
        self.assertNotIn("Traceback", err)
        if status == 1:
            self.assertEqual(err.count("\n"), 1, err)

    def num_written(self):
        with open(self.checkpoint, encoding="utf-8") as file:
            return json.load(file)["state"]["num_written"]


class TestStream(CommandTestCase):
    def test_command_writes_the_lines_to_a_pipe(self):
        with self.start("stream", *self.paths) as process:
            out = process.stdout.read()
            err = process.stderr.read()
        self.assertEqual((process.returncode, err), (0, b""))
        self.assertEqual(sorted(out.decode("utf-8").split("\n")[:-1]), sorted(self.corpus))

    def test_lines_come_in_the_order_of_the_library_each_once(self):
        lines = chunked_dataset_iterator(self.paths, read_lines, buffer_size=50, seed=0)
        expected = [next(lines) for _ in self.corpus]
        out = self.stream()
        self.assertEqual(out, "".join(line + "\n" for line in expected).encode("utf-8"))
        self.assertEqual(sorted(expected), sorted(self.corpus))
        self.assertNotEqual(expected, self.corpus)

    def test_seed_decides_the_order(self):
        self.assertEqual(self.stream("--seed", 1), self.stream("--seed", 1))
        self.assertNotEqual(self.stream("--seed", 1), self.stream("--seed", -1))

    def test_several_paths_and_patterns_are_one_corpus(self):
        expected = self.stream()
        status, out, _ = self.run_command("stream", "--buffer-size", 50, "chunk-{3..5}.gz", *self.paths[:3])
        self.assertEqual(status, 0)
        self.assertEqual(sorted(out.split(b"\n")), sorted(expected.split(b"\n")))

    def test_epochs(self):
        once, twice = self.stream(), self.stream("--epochs", 2)
        counts = collections.Counter(twice.split(b"\n")[:-1])
        self.assertEqual(counts, {line: 2 * n for line, n in collections.Counter(once.split(b"\n")[:-1]).items()})
        self.assertEqual(self.stream("--epochs", 0, "--limit", 1500)[: len(twice)], twice)

    def test_limit(self):
        whole = self.stream().split(b"\n")
        for limit in [0, 1, 499, 500, 501, 600, 601]:
            with self.subTest(limit=limit):
                out = self.stream("--limit", limit)
                self.assertEqual(out.split(b"\n")[:-1], whole[: min(limit, 600)])

    def test_ranks_share_the_stream(self):
        for epochs, world in [(1, 1), (1, 4), (3, 4), (2, 6)]:
            with self.subTest(epochs=epochs, world=world):
                out = b""
                for rank in range(world):
                    out += self.stream("--epochs", epochs, "--rank", rank, "--world", world)
                self.assertEqual(sorted(out.decode("utf-8").split("\n")[:-1]), sorted(self.corpus * epochs))

    def test_rank_without_a_share_is_told(self):
        error = "infinibatch: rank 6 of 7 gets nothing of 6 file(s) in 1 epoch(s)\n"
        self.assertEqual(self.stream("--rank", 6, "--world", 7, error=error), b"")

    def test_batches_are_json_lists_of_lines_of_similar_length(self):
        for option, value in [("--batch-size", 7), ("--max-tokens", 60)]:
            with self.subTest(option=option):
                out = self.stream(option, value)
                batches = [json.loads(line) for line in out.decode("utf-8").split("\n")[:-1]]
                self.assertEqual(sorted(line for batch in batches for line in batch), sorted(self.corpus))
                spreads = []
                for batch in batches:
                    words = [len(line.split()) for line in batch]
                    spreads.append(max(words) - min(words))
                    if option == "--batch-size":
                        self.assertLessEqual(len(batch), value)
                    else:
                        self.assertLessEqual(len(batch) * max(1, max(words)), value)
                self.assertLess(sum(spreads), 5 * len(spreads))  # of up to 40 words

    def test_batches_are_limited_by_number(self):
        whole = self.stream("--max-tokens", 60)
        out = self.stream("--max-tokens", 60, "--limit", 5)
        self.assertEqual(out.split(b"\n")[:-1], whole.split(b"\n")[:5])

    def test_plain_error_for_a_missing_file(self):
        self.assertFails(r"^infinibatch: error: .*'nowhere-\*.gz'", "stream", "nowhere-*.gz")

    def test_bad_options_are_usage_errors(self):
        cases = [
            (["--buffer-size", 0], "--buffer-size: must be at least 1, got 0"),
            (["--limit", -1], "--limit: must be at least 0, got -1"),
            (["--epochs", "many"], "--epochs: must be an integer, got 'many'"),
            (["--save-every", "nan"], "--save-every: must be at least 0, got nan"),
            (["--save-every", "often"], "--save-every: must be a number, got 'often'"),
            (["--batch-size", 3, "--max-tokens", 3], "not allowed with"),
            (["--rank", 0], "--rank and --world belong together"),
            (["--world", 2], "--rank and --world belong together"),
            (["--rank", 2, "--world", 2], "--rank must be less than --world, got 2 of 2"),
        ]
        for options, pattern in cases:
            with self.subTest(options=options):
                self.assertFails(pattern, "stream", "chunk-*.gz", *options, status=2)
        self.assertFails("COMMAND", status=2)
        self.assertFails("invalid choice", "swim", status=2)

    @unittest.skipUnless(os.path.exists("/dev/full"), "needs a device that is full")
    def test_full_disk_is_a_plain_error(self):
        with open("/dev/full", "w") as full:
            status, _, err = self.run_command("stream", "chunk-*.gz", stdout=full)
        self.assertEqual(status, 1)
        self.assertRegex(err, r"^infinibatch: error: \[Errno [0-9]+\] No space left on device\n$")


class TestStreamCheckpoint(CommandTestCase):
    def test_runs_with_limits_are_one_run(self):
        for options in [[], ["--max-tokens", 60], ["--epochs", 2, "--rank", 1, "--world", 4]]:
            with self.subTest(options=options):
                with contextlib.suppress(FileNotFoundError):
                    os.remove(self.checkpoint)
                whole = self.stream(*options)
                out = b""
                for limit in [0, 1, 7, 23, 1, 10000]:
                    out += self.stream("--checkpoint", self.checkpoint, "--limit", limit, *options)
                self.assertEqual(out, whole)
                note = "infinibatch: {} stands at the end: nothing is left\n".format(self.checkpoint)
                self.assertEqual(self.stream("--checkpoint", self.checkpoint, *options, error=note), b"")

    def test_only_the_checkpoint_is_left_beside_it(self):
        self.stream("--checkpoint", self.checkpoint, "--save-every", 0)
        self.assertEqual(os.listdir(self.own_folder), ["position.json"])

    def interrupt(self, number, num_lines, *options):
        """Run, read some lines, send a signal, read the rest."""
        args = ["stream", "chunk-*.gz", "--buffer-size", 50, "--epochs", 0, "--checkpoint", self.checkpoint]
        with self.start(*args, *options) as process:
            out = b"".join(process.stdout.readline() for _ in range(num_lines))
            process.send_signal(number)
            out += process.stdout.read()
            err = process.stderr.read()
        return process.returncode, out, err.decode("utf-8")

    @unittest.skipUnless(POSIX, "needs signals")
    def test_signals_while_the_last_position_is_saved_come_after_that(self):
        code = """if True:
            import os, signal, sys
            from infinibatch import checkpoint, __main__
            saves = []

            def save(iterator, path, save=checkpoint.save, fsync=os.fsync):
                def signaled(descriptor):
                    if len(saves) > 1:
                        os.kill(os.getpid(), int(sys.argv.pop()))
                        os.kill(os.getpid(), signal.SIGTERM)
                    fsync(descriptor)
                    os.fsync = fsync
                saves.append(path)
                os.fsync = signaled
                save(iterator, path)

            checkpoint.save = save
            sys.exit(__main__.main(sys.argv[1:-1]))
        """
        whole = self.stream()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            with self.subTest(signal=number), contextlib.suppress(FileNotFoundError):
                args = ["stream", "chunk-*.gz", "--buffer-size", 50, "--checkpoint", self.checkpoint]
                process = self.start(*args, int(number), code=code)
                out, err = process.communicate()
                self.assertEqual((process.returncode, out, err), (128 + number, whole, b""))
                self.assertEqual(self.num_written(), len(self.corpus))
                os.remove(self.checkpoint)

    @unittest.skipUnless(POSIX, "needs signals")
    def test_interrupted_runs_are_one_run(self):
        rng = random.Random(5)
        for number, status, runs in [(signal.SIGINT, 130, 5), (signal.SIGTERM, 143, 2), (signal.SIGHUP, 129, 2)]:
            with self.subTest(signal=number):
                with contextlib.suppress(FileNotFoundError):
                    os.remove(self.checkpoint)
                out = b""
                for _ in range(runs):
                    returned, more, err = self.interrupt(number, rng.randrange(1, 1500))
                    self.assertEqual((returned, err), (status, ""))
                    out += more
                    self.assertEqual(self.num_written(), out.count(b"\n"))
                self.assertEqual(out[-1:], b"\n")
                self.assertEqual(self.stream("--epochs", 0, "--limit", out.count(b"\n")), out)

    def write_until(self, num_bytes, error, always):
        """Patch `os.write`: it takes so many bytes, then raises the error, once or always."""
        real, answers = os.write, [num_bytes, error]

        def write(descriptor, data):
            answer = answers.pop(0) if answers else None
            if isinstance(answer, BaseException):
                answers.extend([error] * always)
                raise answer
            return real(descriptor, data[:answer])

        return mock.patch.object(os, "write", write)

    def test_line_that_an_interruption_cuts_is_finished(self):
        whole = self.stream()
        first = whole.index(b"\n") + 1
        second = whole.index(b"\n", first) + 1
        for num_bytes, num_lines in [(0, 0), (1, 1), (first - 1, 1), (first, 1), (first + 1, 2), (second, 2)]:
            with self.subTest(num_bytes=num_bytes):
                with contextlib.suppress(FileNotFoundError):
                    os.remove(self.checkpoint)
                with self.write_until(num_bytes, KeyboardInterrupt(), always=False):
                    out = self.stream("--checkpoint", self.checkpoint, status=130)
                self.assertEqual(out, whole[: [0, first, second][num_lines]])
                self.assertEqual(self.num_written(), num_lines)
        self.assertEqual(out + self.stream("--checkpoint", self.checkpoint), whole)

    def test_line_that_a_closed_pipe_cuts_comes_again(self):
        whole = self.stream()
        for num_bytes in [0, 1, whole.index(b"\n"), whole.index(b"\n") + 1, 1000]:
            for error in [BrokenPipeError(), OSError(28, "No space left on device")]:
                with self.subTest(num_bytes=num_bytes, error=error):
                    with contextlib.suppress(FileNotFoundError):
                        os.remove(self.checkpoint)
                    args = ["stream", "chunk-*.gz", "--buffer-size", 50, "--checkpoint", self.checkpoint]
                    with open(os.path.join(self.own_folder, "out"), "w") as out:
                        with self.write_until(num_bytes, error, always=True):
                            status, _, _ = self.run_command(*args, stdout=out)
                    self.assertEqual(status, 141 if isinstance(error, BrokenPipeError) else 1)
                    num_lines = whole[:num_bytes].count(b"\n")
                    self.assertEqual(self.num_written(), num_lines)
                    rest = self.stream("--checkpoint", self.checkpoint)
                    self.assertEqual(rest.split(b"\n"), whole.split(b"\n")[num_lines:])

    @unittest.skipUnless(POSIX, "needs signals")
    def test_killed_run_repeats_what_came_after_its_last_save_and_loses_nothing(self):
        returned, out, err = self.interrupt(signal.SIGKILL, 2000, "--save-every", 0)
        self.assertEqual((returned, err), (-signal.SIGKILL, ""))
        saved = self.num_written()
        lines = out.split(b"\n")[:-1]
        self.assertGreater(saved, 0)
        self.assertLessEqual(saved, len(lines))
        more = self.stream("--epochs", 0, "--checkpoint", self.checkpoint, "--limit", 100).split(b"\n")[:-1]
        whole = self.stream("--epochs", 0, "--limit", max(len(lines), saved + 100)).split(b"\n")[:-1]
        self.assertEqual(lines, whole[: len(lines)])
        self.assertEqual(more, whole[saved : saved + 100])

    @unittest.skipUnless(POSIX, "needs signals")
    def test_output_is_on_disk_before_the_position(self):
        with open(os.path.join(self.own_folder, "out"), "wb") as out:
            with self.start(
                "stream", "chunk-*.gz", "--epochs", 0, "--checkpoint", self.checkpoint, "--save-every", 0, stdout=out
            ) as process:
                while not os.path.exists(self.checkpoint) or self.num_written() == 0:
                    self.assertIsNone(process.poll())
                process.kill()
        with open(out.name, "rb") as file:
            self.assertGreaterEqual(file.read().count(b"\n"), self.num_written())

    @unittest.skipUnless(POSIX, "needs pipes that break")
    def test_closed_pipe_ends_quietly_and_saves_what_was_written(self):
        args = ["stream", "chunk-*.gz", "--buffer-size", 50, "--epochs", 0, "--checkpoint", self.checkpoint]
        with self.start(*args) as process:
            lines = [process.stdout.readline() for _ in range(10)]
            process.stdout.close()
            err = process.stderr.read()
        self.assertEqual((process.returncode, err), (141, b""))
        saved = self.num_written()
        self.assertGreaterEqual(saved, 10)
        whole = self.stream("--epochs", 0, "--limit", saved + 10).split(b"\n")[:-1]
        self.assertEqual(lines, [line + b"\n" for line in whole[:10]])
        out = self.stream("--epochs", 0, "--checkpoint", self.checkpoint, "--limit", 10)
        self.assertEqual(out.split(b"\n")[:-1], whole[saved:])

    def test_checkpoint_of_other_options_or_files_is_refused(self):
        self.stream("--checkpoint", self.checkpoint, "--limit", 5)
        cases = [
            (["--seed", 4], "run with --seed 0, this one has --seed 4"),
            (["--buffer-size", 60], "run with --buffer-size 50, this one has --buffer-size 60"),
            (["--epochs", 2], "run with --epochs 1, this one has --epochs 2"),
            (["--batch-size", 2], "run with no --batch-size, this one has --batch-size 2"),
            (["--rank", 0, "--world", 2], "run with --world 1, this one has --world 2"),
        ]
        for options, pattern in cases:
            with self.subTest(options=options):
                args = ["stream", "chunk-*.gz", "--buffer-size", 50, "--checkpoint", self.checkpoint] + options
                self.assertFails("^infinibatch: error: {}: .*{}".format(re.escape(self.checkpoint), pattern), *args)
        shutil.copy(self.paths[0], os.path.join(self.own_folder, "chunk-9.gz"))
        for files in [["chunk-[0-2].gz"], self.paths[1:] + [os.path.join(self.own_folder, "chunk-9.gz")]]:
            with self.subTest(files=files):
                args = ["stream", "--buffer-size", 50, "--checkpoint", self.checkpoint] + files
                self.assertFails("^infinibatch: error: {}: .*not fit".format(re.escape(self.checkpoint)), *args)
        self.assertEqual(self.num_written(), 5)

    def test_file_that_is_no_checkpoint_is_refused_and_kept(self):
        foreign = os.path.join(self.own_folder, "foreign.json")
        checkpoint.save(NativeCheckpointableIterator([1]), foreign)
        with open(self.checkpoint, "w") as file:
            file.write("my notes")
        for path, pattern in [
            (self.checkpoint, "is no checkpoint"),
            (foreign, "not a checkpoint of the command stream"),
        ]:
            with self.subTest(path=path):
                with open(path, "rb") as file:
                    before = file.read()
                self.assertFails(re.escape(path) + ".*" + pattern, "stream", "chunk-*.gz", "--checkpoint", path)
                with open(path, "rb") as file:
                    self.assertEqual(file.read(), before)

    def test_checkpoint_that_cannot_be_written_is_an_error_before_any_output(self):
        path = os.path.join(self.own_folder, "nowhere", "position.json")
        self.assertFails("^infinibatch: error: .*nowhere", "stream", "chunk-*.gz", "--checkpoint", path)

    def test_damaged_chunk_is_an_error_after_the_lines_before_it(self):
        good = os.path.join(self.own_folder, "chunk-1.gz")
        with gzip.open(good, "wb") as file:
            file.write(b"".join(b"line %d\n" % number for number in range(1000)))
        with open(good, "r+b") as file:
            file.truncate(os.path.getsize(good) - 10)
        args = ["stream", good, "--buffer-size", 10, "--checkpoint", self.checkpoint]
        status, out, err = self.run_command(*args)
        lines = out.split(b"\n")[:-1]
        self.assertEqual(status, 1)
        self.assertRegex(err, r"^infinibatch: error: {}, line [0-9]+: .*too early\n$".format(re.escape(good)))
        self.assertGreater(len(lines), 900)
        self.assertEqual(len(set(lines)), len(lines))
        self.assertEqual(self.num_written(), len(lines))
        # The same again: nothing more comes before the same error.
        self.assertEqual(self.run_command(*args), (1, b"", err))


class TestStreamFormats(CommandTestCase):
    def write(self, name, text):
        path = os.path.join(self.own_folder, name)
        with gzip.open(path, "wb") as file:
            file.write(text.encode("utf-8"))
        return path

    def lines(self, *args):
        status, out, err = self.run_command("stream", *args)
        self.assertEqual((status, err), (0, ""))
        return out.decode("utf-8").split("\n")[:-1]

    def test_json_lines_come_as_they_were_written_without_blank_ones(self):
        values = ['{"a": 1.50, "b": "\\u2028"}', "[1e400]", '"\u2028"', '{"a":1,"a":2}', "12345678901234567890123"]
        path = self.write("a.jsonl", "\n \n".join(values) + "\r\n")
        self.assertEqual(sorted(self.lines(path, "--format", "jsonl")), sorted(values))
        batches = self.lines(path, "--format", "jsonl", "--batch-size", 2)
        decoded = [value for batch in batches for value in json.loads(batch)]
        self.assertEqual(len(batches), 3)
        self.assertEqual(sorted(map(repr, decoded)), sorted(repr(json.loads(value)) for value in values))

    def test_csv_rows_become_json_objects(self):
        path = self.write("a.csv", 'id,text\r\n1,"two\nlines, ""quoted"""\r\n2,\u2028ä\r\n')
        expected = [{"id": "1", "text": 'two\nlines, "quoted"'}, {"id": "2", "text": "\u2028ä"}]
        lines = self.lines(path, "--format", "csv")
        self.assertEqual(sorted(map(json.loads, lines), key=lambda row: row["id"]), expected)
        (batch,) = self.lines(path, "--format", "csv", "--max-tokens", 1000)
        self.assertEqual(sorted(json.loads(batch), key=lambda row: row["id"]), expected)

    def test_text_is_the_default_whatever_it_is_called(self):
        path = self.write("a.csv", "a,b\n1\n\n")
        self.assertEqual(sorted(self.lines(path)), ["", "1", "a,b"])

    def test_line_that_is_not_in_the_format_is_named(self):
        path = self.write("a.jsonl", "{}\n{]\n")
        status, out, err = self.run_command("stream", path, "--format", "jsonl", "--buffer-size", 1)
        self.assertEqual((status, out), (1, b"{}\n"))
        self.assertRegex(err, "^infinibatch: error: {}, line 2: not JSON".format(re.escape(path)))
        self.assertFails("invalid choice: 'tar'", "stream", path, "--format", "tar", status=2)


class TestUrls(CommandTestCase):
    def test_commands_take_urls(self):
        try:
            import fsspec
        except ImportError:
            self.skipTest("needs the package fsspec")
        self.addCleanup(fsspec.filesystem("memory").store.clear)
        for path in self.paths:
            with open(path, "rb") as file, fsspec.open("memory://corpus/" + os.path.basename(path), "wb") as copy:
                copy.write(file.read())
        url = "memory://corpus/chunk-*.gz"
        whole = self.stream()
        status, out, err = self.run_command(
            "stream", url, "--buffer-size", 50, "--checkpoint", self.checkpoint, "--limit", 9
        )
        self.assertEqual((status, out.split(b"\n")[:-1], err), (0, whole.split(b"\n")[:9], ""))
        self.assertEqual(self.run_command("skip", self.checkpoint, 5)[0], 0)
        out = self.stream("--checkpoint", self.checkpoint)  # from the files of the same names
        self.assertEqual(out.split(b"\n"), whole.split(b"\n")[14:])
        for args in [["bench", url, "--repeat", 1], ["plot", url, "--out", os.path.join(self.own_folder, "a.svg")]]:
            with self.subTest(command=args[0]):
                status, out, err = self.run_command(*args)
                self.assertEqual((status, err), (0, ""))
                self.assertIn(b"600 lines", out)
        folder = os.path.join(self.own_folder, "out")
        for options in [["--lines", 100], ["--chunks", 3, "--shuffle"]]:
            status, out, err = self.run_command("split", url, "--out", folder, *options)
            self.assertEqual((status, err), (0, ""))
            shutil.rmtree(folder)


class TestStreamWorkers(CommandTestCase):
    def test_workers_change_neither_order_nor_checkpoints(self):
        whole = self.stream("--epochs", 2)
        out = b""
        for workers, limit in [(2, 301), (0, 250), (1, 100), (3, 10000)]:
            options = ["--workers", workers, "--limit", limit, "--checkpoint", self.checkpoint]
            out += self.stream("--epochs", 2, *options)
        self.assertEqual(out, whole)

    def test_as_many_processes_read_as_are_wanted(self):
        with mock.patch.object(_stream, "chunked_dataset_iterator", side_effect=chunked_dataset_iterator) as make:
            self.stream("--workers", 2, "--limit", 0)
        self.assertEqual(make.call_args[1]["num_workers"], 2)

    def test_error_in_a_worker_is_plain(self):
        path = os.path.join(self.own_folder, "bad.gz")
        with open(path, "wb") as file:
            file.write(gzip.compress(b"line\n" * 100)[:-10])
        status, _, err = self.run_command("stream", path, "--workers", 1)
        self.assertEqual(status, 1)
        self.assertRegex(err, "^infinibatch: error: {}, line [0-9]+: .*too early\n$".format(re.escape(path)))

    @unittest.skipUnless(POSIX, "needs pipes that break")
    def test_head_ends_it_quietly(self):
        with self.start("stream", "chunk-*.gz", "--epochs", 0, "--workers", 2) as process:
            for _ in range(10):
                process.stdout.readline()
            process.stdout.close()
            err = process.stderr.read()
        self.assertEqual((process.returncode, err), (141, b""))


class TestManyResumes(CommandTestCase):
    def test_stopped_and_resumed_a_hundred_times_it_is_one_run(self):
        for options in [[], ["--max-tokens", 60], ["--workers", 1]]:
            with self.subTest(options=options):
                with contextlib.suppress(FileNotFoundError):
                    os.remove(self.checkpoint)
                rng = random.Random(6)
                out = b""
                for _ in range(100 if "--workers" not in options else 10):
                    limit = rng.choice([0, 1, 2, 3, 10, 50])
                    more = self.stream("--epochs", 0, "--checkpoint", self.checkpoint, "--limit", limit, *options)
                    self.assertEqual(more.count(b"\n"), limit)
                    out += more
                self.assertEqual(out, self.stream("--epochs", 0, "--limit", out.count(b"\n"), *options))

    @unittest.skipUnless(POSIX, "needs signals")
    def test_runs_that_are_killed_are_one_run_as_far_as_they_were_saved(self):
        out = b""
        rng = random.Random(2)
        args = ["stream", "chunk-*.gz", "--buffer-size", 50, "--epochs", 0, "--save-every", 0]
        for workers in [0, 0, 2, 0, 2]:
            with self.start(*args, "--checkpoint", self.checkpoint, "--workers", workers) as process:
                more = b"".join(process.stdout.readline() for _ in range(rng.randrange(500, 3000)))
                process.kill()
                more += process.stdout.read()
            saved = self.num_written() - out.count(b"\n")
            self.assertGreater(saved, 0)
            out += b"\n".join(more.split(b"\n")[:saved]) + b"\n"
            self.assertEqual(out.count(b"\n"), self.num_written())
        self.assertEqual(self.stream("--epochs", 0, "--limit", self.num_written()), out)


class TestSkip(CommandTestCase):
    def skip(self, number, *args):
        status, out, err = self.run_command("skip", self.checkpoint, number, *args)
        self.assertEqual((status, err), (0, ""))
        return out.decode("utf-8")

    def test_next_run_goes_on_behind_what_was_passed_over(self):
        for options, unit in [
            ([], "lines"),
            (["--max-tokens", 60], "batches"),
            (["--epochs", 2, "--rank", 1, "--world", 4], "lines"),
            (["--batch-size", 3, "--seed", 5, "--workers", 1], "batches"),
        ]:
            whole = self.stream(*options).split(b"\n")[:-1]
            for first, number in [(0, 0), (0, 1), (5, 17), (7, 60), (2, len(whole) - 2)]:
                with self.subTest(options=options, first=first, number=number):
                    with contextlib.suppress(FileNotFoundError):
                        os.remove(self.checkpoint)
                    self.stream("--checkpoint", self.checkpoint, "--limit", first, *options)
                    text = self.skip(number)
                    expected = "passed over {} {}, {} since the start\n".format(number, unit, first + number)
                    self.assertEqual(text, expected)
                    self.assertEqual(self.num_written(), first + number)
                    args = ["stream", "chunk-*.gz", "--buffer-size", 50, "--checkpoint", self.checkpoint]
                    _, out, _ = self.run_command(*args, *options)
                    self.assertEqual(out.split(b"\n")[:-1], whole[first + number :])

    def test_position_is_that_of_a_run_that_wrote_them(self):
        self.stream("--checkpoint", self.checkpoint, "--limit", 20)
        self.skip(80)
        other = os.path.join(self.own_folder, "other.json")
        self.stream("--checkpoint", other, "--limit", 100)
        self.stream("--checkpoint", other, "--limit", 0)  # stands where the other one does, said in the same way
        self.assertEqual(self.run_command("diff", self.checkpoint, other), (0, b"", ""))

    def test_chunks_before_the_position_are_not_read(self):
        self.stream("--checkpoint", self.checkpoint, "--limit", 450)
        self.stream("--checkpoint", self.checkpoint, "--limit", 0)  # its position was that of a block of 500 lines
        read = []

        def recording(path):
            read.append(path)
            return read_lines(path)

        with mock.patch.dict(_stream._READERS, lines=recording):
            self.skip(100)
        self.assertEqual(len(read), 2)  # of six

    def test_nothing_is_made_of_the_lines(self):
        self.stream("--checkpoint", self.checkpoint, "--limit", 20, "--max-tokens", 60)
        with mock.patch.object(json, "dumps", wraps=json.dumps) as dumps, mock.patch.object(os, "write") as write:
            self.skip(50)
        write.assert_not_called()
        self.assertFalse(any(call[0] and isinstance(call[0][0], list) for call in dumps.call_args_list))

    def test_files_that_were_moved_are_given(self):
        folder = os.path.join(self.own_folder, "corpus")
        os.mkdir(folder)
        for path in self.paths:
            shutil.copy(path, folder)
        pattern = os.path.join(folder, "chunk-*.gz")
        whole = self.stream().split(b"\n")
        self.run_command("stream", pattern, "--buffer-size", 50, "--checkpoint", self.checkpoint, "--limit", 5)
        os.rename(folder, folder + "-moved")
        self.assertFails("no file matches the pattern '.*corpus/chunk", "skip", self.checkpoint, 3)
        self.skip(3, os.path.join(folder + "-moved", "chunk-*.gz"))
        self.assertFails("not fit", "skip", self.checkpoint, 3, *self.paths[:3])
        out = self.stream("--checkpoint", self.checkpoint, "--limit", 1)
        self.assertEqual(out.rstrip(b"\n"), whole[8])

    def test_passing_the_end_is_an_error_that_leaves_the_checkpoint(self):
        self.stream("--checkpoint", self.checkpoint, "--limit", 590)
        with open(self.checkpoint, "rb") as file:
            before = file.read()
        self.assertFails("^infinibatch: error: only 10 lines are left, not 11\n", "skip", self.checkpoint, 11)
        with open(self.checkpoint, "rb") as file:
            self.assertEqual(file.read(), before)

    def test_checkpoint_of_something_else_is_refused(self):
        checkpoint.save(NativeCheckpointableIterator([1]), self.checkpoint)
        self.assertFails(
            "^infinibatch: error: .*: not a checkpoint of the command stream, .*call next", "skip", self.checkpoint, 1
        )
        self.assertFails("No such file", "skip", "nowhere.json", 1)
        self.assertFails("is no checkpoint", "skip", self.paths[0], 1)
        self.assertFails("must be at least 0, got -1", "skip", self.checkpoint, "--", -1, status=2)

    @unittest.skipUnless(POSIX, "needs signals")
    def test_interrupted_it_leaves_the_checkpoint(self):
        self.stream("--epochs", 0, "--checkpoint", self.checkpoint, "--limit", 5)
        with self.start("skip", self.checkpoint, 10**12, code=WITH_A_SIGN) as process:
            self.assertEqual(process.stderr.readline(), b"at work\n")
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate()
        self.assertEqual((process.returncode, out, err), (143, b"", b""))
        self.assertEqual(self.num_written(), 5)
        self.assertEqual(os.listdir(self.own_folder), ["position.json"])


# Says when it has begun to pass over lines.
WITH_A_SIGN = """
import sys
from infinibatch import __main__, _stream
pass_over = _stream._Writer.pass_over
def pass_over_with_a_sign(self, number, advance):
    print("at work", file=sys.stderr, flush=True)
    pass_over(self, number, advance)
_stream._Writer.pass_over = pass_over_with_a_sign
sys.exit(__main__.main())
"""


@unittest.skipUnless(POSIX, "needs a terminal")
@unittest.skipUnless(POSIX, "closes standard streams as a POSIX shell does")
class TestClosedStreams(CommandTestCase):
    def closed(self, descriptor, *args):
        close = "import os, sys; os.close({}); os.execv(sys.executable, [sys.executable] + sys.argv[1:])"
        process = self.start("-m", "infinibatch", *args, code=close.format(descriptor))
        out, err = process.communicate()
        return process.returncode, out, err

    def test_without_a_place_for_errors_the_output_is_the_same(self):
        args = ["stream", "chunk-*.gz", "--buffer-size", 50, "--checkpoint", self.checkpoint]
        expected = self.stream()
        self.assertEqual(self.closed(2, *args), (0, expected, b""))
        self.assertEqual(self.closed(2, *args), (0, b"", b""))  # a note that nothing is left is no output
        self.assertEqual(self.closed(2, "stream", "missing"), (1, b"", b""))

    def test_without_a_place_for_output_nothing_is_done(self):
        args = ["stream", "chunk-*.gz", "--checkpoint", self.checkpoint]
        error = b"infinibatch: error: the standard output is closed\n"
        self.assertEqual(self.closed(1, *args), (1, b"", error))
        self.assertFalse(os.path.exists(self.checkpoint))


class TestNamesOfAnyKind(CommandTestCase):
    def test_are_escaped_where_the_output_has_no_such_characters(self):
        name = "böse [1]\u20ac.gz" if sys.platform in ("darwin", "win32") else os.fsdecode(b"b\xff [1]\n.gz")
        path, picture = (os.path.join(self.own_folder, prefix + name) for prefix in ("a", "b"))
        shutil.copy(self.paths[0], path)
        checkpoint.save(RecurrentIterator(NativeCheckpointableIterator([]), max, "w\xf6rd"), self.checkpoint)
        for command, pattern in (
            (["plot", path, "--out", picture], rb"b.*\\.*: 100 lines"),
            (["stream", path, "--limit", 100, "--checkpoint", picture], b"^0.0 "),
            (["show", self.checkpoint], rb"recurrent_state 'w\\xf6rd'"),
        ):
            environment = dict(os.environ, PYTHONPATH=ROOT, PYTHONIOENCODING="ascii")
            with self.subTest(command=command[0]):
                with contextlib.suppress(FileNotFoundError):
                    os.remove(picture)
                process = self.start(*command, env=environment)
                out, err = process.communicate()
                self.assertEqual((process.returncode, err), (0, b""))
                self.assertRegex(out, re.compile(pattern, re.S | re.M))


class TestArgumentsOfAnyKind(CommandTestCase):
    VALUES = {
        "--buffer-size": ["1", "7", "9" * 30],
        "--seed": ["0", "-3", "9" * 30],
        "--batch-size": ["1", "4"],
        "--max-tokens": ["1", "9"],
        "--workers": ["0", "1", "2"],
        "--epochs": ["1", "0", "3"],
        "--rank": ["0", "1", "2"],
        "--world": ["1", "2", "3"],
        "--save-every": ["0", "1", "inf"],
        "--lines": ["1", "3"],
        "--bytes": ["5", "1K"],
        "--chunks": ["1", "4"],
        "--threads": ["1", "3"],
        "--repeat": ["1"],
        "--limit": ["1", "5", "40"],
        "--format": ["lines", "jsonl", "csv"],
        "--checkpoint": ["saved.json", "new.json", "cut.json", "folder", "empty"],
        "--out": ["new", "folder"],
        "--shuffle": [],
        "--plain": [],
    }
    PIPELINE = ["--format", "--buffer-size", "--seed", "--batch-size", "--max-tokens", "--workers", "--limit"]
    OPTIONS = {
        "stream": PIPELINE[:-1] + ["--epochs", "--rank", "--world", "--checkpoint", "--save-every"],
        "bench": PIPELINE + ["--repeat"],
        "plot": PIPELINE,
        "split": ["--shuffle", "--seed", "--plain", "--threads"],
    }
    FILES = ["text.txt", "good.gz", "cut.gz", "table.csv", "values.jsonl", "*.txt", "empty", "folder", "-"]
    CHECKPOINTS = ["saved.json", "cut.json", "empty", "text.txt"]
    OTHER = ["", "0", "-1", "1.5", "nan", "1e3", "1_0", "\u0663", "x", "\udcff", "a\nb", "a" * 300, "-", "--", "=", "~"]
    OTHER += ["**", "[", "{a", "{1..3}", "{9..1}", "{0..99999999999}", "file://x", "nope://x", "missing/x", "/dev/null"]

    def arguments(self, rng):
        """Return a command that is right, or wrong in a place or two."""
        command = rng.choice(["stream", "bench", "plot", "split", "split", "show", "diff", "skip"])
        names = [name for name in self.OPTIONS.get(command, []) if rng.random() < 0.3]
        if command in ("plot", "split"):
            names.append("--out")
        if command == "split":
            names.append(rng.choice(["--lines", "--bytes", "--chunks"]))
        if command == "stream":
            names.append("--limit")  # it may be endless
        saved = self.CHECKPOINTS
        pools = {"show": [saved], "diff": [saved] * 2, "skip": [saved, ["0", "3", "99"]]}
        chosen = [command]
        for name in names:
            values = self.VALUES[name]
            wrong = name != "--limit" and rng.random() < 0.06
            chosen += [name] + ([rng.choice(self.OTHER if wrong else values)] if values else [])
        for pool in pools.get(command, [self.FILES] * rng.randint(1, 3)):
            chosen.append(rng.choice(self.OTHER if rng.random() < 0.06 else pool))
        return chosen

    def prepare(self):
        """Make an empty folder with files that are whole, and others that are not."""
        self.folder = tempfile.mkdtemp(dir=self.own_folder)
        for name, content in (
            ("text.txt", b"".join(b"line %d\n" % number for number in range(30))),
            ("good.gz", gzip.compress(b"a b\nc\n" * 10)),
            ("cut.gz", gzip.compress(b"a b\nc\n" * 10)[:30]),
            ("table.csv", b"a,b\n1,2\n3,4\n"),
            ("values.jsonl", b'{"a": 1}\n[2]\n'),
            ("empty", b""),
        ):
            with open(os.path.join(self.folder, name), "wb") as file:
                file.write(content)
        os.mkdir(os.path.join(self.folder, "folder"))
        self.run_command("stream", "text.txt", "good.gz", "--limit", 5, "--checkpoint", "saved.json")
        with open(os.path.join(self.folder, "saved.json"), "rb") as file, open(
            os.path.join(self.folder, "cut.json"), "wb"
        ) as cut:
            cut.write(file.read()[:50])

    def test_give_a_result_or_say_what_is_wrong_and_leave_nothing_behind(self):
        statuses = collections.Counter()
        for seed in range(NUM_COMMANDS):
            arguments = self.arguments(random.Random(seed))
            with self.subTest(seed=seed, arguments=arguments):
                self.prepare()
                with mock.patch("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo\n"))):
                    status, _, err = self.run_command(*arguments)
                statuses[status] += 1
                self.assertIn(status, (0, 1, 2))
                if status and (arguments[0], status) != ("diff", 1):
                    self.assertRegex(err, "error: .")
                self.assertNotIn("Traceback", err)
                self.assertEqual([name for name in os.listdir(self.folder) if name.startswith(".")], [])
        self.assertGreater(min(statuses[status] for status in (0, 1, 2)), NUM_COMMANDS // 20, statuses)


class TestProgress(CommandTestCase):
    def on_terminal(self, *args, terminal_output=False, **options):
        """Run with a terminal as standard error, and return what it shows."""
        import fcntl
        import pty
        import struct
        import termios

        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))  # or tqdm has no room for a line
        try:
            with self.start(
                *args, stderr=theirs, stdout=theirs if terminal_output else subprocess.DEVNULL, **options
            ) as process:
                os.close(theirs)
                shown = b""
                with contextlib.suppress(OSError):  # how a terminal ends on Linux
                    while True:
                        more = os.read(ours, 65536)
                        if not more:
                            break
                        shown += more
                self.assertEqual(process.wait(), 0)
        finally:
            os.close(ours)
        return shown.decode("utf-8")

    def test_plain_line_where_tqdm_is_missing(self):
        shown = self.on_terminal("stream", "chunk-*.gz", code=WITHOUT_TQDM)
        self.assertRegex(shown, r"^\r600 lines, [0-9,]+/s \r\n$")
        shown = self.on_terminal("stream", "chunk-*.gz", "--batch-size", 10, code=WITHOUT_TQDM)
        self.assertRegex(shown, r"^\r60 batches, [0-9,]+/s \r\n$")

    def test_tqdm_where_it_is_installed(self):
        try:
            import tqdm  # noqa: F401
        except ImportError:
            self.skipTest("needs tqdm")
        self.assertRegex(self.on_terminal("stream", "chunk-*.gz"), r"600 lines")

    def test_split_shows_what_it_does_also_beside_its_output(self):
        with tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "out")
            args = ["split", "chunk-*.gz", "--out", out, "--chunks", 3, "--shuffle"]
            shown = self.on_terminal(*args, terminal_output=True, code=WITHOUT_TQDM)
        pattern = (
            r"^\r600 lines counted, [0-9,]+/s \r\n\r600 lines read, .*\r\n\r600 lines written, .*\r\n3 chunks:"
        )
        self.assertRegex(shown, pattern)

    def test_no_progress_amid_output_on_the_same_terminal(self):
        shown = self.on_terminal("stream", "chunk-0.gz", "--limit", 3, terminal_output=True, code=WITHOUT_TQDM)
        self.assertNotIn("/s", shown)
        self.assertEqual(shown.count("\r\n"), 3)


class TestShow(CommandTestCase):
    def test_stages_of_a_stream_are_shown(self):
        self.stream("--checkpoint", self.checkpoint, "--limit", 20, "--batch-size", 4)
        status, out, err = self.run_command("show", self.checkpoint)
        self.assertEqual((status, err), (0, ""))
        lines = out.decode("utf-8").split("\n")
        pattern = "^the command stream: settings {format 'lines', buffer_size 50, .*}, files .*, num_written 20"
        self.assertRegex(lines[0], pattern)
        for depth, name in enumerate(["BucketedReadahead", "BlockwiseShuffle", "SelectMany", "PermutationSource"], 1):
            self.assertTrue(lines[depth].startswith("  " * depth + name), lines)

    def test_missing_or_bad_file_is_a_plain_error(self):
        self.assertFails("^infinibatch: error: .*No such file.*position.json", "show", self.checkpoint)
        self.assertFails("^infinibatch: error: .*chunk-0.gz is no checkpoint", "show", "chunk-0.gz")


class TestDiff(CommandTestCase):
    def saved(self, name, *args):
        path = os.path.join(self.own_folder, name)
        self.stream("--checkpoint", path, *args)
        return path

    def test_stages_that_differ_are_shown_side_by_side(self):
        first = self.saved("a.json", "--limit", 20, "--batch-size", 4)
        second = self.saved("b.json", "--limit", 25, "--batch-size", 4)
        status, out, err = self.run_command("diff", first, second)
        self.assertEqual((status, err), (1, ""))
        lines = out.decode("utf-8").splitlines()
        self.assertEqual(lines[0], "the command stream: num_written 20 | 25, num_after 4 | 1")
        self.assertEqual(lines[1:], ["  BucketedReadaheadBatchIterator: num_served 3 | 11"])  # of the same window

    def test_source_that_differs_is_below_its_stages(self):
        first, second = self.saved("a.json", "--limit", 20), self.saved("b.json", "--limit", 570, "--seed", 1)
        status, out, err = self.run_command("diff", first, second)
        self.assertEqual((status, err), (1, ""))
        lines = out.decode("utf-8").splitlines()
        self.assertRegex(lines[0], r"^the command stream: settings\.seed 0 \| 1, num_written 20 \| 570, ")
        self.assertRegex(lines[1], "^  BlockwiseShuffleIterator: random_state generator .* | generator .*")
        self.assertRegex(lines[-1], "^ {6}[A-Z].*[^|] \\| [^|]")

    def test_same_position_is_no_difference(self):
        first, second = self.saved("a.json", "--limit", 20), self.saved("b.json", "--limit", 20)
        self.assertEqual(self.run_command("diff", first, second), (0, b"", ""))

    def test_bad_file_is_an_error_with_a_status_of_its_own(self):
        first = self.saved("a.json", "--limit", 20)
        for files in [(first, "nowhere.json"), ("nowhere.json", first), (first, self.paths[0])]:
            with self.subTest(files=files):
                self.assertFails("^infinibatch: error: ", "diff", *files, status=2)


class TestDemo(CommandTestCase):
    def test_demo_proves_an_exact_resume(self):
        with self.start("demo") as process:
            text = process.stdout.read().decode("utf-8")
            err = process.stderr.read()
        self.assertEqual((process.returncode, err), (0, b""))
        self.assertEqual(len(re.findall("^    yes  ", text, re.MULTILINE)), 3)
        self.assertNotIn("    NO ", text)
        self.assertRegex(
            text, "(?s)def pipeline.*def training.*SIGKILL.*BlockwiseShuffleIterator.*each of the 5,000 lines"
        )

    def test_demo_fails_where_the_batches_are_others(self):
        pipeline = _demo._demo_pipeline

        def shifted_pipeline(folder):  # in this process; not in those that are killed and resumed
            batches = pipeline(folder)
            next(batches)
            return batches

        with mock.patch.object(_demo, "_demo_pipeline", shifted_pipeline):
            status, out, err = self.run_command("demo")
        self.assertEqual((status, err), (1, ""))
        self.assertIn(b"    NO ", out)

    @unittest.skipUnless(POSIX, "needs signals")
    def test_interrupted_demo_is_quiet_and_leaves_nothing(self):
        with self.start("demo", env=dict(os.environ, PYTHONPATH=ROOT, TMPDIR=self.own_folder)) as process:
            process.stdout.readline()
            process.send_signal(signal.SIGINT)
            process.stdout.read()
            err = process.stderr.read()
        self.assertEqual((process.returncode, err), (130, b""))
        self.assertEqual(os.listdir(self.own_folder), [])


if __name__ == "__main__":
    unittest.main()
