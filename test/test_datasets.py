"""The pipelines of `infinibatch.datasets`, against the same thing in plain Python."""

import inspect
import itertools
import json
import random
import re
import unittest
from functools import partial
from itertools import chain, islice

from infinibatch import datasets
from infinibatch import iterators as its
from infinibatch.testing import check_iterator

CHUNKS = [[0, 1, 2], [], [3], [4, 5, None, 7], [8, 9], [10, 11, 12, 13, 14]]
REFS = range(len(CHUNKS))


def read_chunk(ref):
    return iter(CHUNKS[ref])


def pair(item):
    return item, str(item)


def make(buffer_size=4, **options):
    return datasets.chunked_dataset_iterator(REFS, read_chunk, buffer_size, **options)


def take(iterator, number):
    return list(islice(iterator, number))


def expected(
    buffer_size=4,
    train=True,
    seed=None,
    shuffle=True,
    use_windowed=False,
    transform=None,
    prefetch=False,
    num_instances=1,
    instance_rank=0,
):
    """Yield what `chunked_dataset_iterator` must yield."""
    items = chain.from_iterable(map(read_chunk, refs(train, seed, shuffle, num_instances, instance_rank)))
    if shuffle:
        items = (buffered if use_windowed else blockwise)(items, buffer_size, random.Random(seed + 1))
    return items if transform is None else map(transform, items)


def refs(train, seed, shuffle, num_instances, instance_rank):
    if not train:
        size, longer = divmod(len(REFS), num_instances)
        sizes = [size + (rank < longer) for rank in range(num_instances)]
        first = sum(sizes[:instance_rank])
        return iter(REFS[first : first + sizes[instance_rank]])
    return islice(permutations(random.Random(seed) if shuffle else None), instance_rank, None, num_instances)


def permutations(generator):
    while True:
        permutation = list(REFS)
        if generator is not None:
            generator.shuffle(permutation)
        yield from permutation


def blockwise(items, size, generator):
    while True:
        block = take(items, size)
        if not block:
            return
        generator.shuffle(block)
        yield from block


def buffered(items, size, generator):
    slots = [[] for _ in range(size)]
    for item in items:
        slot = generator.randrange(0, size)
        yield from slots[slot]
        slots[slot] = [item]
    yield from chain.from_iterable(reversed(slots))


