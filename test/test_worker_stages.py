"""Prefetching, mapping and reading chunks in other processes: what a program sees that uses these stages."""

import collections
import contextlib
import errno
import functools
import gc
import itertools
import json
import logging
import mmap
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import textwrap
import threading
import time
import traceback
import unittest
import warnings
from copy import deepcopy
from functools import partial
from itertools import islice
from unittest import mock

from test_workers import PROCESSES, STARTS, WorkerCase, eventually, linux, posix, running, script, start_script

from infinibatch import _workers, datasets
from infinibatch import iterators as its
from infinibatch.testing import check_iterator

Native = its.NativeCheckpointableIterator

SHARING = tuple(start for start in STARTS if start != "spawn")  # workers see the memory of the test


# Three pipelines that yield function(item) for each item, and their variations.


class Singly:
    """A reader of chunks that hold one item each."""

    def __init__(self, function):
        self.function = function

    def __call__(self, item):
        return [self.function(item)]


def prefetch(items, function, start=None, buffer_size=4):
    return its.PrefetchIterator(its.MapIterator(Native(items), function), buffer_size, start=start)


def parallel_map(items, function, start=None, num_processes=2):
    return its.ParallelMapIterator(Native(items), function, num_processes, 2, start=start)


def read_chunks(items, function, start=None):
    return its.ParallelSelectManyIterator(Native(items), Singly(function), 2, start=start)


KINDS = {"prefetch": prefetch, "parallel map": parallel_map, "chunks": read_chunks}


def nested(items, function, start=None):
    """Every stage above and below another one, four deep."""
    inner = its.PrefetchIterator(parallel_map(items, function, start), 3, start=start)
    chunks = its.ParallelSelectManyIterator(inner, Singly(same), 2, start=start)
    return its.PrefetchIterator(its.ParallelMapIterator(chunks, same, 2, 3, start=start), 5, start=start)


# Functions for them, where `spawn` can import them.


def bytes_of(size, item):
    return bytes(size)


def same(item):
    return item


def double(item):
    return 2 * item


def block_at(at, item):
    if item == at:
        threading.Event().wait()
    return item


def raise_at(at, error, item):
    if item == at:
        users_function(error)
    return item


def users_function(error):
    raise error


def lock_at(at, item):
    return threading.Lock() if item == at else item


def next_of_empty_at(at, item):
    return next(iter(())) if item == at else item


class TwoArguments(Exception):
    def __init__(self, first, second):
        super().__init__("{} and {}".format(first, second))
        self.first = first


class Unpicklable(Exception):
    def __init__(self, message):
        super().__init__(message)
        self.lock = threading.Lock()


class EndLike(StopIteration):
    pass


class RefusesPickle:
    def __reduce__(self):
        raise RuntimeError("not this one")


class Shared:
    """Numbers in memory that forked processes share."""

    def __init__(self, size=1):
        self.numbers = memoryview(mmap.mmap(-1, 8 * size)).cast("q")

    @property
    def value(self):
        return self.numbers[0]

    @value.setter
    def value(self, value):
        self.numbers[0] = value


class Times:
    """A function that does something else to an item the first so many times."""

    def __init__(self, times, at, act):
        self.left, self.at, self.act = Shared(), at, act
        self.left.value = times

    def __call__(self, item):
        if item == self.at and self.left.value > 0:
            self.left.value -= 1
            return self.act()
        return item


class Counting:
    """A function that counts the items that went through, wherever it runs (in one process at a time)."""

    def __init__(self):
        self.count = Shared()

    def __call__(self, item):
        self.count.value += 1
        return item


def children(pid=None):
    """The processes that a process has started, and those that they have started."""
    found = []
    try:
        for task in os.listdir("/proc/{}/task".format(pid or os.getpid())):
            with open("/proc/{}/task/{}/children".format(pid or os.getpid(), task)) as file:
                found += map(int, file.read().split())
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found + [grandchild for child in found for grandchild in children(child)]


def memory_of(pids, key="Pss"):
    """Kilobytes of memory, shared ones divided by those who share them."""
    total = 0
    for pid in pids:
        with open("/proc/{}/smaps".format(pid)) as file:
            total += sum(int(line.split()[1]) for line in file if line.startswith(key + ":"))
    return total


class Builder:
    """Builds one kind of stage with one start method, and closes what it has built."""

    def __init__(self, make, start):
        self.make, self.start, self.built = partial(make, start=start), start, []

    def __call__(self, *arguments, **options):
        self.built.append(self.make(*arguments, **options))
        return self.built[-1]

    def close(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of threads left behind
            for iterator in self.built:
                iterator.close()


def each(starts=STARTS, kinds=KINDS, spawned=("prefetch",)):
    """Run a test for each kind of stage and each start method; it gets what builds them.

    To spawn takes long, so that only those kinds in `spawned` do so too.
    """

    def decorate(test):
        @functools.wraps(test)
        def run(self):
            for start in starts:
                for name in spawned if start == "spawn" else kinds:
                    make = kinds[name]
                    with self.subTest(stage=name, start=start):
                        build = Builder(make, start)
                        try:
                            test(self, build)
                        finally:
                            build.close()

        return run

    return decorate


class StageCase(WorkerCase):
    def build(self, make, *arguments, **options):
        iterator = make(*arguments, **options)
        self.addCleanup(iterator.close)
        return iterator

    def raised(self, iterator):
        """Read up to an exception; return the items before it and the exception."""
        items = []
        try:
            for item in iterator:
                items.append(item)
        except Exception as error:
            return items, error
        self.fail("nothing was raised; items: {!r}".format(items))

    def script_file(self, code, *arguments):
        """Run a program from a file, which `spawn` can import again; return its status, output and errors."""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "program.py")
            with open(path, "w") as file:
                file.write(textwrap.dedent(code))
            runner = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-W', 'error'] + {!r}))"
            return script(runner.format([path] + list(arguments)))[:3]


# ---------------------------------------------------------------------------------------------------------------------
# Items and checkpoints
# ---------------------------------------------------------------------------------------------------------------------


class ContractTest(StageCase):
    deadline = 120

    def test_holds_at_every_position(self):
        for start in SHARING:
            items = [3, None] if start == "fork" else [3, None, 1, 4, 1, 5, 9]
            for name, make in KINDS.items():
                with self.subTest(stage=name, start=start):
                    check_iterator(partial(make, items, same, start), items, pickles=True)

    def test_holds_in_spawned_processes(self):
        for name, make in KINDS.items():
            with self.subTest(stage=name):
                items = [3, 1, 4, 1, 5]
                iterator = self.build(make, items, double, "spawn")
                states = [iterator.getstate()]
                for item in items:
                    self.assertEqual(next(iterator), 2 * item)
                    states.append(iterator.getstate())
                self.assertEqual(list(iterator), [])
                for position in (3, 5):
                    iterator.setstate(json.loads(json.dumps(states[position])))
                    self.assertEqual(list(iterator), list(map(double, items[position:])))
                copy = self.build(pickle.loads, pickle.dumps(iterator))
                copy.setstate(states[2])
                self.assertEqual(list(copy), list(map(double, items[2:])))

    def test_holds_for_errors_of_callbacks_at_every_call(self):
        def with_errors(make, hook):
            def function(item):
                hook()
                return item

            return make(range(6), function, "thread")

        for name, make in KINDS.items():
            with self.subTest(stage=name):
                check_iterator(
                    partial(with_errors, make), range(6), errors=[ValueError, StopIteration, KeyboardInterrupt]
                )

    def test_holds_over_and_under_other_stages(self):
        def pipeline(start):
            chunks = its.ParallelSelectManyIterator(
                its.ChunkedSourceIterator(["abc", "", "defgh", "i"]), None, 2, start=start
            )
            shuffled = its.BlockwiseShuffleIterator(its.PrefetchIterator(chunks, 2, start=start), 3, seed=5)
            mapped = its.ParallelMapIterator(shuffled, str.upper, 2, 2, start=start)
            return its.FixedBatchIterator(its.PrefetchIterator(mapped, 3, start=start), 2)

        expected = list(its.FixedBatchIterator(its.BlockwiseShuffleIterator(Native("ABCDEFGHI"), 3, seed=5), 2))
        check_iterator(partial(pipeline, "thread"), expected)
        if PROCESSES:
            iterator, states = self.build(pipeline, "fork"), []
            for item in expected:
                states.append(iterator.getstate())
                self.assertEqual(next(iterator), item)
            for position, state in enumerate(states):
                iterator.setstate(pickle.loads(pickle.dumps(state)))
                self.assertEqual(list(iterator), expected[position:])

    def test_holds_over_sources_of_every_kind(self):
        def own():
            from test_iterators import Own

            return Own("abcdef")

        sources = {
            "user's own": own,
            "shuffled": lambda: its.PermutationSourceIterator("abcdef", seed=2),
            "generators": lambda: its.SelectManyIterator(Native(["abc", "", "def"]), iter),
            "buffered shuffle": lambda: its.BufferedShuffleIterator(Native("abcdef"), 3),
            "empty": lambda: Native(""),
            "one item": lambda: Native("a"),
        }
        for name, make in sources.items():
            for stage, build in (
                ("prefetch", lambda source: its.PrefetchIterator(source, 2, start="thread")),
                ("map", lambda source: its.ParallelMapIterator(source, same, 2, 1, start="thread")),
                ("chunks", lambda source: its.ParallelSelectManyIterator(source, None, 2, start="thread")),
            ):
                with self.subTest(source=name, stage=stage):
                    check_iterator(lambda make=make, build=build: build(make()), list(make()))
            with self.subTest(source=name, stage="prefetch", start="fork"):
                self.assertEqual(list(self.build(its.PrefetchIterator, make(), 2)), list(make()))


