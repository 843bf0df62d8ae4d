"""
Random pipelines: seeded compositions of all iterators, saved anywhere, continued anywhere.

INFINIBATCH_TEST_PIPELINES sets their number (60), INFINIBATCH_TEST_SEED the first seed (0). A failure names its seed.
"""
import contextlib
import copy
import json
import os
import pickle
import random
import subprocess
import sys
import traceback
import unittest
from itertools import islice

from infinibatch import iterators as its

NUM_PIPELINES = int(os.environ.get("INFINIBATCH_TEST_PIPELINES", "60"))
FIRST_SEED = int(os.environ.get("INFINIBATCH_TEST_SEED", "0"))
MAX_ITEMS = 60
UNTIL = ["first", "drained", "all"]


class Countdown(its.CheckpointableIterator):
    """A user's own class with nothing but the public methods."""

    def __init__(self, start):
        self._start = start
        self.setstate(None)

    def getstate(self):
        return {"left": self._left}

    def setstate(self, checkpoint):
        self._left = self._start if checkpoint is None else checkpoint["left"]

    def __next__(self):
        if self._left == 0:
            raise StopIteration
        self._left -= 1
        return self._left


class Reversed(its.MapIterator):
    """A user's own class that overrides only `__next__`."""

    def __next__(self):
        return self._transform(text(next(self._source_iterator))[::-1])


class Failure(Exception):
    pass


class Chance:
    """Called by every callback of a pipeline: raises now and then, ten times in all."""

    def __init__(self, seed):
        self._random, self._left = random.Random(seed), 10

    def __call__(self):
        if self._left and self._random.random() < 0.05:
            self._left -= 1
            raise Failure


def text(item):
    """Return an item as text that does not change where JSON makes a list of a tuple in a shuffle buffer."""
    return json.dumps(item)


def weigh(item):
    return sum(map(ord, text(item))) % 17