class TestChunkedDatasetIterator(unittest.TestCase):
    def test_arguments_are_those_of_0_1_1_in_its_order(self):
        parameters = list(inspect.signature(datasets.chunked_dataset_iterator).parameters.values())
        self.assertEqual(
            [(p.name, p.default) for p in parameters[:11]],
            [
                ("chunk_refs", inspect.Parameter.empty),
                ("read_chunk_fn", inspect.Parameter.empty),
                ("buffer_size", inspect.Parameter.empty),
                ("train", True),
                ("seed", None),
                ("shuffle", True),
                ("use_windowed", False),
                ("transform", None),
                ("prefetch", False),
                ("num_instances", 1),
                ("instance_rank", 0),
            ],
        )
        for added in parameters[11:]:
            self.assertEqual(added.kind, added.KEYWORD_ONLY)

    def test_arguments_may_be_positional(self):
        arguments = (4, True, 7, True, True, pair, False, 3, 1)
        with datasets.chunked_dataset_iterator(REFS, read_chunk, *arguments) as iterator:
            self.assertEqual(take(iterator, 30), take(expected(*arguments), 30))

    def test_options_in_all_combinations_give_the_reference(self):
        for buffer_size, seed, (train, shuffle), use_windowed, transform, (number, rank) in itertools.product(
            (1, 4, 1000),
            (0, 3),
            ((True, True), (True, False), (False, False)),
            (False, True),
            (None, pair),
            ((1, 0), (2, 0), (2, 1), (9, 7)),
        ):
            options = {
                "buffer_size": buffer_size,
                "train": train,
                "seed": seed,
                "shuffle": shuffle,
                "use_windowed": use_windowed,
                "transform": transform,
                "num_instances": number,
                "instance_rank": rank,
            }
            with self.subTest(options=options), make(**options) as iterator:
                self.assertEqual(take(iterator, 40), take(expected(**options), 40))

    def test_prefetch_gives_the_same_items(self):
        for options in ({"seed": 3}, {"seed": 3, "use_windowed": True}, {"train": False, "shuffle": False}):
            with self.subTest(options=options), make(prefetch=True, **options) as iterator:
                self.assertEqual(take(iterator, 25), take(expected(**options), 25))

    def test_every_position_restores(self):
        for options in (
            {"seed": 3},
            {"seed": 3, "use_windowed": True, "transform": pair},
            {"seed": -1.5, "num_instances": 2, "instance_rank": 1},
            {"shuffle": False, "transform": pair},
            {"train": False, "shuffle": False},
        ):
            with self.subTest(options=options):
                number = 15 if options.get("train") is False else 20
                items = take(expected(**options), number)
                check_iterator(
                    partial(make, **options), items, take=number + 1 if number == 15 else number, positions=7
                )

    def test_nothing_is_lost_where_reader_or_transform_raises(self):
        def failing(call):
            def read(ref):
                for item in CHUNKS[ref]:
                    call()
                    yield item

            def transform(item):
                call()
                return item

            return datasets.chunked_dataset_iterator(REFS, read, 4, seed=3, transform=transform)

        items = take(expected(seed=3), 20)
        check_iterator(failing, items, take=20, positions=8, errors=[OSError, KeyboardInterrupt])

    def test_stages_are_wired_as_documented(self):
        pipeline = make(seed=3, transform=pair, prefetch=True)
        stages = [
            its.MapIterator,
            its.BlockwiseShuffleIterator,
            its.PrefetchIterator,
            its.SelectManyIterator,
            its.InfinitePermutationSourceIterator,
        ]
        self.assertEqual(names(pipeline), [stage.__name__ for stage in stages])
        self.assertEqual(names(make(train=False, shuffle=False)), ["SelectManyIterator", "ChunkedSourceIterator"])
        self.assertEqual(names(make(use_windowed=True))[0], "BufferedShuffleIterator")
        pipeline.close()

    def test_reader_gets_the_references_as_they_are_and_may_return_any_iterable(self):
        for kind in (list, tuple, iter, dict.fromkeys):
            seen = []

            def read(ref, kind=kind, seen=seen):
                seen.append(ref)
                return kind(["{}{}".format(*ref), 0])

            iterator = datasets.chunked_dataset_iterator([("a", 1), ("b", 2)], read, 2, train=False, shuffle=False)
            self.assertEqual(seen, [])
            self.assertEqual(list(iterator), ["a1", 0, "b2", 0])
            self.assertEqual(seen, [("a", 1), ("b", 2)])

    def test_changing_the_list_of_chunks_later_changes_nothing(self):
        for options in ({"train": True}, {"train": False}):
            references = [0, 2]
            iterator = datasets.chunked_dataset_iterator(references, read_chunk, 4, shuffle=False, **options)
            references.clear()
            self.assertEqual(take(iterator, 4), [0, 1, 2, 3])


