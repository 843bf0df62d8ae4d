"""
Any number of ranks and processes: `ShardedIterator`, `Keyed` seeds, merged checkpoints and finite permutations.

INFINIBATCH_TEST_ELASTIC sets the number of random runs that change their number of ranks (30), INFINIBATCH_TEST_SEED
the first seed (0). A failure names its seed.
"""

import copy
import hashlib
import json
import logging
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import unittest
from collections import Counter
from functools import partial
from itertools import chain, islice

import test_iterators as common
from test_iterators import Native, Own, as_json, called, skip, take

from infinibatch import datasets
from infinibatch import iterators as its
from infinibatch.checkpoint import load, merge, save
from infinibatch.testing import check_iterator

NUM_RUNS = int(os.environ.get("INFINIBATCH_TEST_ELASTIC", "30"))
FIRST_SEED = int(os.environ.get("INFINIBATCH_TEST_SEED", "0"))
RANKS = [1, 2, 3, 4, 6, 8, 12]
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(its.__file__)))
HAS_FORK = hasattr(os, "fork")
Keyed = its.Keyed
QUIET = logging.NullHandler()  # ranks without a shard say so


def setUpModule():
    logging.getLogger("infinibatch.iterators").addHandler(QUIET)


def tearDownModule():
    logging.getLogger("infinibatch.iterators").removeHandler(QUIET)


# ---------------------------------------------------------------------------------------------------------------------
# Shards of every kind, and runs that stop and go on
# ---------------------------------------------------------------------------------------------------------------------


def read_chunk(ref):
    """Return the items of a chunk; chunks differ in their number of items, and one in seven has none."""
    return [(ref, i) for i in range(ref * 5 % 7)]


def stream_chunk(ref):
    return iter(read_chunk(ref))


def length_of(item):
    return item[0] % 5 + item[1]


def is_kept(item):
    return (item[0] + item[1]) % 3


def tokens_of(item):
    return [(item, i) for i in range(length_of(item) % 4)]


class Shard:
    """Builds the shards of a data set; what is done behind shuffling is given by name."""

    NUM_CHUNKS = 40

    def __init__(self, kind="items", epochs=1, seed=None, use_windowed=False):
        self.kind, self.epochs, self.use_windowed = kind, epochs, use_windowed
        self.seed = Keyed(1) if seed is None else seed

    def __repr__(self):
        return "Shard({!r}, {!r}, {!r}, {!r})".format(self.kind, self.epochs, self.seed, self.use_windowed)

    def __call__(self, num_shards, shard, refs=None, reader=read_chunk):
        items = datasets.chunked_dataset_iterator(
            range(self.NUM_CHUNKS) if refs is None else refs,
            reader,
            7,
            seed=self.seed,
            use_windowed=self.use_windowed,
            num_instances=num_shards,
            instance_rank=shard,
            num_epochs=self.epochs,
        )
        return getattr(self, self.kind)(items, num_shards, shard)

    def items(self, items, num_shards, shard):
        return items

    def batches(self, items, num_shards, shard):
        return its.FixedBatchIterator(items, 3)

    def buckets(self, items, num_shards, shard):
        return its.BucketedReadaheadBatchIterator(
            items, 11, length_of, lambda item: 1 + length_of(item) % 3, seed=self.seed
        )

    def kept(self, items, num_shards, shard):
        return its.FixedBatchIterator(its.FilterIterator(items, is_kept), 2)

    def packs(self, items, num_shards, shard):
        return its.PackIterator(its.MapIterator(items, tokens_of), 4)

    def mix(self, items, num_shards, shard):
        names = [("other", i) for i in range(50)]
        if self.epochs is None:
            other = its.InfinitePermutationSourceIterator(names, self.seed, True, num_shards, shard)
        else:
            other = its.ChunkedSourceIterator(names, num_shards, shard)
        return its.MixIterator([items, other], [3, 1], self.seed, "drained")

    def deep(self, items, num_shards, shard):
        noisy = its.SamplingRandomMapIterator(items, lambda rng, item: (item, rng.randrange(9)), self.seed)
        windows = its.WindowedIterator(its.EnumerateIterator(noisy), 2)
        return its.ChainIterator(
            its.TakeIterator(windows, 5), its.ZipIterator(self.other(num_shards, shard), Native("ab"))
        )

    def other(self, num_shards, shard):
        return Own([("own", shard, i) for i in range(3)])


KINDS = ["items", "batches", "buckets", "kept", "packs", "mix", "deep"]


def rank_of(make_shard, num_shards, num_instances, instance_rank, state, **options):
    iterator = its.ShardedIterator(make_shard, num_shards, num_instances, instance_rank, **options)
    if state is not None:
        iterator.setstate(state)
    return iterator


def alone(make_shard, num_shards, limit=None):
    """Return what each shard yields by itself: the reference for every run."""
    sequences = []
    for shard in range(num_shards):
        # Within a run, stages of a shard have keys of their own.
        single = its.ShardedIterator(make_shard, num_shards, num_shards, shard)
        sequences.append(list(islice(single, limit)))
    return sequences


class Run:
    """A run that is saved by all ranks and goes on with another number of them, and what its shards have yielded."""

    def __init__(self, make_shard, num_shards, **options):
        self.make_shard, self.num_shards, self.options = make_shard, num_shards, options
        self.state = None
        self.rounds = []  # what all ranks yielded in each step

    def go_on(self, num_instances, num_steps, through=as_json):
        """Read so many steps on so many ranks, then save; a rank that has ended gives nothing more."""
        ranks = [
            rank_of(self.make_shard, self.num_shards, num_instances, rank, self.state, **self.options)
            for rank in range(num_instances)
        ]
        steps = []
        while len(steps) != num_steps:
            step = [list(islice(rank, 1)) for rank in ranks]
            if not any(step):
                break
            steps.append(list(chain(*step)))
        self.rounds += steps
        self.state = through(merge([through(rank.getstate()) for rank in ranks]))
        for rank in ranks:
            rank.close()

    @property
    def items(self):
        return list(chain(*self.rounds))

    def served(self):
        return [self.state["shards"][str(shard)]["num_served"] for shard in range(self.num_shards)]


def through_pickle(state):
    return pickle.loads(pickle.dumps(state))


def counted(items):
    return Counter(map(json.dumps, items))  # to which a tuple is a list, as to a shuffle buffer that was saved as JSON


