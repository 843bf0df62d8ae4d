"""The command line, run as users run it: processes, pipes, signals."""

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

from infinibatch import __main__ as cli
from infinibatch.datasets import chunked_dataset_iterator
from infinibatch.readers import find_chunks, read_lines

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
POSIX = os.name == "posix"

# Progress is tqdm's where that is installed; this is how the command runs where it is not.
WITHOUT_TQDM = "import sys; sys.modules['tqdm'] = None; from infinibatch.__main__ import main; sys.exit(main())"


def take_signals():
    """Do not inherit that signals are ignored, as they are where the tests run under nohup or in the background."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


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
        from infinibatch import checkpoint
        from infinibatch.iterators import NativeCheckpointableIterator

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


@unittest.skipUnless(POSIX, "needs a terminal")
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
            r"^\r600 lines counted, [0-9,]+/s \r\n\r600 lines read, .*\r\n\r600 lines written, .*\r\n3 chunks with"
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
        self.assertRegex(lines[0], "^the command stream: settings {buffer_size 50, .*}, num_written 20")
        for depth, name in enumerate(["BucketedReadahead", "BlockwiseShuffle", "SelectMany", "Zip"], 1):
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
        self.assertRegex(lines[-1], "^ {8}[A-Z].*[^|] \\| [^|]")

    def test_same_position_is_no_difference(self):
        first, second = self.saved("a.json", "--limit", 20), self.saved("b.json", "--limit", 20)
        self.assertEqual(self.run_command("diff", first, second), (0, b"", ""))

    def test_bad_file_is_an_error_with_a_status_of_its_own(self):
        first = self.saved("a.json", "--limit", 20)
        for files in [(first, "nowhere.json"), ("nowhere.json", first), (first, self.paths[0])]:
            with self.subTest(files=files):
                self.assertFails("^infinibatch: error: ", "diff", *files, status=2)


class TestSplit(CommandTestCase):
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
        summary = "{} chunks with {} lines of {} bytes".format(
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
                with mock.patch.object(cli, "_SHUFFLE_MEMORY", memory), mock.patch.object(cli, "_PILE_BITS", 3):
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
                with mock.patch.object(cli, "_SHUFFLE_MEMORY", memory), mock.patch.object(cli, "_PILE_BITS", 1):
                    runs = cli._shuffled_runs(iter([[b"a\n", b"b\n"], [b"c\n"]]), random.Random(seed), self.own_folder)
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
        process = self.start("split", "-", "--out", self.out, *options, stdin=subprocess.PIPE)
        process.stdin.write(lines)
        process.stdin.flush()
        hidden = os.path.join(self.own_folder, ".out.incomplete")
        while "--shuffle" not in options and not (os.path.isdir(hidden) and len(os.listdir(hidden)) > 1):
            self.assertIsNone(process.poll())
        return process, lines

    @unittest.skipUnless(POSIX, "needs signals")
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

    @unittest.skipUnless(POSIX, "needs signals")
    def test_killed_run_leaves_nothing_that_looks_like_a_chunk_and_the_next_one_starts_anew(self):
        process, _ = self.begin("--lines", 500)
        process.kill()
        process.communicate()
        self.assertEqual(os.listdir(self.own_folder), [".out.incomplete"])
        for pattern in ["*", "*/*", "**/*", "**/*.gz", "out/*"]:
            with self.subTest(pattern=pattern), self.assertRaises(FileNotFoundError):
                find_chunks(os.path.join(self.own_folder, pattern))
        self.assertEqual(b"".join(self.split("--lines", 1000)), self.data)

    @unittest.skipUnless(POSIX, "needs locks")
    def test_second_run_at_once_is_refused_and_does_not_disturb_the_first(self):
        process, lines = self.begin("--lines", 500)
        self.assertFails("another run is at work", "split", self.input, "--out", self.out, "--lines", 1)
        text, err = process.communicate()
        self.assertEqual((process.returncode, err), (0, b""))
        self.assertEqual(b"".join(self.read_split(self.out, text)), lines)

    def test_chunks_are_those_that_stream_reads(self):
        self.split("--lines", 10, inputs=self.paths)
        status, out, err = self.run_command("stream", os.path.join(self.out, "chunk-*"))
        self.assertEqual((status, err), (0, ""))
        self.assertEqual(sorted(out.decode("utf-8").split("\n")[:-1]), sorted(self.corpus))


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
        pipeline = cli._demo_pipeline

        def shifted_pipeline(folder):  # in this process; not in those that are killed and resumed
            batches = pipeline(folder)
            next(batches)
            return batches

        with mock.patch.object(cli, "_demo_pipeline", shifted_pipeline):
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
