"""
Every iterator class, in the order of `infinibatch.iterators`: its order of items, its state, and what it refuses.

`Contract` holds what is the same for all of them; the test of a class supplies a pipeline and its items.
"""

import collections
import contextlib
import copy
import inspect
import json
import mmap
import os
import pathlib
import pickle
import random
import re
import sys
import threading
import unittest
from functools import partial
from itertools import chain, islice

from infinibatch import iterators as its
from infinibatch.testing import check_iterator

Native = its.NativeCheckpointableIterator

NO_SOURCES = [None, 1, "text", [1, 2], iter([1]), (i for i in ()), Native]
NO_FUNCTIONS = [1, "text", [len]]
NO_SIZES = [(0, ValueError), (-1, ValueError), (1.0, TypeError), ("1", TypeError), (None, TypeError), ([1], TypeError)]
SEEDS = [0, 1, -1, 2**64, 2**1000 + 7, -(2**200), 1.5, -1e300, float("inf"), "", "text", "é€", b"", b"bytes\0"]
NO_SEEDS = [[1], {}, (1, 2), 1j, object(), len]
ENDLESS = 40  # items that are looked at where there is no end


def nothing():
    pass


class Own(its.CheckpointableIterator):
    """A user's own source: the methods that every class must have, no more, and a log of what was called."""

    def __init__(self, items, call=nothing):
        self.items, self.call = list(items), call
        self.refuse = 0  # calls of setstate() until it fails, once; 0: it does not
        self.log = collections.Counter()
        self.setstate(None)

    def getstate(self):
        return {"own": [self.n]}

    def setstate(self, checkpoint):
        self.log["setstate"] += 1
        self.n = 0 if checkpoint is None else checkpoint["own"][0]
        if self.refuse:
            self.refuse -= 1
            if not self.refuse:
                raise LookupError("refused by the user's own class")

    def __iter__(self):
        self.log["iter"] += 1
        return iter(self.items)

    def __next__(self):
        if self.n >= len(self.items):
            raise StopIteration
        self.call()
        self.n += 1
        return self.items[self.n - 1]

    def close(self):
        self.log["close"] += 1


def called(call, item):
    call()
    return item


def called_source(call, items):
    """A source of the library's own that calls a function for each item."""
    return its.MapIterator(Native(items), partial(called, call))


class Sources:
    """Makes sources, and remembers them."""

    def __init__(self, make):
        self.make, self.made = make, []

    def __call__(self, items):
        self.made.append(self.make(items))
        return self.made[-1]


class Recorded(collections.abc.Sequence):
    """A sequence that records which positions were read."""

    def __init__(self, items):
        self.items, self.read = items, []
        self._runs = self._lines = "mine"  # names that mean nothing to the library

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        self.read.append(index)
        return self.items[index]

    def __iter__(self):
        raise AssertionError("a sequence must be indexed, not replayed")


class Again:
    """An iterable that is no sequence, and counts how often it is iterated over."""

    def __init__(self, items):
        self.items, self.passes = items, 0

    def __iter__(self):
        self.passes += 1
        return iter(self.items)


def take(iterator, number=ENDLESS):
    return list(islice(iterator, number))


def skip(iterator, number):
    for _ in range(number):
        next(iterator)
    return iterator


def over(kind, items, *args, **kwargs):
    """Build an iterator over a source of its own."""
    return kind(Native(items), *args, **kwargs)


def as_json(value):
    return json.loads(json.dumps(value))


def generator_state(seed, draws=0):
    generator = random.Random(seed)
    for _ in range(draws):
        generator.random()
    return generator.getstate()


# How checkpoints are damaged.

COUNTS = {"num_items_yielded", "flattened_items_yielded", "item_index", "num_served", "item_offset", "index"}
STATES = {"source_state", "control_iterator_state"}
OPTIONAL = {"source", "none_slots"}
LACKING = object()


def is_generator_state(value):
    return isinstance(value, (list, tuple)) and len(value) == 3 and isinstance(value[1], tuple) and len(value[1]) > 600


def nodes(state, path=()):
    """Yield (path, value) of everything in a checkpoint that the library wrote."""
    if path:
        yield path, state
    if path and path[-1] in ("buffer", "none_slots") or is_generator_state(state):
        return
    if isinstance(state, dict):
        for key, value in state.items():
            yield from nodes(value, path + (key,))
    elif isinstance(state, (list, tuple)) and path[-1] != "recurrent_state":
        for index, value in enumerate(state):
            yield from nodes(value, path + (index,))


def replaced(state, path, value):
    """Return a copy of a checkpoint in which one value is another one, or lacking."""
    if not path:
        return value
    parts = dict(state) if isinstance(state, dict) else list(state)
    if value is LACKING and len(path) == 1:
        del parts[path[0]]
    else:
        parts[path[0]] = replaced(parts[path[0]], path[1:], value)
    return parts


def wrong_values(key, value):
    """Return what must not stand in a checkpoint at some key instead of a value."""
    if key in COUNTS:
        return [-1, "1", 1.5, None, [], {}]
    if is_generator_state(value):
        version, words, gauss_next = value
        bad_words = [(), words[:-1], words + (1,), ("a",) + words[1:], (0.5,) + words[1:], words[:-1] + (999,), 5]
        return ["x", 5, {}, [], [1, 2], (99, words, None), (version, words, "x"), (version, words, [])] + [
            (version, bad, gauss_next) for bad in bad_words
        ]
    if key in STATES and value is not None:
        return ["x", 5, [], {}, {"unknown": 1}]
    if key in ("input_states", "source_iterator_states"):
        return [None, "ab", 5, {}, [], list(value) + [None], list(value)[1:]]
    if key == "buffer":
        return [None, "ab", 5, {}, list(value) + [1] * 99]
    if key == "none_slots":
        return [None, 5, "a", ["a"], [-1], [99], [i for i in range(99) if i not in value][:1]]
    if key == "source":
        return [None, 5, [], {}]
    if key in ("length", "num_instances"):
        return [value + 1, "1", None]
    if key == "digest" and value is not None:
        return ["another", 5]
    return []


class Contract:
    """What holds for every class. The test of a class defines `make`, and `items`: what comes out, all or the first."""

    ends = True
    has_callbacks = False
    num_sources = 1
    restored_at = 2  # a position at which checkpoints are damaged
    has_workers = False  # then building one takes long, and less is tried
    bad_arguments = ()  # (function that calls the constructor, exception, pattern)

    def make(self, source=Native, call=nothing):
        """Build the pipeline: `source` makes a source of a list, and each callback calls `call`."""
        raise NotImplementedError

    def build(self, *args, **kwargs):
        iterator = self.make(*args, **kwargs)
        self.addCleanup(iterator.close)
        return iterator

    def check(self, make, **options):
        if self.has_workers:
            options["positions"] = 2
        items = list(self.items)
        check_iterator(make, items, take=None if self.ends else len(items), **options)

    def rest(self, iterator, position):
        """Read what comes at a position, as many items as are known."""
        number = len(self.items) - position
        return take(iterator, number + 1 if self.ends else number)

    def all_states(self):
        """Return checkpoints of fresh, used and (where there is one) ended pipelines, each with its position."""
        iterator = self.build()
        states = [(0, iterator.getstate())]
        skip(iterator, self.restored_at)
        states.append((self.restored_at, iterator.getstate()))
        if self.ends:
            list(iterator)
            states.append((len(self.items), iterator.getstate()))
        return states

    def test_items_come_in_order_and_every_position_restores(self):
        self.check(self.make, pickles=True)

    def test_items_are_the_same_over_a_users_own_source(self):
        if self.num_sources and not self.has_workers:  # for these the next but one test does that, too
            self.check(partial(self.make, Own), pickles=True)

    def test_nothing_is_lost_where_a_callback_raises(self):
        if self.has_callbacks:
            errors = [ValueError, StopIteration, KeyboardInterrupt]
            self.check(lambda call: self.make(Native, call), errors=errors)
            if not self.has_workers:
                self.check(lambda call: self.make(Own, call), errors=errors[:1], positions=4)

    def test_nothing_is_lost_where_a_source_raises(self):
        if self.num_sources:
            errors = [OSError, KeyboardInterrupt]
            self.check(lambda call: self.make(partial(Own, call=call)), errors=errors[: 2 - self.has_workers])
            if not self.has_workers:
                self.check(lambda call: self.make(partial(called_source, call)), errors=errors, positions=4)

    def subclassed(self, methods, call=nothing, batch_size=None):
        """Build the pipeline with a user's subclass of the class under test, alone or below another stage."""
        iterator = self.make(Native, call)
        kind = type(iterator)
        iterator.__class__ = type("Own" + kind.__name__, (kind,), methods(kind))
        iterator.setstate(None)
        return its.FixedBatchIterator(iterator, batch_size) if batch_size else iterator

    def check_subclassed(self, methods, items):
        positions = 2 if self.has_workers else 5
        take = None if self.ends else len(items) - 1
        check_iterator(partial(self.subclassed, methods), items, take=take, positions=positions)
        if not self.has_workers:
            batches = [items[i : i + 2] for i in range(0, len(items), 2)]
            make = partial(self.subclassed, methods, batch_size=2)
            check_iterator(make, batches, take=None if self.ends else len(batches) - 1, positions=positions)
            if self.has_callbacks:
                make = partial(self.subclassed, methods)
                check_iterator(make, items, take=take, positions=3, errors=[ValueError, KeyboardInterrupt])

    def test_subclass_may_wrap_next(self):
        def methods(kind):
            return {"__next__": lambda self: [kind.__next__(self)]}

        self.check_subclassed(methods, [[item] for item in self.items])

    def test_subclass_may_add_to_the_state(self):
        def methods(kind):
            def getstate(self):
                return dict(kind.getstate(self), added="by the user")

            def setstate(self, checkpoint):
                kind.setstate(self, checkpoint)
                if checkpoint is not None and checkpoint["added"] != "by the user":
                    raise AssertionError(checkpoint)

            return {"getstate": getstate, "setstate": setstate}

        self.check_subclassed(methods, list(self.items))

    def test_setstate_is_called_once_for_each_source_and_iter_never(self):
        sources = Sources(Own)
        iterator = self.build(sources)
        self.assertEqual(len(sources.made), self.num_sources)
        skip(iterator, self.restored_at)
        state = iterator.getstate()
        for checkpoint in (state, None, as_json(state)):
            for source in sources.made:
                source.log.clear()
            iterator.setstate(checkpoint)
            self.assertEqual([source.log["setstate"] for source in sources.made], [1] * self.num_sources)
        self.assertEqual(self.rest(iterator, self.restored_at), list(self.items[self.restored_at :]))
        self.assertEqual([source.log["iter"] for source in sources.made], [0] * self.num_sources)

    def test_setstate_that_fails_in_a_users_own_class_changes_nothing(self):
        for refusing in range(self.num_sources):
            for checkpoint in ("another", None):
                with self.subTest(refusing=refusing, checkpoint=checkpoint):
                    sources = Sources(Own)
                    iterator = self.build(sources)
                    state = iterator.getstate() if checkpoint else None
                    skip(iterator, self.restored_at)
                    before = copy.deepcopy(iterator.getstate())
                    sources.made[refusing].refuse = 1
                    with self.assertRaisesRegex(LookupError, "refused by the user's own class"):
                        iterator.setstate(state)
                    self.assertEqual(iterator.getstate(), before)
                    self.assertEqual(self.rest(iterator, self.restored_at), list(self.items[self.restored_at :]))

    def test_checkpoint_that_lacks_a_key_is_refused_by_iterator_and_key(self):
        damaged = []
        for position, state in self.all_states():
            for path, _ in nodes(state):
                if path[-1] not in OPTIONAL and not isinstance(path[-1], int):
                    pattern = r"the checkpoint of (\w+) lacks the key {!r}".format(path[-1])
                    damaged.append((replaced(state, path, LACKING), pattern, (position, path)))
        self.assert_refused(damaged)

    def test_checkpoint_with_a_wrong_value_is_refused(self):
        damaged = []
        for position, state in self.all_states():
            for path, value in nodes(state):
                for wrong in wrong_values(path[-1], value):
                    pattern = r"checkpoint of (\w+) (?=does not fit|is a dict|lacks)"
                    damaged.append((replaced(state, path, wrong), pattern, (position, path, wrong)))
        self.assert_refused(damaged)

    def test_another_pipelines_checkpoint_is_refused(self):
        foreign = (5, "text", [], (1, 2), {}, {"unknown": 0}, True)
        self.assert_refused([(state, r"checkpoint of (\w+) (?=is a dict|lacks)", state) for state in foreign])

    def assert_refused(self, damaged):
        """Check that a used pipeline refuses checkpoints, names a stage of its own, and stays where it is."""
        self.assertTrue(damaged)
        iterator = skip(self.build(), self.restored_at)
        before = copy.deepcopy(iterator.getstate())
        for state, pattern, label in damaged:
            with self.subTest(repr(label)[:120]):
                with self.assertRaisesRegex(ValueError, pattern) as caught:
                    iterator.setstate(state)
                self.assertIn(re.search(pattern, str(caught.exception)).group(1), self.stages(iterator))
                self.assertEqual(iterator.getstate(), before)
        self.assertEqual(self.rest(iterator, self.restored_at), list(self.items[self.restored_at :]))

    def stages(self, iterator):
        return [line.split("(")[0].strip() for line in repr(iterator).split("\n")]

    def test_none_in_place_of_an_inner_state_is_the_start_of_that_stage(self):
        start = self.build().getstate()
        iterator = self.build()
        for path, value in nodes(start):
            inner = isinstance(path[-1], int) or path[-1] in STATES or is_generator_state(value)
            if inner:
                with self.subTest(path=path):
                    iterator.setstate(replaced(start, path, None))
                    self.assertEqual(self.rest(iterator, 0), list(self.items))

    def test_bad_arguments_are_refused_with_name_rule_and_value(self):
        self.assertTrue(self.bad_arguments)
        for construct, error, pattern in self.bad_arguments:
            with self.subTest(pattern=pattern):
                self.assertRaisesRegex(error, pattern, construct)

    def test_repr_shows_one_stage_a_line_sources_below(self):
        lines = repr(self.build()).split("\n")
        below = repr(self.build(Own)).split("\n")
        self.assertRegex(lines[0], r"^[A-Z]\w+\(.*\)$")
        self.assertEqual(len(lines), 1 + self.num_sources)
        for line in lines[1:]:
            self.assertRegex(line, r"^ +NativeCheckpointableIterator\(iterable=.*\)$")
        self.assertEqual(below[1:], ["  Own()"] * self.num_sources)
        self.assertLess(max(map(len, lines)), 400)

    def test_close_reaches_every_source_and_may_be_repeated(self):
        sources = Sources(Own)
        with self.make(sources) as iterator:
            skip(iterator, 1)
            self.assertEqual([source.log["close"] for source in sources.made], [0] * self.num_sources)
        self.assertNotIn(0, [source.log["close"] for source in sources.made])
        iterator.close()
        iterator.close()

    def test_with_statement_closes_also_after_an_error(self):
        sources = Sources(Own)
        with self.assertRaisesRegex(KeyError, "out of the block"):
            with self.make(sources) as iterator:
                self.assertIsInstance(iterator, its.CheckpointableIterator)
                raise KeyError("out of the block")
        self.assertNotIn(0, [source.log["close"] for source in sources.made])

    def test_state_dict_is_getstate_and_load_state_dict_is_setstate(self):
        iterator = skip(self.build(), self.restored_at)
        state = iterator.state_dict()
        self.assertEqual(state, iterator.getstate())
        other = self.build()
        other.load_state_dict(state)
        self.assertEqual(self.rest(other, self.restored_at), list(self.items[self.restored_at :]))

    def test_copy_goes_on_by_itself(self):
        iterator = skip(self.build(), self.restored_at)
        for duplicate in (copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))):
            other = duplicate(iterator)
            self.addCleanup(other.close)
            self.assertEqual(self.rest(other, self.restored_at), list(self.items[self.restored_at :]))
        self.assertEqual(self.rest(iterator, self.restored_at), list(self.items[self.restored_at :]))

    def test_constructor_and_getstate_call_no_callback(self):
        if self.has_callbacks:
            with mmap.mmap(-1, 1) as calls:  # which worker processes share
                iterator = self.build(Native, partial(calls.__setitem__, 0, 1))
                iterator.getstate()
                iterator.setstate(None)
                iterator.getstate()
                self.assertEqual(calls[0], 0)
                next(iterator)
                self.assertEqual(calls[0], 1)
                iterator.close()