class TestElasticRuns(unittest.TestCase):
    def test_each_item_of_an_epoch_comes_once_whatever_the_numbers_of_ranks(self):
        """Random runs: kind of shard, number of shards, and at random points another number of ranks."""
        for seed in range(FIRST_SEED, FIRST_SEED + NUM_RUNS):
            rng = random.Random("elastic {}".format(seed))
            make_shard = Shard(rng.choice(KINDS), rng.choice([1, 1, 2]), Keyed(seed), rng.random() < 0.2)
            num_shards = rng.choice([1, 2, 5, 8, 12, 24])
            plan = [(rng.choice(RANKS), rng.choice([0, 1, 2, 5, rng.randint(0, 40)])) for _ in range(rng.randint(1, 6))]
            with self.subTest(seed=seed, make_shard=make_shard, num_shards=num_shards, plan=plan):
                expected = alone(make_shard, num_shards)
                run = Run(make_shard, num_shards)
                for number, steps in plan:
                    run.go_on(number, steps, rng.choice([as_json, through_pickle, copy.deepcopy]))
                    parts = [sequence[:served] for sequence, served in zip(expected, run.served())]
                    self.assertEqual(counted(run.items), counted(chain(*parts)))
                run.go_on(rng.choice(RANKS), None)
                self.assertEqual(counted(run.items), counted(chain(*expected)))
                self.assertEqual(run.served(), list(map(len, expected)))
                if make_shard.kind in ("items", "batches", "buckets"):
                    once = [item for ref in range(Shard.NUM_CHUNKS) for item in read_chunk(ref)]
                    found = run.items if make_shard.kind == "items" else chain(*run.items)
                    self.assertEqual(counted(found), counted(once * make_shard.epochs))

    def test_endless_runs_give_each_shard_its_own_sequence(self):
        for seed in range(FIRST_SEED, FIRST_SEED + NUM_RUNS // 6):
            rng = random.Random("endless {}".format(seed))
            make_shard = Shard(rng.choice(KINDS[:5]), None, Keyed(seed))
            num_shards = rng.choice([3, 8, 12, 24])
            plan = [(rng.choice(RANKS), rng.randint(0, 60)) for _ in range(5)]
            with self.subTest(seed=seed, make_shard=make_shard, num_shards=num_shards, plan=plan):
                run = Run(make_shard, num_shards)
                for number, steps in plan:
                    run.go_on(number, steps)
                expected = alone(make_shard, num_shards, max(run.served()))
                parts = [sequence[:served] for sequence, served in zip(expected, run.served())]
                self.assertEqual(counted(run.items), counted(chain(*parts)))

    def test_rounds_are_the_same_sets_for_every_number_of_ranks_that_divides_the_shards(self):
        num_shards = 24
        for kind in ("batches", "mix"):
            make_shard = Shard(kind, None)
            expected = [counted(items) for items in zip(*alone(make_shard, num_shards, 30))]
            rng = random.Random(kind)
            run = Run(make_shard, num_shards)
            rounds = 0
            for number in [8, 2, 3, 12, 1, 6, 4]:
                size = rng.randint(1, 4)
                before = len(run.rounds)
                run.go_on(number, size * num_shards // number)
                steps, per_round = run.rounds[before:], num_shards // number
                for i in range(size):
                    with self.subTest(kind=kind, number=number, round=rounds + i):
                        items = chain(*steps[i * per_round : (i + 1) * per_round])
                        self.assertEqual(counted(items), expected[rounds + i])
                rounds += size

    def test_round_that_was_interrupted_is_finished_by_the_other_ranks(self):
        make_shard, num_shards = Shard("items", None), 12
        expected = counted(chain(*alone(make_shard, num_shards, 3)))
        for first, then in ((1, 1), (3, 1), (4, 2), (6, 3), (6, 2)):  # each of the latter has the same share left
            run = Run(make_shard, num_shards)
            run.go_on(first, num_shards // first + 1)  # one round, and a step of the next one
            run.go_on(then, (2 * num_shards - first) // then)
            with self.subTest(first=first, then=then):
                self.assertEqual(run.served(), [3] * num_shards)
                self.assertEqual(counted(run.items), expected)

    def test_eight_ranks_then_two_then_three_to_the_end(self):
        def make_shard(num_shards, shard):
            return its.ChunkedSourceIterator(range(97), num_shards, shard)

        run = Run(make_shard, 24)
        run.go_on(8, 5)
        self.assertEqual(len(run.items), 40)
        run.go_on(2, 6)
        self.assertEqual(len(run.items), 52)
        run.go_on(3, None)
        self.assertEqual(sorted(run.items), list(range(97)))

    def test_ranks_come_and_go_at_any_point(self):
        def make_shard(num_shards, shard):
            source = its.PermutationSourceIterator(range(50), 1, Keyed(3), True, num_shards, shard)
            return its.BlockwiseShuffleIterator(source, 5, Keyed(3))

        for plan in ((4, 2, 4), (2, 4, 2)):
            for seed in range(10):
                rng = random.Random(seed)
                run = Run(make_shard, 8)
                for number in plan[:2]:
                    run.go_on(number, rng.randint(0, 9))
                run.go_on(plan[2], None)
                with self.subTest(plan=plan, seed=seed):
                    self.assertEqual(sorted(run.items), list(range(50)))

    def test_ranks_that_share_their_data_save_the_same_state(self):
        """With tensor parallelism several processes form one rank; all of them may save, and all restore."""
        make_shard = Shard("buckets")
        expected = alone(make_shard, 8)
        processes = [rank_of(make_shard, 8, 2, number // 2, None) for number in range(4)]
        first = [take(process, 7) for process in processes]
        self.assertEqual(first[0], first[1])
        self.assertEqual(first[2], first[3])
        states = [process.getstate() for process in processes]
        state = merge([states[0], as_json(states[1]), as_json(states[2]), states[3]])
        self.assertEqual(as_json(state), as_json(merge([processes[1].getstate(), processes[2].getstate()])))
        rest = [list(rank_of(make_shard, 8, 3, number // 2, state)) for number in range(6)]
        self.assertEqual(rest[::2], rest[1::2])
        items = first[0] + first[2] + list(chain(*rest[::2]))
        self.assertEqual(counted(items), counted(chain(*expected)))

    def test_a_run_of_more_ranks_than_shards_leaves_some_idle_and_says_so(self):
        with self.assertLogs("infinibatch.iterators", logging.WARNING) as logs:
            ranks = [its.ShardedIterator(Shard(), 3, 5, rank) for rank in range(5)]
        self.assertEqual(
            [record.getMessage() for record in logs.records],
            ["instance {} of 5 serves none of 3 shards".format(rank) for rank in (3, 4)],
        )
        lengths = [len(list(rank)) for rank in ranks]
        self.assertEqual([length > 0 for length in lengths], [True, True, True, False, False])
        state = merge([rank.getstate() for rank in ranks])
        self.assertEqual(len(state["shards"]), 3)
        self.assertEqual(list(rank_of(Shard(), 3, 1, 0, state)), [])

    def test_equal_numbers_of_batches_on_all_ranks_of_an_endless_run(self):
        make = partial(its.ShardedIterator, Shard("batches", None), 12)
        for number in (3, 4, 5):
            parts = [list(its.TakeIterator(make(number, rank), 20)) for rank in range(number)]
            self.assertEqual([len(part) for part in parts], [20] * number)

    def test_files_of_all_ranks_become_one_state(self):
        make_shard = Shard("buckets")
        with tempfile.TemporaryDirectory() as folder:
            before = []
            for rank in range(4):
                iterator = rank_of(make_shard, 8, 4, rank, None)
                before += take(iterator, 3 + rank)
                save(iterator, os.path.join(folder, "{}.json".format(rank)))
            states = []
            for rank in range(4):
                iterator = its.ShardedIterator(make_shard, 8, 4, rank)
                load(iterator, os.path.join(folder, "{}.json".format(rank)))
                states.append(iterator.getstate())
        after = [list(rank_of(make_shard, 8, 3, rank, merge(states))) for rank in range(3)]
        self.assertEqual(counted(before + list(chain(*after))), counted(chain(*alone(make_shard, 8))))


# ---------------------------------------------------------------------------------------------------------------------
# One rank
# ---------------------------------------------------------------------------------------------------------------------


def small_shard(num_shards, shard, source=Native, call=common.nothing):
    """Build a shard that calls a function for each item; shard 1 is empty, the others have 5 items and more."""
    items = [(shard, i) for i in range(0 if shard == 1 else 5 + shard)]
    return its.MapIterator(source(items), partial(called, call))


class TestShardedIterator(unittest.TestCase):
    def test_shards_are_served_in_turn_the_one_that_gave_least_first(self):
        items = list(its.ShardedIterator(small_shard, 4))
        self.assertEqual(items[:7], [(0, 0), (2, 0), (3, 0), (0, 1), (2, 1), (3, 1), (0, 2)])
        self.assertEqual(items[-4:], [(3, 5), (2, 6), (3, 6), (3, 7)])
        for rank in range(2):
            iterator = its.ShardedIterator(small_shard, 4, 2, rank)
            self.assertEqual(list(iterator), [item for item in items if item[0] % 2 == rank])

    def test_least_first_goes_on_where_shards_are_at_different_places(self):
        state = merge(
            [
                skip(its.ShardedIterator(small_shard, 4, 2, 0), 7).getstate(),
                its.ShardedIterator(small_shard, 4, 2, 1).getstate(),
            ]
        )
        self.assertEqual(
            take(rank_of(small_shard, 4, 1, 0, state), 6), [(3, 0), (3, 1), (3, 2), (2, 3), (3, 3), (0, 4)]
        )

    def test_every_position_restores_with_errors_of_callbacks_and_sources(self):
        for number, rank in ((1, 0), (2, 0), (2, 1), (5, 4)):
            for source in (Native, Own):

                def make(call=common.nothing):
                    return its.ShardedIterator(partial(small_shard, source=source, call=call), 4, number, rank)

                with self.subTest(number=number, rank=rank, source=source):
                    check_iterator(make, positions=6)
                    if rank == 0:
                        check_iterator(make, errors=[ValueError, StopIteration, KeyboardInterrupt], positions=3)

    def test_every_kind_of_shard_restores_at_every_position(self):
        for kind in KINDS:
            for epochs in (1, None):
                if epochs is None and kind not in ("buckets", "mix"):
                    continue
                with self.subTest(kind=kind, epochs=epochs):
                    make = partial(its.ShardedIterator, Shard(kind, epochs), 3, 2, 0)
                    check_iterator(make, take=None if epochs else 20, positions=2)

    def test_pipeline_can_be_pickled_and_copied(self):
        check_iterator(partial(its.ShardedIterator, Shard("items"), 3, 2, 0), pickles=True, positions=4)
        iterator = skip(its.ShardedIterator(Shard("batches"), 5), 20)
        self.assertLess(len(pickle.dumps(iterator)), 10000)

    def test_stages_behind_the_shards_restore_too(self):
        def make():
            sharded = its.ShardedIterator(Shard("items"), 5, 2, 0)
            batches = its.FixedBatchIterator(its.BlockwiseShuffleIterator(sharded, 6, Keyed(1)), 4)
            return its.MapIterator(batches, tuple)

        check_iterator(make, positions=5)

    def test_equal_positions_give_equal_states_whatever_happened_before(self):
        straight = its.ShardedIterator(Shard("buckets", None), 4)
        crooked = its.ShardedIterator(Shard("buckets", None), 4)
        rng = random.Random(1)
        for _ in range(12):
            number = rng.randint(0, 30)
            skip(straight, number)
            skip(crooked, number)
            state = straight.getstate()
            self.assertEqual(as_json(crooked.getstate()), as_json(state))
            crooked = its.ShardedIterator(Shard("buckets", None), 4)
            crooked.setstate(as_json(state))
            self.assertEqual(as_json(crooked.getstate()), as_json(state))

    def test_state_says_what_each_shard_has_served_and_which_have_ended(self):
        iterator = its.ShardedIterator(small_shard, 3, 2, 1)  # shard 1, which is empty
        self.assertEqual(
            iterator.getstate(), {"num_shards": 3, "shards": {"1": {"num_served": 0, "ended": False, "state": None}}}
        )
        self.assertEqual(list(iterator), [])
        self.assertEqual(
            iterator.getstate(), {"num_shards": 3, "shards": {"1": {"num_served": 0, "ended": True, "state": None}}}
        )
        iterator = skip(its.ShardedIterator(small_shard, 3), 12)
        state = iterator.getstate()
        self.assertEqual(set(state), {"num_shards", "shards"})
        self.assertEqual([shard["num_served"] for shard in state["shards"].values()], [5, 0, 7])
        self.assertEqual([shard["ended"] for shard in state["shards"].values()], [True, True, False])

    def test_shard_that_has_ended_is_not_built_again(self):
        built = []

        def make_shard(num_shards, shard):
            built.append(shard)
            return small_shard(num_shards, shard)

        state = skip(its.ShardedIterator(make_shard, 3), 12).getstate()
        del built[:]
        self.assertEqual(list(rank_of(make_shard, 3, 1, 0, state)), [])
        self.assertEqual(built, [2])

    def test_shards_are_built_when_they_are_asked_and_once(self):
        built = []

        def make_shard(num_shards, shard):
            built.append((num_shards, shard))
            return small_shard(num_shards, shard)

        iterator = its.ShardedIterator(make_shard, 9, 3, 2)
        iterator.getstate()
        iterator.setstate(None)
        self.assertEqual(built, [])
        next(iterator)
        self.assertEqual(built, [(9, 2)])
        list(iterator)
        self.assertEqual(built, [(9, 2), (9, 5), (9, 8)])

    def test_restoring_reads_again_what_each_shard_holds(self):
        read = []

        def reader(ref):
            read.append(ref)
            return read_chunk(ref)

        make_shard = partial(Shard("items", None), reader=reader)
        iterator = skip(its.ShardedIterator(make_shard, 4), 2000)
        del read[:]
        resumed = rank_of(make_shard, 4, 1, 0, iterator.getstate())
        self.assertEqual(read, [])
        self.assertEqual(take(resumed, 40), take(iterator, 40))
        self.assertLess(len(read), 4 * 30)

    def test_position_does_not_change_the_size_of_the_state(self):
        names = ["part-{:05d}.gz".format(i) for i in range(1000)]

        def make(number, rank):
            return datasets.sharded_dataset_iterator(
                names,
                lambda name: [(name, i) for i in range(30)],
                64 * 50,
                num_shards=64,
                seed=1,
                make_batches=lambda items: its.BucketedReadaheadBatchIterator(items, 40, repr, 8, seed=Keyed(1)),
                num_instances=number,
                instance_rank=rank,
            )

        iterator = make(1, 0)
        for steps in (0, 1, 500, 2000):
            skip(iterator, steps)
            state = merge([rank_of_state.getstate() for rank_of_state in self.split(make, iterator.getstate())])
            self.assertLessEqual(len(json.dumps(state)), 32 * 1024)
        far = json.loads(json.dumps(state).replace('"random_state": [0, ', '"random_state": [1000000, '))
        self.assertNotEqual(far, state)
        self.assertLessEqual(len(json.dumps(far)), 32 * 1024)
        ahead = make(1, 0)
        ahead.setstate(far)  # no permutation before that one is drawn
        self.assertEqual(len(take(ahead, 64)), 64)

    def split(self, make, state):
        for rank in range(4):
            iterator = make(4, rank)
            iterator.setstate(state)
            yield iterator

    def test_bad_arguments_are_refused_with_name_rule_and_value(self):
        make = partial(its.ShardedIterator, small_shard)
        bad = common.bad_functions(lambda value: its.ShardedIterator(value, 4), "make_shard")
        bad += common.bad_sizes(make, "num_shards")
        bad += common.bad_instances(lambda num_instances, instance_rank: make(4, num_instances, instance_rank))
        bad += [
            (partial(make, 4, num_processes=-1), ValueError, "num_processes must be at least 0, got -1"),
            (partial(make, 4, num_processes=1.0), TypeError, "num_processes must be an integer of at least 0, got 1.0"),
            (partial(make, 4, start="x"), ValueError, "start must be 'fork', 'thread', 'spawn' or None, got 'x'"),
        ]
        for construct, error, pattern in bad:
            with self.subTest(pattern=pattern):
                self.assertRaisesRegex(error, pattern, construct)

    def test_shard_that_is_no_iterator_is_an_error_at_each_next(self):
        for wrong in common.NO_SOURCES:
            iterator = its.ShardedIterator(lambda num_shards, shard: wrong, 4)
            for _ in range(2):
                with self.assertRaisesRegex(
                    ValueError, "what make_shard returns must be a CheckpointableIterator, got"
                ):
                    next(iterator)

    def test_error_of_make_shard_is_raised_and_the_next_call_tries_again(self):
        failures = [OSError("first"), OSError("second")]

        def make_shard(num_shards, shard):
            if shard == 2 and failures:
                raise failures.pop(0)
            return small_shard(num_shards, shard)

        iterator = its.ShardedIterator(make_shard, 4)
        found = [next(iterator)]
        self.assertRaisesRegex(OSError, "first", next, iterator)
        state = iterator.getstate()
        self.assertRaisesRegex(OSError, "second", next, iterator)
        self.assertEqual(iterator.getstate(), state)
        self.assertEqual(found + list(iterator), list(its.ShardedIterator(small_shard, 4)))
        self.assertEqual(list(rank_of(small_shard, 4, 1, 0, state)), list(its.ShardedIterator(small_shard, 4))[1:])

    def test_close_reaches_every_shard_that_was_built(self):
        made = []

        def make_shard(num_shards, shard):
            made.append(Own([(shard, i) for i in range(3)]))
            return its.FixedBatchIterator(made[-1], 2)

        with its.ShardedIterator(make_shard, 4) as iterator:
            skip(iterator, 3)
            self.assertEqual([source.log["close"] for source in made], [0] * 3)
        self.assertEqual([source.log["close"] for source in made], [1] * 3)
        iterator.close()
        self.assertEqual(len(list(iterator)), 5)  # nothing in it needs a process

    def test_shard_that_ends_is_closed(self):
        made = {}

        def make_shard(num_shards, shard):
            made[shard] = Own([(shard, i) for i in range(2 * shard)])
            return made[shard]

        iterator = skip(its.ShardedIterator(make_shard, 3), 5)
        self.assertEqual([made[shard].log["close"] for shard in range(3)], [1, 1, 0])
        self.assertEqual(len(list(iterator)), 1)

    def test_closed_pipeline_whose_shards_hold_workers_gives_no_more_items(self):
        def make_shard(num_shards, shard):
            return its.PrefetchIterator(Native([(shard, i) for i in range(3)]), 2, start="thread")

        iterator = skip(its.ShardedIterator(make_shard, 4), 2)
        iterator.close()
        for _ in range(3):
            self.assertRaisesRegex(RuntimeError, "is closed", next, iterator)

    def test_repr_names_the_function_and_the_numbers(self):
        iterator = its.ShardedIterator(small_shard, 8, 4, 3)
        numbers = "num_shards=8, num_instances=4, instance_rank=3, num_processes=0"
        self.assertRegex(repr(iterator), r"^ShardedIterator\(make_shard=.*small_shard.*, {}\)".format(numbers))

    def test_shards_that_hold_the_same_list_share_it(self):
        names = ["part-{}".format(i) for i in range(20)]
        made = []

        def make_shard(num_shards, shard):
            made.append(its.PermutationSourceIterator(names, 1, Keyed(1), True, num_shards, shard))
            return made[-1]

        items = list(its.ShardedIterator(make_shard, 4))
        self.assertEqual(sorted(items), sorted(names))
        self.assertEqual(len({id(source._source_items) for source in made}), 1)
        self.assertIsNot(made[0]._source_items, names)

    def test_shards_of_other_lists_keep_them(self):
        def make_shard(num_shards, shard):
            return its.PermutationSourceIterator([[shard, i] for i in range(3)], 1, Keyed(1))

        self.assertEqual(
            sorted(its.ShardedIterator(make_shard, 4)), [[shard, i] for shard in range(4) for i in range(3)]
        )


SHARD = Shard("items", None)


class TestShardsWithoutASeed(unittest.TestCase):
    def test_are_refused(self):
        # Each time that a shard is built, it would draw another order.
        for options in ({}, {"num_processes": 1, "start": "thread"}):
            shards = its.ShardedIterator(lambda *_: its.BufferedShuffleIterator(Native("ab"), 2, None), 2, **options)
            with shards, self.assertRaisesRegex(ValueError, "seed of BufferedShuffleIterator must be given in a shard"):
                next(shards)


class TestStatesThatDoNotFit(unittest.TestCase):
    def refused(self, pattern, state, make_shard=SHARD, num_shards=4, number=1, rank=0, **options):
        iterator = skip(its.ShardedIterator(make_shard, num_shards, number, rank, **options), 5)
        self.addCleanup(iterator.close)
        before = copy.deepcopy(iterator.getstate())
        self.assertRaisesRegex(ValueError, pattern, iterator.setstate, state)
        self.assertEqual(iterator.getstate(), before)
        twin = its.ShardedIterator(make_shard, num_shards, number, rank)
        self.assertEqual(take(iterator, 10), take(skip(twin, 5), 10))

    def state(self, make_shard=SHARD, num_shards=4, number=1, steps=200):
        ranks = [its.ShardedIterator(make_shard, num_shards, number, rank) for rank in range(number)]
        return as_json(merge([skip(rank, steps // number).getstate() for rank in ranks]))

    def test_state_of_another_number_of_shards(self):
        self.refused("does not fit: 'num_shards' must be 4, as in this pipeline .*, got 8", self.state(num_shards=8))

    def test_state_of_some_ranks_only(self):
        for number, rank, own, missing in ((1, 0, 4, "1, 3"), (2, 1, 2, "1, 3"), (4, 3, 1, "3")):
            self.refused(
                r"lacks {} of the {} shards of this instance \({}\): merge the states of all instances".format(
                    len(missing.split()), own, missing
                ),
                as_json(skip(its.ShardedIterator(Shard("items", None), 4, 2, 0), 5).getstate()),
                number=number,
                rank=rank,
            )

    def test_state_of_a_pipeline_without_shards(self):
        states = [
            skip(datasets.chunked_dataset_iterator(range(40), read_chunk, 7, seed=1), 5).getstate(),
            {"source_state": {"random_state": None, "index": 0}, "flattened_items_yielded": 0},
            {},
        ]
        for state in states:
            self.refused("lacks the key 'shards': it is of a pipeline without shards, .* with the num_instances", state)
        for state in (5, [], "text"):
            self.refused("a checkpoint of ShardedIterator is a dict with the keys 'num_shards', 'shards', got", state)

    def test_state_of_another_list_of_chunks(self):
        there, here = ["a{}.gz".format(i) for i in range(40)], ["b{}.gz".format(i) for i in range(40)]

        def make_shard(refs, num_shards, shard):
            return Shard("items", None)(num_shards, shard, refs, lambda ref: [ref] * 9)

        for options in ({}, {"num_processes": 2, "start": "thread"}):
            state = self.state(partial(make_shard, there))
            self.refused("made with a list of items with other names", state, partial(make_shard, here), **options)
            self.refused("a list of 40 items, here it is 39", state, partial(make_shard, there[1:]), **options)

    def test_state_of_another_list_or_seed_after_the_first_item(self):
        self.refused("a list of 40 items, here it is 37", self.state(steps=1), partial(SHARD, refs=range(37)))
        self.refused("must be of the same Keyed seed", self.state(steps=1), Shard("items", None, Keyed(2)))

    def test_state_of_a_young_shard_as_it_was_saved_before_that_held_its_first_item(self):
        # Until 16 items the state was that of the start.
        for steps in range(1, 16):
            state = self.state(num_shards=1, steps=steps)
            state["shards"]["0"]["state"] = None
            iterator = its.ShardedIterator(SHARD, 1)
            iterator.setstate(state)
            self.assertEqual(take(iterator, 40), take(skip(its.ShardedIterator(SHARD, 1), steps), 40))

    def test_state_that_a_users_own_stage_refuses(self):
        class Bounded(Own):
            def setstate(self, checkpoint):
                if checkpoint is not None and checkpoint["own"][0] > 100:
                    raise ValueError("the user's own class knows of no such position")
                super().setstate(checkpoint)

        def make_shard(num_shards, shard):
            return its.FixedBatchIterator(Bounded(range(100)), 2)

        for options in ({}, {"num_processes": 2, "start": "thread"}):
            state = self.state(make_shard, steps=20)
            state["shards"]["2"]["state"]["source_state"]["own"] = [101]
            self.refused("knows of no such position", state, make_shard, **options)

    def test_state_of_another_keyed_seed(self):
        self.refused("'random_state' must be of the same Keyed seed", self.state(), Shard("items", None, Keyed(2)))

    def test_state_that_was_edited(self):
        state = self.state()
        for key, wrong, pattern in (
            ("num_served", -1, "'num_served' must be an integer of at least 0, got -1"),
            ("num_served", "5", "'num_served' must be an integer of at least 0, got '5'"),
            ("num_served", None, "'num_served' must be an integer of at least 0, got None"),
            ("ended", 1, "'ended' must be true or false, got 1"),
            ("ended", None, "'ended' must be true or false, got None"),
            ("state", None, "'state' must be that of a shard that has served 50 items, got None"),
            ("state", 5, "checkpoint of BlockwiseShuffleIterator is a dict"),
            ("state", {}, "checkpoint of BlockwiseShuffleIterator lacks the key 'source_state'"),
        ):
            with self.subTest(key=key, wrong=wrong):
                edited = copy.deepcopy(state)
                edited["shards"]["3"][key] = wrong
                self.refused(pattern, edited)
                self.refused(pattern, edited, num_processes=2, start="thread")  # which the second group finds
        for key in ("num_served", "ended", "state"):
            edited = copy.deepcopy(state)
            del edited["shards"]["3"][key]
            self.refused("checkpoint of ShardedIterator lacks the key '{}'".format(key), edited)
        self.refused("'shards' must be a dict, got", dict(state, shards=[]))
        self.refused("is a dict with the keys", dict(state, shards=dict(state["shards"], **{"2": 5})))

    def test_position_beyond_the_data_of_a_shard_is_an_error_and_not_its_end(self):
        def make_shard(length, num_shards, shard):
            return Native([(shard, i) for i in range(length)])

        state = skip(its.ShardedIterator(partial(make_shard, 40), 2), 60).getstate()
        for length in (29, 17, 16):
            iterator = its.ShardedIterator(partial(make_shard, length), 2)
            iterator.setstate(state)
            for _ in range(2):
                with self.assertRaisesRegex(RuntimeError, "beyond the end of the data.*cannot pass over 14 items"):
                    next(iterator)

    def test_state_of_another_number_of_instances_without_shards_names_the_way(self):
        for kind in (
            partial(its.InfinitePermutationSourceIterator, range(9), 1, True),
            partial(its.ChunkedSourceIterator, range(9)),
            partial(its.PermutationSourceIterator, range(9), 1, 1, True),
        ):
            state = skip(kind(2, 0), 2).getstate()
            pattern = "num_instances = 2, here it is 4; only a ShardedIterator goes on with another number"
            self.assertRaisesRegex(ValueError, pattern, kind(4, 0).setstate, as_json(state))


class TestMerge(unittest.TestCase):
    def ranks(self, number, steps, num_shards=4):
        return [
            skip(its.ShardedIterator(Shard("items", None), num_shards, number, rank), steps).getstate()
            for rank in range(number)
        ]

    def test_order_of_the_ranks_does_not_matter(self):
        states = self.ranks(4, 7, 12)
        merged = merge(states)
        self.assertEqual(merge(states[::-1]), merged)
        self.assertEqual(list(merged["shards"]), [str(shard) for shard in range(12)])
        self.assertEqual(merge(iter(states)), merged)
        self.assertEqual(merge([merged]), merged)
        self.assertEqual(merge([merged, states[1]]), merged)

    def test_states_of_different_moments_are_refused_with_what_differs(self):
        early, late = self.ranks(2, 7), self.ranks(1, 50)
        pattern = "same moment, two differ in shard 0: .*'num_served': 4.*'num_served': 13"
        with self.assertRaisesRegex(ValueError, pattern):
            merge([early[0], late[0]])

    def test_states_of_different_numbers_of_shards_are_refused(self):
        with self.assertRaisesRegex(ValueError, "states differ in their number of shards: 4 and 12"):
            merge([self.ranks(2, 3)[0], self.ranks(2, 3, 12)[1]])

    def test_what_is_no_state_of_shards_is_refused(self):
        half = [{"num_shards": 4}, {"shards": {}}, {"num_shards": 4, "shards": []}]
        for state in [None, 5, {}, Native("a").getstate()] + half:
            with self.assertRaisesRegex(ValueError, r"states\[1\] is not the state of a ShardedIterator: "):
                merge(self.ranks(1, 1) + [state])
        self.assertRaisesRegex(ValueError, "states must be at least 1, got 0", merge, [])

    def test_states_that_json_cannot_hold_are_merged(self):
        def make_shard(num_shards, shard):
            def count(state, item):
                return (state[0] | {item}, b"bytes"), (shard, item)

            return its.RecurrentIterator(Native(range(40)), count, (frozenset(), b""))

        states = [skip(its.ShardedIterator(make_shard, 4, 2, rank), 40).getstate() for rank in (0, 1, 0)]
        merged = merge(states)
        self.assertEqual(take(rank_of(make_shard, 4, 1, 0, merged), 4), [(shard, 20) for shard in range(4)])

    def test_key_order_and_tuples_do_not_make_states_differ(self):
        (state,) = self.ranks(1, 100)
        other = json.loads(json.dumps(state, sort_keys=True))
        self.assertEqual(as_json(merge([state, other])), as_json(state))


# ---------------------------------------------------------------------------------------------------------------------
# Processes
# ---------------------------------------------------------------------------------------------------------------------


class TestProcesses(unittest.TestCase):
    STARTS = ["thread"] + ["fork"] * HAS_FORK

    def test_order_and_state_do_not_depend_on_processes(self):
        for kind, epochs in (("buckets", 1), ("items", None), ("kept", 1)):
            plain = its.ShardedIterator(Shard(kind, epochs), 6, 2, 0)
            expected, states = [], [plain.getstate()]
            for item in islice(plain, 60):
                expected.append(item)
                states.append(plain.getstate())
            for number in (1, 2, 5):
                for start in self.STARTS:
                    with self.subTest(kind=kind, epochs=epochs, number=number, start=start):
                        options = {"num_processes": number, "start": start}
                        with its.ShardedIterator(Shard(kind, epochs), 6, 2, 0, **options) as iterator:
                            for position, item in enumerate(expected):
                                self.assertEqual(iterator.getstate(), states[position])
                                self.assertEqual(next(iterator), item)
                            half = len(expected) // 2
                            iterator.setstate(as_json(states[half]))
                            self.assertEqual(take(iterator, len(expected) - half), expected[half:])
                            self.assertEqual(as_json(iterator.getstate()), as_json(states[len(expected)]))

    def test_runs_go_on_with_other_numbers_of_processes_and_ranks(self):
        expected = counted(chain(*alone(Shard("buckets"), 8)))
        for start in self.STARTS:
            run = Run(Shard("buckets"), 8, start=start)
            for number, processes, steps in ((2, 1, 5), (3, 0, 4), (1, 2, 6), (4, 5, 2), (1, 1, None)):
                run.options["num_processes"] = processes
                run.go_on(number, steps)
            self.assertEqual(counted(run.items), expected)

    def test_contract_holds_with_processes(self):
        def make(start, call=common.nothing):
            return its.ShardedIterator(partial(small_shard, call=call), 4, num_processes=2, start=start)

        for start in self.STARTS:
            check_iterator(partial(make, start), list(its.ShardedIterator(small_shard, 4)), positions=2, pickles=True)
        check_iterator(partial(make, "thread"), positions=2, errors=[ValueError])

    @unittest.skipUnless(HAS_FORK, "needs processes to kill")
    def test_killed_worker_is_started_again_and_nothing_is_lost(self):
        expected = take(its.ShardedIterator(Shard("buckets", None), 6), 300)
        with its.ShardedIterator(Shard("buckets", None), 6, num_processes=2, start="fork") as iterator:
            found = []
            for victim in (0, 1, 0, 1):
                found += take(iterator, 20)
                worker = iterator._inputs[victim]._workers[0]
                os.kill(worker.pid, signal.SIGKILL)
                with self.assertRaisesRegex(RuntimeError, "died|SIGKILL"):
                    while True:  # what it had computed still comes
                        found.append(next(iterator))
                self.assertEqual(found, expected[: len(found)])
                twin = skip(its.ShardedIterator(Shard("buckets", None), 6), len(found))
                self.assertEqual(iterator.getstate(), twin.getstate())
            found += take(iterator, 300 - len(found))
            self.assertEqual(found, expected)

    def test_pipeline_runs_in_spawned_processes(self):
        expected = list(its.ShardedIterator(Shard("batches"), 4))
        with its.ShardedIterator(Shard("batches"), 4, num_processes=2, start="spawn") as iterator:
            first = take(iterator, 10)
            state = as_json(iterator.getstate())
            self.assertEqual(first + list(iterator), expected)
        with its.ShardedIterator(Shard("batches"), 4, num_processes=1, start="spawn") as iterator:
            iterator.setstate(state)
            self.assertEqual(list(iterator), expected[10:])

    def test_close_ends_all_workers_and_the_pipeline(self):
        for start in self.STARTS:
            iterator = skip(its.ShardedIterator(Shard("items", None), 6, num_processes=3, start=start), 7)
            state = iterator.getstate()
            iterator.close()
            iterator.close()
            self.assertEqual([group._workers for group in iterator._inputs], [()] * 3)
            self.assertEqual(iterator.getstate(), state)
            self.assertRaisesRegex(RuntimeError, "is closed", next, iterator)
            self.assertRaisesRegex(RuntimeError, "is closed", iterator.setstate, state)
            self.assertRaisesRegex(RuntimeError, "is closed", iterator.setstate, None)

    def test_error_of_a_shard_in_a_process_comes_with_its_type_and_loses_nothing(self):
        for start in self.STARTS:
            with tempfile.TemporaryDirectory() as folder:
                flag = os.path.join(folder, "flag")

                def transform(item):
                    if item == (2, 3) and not os.path.exists(flag):
                        open(flag, "w").close()
                        raise LookupError("once")
                    return item

                def make_shard(num_shards, shard):
                    return its.MapIterator(small_shard(num_shards, shard), transform)

                found = []
                with its.ShardedIterator(make_shard, 4, num_processes=2, start=start) as iterator:
                    with self.assertRaisesRegex(LookupError, "once"):
                        for item in iterator:
                            found.append(item)
                    found += list(iterator)
                self.assertEqual(found, list(its.ShardedIterator(small_shard, 4)))


# ---------------------------------------------------------------------------------------------------------------------
# Keyed seeds
# ---------------------------------------------------------------------------------------------------------------------


def generator_of(seed, number, scope, k):
    """Return a generator by the public rule."""
    digest = hashlib.sha256(ascii((seed, number, scope, k)).encode()).digest()
    return random.Random(int.from_bytes(digest, "big"))


def shuffled(items, generator):
    items = list(items)
    generator.shuffle(items)
    return items


def keyed_stages(seed):
    """Return for each random stage a function that builds it over a source, and whether it ends."""
    return [
        ("InfinitePermutationSourceIterator", lambda s=None: its.InfinitePermutationSourceIterator(range(9), seed)),
        ("PermutationSourceIterator", lambda s=None: its.PermutationSourceIterator(range(9), 3, seed)),
        ("RandomIterator", lambda s=None: its.RandomIterator(seed)),
        ("SamplingRandomMapIterator", lambda s=None: its.SamplingRandomMapIterator(s or Native(range(25)), draw, seed)),
        ("BlockwiseShuffleIterator", lambda s=None: its.BlockwiseShuffleIterator(s or Native(range(25)), 6, seed)),
        ("BufferedShuffleIterator", lambda s=None: its.BufferedShuffleIterator(s or Native(range(25)), 6, seed)),
        (
            "BucketedReadaheadBatchIterator",
            lambda s=None: its.BucketedReadaheadBatchIterator(s or Native(range(25)), 9, repr, 2, seed=seed),
        ),
        ("MixIterator", lambda s=None: its.MixIterator([s or Native(range(25)), Native(range(30, 60))], [2, 1], seed)),
    ]


ENDLESS = {"InfinitePermutationSourceIterator", "RandomIterator"}


def draw(rng, item):
    return item, rng.random()


class TestKeyed(unittest.TestCase):
    def test_rule_by_hand_for_permutations(self):
        for seed in (1, -5, 0.5, "text", "é\u0870", b"bytes"):
            with self.subTest(seed=seed):
                expected = chain(*[shuffled(range(9), generator_of(seed, 0, [], k)) for k in range(4)])
                self.assertEqual(take(its.InfinitePermutationSourceIterator(range(9), Keyed(seed)), 36), list(expected))
        whole = take(its.InfinitePermutationSourceIterator(range(9), Keyed(1)), 36)
        for rank in range(4):  # instances deal out the same permutations
            source = its.InfinitePermutationSourceIterator(range(9), Keyed(1), True, 4, rank)
            self.assertEqual(take(source, 9), whole[rank::4])
        self.assertEqual(list(its.PermutationSourceIterator(range(9), 4, Keyed(1))), whole)

    def test_stages_below_a_users_own_one_have_keys_of_their_own(self):
        class Hiding(its.CheckpointableIterator):
            """Names its sources in a way of its own, and another thing as the library names sources."""

            _sources = _inputs = 5

            def __init__(self, source, among_others):
                self.mine = ["x", source] if among_others else source

            def inner(self):
                return self.mine[1] if isinstance(self.mine, list) else self.mine

            def getstate(self):
                return self.inner().getstate()

            def setstate(self, checkpoint):
                self.inner().setstate(checkpoint)

            def __next__(self):
                return next(self.inner())

        def shuffled_twice(items, hide):
            inner = its.BlockwiseShuffleIterator(Native(items), 10, Keyed(1))
            return its.BlockwiseShuffleIterator(hide(inner), 10, Keyed(1))

        def make_shard(hide, num_shards, shard):
            return hide(its.BlockwiseShuffleIterator(Native(range(10)), 10, Keyed(1)))

        plain = list(shuffled_twice(range(10), lambda source: source))
        shards = list(its.ShardedIterator(partial(make_shard, lambda source: source), 2))
        self.assertNotEqual(shards[::2], shards[1::2])
        for among_others in (False, True):
            hide = partial(Hiding, among_others=among_others)
            self.assertEqual(list(shuffled_twice(range(10), hide)), plain)
            self.assertEqual(list(its.ShardedIterator(partial(make_shard, hide), 2)), shards)
            combined = its.ZipIterator(hide(Native("ab")), its.ChainIterator(hide(Native("cd"))))
            self.assertEqual(repr(combined).count("Hiding()"), 2)
            self.assertEqual(list(combined), [("a", "c"), ("b", "d")])

    def test_sharded_iterators_that_come_together_draw_other_numbers(self):
        def corpus():
            return datasets.sharded_dataset_iterator(range(8), lambda chunk: [chunk] * 3, 8, num_shards=2, num_epochs=1)

        triples = [(a, b, c) for a, (b, c) in its.ZipIterator(corpus(), its.ZipIterator(corpus(), corpus()))]
        first, second, third = zip(*triples)
        self.assertEqual(list(first), list(corpus()))
        for items in (first, second, third):
            self.assertEqual(sorted(items), sorted(list(range(8)) * 3))
        self.assertEqual(len({first, second, third}), 3)
        check_iterator(lambda: its.ZipIterator(corpus(), corpus()), list(zip(first, second)), positions=5)
        second = corpus()
        its.ZipIterator(corpus(), second)  # and is dropped
        self.assertEqual([a for a, _ in its.ZipIterator(second, corpus())], list(corpus()))
        read = corpus()
        next(read)
        with self.assertRaisesRegex(ValueError, "a ShardedIterator must be fresh when it comes together with others"):
            its.ZipIterator(corpus(), read)

    def test_rule_by_hand_for_blocks(self):
        for number in (1, 3):
            for rank in range(number):
                source = its.InfinitePermutationSourceIterator(range(9), Keyed(7), True, number, rank)
                scope = [(number, rank)] if number > 1 else []
                items = take(source, 30)
                source.setstate(None)
                shuffle = its.BlockwiseShuffleIterator(its.MapIterator(source, int), 10, Keyed(7))
                again = its.BlockwiseShuffleIterator(its.PrefetchIterator(shuffle, 5, start="thread"), 5, Keyed(7))
                first = [shuffled(items[10 * k : 10 * k + 10], generator_of(7, 1, scope, k)) for k in range(3)]
                with self.subTest(number=number, rank=rank):
                    self.assertEqual(take(shuffle, 30), list(chain(*first)))
                    shuffle.setstate(None)
                    flat = list(chain(*first))
                    second = [shuffled(flat[5 * k : 5 * k + 5], generator_of(7, 2, scope, k)) for k in range(6)]
                    self.assertEqual(take(again, 30), list(chain(*second)))
                    again.close()

    def test_rule_by_hand_in_a_shard(self):
        def make_shard(num_shards, shard):
            dealt = its.InfinitePermutationSourceIterator(range(9), Keyed(7), True, num_shards, shard)
            own = its.InfinitePermutationSourceIterator("abcdefg", Keyed(7))
            return its.ZipIterator(its.BlockwiseShuffleIterator(dealt, 4, Keyed(7)), own)

        for shard in range(3):
            items = list(chain(*[shuffled(range(9), generator_of(7, 0, [], k)) for k in range(6)]))[shard::3]
            scope = [(3, shard)]
            blocks = chain(*[shuffled(items[4 * k : 4 * k + 4], generator_of(7, 1, scope, k)) for k in range(4)])
            letters = chain(*[shuffled("abcdefg", generator_of(7, 2, scope, k)) for k in range(3)])
            self.assertEqual(take(its.ShardedIterator(make_shard, 3, 3, shard), 16), list(zip(blocks, letters))[:16])

    def test_rule_by_hand_for_stages_that_draw_for_each_item(self):
        numbers = [generator_of("s", 0, [], k).random() for k in range(30)]
        self.assertEqual(take(its.RandomIterator(Keyed("s")), 30), numbers)
        sampled = its.SamplingRandomMapIterator(Native(range(30)), draw, Keyed("s"))
        self.assertEqual(list(sampled), list(enumerate(numbers)))

    def test_two_stages_with_one_seed_draw_different_numbers(self):
        def drawn(rng, item):
            return item + (rng.random(),)

        stage = its.MapIterator(Native(range(50)), lambda n: ())
        for _ in range(3):
            stage = its.SamplingRandomMapIterator(stage, drawn, Keyed(1))
        numbers = list(chain(*stage))
        self.assertEqual(len(set(numbers)), 150)
        pairs = list(its.ZipIterator(*[its.TakeIterator(its.RandomIterator(Keyed(1)), 50) for _ in range(3)]))
        self.assertEqual(len(set(chain(*pairs))), 150)

    def test_stages_of_all_branches_of_a_tree_draw_different_numbers(self):
        def numbers():
            return its.TakeIterator(its.RandomIterator(Keyed(1)), 20)

        def drawn(rng, item):
            return (item, rng.random())

        inner = its.MixIterator([numbers(), numbers()], [1, 1], Keyed(1), "drained")
        chained = its.ChainIterator(numbers(), its.SamplingRandomMapIterator(inner, drawn, Keyed(1)), numbers())
        outer = its.ZipIterator(chained, its.MultiplexIterator(Native([0, 1] * 20), [numbers(), numbers()]))
        found = []

        def flatten(item):
            if isinstance(item, tuple):
                for part in item:
                    flatten(part)
            else:
                found.append(item)

        flatten(tuple(outer))
        self.assertEqual(len(found), 40 + 40 + 20)
        self.assertEqual(len(set(found)), len(found))

    def test_two_shards_and_two_instances_draw_different_numbers(self):
        def make_shard(num_shards, shard):
            numbers = its.TakeIterator(its.RandomIterator(Keyed(1)), 20)
            return its.SamplingRandomMapIterator(numbers, lambda rng, x: (x, rng.random()), Keyed(1))

        found = list(chain(*its.ShardedIterator(make_shard, 4)))
        self.assertEqual(len(set(found)), 160)
        orders = {
            tuple(its.ShardedIterator(lambda n, s: its.PermutationSourceIterator(range(20), 1, Keyed(1)), 6, 6, shard))
            for shard in range(6)
        }
        self.assertEqual(len(orders), 6)
        drawn = []
        for rank in range(3):
            source = its.PermutationSourceIterator(range(20), 3, Keyed(1), True, 3, rank)
            drawn += [number for _, number in its.SamplingRandomMapIterator(source, draw, Keyed(1))]
        self.assertEqual(len(set(drawn)), 60)

    def test_stages_behind_the_shards_draw_other_numbers_than_those_within_and_those_of_other_ranks(self):
        def make_shard(num_shards, shard):
            numbers = its.TakeIterator(its.RandomIterator(Keyed(1)), 20)
            return its.MapIterator(numbers, lambda number: (number,))

        found = []
        for num_shards, number in ((1, 1), (4, 1), (4, 2), (4, 4)):
            for rank in range(number):
                sharded = its.ShardedIterator(make_shard, num_shards, number, rank)
                outer = its.SamplingRandomMapIterator(sharded, lambda rng, x: x + (rng.random(),), Keyed(1))
                found.append([number for pair in outer for number in pair])
            self.assertEqual(len(set(chain(*found))), sum(map(len, found)))
            del found[:]

    def test_stages_without_randomness_and_processes_change_no_order(self):
        def pipeline(between, **options):
            source = its.PermutationSourceIterator(range(30), 2, Keyed(5), True, 2, 1)
            items = between(its.SelectManyIterator(source, lambda n: [n, n + 100]))
            shuffle = between(its.BlockwiseShuffleIterator(items, 8, Keyed(5)))
            return its.SamplingRandomMapIterator(shuffle, draw, Keyed(5))

        expected = list(pipeline(lambda source: source))
        for name, between in (
            ("map", lambda source: its.MapIterator(source, int)),
            ("filter", lambda source: its.FilterIterator(source, lambda n: True)),
            ("prefetch", lambda source: its.PrefetchIterator(source, 5, start="thread")),
            ("parallel map", lambda source: its.ParallelMapIterator(source, int, 2, 3, start="thread")),
            ("take", lambda source: its.TakeIterator(source, 1000)),
            ("chain", lambda source: its.ChainIterator(source)),
            ("batches", lambda source: its.SelectManyIterator(its.FixedBatchIterator(source, 3))),
            ("windows", lambda source: its.MapIterator(its.WindowedIterator(source, 1), lambda window: window[0])),
            ("enumerate", lambda source: its.MapIterator(its.EnumerateIterator(source), lambda pair: pair[1])),
            ("zip", lambda source: its.MapIterator(its.ZipIterator(Native(range(999)), source), lambda pair: pair[1])),
            ("mix", lambda source: its.MixIterator([source], seed=3)),
            ("own", lambda source: OwnStage(source)),
        ):
            with self.subTest(between=name):
                with pipeline(between) as iterator:
                    self.assertEqual(list(iterator), expected)

    def test_any_permutation_is_reached_without_those_before(self):
        iterator = its.InfinitePermutationSourceIterator(range(9), Keyed(1))
        state = as_json(skip(iterator, 9).getstate())
        self.assertEqual(state["random_state"][0], 1)
        state["random_state"][0] = 10**6
        iterator.setstate(state)
        self.assertEqual(take(iterator, 9), shuffled(range(9), generator_of(1, 0, [], 10**6)))
        self.assertEqual(iterator.getstate()["random_state"][0], 10**6 + 1)

    def test_every_stage_keeps_the_contract(self):
        for seed in (Keyed(1), Keyed("text")):
            for name, make in keyed_stages(seed):
                with self.subTest(stage=name, seed=seed):
                    check_iterator(make, take=20 if name in ENDLESS else None, positions=5, pickles=True)

    def test_errors_lose_nothing(self):
        for name, _ in keyed_stages(Keyed(1))[3:]:

            def make(call=common.nothing):
                source = its.MapIterator(Native(range(14)), partial(called, call))
                return dict(keyed_stages(Keyed(1)))[name](source)

            with self.subTest(stage=name):
                check_iterator(make, positions=4, errors=[ValueError])

    def test_state_holds_a_few_integers(self):
        for name, make in keyed_stages(Keyed(1)):
            with self.subTest(stage=name):
                state = skip(make(), 12).getstate()
                self.assertLess(len(json.dumps(state)), 250)

    def test_state_of_a_plain_seed_is_refused_and_the_other_way_round(self):
        for (name, keyed), (_, plain) in zip(keyed_stages(Keyed(1)), keyed_stages(1)):
            for there, here, pattern in (
                (keyed, plain, "must be the state of a random.Random, got"),
                (plain, keyed, "must be what a Keyed seed leaves, a position and a checksum, got"),
            ):
                with self.subTest(stage=name, pattern=pattern):
                    state = as_json(skip(there(), 11).getstate())
                    iterator = skip(here(), 2)
                    self.assertRaisesRegex(ValueError, name + " does not fit: .*" + pattern, iterator.setstate, state)
                    self.assertEqual(take(iterator, 5), take(skip(here(), 2), 5))

    def test_state_of_another_keyed_seed_is_refused(self):
        for (name, there), (_, here) in zip(keyed_stages(Keyed(1)), keyed_stages(Keyed(2))):
            with self.subTest(stage=name):
                state = as_json(skip(there(), 11).getstate())
                pattern = name + " does not fit: .* must be of the same Keyed seed and as many random stages before"
                self.assertRaisesRegex(ValueError, pattern, skip(here(), 2).setstate, state)

    def test_state_with_another_random_stage_below_is_refused(self):
        there = its.BlockwiseShuffleIterator(its.InfinitePermutationSourceIterator(range(9), 1), 4, Keyed(1))
        here = its.BlockwiseShuffleIterator(its.InfinitePermutationSourceIterator(range(9), Keyed(1)), 4, Keyed(1))
        state = skip(there, 5).getstate()
        state["source_state"]["source_state"] = None
        self.assertRaisesRegex(ValueError, "as many random stages before", here.setstate, state)

    def test_sources_that_were_read_do_not_come_together(self):
        """A second random stage in front of it would change the order of a block of which items are out."""

        def source():
            return its.BlockwiseShuffleIterator(Native(range(9)), 4, Keyed(1))

        first, second = source(), skip(source(), 1)
        with self.assertRaisesRegex(ValueError, "sources with Keyed seeds must be fresh when they come together"):
            its.ZipIterator(first, second)
        read = skip(source(), 1)
        self.assertEqual(len(list(its.ZipIterator(read, source()))), 8)

    def test_seeds_of_every_kind(self):
        class Text(str):
            def __repr__(self):
                return "another"

        class Integer:
            def __index__(self):
                return 7

        def order(seed):
            return take(its.InfinitePermutationSourceIterator(range(20), Keyed(seed)), 20)

        self.assertEqual(order(True), order(1))
        self.assertEqual(order(Integer()), order(7))
        self.assertEqual(order(Text("text")), order("text"))
        self.assertEqual(len({tuple(order(seed)) for seed in (0, 1, "1", b"1", 1.0, -1, 2**100, "\ud800")}), 8)
        for seed in [None, Keyed(1)] + common.NO_SEEDS:
            with self.subTest(seed=seed):
                self.assertRaisesRegex(TypeError, "seed must be an int, float, str", Keyed, seed)

    def test_equal_seeds_are_equal(self):
        self.assertEqual(Keyed(1), Keyed(True))
        self.assertNotEqual(Keyed(1), Keyed("1"))
        self.assertNotEqual(Keyed(1), 1)
        self.assertEqual(len({Keyed("a"), Keyed("a"), Keyed("b")}), 2)
        self.assertEqual(repr(Keyed("a")), "Keyed('a')")
        self.assertEqual(pickle.loads(pickle.dumps(Keyed(b"a"))), Keyed(b"a"))

    def test_bump_seed_passes_it_on(self):
        seed = Keyed(1)
        self.assertIs(datasets.bump_seed(seed), seed)

    def test_chunked_dataset_takes_it_and_its_options_change_no_order(self):
        make = partial(datasets.chunked_dataset_iterator, range(20), read_chunk, 6, seed=Keyed(3), num_epochs=2)
        expected = list(make())
        self.assertEqual(counted(expected), counted([item for ref in range(20) for item in read_chunk(ref)] * 2))
        state = skip(make(), 30).getstate()
        self.assertLess(len(json.dumps(state)), 400)
        for options in ({"prefetch": True}, {"num_workers": 2}, {"transform": tuple}):
            with make(**options) as iterator:
                self.assertEqual(list(iterator), expected)
        with make(num_workers=1) as iterator:
            iterator.setstate(state)
            self.assertEqual(list(iterator), expected[30:])

    def test_one_object_serves_many_stages_and_none_changes_it(self):
        seed = Keyed(1)
        first = its.BlockwiseShuffleIterator(its.InfinitePermutationSourceIterator(range(9), seed), 4, seed)
        its.BlockwiseShuffleIterator(its.RandomIterator(seed), 4, seed)
        self.assertEqual(vars(seed), {"seed": 1})
        second = its.BlockwiseShuffleIterator(its.InfinitePermutationSourceIterator(range(9), Keyed(1)), 4, Keyed(1))
        self.assertEqual(take(first), take(second))

    def test_order_is_the_same_in_another_process_under_another_hash_seed(self):
        script = (
            "import json, pickle, sys\n"
            "iterator = pickle.load(sys.stdin.buffer)\n"
            "print(json.dumps([next(iterator) for _ in range(20)]))\n"
        )
        source = its.InfinitePermutationSourceIterator(list("abcdefgh"), Keyed("seed"), True, 2, 1)
        iterator = skip(its.BlockwiseShuffleIterator(source, 5, Keyed("seed")), 7)
        process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(os.environ, PYTHONPATH=ROOT, PYTHONHASHSEED="99"),
        )
        output, _ = process.communicate(pickle.dumps(iterator), timeout=120)
        self.assertEqual(json.loads(output.decode()), take(iterator, 20))

    def test_orders_of_this_version_stay(self):
        source = its.InfinitePermutationSourceIterator(range(8), Keyed("corpus"), True, 2, 1)
        items = its.BlockwiseShuffleIterator(source, 4, Keyed("corpus"))
        self.assertEqual(take(items, 8), [4, 7, 6, 0, 6, 0, 4, 5])


class OwnStage(its.CheckpointableIterator):
    """A user's own stage in the middle of a pipeline."""

    def __init__(self, source):
        self._source_iterator = source
        self.setstate(None)

    def getstate(self):
        return {"below": self._source_iterator.getstate()}

    def setstate(self, checkpoint):
        self._source_iterator.setstate(None if checkpoint is None else checkpoint["below"])

    def __next__(self):
        return next(self._source_iterator)

    def close(self):
        self._source_iterator.close()


# ---------------------------------------------------------------------------------------------------------------------
# Finite permutations, and the data set of shards
# ---------------------------------------------------------------------------------------------------------------------


class TestPermutationSourceIterator(common.Contract, common.Seeded, common.ListSource, unittest.TestCase):
    name = "PermutationSourceIterator"
    items = list(islice(common.permutations([1, None, "c", (5,)], 42), 12))
    num_sources = 0
    restored_at = 6
    bad_arguments = (
        common.bad_instances(lambda **kwargs: its.PermutationSourceIterator([1, 2], 1, 0, True, **kwargs))
        + common.bad_sizes(partial(its.PermutationSourceIterator, [1, 2]), "num_epochs")
        + [
            (partial(its.PermutationSourceIterator, []), ValueError, "source_items must have at least one item"),
            (
                partial(its.PermutationSourceIterator, [1], seed=None, num_instances=2),
                ValueError,
                "seed must be given to shuffle for num_instances = 2, got None",
            ),
        ]
    )

    def make(self, source=Native, call=common.nothing):
        return its.PermutationSourceIterator([1, None, "c", (5,)], 3, seed=42)

    def make_source(self, items, num_instances=1, instance_rank=0):
        return its.PermutationSourceIterator(items, 5, 3, True, num_instances, instance_rank)

    def seeded(self, seed):
        return its.PermutationSourceIterator(range(9), 6, seed)

    def reference(self, seed):
        return islice(common.permutations(range(9), seed), 54)

    def test_instances_get_each_item_once_in_each_epoch(self):
        for length in (1, 2, 3, 7):
            for epochs in (1, 2, 5):
                for number in (1, 2, 3, 5, 20):
                    for seed in (5, Keyed(5)):
                        whole = list(its.PermutationSourceIterator(range(length), epochs, seed))
                        parts = [
                            list(its.PermutationSourceIterator(range(length), epochs, seed, True, number, rank))
                            for rank in range(number)
                        ]
                        with self.subTest(length=length, epochs=epochs, number=number, seed=seed):
                            self.assertEqual(parts, [whole[rank::number] for rank in range(number)])
                            for k in range(epochs):
                                epoch = whole[k * length : (k + 1) * length]
                                self.assertEqual(sorted(epoch), list(range(length)))

    def test_every_position_of_an_instance_restores(self):
        for length, epochs, number, rank in ((7, 2, 2, 1), (2, 9, 9, 8), (1, 4, 3, 2), (3, 1, 5, 4), (2, 2, 3, 0)):
            for seed in (5, Keyed(5)):
                with self.subTest(length=length, epochs=epochs, number=number, rank=rank, seed=seed):
                    make = partial(its.PermutationSourceIterator, range(length), epochs, seed, True, number, rank)
                    check_iterator(make, pickles=True)

    def test_without_shuffling_the_list_comes_so_many_times(self):
        check_iterator(lambda: its.PermutationSourceIterator("abc", 2, shuffle=False), "abcabc")

    def test_position_beyond_the_epochs_is_refused_when_it_is_read(self):
        long, short = its.PermutationSourceIterator("abc", 5, 1), its.PermutationSourceIterator("abc", 2, 1)
        short.setstate(skip(long, 6).getstate())
        self.assertEqual(list(short), [])
        short.setstate(skip(long, 4).getstate())
        for _ in range(2):
            self.assertRaisesRegex(RuntimeError, "beyond the end of the data: PermutationSourceIterator", next, short)

    def test_state_of_the_endless_source_is_refused_but_not_the_other_way_round(self):
        endless, finite = its.InfinitePermutationSourceIterator("abcd", 1), its.PermutationSourceIterator("abcd", 9, 1)
        with self.assertRaisesRegex(ValueError, "PermutationSourceIterator lacks the key 'epoch'"):
            finite.setstate(endless.getstate())
        endless.setstate(skip(finite, 6).getstate())
        self.assertEqual(take(endless, 9), take(finite, 9))

    def test_instance_that_gets_nothing_says_so(self):
        with self.assertLogs("infinibatch.iterators", logging.INFO) as logs:
            parts = [list(its.PermutationSourceIterator(range(3), 1, 1, True, 5, rank)) for rank in range(5)]
        self.assertEqual(
            [record.getMessage() for record in logs.records],
            ["instance {} of 5 gets none of 3 items".format(rank) for rank in (3, 4)],
        )
        self.assertEqual(list(map(len, parts)), [1, 1, 1, 0, 0])
        with self.assertLogs("infinibatch.iterators", logging.INFO) as logs:
            for rank in range(5):
                its.ChunkedSourceIterator(range(3), 5, rank)
        self.assertEqual(len(logs.records), 2)


class TestShardedDataset(unittest.TestCase):
    def make(self, number=1, rank=0, refs=range(40), **options):
        options = dict({"num_shards": 8, "num_epochs": 1, "seed": 3}, **options)
        return datasets.sharded_dataset_iterator(
            refs, read_chunk, 40, num_instances=number, instance_rank=rank, **options
        )

    def whole(self, number=1, **options):
        return [list(self.make(number, rank, **options)) for rank in range(number)]

    def test_all_ranks_together_get_every_item_once_in_each_epoch(self):
        items = [item for ref in range(40) for item in read_chunk(ref)]
        for number in (1, 2, 3, 8):
            for epochs in (1, 2):
                parts = self.whole(number, num_epochs=epochs)
                self.assertEqual(counted(chain(*parts)), counted(items * epochs))

    def test_plain_and_keyed_seed_are_the_same_and_others_differ(self):
        first = self.whole()
        self.assertEqual(self.whole(seed=Keyed(3)), first)
        self.assertNotEqual(self.whole(seed=4), first)

    def test_batches_and_transform_are_made_within_the_shards(self):
        def make_batches(items):
            return its.BucketedReadaheadBatchIterator(items, 9, length_of, 3, seed=Keyed(3))

        plain = self.whole()[0]
        batches = self.whole(make_batches=make_batches, transform=lambda item: item + ("x",))[0]
        self.assertEqual(counted(chain(*batches)), counted([item + ("x",) for item in plain]))

    def test_without_shuffling_the_chunks_come_in_their_order(self):
        items = list(self.make(num_shards=1, shuffle=False))
        self.assertEqual(items, [item for ref in range(40) for item in read_chunk(ref)])

    def test_epochs_of_an_endless_run_are_shuffled_differently(self):
        number = sum(len(read_chunk(ref)) for ref in range(40))
        endless = take(self.make(num_epochs=None, num_shards=1), 2 * number)
        first, second = endless[:number], endless[number:]
        self.assertNotEqual(first, second)

    def test_processes_change_nothing(self):
        expected = self.whole(2)
        self.assertEqual(self.whole(2, num_processes=2), expected)

    def test_state_goes_on_with_another_number_of_ranks(self):
        ranks = [self.make(4, rank) for rank in range(4)]
        before = list(chain(*[take(rank, 9) for rank in ranks]))
        state = as_json(merge([rank.getstate() for rank in ranks]))
        after = []
        for rank in range(3):
            iterator = self.make(3, rank)
            iterator.setstate(state)
            after += list(iterator)
        self.assertEqual(counted(before + after), counted(chain(*self.whole())))

    def test_pipeline_with_functions_of_a_module_can_be_pickled(self):
        iterator = skip(self.make(2, 1), 9)
        self.assertEqual(list(pickle.loads(pickle.dumps(iterator))), list(iterator))

    def test_bad_arguments_are_refused_with_name_rule_and_value(self):
        make = partial(datasets.sharded_dataset_iterator, range(4), read_chunk, 10)
        bad = [
            (partial(make, num_shards=5), ValueError, "num_shards must be at most the number of chunks, 4, got 5"),
            (partial(make), ValueError, "num_shards must be at most the number of chunks, 4, got 64"),
            (partial(make, num_shards=0), ValueError, "num_shards must be at least 1, got 0"),
            (partial(make, num_shards=4, num_epochs=0), ValueError, "num_epochs must be at least 1, got 0"),
            (partial(make, num_shards=4, seed=None), TypeError, "seed must be an int, float, str or bytes.*, got None"),
            (partial(make, num_shards=4, transform=5), TypeError, "transform must be callable, got 5"),
            (partial(make, num_shards=4, make_batches=5), TypeError, "make_batches must be callable, got 5"),
            (partial(make, num_shards=4, num_instances=0), ValueError, "num_instances must be at least 1, got 0"),
            (partial(make, num_shards=4, num_processes=-1), ValueError, "num_processes must be at least 0, got -1"),
            (
                partial(datasets.sharded_dataset_iterator, range(4), None, 10, 4),
                TypeError,
                "read_chunk_fn must be callable, got None",
            ),
            (
                partial(datasets.sharded_dataset_iterator, range(4), read_chunk, 0, 4),
                ValueError,
                "buffer_size must be at least 1, got 0",
            ),
        ]
        for construct, error, pattern in bad:
            with self.subTest(pattern=pattern):
                self.assertRaisesRegex(error, pattern, construct)


if __name__ == "__main__":
    unittest.main()
