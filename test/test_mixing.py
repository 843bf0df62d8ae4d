"""
Choosing, joining and packing items: filter, take, chain, enumerate, mix and pack.

`Contract` and `Seeded` of `test_iterators` hold what is the same for all classes.
"""

import array
import json
import random
import unittest
from collections import Counter
from functools import partial
from itertools import chain, cycle, islice

import test_iterators as common
from test_iterators import Native, Own, called, over, skip, take

from infinibatch import iterators as its
from infinibatch.testing import check_iterator

try:
    import numpy
except ImportError:
    numpy = None

RULES = ["first", "drained", "all"]


def is_odd(call, item):
    call()
    return item is None or item % 2


class Sequences:
    """Shows which items of a source were asked for."""

    def __init__(self):
        self.calls = []

    def __call__(self, item):
        self.calls.append(item)
        return item


# ---------------------------------------------------------------------------------------------------------------------
# Filtering
# ---------------------------------------------------------------------------------------------------------------------


class TestFilterIterator(common.Contract, unittest.TestCase):
    items = [3, 1, None, 5, 9, 7]
    has_callbacks = True
    bad_arguments = common.bad_sources(lambda source: its.FilterIterator(source, bool)) + common.bad_functions(
        partial(its.FilterIterator, Native([])), "predicate"
    )

    def make(self, source=Native, call=common.nothing):
        return its.FilterIterator(source([3, 4, 1, None, 6, 6, 6, 5, 9, 2, 7, 8]), partial(is_odd, call))

    def test_any_share_of_the_items_may_pass(self):
        for length in (0, 1, 30):
            for divisor in (1, 2, 7, 29, 1000):
                with self.subTest(length=length, divisor=divisor):
                    make = partial(over, its.FilterIterator, range(1, 1 + length), lambda n: n % divisor == 0)
                    check_iterator(make, [n for n in range(1, 1 + length) if n % divisor == 0], positions=5)

    def test_state_is_that_of_the_source(self):
        iterator = self.make()
        self.assertEqual([iterator.getstate()["num_items_yielded"] for _ in iterator], [1, 3, 4, 8, 9, 11])

    def test_predicate_is_called_once_for_each_item_when_it_is_asked_for(self):
        asked = Sequences()
        iterator = over(its.FilterIterator, [0, 0, 1, 2, 0], asked)
        self.assertEqual(next(iterator), 1)
        self.assertEqual(asked.calls, [0, 0, 1])
        self.assertEqual(list(iterator), [2])
        self.assertEqual(asked.calls, [0, 0, 1, 2, 0])

    def test_constructor_leaves_the_source_where_it_is(self):
        self.assertEqual(list(its.FilterIterator(skip(Native([1, 2, 3]), 1), bool)), [2, 3])

    def test_rows_of_a_group_that_was_read_at_once_are_not_lost(self):
        for rows in (lambda: list(range(1000)), lambda: iter(range(1000)), lambda: range(1000)):

            def make():
                groups = its.SelectManyIterator(Native([0, 1]), lambda group: rows())
                return its.FilterIterator(groups, lambda row: row % 2 == 0)

            iterator = skip(make(), 10)
            resumed = make()
            resumed.setstate(common.as_json(iterator.getstate()))
            self.assertEqual(next(resumed), 20)
            self.assertEqual(list(resumed), list(range(22, 1000, 2)) + list(range(0, 1000, 2)))

    def test_items_are_taken_back_from_stages_of_every_kind(self):
        """A stage that fails gives back what it holds; the filter in between gives back more than it let through."""
        kinds = [
            lambda source: its.PackIterator(its.MapIterator(source, lambda n: [n] * (n % 3)), 2),
            lambda source: its.MixIterator([source, Native(range(50, 60))], [3, 1], seed=1),
            lambda source: its.ChainIterator(source, Native(range(50, 60))),
            lambda source: its.EnumerateIterator(its.TakeIterator(source, 25)),
            lambda source: its.FilterIterator(source, lambda n: n % 4),
            lambda source: its.FixedBatchIterator(source, 3),
            lambda source: its.BufferedShuffleIterator(source, 4),
            lambda source: its.MultiplexIterator(Native([0, 0, 1] * 9), [source, Native(range(50, 60))]),
            lambda source: its.ZipIterator(
                its.PackIterator(its.MapIterator(source, lambda n: [n, n]), 3), Native("abc" * 9)
            ),
            lambda source: its.SamplingRandomMapIterator(source, lambda r, n: n + r.random()),
        ]
        for number, kind in enumerate(kinds):
            for make_source in (Native, Own):

                def make(call=common.nothing):
                    kept = its.FilterIterator(kind(make_source(range(30))), lambda item: hash(str(item)[:3]) % 3)
                    return its.FixedBatchIterator(its.MapIterator(kept, partial(called, call)), 2)

                with self.subTest(number=number, make_source=make_source):
                    check_iterator(make, errors=[ValueError], positions=3)

    def test_stages_below_a_zip_give_back_twice(self):
        def make(call=common.nothing):
            packs = its.PackIterator(Native([[n, n] for n in range(9)]), 3)
            few = its.SelectManyIterator(Native(range(9)), lambda n: [n])  # gives one item where more are asked for
            return its.MapIterator(its.ZipIterator(packs, few), partial(called, call))

        check_iterator(make, [([n * 3 // 2, (n * 3 + 1) // 2, (n * 3 + 2) // 2], n) for n in range(6)])
        check_iterator(make, errors=[ValueError])


# ---------------------------------------------------------------------------------------------------------------------
# Taking, chaining, counting
# ---------------------------------------------------------------------------------------------------------------------


class TestTakeIterator(common.Contract, unittest.TestCase):
    items = [3, None, 4, 1]
    bad_arguments = common.bad_sources(lambda source: its.TakeIterator(source, 1)) + common.bad_sizes(
        partial(its.TakeIterator, Native([])), "num_items"
    )

    def make(self, source=Native, call=common.nothing):
        return its.TakeIterator(source([3, None, 4, 1, 5, 9]), 4)

    def test_any_number_of_items_is_taken(self):
        for length in (0, 1, 5):
            for number in (1, 4, 5, 6, 10**30):
                with self.subTest(length=length, number=number):
                    check_iterator(partial(over, its.TakeIterator, range(length), number), range(min(length, number)))

    def test_nothing_is_read_behind_the_last_item(self):
        source = Own(range(9))
        iterator = its.TakeIterator(source, 3)
        self.assertEqual(list(iterator), [0, 1, 2])
        self.assertRaises(StopIteration, next, iterator)
        self.assertEqual(source.n, 3)

    def test_endless_source_ends(self):
        def make():
            return its.TakeIterator(its.InfinitePermutationSourceIterator(range(3), seed=its.Keyed(1)), 8)

        check_iterator(make)
        self.assertEqual(sorted(list(make())[:6]), [0, 0, 1, 1, 2, 2])

    def test_state_is_the_source_and_the_number_of_items(self):
        self.assertEqual(
            skip(self.make(), 3).getstate(), {"source_state": {"num_items_yielded": 3}, "num_items_yielded": 3}
        )

    def test_state_of_more_items_than_are_taken_is_refused(self):
        state = skip(over(its.TakeIterator, range(9), 8), 5).getstate()
        iterator = skip(over(its.TakeIterator, range(9), 4), 1)
        with self.assertRaisesRegex(ValueError, "TakeIterator does not fit: 'num_items_yielded' .* num_items = 4"):
            iterator.setstate(state)
        self.assertEqual(list(iterator), [1, 2, 3])

    def test_equal_numbers_of_batches_on_ranks_that_have_unequal_shares(self):
        """Endless sources, cut after the same number of batches: no rank waits for another one for ever."""
        for items, ranks in ((10, 3), (3, 5)):
            lengths, seen = [], set()
            for rank in range(ranks):
                source = its.InfinitePermutationSourceIterator(range(items), 1, True, ranks, rank)
                batches = list(its.TakeIterator(its.FixedBatchIterator(source, 2), 4))
                lengths.append([len(batch) for batch in batches])
                seen.update(chain(*batches))
            self.assertEqual(lengths, [[2] * 4] * ranks)
            self.assertEqual(seen, set(range(items)))


class TestChainIterator(common.Contract, unittest.TestCase):
    items = [3, None, 4, "a"]
    num_sources = 4
    bad_arguments = (
        common.bad_sources(its.ChainIterator, "source_iterators")
        + common.bad_sources(partial(its.ChainIterator, Native([])), "source_iterators")
        + [(its.ChainIterator, ValueError, "source_iterators must be at least 1, got 0")]
    )

    def make(self, source=Native, call=common.nothing):
        return its.ChainIterator(source([3, None]), source([]), source([4]), source(["a"]))

    def test_any_number_of_sources_of_any_length_come_one_after_the_other(self):
        for lengths in ([0], [3], [0, 0], [2, 0], [0, 2], [1, 0, 0, 2], [3, 1, 2]):
            for source in (Native, Own):
                with self.subTest(lengths=lengths, source=source):
                    parts = [[(i, n) for n in range(length)] for i, length in enumerate(lengths)]
                    check_iterator(lambda: its.ChainIterator(*map(source, parts)), list(chain(*parts)), pickles=True)

    def test_state_is_the_source_that_is_read_and_where_it_is(self):
        iterator = self.make()
        states = [iterator.getstate() for _ in iterator]
        self.assertEqual([state["index"] for state in states], [0, 0, 2, 3])
        self.assertEqual([state["source_state"]["num_items_yielded"] for state in states], [1, 2, 1, 1])

    def test_state_of_more_sources_is_refused(self):
        iterator = skip(its.ChainIterator(Native("ab"), Native("c")), 1)
        with self.assertRaisesRegex(ValueError, "ChainIterator does not fit: 'index' must be less than .* 2, got 3"):
            iterator.setstate(skip(self.make(), 4).getstate())
        self.assertEqual(list(iterator), ["b", "c"])

    def test_constructor_rewinds_the_sources(self):
        self.assertEqual(list(its.ChainIterator(skip(Native("ab"), 1), skip(Native("cd"), 2))), list("abcd"))

    def test_chunks_are_not_read_again_when_a_later_source_is_restored(self):
        read = Sequences()

        def make():
            parts = [its.SelectManyIterator(Native([i]), lambda i: [read(i)] * 3) for i in range(4)]
            return its.ChainIterator(*parts)

        iterator = make()
        iterator.setstate(skip(make(), 8).getstate())
        del read.calls[:]
        self.assertEqual(list(iterator), [2, 3, 3, 3])
        self.assertEqual(read.calls, [2, 3])


class TestEnumerateIterator(common.Contract, unittest.TestCase):
    items = [(5, 3), (6, None), (7, "a"), (8, 4)]
    bad_arguments = common.bad_sources(its.EnumerateIterator) + [
        (partial(its.EnumerateIterator, Native([]), value), TypeError, "start must be an integer, got .*")
        for value in (1.0, "1", None, [1])
    ]

    def make(self, source=Native, call=common.nothing):
        return its.EnumerateIterator(source([3, None, "a", 4]), 5)

    def test_counting_may_start_anywhere(self):
        for start in (0, 1, -3, 10**30):
            self.assertEqual(list(over(its.EnumerateIterator, "abc", start)), list(enumerate("abc", start)))

    def test_index_is_the_position_in_the_whole_stream_after_any_number_of_resumes(self):
        def make(start=0):
            source = its.InfinitePermutationSourceIterator(range(7), seed=3)
            kept = its.FilterIterator(its.BlockwiseShuffleIterator(source, 5, seed=4), lambda n: n % 3)
            return its.EnumerateIterator(kept, start)

        expected = take(make(), 100)
        self.assertEqual([index for index, _ in expected], list(range(100)))
        rng = random.Random(5)
        state, found = None, []
        while len(found) < 100:
            iterator = make()
            iterator.setstate(state)
            found += take(iterator, rng.randint(0, 9))
            state = common.as_json(iterator.getstate())
        self.assertEqual(found[:100], expected)

    def test_skipped_items_count(self):
        iterator = self.make()
        self.assertEqual(iterator._skip(3), 3)
        self.assertEqual(next(iterator), (8, 4))


# ---------------------------------------------------------------------------------------------------------------------
# Mixing
# ---------------------------------------------------------------------------------------------------------------------


def labelled(*lengths):
    """Return lists of items that say where they come from: a0, a1, ..., b0, ..."""
    return [["abcdefgh"[i] + str(n) for n in range(length)] for i, length in enumerate(lengths)]


def mixed(sources, weights=None, seed=0, until="first", source=Native):
    return its.MixIterator([source(items) for items in sources], weights, seed, until)


def reference(sources, weights, seed, until):
    """Yield what a mix yields, written down from its description."""
    generator = random.Random(seed)
    drawable = [i for i in range(len(sources)) if weights is None or weights[i] > 0]
    position, out, ended, turn = [0] * len(sources), set(), set(), 0
    while True:
        left = [i for i in drawable if i not in out]
        if not left:
            return
        if weights is None:
            while turn % len(sources) not in left:
                turn += 1
            index = turn % len(sources)
            turn += 1
        elif out:
            index = generator.choices(left, [weights[i] for i in left])[0]
        else:
            index = generator.choices(range(len(sources)), weights)[0]
        if position[index] == len(sources[index]):
            ended.add(index)
            if until == "first" or until == "all" and ended == set(drawable):
                return
            if until == "drained" or not sources[index]:
                out.add(index)
                continue
            position[index] = 0
        yield sources[index][position[index]]
        position[index] += 1


class TestMixIterator(common.Contract, common.Seeded, unittest.TestCase):
    items = list(reference([[3, 1, None, 5], ["a", "b", "c", "d"]], [2, 1], 1, "all"))
    num_sources = 2
    bad_arguments = (
        common.bad_sources(lambda source: its.MixIterator([source]), "source_iterators")
        + common.bad_sources(lambda source: its.MixIterator([Native([]), source]), "source_iterators")
        + common.bad_source_lists(its.MixIterator)
        + [(partial(its.MixIterator, []), ValueError, "source_iterators must be at least 1, got 0")]
        + [
            (
                partial(its.MixIterator, [Native("ab"), Native("c")], weights),
                ValueError,
                "weights must be 2 finite numbers of at least 0, not all 0, got ",
            )
            for weights in (
                [],
                [1],
                [1, 2, 3],
                [0, 0],
                [0.0, -0.0],
                [1, -1],
                [-1, -1],
                [1, float("nan")],
                [1, float("inf")],
                [1e308, 1e308],  # as Random.choices adds them up
                [10**400, 1],
                ["1", "2"],
                [1, None],
                [1, 1j],
                5,
            )
        ]
        + [
            (
                partial(its.MixIterator, [Native("a")], until="last"),
                ValueError,
                "until must be 'first', 'drained' or 'all', got 'last'",
            ),
            (partial(its.MixIterator, [Native("a")], until=None), ValueError, "until must be .* got None"),
            (partial(its.MixIterator, [Native("a")], until=["all"]), ValueError, r"until must be .* got \['all'\]"),
        ]
    )

    def make(self, source=Native, call=common.nothing):
        return its.MixIterator([source([3, 1, None, 5]), source(["a", "b", "c", "d"])], [2, 1], 1, "all")

    def seeded(self, seed):
        return its.MixIterator([Native(range(9)), Native(range(10, 19)), Native("abc")], [1, 1.5, 0.5], seed, "drained")

    def reference(self, seed):
        return reference([range(9), range(10, 19), "abc"], [1, 1.5, 0.5], seed, "drained")

    def test_checkpoint_with_a_wrong_value_is_refused(self):
        state = skip(self.make(), 2).getstate()
        wrong = [
            ("turn", [-1, 2, "1", 1.5, None, [], {}]),
            ("index", [-1, 2, "1", 1.5, [], {}]),
            ("dropped", [None, 5, "01", {}, [2], [-1], ["0"], [None], [0.0]]),
            ("ended", [None, 5, "01", {}, [2], [-1], ["0"], [None], [0.0]]),
            ("source_states", [None, 5, {}, [], [None], [None] * 3, [None, 5], [None, {}]]),
            ("random_state", [5, "x", [], [1, 2]]),
        ]
        self.assert_refused(
            [
                (dict(state, **{key: value}), r"checkpoint of (\w+) (?=does not fit|is a dict|lacks)", (key, value))
                for key, values in wrong
                for value in values
            ]
        )

    def test_sources_in_turn_give_the_documented_lists(self):
        for until, expected in (
            ("first", "a0 b0 c0 a1 b1 c1 a2 b2 c2"),
            ("drained", "a0 b0 c0 a1 b1 c1 a2 b2 c2 b3"),
            ("all", "a0 b0 c0 a1 b1 c1 a2 b2 c2 a0 b3 c0 a1"),
        ):
            with self.subTest(until=until):
                check_iterator(partial(mixed, labelled(3, 4, 3), until=until), expected.split(), pickles=True)

    def test_every_rule_gives_the_reference_and_restores_at_every_position(self):
        for until in RULES:
            for lengths in ([3], [0], [0, 0], [2, 0, 3], [0, 3, 2], [3, 2, 0], [3, 4, 3], [1, 5]):
                for weights in (None, [1] * len(lengths), [0.1, 5, 0.9][: len(lengths)]):
                    with self.subTest(until=until, lengths=lengths, weights=weights):
                        lists = labelled(*lengths)
                        expected = list(reference(lists, weights, 7, until))
                        states = []
                        for source in (Native, Own):
                            iterator, found = mixed(lists, weights, 7, until, source), []
                            while len(found) <= len(expected):
                                states.append((len(found), source, common.as_json(iterator.getstate())))
                                found += take(iterator, 1) or [None]
                            self.assertEqual(found, expected + [None])
                        random.Random(1).shuffle(states)
                        iterators = {source: mixed(lists, weights, 7, until, source) for source in (Native, Own)}
                        for position, source, state in states:
                            iterators[source].setstate(state)
                            self.assertEqual(list(iterators[source]), expected[position:])

    def test_errors_of_the_sources_lose_nothing(self):
        for until in RULES:
            for weights in (None, [1, 2, 1]):

                def make(call=common.nothing):
                    return mixed(labelled(3, 4, 0), weights, 5, until, lambda items: Own(items, call))

                with self.subTest(until=until, weights=weights):
                    expected = list(reference(labelled(3, 4, 0), weights, 5, until))
                    check_iterator(make, expected, errors=[OSError], positions=5)

    def test_item_that_was_drawn_and_failed_is_drawn_in_the_resumed_pipeline_too(self):
        failures = [1]

        def fail_once(item):
            if item == "b0" and failures:
                raise OSError(failures.pop())
            return item

        def make():
            sources = [its.MapIterator(Native(items), fail_once) for items in labelled(20, 20)]
            return its.MixIterator(sources, [1, 1], seed=2)

        found, iterator = [], make()
        with self.assertRaisesRegex(OSError, "1"):
            for item in iterator:
                found.append(item)
        state = common.as_json(iterator.getstate())
        self.assertEqual(state["index"], 1)
        resumed = make()
        resumed.setstate(state)
        self.assertEqual(found + list(resumed), list(reference(labelled(20, 20), [1, 1], 2, "first")))

    def test_empty_source_at_each_position_changes_nothing_for_the_others(self):
        full = labelled(5, 3)
        for until in ("drained", "all"):
            expected = list(mixed(full, until=until))
            for position in range(3):
                lists = full[:position] + [[]] + full[position:]
                with self.subTest(until=until, position=position):
                    self.assertEqual(list(mixed(lists, until=until)), expected)
                    weighted = list(mixed(lists, [1, 2, 3], until=until))
                    for items in full:  # each in its own order, and as often as before
                        own = [item for item in weighted if item in items]
                        self.assertEqual(own, list(islice(cycle(items), len(own))))
                        self.assertTrue(len(own) == len(items) or until == "all" and len(own) > len(items))
        for until in RULES:
            self.assertEqual(list(mixed([[], []], until=until)), [])
            self.assertEqual(list(mixed([[], []], [1, 2], until=until)), [])

    def test_source_of_weight_zero_changes_nothing_for_the_others_and_is_never_read(self):
        full, weights = labelled(5, 3), [2, 1]
        for until in RULES:
            for seed in range(5):
                expected = list(mixed(full, weights, seed, until))
                for position in range(3):
                    lists = full[:position] + [["never"]] + full[position:]
                    zero = weights[:position] + [0] + weights[position:]
                    with self.subTest(until=until, seed=seed, position=position):
                        iterator = mixed(lists, zero, seed, until)
                        self.assertEqual(list(iterator), expected)
                        self.assertEqual(iterator.getstate()["source_states"][position], {"num_items_yielded": 0})

    def test_drained_mix_yields_every_item_once_and_each_source_in_its_order(self):
        for seed in range(20):
            rng = random.Random(seed)
            lists = labelled(*[rng.choice([0, 1, 5, 30]) for _ in range(rng.randint(1, 5))])
            weights = rng.choice([None, [rng.choice([0.01, 1, 7]) for _ in lists]])
            items = list(mixed(lists, weights, seed, "drained"))
            self.assertEqual(sorted(items), sorted(chain(*lists)))
            for part in lists:
                self.assertEqual([item for item in items if item in part], part)

    def test_source_that_gives_nothing_when_it_starts_over_drops_out(self):
        class Once(Own):
            def setstate(self, checkpoint):
                super().setstate(checkpoint)
                if checkpoint is None and getattr(self, "read", False):
                    self.n = len(self.items)

            def __next__(self):
                self.read = True
                return super().__next__()

        for weights in (None, [1, 1]):
            iterator = its.MixIterator([Once("ab"), Native(range(10))], weights, until="all")
            items = list(islice(iterator, 100))
            self.assertEqual([item for item in items if item not in ("a", "b")], list(range(10)))
            self.assertEqual([item for item in items if item in ("a", "b")], ["a", "b"])

    def test_weights_keep_their_proportions_over_a_long_run(self):
        for weights in ([1, 2, 3, 4], [0.9, 0.1], [1e-3, 1], [5, 0, 5]):
            endless = [its.InfinitePermutationSourceIterator([i], shuffle=False) for i in range(len(weights))]
            number = 10000
            counts = Counter(islice(its.MixIterator(endless, weights, seed=11), number))
            for i, weight in enumerate(weights):
                share = weight / sum(weights)
                with self.subTest(weights=weights, source=i):  # five standard deviations of a binomial
                    self.assertLessEqual(abs(counts[i] - number * share), 5 * (number * share * (1 - share)) ** 0.5)

    def small_beside_large(self, seed=1):
        large = Native(["large {}".format(i) for i in range(1000)])
        small = its.InfinitePermutationSourceIterator(["small {}".format(i) for i in range(7)], seed=2)
        return its.MixIterator([large, small], [0.9, 0.1], seed)

    def test_small_endless_source_comes_over_and_over_until_the_large_one_ends(self):
        items = list(self.small_beside_large())
        large = [item for item in items if item.startswith("large")]
        small = [item for item in items if item.startswith("small")]
        self.assertEqual(large, ["large {}".format(i) for i in range(1000)])
        self.assertLess(abs(len(small) - 111), 60)
        passes = [small[i : i + 7] for i in range(0, len(small) - 6, 7)]
        self.assertEqual({tuple(sorted(part)) for part in passes}, {tuple("small {}".format(i) for i in range(7))})
        self.assertGreater(len(set(map(tuple, passes))), len(passes) // 2)
        iterator = self.small_beside_large()
        for position in range(0, len(items), 97):
            resumed = self.small_beside_large()
            resumed.setstate(common.as_json(iterator.getstate()))
            self.assertEqual(take(resumed, 97), items[position : position + 97])
            skip(iterator, min(97, len(items) - position))

    def test_mix_then_shuffle_in_a_buffer_larger_than_the_data_holds_every_item(self):
        lists = labelled(3, 4, 3)

        def make():
            return its.BufferedShuffleIterator(mixed(lists, [1, 1, 2], 3, "all"), 100, seed=1)

        self.assertEqual(set(make()), set(chain(*lists)))
        check_iterator(make, positions=5)

    def test_state_in_turn_holds_no_generator(self):
        self.assertEqual(
            skip(mixed(labelled(3, 4, 3)), 4).getstate(),
            {
                "random_state": None,
                "turn": 1,
                "index": None,
                "dropped": [],
                "ended": [],
                "source_states": [{"num_items_yielded": n} for n in (2, 1, 1)],
            },
        )

    def test_weights_may_be_any_numbers_and_change_nothing_later(self):
        weights = [1, 3]
        iterator = mixed(labelled(9, 9), weights, 1)
        weights[:] = [1, 0]
        expected = list(mixed(labelled(9, 9), [1, 3], 1))
        self.assertEqual(list(iterator), expected)
        for same in ((1, 3), [1.0, 3.0], [True, 3], iter([1, 3])):
            self.assertEqual(list(mixed(labelled(9, 9), same, 1)), expected)

    def test_sources_may_come_from_any_iterable(self):
        self.assertEqual(list(its.MixIterator(map(Native, ["ab", "cd"]))), list("acbd"))

    def test_one_weight_that_is_tiny_draws_its_source_alone(self):
        self.assertEqual(list(mixed(labelled(3, 3), [5e-324, 0], 1)), ["a0", "a1", "a2"])
        self.assertEqual(list(mixed(labelled(3, 3), [0, 5e-324], 1)), ["b0", "b1", "b2"])


# ---------------------------------------------------------------------------------------------------------------------
# Packing
# ---------------------------------------------------------------------------------------------------------------------


def packed(documents, size, drop_last=False, source=Native):
    return its.PackIterator(source(documents), size, drop_last)


class TestPackIterator(common.Contract, unittest.TestCase):
    items = [[1, 2, 3], [None, "t", 5], [6, 7, 8], [9, 10]]
    bad_arguments = common.bad_sources(lambda source: its.PackIterator(source, 1)) + common.bad_sizes(
        partial(its.PackIterator, Native([])), "size"
    )

    def make(self, source=Native, call=common.nothing):
        return its.PackIterator(source([[1], [], [2, 3, None], ["t"], [], [5, 6, 7, 8, 9, 10], []]), 3)

    def test_tokens_are_neither_lost_nor_doubled_whatever_the_lengths(self):
        for seed in range(12):
            rng = random.Random(seed)
            counter = iter(range(10**6))
            lengths = [rng.choice([0, 0, 1, 2, 5, rng.randint(0, 40)]) for _ in range(rng.randint(0, 12))]
            documents = [[next(counter) for _ in range(length)] for length in lengths]
            tokens = list(chain(*documents))
            for size in (1, 2, 7, 64):
                for drop_last in (False, True):
                    number = len(tokens) // size * size if drop_last else len(tokens)
                    expected = [tokens[i : min(i + size, number)] for i in range(0, number, size)]
                    with self.subTest(lengths=lengths, size=size, drop_last=drop_last):
                        check_iterator(partial(packed, documents, size, drop_last), expected, positions=3)

    def test_every_position_restores_with_errors_of_the_source_too(self):
        documents = [[1, 2], [3, 4, 5, 6, 7], [], [8], [9, 10, 11]]
        for size, drop_last in ((1, False), (3, True), (4, False), (20, False), (20, True)):

            def make(call=common.nothing):
                return its.PackIterator(its.MapIterator(Own(documents), partial(called, call)), size, drop_last)

            with self.subTest(size=size, drop_last=drop_last):
                check_iterator(make, errors=[ValueError, KeyboardInterrupt], pickles=True)

    def test_sequences_of_every_kind_become_lists(self):
        for documents in ([[1, 2], [3, 4, 5]], [(1, 2), (3, 4, 5)], [[1, 2], (3, 4, 5)], [range(1, 3), range(3, 6)]):
            with self.subTest(documents=documents):
                self.assertEqual(list(packed(documents, 2)), [[1, 2], [3, 4], [5]])
                self.assertEqual({type(pack) for pack in packed(documents, 2)}, {list})

    def test_text_and_bytes_keep_their_type(self):
        self.assertEqual(list(packed(["abc", "", "de"], 2)), ["ab", "cd", "e"])
        self.assertEqual(list(packed([b"abc", b"", b"de"], 2)), [b"ab", b"cd", b"e"])
        self.assertEqual(list(packed([bytearray(b"abc"), bytearray(b"de")], 4)), [bytearray(b"abcd"), bytearray(b"e")])

    def test_arrays_of_the_standard_library_keep_their_type_code(self):
        for code in "BHiqfd":
            documents = [array.array(code, range(n, n + 5)) for n in range(0, 25, 5)]
            with self.subTest(code=code):
                packs = list(packed(documents, 7))
                self.assertEqual(packs, [array.array(code, range(n, min(n + 7, 25))) for n in range(0, 25, 7)])
                self.assertEqual({pack.typecode for pack in packs}, {code})
                check_iterator(partial(packed, documents, 7), packs)

    @unittest.skipIf(numpy is None, "needs numpy")
    def test_numpy_arrays_keep_their_dtype_and_further_dimensions(self):
        class Own(numpy.ndarray):
            """Some program's own kind of array."""

        for dtype in ("uint8", "int32", "int64", "float16", "bool", "<U3"):
            for shape in ((), (2,), (2, 3)):
                total = numpy.arange(20 * numpy.prod(shape, dtype=int)).reshape((20,) + shape).astype(dtype)
                documents = [total[:4], total[4:4], total[4:15], total[15:].view(Own)]
                with self.subTest(dtype=dtype, shape=shape):
                    packs = list(packed(documents, 6))
                    self.assertEqual([pack.dtype for pack in packs], [total.dtype] * 4)
                    self.assertEqual([pack.shape for pack in packs], [(n,) + shape for n in (6, 6, 6, 2)])
                    self.assertEqual(numpy.concatenate(packs).tolist(), total.tolist())
                    check_iterator(partial(packed, documents, 6), positions=3)

    def test_tensors_keep_their_dtype(self):
        try:
            import torch
        except ImportError:
            self.skipTest("needs torch")
        for dtype in (torch.int32, torch.int64, torch.float16, torch.bfloat16):
            documents = [torch.arange(n, n + 5).to(dtype) for n in range(0, 25, 5)]
            packs = list(packed(documents, 7))
            self.assertEqual([pack.dtype for pack in packs], [dtype] * 4)
            self.assertEqual(torch.cat(packs).tolist(), [float(n) for n in range(25)])

    def test_packs_share_nothing_with_the_documents(self):
        kinds = [list, partial(array.array, "i"), bytearray] + ([numpy.array] if numpy else [])
        for kind in kinds:
            documents = [kind([1, 2, 3, 4, 5, 6])]
            for pack in packed(documents, 3):
                pack[0] = 99
            self.assertEqual(list(documents[0]), [1, 2, 3, 4, 5, 6])

    def test_array_of_a_kind_that_cannot_be_joined_is_an_error_and_not_a_sum(self):
        class Vector:
            def __init__(self, *values):
                self.values, self.shape = values, (len(values),)

            def __len__(self):
                return len(self.values)

            def __getitem__(self, index):
                return Vector(*self.values[index])

            def __add__(self, other):
                return Vector(*[a + b for a, b in zip(self.values, other.values)])

        iterator = packed([Vector(1, 2), Vector(3, 4)], 4)
        state = iterator.getstate()
        for _ in range(2):
            self.assertRaisesRegex(TypeError, "PackIterator cannot join .*Vector", next, iterator)
            self.assertEqual(iterator.getstate(), state)

    def test_document_without_a_length_is_an_error_and_moves_nothing(self):
        iterator = packed([[1, 2], 5, [3]], 2)
        self.assertEqual(next(iterator), [1, 2])
        state = iterator.getstate()
        for _ in range(2):
            self.assertRaisesRegex(TypeError, "int", next, iterator)
            self.assertEqual(iterator.getstate(), state)

    def test_state_is_the_source_before_the_document_in_progress_and_its_tokens_that_are_out(self):
        iterator = self.make()
        found = []
        for _ in range(5):
            state = iterator.getstate()
            self.assertEqual(set(state), {"source_state", "num_tokens"})
            found.append((state["source_state"]["num_items_yielded"], state["num_tokens"]))
            next(iterator, None)
        self.assertEqual(found, [(0, 0), (2, 2), (5, 1), (5, 4), (7, 0)])

    def test_restoring_reads_from_the_document_in_progress_and_one_document_ahead_at_most(self):
        read = Sequences()

        def make():
            return its.PackIterator(its.MapIterator(Native([[i] * 4 for i in range(9)]), read), 3)

        iterator = skip(make(), 5)  # 15 tokens: three whole documents, and three tokens of the next one
        self.assertEqual(read.calls, [[i] * 4 for i in range(4)])
        del read.calls[:]
        resumed = make()
        resumed.setstate(iterator.getstate())
        self.assertEqual(next(resumed), [3, 4, 4])
        self.assertEqual(read.calls, [[3] * 4, [4] * 4])

    def test_source_is_asked_for_its_state_now_and_then_and_not_for_each_document(self):
        class Counting(Own):
            def getstate(self):
                self.log["getstate"] += 1
                return super().getstate()

        source = Counting([[i] * 3 for i in range(2000)])
        self.assertEqual(len(list(its.PackIterator(source, 10))), 600)
        self.assertLess(source.log["getstate"], 50)

    def test_document_in_progress_is_read_again_after_a_checkpoint(self):
        documents = [list(range(20 * i, 20 * i + 20)) for i in range(3)]
        iterator, found = packed(documents, 3), []
        for pack in iterator:
            found += pack
            iterator.getstate()
            iterator.getstate()
        self.assertEqual(found, list(range(60)))

    def test_state_holds_no_tokens(self):
        documents = [list(range(10000))] * 3
        iterator = skip(packed(documents, 9999), 2)
        self.assertLess(len(json.dumps(iterator.getstate())), 200)

    def test_state_beyond_the_document_is_an_error_at_each_next(self):
        iterator = packed([[1, 2, 3], [4]], 2)
        iterator.setstate({"source_state": None, "num_tokens": 4})
        for _ in range(2):
            self.assertRaisesRegex(RuntimeError, "beyond the end of the data.*4 .*it has 3", next, iterator)

    def test_last_pack_that_is_dropped_stays_dropped(self):
        iterator = packed([[1, 2, 3], [4, 5]], 3, True)
        self.assertEqual(list(iterator), [[1, 2, 3]])
        self.assertRaises(StopIteration, next, iterator)
        other = packed([[1, 2, 3], [4, 5]], 3, True)
        other.setstate(iterator.getstate())
        self.assertEqual(list(other), [])

    def test_documents_of_a_shuffled_pipeline_are_packed_and_restored_at_every_position(self):
        def make():
            lines = its.BlockwiseShuffleIterator(Native([[i] * (i % 5) for i in range(30)]), 7, seed=its.Keyed(1))
            return its.FixedBatchIterator(its.PackIterator(lines, 4), 2)

        self.assertEqual(
            sorted(chain.from_iterable(chain.from_iterable(make()))), [i for i in range(30) for _ in range(i % 5)]
        )
        check_iterator(make, pickles=True, positions=8)


if __name__ == "__main__":
    unittest.main()