class Seeded:
    """What holds for every class with a seed. Its test defines `seeded`, and `reference`: the items in plain Python."""

    def seeded(self, seed):
        raise NotImplementedError

    def reference(self, seed):
        raise NotImplementedError

    def test_seeds_of_every_kind_give_the_order_of_random(self):
        orders = []
        for seed in SEEDS:
            with self.subTest(seed=seed):
                iterator = self.seeded(seed)
                items = take(iterator)
                self.assertEqual(items, take(self.reference(seed)))
                iterator.setstate(None)
                self.assertEqual(take(iterator), items)
                orders.append(items)
        self.assertGreater(len({repr(items) for items in orders}), len(SEEDS) // 2)

    def test_seed_may_be_an_integer_of_another_type(self):
        class Integer:
            def __index__(self):
                return 7

        self.assertEqual(take(self.seeded(Integer())), take(self.reference(7)))
        self.assertEqual(take(self.seeded(True)), take(self.reference(1)))

    def test_seed_none_draws_one_that_a_rewind_repeats(self):
        first, second = self.seeded(None), self.seeded(None)
        items = take(first)
        self.assertNotEqual(items, take(second))
        first.setstate(None)
        self.assertEqual(take(first), items)

    def test_checkpoint_carries_a_drawn_seed_also_from_before_the_first_item(self):
        for position in (0, 3):
            with self.subTest(position=position):
                first, second = self.seeded(None), self.seeded(None)
                skip(first, position)
                state = as_json(first.getstate())
                items = take(first)
                second.setstate(state)
                self.assertEqual(take(second), items)
                third = self.seeded(None)
                third.setstate(second.getstate())
                third.setstate(state)
                self.assertEqual(take(third), items)

    def test_copy_has_the_seed_that_was_drawn(self):
        first = self.seeded(None)
        second = pickle.loads(pickle.dumps(first))
        items = take(first)
        self.assertEqual(take(second), items)
        second.setstate(None)
        self.assertEqual(take(second), items)

    def test_no_seed_is_refused(self):
        for seed in NO_SEEDS:
            with self.subTest(seed=seed):
                pattern = "seed must be an int, float, str, bytes.* or None, got " + re.escape(repr(seed)[:20])
                self.assertRaisesRegex(TypeError, pattern, self.seeded, seed)


def bad_sources(construct, name="source_iterator"):
    """Return `bad_arguments` for a source."""
    return [
        (
            partial(construct, value),
            ValueError,
            "{} must be a CheckpointableIterator, got {}".format(name, start(value)),
        )
        for value in NO_SOURCES
    ]


def bad_source_lists(make):
    return [(partial(make, value), TypeError, "source_iterators must be a list, got ") for value in (None, 5, len)] + [
        (partial(make, its.RandomIterator()), ValueError, "source_iterators must be a list of iterators, got the iter")
    ]


def bad_functions(construct, name, none=True):
    values = NO_FUNCTIONS + [None] * none
    return [(partial(construct, v), TypeError, "{} must be callable, got {}".format(name, start(v))) for v in values]


def bad_sizes(construct, name):
    return [
        (
            partial(construct, value),
            error,
            "{} must be {}at least 1, got {}".format(name, "an integer of " * (error is TypeError), start(value)),
        )
        for value, error in NO_SIZES
    ]


def start(value):
    return re.escape(repr(value)[:20])


def bad_instances(construct):
    """Return `bad_arguments` for `num_instances` and `instance_rank`."""
    bad = bad_sizes(lambda value: construct(num_instances=value, instance_rank=0), "num_instances")
    for number, rank in ((1, 1), (2, 2), (3, 99)):
        pattern = "instance_rank must be less than num_instances = {}, got {}".format(number, rank)
        bad.append((partial(construct, num_instances=number, instance_rank=rank), ValueError, pattern))
    for rank, error in ((-1, ValueError), (0.0, TypeError), ("0", TypeError), (None, TypeError)):
        pattern = "instance_rank must be (an integer of )?at least 0, got " + start(rank)
        bad.append((partial(construct, num_instances=2, instance_rank=rank), error, pattern))
    return bad


# ---------------------------------------------------------------------------------------------------------------------
# The interface
# ---------------------------------------------------------------------------------------------------------------------


class TestInterface(unittest.TestCase):
    def test_constructors_take_the_arguments_of_0_1_1_in_its_order(self):
        signatures = {
            "NativeCheckpointableIterator": ["iterable"],
            "InfinitePermutationSourceIterator": [
                "source_items",
                ("seed", 0),
                ("shuffle", True),
                ("num_instances", 1),
                ("instance_rank", 0),
            ],
            "ChunkedSourceIterator": ["source_items", ("num_instances", 1), ("instance_rank", 0)],
            "create_source_iterator": [
                "source_items",
                ("train", True),
                ("seed", None),
                ("shuffle", True),
                ("num_instances", 1),
                ("instance_rank", 0),
            ],
            "SelectManyIterator": ["source_iterator", ("collection_selector", None)],
            "MapIterator": ["source_iterator", "transform"],
            "ParallelMapIterator": ["source_iterator", "transform", "num_processes", "num_items_per_process"],
            "ZipIterator": ["source_iterators"],
            "WindowedIterator": ["source_iterator", "width"],
            "FixedBatchIterator": ["source_iterator", "batch_size"],
            "RandomIterator": [("seed", 0)],
            "RecurrentIterator": ["source_iterator", "step_function", ("initial_state", None)],
            "SamplingRandomMapIterator": ["source_iterator", "transform", ("seed", 0)],
            "BlockwiseShuffleIterator": ["source_iterator", "block_size", ("seed", 0)],
            "BufferedShuffleIterator": ["source_iterator", "buffer_size", ("seed", 0)],
            "MultiplexIterator": ["control_iterator", "source_iterators"],
            "BucketedReadaheadBatchIterator": [
                "source_iterator",
                "read_ahead",
                "key",
                "batch_size",
                ("boundary_key", None),
                ("shuffle", True),
                ("seed", 0),
            ],
            "PrefetchIterator": [
                "source_iterator",
                "buffer_size",
                ("buffer_in_main_process", False),
                ("log_empty_buffer_warning", False),
            ],
        }
        for name, expected in signatures.items():
            with self.subTest(name):
                function = getattr(its, name)
                if isinstance(function, type):
                    function = partial(function.__init__, None)  # Python 3.6 knows no signature of a generic class
                parameters = list(inspect.signature(function).parameters.values())
                self.assertEqual(
                    [p.name if p.default is p.empty else (p.name, p.default) for p in parameters[: len(expected)]],
                    expected,
                )
                for added in parameters[len(expected) :]:
                    self.assertEqual(added.kind, added.KEYWORD_ONLY)

    def test_base_class_needs_getstate_setstate_and_next(self):
        self.assertRaisesRegex(TypeError, "abstract", its.CheckpointableIterator)
        for lacking in ("getstate", "setstate", "__next__"):
            methods = {name: Own.__dict__[name] for name in ("getstate", "setstate", "__next__") if name != lacking}
            with self.subTest(lacking=lacking):
                incomplete = type("Incomplete", (its.CheckpointableIterator,), methods)
                self.assertRaisesRegex(TypeError, "abstract.*" + lacking, incomplete)

    def test_base_class_gives_iter_close_and_the_with_statement(self):
        class Three(its.CheckpointableIterator):
            def __init__(self):
                self.setstate(None)

            def getstate(self):
                return self.n

            def setstate(self, checkpoint):
                self.n = checkpoint or 0

            def __next__(self):
                if self.n == 3:
                    raise StopIteration
                self.n += 1
                return self.n

        with Three() as three:
            self.assertIs(iter(three), three)
            self.assertEqual(list(three), [1, 2, 3])
        three.close()
        three.load_state_dict(1)
        self.assertEqual(three.state_dict(), 1)
        self.assertEqual(repr(three), "Three()")

    def test_advance_iterator_calls_next_so_many_times(self):
        for iterator in (Native(range(5)), Own(range(5)), iter(range(5))):
            self.assertEqual(its._advance_iterator(iterator, 0), 0)
            self.assertEqual(its._advance_iterator(iterator, 3), 3)
            self.assertEqual(next(iterator), 3)
            self.assertRaisesRegex(
                RuntimeError, "cannot pass over 4 items, it has 1", its._advance_iterator, iterator, 4
            )


# ---------------------------------------------------------------------------------------------------------------------
# Sources
# ---------------------------------------------------------------------------------------------------------------------


class TestNativeCheckpointableIterator(Contract, unittest.TestCase):
    items = ["a", None, "b", 4, (5, 6)]
    num_sources = 0
    bad_arguments = [
        (partial(Native, iter([1])), ValueError, "iterable must be one that can be iterated over again.*list_iterator"),
        (
            partial(Native, (i for i in ())),
            ValueError,
            "iterable must be one that can be iterated over again.*generator",
        ),
        (partial(Native, Native([1])), ValueError, "iterable must be one that can be iterated over again.*Native"),
        (partial(Native, 5), TypeError, "iterable must be an iterable, got 5"),
        (partial(Native, None), TypeError, "iterable must be an iterable, got None"),
        (partial(Native, range(-1, sys.maxsize)), ValueError, r"iterable must have at most \d+ items, got range\(-1, "),
    ]

    def make(self, source=Native, call=nothing):
        return Native(self.items)

    def test_any_iterable_gives_its_items(self):
        class Indexed:
            def __getitem__(self, index):
                return "xyz"[index]

        for iterable, expected in (
            ([], []),
            ((), []),
            ("", []),
            ([7], [7]),
            ("abc", ["a", "b", "c"]),
            (b"ab", [97, 98]),
            (range(2, 5), [2, 3, 4]),
            ({"k": 1, "l": 2}, ["k", "l"]),
            (collections.deque([1, 2]), [1, 2]),
            (Again([None, 1]), [None, 1]),
            (Recorded([1, None]), [1, None]),
            (Indexed(), ["x", "y", "z"]),
            (bytearray(b"ab"), [97, 98]),
        ):
            with self.subTest(iterable=iterable):
                check_iterator(partial(Native, iterable), expected)

    def test_state_is_the_number_of_items(self):
        iterator = self.make()
        states = [iterator.getstate()] + [iterator.getstate() for _ in iterator] + [iterator.getstate()]
        self.assertEqual(states, [{"num_items_yielded": n} for n in (0, 1, 2, 3, 4, 5, 5)])

    def test_sequence_is_entered_where_the_checkpoint_says(self):
        sequence = Recorded(range(1000))
        iterator = Native(sequence)
        iterator.setstate({"num_items_yielded": 990})
        self.assertEqual(sequence.read, [])
        self.assertEqual(take(iterator, 2), [990, 991])
        self.assertEqual(sequence.read, [990, 991])

    def test_other_iterable_is_read_again_when_an_item_is_asked_for(self):
        again = Again("abc")
        iterator = Native(again)
        for position in (2, 1):
            iterator.setstate({"num_items_yielded": position})
            iterator.getstate()
        self.assertEqual(again.passes, 0)
        self.assertEqual(list(iterator), ["b", "c"])
        self.assertEqual(again.passes, 1)

    def test_position_beyond_the_end_of_a_sequence_is_refused(self):
        iterator = skip(self.make(), 2)
        with self.assertRaisesRegex(RuntimeError, "beyond the end.*NativeCheckpointableIterator.*6 items, it has 5"):
            iterator.setstate({"num_items_yielded": 6})
        self.assertEqual(list(iterator), self.items[2:])

    def test_position_beyond_the_end_of_another_iterable_is_refused_when_it_is_read(self):
        iterator = Native(Again("abc"))
        iterator.setstate({"num_items_yielded": 4})
        for _ in range(2):
            with self.assertRaisesRegex(RuntimeError, "beyond the end.*cannot pass over 4 items, it has 3"):
                next(iterator)
        self.assertEqual(iterator.getstate(), {"num_items_yielded": 4})
        iterator.setstate(None)
        self.assertEqual(list(iterator), ["a", "b", "c"])

    def test_iterable_that_raises_is_read_on(self):
        def make(call):
            class Calling:
                def __iter__(self):
                    return map(partial(called, call), [1, 2, 3])

            return Native(Calling())

        check_iterator(make, [1, 2, 3], errors=[ValueError, KeyboardInterrupt])


def instances(make, number):
    """Return what each instance yields."""
    return [take(make(num_instances=number, instance_rank=rank)) for rank in range(number)]


class ListSource:
    """What holds for sources that are made from a list. The test of such a class defines `make_source`."""

    def make_source(self, items, num_instances=1, instance_rank=0):
        raise NotImplementedError

    def test_changing_the_list_later_changes_nothing(self):
        items = ["a", "b", "c"]
        iterator = self.make_source(items)
        expected = take(self.make_source(["a", "b", "c"]), 3)
        items[:] = ["x"]
        self.assertEqual(take(iterator, 3), expected)

    def test_what_is_no_list_is_refused(self):
        for items in (None, 5, 1.5, len):
            with self.subTest(items=items), self.assertRaisesRegex(TypeError, "source_items must be a list, got "):
                self.make_source(items)

    def test_items_may_come_from_any_iterable(self):
        expected = take(self.make_source([0, 1, 2]))
        for items in ((0, 1, 2), range(3), iter(range(3)), {0: "", 1: "", 2: ""}):
            self.assertEqual(take(self.make_source(items)), expected)

    def test_checkpoint_of_another_list_is_refused_saying_what_differs(self):
        for there, here, pattern in (
            ((["a", "b"],), (["a", "b", "c"],), "a list of 2 items, here it is 3"),
            (([1, 2],), ([1],), "a list of 2 items, here it is 1"),
            ((["a", "b"],), (["a", "c"],), "a list of items with other names"),
            ((["a", "b"],), (["b", "a"],), "a list of items with other names"),
            ((["x/a", "x/b"],), (["x/a", "x/c"],), "a list of items with other names"),
            ((["a", "b"], 2, 0), (["a", "b"], 4, 0), "num_instances = 2, here it is 4.*ShardedIterator"),
            (([1, 2], 1, 0), ([1, 2], 2, 1), "num_instances = 1, here it is 2.*ShardedIterator"),
            (([1, 2], 2, 0), ([1, 2], 2, 1), "instance_rank = 0, here it is 1"),
        ):
            for position in (0, 1):
                with self.subTest(there=there, here=here, position=position):
                    state = skip(self.make_source(*there), position).getstate()
                    iterator = skip(self.make_source(*here), 1)
                    expected = take(copy.copy(iterator))
                    with self.assertRaisesRegex(
                        ValueError, "checkpoint of {}.*made with {}".format(self.name, pattern)
                    ):
                        iterator.setstate(as_json(state))
                    self.assertEqual(take(iterator), expected)

    def test_checkpoint_of_the_same_files_in_another_place_fits(self):
        state = skip(self.make_source(["/here/a", "/here/b"]), 1).getstate()
        for items in (["/there/a", "/there/b"], [pathlib.PurePosixPath("/there/a"), pathlib.PurePosixPath("b")]):
            iterator = self.make_source(items)
            iterator.setstate(state)
            self.assertEqual(take(iterator), take(skip(self.make_source(items), 1)))

    def test_checkpoint_that_does_not_say_of_which_list_is_accepted(self):
        for position in range(3):
            iterator = skip(self.make_source(["a", "b", "c"]), position)
            state = iterator.getstate()
            del state["source"]
            expected = take(iterator)
            iterator = self.make_source(["x", "y", "z"])
            iterator.setstate(state)
            self.assertEqual(take(iterator), [{"a": "x", "b": "y", "c": "z"}[item] for item in expected])

    def test_checkpoint_stays_small_for_a_long_list(self):
        short, long = self.make_source([""]), self.make_source([str(i) for i in range(10000)])
        self.assertLess(len(json.dumps(long.getstate())), len(json.dumps(short.getstate())) + 20)

    def test_any_items_can_be_saved(self):
        class Path(os.PathLike):
            def __init__(self, path):
                self.path = path

            def __fspath__(self):
                return self.path

        for items in (["\ud800"], [b"bytes", "text"], [None], [Path("a")], [Path(b"\xff"), Path(b"b")], [["list"]]):
            with self.subTest(items=items):
                iterator = self.make_source(items)
                iterator.setstate(as_json(iterator.getstate()))
                self.assertEqual(len(take(iterator, 1)), 1)


class TestChunkedSourceIterator(Contract, ListSource, unittest.TestCase):
    name = "ChunkedSourceIterator"
    items = [1, None, "c", 4]
    num_sources = 0
    bad_arguments = bad_instances(partial(its.ChunkedSourceIterator, [1, 2])) + [
        (partial(its.ChunkedSourceIterator, 5), TypeError, "source_items must be a list, got 5")
    ]

    def make(self, source=Native, call=nothing):
        return its.ChunkedSourceIterator([0] * 4 + self.items + [5, 6, 7], num_instances=3, instance_rank=1)

    def make_source(self, items, num_instances=1, instance_rank=0):
        return its.ChunkedSourceIterator(items, num_instances, instance_rank)

    def test_parts_are_consecutive_and_the_longer_ones_come_first(self):
        for number, parts in (
            (1, [[0, 1, 2, 3, 4]]),
            (2, [[0, 1, 2], [3, 4]]),
            (3, [[0, 1], [2, 3], [4]]),
            (5, [[0], [1], [2], [3], [4]]),
            (7, [[0], [1], [2], [3], [4], [], []]),
        ):
            self.assertEqual(instances(partial(its.ChunkedSourceIterator, range(5)), number), parts)

    def test_parts_are_complete_and_even_whatever_the_numbers(self):
        for length in range(12):
            for number in range(1, 15):
                parts = instances(partial(its.ChunkedSourceIterator, range(length)), number)
                lengths = list(map(len, parts))
                self.assertEqual(list(chain(*parts)), list(range(length)))
                self.assertEqual(lengths, sorted(lengths, reverse=True))
                self.assertLessEqual(lengths[0] - lengths[-1], 1)

    def test_every_position_of_every_part_restores(self):
        for length, number, rank in ((0, 1, 0), (1, 1, 0), (5, 2, 0), (5, 2, 1), (2, 3, 2)):
            with self.subTest(length=length, number=number, rank=rank):
                check_iterator(partial(its.ChunkedSourceIterator, range(length), number, rank))

    def test_state_is_the_number_of_items_within_the_part(self):
        iterator = self.make()
        self.assertEqual([iterator.getstate()["num_items_yielded"] for _ in iterator], [1, 2, 3, 4])

    def test_position_beyond_the_part_is_refused(self):
        iterator = skip(self.make(), 2)
        for state in ({"num_items_yielded": 5}, dict(iterator.getstate(), num_items_yielded=11)):
            with self.assertRaisesRegex(RuntimeError, "beyond the end.*ChunkedSourceIterator.*items, it has 4"):
                iterator.setstate(state)
        self.assertEqual(list(iterator), self.items[2:])


def permutations(items, seed, number=1, rank=0):
    """Yield what an instance gets of the endless stream of permutations."""
    generator = random.Random(seed)

    def stream():
        while True:
            permutation = list(items)
            generator.shuffle(permutation)
            yield from permutation

    return islice(stream(), rank, None, number)


class TestInfinitePermutationSourceIterator(Contract, Seeded, ListSource, unittest.TestCase):
    name = "InfinitePermutationSourceIterator"
    items = take(permutations([1, None, "c", 4, (5,)], 42), 13)
    ends = False
    num_sources = 0
    restored_at = 7
    bad_arguments = bad_instances(lambda **kwargs: its.InfinitePermutationSourceIterator([1, 2], 0, True, **kwargs)) + [
        (partial(its.InfinitePermutationSourceIterator, []), ValueError, "source_items must have at least one item"),
        (partial(its.InfinitePermutationSourceIterator, 5), TypeError, "source_items must be a list, got 5"),
        (
            partial(its.InfinitePermutationSourceIterator, [1], seed=None, num_instances=2),
            ValueError,
            "seed must be given to shuffle for num_instances = 2, got None",
        ),
    ]

    def make(self, source=Native, call=nothing):
        return its.InfinitePermutationSourceIterator([1, None, "c", 4, (5,)], seed=42)

    def make_source(self, items, num_instances=1, instance_rank=0):
        return its.InfinitePermutationSourceIterator(items, 3, True, num_instances, instance_rank)

    def seeded(self, seed):
        return its.InfinitePermutationSourceIterator(range(9), seed)

    def reference(self, seed):
        return permutations(range(9), seed)

    def test_instances_deal_out_the_stream_also_where_there_are_more_than_items(self):
        for length in (1, 2, 3, 7):
            for number in (1, 2, 3, 5, 20):
                for rank in {0, 1, number - 1} & set(range(number)):
                    with self.subTest(length=length, number=number, rank=rank):
                        iterator = its.InfinitePermutationSourceIterator(range(length), 5, True, number, rank)
                        self.assertEqual(take(iterator), take(permutations(range(length), 5, number, rank)))

    def test_every_position_of_an_instance_restores(self):
        for length, number, rank in ((7, 2, 1), (2, 9, 8), (1, 3, 2)):
            with self.subTest(length=length, number=number, rank=rank):
                make = partial(its.InfinitePermutationSourceIterator, range(length), 5, True, number, rank)
                check_iterator(make, take(permutations(range(length), 5, number, rank), 9), take=9)

    def test_without_shuffling_the_list_comes_over_and_over(self):
        check_iterator(lambda: its.InfinitePermutationSourceIterator("abc", shuffle=False), "abcabcab", take=8)
        for number, expected in (
            (1, ["abcabc"]),
            (2, ["acbacb", "bacbac"]),
            (4, ["abcabc", "bcabca", "cabcab", "abcabc"]),
        ):
            make = partial(its.InfinitePermutationSourceIterator, "abc", 0, False)
            self.assertEqual(["".join(part[:6]) for part in instances(make, number)], expected)

    def test_without_shuffling_several_instances_need_no_seed(self):
        make = partial(its.InfinitePermutationSourceIterator, "ab", None, False)
        self.assertEqual([part[:2] for part in instances(make, 2)], [["a", "a"], ["b", "b"]])

    def test_state_is_the_generator_before_the_permutation_and_the_index_in_it(self):
        iterator = its.InfinitePermutationSourceIterator("abcd", seed=3, num_instances=3, instance_rank=1)
        generator = random.Random(3)
        states = [None, generator.getstate()]  # positions 1, 4, 7, 10 of the stream
        generator.shuffle(list("abcd"))
        states.append(generator.getstate())
        generator.shuffle(list("abcd"))
        states.append(generator.getstate())
        found = []
        for _ in range(4):
            found.append(iterator.getstate())
            next(iterator)
        self.assertEqual([state["index"] for state in found], [1, 0, 3, 2])
        self.assertEqual([state["random_state"] for state in found], [None, states[2], states[2], states[3]])

    def test_state_before_the_first_item_has_the_rank_as_index(self):
        iterator = its.InfinitePermutationSourceIterator("ab", seed=3, num_instances=9, instance_rank=7)
        state = iterator.getstate()
        self.assertEqual((state["random_state"], state["index"]), (None, 7))
        expected = take(iterator)
        iterator.setstate({"random_state": None, "index": 7})
        self.assertEqual(take(iterator), expected)

    def test_index_beyond_what_any_instance_reaches_is_refused(self):
        iterator = skip(its.InfinitePermutationSourceIterator("abc", 1, True, 2, 1), 1)
        expected = take(copy.copy(iterator))
        with self.assertRaisesRegex(ValueError, "InfinitePermutationSourceIterator does not fit: 'index' must be"):
            iterator.setstate(dict(iterator.getstate(), index=10**18))
        self.assertEqual(take(iterator), expected)

    def test_changing_a_yielded_item_changes_no_later_one(self):
        items = [[1], [2, [3]], {"k": [4]}, collections.Counter("a")]
        reference = copy.deepcopy(items)
        iterator = its.InfinitePermutationSourceIterator(items, seed=1)
        for expected in take(permutations(reference, 1)):
            item = next(iterator)
            self.assertEqual(item, expected)
            item.clear()
        self.assertEqual(items, reference)

    def test_changing_a_yielded_item_changes_no_other_that_was_the_same_object(self):
        shared = [1]
        for items in ([shared, shared, shared], [(shared, 0), (shared, 0), (shared, 0)]):
            iterator = its.InfinitePermutationSourceIterator(items, seed=1)
            for _ in range(7):
                item = next(iterator)
                found = item if isinstance(item, list) else item[0]
                self.assertEqual(found, [1])
                found.append(2)

    def test_items_passed_and_changed_later_are_yielded_as_they_were(self):
        for shuffle in (True, False):
            items = [[1], [2]]
            iterator = its.InfinitePermutationSourceIterator(items, seed=1, shuffle=shuffle)
            items[0].append(99)
            items[1].append(99)
            self.assertEqual(sorted(take(iterator, 4)), [[1], [1], [2], [2]])

    def test_without_shuffling_these_very_objects_come_again(self):
        items = [[1], [2]]
        iterator = its.InfinitePermutationSourceIterator(items, shuffle=False)
        first = take(iterator, 2)
        first[0].append("changed")
        second = take(iterator, 2)
        self.assertEqual(second, [[1, "changed"], [2]])
        self.assertEqual([a is b for a, b in zip(first, second)], [True, True])
        self.assertEqual(items, [[1], [2]])

    def test_items_that_cannot_change_are_not_copied(self):
        items = ["text" * 3, ("a" * 3, 10**20), pathlib.PurePosixPath("a"), 10**30, None, 1.5, b"bytes" * 2, range(3)]
        for shuffle in (True, False):
            iterator = its.InfinitePermutationSourceIterator(items, shuffle=shuffle)
            self.assertEqual({id(item) for item in take(iterator, 16)}, set(map(id, items)))


class TestCreateSourceIterator(unittest.TestCase):
    def test_training_gets_permutations(self):
        iterator = its.create_source_iterator("abc", True, 5, True, 2, 1)
        self.assertIs(type(iterator), its.InfinitePermutationSourceIterator)
        self.assertEqual(take(iterator), take(permutations("abc", 5, 2, 1)))
        iterator = its.create_source_iterator("abc", shuffle=False)
        self.assertEqual(take(iterator, 5), list("abcab"))

    def test_otherwise_the_list_comes_once(self):
        iterator = its.create_source_iterator("abc", False, None, False, 2, 0)
        self.assertIs(type(iterator), its.ChunkedSourceIterator)
        self.assertEqual(list(iterator), ["a", "b"])

    def test_bad_arguments_are_refused(self):
        create = its.create_source_iterator
        for construct, error, pattern in (
            bad_instances(partial(create, [1], train=False, shuffle=False))
            + bad_instances(partial(create, [1], seed=1))
            + [
                (partial(create, [1], train=False), ValueError, "shuffle must be False if train is False, got True"),
                (partial(create, []), ValueError, "source_items must have at least one item"),
                (partial(create, [1], num_instances=2), ValueError, "seed must be given"),
                (partial(create, [1], seed=[]), TypeError, "seed must be"),
            ]
        ):
            with self.subTest(pattern=pattern):
                self.assertRaisesRegex(error, pattern, construct)


class TestRandomIterator(Contract, Seeded, unittest.TestCase):
    items = take(iter(random.Random(42).random, None), 9)
    ends = False
    num_sources = 0
    bad_arguments = [
        (partial(its.RandomIterator, [1]), TypeError, r"seed must be an int, float.*got \[1\]"),
        (partial(its.RandomIterator, float("nan")), ValueError, "seed must not be NaN"),
    ]

    def make(self, source=Native, call=nothing):
        return its.RandomIterator(42)

    def seeded(self, seed):
        return its.RandomIterator(seed)

    def reference(self, seed):
        return iter(random.Random(seed).random, None)

    def test_state_is_that_of_the_generator(self):
        iterator = self.make()
        for position in range(600):
            if position in (0, 1, 255, 256, 257, 599):
                self.assertEqual(iterator.getstate(), {"random_state": generator_state(42, position)})
            next(iterator)


# ---------------------------------------------------------------------------------------------------------------------
# Mapping and flattening
# ---------------------------------------------------------------------------------------------------------------------


def number_or_none(call, item):
    call()
    return None if item == "x" else len(item or "")


class TestMapIterator(Contract, unittest.TestCase):
    items = [1, 2, None, 0, 3, None, 0]
    has_callbacks = True
    bad_arguments = bad_sources(lambda source: its.MapIterator(source, len)) + bad_functions(
        partial(its.MapIterator, Native([])), "transform"
    )

    def make(self, source=Native, call=nothing):
        return its.MapIterator(source(["a", "bc", "x", "", "def", "x", None]), partial(number_or_none, call))

    def test_empty_source_gives_nothing(self):
        check_iterator(lambda: its.MapIterator(Native([]), len), [])

    def test_state_is_that_of_the_source(self):
        iterator = skip(self.make(), 2)
        self.assertEqual(iterator.getstate(), {"num_items_yielded": 2})

    def test_constructor_leaves_the_source_where_it_is(self):
        self.assertEqual(list(its.MapIterator(skip(Native("abc"), 1), str.upper)), ["B", "C"])

    def test_transform_is_called_once_for_each_item_when_it_is_asked_for(self):
        seen = []
        iterator = its.MapIterator(Native("abc"), seen.append)
        next(iterator)
        self.assertEqual(seen, ["a"])
        list(iterator)
        self.assertEqual(seen, ["a", "b", "c"])

    def test_transform_is_not_called_for_items_passed_over_on_restoring(self):
        seen = []
        windows = its.WindowedIterator(its.MapIterator(Native(range(100)), seen.append), 3)
        state = skip(windows, 2).getstate()
        self.assertEqual(state, {"source_state": {"num_items_yielded": 0}, "item_index": 2})
        del seen[:]
        windows.setstate(state)
        next(windows)
        self.assertEqual(seen[0], 2)


class TestSelectManyIterator(Contract, unittest.TestCase):
    items = ["a", "b", None, "c", "d", "e", "f"]
    has_callbacks = True
    restored_at = 3
    bad_arguments = bad_sources(its.SelectManyIterator) + bad_functions(
        partial(its.SelectManyIterator, Native([])), "collection_selector", none=False
    )

    def make(self, source=Native, call=nothing):
        return its.SelectManyIterator(source(["", "ab", "-", "", "cde", "f", ""]), partial(self.select, call))

    @staticmethod
    def select(call, item):
        call()
        return [None] if item == "-" else list(item)

    def test_collections_of_any_kind_are_flattened(self):
        deque = collections.deque
        for selector in (list, tuple, str, dict.fromkeys, deque, iter, Again, Recorded, lambda s: (c for c in s)):
            for source_items in ([], ["", ""], ["a"], ["ab", "", "", "cde", ""]):
                with self.subTest(selector=selector, source_items=source_items):
                    make = partial(over, its.SelectManyIterator, source_items, selector)
                    check_iterator(make, list("".join(source_items)))

    def test_source_items_are_the_collections_without_a_selector(self):
        collected = [[1, None], (), range(2), {"k": 0}]
        check_iterator(lambda: its.SelectManyIterator(Native(collected)), [1, None, 0, 1, "k"])

    def test_collection_that_is_no_iterable_is_an_error_and_not_the_end(self):
        for wrong in (None, 5):
            chunks = {"a": [1], "b": wrong, "c": [3]}
            for iterator in (
                its.SelectManyIterator(Native("abc"), chunks.get),
                its.SelectManyIterator(Native([[1], wrong, [3]])),
            ):
                self.assertEqual(next(iterator), 1)
                state = iterator.getstate()
                for _ in range(2):
                    self.assertRaisesRegex(TypeError, "iterable", next, iterator)
                    self.assertEqual(iterator.getstate(), state)

    @staticmethod
    def logging(selector, log):
        def select(item):
            log.append(item)
            return selector(item)

        return select

    def test_selector_is_asked_once_for_each_source_item(self):
        for selector in (list, iter):
            seen = []
            iterator = its.SelectManyIterator(Native(["ab", "cd"]), self.logging(selector, seen))
            self.assertEqual(next(iterator), "a")
            self.assertEqual(seen, ["ab"])
            self.assertEqual(list(iterator), ["b", "c", "d"])
            self.assertEqual(seen, ["ab", "cd"])

    def test_restoring_asks_for_the_current_collection_alone(self):
        for selector in (list, iter):
            seen = []
            make = partial(over, its.SelectManyIterator, ["ab", "cd", "ef"], self.logging(selector, seen))
            state = skip(make(), 3).getstate()
            del seen[:]
            iterator = make()
            iterator.setstate(state)
            self.assertEqual(seen, [])
            self.assertEqual(next(iterator), "d")
            self.assertEqual(seen, ["cd"])

    def test_collection_that_is_a_sequence_is_entered_where_the_checkpoint_says(self):
        sequence = Recorded(range(100))
        iterator = its.SelectManyIterator(Native([sequence]))
        iterator.setstate({"source_state": None, "flattened_items_yielded": 98})
        self.assertEqual(list(iterator), [98, 99])
        self.assertEqual(sequence.read, [98, 99])

    def test_generator_that_raises_is_asked_for_again_and_delivered_items_are_skipped(self):
        def make(call):
            def select(item):
                for character in item:
                    yield called(call, character)

            return its.SelectManyIterator(Native(["ab", "", "cde"]), select)

        check_iterator(make, list("abcde"), errors=[OSError, KeyboardInterrupt])

    def test_state_is_the_source_before_the_item_and_the_number_yielded_of_it(self):
        iterator = its.SelectManyIterator(Native(["ab", "cde"]))
        found = []
        for _ in range(4):
            state = iterator.getstate()
            found.append((state["source_state"]["num_items_yielded"], state["flattened_items_yielded"]))
            next(iterator)
        self.assertIn(found, ([(0, 0), (0, 1), (0, 2), (1, 1)], [(0, 0), (0, 1), (1, 0), (1, 1)]))
        self.assertEqual(set(iterator.getstate()), {"source_state", "flattened_items_yielded"})

    def test_position_beyond_the_collection_is_an_error_at_each_next(self):
        for selector in (list, iter, Recorded):
            with self.subTest(selector=selector):
                iterator = its.SelectManyIterator(Native(["ab", "cde"]), selector)
                iterator.setstate({"source_state": {"num_items_yielded": 1}, "flattened_items_yielded": 4})
                for _ in range(2):
                    with self.assertRaisesRegex(RuntimeError, "beyond the end.*SelectManyIterator.*4 items, it has 3"):
                        next(iterator)
                iterator.setstate(None)
                self.assertEqual(list(iterator), list("abcde"))

    def test_constructor_rewinds_the_source(self):
        self.assertEqual(list(its.SelectManyIterator(skip(Native(["ab", "c"]), 1))), ["a", "b", "c"])

    def test_close_ends_the_generator_in_progress(self):
        ended = []

        def select(item):
            try:
                yield item
                yield item
            finally:
                ended.append(item)

        iterator = its.SelectManyIterator(Native("ab"), select)
        next(iterator)
        self.assertEqual(ended, [])
        iterator.close()
        self.assertEqual(ended, ["a"])


def running_sum(call, state, item):
    call()
    return state + item, (item, state + item)


def collect(call, state, item):
    call()
    state.append(item)
    return state, list(state)


class TestRecurrentIterator(Contract, unittest.TestCase):
    items = [(3, 103), (1, 104), (4, 108), (1, 109), (5, 114), (9, 123)]
    has_callbacks = True
    bad_arguments = bad_sources(lambda source: its.RecurrentIterator(source, max)) + bad_functions(
        partial(its.RecurrentIterator, Native([])), "step_function"
    )

    def make(self, source=Native, call=nothing):
        return its.RecurrentIterator(source([3, 1, 4, 1, 5, 9]), partial(running_sum, call), 100)

    def test_step_may_change_its_state_in_place(self):
        initial = [0]

        def make(call=nothing):
            return its.RecurrentIterator(Native("abcd"), partial(collect, call), initial)

        expected = [[0, "a"], [0, "a", "b"], [0, "a", "b", "c"], [0, "a", "b", "c", "d"]]
        check_iterator(make, expected, pickles=True)
        check_iterator(make, expected, errors=[ValueError, KeyboardInterrupt, StopIteration])
        self.assertEqual(initial, [0])

    def test_state_of_any_type_is_kept_as_it_is(self):
        class Own:
            def __init__(self, seen):
                self.seen = seen

        def step(state, item):
            state.seen[item] += 1
            return state, dict(state.seen)

        initial = Own(collections.Counter())
        expected = [{"a": 1}, {"a": 1, "b": 1}, {"a": 2, "b": 1}]
        iterator = its.RecurrentIterator(Native("aba"), step, initial)
        states = [iterator.getstate()] + [iterator.getstate() for _ in iterator]
        self.assertEqual(initial.seen, {})
        self.assertEqual([state["recurrent_state"].seen for state in states], [{}] + expected)
        for position, state in enumerate(states):
            iterator.setstate(state)
            self.assertEqual(list(iterator), expected[position:])

    def test_initial_state_changed_later_changes_nothing(self):
        initial = {"list": []}
        iterator = its.RecurrentIterator(Native("ab"), lambda state, item: (state, len(state["list"])), initial)
        initial["list"].append(1)
        self.assertEqual(next(iterator), 0)
        iterator.setstate(None)
        self.assertEqual(next(iterator), 0)

    def test_initial_state_is_none_by_default(self):
        self.assertEqual(list(its.RecurrentIterator(Native("ab"), lambda s, item: (item, s))), [None, "a"])

    def test_state_is_that_after_the_last_step_and_the_sources(self):
        iterator = self.make()
        for position, total in enumerate([100, 103, 104, 108]):
            expected = {"recurrent_state": total, "source_state": {"num_items_yielded": position}}
            self.assertEqual(iterator.getstate(), expected)
            next(iterator)

    def test_step_that_returns_no_pair_is_an_error_and_moves_nothing(self):
        for result in (5, (1,), (1, 2, 3), None):
            results = {"a": (1, "a"), "b": result}
            iterator = its.RecurrentIterator(Native("ab"), lambda state, item, results=results: results[item], 0)
            next(iterator)
            for _ in range(2):
                self.assertRaisesRegex((TypeError, ValueError), "unpack|iterable", next, iterator)
                self.assertEqual(iterator.getstate(), {"recurrent_state": 1, "source_state": {"num_items_yielded": 1}})

    def test_step_is_called_once_for_each_item(self):
        calls = []
        self.assertEqual(list(self.make(call=lambda: calls.append(1))), self.items)
        self.assertEqual(len(calls), len(self.items))


def sample(call, generator, item):
    call()
    return item, generator.randrange(1000), generator.gauss(0, 1)


class TestSamplingRandomMapIterator(Contract, Seeded, unittest.TestCase):
    has_callbacks = True
    items = list(map(partial(sample, nothing, random.Random(42)), [3, None, 4, 1, 5]))
    bad_arguments = bad_sources(lambda source: its.SamplingRandomMapIterator(source, sample)) + bad_functions(
        partial(its.SamplingRandomMapIterator, Native([])), "transform"
    )

    def make(self, source=Native, call=nothing):
        return its.SamplingRandomMapIterator(source([3, None, 4, 1, 5]), partial(sample, call), 42)

    def seeded(self, seed):
        return its.SamplingRandomMapIterator(Native(range(10)), partial(sample, nothing), seed)

    def reference(self, seed):
        return map(partial(sample, nothing, random.Random(seed)), range(10))

    def test_state_is_the_generators_and_the_sources(self):
        iterator = its.SamplingRandomMapIterator(Native("abc"), lambda generator, item: generator.random(), 42)
        for position in range(3):
            expected = {
                "recurrent_state": generator_state(42, position),
                "source_state": {"num_items_yielded": position},
            }
            self.assertEqual(iterator.getstate(), expected)
            next(iterator)

    def test_transform_gets_a_generator_and_is_called_once_for_each_item(self):
        seen = []
        list(its.SamplingRandomMapIterator(Native("abc"), lambda generator, item: seen.append((type(generator), item))))
        self.assertEqual(seen, [(random.Random, "a"), (random.Random, "b"), (random.Random, "c")])


# ---------------------------------------------------------------------------------------------------------------------
# Shuffling
# ---------------------------------------------------------------------------------------------------------------------


def blockwise(items, block_size, seed):
    generator = random.Random(seed)
    for first in range(0, len(items), block_size):
        block = list(items[first : first + block_size])
        generator.shuffle(block)
        yield from block


class TestBlockwiseShuffleIterator(Contract, Seeded, unittest.TestCase):
    items = list(blockwise([3, None, 4, 1, None, 9, 2, 6], 3, 42))
    restored_at = 4
    bad_arguments = bad_sources(lambda source: its.BlockwiseShuffleIterator(source, 1)) + bad_sizes(
        partial(its.BlockwiseShuffleIterator, Native([])), "block_size"
    )

    def make(self, source=Native, call=nothing):
        return its.BlockwiseShuffleIterator(source([3, None, 4, 1, None, 9, 2, 6]), 3, 42)

    def seeded(self, seed):
        return its.BlockwiseShuffleIterator(Native(range(20)), 8, seed)

    def reference(self, seed):
        return blockwise(range(20), 8, seed)

    def test_blocks_of_any_size_are_shuffled_as_random_does(self):
        for length in (0, 1, 2, 6, 7):
            for size in (1, 2, 3, 6, 100):
                with self.subTest(length=length, size=size):
                    make = partial(over, its.BlockwiseShuffleIterator, range(length), size, 7)
                    check_iterator(make, list(blockwise(range(length), size, 7)), positions=4)

    def test_large_blocks_are_shuffled_as_random_does(self):
        for size in (255, 256, 257, 1000, 1025):
            items = list(its.BlockwiseShuffleIterator(Native(range(2100)), size, 7))
            self.assertEqual(items, list(blockwise(range(2100), size, 7)))

    def test_state_is_generator_and_source_before_the_block(self):
        iterator = its.BlockwiseShuffleIterator(Native(range(8)), 3, 42)
        generator = random.Random(42)
        next(iterator)
        self.assertEqual(iterator.getstate(), self.state(generator, 0, 1))
        skip(iterator, 3)
        generator.shuffle([0, 1, 2])
        self.assertEqual(iterator.getstate(), self.state(generator, 3, 1))
        next(iterator)
        self.assertEqual(iterator.getstate(), self.state(generator, 3, 2))

    @staticmethod
    def state(generator, num_before, num_yielded):
        return {
            "source_state": {
                "recurrent_state": generator.getstate(),
                "source_state": {"source_state": {"num_items_yielded": num_before}},
            },
            "flattened_items_yielded": num_yielded,
        }

    def test_one_block_is_read_ahead_and_no_more(self):
        source = Native(range(100))
        iterator = its.BlockwiseShuffleIterator(source, 10)
        self.assertEqual(source.getstate(), {"num_items_yielded": 0})
        for position in range(1, 31):
            next(iterator)
            self.assertEqual(source.getstate(), {"num_items_yielded": -(-position // 10) * 10})

    def test_position_beyond_the_block_is_refused(self):
        iterator = skip(self.make(), 4)
        state = iterator.getstate()
        with self.assertRaisesRegex(ValueError, "'flattened_items_yielded' must be at most block_size = 3, got 4"):
            iterator.setstate(dict(state, flattened_items_yielded=4))
        iterator.setstate(skip(self.make(), 7).getstate())
        state = iterator.getstate()
        iterator.setstate(dict(state, flattened_items_yielded=3))  # the last block has two items
        for _ in range(2):
            self.assertRaisesRegex(RuntimeError, "beyond the end.*3 items, it has 2", next, iterator)

    def test_constructor_rewinds_the_source(self):
        self.assertEqual(list(its.BlockwiseShuffleIterator(skip(Native("ab"), 1), 1)), ["a", "b"])


def buffered(items, buffer_size, seed):
    generator = random.Random(seed)
    slots = [[] for _ in range(buffer_size)]
    for item in items:
        slot = generator.randrange(0, buffer_size)
        yield from slots[slot]
        slots[slot] = [item]
    for slot in reversed(slots):
        yield from slot


class TestBufferedShuffleIterator(Contract, Seeded, unittest.TestCase):
    items = list(buffered([3, None, 4, 1, None, 9, 2, None], 3, 42))
    restored_at = 5  # two slots hold None
    bad_arguments = bad_sources(lambda source: its.BufferedShuffleIterator(source, 1)) + bad_sizes(
        partial(its.BufferedShuffleIterator, Native([])), "buffer_size"
    )

    def make(self, source=Native, call=nothing):
        return its.BufferedShuffleIterator(source([3, None, 4, 1, None, 9, 2, None]), 3, 42)

    def seeded(self, seed):
        return its.BufferedShuffleIterator(Native(range(20)), 8, seed)

    def reference(self, seed):
        return buffered(range(20), 8, seed)

    def test_buffers_of_any_size_shuffle_as_random_does(self):
        for items in ([], [None], [None, None, None], [0, None, 2, None, None, 5, 6]):
            for size in (1, 2, 3, 7, 100):
                with self.subTest(items=items, size=size):
                    make = partial(over, its.BufferedShuffleIterator, items, size, 7)
                    check_iterator(make, list(buffered(items, size, 7)), positions=5)

    def test_many_items_shuffle_as_random_does(self):
        for size in (255, 256, 257):
            items = list(its.BufferedShuffleIterator(Native(range(2000)), size, 7))
            self.assertEqual(items, list(buffered(range(2000), size, 7)))

    def test_state_is_the_slots_the_generator_and_the_source(self):
        iterator = its.BufferedShuffleIterator(Native("abcdefgh"), 4, 1)
        self.assertEqual(
            iterator.getstate(),
            {
                "source_state": {"num_items_yielded": 0},
                "buffer": [None] * 4,
                "random_state": generator_state(1),
            },
        )
        next(iterator)
        generator = random.Random(1)
        slots = [None] * 4
        full = None
        read = 0
        while full is None:
            slot = generator.randrange(0, 4)
            full, slots[slot] = slots[slot], "abcdefgh"[read]
            read += 1
        self.assertEqual(
            iterator.getstate(),
            {
                "source_state": {"num_items_yielded": read},
                "buffer": slots,
                "random_state": generator.getstate(),
            },
        )

    def test_slots_that_hold_none_are_listed(self):
        iterator = its.BufferedShuffleIterator(Native([None] * 9), 4, 1)
        next(iterator)
        state = iterator.getstate()
        self.assertEqual(state["buffer"], [None] * 4)
        self.assertEqual(len(state["none_slots"]), state["source_state"]["num_items_yielded"] - 1)
        iterator.setstate(as_json(state))
        self.assertEqual(list(iterator), [None] * 8)

    def make_lists(self):
        return its.BufferedShuffleIterator(Native([[i] for i in range(6)]), 3, 1)

    def test_items_in_a_checkpoint_are_copies(self):
        expected = list(self.make_lists())
        iterator = self.make_lists()
        next(iterator)
        state = iterator.getstate()
        stored = copy.deepcopy(state)
        for _ in range(2):
            for item in iterator:
                item.append("changed")
            self.assertEqual(state, stored)
            iterator = self.make_lists()
            iterator.setstate(state)
        for item in state["buffer"]:
            if item is not None:
                item.append("changed")
        self.assertEqual(list(iterator), expected[1:])

    def test_yielded_items_may_be_changed(self):
        iterator = self.make_lists()
        for expected in buffered([[i] for i in range(6)], 3, 1):
            item = next(iterator)
            self.assertEqual(item, expected)
            item.append("changed")


# ---------------------------------------------------------------------------------------------------------------------
# Batching
# ---------------------------------------------------------------------------------------------------------------------


class TestFixedBatchIterator(Contract, unittest.TestCase):
    items = [[3, None], [4, 1], [5, 9], [2]]
    bad_arguments = bad_sources(lambda source: its.FixedBatchIterator(source, 1)) + bad_sizes(
        partial(its.FixedBatchIterator, Native([])), "batch_size"
    )

    def make(self, source=Native, call=nothing):
        return its.FixedBatchIterator(source([3, None, 4, 1, 5, 9, 2]), 2)

    def test_batches_of_any_size_are_consecutive_and_the_last_may_be_short(self):
        for length in (0, 1, 2, 6, 7):
            for size in (1, 2, 3, 6, 100):
                with self.subTest(length=length, size=size):
                    expected = [list(range(length))[i : i + size] for i in range(0, length, size)]
                    check_iterator(partial(over, its.FixedBatchIterator, range(length), size), expected, positions=4)

    def test_state_is_that_of_the_source(self):
        iterator = self.make()
        found = [iterator.getstate() for _ in iterator]
        self.assertEqual(found, [{"source_state": {"num_items_yielded": n}} for n in (2, 4, 6, 7)])

    def test_batches_may_be_changed(self):
        iterator = its.FixedBatchIterator(its.FixedBatchIterator(Native(range(8)), 2), 2)
        for expected in ([[0, 1], [2, 3]], [[4, 5], [6, 7]]):
            batches = next(iterator)
            self.assertEqual(batches, expected)
            batches[0].clear()
            batches.clear()

    def test_size_may_be_an_integer_of_another_type(self):
        class Integer:
            def __index__(self):
                return 2

        self.assertEqual(list(its.FixedBatchIterator(Native("abc"), Integer())), [["a", "b"], ["c"]])

    def test_source_is_read_to_the_end_of_the_batch_and_no_further(self):
        source = Native(range(100))
        iterator = its.FixedBatchIterator(source, 4)
        next(iterator)
        self.assertEqual(source.getstate(), {"num_items_yielded": 4})


def windows(items, width):
    return [tuple(items[i : i + width]) for i in range(len(items) - width + 1)]


class TestWindowedIterator(Contract, unittest.TestCase):
    items = [(3, None, 4), (None, 4, 1), (4, 1, 5), (1, 5, 9), (5, 9, 2), (9, 2, 6)]
    restored_at = 4
    bad_arguments = bad_sources(lambda source: its.WindowedIterator(source, 1)) + bad_sizes(
        partial(its.WindowedIterator, Native([])), "width"
    )

    def make(self, source=Native, call=nothing):
        return its.WindowedIterator(source([3, None, 4, 1, 5, 9, 2, 6]), 3)

    def test_windows_of_any_width_step_by_one(self):
        for length in (0, 1, 2, 6, 9):
            for width in (1, 2, 3, 6, 100):
                with self.subTest(length=length, width=width):
                    make = partial(over, its.WindowedIterator, range(length), width)
                    check_iterator(make, windows(range(length), width), positions=5)

    def test_long_and_wide_windows_step_by_one(self):
        for length, width in ((5000, 2), (2600, 1000), (2600, 1001), (2600, 2000), (2600, 2601)):
            with self.subTest(length=length, width=width):
                expected = windows(range(length), width)
                iterator = its.WindowedIterator(Native(range(length)), width)
                position = len(expected) * 2 // 3
                self.assertEqual(take(iterator, position), expected[:position])
                state = iterator.getstate()
                self.assertEqual(list(iterator), expected[position:])
                iterator.setstate(as_json(state))
                self.assertEqual(list(iterator), expected[position:])

    def test_state_is_the_source_before_a_run_and_the_items_after_that(self):
        iterator = self.make()
        for position in range(6):
            state = iterator.getstate()
            self.assertEqual(set(state), {"source_state", "item_index"})
            self.assertEqual(state["source_state"]["num_items_yielded"] + state["item_index"], position)
            next(iterator)

    def test_position_beyond_the_end_is_an_error_at_each_next(self):
        for make in (Native, Again, Own):
            iterator = its.WindowedIterator(make(range(8)) if make is not Again else Native(Again(range(8))), 3)
            state = skip(iterator, 1).getstate()
            iterator.setstate(dict(state, item_index=9))
            for _ in range(2):
                self.assertRaisesRegex(RuntimeError, "beyond the end.*9 items, it has 8", next, iterator)
            iterator.setstate(state)
            self.assertEqual(list(iterator), windows(range(8), 3)[1:])

    def test_a_copy_holds_no_state_that_it_does_not_need(self):
        iterator = its.WindowedIterator(its.RandomIterator(), 3)
        size = len(pickle.dumps(iterator))
        skip(iterator, 10)
        self.assertLess(len(pickle.dumps(iterator)), size + 1000)  # a generator's state takes more

    def test_restoring_reads_no_more_than_a_run(self):
        for iterable in (Recorded(range(30000)), Again(range(30000))):
            iterator = its.WindowedIterator(Native(iterable), 3)
            passed_over = []
            for _ in range(200):
                skip(iterator, 149)
                passed_over.append(iterator.getstate()["item_index"])
            self.assertLess(max(passed_over), 5000)
            state = iterator.getstate()
            expected = next(iterator)
            if isinstance(iterable, Recorded):
                del iterable.read[:]
            iterator.setstate(state)
            self.assertEqual(next(iterator), expected)
            if isinstance(iterable, Recorded):
                self.assertGreater(min(iterable.read), 25000)
                self.assertLess(len(iterable.read), 5000)


def bucketed(items, read_ahead, key, batch_size, boundary_key=None, shuffle=True, seed=0):
    generator = random.Random(seed)
    for first in range(0, len(items), read_ahead):
        window = list(items[first : first + read_ahead])
        if key is not None:
            window.sort(key=key, reverse=True)
        batches = []
        boundary = size = None
        for item in window:
            here = None if boundary_key is None else boundary_key(item)
            if not batches or len(batches[-1]) >= size or here != boundary:
                batches.append([])
                size = batch_size(item) if callable(batch_size) else batch_size
            boundary = here
            batches[-1].append(item)
        if shuffle:
            generator.shuffle(batches)
        yield from batches


WORDS = "a bbb cc dddd e ff gg hhhhh i jjj k ll mmm n oo".split()


def length_of(call, item):
    call()
    return len(item)


def fits_six(call, item):
    call()
    return 6 // len(item)


def parity(call, item):
    call()
    return ord(item[0]) % 2


class TestBucketedReadaheadBatchIterator(Contract, Seeded, unittest.TestCase):
    has_callbacks = True
    items = list(bucketed(WORDS, 6, len, partial(fits_six, nothing), partial(parity, nothing), True, 42))
    restored_at = 5
    bad_arguments = (
        bad_sources(lambda source: its.BucketedReadaheadBatchIterator(source, 1, len, 1))
        + bad_sizes(lambda size: its.BucketedReadaheadBatchIterator(Native([]), size, len, 1), "read_ahead")
        + bad_sizes(lambda size: its.BucketedReadaheadBatchIterator(Native([]), 1, len, size), "batch_size")
        + bad_functions(lambda key: its.BucketedReadaheadBatchIterator(Native([]), 1, key, 1), "key", none=False)
        + bad_functions(
            lambda key: its.BucketedReadaheadBatchIterator(Native([]), 1, None, 1, key), "boundary_key", none=False
        )
    )

    def make(self, source=Native, call=nothing):
        return its.BucketedReadaheadBatchIterator(
            source(WORDS), 6, partial(length_of, call), partial(fits_six, call), partial(parity, call), True, 42
        )

    def seeded(self, seed):
        return its.BucketedReadaheadBatchIterator(Native(WORDS), 10, len, 1, seed=seed)

    def reference(self, seed):
        return bucketed(WORDS, 10, len, 1, seed=seed)

    def test_example_worked_out_by_hand(self):
        items = ["a", "bbb", "cc", "ddd", "e", "ff", "g"]
        expected = [["bbb", "ddd"], ["cc", "ff"], ["a", "e"], ["g"]]
        check_iterator(lambda: its.BucketedReadaheadBatchIterator(Native(items), 6, len, 2, shuffle=False), expected)
        expected = [["a", "bbb"], ["cc", "ddd"], ["e", "ff"], ["g"]]
        check_iterator(lambda: its.BucketedReadaheadBatchIterator(Native(items), 6, None, 2, shuffle=False), expected)
        expected = [["bbb", "ddd"], ["cc", "ff", "a"], ["e"], ["g"]]
        check_iterator(
            lambda: its.BucketedReadaheadBatchIterator(Native(items), 6, len, lambda s: 6 // len(s), shuffle=False),
            expected,
        )

    def test_options_of_every_kind_give_the_reference(self):
        for read_ahead in (1, 4, 15, 100):
            for key in (None, len, lambda word: word):
                for batch_size in (1, 2, 100, lambda word: 5 // len(word), lambda word: 3.0):
                    for boundary_key in (None, lambda word: word < "g", lambda word: ord(word[0]) % 3):
                        for shuffle in (True, False):
                            options = (read_ahead, key, batch_size, boundary_key, shuffle, 9)
                            with self.subTest(options=options):
                                iterator = its.BucketedReadaheadBatchIterator(Native(WORDS), *options)
                                self.assertEqual(list(iterator), list(bucketed(WORDS, *options)))
                                iterator.setstate(None)
                                take(iterator, 3)
                                state = as_json(iterator.getstate())
                                expected = list(iterator)
                                iterator.setstate(state)
                                self.assertEqual(list(iterator), expected)

    def test_batch_size_may_be_infinite_for_no_limit(self):
        for size, expected in ((float("inf"), [WORDS[:6], WORDS[6:12]]), (float("nan"), [[word] for word in WORDS])):
            iterator = its.BucketedReadaheadBatchIterator(Native(WORDS), 6, None, lambda word: size, shuffle=False)
            self.assertEqual(take(iterator, len(expected)), expected)

    def test_empty_source_and_one_item(self):
        for items in ([], ["a"]):
            make = partial(over, its.BucketedReadaheadBatchIterator, items, 3, len, 2)
            check_iterator(make, [items] * len(items))

    def test_none_is_an_item(self):
        make = partial(over, its.BucketedReadaheadBatchIterator, [None, 1, None], 3, None, 2, shuffle=False)
        check_iterator(make, [[None, 1], [None]])

    def test_batch_size_below_one_counts_as_one(self):
        for size in (0, -5, 0.5):
            batch_size = {"a": size, "b": size}.get
            iterator = its.BucketedReadaheadBatchIterator(Native("ab"), 2, None, batch_size, shuffle=False)
            self.assertEqual(list(iterator), [["a"], ["b"]])

    def test_boundary_key_of_none_is_an_error_and_moves_nothing(self):
        iterator = its.BucketedReadaheadBatchIterator(Native("abcd"), 2, None, 2, {"a": 1, "b": 2, "c": 3}.get, False)
        self.assertEqual(take(iterator, 2), [["a"], ["b"]])
        state = iterator.getstate()
        for _ in range(2):
            self.assertRaisesRegex(ValueError, "boundary_key must not return None.*'d'", next, iterator)
            self.assertEqual(iterator.getstate(), state)

    def test_state_is_generator_and_source_before_the_window_and_the_batches_yielded(self):
        iterator = its.BucketedReadaheadBatchIterator(Native(range(10)), 4, None, 2, seed=42)
        generator = random.Random(42)
        start = iterator.getstate()
        self.assertEqual((start["source_state"], start["num_served"]), ({"num_items_yielded": 0}, 0))
        self.assertIn(start["random_state"], (None, generator.getstate()))
        next(iterator)
        self.assertEqual(
            iterator.getstate(),
            {"source_state": {"num_items_yielded": 0}, "random_state": generator.getstate(), "num_served": 1},
        )
        skip(iterator, 2)
        generator.shuffle([1, 2])
        self.assertEqual(
            iterator.getstate(),
            {"source_state": {"num_items_yielded": 4}, "random_state": generator.getstate(), "num_served": 1},
        )

    def test_state_has_no_generator_if_nothing_is_shuffled(self):
        iterator = its.BucketedReadaheadBatchIterator(Native(range(10)), 4, None, 2, shuffle=False)
        for _ in range(5):
            self.assertIsNone(iterator.getstate()["random_state"])
            next(iterator)

    def test_each_callback_is_called_once_for_what_it_judges(self):
        calls = collections.Counter()
        iterator = its.BucketedReadaheadBatchIterator(
            Native(WORDS),
            6,
            lambda word: calls.update(["key"]) or len(word),
            lambda word: calls.update(["batch_size"]) or 2,
            lambda word: calls.update(["boundary_key"]) or 1,
        )
        number = len(list(iterator))
        self.assertEqual(calls, {"key": len(WORDS), "boundary_key": len(WORDS), "batch_size": number})

    def test_more_batches_than_a_window_has_are_refused(self):
        iterator = skip(self.make(), 5)
        state = iterator.getstate()
        expected = list(copy.copy(iterator))
        with self.assertRaisesRegex(ValueError, "'num_served' must be at most read_ahead = 6, got 7"):
            iterator.setstate(dict(state, num_served=7))
        self.assertEqual(list(iterator), expected)
        iterator = its.BucketedReadaheadBatchIterator(Native("abcd"), 4, None, 2)
        iterator.setstate({"source_state": None, "random_state": None, "num_served": 3})
        for _ in range(2):
            self.assertRaisesRegex(RuntimeError, "beyond the end.*3 items, it has 2", next, iterator)

    def test_batches_may_be_changed(self):
        iterator = its.BucketedReadaheadBatchIterator(Native(range(8)), 4, None, 2, shuffle=False)
        states = []
        for expected in ([0, 1], [2, 3], [4, 5], [6, 7]):
            states.append((iterator.getstate(), list(expected)))
            batch = next(iterator)
            self.assertEqual(batch, expected)
            batch.clear()
        for state, expected in states:
            iterator.setstate(state)
            self.assertEqual(next(iterator), expected)


# ---------------------------------------------------------------------------------------------------------------------
# Combining
# ---------------------------------------------------------------------------------------------------------------------


class TestZipIterator(Contract, unittest.TestCase):
    items = [(3, "a", None), (1, None, 5), (4, "c", 6)]
    num_sources = 3
    bad_arguments = (
        bad_sources(its.ZipIterator, "source_iterators")
        + bad_sources(partial(its.ZipIterator, Native([])), "source_iterators")
        + [(its.ZipIterator, ValueError, "source_iterators must be at least 1, got 0")]
    )

    def make(self, source=Native, call=nothing):
        return its.ZipIterator(source([3, 1, 4, 1, 5]), source(["a", None, "c", "d"]), source([None, 5, 6]))

    @staticmethod
    def zipped(lengths):
        return its.ZipIterator(*[Native(range(length)) for length in lengths])

    def test_any_number_of_sources_goes_to_the_end_of_the_shortest(self):
        for lengths in ([0], [1], [3], [0, 2], [2, 0], [3, 3], [2, 4, 3], [4, 3, 2, 3]):
            with self.subTest(lengths=lengths):
                check_iterator(partial(self.zipped, lengths), list(zip(*map(range, lengths))))

    def test_state_is_that_of_the_sources(self):
        iterator = self.make()
        for position in range(3):
            expected = {"input_states": ({"num_items_yielded": position},) * 3}
            self.assertEqual(iterator.getstate(), expected)
            self.assertIs(type(iterator.getstate()["input_states"]), tuple)
            next(iterator)

    def test_constructor_leaves_the_sources_where_they_are(self):
        self.assertEqual(list(its.ZipIterator(skip(Native("abc"), 1), Native([1, 2, 3]))), [("b", 1), ("c", 2)])


class TestMultiplexIterator(Contract, unittest.TestCase):
    items = ["a", "x", None, "y", "b", "z"]
    num_sources = 4
    bad_arguments = (
        bad_sources(lambda value: its.MultiplexIterator(value, []), "control_iterator")
        + bad_sources(lambda value: its.MultiplexIterator(Native([]), [Native([]), value]), "source_iterators")
        + bad_source_lists(lambda value: its.MultiplexIterator(Native([]), value))
    )

    def make(self, source=Native, call=nothing):
        return its.MultiplexIterator(source([0, 1, 2, 1, 0, 1]), [source("abc"), source("xyz"), source([None])])

    def test_ends_with_the_control(self):
        check_iterator(lambda: its.MultiplexIterator(Native([]), [Native("ab")]), [])
        check_iterator(lambda: its.MultiplexIterator(Native([0]), [Native("ab")]), ["a"])

    def test_ends_when_the_source_that_is_asked_is_exhausted(self):
        for control, expected in (([1], []), ([0, 0, 0], ["a", "b"]), ([0, 1, 0], ["a"])):
            check_iterator(partial(self.multiplexed, control), expected)

    @staticmethod
    def multiplexed(control):
        return its.MultiplexIterator(Native(control), [Native("ab"), Native([])])

    def test_what_is_no_index_is_an_error_and_moves_nothing(self):
        for index, error in ((2, IndexError), (-3, IndexError), (None, TypeError), (0.0, TypeError), ("0", TypeError)):
            iterator = its.MultiplexIterator(Native([0, index, 1]), [Native("ab"), Native("xy")])
            next(iterator)
            state = iterator.getstate()
            pattern = "control_iterator must yield indices of 2 sources, got {!r}$".format(index)
            for ask in (True, True, False, False):
                with self.subTest(index=index), self.assertRaisesRegex(error, pattern):
                    next(iterator)
                if ask:
                    self.assertEqual(iterator.getstate(), state)

    def test_state_is_that_of_control_and_sources(self):
        iterator = skip(self.make(), 4)
        self.assertEqual(
            iterator.getstate(),
            {
                "control_iterator_state": {"num_items_yielded": 4},
                "source_iterator_states": [{"num_items_yielded": n} for n in (1, 2, 1)],
            },
        )

    def test_list_of_sources_changed_later_changes_nothing(self):
        sources = [Native("ab")]
        iterator = its.MultiplexIterator(Native([0, 0]), sources)
        sources.clear()
        self.assertEqual(list(iterator), ["a", "b"])

    def test_constructor_rewinds_control_and_sources(self):
        control, source = skip(Native([0, 0]), 1), skip(Native("ab"), 1)
        self.assertEqual(list(its.MultiplexIterator(control, [source])), ["a", "b"])


# ---------------------------------------------------------------------------------------------------------------------
# Working ahead, and in several processes
# ---------------------------------------------------------------------------------------------------------------------


class TestPrefetchIterator(Contract, unittest.TestCase):
    has_workers = True
    items = [3, None, 4, 1, 5, 9, 2]
    restored_at = 4
    bad_arguments = bad_sources(lambda source: its.PrefetchIterator(source, 1)) + bad_sizes(
        partial(its.PrefetchIterator, Native([])), "buffer_size"
    )

    def make(self, source=Native, call=nothing):
        return its.PrefetchIterator(source(self.items), 3)

    def test_buffers_of_any_size_give_the_same_items(self):
        for length in (0, 1, 5):
            for size in (1, 2, 5, 100):
                with self.subTest(length=length, size=size):
                    with its.PrefetchIterator(Native(range(length)), size) as iterator:
                        self.assertEqual(list(iterator), list(range(length)))

    def test_state_is_the_source_every_buffer_size_items_and_the_items_since(self):
        iterator = self.build()
        found = []
        for _ in range(7):
            state = iterator.getstate()
            self.assertEqual(set(state), {"source_state", "item_offset"})
            found.append((state["source_state"] or {"num_items_yielded": 0}, state["item_offset"]))
            next(iterator)
        self.assertEqual([state["num_items_yielded"] + offset for state, offset in found], list(range(7)))
        self.assertEqual([state["num_items_yielded"] for state, _ in found][1:3], [0, 0])
        self.assertEqual([state["num_items_yielded"] for state, _ in found][4:6], [3, 3])

    def test_equal_positions_give_equal_checkpoints(self):
        first, second = self.build(), self.build()
        for _ in range(7):
            self.assertEqual(first.getstate(), second.getstate())
            self.assertEqual(next(first), next(second))

    def test_position_beyond_the_end_is_an_error_at_each_next(self):
        iterator = self.build()
        for offset in (8, 99):
            iterator.setstate({"source_state": None, "item_offset": offset})
            for _ in range(2):
                self.assertRaisesRegex(
                    RuntimeError, "beyond the end.*{} items, it has 7".format(offset), next, iterator
                )
        iterator.setstate(None)
        self.assertEqual(list(iterator), self.items)

    def test_options_of_0_1_1_are_accepted(self):
        with its.PrefetchIterator(Native("ab"), 1, True, True) as iterator:
            self.assertEqual(list(iterator), ["a", "b"])


class TestParallelMapIterator(Contract, unittest.TestCase):
    has_workers = True
    items = TestMapIterator.items
    has_callbacks = True
    restored_at = 3
    bad_arguments = (
        bad_sources(lambda source: its.ParallelMapIterator(source, len, 1, 1))
        + bad_functions(lambda value: its.ParallelMapIterator(Native([]), value, 1, 1), "transform")
        + bad_sizes(lambda value: its.ParallelMapIterator(Native([]), len, value, 1), "num_processes")
        + bad_sizes(lambda value: its.ParallelMapIterator(Native([]), len, 1, value), "num_items_per_process")
    )

    def make(self, source=Native, call=nothing):
        items = ["a", "bc", "x", "", "def", "x", None]
        return its.ParallelMapIterator(source(items), partial(number_or_none, call), 2, 2)

    def test_blocks_of_any_size_keep_the_order(self):
        for length in (0, 1, 5):
            for processes, number in ((1, 1), (1, 3), (3, 1), (2, 100)):
                with self.subTest(length=length, processes=processes, number=number):
                    with its.ParallelMapIterator(Native(range(length)), str, processes, number) as iterator:
                        self.assertEqual(list(iterator), list(map(str, range(length))))

    def test_state_is_the_source_before_the_block_and_the_items_yielded_of_it(self):
        iterator = self.build()
        for position in range(7):
            state = iterator.getstate()
            source_state = state["source_state"] and state["source_state"]["source_state"]
            number = source_state["num_items_yielded"] if source_state else 0
            self.assertEqual(number + state["flattened_items_yielded"], position)
            if position % 4:
                self.assertEqual(number, position // 4 * 4)
            next(iterator)


# ---------------------------------------------------------------------------------------------------------------------
# Users' own classes, and pipelines as a whole
# ---------------------------------------------------------------------------------------------------------------------


class Shouting(its.MapIterator):
    """Overrides `__next__` alone."""

    def __next__(self):
        return self._transform(next(self._source_iterator)) + "!"


class Repeating(its.InfinitePermutationSourceIterator):
    """Does without the constructor."""

    def __init__(self, items, shuffle=True, seed=5, num_instances=1, instance_rank=0):
        self._source_items = items
        self._shuffle = shuffle
        self._seed = seed
        self._num_instances = num_instances
        self._instance_rank = instance_rank
        self.setstate(None)


class Doubling(its.CheckpointableIterator):
    """Holds a source of the library's own, and yields each of its items twice."""

    def __init__(self, source):
        self.source = source
        self.setstate(None)

    def getstate(self):
        return {"before": copy.deepcopy(self.before), "given": self.given}

    def setstate(self, checkpoint):
        self.before, self.given = (None, 0) if checkpoint is None else (checkpoint["before"], checkpoint["given"])
        self.source.setstate(self.before)
        self.item = [next(self.source)] if self.given else []

    def __next__(self):
        if not self.item:
            before = self.source.getstate()
            self.item = [next(self.source)]
            self.before, self.given = before, 1
        else:
            self.given += 1
        item = self.item[0]
        if self.given == 2:
            self.before, self.given, self.item = self.source.getstate(), 0, []
        return item

    def close(self):
        self.source.close()


class Restarting(Own):
    """Starts again after its end."""

    def __next__(self):
        try:
            return super().__next__()
        except StopIteration:
            self.setstate(None)
            raise


class SharingItsState(Own):
    """Gives its live state away, and keeps that which it is given."""

    def getstate(self):
        return self.state

    def setstate(self, checkpoint):
        self.state = {"own": [0]} if checkpoint is None else checkpoint

    @property
    def n(self):
        return self.state["own"][0]

    @n.setter
    def n(self, value):
        self.state["own"][0] = value


class TestUsersOwnClasses(unittest.TestCase):
    def over(self, make_source, call=nothing):
        """Return pipelines over a source of strings, by name."""
        return {
            "map": lambda: its.MapIterator(make_source(), partial(called, call)),
            "batch": lambda: its.FixedBatchIterator(make_source(), 2),
            "shuffled batches": lambda: its.BlockwiseShuffleIterator(its.FixedBatchIterator(make_source(), 2), 2),
            "windows": lambda: its.WindowedIterator(make_source(), 2),
            "buffer": lambda: its.BufferedShuffleIterator(make_source(), 2),
            "buckets": lambda: its.BucketedReadaheadBatchIterator(make_source(), 4, len, 2),
            "sums": lambda: its.RecurrentIterator(make_source(), partial(collect, call), []),
            "zip": lambda: its.ZipIterator(make_source(), make_source()),
            "flat": lambda: its.SelectManyIterator(make_source()),
        }

    def check_over(self, make_source, items, names=None):
        """Check that pipelines give what they give over a source of the library's own."""
        references = self.over(lambda: Native(items))
        for name, make in self.over(make_source).items():
            if names is None or name in names:
                with self.subTest(name):
                    expected = list(references[name]())
                    self.assertTrue(expected)
                    check_iterator(make, expected, positions=5)

    def test_map_that_overrides_next_alone_is_what_its_next_says(self):
        expected = ["A!", "BB!", "C!", "DD!", "E!"]
        items = ["a", "bb", "c", "dd", "e"]
        check_iterator(lambda: Shouting(Native(items), str.upper), expected, pickles=True)
        check_iterator(lambda: Shouting(Own(items), str.upper), expected, pickles=True)
        self.check_over(lambda: Shouting(Native(items), str.upper), expected)
        self.check_over(lambda: Shouting(Own(items), str.upper), expected)

    def test_map_that_overrides_next_alone_may_be_stacked(self):
        check_iterator(
            lambda: its.FixedBatchIterator(Shouting(Shouting(Native("abc"), str.upper), str.lower), 2),
            [["a!!", "b!!"], ["c!!"]],
        )

    def test_another_iterator_from_iter_is_never_asked_for(self):
        class Loud(its.NativeCheckpointableIterator):
            def __iter__(self):
                return iter(["wrong"] * 9)

        self.check_over(lambda: Loud(["a", "bb", "c"]), ["a", "bb", "c"])
        for name, make in {
            "filter": lambda source: its.FilterIterator(source, str.islower),
            "draws": lambda source: its.SamplingRandomMapIterator(source, lambda rng, item: item + str(rng.random())),
            "packs": lambda source: its.PackIterator(source, 3),
            "mix": lambda source: its.MixIterator([source]),
            "chain": its.ChainIterator,
            "multiplex": lambda source: its.MultiplexIterator(Native([0, 0]), [source]),
            "take": lambda source: its.TakeIterator(source, 3),
            "numbers": its.EnumerateIterator,
            "ahead": lambda source: its.PrefetchIterator(source, 2, start="thread"),
            "shards": lambda source: its.ShardedIterator(lambda number, shard: source, 1),
        }.items():
            with self.subTest(name):
                self.assertEqual(take(make(Loud(["a", "bb", "c"])), 9), take(make(Native(["a", "bb", "c"])), 9))

    def test_permutations_without_the_constructor(self):
        expected = take(permutations("abcd", 5), 10)
        check_iterator(lambda: Repeating(list("abcd")), expected, take=10, pickles=True)
        batches = [expected[i : i + 2] for i in range(0, 10, 2)]
        check_iterator(lambda: its.FixedBatchIterator(Repeating(list("abcd")), 2), batches, take=5)
        for number, rank in ((2, 1), (9, 8)):
            make = partial(Repeating, list("abcd"), True, 5, number, rank)
            check_iterator(make, take(permutations("abcd", 5, number, rank), 10), take=10, positions=4)
        check_iterator(lambda: Repeating(list("abc"), shuffle=False), list("abcabcab"), take=8)
        self.assertIn("Repeating(source_items=['a', 'b']", repr(Repeating(["a", "b"])))

    def test_permutations_without_the_constructor_and_a_seed(self):
        first, second = [Repeating(list(range(20)), seed=None) for _ in range(2)]
        state = first.getstate()
        items = take(first)
        self.assertNotEqual(take(second), items)
        first.setstate(None)
        self.assertEqual(take(first), items)
        second.setstate(as_json(state))
        self.assertEqual(take(second), items)

    def test_own_class_may_hold_the_librarys_iterators(self):
        def make_source():
            return Doubling(its.BlockwiseShuffleIterator(Native("abc"), 2))

        expected = [item for item in blockwise("abc", 2, 0) for _ in range(2)]
        check_iterator(make_source, expected)
        self.check_over(make_source, expected, ["batch", "shuffled batches", "sums"])

    def test_end_of_an_own_class_that_starts_again_is_the_end(self):
        references = self.over(lambda: Native("abcde"))
        for name, make in self.over(lambda: Restarting("abcde")).items():
            with self.subTest(name):
                iterator = make()
                self.assertEqual(take(iterator), list(references[name]()))
                self.assertEqual([take(iterator) for _ in range(3)], [[], [], []])

    def test_state_that_an_own_class_shares_is_copied(self):
        self.check_over(lambda: SharingItsState("abcde"), "abcde")

    def test_own_class_may_read_itself_from_another_object(self):
        source = Own("abc")
        self.assertIsNot(iter(source), source)
        self.assertEqual(list(its.MapIterator(source, str.upper)), ["A", "B", "C"])
        self.assertEqual(source.log["iter"], 1)  # the one above

    def test_failing_setstate_deep_in_a_tree_leaves_the_whole_tree(self):
        sources = Sources(Own)

        def branch(items):
            return its.BlockwiseShuffleIterator(its.MapIterator(sources(items), str.upper), 2, 1)

        iterator = its.FixedBatchIterator(its.ZipIterator(branch("abcdef"), branch("uvwxyz"), Native(range(6))), 2)
        first = iterator.getstate()
        next(iterator)
        before, expected = iterator.getstate(), list(copy.deepcopy(iterator))
        for source in sources.made:
            for checkpoint in (first, None):
                source.refuse = 1
                self.assertRaisesRegex(LookupError, "refused", iterator.setstate, checkpoint)
                self.assertEqual(iterator.getstate(), before)
        self.assertEqual(list(iterator), expected)
        iterator.setstate(first)
        self.assertEqual(list(iterator)[1:], expected)

    def test_setstate_leads_away_from_a_source_that_fails_for_good(self):
        class Failing(Own):
            """Fails from one item on, until it is set to another position."""

            failed = False

            def setstate(self, checkpoint):
                super().setstate(checkpoint)
                self.failed = False

            def __next__(self):
                self.failed = self.failed or self.n == 3
                if self.failed:
                    raise OSError("the connection is lost")
                return super().__next__()

        for name, make in self.over(lambda: Failing("abcde")).items():
            with self.subTest(name), make() as iterator:
                first = iterator.getstate()
                items = []
                with self.assertRaisesRegex(OSError, "the connection is lost"):
                    items.extend(iterator)
                for checkpoint in (first, None):
                    iterator.setstate(checkpoint)
                    self.assertEqual(iterator.getstate(), first)


class TestTrees(unittest.TestCase):
    """A checkpoint with something wrong deep in one branch must move no other branch."""

    stages = {
        "native": lambda source: source,
        "map": lambda source: its.MapIterator(source, abs),
        "own map": lambda source: Shouting(source, str),
        "filter": lambda source: its.FilterIterator(source, bool),
        "flat": lambda source: its.SelectManyIterator(source, lambda item: [item]),
        "sum": lambda source: its.RecurrentIterator(source, lambda state, item: (state + 1, item), 0),
        "sampling": lambda source: its.SamplingRandomMapIterator(source, lambda generator, item: item),
        "blocks": lambda source: its.BlockwiseShuffleIterator(source, 3),
        "buffer": lambda source: its.BufferedShuffleIterator(source, 3),
        "batches": lambda source: its.FixedBatchIterator(source, 2),
        "windows": lambda source: its.WindowedIterator(source, 2),
        "buckets": lambda source: its.BucketedReadaheadBatchIterator(source, 4, None, 2),
        "zip": lambda source: its.ZipIterator(source, its.RandomIterator()),
        "multiplex": lambda source: its.MultiplexIterator(Native([0] * 8), [source]),
        "mix": lambda source: its.MixIterator([source, its.RandomIterator()]),
        "chain": lambda source: its.ChainIterator(source, its.RandomIterator()),
        "pack": lambda source: its.PackIterator(its.MapIterator(source, lambda item: [item]), 2),
        "take": lambda source: its.TakeIterator(source, 6),
        "enumerate": its.EnumerateIterator,
        "prefetch": lambda source: its.PrefetchIterator(source, 3),
        "parallel": lambda source: its.ParallelMapIterator(source, abs, 1, 2),
        "parallel flat": lambda source: its.ParallelSelectManyIterator(source, lambda item: [item], 1),
    }

    def test_damage_deep_in_one_branch_moves_no_other(self):
        for name, stage in self.stages.items():
            for make in (its.ZipIterator, self.multiplexed):
                with make(Native(range(9)), stage(Native(range(10, 18)))) as tree:
                    next(tree)
                    state = tree.getstate()
                    next(tree)
                    before = tree.getstate()
                    paths = [path for path, _ in nodes(state) if path[-1] == "num_items_yielded" and path[1] == 1]
                    self.assertTrue(paths)
                    for path in paths:
                        with self.subTest(name, make=make, path=path):
                            for wrong in ("x", -1):
                                damaged = replaced(state, path, wrong)
                                self.assertRaisesRegex(ValueError, "num_items_yielded", tree.setstate, damaged)
                                self.assertEqual(tree.getstate(), before)

    def multiplexed(self, *sources):
        return its.MultiplexIterator(Native([0, 1] * 5), sources)


class TestInterrupts(unittest.TestCase):
    def test_interrupted_shuffle_is_done_again(self):
        words = [str(i) for i in range(12)]
        for name, make in (
            ("permutations", lambda: its.InfinitePermutationSourceIterator(words, 3)),
            ("blocks", lambda: its.BlockwiseShuffleIterator(Native(words), 5, 3)),
            ("batches", lambda: its.BucketedReadaheadBatchIterator(Native(words), 5, len, 1, seed=3)),
        ):
            expected = take(make(), 12)
            interrupts = 0
            for line in range(1, 200):
                with self.subTest(name, line=line):
                    iterator = make()
                    items = []
                    try:
                        with interrupt_at(line, its._shuffled.__code__):
                            items.append(next(iterator))
                    except KeyboardInterrupt:
                        interrupts += 1
                        other = make()
                        other.setstate(iterator.getstate())
                        self.assertEqual(take(other, 12), expected)
                    self.assertEqual(items + take(iterator, 12 - len(items)), expected)
            self.assertGreater(interrupts, 10)


class interrupt_at:
    """Raise KeyboardInterrupt at the so-and-so-many-th line that runs of a function."""

    def __init__(self, line, code):
        self.left, self.code = line, code

    def trace(self, frame, event, arg):
        if frame.f_code is not self.code:
            return None
        if event == "line":
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
        return self.trace

    def __enter__(self):
        self.previous = sys.gettrace()
        sys.settrace(self.trace)

    def __exit__(self, *error):
        sys.settrace(self.previous)


class Wide:
    """An item that cannot be copied or pickled."""

    def __reduce_ex__(self, protocol):
        raise AssertionError("an item must not be copied")


def wide_chunk(number):
    return [Wide() for _ in range(number)]


def weight(item):
    return 1


def draw(generator, item):
    return generator.random()


def count(state, item):
    return state + 1, state


class TestSizesBeyondEveryData(unittest.TestCase):
    def test_take_in_all_the_data(self):
        def source():  # of generators, whose items are counted in C
            return its.SelectManyIterator(Native([3, 4]), lambda number: (i for i in range(number)))

        items = list(source())
        for size in (sys.maxsize, 10**30):
            for make, expected in (
                (lambda: its.FixedBatchIterator(source(), size), [items]),
                (lambda: its.WindowedIterator(source(), size), []),
                (lambda: its.TakeIterator(source(), size), items),
                (lambda: its.PackIterator(its.FixedBatchIterator(source(), 2), size), [items]),
                (lambda: its.BucketedReadaheadBatchIterator(source(), size, None, size), [items]),
                (lambda: its.BlockwiseShuffleIterator(its.FixedBatchIterator(source(), size), size), [items]),
            ):
                with self.subTest(size=size, pipeline=repr(make())):
                    check_iterator(make, expected)
            with self.subTest(size=size):
                self.assertEqual(sorted(its.BlockwiseShuffleIterator(source(), size)), sorted(items))
                iterator = source()
                iterator.setstate({"source_state": None, "flattened_items_yielded": size})
                with self.assertRaisesRegex(RuntimeError, "beyond the end of the data"):
                    next(iterator)


class TestSeveralThreads(unittest.TestCase):
    def test_reading_one_pipeline_do_not_hang(self):
        # They may get errors; each must come to an end, and the pipeline be usable behind.
        iterator = its.FixedBatchIterator(
            its.SelectManyIterator(its.InfinitePermutationSourceIterator(range(9)), lambda n: iter(range(n * 50))), 4
        )

        def read():
            for _ in range(20000):
                with contextlib.suppress(Exception):
                    next(iterator)

        interval = sys.getswitchinterval()
        self.addCleanup(sys.setswitchinterval, interval)
        sys.setswitchinterval(1e-5)
        threads = [threading.Thread(target=read, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            self.assertFalse(thread.is_alive())
        iterator.setstate(None)
        self.assertEqual(len(next(iterator)), 4)


class TestPickles(unittest.TestCase):
    def test_pickle_holds_configuration_and_state_and_no_block_of_items(self):
        def source():
            return its.SelectManyIterator(Native([500] * 10), wide_chunk)

        for make in (
            source,
            lambda: its.MapIterator(source(), weight),
            lambda: its.BlockwiseShuffleIterator(source(), 1000),
            lambda: its.FixedBatchIterator(source(), 700),
            lambda: its.WindowedIterator(source(), 700),
            lambda: its.BucketedReadaheadBatchIterator(source(), 1000, weight, 10),
            lambda: its.ZipIterator(source(), source()),
            lambda: its.MultiplexIterator(Native([0] * 5), [source()]),
            lambda: its.SamplingRandomMapIterator(source(), draw),
            lambda: its.RecurrentIterator(source(), count, 0),
        ):
            with self.subTest(pipeline=repr(make())):
                iterator = skip(make(), 3)
                number = sum(1 for _ in pickle.loads(pickle.dumps(iterator)))
                self.assertLess(len(pickle.dumps(iterator)), 20000)
                self.assertEqual(sum(1 for _ in iterator), number)

    def test_pickle_does_not_grow_with_the_position(self):
        iterator = its.BlockwiseShuffleIterator(its.InfinitePermutationSourceIterator(range(1000), 1), 100, 2)
        sizes = []
        for _ in range(3):
            sizes.append(len(pickle.dumps(iterator)))
            skip(iterator, 950)
        self.assertLess(max(sizes), 20000)


if __name__ == "__main__":
    unittest.main()
