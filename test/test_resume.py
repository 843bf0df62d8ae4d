"""
Going on from a checkpoint, as training jobs do it: whole pipelines, and what users of data loaders saw go wrong.
"""

import bz2
import contextlib
import copy
import gzip
import io
import json
import lzma
import os
import pickle
import random
import subprocess
import sys
import tempfile
import unittest
import warnings
from functools import partial
from itertools import chain, islice

from infinibatch import iterators as its
from infinibatch import readers
from infinibatch.datasets import chunked_dataset_iterator
from infinibatch.testing import check_iterator

Native = its.NativeCheckpointableIterator

NUM_CHUNKS, CHUNK_SIZE = 100, 20


def take(iterator, number):
    return list(islice(iterator, number))


def as_json(state):
    return json.loads(json.dumps(state))


def as_pickle(state):
    return pickle.loads(pickle.dumps(state))


class Chunks:
    """Chunks of numbers, and a record of those that were read and of how many items came out."""

    def __init__(self, num_chunks=NUM_CHUNKS, chunk_size=CHUNK_SIZE, kind=list):
        self.refs = ["chunk-{}".format(i) for i in range(num_chunks)]
        self.chunk_size, self.kind = chunk_size, kind
        self.opened = []
        self.num_items = 0

    def read(self, ref):
        self.opened.append(ref)
        return self.kind(self.items(int(ref.split("-")[1])))

    def items(self, number):
        for i in range(number * self.chunk_size, (number + 1) * self.chunk_size):
            self.num_items += 1
            yield i


def training(chunks, buffer_size=50, **options):
    """Build the pipeline of a training run: chunks, lines in random order, batches of lines of like length."""
    items = chunked_dataset_iterator(chunks.refs, chunks.read, buffer_size, seed=7, **options)
    return its.BucketedReadaheadBatchIterator(items, 30, key=lambda i: i % 17, batch_size=4, seed=8)


def text_pipeline():
    """Build a pipeline whose items and seeds are text, and whose states have every form."""
    words = its.InfinitePermutationSourceIterator(["word {}".format(i) for i in range(30)], seed="seed")
    pairs = its.SelectManyIterator(words, lambda word: {word: 0, word.upper(): 1})
    shuffled = its.BufferedShuffleIterator(its.BlockwiseShuffleIterator(pairs, 7, b"seed"), 5, 2.5)
    noisy = its.SamplingRandomMapIterator(shuffled, lambda generator, word: [word, generator.gauss(0, 1)], -3)
    counted = its.RecurrentIterator(noisy, count, {"number": 0})
    batches = its.FixedBatchIterator(its.ZipIterator(counted, its.RandomIterator(2**100)), 3)
    return its.WindowedIterator(batches, 2)


def count(state, item):
    state["number"] += 1
    return state, [state["number"], item]


def continue_text_pipeline():
    """Read a checkpoint from standard input and write the items that come next: what another process runs."""
    pipeline = text_pipeline()
    pipeline.setstate(json.load(sys.stdin))
    json.dump(take(pipeline, 40), sys.stdout)