@posix
class CheckpointsTest(StageCase):
    length = 20

    def states(self, iterator):
        states = [iterator.getstate()]
        for _ in iterator:
            states.append(iterator.getstate())
        self.assertEqual(len(states), self.length + 1)
        return states

    def test_are_equal_at_equal_positions_for_any_start_method(self):
        for name, make in KINDS.items():
            expected = self.states(self.build(make, range(self.length), double, "fork"))
            for start in STARTS:
                with self.subTest(stage=name, start=start):
                    iterator = self.build(make, range(self.length), double, start)
                    self.assertEqual(self.states(iterator), expected)
                    for position in [9] if start == "spawn" else range(self.length):
                        iterator.setstate(expected[position])
                        self.assertEqual(next(iterator), 2 * position)
                        self.assertEqual(iterator.getstate(), expected[position + 1])

    def test_of_a_prefetch_are_the_source_every_buffer_size_items_and_the_items_since(self):
        for size in (1, 2, 3, 7, 1000):
            with self.subTest(buffer_size=size):
                states = self.states(self.build(prefetch, range(self.length), same, None, size))
                for position, state in enumerate(states):
                    source_state = {"num_items_yielded": position // size * size}
                    self.assertEqual(state, {"source_state": source_state, "item_offset": position % size})

    def test_restore_with_any_other_buffer_and_start_method(self):
        sizes = (1, 2, 3, 7, 1000)
        for size in sizes:
            saved = self.states(self.build(prefetch, range(self.length), same, "fork", size))
            for other, start in [(other, start) for other in sizes for start in SHARING]:
                with self.subTest(buffer_size=size, other=other, start=start):
                    iterator = self.build(prefetch, range(self.length), same, start, other)
                    for position in (0, 1, 6, 7, 13, 20):
                        iterator.setstate(saved[position])
                        self.assertEqual(iterator.getstate(), saved[position])
                        self.assertEqual(list(iterator), list(range(position, self.length)))

    def test_move_between_processes_and_threads_and_spawned_ones(self):
        for name, make in KINDS.items():
            starts = STARTS if make is prefetch else SHARING
            iterators = {start: self.build(make, range(self.length), double, start) for start in starts}
            for start, iterator in iterators.items():
                iterator.setstate(None)
                self.assertEqual([next(iterator) for _ in range(7)], list(range(0, 14, 2)))
                state = pickle.loads(pickle.dumps(iterator.getstate()))
                for other in starts:
                    with self.subTest(stage=name, made_with=start, restored_with=other):
                        iterators[other].setstate(state)
                        self.assertEqual([next(iterators[other]) for _ in range(3)], [14, 16, 18])

    def test_of_chunks_are_those_of_the_stage_that_reads_in_this_process(self):
        def chunk(n):
            return ("{}{}".format(n, letter) for letter in "abcde"[: n % 6])

        plain = its.SelectManyIterator(Native(range(9)), chunk)
        parallel = self.build(its.ParallelSelectManyIterator, Native(range(9)), chunk, 3)
        states = []
        while True:
            states.append(plain.getstate())
            self.assertEqual(parallel.getstate(), states[-1])
            item = next(plain, None)
            self.assertEqual(next(parallel, None), item)
            if item is None:
                break
        for state in states:
            plain.setstate(state)
            parallel.setstate(state)
            self.assertEqual(list(parallel), list(plain))

    def test_never_run_ahead_of_the_consumer(self):
        for start in SHARING:
            for buffer_size in (1, 4):
                with self.subTest(start=start, buffer_size=buffer_size):
                    function = Counting()
                    iterator = self.build(prefetch, range(10), function, start, buffer_size)
                    self.assertEqual([next(iterator) for _ in range(3)], [0, 1, 2])
                    ahead = 3 + buffer_size - 1  # the consumer may still hold some that it has not asked for
                    self.assertTrue(eventually(lambda f=function, n=ahead: f.count.value >= n))
                    state = iterator.getstate()
                    other = self.build(prefetch, range(10), same, start, buffer_size)
                    other.setstate(state)
                    self.assertEqual(list(other), list(range(3, 10)))

    def test_lie_further_apart_where_the_state_of_the_source_is_large(self):
        def pipeline(buffer_size):
            shuffled = its.BlockwiseShuffleIterator(Native(range(200)), 7, seed=3)  # holds a generator's 625 words
            return its.PrefetchIterator(shuffled, buffer_size)

        for buffer_size, apart in ((1, 16), (3, 12), (100, 100)):
            with self.subTest(buffer_size=buffer_size):
                iterator = self.build(pipeline, buffer_size)
                offsets, states = [], []
                for _ in range(150):
                    next(iterator)
                    states.append(iterator.getstate())
                    offsets.append(states[-1]["item_offset"])
                marks = [position for position, offset in enumerate(offsets, 1) if not offset]
                self.assertTrue(all(later - earlier >= apart for earlier, later in zip([0] + marks, marks)), marks)
                self.assertLess(max(offsets), 4 * max(apart, buffer_size))
                rest = list(iterator)
                iterator.setstate(states[-1])
                self.assertEqual(list(iterator), rest)


@posix
class ComputedAheadTest(StageCase):
    def test_are_as_many_items_as_the_buffer_holds_and_never_more(self):
        for start in SHARING:
            for buffer_size in (1, 2, 3, 7, 50):
                with self.subTest(start=start, buffer_size=buffer_size):
                    function = Counting()
                    iterator = self.build(prefetch, range(120), function, start, buffer_size)
                    for returned in range(1, 60):
                        self.assertEqual(next(iterator), returned - 1)
                        self.assertLessEqual(function.count.value - returned, buffer_size)
                    # While the consumer is busy, at least half of the buffer fills up: the rest may be its own run's.
                    self.assertTrue(eventually(lambda f=function, n=59 + (buffer_size + 1) // 2: f.count.value >= n))

    @each()
    def test_start_with_the_first_item_that_is_asked_for(self, build):
        before = set(children()), threading.active_count()
        iterator = build(range(5), double)
        iterator.getstate()
        iterator.setstate(None)
        repr(iterator)
        self.assertEqual((set(children()), threading.active_count()), before)
        self.assertEqual(iterator.waiting, {})
        self.assertEqual(next(iterator), 0)

    def test_do_not_keep_one_that_is_ready_waiting_for_a_slow_one(self):
        returned = Shared()

        def slow(item):
            time.sleep(0.002)
            while returned.value < item:  # the item before must arrive first
                time.sleep(0.0005)
            return item

        for start in SHARING:
            with self.subTest(start=start):
                returned.value = 0
                iterator = self.build(prefetch, range(20), slow, start, 8)
                for item in range(20):
                    self.assertEqual(next(iterator), item)
                    returned.value += 1

    def test_adapt_to_items_that_become_slow(self):
        count = Shared()

        def slow_from_1000(item):
            if item >= 1000:
                time.sleep(0.001)
            count.value = item
            return item

        iterator = self.build(prefetch, range(3000), slow_from_1000, "fork", 1000)
        for item in range(1400):
            self.assertEqual(next(iterator), item)
        self.assertLess(len(iterator._run), 10)

    def test_wait_within_bounds_for_a_producer_that_is_busy(self):
        def busy(item):
            until = time.perf_counter() + 0.001
            while time.perf_counter() < until:
                pass
            return item

        iterator = self.build(prefetch, range(1000), busy, None, 300)
        for _ in range(3):
            next(iterator)
        self.assertTrue(eventually(lambda: iterator._workers[0].ready()))
        longest = 0.0
        for _ in range(200):
            started = time.perf_counter()
            next(iterator)
            longest = max(longest, time.perf_counter() - started)
        self.assertLess(longest, 1.0)


# ---------------------------------------------------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------------------------------------------------


class ErrorsTest(StageCase):
    @each(SHARING)
    def test_arrive_behind_the_items_before_them_with_type_message_and_traceback(self, build):
        errors = [ValueError("bad item"), KeyError(7), TwoArguments("this", "that"), Unpicklable("has a lock")]
        for error in errors:
            iterator = build(range(8), partial(raise_at, 5, error))
            for attempt in range(2):
                items, caught = self.raised(iterator)
                self.assertEqual(items, [] if attempt else [0, 1, 2, 3, 4])
                self.assertIs(type(caught), type(error))
                self.assertEqual(str(caught), str(error))
                text = "".join(traceback.format_exception(type(caught), caught, caught.__traceback__))
                self.assertRegex(text, r"line \d+, in users_function\n +raise error")
                self.assertEqual(getattr(caught, "first", None), getattr(error, "first", None))

    @posix
    @each(["spawn"], spawned=KINDS)
    def test_arrive_from_spawned_processes(self, build):
        items, caught = self.raised(build(range(8), partial(raise_at, 3, TwoArgumentsPicklable("this", "that"))))
        self.assertEqual(items, [0, 1, 2])
        self.assertIs(type(caught), TwoArgumentsPicklable)
        self.assertEqual(str(caught), "this and that")
        self.assertIn("in users_function", str(caught.__cause__))

    @posix
    @each(["fork"])
    def test_of_a_type_that_only_the_worker_has_are_named(self, build):
        def function(item):
            class Local(Exception):
                pass

            raise Local("from within")

        _, caught = self.raised(build(range(3), function))
        self.assertIs(type(caught), RuntimeError)
        self.assertRegex(str(caught), r"Local: from within$")

    @each(SHARING)
    def test_leave_the_position_and_the_next_call_goes_on(self, build):
        def fail():
            raise ValueError("twice")

        iterator = build(range(12), Times(2, 5, fail))
        self.assertEqual([next(iterator) for _ in range(5)], [0, 1, 2, 3, 4])
        before = iterator.getstate()
        for _ in range(2):
            with self.assertRaisesRegex(ValueError, "^twice$"):
                next(iterator)
            self.assertEqual(iterator.getstate(), before)
        self.assertEqual(list(iterator), list(range(5, 12)))

    @each(SHARING)
    def test_are_never_taken_for_the_end(self, build):
        raised = [StopIteration(), EndLike(1)]
        for function in [partial(next_of_empty_at, 3)] + [partial(raise_at, 3, error) for error in raised]:
            items, caught = self.raised(build(range(6), function))
            self.assertEqual(items, [0, 1, 2])
            self.assertIs(type(caught), RuntimeError)
            self.assertRegex(str(caught), "StopIteration|EndLike")
            self.assertIsInstance(caught.__cause__, StopIteration)

    @each(SHARING)
    def test_that_are_no_exceptions_proper_arrive_too(self, build):
        iterator = build(range(6), partial(raise_at, 2, SystemExit(3)))
        self.assertEqual([next(iterator), next(iterator)], [0, 1])
        with self.assertRaises(SystemExit) as caught:
            next(iterator)
        self.assertEqual(caught.exception.code, 3)

    def test_of_the_source_come_behind_what_was_read_before_them(self):
        def make(stage, start):
            source = its.MapIterator(Native(range(9)), partial(raise_at, 5, ValueError("unreadable")))
            if stage == "map":
                return its.ParallelMapIterator(source, double, 2, 3, start=start)
            return its.ParallelSelectManyIterator(source, Singly(double), 2, start=start)

        for start in SHARING:
            for stage in ("map", "chunks"):
                with self.subTest(stage=stage, start=start):
                    iterator = self.build(make, stage, start)
                    for expected in ([0, 2, 4, 6, 8], [], []):
                        items, caught = self.raised(iterator)
                        self.assertEqual(items, expected)
                        self.assertEqual((type(caught), str(caught)), (ValueError, "unreadable"))

    @posix
    @each(PROCESSES)
    def test_name_the_type_of_an_item_that_cannot_be_pickled_behind_the_items_before_it(self, build):
        iterator = build(range(40), partial(lock_at, 30))
        for expected in (list(range(30)), []):
            items, caught = self.raised(iterator)
            self.assertEqual(items, expected)
            self.assertIs(type(caught), TypeError)
            self.assertRegex(str(caught), r"must be picklable, got _thread\.lock")

    @posix
    @each(["fork"], {kind: KINDS[kind] for kind in ("parallel map", "chunks")})
    def test_name_the_type_of_an_input_that_cannot_be_pickled_behind_the_items_before_it(self, build):
        items = list(range(30)) + [threading.Lock()] + list(range(30, 40))
        iterator = build(items, id)
        for expected in (list(map(id, items[:30])), []):
            results, caught = self.raised(iterator)
            self.assertEqual(results, expected)
            self.assertIs(type(caught), TypeError)
            self.assertRegex(str(caught), r"must be picklable, got _thread\.lock")

    @posix
    @each(["fork"])
    def test_name_the_type_of_an_item_whatever_its_pickling_raises(self, build):
        deep = []
        for _ in range(5000):
            deep = [deep]
        for value, name in ((RefusesPickle(), "test_worker_stages.RefusesPickle"), (deep, "builtins.list")):
            items, caught = self.raised(build(range(20), Times(10, 15, partial(same, value))))
            self.assertEqual(items, list(range(15)))
            self.assertIs(type(caught), TypeError)
            self.assertIn("must be picklable, got " + name, str(caught))

    @each(["thread"])
    def test_threads_pass_objects_as_they_are(self, build):
        lock = threading.Lock()
        self.assertEqual(list(build([1, 2], lambda item: lock)), [lock, lock])

    @posix
    @each(["spawn"], spawned=KINDS)
    def test_spawn_says_what_cannot_be_pickled(self, build):
        iterator = build(range(3), lambda item: item)
        for _ in range(2):
            with self.assertRaisesRegex(TypeError, "start='spawn' must be picklable, got builtins.function"):
                next(iterator)

    @each()
    def test_close_is_final(self, build):
        iterator = build(range(5), double)
        next(iterator)
        before = iterator.getstate()
        for _ in range(2):
            iterator.close()
            self.assertEqual(iterator.getstate(), before)
            with self.assertRaisesRegex(RuntimeError, "^[A-Za-z]+Iterator is closed$"):
                next(iterator)
            with self.assertRaisesRegex(RuntimeError, "^[A-Za-z]+Iterator is closed$"):
                iterator.setstate(None)

    def test_bad_arguments_are_refused(self):
        source = Native(range(3))
        for make, error, message in (
            (lambda: its.PrefetchIterator(source, 0), ValueError, "buffer_size must be at least 1, got 0"),
            (lambda: its.PrefetchIterator(source, 1.5), TypeError, "buffer_size must be an integer .*, got 1.5"),
            (lambda: its.PrefetchIterator([1], 1), ValueError, "source_iterator must be a Checkpointable"),
            (lambda: its.PrefetchIterator(source, 1, start="forkserver"), ValueError, "start must be .*'forkserver'"),
            (lambda: its.ParallelMapIterator(source, 1, 1, 1), TypeError, "transform must be callable, got 1"),
            (lambda: its.ParallelMapIterator(source, len, 0, 1), ValueError, "num_processes must be at least 1, got 0"),
            (lambda: its.ParallelMapIterator(source, len, 1, 0), ValueError, "num_items_per_process must be .*, got 0"),
            (lambda: its.ParallelMapIterator(source, len, 1, 1, start=1), ValueError, "start must be .*got 1"),
            (lambda: its.ParallelSelectManyIterator(source, 1, 1), TypeError, "collection_selector must be callable"),
            (lambda: its.ParallelSelectManyIterator(source, None, 0), ValueError, "num_processes must be at least 1"),
            (
                lambda: datasets.chunked_dataset_iterator([1], iter, 1, num_workers=-1),
                ValueError,
                "num_workers must be at least 0, got -1",
            ),
        ):
            with self.subTest(message=message), self.assertRaisesRegex(error, message):
                make()


class TwoArgumentsPicklable(TwoArguments):
    def __reduce__(self):
        first, _, second = str(self).split()
        return TwoArgumentsPicklable, (first, second)


# ---------------------------------------------------------------------------------------------------------------------
# Death
# ---------------------------------------------------------------------------------------------------------------------


def kill_myself(number):
    import faulthandler

    faulthandler.disable()
    os.kill(os.getpid(), number)
    threading.Event().wait()


@linux
class DeathOfAWorkerTest(StageCase):
    def survive(self, build, act, pattern):
        """Check that an item that kills the worker twice is an error that names the reason, twice, and nothing more."""
        iterator = build(range(20), Times(2, 9, act))
        items, errors = [], []
        while True:
            started = time.monotonic()
            try:
                items.append(next(iterator))
            except StopIteration:
                break
            except RuntimeError as error:
                errors.append(str(error))
                self.assertEqual(len(items), self.position(iterator))
            self.assertLess(time.monotonic() - started, 5)
        self.assertEqual(items, list(range(20)))
        self.assertEqual(len(errors), 2)
        for error in errors:
            self.assertRegex(error, pattern)

    @staticmethod
    def position(iterator):
        state = iterator.getstate()
        source = state["source_state"] or {}
        source = source.get("source_state", source)
        offset = state.get("item_offset", state.get("flattened_items_yielded"))
        return (source or {}).get("num_items_yielded", 0) + offset

    @each(["fork"])
    def test_is_an_error_that_names_signal_or_status_and_the_next_call_goes_on(self, build):
        for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM):
            self.survive(build, partial(kill_myself, number), r"killed by signal {}".format(number.name))
        self.survive(build, partial(os._exit, 3), "exited with status 3")
        self.survive(build, partial(os._exit, 0), "exited with status 0")

    @each(["fork"])
    def test_is_noticed_though_processes_that_it_forked_keep_its_pipes_open(self, build):
        def fork_and_die():
            pid = os.fork()
            if not pid:
                signal.pause()
            orphans.numbers[orphans.numbers[0] + 1] = pid
            orphans.numbers[0] += 1
            kill_myself(signal.SIGKILL)

        orphans = Shared(3)
        try:
            self.survive(build, fork_and_die, "killed by signal SIGKILL")
        finally:
            for pid in orphans.numbers[1 : 1 + orphans.numbers[0]]:
                os.kill(pid, signal.SIGKILL)

    @each(["fork"])
    def test_is_noticed_whoever_waits_for_children(self, build):
        def reap(signum, frame):
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass

        for handler in (signal.SIG_IGN, reap):
            before = signal.signal(signal.SIGCHLD, handler)
            try:
                self.survive(build, partial(kill_myself, signal.SIGKILL), "has died|killed by signal SIGKILL")
            finally:
                signal.signal(signal.SIGCHLD, before)

    @each(["fork", "spawn"])
    def test_from_outside_is_an_error_or_comes_too_late_to_matter(self, build):
        iterator = build(range(300), same)
        items = [next(iterator)]
        for worker in iterator._workers:
            os.kill(worker.pid, signal.SIGKILL)
        rest, caught = self.raised(iterator)
        self.assertRegex(str(caught), "killed by signal SIGKILL")
        self.assertEqual(items + rest + list(iterator), list(range(300)))

    def test_while_large_items_are_sent_to_it_is_an_error(self):
        def die(item):
            kill_myself(signal.SIGKILL)

        iterator = self.build(its.ParallelMapIterator, Native([bytes(20 << 20)] * 4), die, 2, 1)
        for _ in range(2):
            before = time.process_time()
            with self.assertRaisesRegex(RuntimeError, "killed by signal SIGKILL.*memory ran out"):
                next(iterator)
            self.assertLess(time.process_time() - before, 5)

    def test_of_a_nested_one_is_an_error_of_the_outer_one(self):
        def pipeline(items, function, start):
            return its.PrefetchIterator(parallel_map(items, function, start), 3, start=start)

        iterator = self.build(pipeline, range(20), Times(1, 9, partial(kill_myself, signal.SIGKILL)), "fork")
        items, caught = self.raised(iterator)
        self.assertRegex(str(caught), "killed by signal SIGKILL")
        self.assertEqual(items + list(iterator), list(range(20)))


PROGRAM = """
    import itertools, os, signal, sys, threading, time
    from infinibatch import iterators as its

    def children(pid):
        found = []
        for task in os.listdir("/proc/{}/task".format(pid)):
            with open("/proc/{}/task/{}/children".format(pid, task)) as file:
                found += map(int, file.read().split())
        return found + [grandchild for child in found for grandchild in children(child)]

    def slow(item):
        time.sleep(0.001)
        return item

    def block(item):
        if item == 5:
            threading.Event().wait()
        return item

    endless = its.InfinitePermutationSourceIterator(range(100), shuffle=False)
    function = block if "block" in sys.argv else slow
    def ahead(source):
        return its.PrefetchIterator(source, 2)

    def mapped(source=None, start="fork"):
        return its.ParallelMapIterator(source or endless, function, 2, 2, start=start)

    pipeline = {
        "prefetch": lambda: its.PrefetchIterator(its.MapIterator(endless, function), 4, start="fork"),
        "map": mapped,
        "chunks": lambda: its.ParallelSelectManyIterator(endless, lambda item: [function(item)], 2, start="fork"),
        "thread": lambda: its.PrefetchIterator(its.MapIterator(endless, function), 4, start="thread"),
        "threads": lambda: mapped(start="thread"),
        "nested": lambda: ahead(ahead(its.MapIterator(endless, function))),
        "map under prefetch": lambda: ahead(mapped()),
        "prefetch under map": lambda: mapped(ahead(endless)),
        "deep": lambda: ahead(mapped(ahead(mapped(ahead(endless))))),
    }[sys.argv[1]]()
    items = [next(pipeline) for _ in range(4)]
    assert items == [0, 1, 2, 3], items

    def begun():
        print(*children(os.getpid()), flush=True)
"""


@linux
class EndOfTheProgramTest(StageCase):
    """The program ends in every way, and its workers with it."""

    processes = {"prefetch": 1, "map": 2, "chunks": 2, "nested": 2, "map under prefetch": 3, "deep": 7}

    def ends(self, kind, rest, act=None, *options):
        """Run a program that uses a pipeline; return its status, output and errors when it and its workers are gone."""
        code = "import sys; sys.argv[1:] = {!r}\n".format([kind] + list(options))
        code += textwrap.dedent(PROGRAM) + textwrap.dedent(rest if "begun()" in rest else "begun()\n" + rest)
        process = start_script(code, "-W", "error")
        with process.stdout, process.stderr:
            try:
                pids = list(map(int, process.stdout.readline().split()))
                expected = self.processes.get(kind)
                if expected is not None and len(pids) != expected:
                    process.kill()
                    self.fail("workers: {}; {}".format(pids, process.stderr.read()))
                if act is not None:
                    act(process.pid)
                process.wait(20)
                self.assertTrue(eventually(lambda: not any(map(running, pids)), 2), "left: {}".format(pids))
                # Workers hold these streams open, so that their end is in sight only when all are gone.
                return process.returncode, process.stdout.read(), process.stderr.read()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    for_ever = "\nwhile True: next(pipeline)\n"

    def test_by_a_signal(self):
        for kind in self.processes:
            with self.subTest(kind=kind):
                ended = self.ends(kind, self.for_ever, lambda pid: os.kill(pid, signal.SIGKILL))
                self.assertEqual(ended, (-signal.SIGKILL, "", ""))
        ended = self.ends("map under prefetch", self.for_ever, lambda pid: os.kill(pid, signal.SIGTERM))
        self.assertEqual(ended, (-signal.SIGTERM, "", ""))

    def test_by_a_signal_while_the_workers_are_blocked(self):
        for kind in ("map", "nested", "map under prefetch"):
            with self.subTest(kind=kind):
                ended = self.ends(kind, self.for_ever, lambda pid: os.kill(pid, signal.SIGKILL), "block")
                self.assertEqual(ended, (-signal.SIGKILL, "", ""))

    def test_by_an_exception(self):
        for kind in ("map", "nested", "deep"):
            with self.subTest(kind=kind):
                status, out, err = self.ends(kind, "\nraise ValueError('mine')\n")
                self.assertEqual((status, out), (1, ""))
                self.assertRegex(err, r"^Traceback[^\n]*\n[^\n]*\n(.*\n)?ValueError: mine\n$")

    def test_by_its_regular_end(self):
        for kind in list(self.processes) + ["prefetch under map", "thread", "threads"]:
            with self.subTest(kind=kind):
                self.assertEqual(self.ends(kind, ""), (0, "", ""))
        for rest in ("\nsys.exit(3)\n", "\nos._exit(3)\n"):
            with self.subTest(rest=rest):
                self.assertEqual(self.ends("map under prefetch", rest), (3, "", ""))

    def test_by_its_regular_end_while_the_workers_are_blocked(self):
        for kind in ("prefetch", "map", "chunks", "nested", "map under prefetch", "thread", "threads"):
            with self.subTest(kind=kind):
                started = time.monotonic()
                self.assertEqual(self.ends(kind, "", None, "block"), (0, "", ""))
                self.assertLess(time.monotonic() - started, 15)

    def test_by_control_c_is_one_keyboard_interrupt(self):
        for kind in ("prefetch", "map", "chunks", "deep", "thread"):
            with self.subTest(kind=kind):
                _, out, err = self.ends(kind, self.for_ever, lambda pid: os.killpg(pid, signal.SIGINT))
                self.assertEqual(out, "")
                self.assertEqual(err.count("Traceback"), 1, err)
                self.assertRegex(err, "KeyboardInterrupt\n$")

    def test_control_c_leaves_the_pipeline_usable(self):
        rest = """
            try:
                begun()
                while True:
                    items.append(next(pipeline))
            except KeyboardInterrupt:
                number = len(items)
                # An item that next() had returned may not have come into the list.
                items += [next(pipeline) for _ in range(10)]
                lost = items[number] == (number + 1) % 100
            print(items == [(i + (lost and i >= number)) % 100 for i in range(len(items))])
        """
        for kind in ("prefetch", "map", "chunks", "deep", "thread", "threads"):
            with self.subTest(kind=kind):
                ended = self.ends(kind, rest, lambda pid: os.killpg(pid, signal.SIGINT))
                self.assertEqual(ended, (0, "True\n", ""))


# ---------------------------------------------------------------------------------------------------------------------
# Nothing is left
# ---------------------------------------------------------------------------------------------------------------------


@linux
class NothingLeftTest(StageCase):
    deadline = 120

    def resources(self):
        gc.collect()
        return children(), len(os.listdir("/proc/self/fd")), threading.active_count(), os.listdir(tempfile.gettempdir())

    @contextlib.contextmanager
    def nothing_is_left(self):
        """Check that the block leaves no process, thread, descriptor, file or warning."""
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            temporary, tempfile.tempdir = tempfile.tempdir, folder
            try:
                before = self.resources()
                yield
                self.assertEqual(self.resources(), before)
            finally:
                tempfile.tempdir = temporary
        self.assertEqual([str(warning.message) for warning in caught], [])

    @each()
    def test_by_pipelines_that_are_closed_dropped_or_read_to_their_end(self, build):
        ways = {
            "close at once": lambda iterator: iterator.close(),
            "close": lambda iterator: (next(iterator), iterator.close()),
            "drop": next,
            "break": lambda iterator: next(item for item in iterator if item == 2),
            "end": list,
            "end and close": lambda iterator: (list(iterator), iterator.close()),
        }
        for name, way in ways.items():
            with self.subTest(way=name), self.nothing_is_left():
                for _ in range({"fork": 3, "thread": 20, "spawn": 1}[build.start]):
                    way(build.make(range(9), same))

    @each(SHARING)
    def test_by_a_hundred_resets(self, build):
        iterator = build(range(30), same)
        list(iterator)
        with self.nothing_is_left():
            for n in range(100 if build.make.func is prefetch or build.start == "thread" else 20):
                iterator.setstate(None)
                self.assertEqual([next(iterator) for _ in range(n % 4)], list(range(n % 4)))
            iterator.setstate(None)

    @each(["fork"])
    def test_by_a_limit_on_processes(self, build):
        fork, iterator = os.fork, build(range(9), same)
        for allowed in range(1 if build.make.func is prefetch else 2):
            forks = iter(range(allowed))

            def limited():
                if next(forks, None) is None:  # noqa: B023
                    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
                return fork()

            with self.nothing_is_left(), mock.patch("os.fork", limited):
                with self.assertRaisesRegex(BlockingIOError, "no worker process could be started: Resource temp"):
                    next(iterator)
        self.assertEqual(list(iterator), list(range(9)))

    @each(["fork"], {"prefetch": prefetch, "nested": nested})
    def test_by_a_hundred_dropped_pipelines(self, build):
        list(build.make(range(9), same))
        with self.nothing_is_left():
            for _ in range(100 if build.make.func is prefetch else 5):
                self.assertEqual(next(build.make(range(9), same)), 0)

    @each(SHARING)
    def test_by_errors(self, build):
        def fail():
            raise ValueError("again")

        iterator = build(range(9), Times(30, 4, fail))
        items, _ = self.raised(iterator)
        with self.nothing_is_left():
            for _ in range(20):
                with self.assertRaisesRegex(ValueError, "again"):
                    next(iterator)
        self.assertEqual(items, [0, 1, 2, 3])

    @each(SHARING)
    def test_of_the_references_of_an_iterator_that_is_dropped(self, build):
        gc.collect()
        gc.disable()  # reference counts alone must do it
        try:
            iterator = build.make(range(9), same)
            next(iterator)
            pids = children()
            self.assertEqual(bool(pids), build.start == "fork")
            del iterator
            self.assertTrue(eventually(lambda pids=pids: not any(map(running, pids)), 2))
        finally:
            gc.enable()

    def test_by_sixty_short_pipelines(self):
        started = time.monotonic()
        with self.nothing_is_left():
            for _ in range(60):
                with prefetch(range(5), same) as iterator:
                    self.assertEqual(list(iterator), [0, 1, 2, 3, 4])
        self.assertLess(time.monotonic() - started, 20)

    def test_by_a_loop_cancelled_after_the_first_of_a_buffer_of_one(self):
        with self.nothing_is_left():
            for _ in range(50):
                iterator = prefetch(range(100), same, None, 1)
                for _ in iterator:
                    break
                started = time.monotonic()
                iterator.close()
                self.assertLess(time.monotonic() - started, 2)

    @each(SHARING)
    def test_a_loop_that_was_left_can_be_taken_up_again(self, build):
        iterator = build(range(9), same)
        for item in iterator:
            if item == 3:
                break
        self.assertEqual(next(iterator), 4)
        iterator.setstate(None)
        self.assertEqual(list(iterator), list(range(9)))

    @each()
    def test_close_while_the_workers_are_blocked_for_ever(self, build):
        iterator = build(range(9), partial(block_at, 4))
        self.assertEqual([next(iterator) for _ in range(3)], [0, 1, 2])
        started = time.monotonic()
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            iterator.close()
        self.assertLess(time.monotonic() - started, 2)
        with self.assertRaisesRegex(RuntimeError, "is closed"):
            next(iterator)

    def test_on_the_terminal(self):
        code = """
            import multiprocessing, sys
            from infinibatch import iterators as its

            def same(item):
                return item

            if __name__ == "__main__":
                if sys.argv[1] != "unset":
                    multiprocessing.set_start_method(sys.argv[1])
                kept = []
                for start in ("fork", "spawn", "thread"):
                    for close in (True, False)[start == "spawn" :]:
                        source = its.NativeCheckpointableIterator(range(9))
                        prefetched = its.PrefetchIterator(source, 3, start=start)
                        mapped = its.ParallelMapIterator(prefetched, same, 2, 2, start=start)
                        assert [next(mapped) for _ in range(4)] == [0, 1, 2, 3]
                        if close:
                            mapped.close()
                        kept.append(mapped)
                lambdas = its.ParallelMapIterator(its.NativeCheckpointableIterator("ab"), lambda x: 2 * x, 2, 2)
                print(*its.PrefetchIterator(lambdas, 3))
        """
        for method in ("unset", "forkserver", "spawn"):
            with self.subTest(method=method):
                self.assertEqual(self.script_file(code, method), (0, "aa bb\n", ""))


# ---------------------------------------------------------------------------------------------------------------------
# Forks, threads, locks, signals
# ---------------------------------------------------------------------------------------------------------------------


@posix
class ForkOfTheConsumerTest(StageCase):
    @each()
    def test_goes_on_by_itself_and_does_not_disturb_the_original(self, build):
        for position in [4] if build.start == "spawn" else [0, 5]:
            iterator = build(range(30), same)
            self.assertEqual([next(iterator) for _ in range(position)], list(range(position)))
            state = iterator.getstate()

            def copy(iterator=iterator, position=position, state=state):
                self.assertEqual(iterator.getstate(), state)
                self.assertEqual(list(iterator), list(range(position, 30)))
                iterator.setstate(state)
                self.assertEqual(next(iterator), position)
                iterator.close()

            pids = [self.in_fork(copy), self.in_fork(copy)]
            self.assertEqual(list(iterator), list(range(position, 30)))
            self.assertEqual([os.waitpid(pid, 0)[1] for pid in pids], [0, 0])

    @each(SHARING)
    def test_may_end_before_the_original_goes_on(self, build):
        iterator = build(range(30), same)
        self.assertEqual([next(iterator) for _ in range(3)], [0, 1, 2])
        for copy in (lambda: None, iterator.close, partial(iterator.setstate, None), partial(list, iterator)):
            self.assertEqual(os.waitpid(self.in_fork(copy), 0)[1], 0)
        self.assertEqual(list(iterator), list(range(3, 30)))

    @each(SHARING)
    def test_of_multiprocessing_too(self, build):
        def child(connection, iterator):
            connection.send(list(iterator))

        context = multiprocessing.get_context("fork")
        for daemon in (False, True):
            iterator = build(range(30), same)
            self.assertEqual([next(iterator) for _ in range(3)], [0, 1, 2])
            receiver, sender = context.Pipe(duplex=False)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                process = context.Process(target=child, args=(sender, iterator), daemon=daemon)
                process.start()
            self.assertEqual(list(iterator), list(range(3, 30)))
            self.assertEqual(receiver.recv(), list(range(3, 30)))
            process.join()
            receiver.close()
            sender.close()

    @each(["fork"])
    def test_of_torchs_loader_too(self, build):
        try:
            from torch.utils.data import DataLoader, IterableDataset
        except ImportError:
            self.skipTest("needs torch")

        class Data(IterableDataset):
            def __init__(self, iterator):
                self.iterator = iterator

            def __iter__(self):
                return iter(self.iterator)

        iterator = build(range(30), same)
        next(iterator)
        loader = DataLoader(Data(iterator), batch_size=None, num_workers=2, multiprocessing_context="fork")
        self.assertEqual(sorted(loader), sorted(2 * list(range(1, 30))))
        self.assertEqual(list(iterator), list(range(1, 30)))


@posix
class SurroundingsTest(StageCase):
    def test_any_depth_of_nesting(self):
        for start, length in (("fork", 200), ("thread", 200), ("spawn", 5)):
            with self.subTest(start=start):
                self.assertEqual(list(self.build(nested, range(length), double, start)), list(range(0, 2 * length, 2)))

    @each(SHARING)
    def test_a_thread_of_the_consumer(self, build):
        iterator, items = build(range(300), same), []
        threads = [threading.Thread(target=lambda: items.append(next(iterator))) for _ in range(3)]
        for thread in threads:  # one after the other: each takes up where another one started the workers
            thread.start()
            thread.join()
        self.assertEqual(items + list(iterator), list(range(300)))

    @each(SHARING)
    def test_a_second_thread_is_refused_while_one_waits_and_may_close(self, build):
        gate, errors = threading.Event(), []

        def wait_for_gate(item):
            gate.wait()
            return item

        def read():
            try:
                next(iterator)
            except RuntimeError as error:
                errors.append(error)

        iterator = build(range(30), wait_for_gate)
        thread = threading.Thread(target=read)
        thread.start()
        self.assertTrue(eventually(lambda: any(iterator._reader)))
        with self.assertRaisesRegex(RuntimeError, "Iterator is being read: it serves one caller at a time"):
            next(iterator)

        def copy():
            gate.set()
            self.assertEqual(list(iterator), list(range(30)))

        # In a fork the thread does not exist: it holds nothing up.
        self.assertEqual(os.waitpid(self.in_fork(copy), 0)[1], 0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of a thread left behind
            iterator.close()
        gate.set()
        thread.join()
        self.assertRegex(str(errors), "closed")

    @each(SHARING, {"prefetch": prefetch})
    def test_an_interrupt_anywhere_in_the_channel_loses_nothing(self, build):
        def interrupt(frame, event, argument):
            if os.path.basename(frame.f_code.co_filename) not in ("_workers.py", "threading.py"):
                return None
            self.events += 1
            if self.events == self.interrupted:
                sys.settrace(None)
                raise KeyboardInterrupt
            return interrupt

        self.interrupted, before = 0, sys.gettrace()
        self.addCleanup(sys.settrace, before)
        gc.collect()  # the workers of other tests must not be finalized under the trace
        gc.disable()
        self.addCleanup(gc.enable)
        while self.interrupted < 200:
            self.interrupted += 1
            iterator = build.make(range(12), same)
            items, self.events = [next(iterator)], 0  # the worker has been started
            sys.settrace(interrupt)
            try:
                while len(items) < 6:
                    items.append(next(iterator))
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(before)
            with self.subTest(interrupted=self.interrupted):
                self.assertEqual(items + list(iterator), list(range(12)))
            iterator.close()
            if self.events < self.interrupted:
                break
        self.assertGreater(self.interrupted, 10)

    def test_a_copy_of_a_closed_pipeline_is_open_and_goes_on(self):
        for kind, make in dict(KINDS, nested=nested).items():
            for position in (0, 5, 30):
                with self.subTest(stage=kind, position=position):
                    iterator = self.build(make, range(30), same)
                    self.assertEqual([next(iterator) for _ in range(position)], list(range(position)))
                    iterator.close()
                    for copied in (pickle.loads(pickle.dumps(iterator)), deepcopy(iterator)):
                        self.addCleanup(copied.close)
                        self.assertEqual(list(copied), list(range(position, 30)))
                    self.assertRaisesRegex(RuntimeError, "closed", next, iterator)

    def test_stages_above_a_closed_one_have_their_positions_also_after_an_error(self):
        def fail_at_13(item):
            if item == 13 and broken:
                raise ValueError
            return item

        stages = {
            "map": lambda source: its.MapIterator(source, fail_at_13),
            "filter": lambda source: its.FilterIterator(source, lambda item: fail_at_13(item) % 3),
            "draws": lambda source: its.SamplingRandomMapIterator(source, lambda rng, item: item + rng.random(), 1),
            "sums": lambda source: its.RecurrentIterator(source, lambda state, item: (state + item,) * 2, 0),
            "packs": lambda source: its.PackIterator(its.MapIterator(source, range), 7),
            "batches": lambda source: its.FixedBatchIterator(source, 3),
        }
        broken = []
        for kind, make in KINDS.items():
            for name, stage in stages.items():
                build = partial(self.build, lambda: stage(make(range(40), same, "thread")))  # noqa: B023
                expected = list(build())
                for position in (0, 1, 5, 11, 13):
                    with self.subTest(source=kind, stage=name, position=position):
                        broken.append(True)
                        iterator, items = build(), []
                        with contextlib.suppress(ValueError):
                            items += (next(iterator) for _ in range(position))
                            items.append(next(iterator))
                        iterator.close()
                        broken.clear()
                        restored = build()
                        restored.setstate(json.loads(json.dumps(iterator.getstate())))
                        self.assertEqual(items + list(restored), expected)

    def test_many_processes_that_start_at_the_same_moment(self):
        def child(barrier, queue):
            for _ in range(5):
                barrier.wait()
                mapped = its.ParallelMapIterator(its.PrefetchIterator(Native(range(50)), 5), double, 2, 5)
                queue.put(list(mapped) == list(range(0, 100, 2)))

        context = multiprocessing.get_context("fork")
        names = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
        barrier, queue = context.Barrier(8), context.SimpleQueue()
        processes = [context.Process(target=child, args=(barrier, queue)) for _ in range(8)]
        for process in processes:
            process.start()
        self.assertEqual([queue.get() for _ in range(40)], [True] * 40)
        for process in processes:
            process.join()
        if names:
            self.assertEqual({name for name in os.listdir("/dev/shm") if "infinibatch" in name}, set())

    def test_locks_of_logging_and_of_imports_never_block_a_worker(self):
        code = """
            import logging, os, sys, threading, time
            from infinibatch import iterators as its

            with open(os.path.join(sys.argv[1], "slow_module.py"), "w") as file:
                file.write("import __main__\\n__main__.importing()\\n")
            sys.path.insert(0, sys.argv[1])
            parent, begun, go_on = os.getpid(), threading.Event(), threading.Event()

            def importing():
                if os.getpid() == parent:
                    begun.set()
                    go_on.wait()

            handler = logging.StreamHandler(sys.stdout)
            logging.getLogger().addHandler(handler)
            held = threading.Event()

            def hold():
                with handler.lock:
                    held.set()
                    go_on.wait()

            def work(item):
                import slow_module
                logging.getLogger().warning("item %s", item)
                return item

            threads = [threading.Thread(target=hold), threading.Thread(target=lambda: __import__("slow_module"))]
            for thread in threads:
                thread.start()
            begun.wait()
            held.wait()
            source = its.NativeCheckpointableIterator(range(3))
            print(*its.PrefetchIterator(its.MapIterator(source, work), 1))
            print(*its.ParallelMapIterator(its.NativeCheckpointableIterator(range(3, 5)), work, 1, 1))
            print(*its.ParallelSelectManyIterator(its.NativeCheckpointableIterator([5]), lambda i: [work(i)], 1))
            go_on.set()
            for thread in threads:
                thread.join()
        """
        with tempfile.TemporaryDirectory() as folder:
            status, out, err, _ = script("import sys; sys.argv.append({!r})\n".format(folder) + textwrap.dedent(code))
        self.assertEqual((status, err), (0, ""))
        self.assertEqual(
            sorted(out.splitlines()), sorted(["item {}".format(i) for i in range(6)] + ["0 1 2", "3 4", "5"])
        )

    def test_spawn_helps_where_a_thread_holds_a_lock_that_the_function_takes(self):
        code = """
            import sys, threading
            from infinibatch import iterators as its

            lock = threading.Lock()

            def work(item):
                with lock:
                    return item

            if __name__ == "__main__":
                lock.acquire()  # as if by a thread that is in the middle of something
                for _ in range(4):
                    source = its.NativeCheckpointableIterator(range(3))
                    print(*its.PrefetchIterator(its.MapIterator(source, work), 2, start="spawn"))
                    print(*its.ParallelMapIterator(source, work, 1, 2, start="spawn"))
        """
        self.assertEqual(self.script_file(code), (0, 8 * "0 1 2\n", ""))

    @each(["fork"])
    def test_handlers_of_the_consumer_do_not_run_in_a_worker_and_their_signals_do_not_end_it(self, build):
        calls = []
        previous = signal.signal(signal.SIGUSR1, lambda *_: calls.append(os.getpid()))
        self.addCleanup(signal.signal, signal.SIGUSR1, previous)
        iterator = build(range(30), lambda item: (item, len(calls)))
        items = [next(iterator)]
        for worker in iterator._workers:
            os.kill(worker.pid, signal.SIGUSR1)
        self.assertEqual(items + list(iterator), [(item, 0) for item in range(30)])
        self.assertEqual(calls, [])

    def test_what_the_function_prints_is_printed_once(self):
        code = """
            from infinibatch import iterators as its

            def show(item):
                print("worker", item)
                return item

            print("consumer")
            for item in its.ParallelMapIterator(its.NativeCheckpointableIterator(range(3)), show, 2, 1):
                pass
            print("end")
        """
        status, out, err, _ = script(code)
        self.assertEqual((status, err), (0, ""))
        self.assertEqual(sorted(out.splitlines()), sorted(["consumer", "worker 0", "worker 1", "worker 2", "end"]))

    def test_a_reset_waits_for_a_thread_that_still_reads_the_source(self):
        go_on, begun = threading.Event(), threading.Event()

        def slow(item):
            if item == 3:
                begun.set()
                go_on.wait()
            return item

        iterator = self.build(prefetch, range(40), slow, "thread")
        self.assertEqual(next(iterator), 0)
        begun.wait()
        threading.Timer(1.0, go_on.set).start()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            iterator.setstate(None)
        self.assertEqual(list(iterator), list(range(40)))


# What other systems lack is taken away, behind the standard library's back.
ELSEWHERE = """
    import multiprocessing.util, os, select, signal, socket, subprocess, sys, tempfile, threading
    missing = {
        "win32": (
            "os.fork os.register_at_fork os.WNOHANG os.killpg os.setsid os.memfd_create os.sched_getaffinity os.pread "
            "select.poll select.epoll signal.SIGHUP signal.SIGKILL signal.SIGCHLD signal.SIGUSR1 signal.SIGPIPE "
            "signal.pthread_sigmask socket.AF_UNIX socket.MSG_DONTWAIT socket.MSG_NOSIGNAL fcntl resource"
        ),
        "darwin": (
            "os.memfd_create os.sched_getaffinity select.epoll signal.SIGRTMIN signal.SIGRTMAX socket.MSG_NOSIGNAL "
            "fcntl.F_SETSIG"
        ),
    }[sys.argv[1]]
    for name in missing.split():
        module, _, attribute = name.partition(".")
        if attribute:
            vars(__import__(module)).pop(attribute, None)
        else:
            sys.modules[module] = None
    sys.platform = sys.argv[1]

    from infinibatch import _workers, datasets
    from infinibatch import iterators as its

    def same(item):
        return item

    def chunk(item):
        return [item]

    def shard(number, rank):
        return its.ChunkedSourceIterator(range(30), number, rank)

    def source():
        return its.NativeCheckpointableIterator(range(30))

    def pipelines(start):
        yield lambda: its.PrefetchIterator(source(), 4, start=start)
        yield lambda: its.ParallelMapIterator(source(), same, 2, 3, start=start)
        yield lambda: its.ParallelSelectManyIterator(source(), chunk, 2, start=start)
        yield lambda: its.ShardedIterator(shard, 4, num_processes=2, start=start)
        yield lambda: datasets.chunked_dataset_iterator(range(9), chunk, 4, num_epochs=3, num_workers=2)

    if __name__ == "__main__":
        print(_workers.default_start())
        for start in [None] + sys.argv[2:]:
            for make in pipelines(start):
                with make() as original, make() as restored:
                    items = [next(original) for _ in range(7)]
                    restored.setstate(original.getstate())
                    rest = list(original)
                    assert list(restored) == rest and len(items + rest) in (27, 30), (start, items, rest)
        if sys.argv[1] == "win32":
            try:
                next(its.PrefetchIterator(source(), 2, start="fork"))
            except ValueError as error:
                print(error)
"""


@linux
class ElsewhereTest(StageCase):
    def test_stages_run_in_threads_where_processes_cannot_be_forked(self):
        status, out, err = self.script_file(ELSEWHERE, "win32", "thread")
        self.assertEqual((status, err), (0, ""))
        self.assertEqual(out, "thread\nstart must be 'thread' on this platform, got 'fork'\n")

    def test_stages_run_in_any_way_where_what_only_linux_has_is_missing(self):
        self.assertEqual(self.script_file(ELSEWHERE, "darwin", "fork", "spawn"), (0, "thread\n", ""))


class Doubled(its.MapIterator):
    """A user's own class that overrides only `__next__`."""

    def __next__(self):
        return 2 * super().__next__()


class WithoutTest(StageCase):
    """The state of a pipeline that prefetches, in one that does not."""

    def pipelines(self, prefetch):
        def source():
            return its.SelectManyIterator(its.InfinitePermutationSourceIterator(range(5), seed=1), range)

        yield prefetch(source())
        yield prefetch(prefetch(source()))
        yield its.MapIterator(prefetch(source()), str)
        yield its.BlockwiseShuffleIterator(prefetch(its.EnumerateIterator(source())), 3, seed=2)
        yield prefetch(its.MapIterator(prefetch(its.MapIterator(source(), str)), str.upper))
        yield its.ZipIterator(prefetch(source()), its.WindowedIterator(prefetch(source()), 2))
        yield its.TakeIterator(prefetch(its.RecurrentIterator(source(), lambda last, n: (n, last), 0)), 25)
        yield prefetch(Doubled(source(), int))
        yield its.FixedBatchIterator(prefetch(Doubled(source(), int)), 2)

    def test_goes_on_with_the_same_items(self):
        number = len(list(self.pipelines(lambda source: source)))
        for i in range(number):
            with_it = list(self.pipelines(lambda source: its.PrefetchIterator(source, 4, start="thread")))[i]
            expected = list(islice(list(self.pipelines(lambda source: source))[i], 40))
            for position in range(25):
                with self.subTest(pipeline=repr(with_it), position=position):
                    state = json.loads(json.dumps(with_it.getstate()))
                    without = list(self.pipelines(lambda source: source))[i]
                    next(without)
                    without.setstate(state)
                    self.assertEqual(list(islice(without, 5)), expected[position : position + 5])
                    again = list(self.pipelines(lambda source: source))[i]
                    again.setstate(without.getstate())
                    self.assertEqual(list(islice(again, 5)), expected[position + 5 : position + 10])
                    self.assertEqual(next(with_it), expected[position])
            with_it.close()

    def test_goes_on_with_one_fewer(self):
        def pipeline(outer, inner):
            numbers = its.NativeCheckpointableIterator(range(40))
            return outer(its.MapIterator(inner(its.MapIterator(numbers, str)), str.upper))

        def two(source):
            return prefetch(prefetch(source))

        def prefetch(source):
            return its.PrefetchIterator(source, 3, start="thread")

        def none(source):
            return source

        ways = [none, prefetch, two]
        for before in itertools.product(ways, repeat=2):
            for after in itertools.product(ways, repeat=2):
                if sum(map(ways.index, after)) > sum(map(ways.index, before)):
                    continue  # a state knows nothing of what is added
                with self.subTest(before=before, after=after), pipeline(*before) as first, pipeline(*after) as second:
                    list(islice(first, 17))
                    second.setstate(json.loads(json.dumps(first.getstate())))
                    self.assertEqual(list(islice(second, 3)), ["17", "18", "19"])

    def test_is_refused_where_a_filter_makes_it_matter_what_was_counted(self):
        def prefetch(source):
            return its.PrefetchIterator(source, 3, start="thread")

        def odd(source):
            return its.FilterIterator(source, lambda number: number % 2)

        def numbers():
            return its.NativeCheckpointableIterator(range(60))

        for make, other in (
            (lambda: odd(prefetch(numbers())), lambda: odd(numbers())),
            (lambda: prefetch(odd(numbers())), lambda: odd(numbers())),
            (lambda: prefetch(odd(prefetch(numbers()))), lambda: odd(prefetch(numbers()))),
            (lambda: prefetch(odd(prefetch(numbers()))), lambda: prefetch(odd(numbers()))),
            (lambda: prefetch(odd(numbers())), lambda: its.MapIterator(odd(numbers()), str)),
            (lambda: odd(prefetch(numbers())), lambda: odd(its.MapIterator(numbers(), str))),
        ):
            with make() as first, other() as second, make() as third:
                self.assertEqual(list(islice(first, 7)), [1, 3, 5, 7, 9, 11, 13])
                state = first.getstate()
                with self.assertRaisesRegex(ValueError, "before or behind a FilterIterator"):
                    second.setstate(state)
                third.setstate(state)
                self.assertEqual(next(third), 15)

    def test_is_refused_where_the_rest_does_not_fit(self):
        numbers = its.NativeCheckpointableIterator(range(9))
        next(numbers)
        for state, error, message in (
            ({"item_offset": 2, "source_state": {"num_items": 1}}, ValueError, "lacks the key 'num_items_yielded'"),
            ({"item_offset": -1, "source_state": {"num_items_yielded": 1}}, ValueError, "'item_offset'"),
            ({"item_offset": 4, "source_state": {"num_items_yielded": 7}}, RuntimeError, "beyond the end"),
        ):
            with self.subTest(state=state), self.assertRaisesRegex(error, message):
                numbers.setstate(state)
            self.assertEqual(numbers.getstate(), {"num_items_yielded": 1})


# ---------------------------------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------------------------------


@linux
class MemoryTest(StageCase):
    def test_is_shared_with_the_workers_of_a_map(self):
        code = """
            import os, sys
            from infinibatch import iterators as its
            sys.path.insert(0, {folder!r})
            from test_worker_stages import memory_of

            items = ["number {{}}".format(i) for i in range(500000)]
            source = its.NativeCheckpointableIterator(items)
            before = memory_of([os.getpid()])
            mapped = its.ParallelMapIterator(source, len, 4, 1000, start="fork")
            for _ in range(len(items) - 1):
                next(mapped)
            workers = [worker.pid for worker in mapped._workers]
            print(before, memory_of([os.getpid()] + workers))
            assert len(list(mapped)) == 1
            print(before, memory_of([os.getpid()] + [pid for pid in workers if os.path.exists("/proc/%d" % pid)]))
        """.format(folder=os.path.dirname(os.path.abspath(__file__)))
        status, out, err = self.script_file(code)
        self.assertEqual((status, err), (0, ""))
        while_running, after = [int(now) / int(before) for before, now in map(str.split, out.splitlines())]
        # Counting references, the consumer writes to the pages of the list: its copies, and one copy for all workers.
        self.assertLess(while_running, 2.5)
        self.assertLess(after, 1.5)

    def test_does_not_grow_from_epoch_to_epoch(self):
        def make_item(item):
            return bytes(10000) + item.to_bytes(4, "big")

        items = its.MapIterator(its.InfinitePermutationSourceIterator(range(2000)), make_item)
        iterator = self.build(its.PrefetchIterator, items, 100)
        used = []
        for _ in range(10):
            for _ in range(2000):
                next(iterator)
            used.append(memory_of([os.getpid(), iterator._workers[0].pid], "Rss"))
        self.assertLess(max(used[2:]) - used[1], 10000)

    def test_does_not_grow_while_data_is_finished_and_started_again_by_a_hesitant_consumer(self):
        for buffer_size in (1, 2, 3):
            iterator = self.build(prefetch, range(3000), same, None, buffer_size)
            pid = None
            for n, item in enumerate(iterator):
                self.assertEqual(item, n)
                if n % 97 == 0:
                    time.sleep(0.001)
                pid = pid or iterator._workers[0].pid
                self.assertEqual(iterator._workers[0].pid, pid)
            self.assertEqual(n, 2999)


# ---------------------------------------------------------------------------------------------------------------------
# What they say about themselves
# ---------------------------------------------------------------------------------------------------------------------


class ReportsTest(StageCase):
    def test_a_warning_of_an_empty_buffer_is_logged_now_and_then(self):
        def slow(item):
            time.sleep(0.002)
            return item

        for start in SHARING:
            with self.subTest(start=start):
                source = its.MapIterator(Native(range(30)), slow)
                iterator = self.build(its.PrefetchIterator, source, 3, log_empty_buffer_warning=True, start=start)
                with self.assertLogs("infinibatch.iterators", logging.WARNING) as caught:
                    self.assertEqual(list(iterator), list(range(30)))
                    iterator.setstate(None)
                    self.assertEqual(list(iterator), list(range(30)))
                self.assertEqual(len(caught.output), 1)
                self.assertRegex(caught.output[0], r"no item is ready in PrefetchIterator\(buffer_size=3")

    def test_no_warning_is_logged_unless_asked_for(self):
        with self.assertLogs("infinibatch.iterators", logging.WARNING) as caught:
            list(self.build(prefetch, range(30), same))
            logging.getLogger("infinibatch.iterators").warning("this one")
        self.assertEqual(len(caught.output), 1)

    @each(SHARING)
    def test_waiting_tells_which_side_is_slow(self, build):
        def slow(item):
            time.sleep(0.005)
            return item

        iterator = build(range(60), slow)
        for _ in range(30):
            next(iterator)
        self.assertEqual(sorted(iterator.waiting), ["consumer", "workers"])
        self.assertGreater(iterator.waiting["consumer"], 0.2)
        iterator = build(range(60), same)
        for _ in range(30):
            next(iterator)
            time.sleep(0.005)
        self.assertGreater(iterator.waiting["workers"], 0.5)
        self.assertLess(iterator.waiting["consumer"], 0.5)
        for share in iterator.waiting.values():
            self.assertTrue(0 <= share <= 1)
        list(iterator)
        self.assertEqual(iterator.waiting, {})

    def test_repr_shows_parameters_shares_and_the_stages_below(self):
        iterator = self.build(its.PrefetchIterator, Native("abcdef"), 3)
        self.assertEqual(repr(iterator).split("\n")[0], "PrefetchIterator(buffer_size=3, waiting={})")
        next(iterator)
        self.assertRegex(repr(iterator), r"^PrefetchIterator\(buffer_size=3, waiting=\{'consumer': [0-9.]+, 'workers'")
        self.assertRegex(repr(iterator), r"\n  NativeCheckpointableIterator\(")
        mapped = self.build(its.ParallelMapIterator, Native("ab"), str.upper, 2, 5)
        self.assertRegex(repr(mapped), r"^ParallelMapIterator\(transform=.*upper.*, num_processes=2, num_items_per_pro")


class ChunkedDatasetTest(StageCase):
    def test_any_number_of_workers_gives_the_same_items_and_checkpoints(self):
        chunks = {name: [name + str(i) for i in range(7)] for name in "abcdef"}
        for options in ({}, {"use_windowed": True}, {"train": False, "shuffle": False}, {"prefetch": True}):
            make = partial(datasets.chunked_dataset_iterator, sorted(chunks), chunks.get, 10, seed=1, **options)
            plain = self.build(make)
            expected = []
            for _ in range(40):
                expected.append((next(plain), plain.getstate()))
            for num_workers in (1, 3):
                with self.subTest(num_workers=num_workers, **options):
                    iterator = self.build(make, num_workers=num_workers)
                    self.assertEqual([(next(iterator), iterator.getstate()) for _ in range(40)], expected)
                    iterator.setstate(expected[20][1])
                    self.assertEqual([next(iterator) for _ in range(19)], [item for item, _ in expected[21:]])

    def test_workers_keep_the_chunks_that_they_are_ahead(self):
        sizes = collections.OrderedDict([(0, 3), (1, 0), (2, 40000), (3, 1), (4, 20000)])

        def read(number):
            return ("{} {}".format(number, i) for i in range(sizes[number]))

        iterator = self.build(
            datasets.chunked_dataset_iterator, list(sizes), read, 1, train=False, shuffle=False, num_workers=3
        )
        self.assertEqual(list(iterator), [item for number in sizes for item in read(number)])


@posix
class ArraysTest(StageCase):
    @each(SHARING)
    def test_of_numpy_arrive_as_memory_of_their_own(self, build):
        try:
            import numpy
        except ImportError:
            self.skipTest("needs NumPy")

        def make_array(item):
            return numpy.full((300, 300), item, dtype=numpy.float32)

        arrays = list(build(range(12), make_array))
        for item, array in enumerate(arrays):
            self.assertEqual((array.shape, array.dtype), ((300, 300), numpy.float32))
            self.assertTrue((array == item).all())
            array += 1  # writable, and nobody else's
        self.assertEqual([float(array[0, 0]) for array in arrays], list(range(1, 13)))


@posix
class MessagesTest(StageCase):
    def numbers(self, build, items, function):
        """Return how many items came in each message, once the sizes have settled."""
        numbers = []
        iterator = build(items, function)
        receive = _workers.Worker.receive

        def counted(worker, others=()):
            message = receive(worker, others)
            numbers.append(len(message[0]))
            return message

        with mock.patch.object(_workers.Worker, "receive", counted):
            for _ in range(len(items)):
                next(iterator)
        return numbers[len(numbers) // 2 :]

    def test_hold_one_large_item_or_many_small_ones(self):
        # Large items together would wait for each other, and outgrow the cache.
        def in_one_chunk(items, function):
            return its.ParallelSelectManyIterator(Native([0]), lambda _: map(function, items), 1)

        for make in (partial(prefetch, buffer_size=100), in_one_chunk):
            with self.subTest(make=make):
                build = partial(self.build, make)
                self.assertEqual(set(self.numbers(build, range(60), partial(bytes_of, 1 << 20))) - {0}, {1})
                self.assertGreater(max(self.numbers(build, range(6000), partial(bytes_of, 100))), 10)


if __name__ == "__main__":
    unittest.main()