class TestInstances(unittest.TestCase):
    def test_endless_instances_share_each_chunk_of_the_stream_once(self):
        for number in (1, 2, 3, 4, 6):
            with self.subTest(number=number):
                parts = [
                    chunks_read(60 // number, seed=5, num_instances=number, instance_rank=r) for r in range(number)
                ]
                stream = [ref for step in zip(*parts) for ref in step]
                self.assertEqual(stream, take(refs(True, 5, True, 1, 0), len(stream)))
                for first in range(0, len(stream), len(REFS)):
                    self.assertEqual(sorted(stream[first : first + len(REFS)]), list(REFS))

    def test_finite_instances_are_disjoint_and_together_complete(self):
        for number in (1, 2, 3, 4, 6, 10):
            with self.subTest(number=number):
                parts = [
                    list(make(train=False, shuffle=False, num_instances=number, instance_rank=rank))
                    for rank in range(number)
                ]
                self.assertEqual(list(chain(*parts)), list(chain(*CHUNKS)))


class TestSeeds(unittest.TestCase):
    def test_same_seed_gives_the_same_order_and_another_one_another(self):
        self.assertEqual(take(make(seed=3), 50), take(make(seed=3), 50))
        self.assertNotEqual(take(make(seed=3), 50), take(make(seed=4), 50))

    def test_no_seed_gives_another_order_each_time_which_a_rewind_repeats(self):
        for use_windowed in (False, True):
            first, second = make(use_windowed=use_windowed), make(use_windowed=use_windowed)
            items = take(first, 60)
            self.assertNotEqual(take(second, 60), items)
            first.setstate(None)
            self.assertEqual(take(first, 60), items)

    def test_checkpoint_carries_the_drawn_seeds(self):
        for use_windowed, position in itertools.product((False, True), (0, 1, 17)):
            with self.subTest(use_windowed=use_windowed, position=position):
                first, second = make(use_windowed=use_windowed), make(use_windowed=use_windowed)
                take(first, position)
                second.setstate(json.loads(json.dumps(first.getstate())))
                self.assertEqual(take(second, 60), take(first, 60))

    def test_bumped_seed(self):
        for seed, step, bumped in (
            (None, 1, None),
            (None, 5, None),
            (0, 1, 1),
            (7, 3, 10),
            (-1, 1, 0),
            (2**100, 1, 2**100 + 1),
            (1.5, 1, 2.5),
            (1, 0, 1),
        ):
            self.assertEqual(datasets.bump_seed(seed, step), bumped)
        self.assertEqual(datasets.bump_seed(4), 5)
        self.assertEqual(datasets.bump_seed(seed=4, step=2), 6)

    def test_what_is_no_number_cannot_be_bumped(self):
        for seed in ("text", "", b"bytes", bytearray(b"b"), [1], {}):
            pattern = "seed must be a number or None.*got " + re.escape(repr(seed))
            self.assertRaisesRegex(TypeError, pattern, datasets.bump_seed, seed)
        for seed in ("text", "", b"bytes"):
            pattern = "seed must be a number or None.*got " + re.escape(repr(seed))
            self.assertRaisesRegex(TypeError, pattern, make, seed=seed)


class TestBadArguments(unittest.TestCase):
    def test_bad_arguments_are_refused_with_name_rule_and_value(self):
        plain = {"train": False, "shuffle": False}
        for options, error, pattern in (
            ({"buffer_size": 0}, ValueError, "buffer_size must be at least 1, got 0"),
            ({"buffer_size": -3, "use_windowed": True}, ValueError, "buffer_size must be at least 1, got -3"),
            ({"buffer_size": 0, "prefetch": True}, ValueError, "buffer_size must be at least 1, got 0"),
            (dict(plain, buffer_size=0), ValueError, "buffer_size must be at least 1, got 0"),
            (dict(plain, buffer_size=1.5), TypeError, "buffer_size must be an integer of at least 1, got 1.5"),
            ({"buffer_size": None}, TypeError, "buffer_size must be an integer of at least 1, got None"),
            ({"train": False}, ValueError, "shuffle must be False if train is False, got True"),
            ({"num_instances": 0}, ValueError, "num_instances must be at least 1, got 0"),
            (
                {"seed": 1, "num_instances": 2, "instance_rank": 2},
                ValueError,
                "instance_rank must be less than .* 2, got 2",
            ),
            ({"instance_rank": -1}, ValueError, "instance_rank must be at least 0, got -1"),
            (dict(plain, instance_rank=1), ValueError, "instance_rank must be less than num_instances = 1, got 1"),
            ({"num_instances": 2}, ValueError, "seed must be given to shuffle for num_instances = 2, got None"),
            ({"seed": []}, TypeError, r"seed must be .*got \[\]"),
            ({"transform": 5}, TypeError, "transform must be callable, got 5"),
        ):
            with self.subTest(options=options):
                self.assertRaisesRegex(error, pattern, make, **options)

    def test_bad_chunks_or_reader_are_refused(self):
        for references, reader, error, pattern in (
            ([], read_chunk, ValueError, "source_items must have at least one item, got none"),
            (5, read_chunk, TypeError, "chunk_refs must be a list, got 5"),
            ("a/*.gz", read_chunk, TypeError, "chunk_refs must be a list of chunks, got 'a/.*find_chunks"),
            ([1], 5, TypeError, "read_chunk_fn must be callable, got 5"),
            ([1], "read", TypeError, "read_chunk_fn must be callable, got 'read'"),
            ([1], None, TypeError, "read_chunk_fn must be callable, got None"),
        ):
            with self.subTest(pattern=pattern):
                self.assertRaisesRegex(error, pattern, datasets.chunked_dataset_iterator, references, reader, 4)

    def test_several_instances_need_no_seed_if_nothing_is_shuffled(self):
        iterator = make(shuffle=False, num_instances=2, instance_rank=1)
        self.assertEqual(take(iterator, 4), [4, 5, None, 7])

    def test_no_chunks_are_an_empty_data_set_if_read_once(self):
        iterator = datasets.chunked_dataset_iterator([], read_chunk, 4, train=False, shuffle=False)
        self.assertEqual(list(iterator), [])


def names(pipeline):
    return [line.split("(")[0].strip() for line in repr(pipeline).split("\n")]


def chunks_read(number, **options):
    """Return the first chunks that an instance reads."""
    opened = []

    def read(ref):
        opened.append(ref)
        return [ref]

    iterator = datasets.chunked_dataset_iterator(REFS, read, 1, **options)
    take(iterator, number)
    return opened[:number]


if __name__ == "__main__":
    unittest.main()