class TestEveryPosition(unittest.TestCase):
    def test_state_of_no_or_one_item_before_does_not_disturb_a_restore(self):
        reference = take(training(Chunks()), 12)
        used = training(Chunks())
        take(used, 5)
        state = used.getstate()
        for number_read, number_asked in ((0, 1), (0, 2), (1, 0), (1, 1), (1, 2)):
            with self.subTest(number_read=number_read, number_asked=number_asked):
                pipeline = training(Chunks())
                take(pipeline, number_read)
                for _ in range(number_asked):
                    pipeline.getstate()
                pipeline.setstate(state)
                self.assertEqual(take(pipeline, 7), reference[5:])

    def test_state_from_before_the_first_item_gives_the_same_blocks(self):
        for make in (
            lambda: its.BlockwiseShuffleIterator(Native(range(10)), 5, 42),
            lambda: its.BufferedShuffleIterator(Native(range(10)), 5, 42),
            lambda: its.BucketedReadaheadBatchIterator(Native(range(10)), 5, None, 1, seed=42),
        ):
            expected = list(make())
            self.assertNotEqual(expected[:5], sorted(expected[:5]))
            pipeline = make()
            pipeline.setstate(make().getstate())
            self.assertEqual(list(pipeline), expected)

    def test_items_that_wait_in_a_large_buffer_are_not_lost(self):
        for use_windowed in (False, True):
            for kind in (list, iter):
                options = {"num_chunks": 1, "chunk_size": 12, "kind": kind}
                for position in range(13):
                    with self.subTest(use_windowed=use_windowed, kind=kind, position=position):
                        pipeline, resumed = [self.one_chunk(use_windowed, Chunks(**options)) for _ in range(2)]
                        before = take(pipeline, position)
                        resumed.setstate(as_json(pipeline.getstate()))
                        after = list(resumed)
                        self.assertEqual(sorted(before + after), list(range(12)))
                        self.assertEqual(after, list(pipeline))

    def one_chunk(self, use_windowed, chunks):
        kind = its.BufferedShuffleIterator if use_windowed else its.BlockwiseShuffleIterator
        return kind(its.SelectManyIterator(Native(chunks.refs), chunks.read), 1000, 3)

    def test_state_of_a_later_epoch_does_not_replay_the_first(self):
        items = take(its.InfinitePermutationSourceIterator(range(10), seed=3), 40)
        pipeline = its.InfinitePermutationSourceIterator(range(10), seed=3)
        take(pipeline, 17)
        resumed = its.InfinitePermutationSourceIterator(range(10), seed=3)
        resumed.setstate(as_json(pipeline.getstate()))
        after = take(resumed, 13)
        self.assertEqual(after, items[17:30])
        self.assertNotEqual(after[:3], items[7:10])

    def test_state_on_an_epoch_boundary_starts_the_next_epoch(self):
        items = take(its.InfinitePermutationSourceIterator("abcdef", seed=3), 24)
        for position in (6, 12):
            pipeline = its.InfinitePermutationSourceIterator("abcdef", seed=3)
            take(pipeline, position)
            resumed = its.InfinitePermutationSourceIterator("abcdef", seed=3)
            resumed.setstate(pipeline.getstate())
            self.assertEqual(take(resumed, 12), items[position : position + 12])
            self.assertNotEqual(items[position : position + 6], items[:6])

    def test_selector_that_drops_items_restores_everywhere(self):
        def make():
            items = its.SelectManyIterator(Native(range(30)), lambda i: [i] if i % 3 == 1 else [])
            return its.MapIterator(items, str)

        check_iterator(make, [str(i) for i in range(1, 30, 3)])

    def test_number_of_batches_before_and_after_is_that_of_all(self):
        for name, make in (
            ("fixed", lambda: its.FixedBatchIterator(Native(range(23)), 4)),
            ("bucketed", lambda: its.BucketedReadaheadBatchIterator(Native(range(23)), 9, lambda i: i % 5, 4)),
            (
                "bucketed by size",
                lambda: its.BucketedReadaheadBatchIterator(Native(range(23)), 9, None, lambda i: 12 // (i + 1)),
            ),
        ):
            total = len(list(make()))
            for position in range(total + 1):
                with self.subTest(name, position=position):
                    pipeline, resumed = make(), make()
                    take(pipeline, position)
                    resumed.setstate(pipeline.getstate())
                    self.assertEqual(position + len(list(resumed)), total)

    def test_nothing_is_lost_or_repeated_whatever_the_sizes(self):
        rng = random.Random(5)
        for _ in range(300):
            seed, buffer_size, batch_size = rng.randrange(1000), rng.choice([1, 2, 5, 16, 100]), rng.randint(1, 6)
            kind = rng.choice([its.BlockwiseShuffleIterator, its.BufferedShuffleIterator])
            chunk_sizes = [rng.randrange(8) for _ in range(rng.randrange(8))]
            number = sum(chunk_sizes)

            def make(seed=seed, buffer_size=buffer_size, batch_size=batch_size, kind=kind, chunk_sizes=chunk_sizes):
                ends = [sum(chunk_sizes[: i + 1]) for i in range(len(chunk_sizes))]
                ranges = Native([range(end - size, end) for size, end in zip(chunk_sizes, ends)])
                items = kind(its.SelectManyIterator(ranges), buffer_size, seed)
                return its.FixedBatchIterator(its.MapIterator(items, abs), batch_size)

            position = rng.randint(0, -(-number // batch_size))
            with self.subTest(pipeline=repr(make()), position=position):
                pipeline, resumed = make(), make()
                before = take(pipeline, position)
                resumed.setstate(as_json(pipeline.getstate()))
                after = list(resumed)
                self.assertEqual(sorted(chain(*before, *after)), list(range(number)))
                self.assertEqual(after, list(pipeline))


class TestStored(unittest.TestCase):
    """Ways by which a checkpoint travels."""

    def test_states_survive_copying_pickle_and_json(self):
        for position in (0, 1, 13):
            pipeline = text_pipeline()
            take(pipeline, position)
            state = pipeline.getstate()
            expected = take(pipeline, 20)
            for stored in (state, copy.deepcopy(state), copy.copy(state), as_pickle(state), as_json(state)):
                resumed = text_pipeline()
                resumed.setstate(stored)
                self.assertEqual(as_json(take(resumed, 20)), as_json(expected))

    def test_restoring_from_json_says_nothing(self):
        pipeline = text_pipeline()
        take(pipeline, 5)
        state = as_json(pipeline.getstate())
        expected = take(pipeline, 20)
        output = io.StringIO()
        with warnings.catch_warnings(), contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
            warnings.simplefilter("error")
            resumed = text_pipeline()
            resumed.setstate(state)
            self.assertEqual(as_json(take(resumed, 20)), as_json(expected))
        self.assertEqual(output.getvalue(), "")

    def test_another_process_with_another_hash_seed_goes_on(self):
        pipeline = text_pipeline()
        take(pipeline, 13)
        stored = json.dumps(pipeline.getstate())
        expected = take(pipeline, 40)
        here = os.path.dirname(os.path.abspath(__file__))
        for hash_seed in ("1", "2"):
            process = subprocess.Popen(
                [sys.executable, "-c", "import test_resume; test_resume.continue_text_pipeline()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                universal_newlines=True,
                env=dict(
                    os.environ, PYTHONHASHSEED=hash_seed, PYTHONPATH=os.pathsep.join([os.path.dirname(here), here])
                ),
            )
            output, _ = process.communicate(stored, timeout=120)
            self.assertEqual(process.returncode, 0)
            self.assertEqual(json.loads(output), as_json(expected))

    def test_state_that_lost_a_key_on_its_way_is_refused_by_iterator_and_key(self):
        pipeline = training(Chunks())
        take(pipeline, 5)
        state = pipeline.getstate()
        inner = {name: value for name, value in state["source_state"].items() if name != "flattened_items_yielded"}
        for damaged, stage, key in (
            ({name: value for name, value in state.items() if name != "num_served"}, "Bucketed", "num_served"),
            (dict(state, source_state=inner), "BlockwiseShuffle", "flattened_items_yielded"),
            (dict(state, source_state={}), "BlockwiseShuffle", "source_state"),
        ):
            with self.subTest(key=key):
                with self.assertRaisesRegex(ValueError, "checkpoint of {}.* lacks the key '{}'".format(stage, key)):
                    pipeline.setstate(damaged)


class TestAnotherPipeline(unittest.TestCase):
    """Checkpoints that do not fit."""

    def refused(self, state, pipeline, pattern, error=ValueError):
        expected = take(copy.deepcopy(pipeline), 20)
        with self.assertRaisesRegex(error, pattern):
            pipeline.setstate(state)
        self.assertEqual(take(pipeline, 20), expected)

    def made(self, refs, position=0, **options):
        chunks = Chunks()
        options.setdefault("seed", 1)
        pipeline = chunked_dataset_iterator(refs, chunks.read, 5, **options)
        take(pipeline, position)
        return pipeline

    def test_state_of_another_data_set_is_refused(self):
        refs = Chunks().refs
        finite = {"train": False, "shuffle": False}
        for options in ({}, finite):
            for position in (0, 7):
                with self.subTest(options=options, position=position):
                    state = self.made(refs[:10], position, **options).getstate()
                    self.refused(state, self.made(refs[:3], 2, **options), "a list of 10 items, here it is 3")
                    self.refused(state, self.made(refs[10:20], 2, **options), "a list of items with other names")

    def test_state_of_a_longer_data_set_that_does_not_say_so_is_no_end_of_the_data(self):
        for sequence in (range(10), dict.fromkeys(range(10))):
            shorter = type(sequence)(3) if isinstance(sequence, range) else dict.fromkeys(range(3))
            pipeline = Native(sequence)
            take(pipeline, 7)
            resumed = Native(shorter)
            with self.assertRaisesRegex(RuntimeError, "beyond the end of the data.*cannot pass over 7 items, it has 3"):
                resumed.setstate(pipeline.getstate())
                next(resumed)

    def test_state_of_another_number_of_instances_is_refused_with_both_numbers_and_the_way_out(self):
        refs = Chunks().refs[:10]
        for options in ({}, {"train": False, "shuffle": False}):
            for position in (0, 7):
                with self.subTest(options=options, position=position):
                    state = self.made(refs, position, num_instances=2, **options).getstate()
                    pipeline = self.made(refs, 2, num_instances=4, **options)
                    self.refused(as_json(state), pipeline, "num_instances = 2, here it is 4.*ShardedIterator")

    def test_state_of_rank_0_for_all_ranks_is_refused(self):
        refs = Chunks().refs[:10]
        for options in ({}, {"train": False, "shuffle": False}):
            with self.subTest(options=options):
                first, second = [
                    self.made(refs, 7, num_instances=2, instance_rank=rank, **options) for rank in range(2)
                ]
                self.refused(first.getstate(), second, "instance_rank = 0, here it is 1")
                own = self.made(refs, num_instances=2, instance_rank=0, **options)
                own.setstate(first.getstate())
                number = (len(refs) // 2) * CHUNK_SIZE - 7 - 20  # up to the end of the first epoch
                self.assertEqual(set(take(own, number)) & set(take(second, number)), set())

    def test_state_of_another_kind_of_pipeline_is_refused(self):
        finite = self.made(Chunks().refs[:10], 7, train=False, shuffle=False)
        endless = self.made(Chunks().refs[:10], 7)
        batches = training(Chunks())
        for there, here in ((finite, endless), (endless, finite), (batches, endless), (endless, batches)):
            self.refused(there.getstate(), here, "the checkpoint of .* lacks the key")


class TestEpochs(unittest.TestCase):
    def test_random_augmentation_differs_from_epoch_to_epoch_and_repeats_with_the_seed(self):
        def make(seed):
            source = its.InfinitePermutationSourceIterator(range(8), shuffle=False)
            return its.SamplingRandomMapIterator(source, lambda generator, item: (item, generator.random()), seed)

        items = take(make(3), 16)
        self.assertEqual([item for item, _ in items[:8]], [item for item, _ in items[8:]])
        self.assertEqual(len({number for _, number in items}), 16)
        self.assertEqual(take(make(3), 16), items)
        self.assertNotEqual(take(make(4), 16), items)
        check_iterator(partial(make, 3), items, take=16, positions=6)

    def test_more_instances_than_items_leave_some_empty_and_lose_none(self):
        parts = []
        for rank in range(5):
            pipeline = chunked_dataset_iterator(
                ["a", "b", "c"], list, 1, train=False, shuffle=False, num_instances=5, instance_rank=rank
            )
            parts.append(list(pipeline))
            pipeline.setstate(as_json(pipeline.getstate()))
            self.assertRaises(StopIteration, next, pipeline)
        self.assertEqual(parts, [["a"], ["b"], ["c"], [], []])

    def test_true_position_is_known_after_any_number_of_resumes(self):
        def make():
            items = its.BlockwiseShuffleIterator(Native("abcdefghij"), 4)
            return its.RecurrentIterator(items, lambda number, item: (number + 1, number), 0)

        state, found = None, []
        for number in (3, 1, 0, 4, 2):
            pipeline = make()
            pipeline.setstate(state)
            found += take(pipeline, number)
            state = as_json(pipeline.getstate())
            self.assertEqual(state["recurrent_state"], len(found))
        self.assertEqual(found, list(range(10)))

    def test_read_ahead_puts_lines_of_like_length_together(self):
        lengths = list(range(0, 1000, 10))
        random.Random(1).shuffle(lengths)
        source = Native([" " * length for length in lengths + lengths])
        pipeline = its.BucketedReadaheadBatchIterator(source, 100, len, 10)
        batches = take(pipeline, 10)
        self.assertEqual(source.getstate(), {"num_items_yielded": 100})
        for batch in batches:
            self.assertLessEqual(len(batch[0]) - len(batch[-1]), (max(lengths) - min(lengths)) / 10)
        self.assertEqual(sorted(map(len, chain(*batches))), sorted(lengths))


class Line(str):
    """A line that is counted as long as it exists."""

    existing = most = 0

    def __new__(cls, text):
        cls.existing += 1
        cls.most = max(cls.most, cls.existing)
        return super().__new__(cls, text)

    def __del__(self):
        type(self).existing -= 1


class Uncopied:
    """An item that must not be copied, compared, hashed or printed."""

    def refuse(self, *args):
        raise AssertionError("an item must not be touched")

    __reduce_ex__ = __reduce__ = __deepcopy__ = __copy__ = __eq__ = __hash__ = __repr__ = refuse


class Profile:
    """Count the calls of functions, in Python and in C."""

    def __enter__(self):
        self.calls = 0
        self.previous = sys.getprofile()
        sys.setprofile(self.note)
        return self

    def note(self, frame, event, arg):
        self.calls += event in ("call", "c_call")

    def __exit__(self, *error):
        sys.setprofile(self.previous)


class TestCost(unittest.TestCase):
    """What a checkpoint, a restore and a run may cost: counted, not timed."""

    def order(self):
        """Return the chunks in the order in which the first epoch reads them."""
        chunks = Chunks()
        take(chunked_dataset_iterator(chunks.refs, chunks.read, CHUNK_SIZE, seed=7), NUM_CHUNKS * CHUNK_SIZE)
        self.assertEqual(sorted(chunks.opened), sorted(chunks.refs))
        return chunks.opened

    def restored(self, position, kind, build=chunked_dataset_iterator, **options):
        """Return the chunks that are read to restore a position and read an item."""
        chunks = Chunks(kind=kind)
        make = partial(build, chunks.refs, chunks.read, 50, seed=7, **options)
        pipeline, resumed = make(), make()
        take(pipeline, position)
        state = as_json(pipeline.getstate())
        expected = next(pipeline)
        del chunks.opened[:]
        resumed.setstate(state)
        resumed.getstate()
        self.assertEqual(chunks.opened, [])
        self.assertEqual(next(resumed), expected)
        return chunks.opened

    def test_restore_late_in_an_epoch_reads_the_current_block_alone(self):
        order = self.order()
        for kind, positions in (
            (list, ((0, 0), (1, 0), (1810, 90), (1849, 90), (1850, 92), (1851, 92), (1999, 97))),
            (iter, ((0, 0), (1, 0), (1850, 92), (1851, 92), (1899, 92), (1999, 97))),
        ):
            for position, first in positions:
                with self.subTest(kind=kind, position=position):
                    self.assertEqual(self.restored(position, kind), order[first : first + 3])

    def test_restore_with_a_windowed_shuffle_reads_the_current_chunk_alone(self):
        order = self.order()
        opened = self.restored(1810, list, use_windowed=True)
        self.assertLessEqual(len(opened), 2)
        self.assertGreaterEqual(order.index(opened[0]), 90)

    def test_restore_of_batches_reads_no_chunk_from_before_the_current_block(self):
        order = self.order()

        def fixed(*args, **options):
            return its.FixedBatchIterator(chunked_dataset_iterator(*args, **options), 10)

        def bucketed(*args, **options):
            return its.BucketedReadaheadBatchIterator(chunked_dataset_iterator(*args, **options), 50, None, 10)

        for build in (fixed, bucketed):
            self.assertEqual(self.restored(181, list, build), order[90:93])

    def test_restore_of_plain_reading_reads_the_current_chunk_alone(self):
        def reading(refs, read, buffer_size, seed):
            return its.SelectManyIterator(Native(refs), read)

        for position in (1800, 1810, 1819):
            self.assertEqual(self.restored(position, list, reading), ["chunk-90"])

    def test_transform_is_applied_to_no_item_that_is_passed_over(self):
        seen = []
        chunks = Chunks()
        make = partial(chunked_dataset_iterator, chunks.refs, chunks.read, 50, seed=7, transform=seen.append)
        pipeline = make()
        take(pipeline, 1810)
        state = pipeline.getstate()
        del seen[:]
        pipeline = make()
        pipeline.setstate(state)
        take(pipeline, 3)
        self.assertEqual(len(seen), 3)

    def test_checkpoint_is_small_at_every_position(self):
        pipeline = training(Chunks(kind=iter))
        sizes = []
        for _ in range(600):
            sizes.append(len(json.dumps(pipeline.getstate())))
            next(pipeline)
        self.assertLess(max(sizes), 3 * 8000)  # three generators, 625 numbers of up to ten digits each

    def test_checkpoint_does_not_grow_with_block_or_data(self):
        def size(block_size, num_chunks):
            refs = range(num_chunks)
            pipeline = chunked_dataset_iterator(refs, lambda ref: [str(ref) * 100] * 10, block_size, seed=1)
            next(pipeline)
            return len(pickle.dumps(pipeline.getstate()))

        self.assertLess(size(2000, 1000), size(10, 20) + 200)

    def test_taking_a_checkpoint_costs_the_same_anywhere_in_a_block_and_copies_no_item(self):
        items = [Uncopied() for _ in range(3000)]
        for make in (
            lambda: its.BlockwiseShuffleIterator(Native(items), 3000),
            lambda: its.WindowedIterator(Native(items), 2),
            lambda: its.BucketedReadaheadBatchIterator(Native(items), 3000, None, 1),
            lambda: its.FixedBatchIterator(its.MapIterator(its.SelectManyIterator(Native([items])), id), 3),
        ):
            pipeline = make()
            with self.subTest(pipeline=type(pipeline).__name__):
                for _ in range(900):
                    next(pipeline)
                    with Profile() as profile:
                        pipeline.getstate()
                    self.assertLess(profile.calls, 100)

    def test_memory_holds_one_block_of_a_corpus_of_any_size(self):
        for kind in (list, iter):
            with self.subTest(kind=kind):
                Line.existing = Line.most = 0
                opened = []

                def read(ref, kind=kind, opened=opened):
                    opened.append(ref)
                    return kind(Line("{} {}".format(ref, i)) for i in range(100))

                pipeline = chunked_dataset_iterator(range(200), read, 1000, seed=1)
                self.assertEqual(opened, [])
                next(pipeline)
                self.assertEqual(len(opened), 10)
                for _ in range(5000):
                    next(pipeline)
                self.assertLessEqual(Line.most, 1000 + 2 * 100)
                del pipeline
                self.assertEqual(Line.existing, 0)


class OwnStop(StopIteration):
    pass


class TestErrors(unittest.TestCase):
    def test_stop_iteration_out_of_a_callback_is_an_error_and_not_the_end(self):
        def bucketed(source, key=None, batch_size=1, boundary_key=None):
            return its.BucketedReadaheadBatchIterator(source, 1, key, batch_size, boundary_key)

        def parallel(source, transform):
            return its.ParallelMapIterator(source, transform, 1, 2)

        pipelines = {
            "transform": (its.MapIterator, abs),
            "selector": (its.SelectManyIterator, lambda item: [item]),
            "step": (its.RecurrentIterator, lambda state, item: (None, item)),
            "sampling": (its.SamplingRandomMapIterator, lambda generator, item: item),
            "key": (lambda source, key: bucketed(source, key=key), abs),
            "batch_size": (lambda source, size: bucketed(source, batch_size=size), abs),
            "boundary_key": (lambda source, key: bucketed(source, boundary_key=key), abs),
            "parallel transform": (parallel, abs),
        }
        if sys.version_info >= (3, 7):  # before, Python itself took it for the end of a generator
            pipelines["generator"] = (its.SelectManyIterator, None)
        for name, (kind, function) in pipelines.items():
            for stop in (partial(next, iter(())), self.raise_own):
                for batch_size in (None, 1, 3):
                    with self.subTest(name, stop=stop, batch_size=batch_size):
                        self.check_stop(kind, function, stop, batch_size)

    def check_stop(self, kind, function, stop, batch_size):
        """Check that what a callback raises for the third of five items stops neither these nor the pipeline."""
        failing = [True]

        def callback(*args):
            if args[-1] == 3 and failing:
                stop()
            return function(*args)

        def generator(item):
            if item == 3 and failing:
                stop()
            yield item

        def make():
            pipeline = kind(Native(range(1, 6)), callback if function else generator)
            self.addCleanup(pipeline.close)
            return its.FixedBatchIterator(pipeline, batch_size) if batch_size else pipeline

        pipeline, resumed = make(), make()
        before = take(pipeline, {None: 2, 1: 2, 3: 0}[batch_size])
        for _ in range(2):
            with self.assertRaises(RuntimeError) as caught:
                next(pipeline)
            self.assertIsInstance(caught.exception.__cause__, StopIteration)
        state = pipeline.getstate()
        del failing[:]
        after = list(pipeline)
        self.assertEqual(len(before + after), 2 if batch_size == 3 else 5)
        self.assertEqual(before + after, list(make()))
        resumed.setstate(state)
        self.assertEqual(list(resumed), after)

    def raise_own(self):
        raise OwnStop("not the end")

    def test_truncated_chunk_is_an_error_that_names_the_file_and_loses_nothing(self):
        for name, compress in (("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)):
            with self.subTest(name), tempfile.TemporaryDirectory() as folder:
                refs = [os.path.join(folder, "chunk-{}.txt.{}".format(i, name)) for i in range(3)]
                lines = ["{} {}".format(ref, i) for ref in range(3) for i in range(2000)]
                for number, ref in enumerate(refs):
                    data = compress("".join(line + "\n" for line in lines[number * 2000 :][:2000]).encode("ascii"))
                    with open(ref, "wb") as file:
                        file.write(data if number != 1 else data[:-10])
                    if number == 1:
                        whole = data
                pipeline = its.MapIterator(its.SelectManyIterator(Native(refs), readers.read_lines), str)
                items = []
                for _ in range(2):
                    with self.assertRaises((ValueError, OSError, EOFError)) as caught:
                        for item in pipeline:
                            items.append(item)
                    self.assertIn("chunk-1.txt." + name, str(caught.exception))
                self.assertEqual(items, lines[: len(items)])
                state = as_json(pipeline.getstate())
                with open(refs[1], "wb") as file:
                    file.write(whole)
                self.assertEqual(items + list(pipeline), lines)
                pipeline.setstate(state)
                self.assertEqual(items + list(pipeline), lines)


if __name__ == "__main__":
    unittest.main()