def build(seed, chance=None):
    """Return the pipeline of a seed: the same one each time."""
    rng = random.Random("pipeline {}".format(seed))

    def start():
        start = rng.choice(["thread"] * 9 + ["fork"])
        return "thread" if chance else start  # in a process, chance would not learn how often it has struck

    def size(most=12):
        return rng.choice([1, 2, 3, rng.randint(1, most)])

    def call(function):
        def callback(*args):
            if chance:
                chance()
            return function(*args)

        return callback

    def source():
        items = [rng.choice([i, str(i), None, (i, "x"), i / 3]) for i in range(rng.randint(0, 40))]
        kind = rng.randrange(8)
        if kind == 0:
            return its.NativeCheckpointableIterator(items)
        if kind == 1:
            return its.NativeCheckpointableIterator({str(item): None for item in items})
        if kind == 2:
            number = size(4)
            return its.ChunkedSourceIterator(items, number, rng.randrange(number))
        if kind == 3:
            number = size(60)
            return its.InfinitePermutationSourceIterator(
                items or [1], size(), rng.random() < 0.8, number, rng.randrange(number)
            )
        if kind == 4:
            return its.RandomIterator(size())
        if kind == 5:
            return Countdown(len(items))
        if kind == 6:
            number = size(10)
            return its.PermutationSourceIterator(
                items or [1], size(3), size(), rng.random() < 0.8, number, rng.randrange(number)
            )
        return its.NativeCheckpointableIterator(range(len(items)))

    def pick(options):
        return options[rng.randrange(len(options))]

    def select(item):
        number = weigh(item) % 4
        return [(item, i) for i in range(number)] if number % 2 else ((item, i) for i in range(number))

    def accumulate(state, item):
        state.append(weigh(item))
        return state[-3:], list(state)

    def stage(depth):
        if depth == 0:
            return source()
        below = stage(depth - 1)
        seed = pick([0, 1, -7, 2 ** 70, "text", b"bytes", 0.5, its.Keyed(1), its.Keyed("a")])
        return pick(
            [
                lambda: its.MapIterator(below, call(lambda item: (weigh(item), item))),
                lambda: Reversed(below, lambda item: item),
                lambda: its.SelectManyIterator(below, call(select)),
                lambda: its.SamplingRandomMapIterator(below, call(lambda r, item: (item, r.randrange(99))), seed),
                lambda: its.SamplingRandomMapIterator(below, call(lambda r, item: r.gauss(weigh(item), 1)), seed),
                lambda: its.RecurrentIterator(below, call(accumulate), []),
                lambda: its.BlockwiseShuffleIterator(below, size(), seed),
                lambda: its.BufferedShuffleIterator(below, size(), seed),
                lambda: its.FixedBatchIterator(below, size()),
                lambda: its.WindowedIterator(below, size()),
                lambda: its.BucketedReadaheadBatchIterator(
                    below,
                    size(30),
                    pick([None, call(weigh)]),
                    pick([size(), call(lambda item: 20 // (1 + weigh(item)))]),
                    pick([None, call(lambda item: weigh(item) % 3)]),
                    rng.random() < 0.7,
                    seed,
                ),
                lambda: its.ZipIterator(below, stage(depth - 1)),
                lambda: its.MultiplexIterator(
                    its.MapIterator(its.RandomIterator(size()), call(lambda x: int(x * 2))), [below, stage(depth - 1)]
                ),
                lambda: its.FilterIterator(below, call(lambda item: weigh(item) % 3)),
                lambda: its.TakeIterator(below, size(40)),
                lambda: its.EnumerateIterator(below, size()),
                lambda: its.ChainIterator(its.TakeIterator(below, size()), stage(depth - 1)),
                lambda: its.MixIterator([below, stage(depth - 1)], pick([None, [1, 2], [0, 1]]), seed, pick(UNTIL)),
                lambda: its.PrefetchIterator(below, size(), start=start()),
                lambda: its.ParallelMapIterator(below, call(text), size(3), size(5), start=start()),
                lambda: its.ParallelSelectManyIterator(below, call(select), size(3), start=start()),
            ]
        )()

    return stage(rng.randint(1, 5))


def take(iterator, number):
    return [text(item) for item in islice(iterator, number)]


def through_json(state):
    return json.loads(json.dumps(state))


def through_pickle(state):
    return pickle.loads(pickle.dumps(state))


JUNK = [None, -1, 0, 1, 10 ** 9, 2 ** 80, "x", "", [], {}, True, 1.5, float("nan"), [[]], {"a": 1}, [1, 2], "NaN"]


def places(state):
    """Yield each container within a state, with a key or an index in it."""
    keys = state if isinstance(state, dict) else range(len(state)) if isinstance(state, list) else []
    for key in list(keys)[:30]:
        yield state, key
        yield from places(state[key])


def damage(state, rng):
    """Return a copy of the state in which one thing is another, missing, repeated, or off by some."""
    whole = [copy.deepcopy(state)]
    container, key = rng.choice([(whole, 0)] + list(places(whole[0])))
    how = rng.randrange(4)
    if how == 0 and container is not whole:
        del container[key]
    elif how == 1 and type(container[key]) is int:
        container[key] += rng.choice([-1, 1, 1000])
    elif how == 2 and isinstance(container[key], list):
        container[key] *= 2
    else:
        container[key] = copy.deepcopy(rng.choice(JUNK))
    return whole[0]


class TestRandomPipelines(unittest.TestCase):
    def for_each(self, check):
        for seed in range(FIRST_SEED, FIRST_SEED + NUM_PIPELINES):
            with build(seed) as pipeline, self.subTest(seed=seed, pipeline=repr(pipeline)):
                check(seed, pipeline)

    def bulk(self, pipeline):
        return its.CheckpointableIterator if isinstance(pipeline, Reversed) else type(pipeline)

    def test_a_walk_of_all_operations_gives_the_items_of_plain_iteration(self):
        def check(seed, pipeline):
            expected = take(build(seed), MAX_ITEMS)
            rng = random.Random("walk {}".format(seed))
            saved = [(0, pipeline.getstate())]
            position = 0
            for _ in range(40):
                operation = rng.randrange(8)
                if operation < 3:
                    items = take(pipeline, rng.choice([1, 1, 2, 5, MAX_ITEMS]))[: MAX_ITEMS - position]
                    self.assertEqual(items, expected[position : position + len(items)])
                    position += len(items)
                    if position == MAX_ITEMS:
                        position, state = rng.choice(saved)
                        pipeline.setstate(through_json(state))
                elif operation == 3:
                    items = []
                    self.bulk(pipeline)._fill(pipeline, items, rng.randint(1, 10))
                    known = list(map(text, items))[: MAX_ITEMS - position]
                    self.assertEqual(known, expected[position : position + len(items)])
                    position += len(items)
                elif operation == 4:
                    position += self.bulk(pipeline)._skip(pipeline, rng.randint(1, 10))
                elif operation == 5:
                    state = pipeline.getstate()
                    saved.append((position, rng.choice([lambda s: s, through_json, through_pickle])(state)))
                else:
                    position, state = rng.choice(saved)
                    if operation == 7:
                        pipeline.close()
                        pipeline = build(seed)
                    pipeline.setstate(state)
                if position > MAX_ITEMS:
                    position, state = saved[0]
                    pipeline.setstate(state)

        self.for_each(check)

    def test_a_damaged_checkpoint_is_refused_with_all_left_in_place_or_read_without_obscure_errors(self):
        def check(seed, pipeline):
            rng = random.Random("damage {}".format(seed))
            take(pipeline, rng.randrange(30))
            state = through_json(pipeline.getstate())
            expected = take(build(seed), 30)
            for _ in range(4):
                position = rng.randrange(10)
                with build(seed) as other:
                    take(other, position)
                    damaged, refused = damage(state, rng), False
                    try:
                        try:
                            other.setstate(damaged)
                        except (ValueError, RuntimeError):
                            refused = True
                        else:
                            with contextlib.suppress(ValueError, RuntimeError):  # it may lie beyond the end of the data
                                take(other, 30)
                    except Exception as error:
                        *_, last = traceback.extract_tb(error.__traceback__)
                        if last[0] != __file__:  # what the classes and callbacks above make of their own state
                            raise AssertionError("{}: {}".format(damaged, traceback.format_exc())) from error
                    if refused:
                        self.assertEqual(take(other, 10), expected[position : position + 10], damaged)

        self.for_each(check)

    def test_after_failures_of_callbacks_nothing_is_lost_or_repeated(self):
        def check(seed, pipeline):
            expected = take(pipeline, MAX_ITEMS)
            rng = random.Random("failures {}".format(seed))
            failing = build(seed, Chance(seed))
            items = []
            while len(items) < MAX_ITEMS:
                try:
                    items.append(text(next(failing)))
                except StopIteration:
                    break
                except Failure:
                    action = rng.randrange(3)
                    if action:
                        state = self.persist(failing.getstate)
                        rest = build(seed)
                        rest.setstate(through_json(state))
                        self.assertEqual(items + take(rest, MAX_ITEMS - len(items)), expected)
                        if action == 2:
                            failing.setstate(state)
            self.assertEqual(items, expected)

        self.for_each(check)

    def persist(self, getstate):
        while True:  # reading again on behalf of a checkpoint may fail as well
            try:
                return getstate()
            except Failure:
                pass

    def test_another_process_continues_from_json_under_another_hash_seed(self):
        jobs = []

        def save(seed, pipeline):
            expected = take(build(seed), MAX_ITEMS)
            position = random.Random(seed).randint(0, len(expected))
            take(pipeline, position)
            jobs.append((seed, pipeline.getstate(), MAX_ITEMS - position, expected[position:]))

        self.for_each(save)
        script = (
            "import json, sys; import test_pipelines as t\n"
            "for seed, state, number, _ in json.load(sys.stdin):\n"
            "    pipeline = t.build(seed)\n"
            "    pipeline.setstate(state)\n"
            "    print(json.dumps(t.take(pipeline, number)))\n"
        )
        here = os.path.dirname(os.path.abspath(__file__))
        environment = dict(os.environ, PYTHONHASHSEED="12345")
        environment["PYTHONPATH"] = os.pathsep.join([os.path.dirname(here), here])
        process = subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        output, _ = process.communicate(json.dumps(jobs).encode("ascii"), timeout=600)
        self.assertEqual(process.returncode, 0)
        lines = output.decode("ascii").splitlines()
        self.assertEqual(len(lines), len(jobs))
        for (seed, _, _, expected), line in zip(jobs, lines):
            with self.subTest(seed=seed, pipeline=repr(build(seed))):
                self.assertEqual(json.loads(line), expected)


if __name__ == "__main__":
    unittest.main()
