"""Checkpoints as files: exact, whole or not there, refused where they do not fit."""

import collections
import json
import math
import os
import pathlib
import re
import signal
import stat
import subprocess
import sys
import tempfile
import unittest
import zlib
from unittest import mock

from infinibatch import checkpoint
from infinibatch.iterators import (
    BlockwiseShuffleIterator,
    BucketedReadaheadBatchIterator,
    BufferedShuffleIterator,
    ChainIterator,
    EnumerateIterator,
    FixedBatchIterator,
    InfinitePermutationSourceIterator,
    MapIterator,
    MixIterator,
    MultiplexIterator,
    NativeCheckpointableIterator,
    PackIterator,
    PermutationSourceIterator,
    RecurrentIterator,
    SelectManyIterator,
    ShardedIterator,
    TakeIterator,
    WindowedIterator,
    ZipIterator,
)

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

CHUNKS = [["{}.{}".format(chunk, line) for line in range(7)] for chunk in range(5)]


def make_pipeline(seed=1, chunks=CHUNKS):
    source = InfinitePermutationSourceIterator(list(range(len(chunks))), seed=seed)
    lines = SelectManyIterator(source, lambda chunk: chunks[chunk])
    shuffled = BlockwiseShuffleIterator(lines, 10, seed=seed + 1)
    return BucketedReadaheadBatchIterator(shuffled, 8, key=len, batch_size=3, seed=seed + 2)


def take(iterator, number):
    return [next(iterator) for _ in range(number)]


class Holder:
    """The least that can be saved: any state at all."""

    def __init__(self, state):
        self.state = state

    def getstate(self):
        return self.state

    def setstate(self, state):
        self.state = state


class CheckpointTestCase(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.path = os.path.join(self.folder, "run.json")

    def write(self, data):
        with open(self.path, "wb") as file:
            file.write(data)

    def read(self):
        with open(self.path, "rb") as file:
            return file.read()

    def assertOnlyFiles(self, *names):
        self.assertEqual(sorted(os.listdir(self.folder)), sorted(names))


class TestRoundTrip(CheckpointTestCase):
    def test_pipeline_continues_exactly_from_every_position(self):
        expected = take(make_pipeline(), 40)
        pipeline = make_pipeline()
        for position in range(30):
            checkpoint.save(pipeline, self.path)
            resumed, used = make_pipeline(), make_pipeline()
            take(used, 3)
            for other in (resumed, used):
                with self.subTest(position=position, used=other is used):
                    checkpoint.load(other, self.path)
                    self.assertEqual(take(other, 8), expected[position : position + 8])
            self.assertEqual(next(pipeline), expected[position])
        self.assertOnlyFiles("run.json")

    def test_state_can_be_read_without_a_pipeline(self):
        pipeline = make_pipeline()
        take(pipeline, 7)
        checkpoint.save(pipeline, self.path)
        self.assertEqual(checkpoint.read(self.path), json.loads(json.dumps(pipeline.getstate())))
        self.write(b"{}")
        with self.assertRaisesRegex(ValueError, "run.json is no checkpoint"):
            checkpoint.read(self.path)

    def test_path_may_be_of_any_kind_and_hold_any_character(self):
        class Bytes:  # whose path is bytes, as os.fspath allows
            def __fspath__(self):
                return os.fsencode(name)

        for name in ("a b", "{}{0}%s", "[1]*", "line\nbreak", "é", os.fsdecode(b"\xff")):
            name = os.path.join(self.folder, name)
            for path in (name, pathlib.Path(name), Bytes()):
                with self.subTest(path=path):
                    try:
                        checkpoint.save(Holder(repr(path)), path)
                    except UnicodeError:
                        self.skipTest("the file system takes no such names")
                    holder = Holder(None)
                    checkpoint.load(holder, path)
                    self.assertEqual(holder.state, repr(path))
                    self.assertTrue(os.path.exists(name))

    def test_values_come_back_exactly(self):
        values = [
            0,
            -1,
            2**64,
            -(10**300),
            True,
            False,
            None,
            0.1,
            -0.0,
            5e-324,
            1.7976931348623157e308,
            math.inf,
            -math.inf,
            "",
            'quote " backslash \\ newline \n nul \0 ä € 𝄞 \u2028',
            "\ud800",
            "\udcff\ud83d",
            "\ud83d\ude00",  # two lone surrogates, not one character
            {"": {"ключ": [[], {}]}},
        ]
        for value in values:
            with self.subTest(value=value):
                checkpoint.save(Holder({"key": [value]}), self.path)
                holder = Holder(None)
                checkpoint.load(holder, self.path)
                self.assertEqual(holder.state, {"key": [value]})
                self.assertEqual(repr(holder.state), repr({"key": [value]}))
        checkpoint.save(Holder([math.nan]), self.path)
        holder = Holder(None)
        checkpoint.load(holder, self.path)
        self.assertTrue(math.isnan(holder.state[0]))

    def test_tuples_become_lists(self):
        checkpoint.save(Holder({"a": (1, (2.5, "x"))}), self.path)
        holder = Holder(None)
        checkpoint.load(holder, self.path)
        self.assertEqual(holder.state, {"a": [1, [2.5, "x"]]})

    def test_same_position_gives_the_same_file(self):
        pipeline = make_pipeline()
        take(pipeline, 5)
        checkpoint.save(pipeline, self.path)
        first = self.read()
        checkpoint.load(pipeline, self.path)
        checkpoint.save(pipeline, self.path)
        self.assertEqual(self.read(), first)

    def test_file_is_json_with_a_header(self):
        checkpoint.save(Holder({"n": 1}), self.path)
        self.assertEqual(
            json.loads(self.read().decode("utf-8")),
            {"infinibatch_checkpoint": 1, "crc32": zlib.crc32(b'{"n": 1}'), "state": {"n": 1}},
        )

    def test_file_laid_out_anew_or_without_checksum_is_still_good(self):
        checkpoint.save(Holder({"n": [1, "ä"]}), self.path)
        document = json.loads(self.read().decode("utf-8"))
        del document["crc32"]
        for changed in [json.loads(self.read().decode("utf-8")), document, dict(document, note="mine")]:
            with self.subTest(changed=changed):
                self.write(json.dumps(changed, indent=4, sort_keys=True).encode("utf-8"))
                holder = Holder(None)
                checkpoint.load(holder, self.path)
                self.assertEqual(holder.state, {"n": [1, "ä"]})

    def test_path_like_is_accepted(self):
        path = pathlib.Path(self.path)
        checkpoint.save(Holder(3), path)
        holder = Holder(None)
        checkpoint.load(holder, path)
        self.assertEqual(holder.state, 3)
        self.assertEqual(checkpoint.show(path), "3")

    def test_path_may_be_relative(self):
        before = os.getcwd()
        os.chdir(self.folder)
        try:
            checkpoint.save(Holder(3), "run.json")
        finally:
            os.chdir(before)
        self.assertOnlyFiles("run.json")


class Word(str):
    pass


class TestRefusedStates(CheckpointTestCase):
    def test_what_json_would_change_is_refused_by_the_place_where_it_is(self):
        cases = [
            ({1: "a"}, "state has the key 1; JSON keeps keys of type str only"),
            ({"a": {None: 1}}, r"state\['a'\] has the key None"),
            ({"a": [{"b": {(1, 2): 0}}]}, r"state\['a'\]\[0\]\['b'\] has the key \(1, 2\)"),
            ({Word("a"): 1}, "state has the key 'a'"),
            ({"a": b"x"}, r"state\['a'\] is of type builtins.bytes"),
            ([0, [1, {2}]], r"state\[1\]\[1\] is of type builtins.set"),
            ({"a": ("x", Word("y"))}, r"state\['a'\]\[1\] is of type test_checkpoint.Word"),
            ({"a": collections.OrderedDict()}, r"state\['a'\] is of type collections.OrderedDict"),
            ({"a": collections.namedtuple("P", "x")(1)}, r"state\['a'\] is of type test_checkpoint.P"),
            ({"a": signal.SIGINT}, r"state\['a'\] is of type signal.Signals"),
            ({"a": 1j}, r"state\['a'\] is of type builtins.complex"),
            (Holder(1), "state is of type test_checkpoint.Holder"),
        ]
        for state, pattern in cases:
            with self.subTest(state=state):
                with self.assertRaisesRegex(TypeError, "^" + pattern.replace("test_checkpoint", __name__)):
                    checkpoint.save(Holder(state), self.path)
                self.assertOnlyFiles()

    def test_numpy_values_are_refused(self):
        try:
            import numpy
        except ImportError:
            self.skipTest("needs numpy")
        for value in [numpy.float64(0.5), numpy.int64(1), numpy.bool_(True), numpy.zeros(2), numpy.str_("a")]:
            with self.subTest(value=value):
                with self.assertRaisesRegex(TypeError, r"^state\['a'\]\[1\] is of type numpy\."):
                    checkpoint.save(Holder({"a": [1, value]}), self.path)
                self.assertOnlyFiles()

    def test_data_of_the_users_own_inside_a_pipeline_are_found(self):
        counts = RecurrentIterator(
            NativeCheckpointableIterator("abc"), lambda seen, item: (seen | {item}, len(seen)), initial_state=set()
        )
        next(counts)
        with self.assertRaisesRegex(TypeError, r"^state\['recurrent_state'\] is of type builtins.set"):
            checkpoint.save(counts, self.path)


class TestWholeOrNotAtAll(CheckpointTestCase):
    def failing(self, name, error):
        return mock.patch.object(os, name, side_effect=error)

    def test_failure_at_any_step_leaves_the_old_file_and_nothing_else(self):
        for exists in [False, True]:
            if exists:
                checkpoint.save(Holder("old"), self.path)
            for name in ["fsync", "replace"]:
                for error in [OSError(28, "No space left on device"), KeyboardInterrupt()]:
                    with self.subTest(exists=exists, name=name, error=error), self.failing(name, error):
                        with self.assertRaises(type(error)):
                            checkpoint.save(Holder("new"), self.path)
                    self.assertOnlyFiles(*["run.json"] * exists)
            with self.assertRaises(TypeError):
                checkpoint.save(Holder({"a": b""}), self.path)
            self.assertOnlyFiles(*["run.json"] * exists)
        holder = Holder(None)
        checkpoint.load(holder, self.path)
        self.assertEqual(holder.state, "old")

    @unittest.skipUnless(hasattr(os, "mkfifo"), "needs named pipes")
    def test_what_is_no_file_is_not_replaced(self):
        pipe = os.path.join(self.folder, "pipe")
        os.mkfifo(pipe)
        link = os.path.join(self.folder, "link")
        os.symlink(pipe, link)
        for path in (pipe, link, self.folder, "", os.curdir):
            with self.subTest(path=path), self.assertRaisesRegex(OSError, "path must be that of a file"):
                checkpoint.save(Holder(1), path)
        self.assertTrue(stat.S_ISFIFO(os.stat(pipe).st_mode))
        self.assertOnlyFiles("pipe", "link")

    def test_content_is_on_disk_before_the_name_and_then_the_folder(self):
        steps = []

        def record(name, function):
            def recorded(*args):
                steps.append(name)
                return function(*args)

            return recorded

        with mock.patch.object(os, "fsync", record("fsync", os.fsync)):
            with mock.patch.object(os, "replace", record("replace", os.replace)):
                checkpoint.save(Holder(1), self.path)
        self.assertEqual(steps, ["fsync", "replace", "fsync"] if os.name == "posix" else ["fsync", "replace"])

    def test_folder_that_cannot_be_flushed_is_no_failure(self):
        real, calls = os.fsync, []

        def fsync(descriptor):
            calls.append(descriptor)
            if len(calls) > 1:
                raise OSError(22, "Invalid argument")
            real(descriptor)

        with mock.patch.object(os, "fsync", fsync):
            checkpoint.save(Holder(1), self.path)
        self.assertOnlyFiles("run.json")

    def test_missing_folder_is_an_error(self):
        with self.assertRaisesRegex(FileNotFoundError, "nowhere"):
            checkpoint.save(Holder(1), os.path.join(self.folder, "nowhere", "run.json"))

    @unittest.skipUnless(os.name == "posix", "needs symbolic links")
    def test_symbolic_link_stays_one(self):
        target = os.path.join(self.folder, "target.json")
        os.symlink("target.json", self.path)
        checkpoint.save(Holder(1), self.path)
        self.assertTrue(os.path.islink(self.path))
        self.assertFalse(os.path.islink(target))
        self.assertOnlyFiles("run.json", "target.json")

    @unittest.skipUnless(os.name == "posix", "needs permission bits")
    def test_permissions_are_those_of_any_new_file(self):
        before = os.umask(0o027)
        try:
            checkpoint.save(Holder(1), self.path)
        finally:
            os.umask(before)
        self.assertEqual(stat.S_IMODE(os.stat(self.path).st_mode), 0o640)

    def test_killed_writer_leaves_a_good_file(self):
        code = (
            "import sys\n"
            "from infinibatch import checkpoint\n"
            "from infinibatch.iterators import NativeCheckpointableIterator\n"
            "numbers = NativeCheckpointableIterator(range(10 ** 6))\n"
            "while True:\n"
            "    next(numbers)\n"
            "    checkpoint.save(numbers, sys.argv[1])\n"
            "    print(numbers.getstate()['num_items_yielded'], flush=True)\n"
        )
        for rounds in [1, 2, 3, 7]:
            with self.subTest(rounds=rounds):
                child = subprocess.Popen([sys.executable, "-c", code, self.path], stdout=subprocess.PIPE, cwd=ROOT)
                with child:
                    for _ in range(rounds):
                        last = int(child.stdout.readline())
                    child.kill()
                    last = max([last] + [int(line) for line in child.stdout if line.endswith(b"\n")])
                numbers = NativeCheckpointableIterator(range(10**6))
                checkpoint.load(numbers, self.path)
                self.assertIn(next(numbers), [last, last + 1])


class TestBadFiles(CheckpointTestCase):
    def assertRefused(self, pattern, error_type=ValueError):
        pipeline = make_pipeline()
        take(pipeline, 4)
        expected = pipeline.getstate()
        with self.assertRaisesRegex(error_type, re.escape(self.path) + ".*" + pattern) as caught:
            checkpoint.load(pipeline, self.path)
        self.assertEqual(pipeline.getstate(), expected)
        return caught.exception

    def test_missing_file_is_an_error_never_a_fresh_start(self):
        self.assertRefused("", FileNotFoundError)

    def test_empty_file(self):
        self.write(b"")
        self.assertRefused("is no checkpoint: the file is empty")

    def test_file_cut_off_anywhere(self):
        checkpoint.save(make_pipeline(), self.path)
        data = self.read().rstrip()
        for length in [1, 10, 40, 100, len(data) // 2, len(data) - 1]:
            with self.subTest(length=length):
                self.write(data[:length])
                self.assertRefused("is no checkpoint: it is cut off or damaged")

    def test_every_changed_byte_is_noticed(self):
        checkpoint.save(Holder({"a": [1, 2.5, "x"]}), self.path)
        data = self.read().rstrip()
        for position in range(len(data)):
            for bit in range(8):
                changed = bytearray(data)
                changed[position] ^= 1 << bit
                with self.subTest(position=position, bit=bit):
                    self.write(bytes(changed))
                    holder = Holder(None)
                    try:
                        checkpoint.load(holder, self.path)
                    except ValueError as error:
                        self.assertIn(self.path, str(error))
                    else:  # a letter of the key "crc32", or a blank that became another
                        self.assertEqual(holder.state, {"a": [1, 2.5, "x"]})

    def test_foreign_files(self):
        cases = {
            b"\x80\x04\x95 a pickle": "is no checkpoint: it is cut off or damaged",
            b"[1, 2]": "is no checkpoint: it lacks",
            b"3": "is no checkpoint: it lacks",
            b'{"source_state": {}}': "is no checkpoint: it lacks",
            b"[" * 100000: "is no checkpoint: it is cut off or damaged",
            b'{"infinibatch_checkpoint": 2, "state": {}}': "has layout 2, and this version reads 1",
        }
        for data, pattern in cases.items():
            with self.subTest(data=data[:60]):
                self.write(data)
                self.assertRefused(pattern)

    def test_state_of_another_pipeline(self):
        checkpoint.save(NativeCheckpointableIterator("abc"), self.path)
        error = self.assertRefused("")
        self.assertIsInstance(error.__cause__, ValueError)

    def test_position_beyond_the_end_of_the_data(self):
        numbers = NativeCheckpointableIterator(range(10))
        take(numbers, 9)
        checkpoint.save(numbers, self.path)
        shorter = NativeCheckpointableIterator(range(3))
        with self.assertRaisesRegex(RuntimeError, "^" + re.escape(self.path) + ": "):
            checkpoint.load(shorter, self.path)

    def test_other_errors_of_a_setstate_pass_unchanged(self):
        class Failing(Holder):
            def setstate(self, state):
                raise KeyError("mine")

        checkpoint.save(Holder(1), self.path)
        with self.assertRaisesRegex(KeyError, "^'mine'$"):
            checkpoint.load(Failing(0), self.path)


class TestShow(CheckpointTestCase):
    def show(self, iterator):
        checkpoint.save(iterator, self.path)
        return checkpoint.show(self.path)

    def test_pipeline_is_shown_as_a_tree(self):
        pipeline = make_pipeline()
        take(pipeline, 20)
        generator = "generator [0-9a-f]{8} at word [0-9]+ of 624"
        patterns = [
            "BucketedReadaheadBatchIterator: .*random_state {}.*num_served [0-9]".format(generator),
            "  BlockwiseShuffleIterator: .*flattened_items_yielded [0-9]+.*random_state {}".format(generator),
            "    SelectManyIterator: flattened_items_yielded [0-9]+",
            "      InfinitePermutationSourceIterator: .*random_state .*index [0-9]",
        ]
        lines = self.show(pipeline).split("\n")
        self.assertEqual(len(lines), len(patterns))
        for line, pattern in zip(lines, patterns):
            self.assertRegex(line, "^" + pattern)
            self.assertLess(len(line), 200)

    def test_start_is_shown_without_generators_that_were_not_used(self):
        self.assertRegex(self.show(make_pipeline()).split("\n")[3], "^      InfinitePermutationSourceIterator: index 0")
        self.assertEqual(self.show(Holder({"source_state": None})), "FixedBatchIterator\n  at its start")

    def test_all_sources_of_a_stage_are_shown(self):
        def letters():
            return NativeCheckpointableIterator("abc")

        zipped = ZipIterator(letters(), MapIterator(letters(), str.upper))
        mixed = MultiplexIterator(NativeCheckpointableIterator([0, 1]), [zipped, BufferedShuffleIterator(letters(), 2)])
        self.assertEqual(next(mixed), ("a", "A"))
        native = "NativeCheckpointableIterator or ChunkedSourceIterator: num_items_yielded {}"
        lines = self.show(mixed).split("\n")
        self.assertEqual(lines[0], "MultiplexIterator")
        self.assertEqual(lines[1], "  " + native.format(1))
        self.assertEqual(lines[2], "  ZipIterator")
        self.assertEqual(lines[3], "    " + native.format(1))
        self.assertEqual(lines[4], "    " + native.format(1))
        self.assertRegex(lines[5], r"^  BufferedShuffleIterator: .*buffer \[2 items\]")
        self.assertEqual(lines[6], "    " + native.format(0))
        self.assertEqual(len(lines), 7)

    def test_each_stage_is_shown_by_its_name_above_its_sources(self):
        def letters():
            return NativeCheckpointableIterator("abcdef")

        for make in (
            lambda: PackIterator(letters(), 4),
            lambda: TakeIterator(letters(), 2),
            lambda: EnumerateIterator(letters()),
            lambda: ChainIterator(letters(), letters()),
            lambda: MixIterator([letters(), letters()]),
            lambda: WindowedIterator(letters(), 2),
            lambda: FixedBatchIterator(letters(), 2),
            lambda: RecurrentIterator(letters(), lambda state, item: (state, item), 0),
            lambda: BufferedShuffleIterator(letters(), 2),
            lambda: PermutationSourceIterator("ab"),
            lambda: InfinitePermutationSourceIterator("ab"),
        ):
            iterator = make()
            name = type(iterator).__name__
            with self.subTest(name):
                next(iterator)
                lines = self.show(iterator).split("\n")
                self.assertIn(name, re.split("[ :]", lines[0].replace(" or ", " ")))
                self.assertEqual(len(lines), 3 if name == "MixIterator" else 1 if "Permutation" in name else 2)
                for line in lines[1:]:
                    self.assertRegex(line, "^  NativeCheckpointableIterator or ChunkedSource")

    def test_shards_are_shown_each_with_its_pipeline(self):
        def make_shard(num_shards, shard):
            return FixedBatchIterator(NativeCheckpointableIterator(range(shard, 17, num_shards)), 2)

        rank = ShardedIterator(make_shard, 4, num_instances=2, instance_rank=1)
        take(rank, 2)
        expected = ["ShardedIterator: num_shards 4"]
        for shard in "13":
            expected += [
                "  a shard: shard {!r}, num_served 1, ended False".format(shard),
                "    FixedBatchIterator",
                "      NativeCheckpointableIterator or ChunkedSourceIterator: num_items_yielded 2",
            ]
        self.assertEqual(self.show(rank).split("\n"), expected)
        take(rank, 1)
        checkpoint.save(rank, self.path + ".other")
        differences = "ShardedIterator\n  a shard: num_served 1 | 2"
        self.assertEqual(checkpoint.diff(self.path, self.path + ".other"), differences)

    def test_states_of_unknown_stages_are_shown_by_their_keys(self):
        state = {"source_state": {"mine": "x" * 500}, "limits": {"low": 1, "high": 2.5}}
        lines = self.show(Holder(state)).split("\n")
        self.assertEqual(lines[0], "FixedBatchIterator: limits {low 1, high 2.5}")
        self.assertRegex(lines[1], "^  stage: mine 'x{20,60}$")

    def test_bad_file_is_an_error(self):
        self.assertRaises(FileNotFoundError, checkpoint.show, self.path)
        self.write(b"nonsense")
        with self.assertRaisesRegex(ValueError, "is no checkpoint"):
            checkpoint.show(self.path)


if __name__ == "__main__":
    unittest.main()
