"""Pipelines in PyTorch: the data set, its workers, several ranks, and the frameworks on top (docs/examples)."""

import copy
import importlib.util
import io
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import warnings
from itertools import islice
from unittest import mock

from test_docs import corpus_folder, fenced_blocks, run_python

from infinibatch import datasets, iterators
from infinibatch.iterators import Keyed

try:
    import torch
    import torch.distributed.checkpoint
    from torch.utils.data import DataLoader
except ImportError:
    torch = None
else:
    from infinibatch.torch import IterableDataset, gather, in_step, instance

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
EXAMPLES = os.path.join(ROOT, "docs", "examples")

needs_torch = unittest.skipIf(torch is None, "PyTorch is not installed")
linux = unittest.skipUnless(sys.platform.startswith("linux"), "starts processes, and looks into /proc")


def needs(*packages):
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return unittest.skipIf(missing, "{} not installed".format(", ".join(missing)))


# Functions of a module, since workers that are not forked get them by pickle.

CHUNKS = {"chunk-{}".format(i): list(range(10 * i, 10 * i + 2 + i % 4)) for i in range(7)}
ITEMS = sorted(sum(CHUNKS.values(), []))


def read_chunk(name):
    return CHUNKS[name]


def make_finite(num_instances, instance_rank, seed=1):
    return datasets.chunked_dataset_iterator(
        list(CHUNKS), read_chunk, 5, seed=seed, num_epochs=1, num_instances=num_instances, instance_rank=instance_rank
    )


def make_endless(num_instances, instance_rank):
    return datasets.chunked_dataset_iterator(
        list(CHUNKS), read_chunk, 5, seed=1, num_instances=num_instances, instance_rank=instance_rank
    )


def make_in_order(num_instances, instance_rank):
    return datasets.chunked_dataset_iterator(
        list(CHUNKS), read_chunk, 5, False, None, False, num_instances=num_instances, instance_rank=instance_rank
    )


def make_sharded(num_instances, instance_rank):
    return datasets.sharded_dataset_iterator(
        list(CHUNKS), read_chunk, 5, num_shards=6, num_epochs=1,
        num_instances=num_instances, instance_rank=instance_rank
    )  # fmt: skip


def jitter(random, item):
    return item, random.random()


def make_jittered(num_instances, instance_rank):
    return iterators.SamplingRandomMapIterator(make_finite(num_instances, instance_rank), jitter, seed=7)


def double(item):
    return 2 * item


def make_with_processes(num_instances, instance_rank):
    doubled = iterators.ParallelMapIterator(make_finite(num_instances, instance_rank), double, 2, 4)
    return iterators.PrefetchIterator(doubled, 3)


def make_large(num_instances, instance_rank):
    return datasets.chunked_dataset_iterator(
        range(20), lambda chunk: [bytes([chunk]) * 9_999 + b"." for _ in range(100)], 500, seed=1, num_epochs=1,
        num_instances=num_instances, instance_rank=instance_rank
    )  # fmt: skip


class HiddenSource(iterators.CheckpointableIterator):
    """A stage of the user's own, whose source the library's protocol does not name."""

    def __init__(self, source):
        self._inner = [source]

    def getstate(self):
        return {"inner": self._inner[0].getstate()}

    def setstate(self, checkpoint):
        self._inner[0].setstate(None if checkpoint is None else checkpoint["inner"])

    def __next__(self):
        return next(self._inner[0])


def make_of_own_class(num_instances, instance_rank):
    return HiddenSource(make_finite(num_instances, instance_rank))


def fail_at_21(item):
    if item == 21:
        raise ZeroDivisionError("item 21")
    return item


def make_failing(num_instances, instance_rank):
    return iterators.MapIterator(make_finite(num_instances, instance_rank), fail_at_21)


def through_torch(state):
    """Save a state and load it as one loads a file that one does not trust."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def flat(batches):
    return [item for batch in batches for item in batch.tolist()]


def loader_of(kind, dataset, num_workers, persistent=True, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # more workers than processors
        return kind(
            dataset, options.pop("batch_size", 3), num_workers=num_workers,
            persistent_workers=persistent and num_workers > 0, **options
        )  # fmt: skip


def epoch_of(loader):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # more workers than processors, or than chunks
        return flat(loader)


@needs_torch
class TestInstance(unittest.TestCase):
    def environment(self, **variables):
        others = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        return mock.patch.dict(os.environ, dict(others, **variables), clear=True)

    def test_a_process_alone_is_the_only_instance(self):
        with self.environment():
            self.assertEqual(instance(), (1, 0))

    def test_the_variables_of_torchrun_tell_the_rank(self):
        with self.environment(RANK="2", WORLD_SIZE="3"):
            self.assertEqual(instance(), (3, 2))

    def test_variables_that_do_not_fit_are_refused(self):
        for variables in ({"RANK": "1"}, {"WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "-1"},
                          {"RANK": "a", "WORLD_SIZE": "2"}):  # fmt: skip
            with self.subTest(variables=variables), self.environment(**variables):
                with self.assertRaisesRegex(ValueError, "RANK must be a number below that of WORLD_SIZE"):
                    instance()

    def test_an_initialised_group_counts_more_than_the_variables(self):
        with self.environment(RANK="2", WORLD_SIZE="3"), tempfile.TemporaryDirectory() as folder:
            torch.distributed.init_process_group(
                "gloo", init_method="file://" + os.path.join(folder, "store"), rank=0, world_size=1
            )
            try:
                self.assertEqual(instance(), (1, 0))
            finally:
                torch.distributed.destroy_process_group()

    def test_nothing_else_in_the_package_imports_torch(self):
        code = "import pkgutil, sys, importlib, infinibatch\n" + (
            "for module in pkgutil.iter_modules(infinibatch.__path__, 'infinibatch.'):\n"
            "    if module.name not in ('infinibatch.torch', 'infinibatch.__main__'):\n"
            "        importlib.import_module(module.name)\n"
            "assert 'torch' not in sys.modules\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ, PYTHONPATH=ROOT), timeout=60)


@needs_torch
class TestIterableDataset(unittest.TestCase):
    def test_the_first_epoch_is_the_pipeline_as_built(self):
        self.assertEqual(list(IterableDataset(make_finite)), list(make_finite(1, 0)))

    def test_epochs_of_a_finite_pipeline_have_different_orders_the_same_in_each_run(self):
        for make in (make_finite, make_sharded, make_of_own_class):
            with self.subTest(make=make.__name__):
                dataset, again = IterableDataset(make), IterableDataset(make)
                epochs = [list(dataset) for _ in range(3)]
                for epoch in epochs:
                    self.assertEqual(sorted(epoch), ITEMS)
                self.assertEqual(len({tuple(epoch) for epoch in epochs}), 3)
                self.assertEqual([list(again) for _ in range(3)], epochs)

    def test_every_kind_of_seed_gives_other_orders_in_later_epochs(self):
        for seed in (0, -1, 0.5, "text", b"bytes", Keyed(1), None):
            with self.subTest(seed=seed):
                dataset = IterableDataset(
                    lambda n, r, s=seed: iterators.BlockwiseShuffleIterator(
                        iterators.NativeCheckpointableIterator(range(30)), 30, s
                    )
                )
                first, second = list(dataset), list(dataset)
                self.assertEqual(sorted(first), list(range(30)))
                self.assertEqual(sorted(second), list(range(30)))
                self.assertNotEqual(first, second)

    def test_random_transforms_draw_other_numbers_in_each_epoch(self):
        dataset = IterableDataset(make_jittered)
        first, second = dict(dataset), dict(dataset)
        self.assertEqual(sorted(first), sorted(second))
        self.assertFalse(set(first.values()) & set(second.values()))
        again = IterableDataset(make_jittered)
        self.assertEqual([dict(again), dict(again)], [first, second])

    def test_what_does_not_shuffle_repeats_its_order(self):
        dataset = IterableDataset(make_in_order)
        self.assertEqual([list(dataset), list(dataset)], [ITEMS, ITEMS])

    def test_with_epoch_size_each_epoch_goes_on_where_the_one_before_ended(self):
        dataset = IterableDataset(make_endless, epoch_size=11)
        self.assertEqual(len(dataset), 11)
        epochs = [list(dataset) for _ in range(4)]
        self.assertEqual([len(epoch) for epoch in epochs], [11] * 4)
        self.assertEqual(sum(epochs, []), list(islice(make_endless(1, 0), 44)))

    def test_an_epoch_of_more_items_than_the_pipeline_has_starts_it_over_with_another_order(self):
        dataset, passes = IterableDataset(make_finite, epoch_size=2 * len(ITEMS) + 1), IterableDataset(make_finite)
        self.assertEqual(list(dataset), list(passes) + list(passes) + list(passes)[:1])

    def test_a_loop_that_breaks_off_leaves_the_next_epoch_as_it_is(self):
        for make, size in ((make_finite, None), (make_endless, 11), (make_finite, 11), (make_finite, 40)):
            with self.subTest(make=make.__name__, epoch_size=size):
                whole, broken = IterableDataset(make, size), IterableDataset(make, size)
                expected = [list(whole) for _ in range(3)]
                self.assertEqual(list(islice(broken, 3)), expected[0][:3])
                self.assertEqual(list(islice(broken, 5)), expected[1][:5])
                self.assertEqual(list(broken), expected[2])

    def test_an_iterator_that_was_not_read_takes_no_epoch(self):
        dataset, other = IterableDataset(make_finite), IterableDataset(make_finite)
        iter(dataset)
        self.assertEqual(list(dataset), list(other))
        iter(dataset)
        self.assertEqual(list(dataset), list(other))

    def test_the_end_of_an_epoch_stays_the_end(self):
        for size in (None, 4):
            with self.subTest(epoch_size=size):
                iterator = iter(IterableDataset(make_finite, size))
                list(iterator)
                self.assertEqual([next(iterator, "end") for _ in range(3)], ["end"] * 3)

    def test_a_state_of_any_position_goes_on_exactly(self):
        kinds = {
            "plain": lambda state: state,
            "torch": through_torch,
            "pickle": lambda state: pickle.loads(pickle.dumps(state)),
            "copy": copy.deepcopy,
            "json": lambda state: json.loads(json.dumps(state)),
        }
        for make, size in ((make_finite, None), (make_endless, 7), (make_finite, 50), (make_sharded, None)):
            whole = IterableDataset(make, size)
            epochs = [list(whole) for _ in range(3)]
            for name, travel in kinds.items():
                with self.subTest(make=make.__name__, epoch_size=size, by=name):
                    dataset = IterableDataset(make, size)
                    for epoch in range(2):
                        iterator = iter(dataset)
                        for number in range(len(epochs[epoch]) + 1):
                            resumed = IterableDataset(make, size)
                            resumed.load_state_dict(travel(dataset.state_dict()))
                            self.assertEqual(list(resumed), epochs[epoch][number:])
                            self.assertEqual(next(iter(resumed)), epochs[epoch + 1][0])
                            next(iterator, None)

    def test_a_state_from_behind_the_end_begins_the_next_epoch_once(self):
        for size in (None, 7):
            with self.subTest(epoch_size=size):
                dataset = IterableDataset(make_finite, size)
                list(dataset)
                state = dataset.state_dict()
                expected = [list(dataset), list(dataset)]
                resumed = IterableDataset(make_finite, size)
                list(resumed)
                resumed.load_state_dict(state)
                iter(resumed)  # StatefulDataLoader makes an iterator that it then leaves
                self.assertEqual([list(resumed), list(resumed)], expected)

    def test_asking_for_a_state_before_loading_one_changes_nothing(self):
        dataset = IterableDataset(make_finite)
        iterator = iter(dataset)
        first = [next(iterator) for _ in range(5)]
        state = dataset.state_dict()
        resumed = IterableDataset(make_finite)
        for reads in (0, 1):
            resumed.state_dict(), resumed.state_dict()
            list(islice(resumed, reads))
            resumed.load_state_dict(state)
            self.assertEqual(first + list(resumed), list(make_finite(1, 0)))

    def test_a_state_is_a_snapshot(self):
        dataset = IterableDataset(make_sharded)
        iterator = iter(dataset)
        next(iterator)
        state = dataset.state_dict()
        before = copy.deepcopy(state)
        rest = list(iterator)
        self.assertEqual(state, before)
        dataset.load_state_dict(state)
        state["state"]["shards"].clear()
        self.assertEqual(list(dataset), rest)
        state = dataset.state_dict()  # behind the end
        before = copy.deepcopy(state)
        state["state"]["shards"].clear()
        self.assertEqual(dataset.state_dict(), before)

    def test_the_position_is_the_true_one_after_several_resumes(self):
        def make(num_instances, instance_rank):
            return iterators.EnumerateIterator(make_finite(num_instances, instance_rank))

        dataset = IterableDataset(make)
        for resume in range(4):
            iterator = iter(dataset)
            self.assertEqual([next(iterator)[0] for _ in range(3)], [3 * resume + i for i in range(3)])
            state = dataset.state_dict()
            self.assertEqual(state["num_served"], 3 * (resume + 1))
            dataset = IterableDataset(make)
            dataset.load_state_dict(state)

    def test_the_state_of_another_rank_or_number_of_ranks_is_refused(self):
        def state_of(rank, number):
            with mock.patch.dict(os.environ, RANK=str(rank), WORLD_SIZE=str(number)):
                dataset = IterableDataset(make_finite)
                next(iter(dataset))
                return dataset.state_dict()

        dataset = IterableDataset(make_finite)
        for rank, number in ((0, 2), (1, 2), (3, 4)):
            with self.assertRaisesRegex(
                ValueError, "instance {} of {}, this is instance 0 of 1; .*ShardedIterator".format(rank, number)
            ):
                dataset.load_state_dict(state_of(rank, number))
        with mock.patch.dict(os.environ, RANK="1", WORLD_SIZE="2"):
            with self.assertRaisesRegex(ValueError, "of instance 0 of 2, this is instance 1 of 2"):
                IterableDataset(make_finite).load_state_dict(state_of(0, 2))

    def test_states_that_do_not_fit_are_refused_and_change_nothing(self):
        dataset = IterableDataset(make_finite)
        iterator = iter(dataset)
        first = [next(iterator) for _ in range(4)]
        good = dataset.state_dict()
        cases = [("lacks the key '{}'".format(key), {k: v for k, v in good.items() if k != key}) for key in good]
        cases += [
            ("a checkpoint of IterableDataset is a dict", None),
            ("'epoch' = -1, not a count", dict(good, epoch=-1)),
            ("'num_served' = '4', not a count", dict(good, num_served="4")),
            ("belongs to another pipeline", dict(good, state={"elsewhere": 1})),
        ]
        for message, state in cases:
            with self.subTest(message=message), self.assertRaisesRegex(ValueError, message):
                dataset.load_state_dict(state)
        self.assertEqual(first + list(iterator), list(make_finite(1, 0)))

    def test_an_error_is_not_the_end_and_loses_nothing(self):
        dataset = IterableDataset(make_failing)
        iterator = iter(dataset)
        items = list(make_finite(1, 0))
        before = items.index(21)
        self.assertEqual([next(iterator) for _ in range(before)], items[:before])
        for _ in range(2):
            with self.assertRaisesRegex(ZeroDivisionError, "item 21"):
                next(iterator)
            self.assertEqual(dataset.state_dict()["num_served"], before)

    def test_an_error_while_the_rest_of_an_epoch_is_skipped_loses_nothing(self):
        broken = []

        def read(name):
            if name in broken:
                raise OSError("unreadable")
            return CHUNKS[name]

        def make(num_instances, instance_rank):
            source = iterators.PermutationSourceIterator(list(CHUNKS), 2, 1)
            return iterators.BlockwiseShuffleIterator(iterators.SelectManyIterator(source, read), 4, 2)

        whole, dataset = IterableDataset(make, 30), IterableDataset(make, 30)
        expected = [list(whole) for _ in range(2)]
        self.assertEqual(list(islice(dataset, 2)), expected[0][:2])
        state = dataset.state_dict()
        broken[:] = list(CHUNKS)
        with self.assertRaisesRegex(OSError, "unreadable"):
            iter(dataset)
        self.assertEqual(dataset.state_dict(), state)
        broken.clear()
        self.assertEqual(list(dataset), expected[1])

    def test_an_older_iterator_is_refused(self):
        dataset = IterableDataset(make_finite)
        old = iter(dataset)
        next(old)
        state = dataset.state_dict()
        iter(dataset)
        with self.assertRaisesRegex(RuntimeError, "out of date"):
            next(old)
        loaded = iter(dataset)
        dataset.load_state_dict(state)
        with self.assertRaisesRegex(RuntimeError, "out of date"):
            next(loaded)

    def test_bad_arguments_are_refused(self):
        with self.assertRaisesRegex(TypeError, "make_iterator must be callable, got 3"):
            IterableDataset(3)
        with self.assertRaisesRegex(ValueError, "epoch_size must be at least 1, got 0"):
            IterableDataset(make_finite, 0)
        with self.assertRaisesRegex(TypeError, "epoch_size must be an integer"):
            IterableDataset(make_finite, 1.5)
        with self.assertRaisesRegex(TypeError, "len.. only if it was given an epoch_size"):
            len(IterableDataset(make_finite))
        with self.assertRaisesRegex(ValueError, "make_iterator returns must be a CheckpointableIterator, got .1, 2"):
            list(IterableDataset(lambda n, r: [1, 2]))

    def test_a_pipeline_without_items_cannot_fill_an_epoch(self):
        dataset = IterableDataset(lambda n, r: iterators.NativeCheckpointableIterator([]), epoch_size=2)
        with self.assertRaisesRegex(RuntimeError, "epoch_size is 2, but the pipeline of instance 0 of 1 has no items"):
            list(dataset)

    def test_a_copy_goes_on_from_where_the_original_was(self):
        dataset = IterableDataset(make_finite)
        iterator = iter(dataset)
        first = [next(iterator) for _ in range(4)]
        for copied in (pickle.loads(pickle.dumps(dataset)), copy.deepcopy(dataset)):
            resumed = IterableDataset(make_finite)
            resumed.load_state_dict(copied.state_dict())
            self.assertEqual(first + list(resumed), list(make_finite(1, 0)))

    def test_close_ends_the_processes_of_the_pipeline(self):
        dataset = IterableDataset(make_with_processes)
        iterator = iter(dataset)
        first = next(iterator)
        state = dataset.state_dict()
        dataset.close()
        dataset.close()
        self.assertEqual(dataset.state_dict(), state)
        self.assertEqual([first] + list(iterator), [double(item) for item in make_finite(1, 0)])


def children():
    """Return for each process the processes that it started."""
    found = {}
    for name in os.listdir("/proc"):
        try:
            with open("/proc/{}/stat".format(int(name))) as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
        except (ValueError, OSError):
            continue
        if state not in "ZX":
            found.setdefault(int(parent), []).append(int(name))
    return found


def below(pids):
    """Return the processes that these started, and those that they started in turn."""
    found, started = set(), children()
    pids = list(pids)
    while pids:
        more = started.get(pids.pop(), [])
        found.update(more)
        pids += more
    return found


def left_after(seconds, pids):
    """Return those of the processes that still run after some time; at once when none does."""
    deadline = time.monotonic() + seconds
    while True:
        left = {pid for pid in pids if os.path.exists("/proc/{}".format(pid)) and pid in sum(children().values(), [])}
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


def resident(pid):
    """Return the size of a process in memory, in bytes."""
    with open("/proc/{}/statm".format(pid)) as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@needs_torch
@linux
class TestDataLoader(unittest.TestCase):
    def test_each_item_comes_once_whatever_the_number_of_workers_and_ranks(self):
        for num_ranks, num_workers in ((1, 0), (1, 1), (1, 3), (1, 9), (2, 0), (2, 2), (3, 1)):
            for make in (make_finite, make_in_order):
                with self.subTest(ranks=num_ranks, workers=num_workers, make=make.__name__):
                    seen = []
                    for rank in range(num_ranks):
                        with mock.patch.dict(os.environ, RANK=str(rank), WORLD_SIZE=str(num_ranks)):
                            seen += epoch_of(loader_of(DataLoader, IterableDataset(make), num_workers))
                    self.assertEqual(sorted(seen), ITEMS)

    def test_one_warning_says_that_workers_have_no_data(self):
        code = (
            "import test_torch as t\n"
            "loader = t.loader_of(t.DataLoader, t.IterableDataset(t.make_finite), 10, persistent=False)\n"
            "for _ in range(2):\n"
            "    assert sorted(t.flat(loader)) == t.ITEMS\n"
        )
        process = run([sys.executable, "-c", code], 100)
        self.assertEqual(process.returncode, 0, process.stderr)
        self.assertEqual(re.findall("instance . of 10 has no data", process.stderr), ["instance 9 of 10 has no data"])

    def test_workers_that_persist_and_workers_that_do_not_give_the_same_different_epochs(self):
        for make, size in ((make_finite, None), (make_endless, 11), (make_sharded, None)):
            with self.subTest(make=make.__name__, epoch_size=size):
                epochs = {}
                for persistent in (False, True):
                    loader = loader_of(DataLoader, IterableDataset(make, size), 2, persistent)
                    epochs[persistent] = [epoch_of(loader) for _ in range(3)]
                self.assertEqual(epochs[False], epochs[True])
                self.assertEqual(len({tuple(epoch) for epoch in epochs[True]}), 3)
                for epoch in epochs[True]:
                    self.assertEqual(len(epoch), size or len(ITEMS))

    def test_a_loop_that_breaks_off_leaves_the_next_epoch_as_it_is(self):
        for make, size in ((make_finite, None), (make_endless, 11)):
            for persistent in (False, True):
                with self.subTest(epoch_size=size, persistent=persistent):
                    whole = loader_of(DataLoader, IterableDataset(make, size), 2)
                    expected = [epoch_of(whole) for _ in range(2)]
                    broken = loader_of(DataLoader, IterableDataset(make, size), 2, persistent)
                    self.assertEqual(next(iter(broken)).tolist(), expected[0][:3])
                    self.assertEqual(epoch_of(broken), expected[1])

    def test_one_data_set_serves_loaders_with_different_numbers_of_workers(self):
        for make, size in ((make_finite, None), (make_endless, 12)):
            dataset = IterableDataset(make, size)
            for num_workers in (0, 2, 3, 0, 2):
                with self.subTest(epoch_size=size, workers=num_workers):
                    items = epoch_of(loader_of(DataLoader, dataset, num_workers))
                    self.assertEqual(len(items), size or len(ITEMS))
                    if size is None:
                        self.assertEqual(sorted(items), ITEMS)

    def test_a_position_loaded_in_the_main_process_is_that_of_a_single_worker(self):
        dataset = IterableDataset(make_finite)
        expected = [list(dataset), list(dataset)]
        dataset = IterableDataset(make_finite)
        list(islice(dataset, 5))
        state = dataset.state_dict()
        for persistent in (False, True):
            with self.subTest(persistent=persistent):
                resumed = IterableDataset(make_finite)
                for _ in range(3):
                    epoch_of(loader_of(DataLoader, resumed, 1))
                resumed.load_state_dict(state)
                loader = loader_of(DataLoader, resumed, 1, persistent)
                self.assertEqual([epoch_of(loader), epoch_of(loader)], [expected[0][5:], expected[1]])

    def test_the_length_of_a_loader_is_that_of_an_epoch(self):
        for num_workers in (0, 1, 2, 3):
            with self.subTest(workers=num_workers), warnings.catch_warnings():
                loader = loader_of(DataLoader, IterableDataset(make_endless, 8), num_workers, batch_size=None)
                warnings.simplefilter("ignore", UserWarning)
                warnings.filterwarnings("error", "Length of IterableDataset")
                self.assertEqual(len(loader), 8)
                for _ in range(2):
                    self.assertEqual(len(list(loader)), 8)

    def test_an_error_in_a_worker_arrives_with_its_traceback(self):
        loader = loader_of(DataLoader, IterableDataset(make_failing), 2)
        with self.assertRaisesRegex(ZeroDivisionError, r"(?s)in fail_at_21.*item 21"):
            epoch_of(loader)

    def test_pipelines_with_processes_work_in_workers_and_leave_none(self):
        for context in ("fork", "spawn", "forkserver"):
            with self.subTest(context=context), mock.patch.dict(os.environ, PYTHONPATH=ROOT):
                loader = loader_of(
                    DataLoader, IterableDataset(make_with_processes), 2, multiprocessing_context=context
                )
                iterator = iter(loader)
                first = next(iterator).tolist()
                workers = [worker.pid for worker in iterator._workers]
                grandchildren = below(workers)
                self.assertGreaterEqual(len(grandchildren), 2)
                expected = [sorted(map(double, ITEMS))] * 2
                self.assertEqual([sorted(first + flat(iterator)), sorted(epoch_of(loader))], expected)
                grandchildren |= below(workers)
                del iterator, loader
                self.assertEqual(left_after(2, grandchildren.union(workers)), set())

    def test_no_process_is_left_when_a_loop_breaks_off(self):
        loader = loader_of(DataLoader, IterableDataset(make_with_processes), 2, persistent=False)
        iterator = iter(loader)
        next(iterator)
        workers = [worker.pid for worker in iterator._workers]
        grandchildren = below(workers)
        self.assertGreaterEqual(len(grandchildren), 2)
        del iterator
        self.assertEqual(left_after(2, grandchildren.union(workers)), set())

    def test_what_cannot_be_pickled_is_named(self):
        dataset = IterableDataset(lambda num_instances, instance_rank: make_finite(num_instances, instance_rank))
        self.assertEqual(sorted(epoch_of(loader_of(DataLoader, dataset, 2))), ITEMS)
        for context in ("spawn", "forkserver"):
            with self.subTest(context=context):
                loader = loader_of(DataLoader, dataset, 1, multiprocessing_context=context)
                with self.assertRaisesRegex(
                    TypeError, "make_iterator must be picklable for workers that are not forked, got .*lambda.*module"
                ):
                    epoch_of(loader)

    def test_workers_that_are_not_forked_know_the_ranks_of_the_main_process(self):
        with mock.patch("infinibatch.torch._ranks", lambda: (2, 1)), mock.patch.dict(os.environ, PYTHONPATH=ROOT):
            seen = epoch_of(loader_of(DataLoader, IterableDataset(make_in_order), 1, multiprocessing_context="spawn"))
        self.assertEqual(seen, list(make_in_order(2, 1)))

    def test_memory_is_pinned_in_the_main_process(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # no accelerator
            loader = loader_of(DataLoader, IterableDataset(make_with_processes), 2, pin_memory=True)
            batches = list(loader)
        self.assertEqual(sorted(flat(batches)), sorted(map(double, ITEMS)))
        if torch.cuda.is_available():
            self.assertTrue(all(batch.is_pinned() for batch in batches))


    def test_workers_that_live_for_many_epochs_do_not_grow(self):
        loader = loader_of(DataLoader, IterableDataset(make_large), 1, batch_size=None, collate_fn=len)
        sizes = []
        for epoch in range(1, 11):
            iterator = iter(loader)
            self.assertEqual(sum(iterator), 2000 * 10_000)
            if epoch in (2, 5, 10):
                sizes.append([resident(pid) for pid in (os.getpid(), iterator._workers[0].pid)])
        for first, last in zip(sizes[0], sizes[2]):
            self.assertLess(last - first, 10_000_000, sizes)


@needs_torch
@linux
@needs("torchdata")
class TestStatefulDataLoader(unittest.TestCase):
    def loader(self, make, size, num_workers, persistent=True, **options):
        from torchdata.stateful_dataloader import StatefulDataLoader

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return loader_of(StatefulDataLoader, IterableDataset(make, size), num_workers, persistent, **options)

    def test_a_state_of_any_step_goes_on_exactly(self):
        for make, size, num_workers, steps in (
            (make_finite, None, 0, range(9)),
            (make_endless, 11, 0, range(5)),
            (make_finite, None, 1, (0, 3, 7)),
            (make_finite, None, 2, (0, 1, 4, 8)),
            (make_endless, 11, 2, (1, 3)),
            (make_finite, None, 4, (1, 5)),
        ):
            whole = self.loader(make, size, num_workers)
            epochs = [epoch_of(whole) for _ in range(3)]
            for step in steps:
                for epoch in (0, 1):
                    with self.subTest(make=make.__name__, workers=num_workers, epoch=epoch, step=step):
                        loader = self.loader(make, size, num_workers)
                        for _ in range(epoch):
                            epoch_of(loader)
                        with warnings.catch_warnings():
                            warnings.simplefilter("ignore", UserWarning)
                            iterator = iter(loader)
                        seen = flat(islice(iterator, step))
                        state = through_torch(loader.state_dict())
                        del iterator, loader
                        resumed = self.loader(make, size, num_workers, persistent=step % 2 == 0)
                        resumed.load_state_dict(state)
                        self.assertEqual(seen + epoch_of(resumed), epochs[epoch])
                        self.assertEqual(epoch_of(resumed), epochs[epoch + 1])

    def test_a_state_from_behind_the_end_of_an_epoch_begins_the_next_one_once(self):
        for num_workers in (0, 1, 2):
            for persistent in (False, True):
                with self.subTest(workers=num_workers, persistent=persistent):
                    loader = self.loader(make_finite, None, num_workers, persistent)
                    epoch_of(loader)
                    state = loader.state_dict()
                    expected = [epoch_of(loader), epoch_of(loader)]
                    resumed = self.loader(make_finite, None, num_workers, persistent)
                    resumed.load_state_dict(state)
                    self.assertEqual([epoch_of(resumed), epoch_of(resumed)], expected)

    def test_a_state_of_the_last_batch_leaves_an_empty_rest_and_all_of_the_next_epoch(self):
        for num_workers in (0, 2):
            with self.subTest(workers=num_workers):
                loader = self.loader(make_finite, None, num_workers)
                epochs = [epoch_of(loader), epoch_of(loader)]
                loader = self.loader(make_finite, None, num_workers)
                number = len(list(loader))
                loader = self.loader(make_finite, None, num_workers)
                iterator = iter(loader)
                for _ in range(number):
                    next(iterator)
                resumed = self.loader(make_finite, None, num_workers)
                resumed.load_state_dict(loader.state_dict())
                self.assertEqual([epoch_of(resumed), epoch_of(resumed)], [[], epochs[1]])

    def test_a_shard_or_block_that_is_behind_is_restored_between_snapshots(self):
        loader = self.loader(make_sharded, None, 2, snapshot_every_n_steps=3)
        iterator = iter(loader)
        seen = flat(next(iterator) for _ in range(4))
        resumed = self.loader(make_sharded, None, 2, snapshot_every_n_steps=3)
        resumed.load_state_dict(loader.state_dict())
        self.assertEqual(seen + epoch_of(resumed), seen + flat(iterator))

    def test_another_number_of_workers_is_refused(self):
        for before, after in ((2, 4), (4, 2), (2, 1)):
            with self.subTest(before=before, after=after):
                loader = self.loader(make_finite, None, before)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)
                    next(iter(loader))
                resumed = self.loader(make_finite, None, after)
                resumed.load_state_dict(loader.state_dict())
                with self.assertRaisesRegex(
                    ValueError, "instance . of {}, this is instance . of {}; .*ShardedIterator".format(before, after)
                ):
                    epoch_of(resumed)


def run(command, seconds):
    """Run a program in a process group of its own, which is killed when the time is over."""
    with Started(command) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError("still running after {} seconds: {}".format(seconds, command)) from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


class Started(subprocess.Popen):
    """A program, and whatever it started: nothing of it is left behind the end of the `with` block."""

    def __init__(self, command):
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        environment.update(
            PYTHONPATH=os.pathsep.join([ROOT, os.path.join(ROOT, "test")]), PYTHONDONTWRITEBYTECODE="1",
            OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR"
        )  # fmt: skip
        super().__init__(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            universal_newlines=True, start_new_session=True
        )  # fmt: skip

    def __exit__(self, *error):
        for pid in below([self.pid]) | ({self.pid} if self.returncode is None else set()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        return super().__exit__(*error)


def torchrun(options, script, arguments, seconds):
    command = [sys.executable, "-m", "torch.distributed.run"] + options + [script] + arguments
    return run(command, seconds)


def lines_of(output, pattern):
    """Return the fields of what the processes of a job printed, whose lines may have run into each other."""
    return re.findall(pattern + r"((?:(?:, )?line \d+(?: and more)*)+)", output)


def numbers_of(text):
    return [int(number) for number in re.findall(r"line (\d+)", text)]


@needs_torch
@linux
class TestRanks(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if not torch.distributed.is_available():
            raise unittest.SkipTest("this PyTorch has no torch.distributed")
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "results.json")
            job = os.path.join(ROOT, "test", "torch_job.py")
            process = torchrun(["--standalone", "--nproc-per-node", "4"], job, [path], 100)
            if process.returncode:
                raise AssertionError(process.stderr)
            with open(path) as file:
                cls.results = json.load(file)

    def test_each_rank_is_an_instance(self):
        self.assertEqual(self.results["instance"], [[4, rank] for rank in range(4)])
        self.assertEqual(self.results["without variables"], self.results["instance"])

    def test_workers_of_all_ranks_together_give_each_item_once(self):
        self.assertEqual(sorted(sum(self.results["finite"], [])), ITEMS)

    def test_endless_data_is_dealt_out_without_overlap(self):
        self.assertEqual(sorted(sum(self.results["endless"], [])), list(range(16)))

    def test_the_state_of_another_rank_is_refused(self):
        self.assertEqual(self.results["own state"], ["returned None"] * 4)
        for rank, message in enumerate(self.results["state of another rank"]):
            expected = "ValueError: .*instance {} of 4, this is instance {} of 4".format((rank - 1) % 4, rank)
            self.assertRegex(message, expected)

    def test_all_ranks_get_the_state_of_the_whole_run(self):
        merged = self.results["merged"]
        self.assertEqual(merged, merged[:1] * 4)
        self.assertEqual(sorted(merged[0]["shards"]), list("012345"))
        self.assertEqual(sorted(sum(self.results["before"] + self.results["after"], [])), ITEMS)
        two = [make_sharded(2, rank) for rank in range(2)]
        for rank in two:
            rank.setstate(merged[0])
        rest = [item for rank in two for item in rank]
        self.assertEqual(sorted(rest), sorted(sum(self.results["after"], [])))

    def test_processes_that_read_the_same_data_are_one_rank(self):
        merged = self.results["merged in pairs"]
        self.assertEqual(merged, merged[:1] * 4)
        whole = make_sharded(1, 0)
        next(whole), next(whole)
        self.assertEqual(merged[0], json.loads(json.dumps(whole.getstate())))
        for message in self.results["of different moments"]:
            self.assertRegex(message, "ValueError: states must be of the same moment, two differ in shard")

    def test_only_what_has_shards_is_gathered(self):
        for message in self.results["without shards"]:
            self.assertRegex(message, "ValueError: states.0. is not the state of a ShardedIterator")

    def test_uneven_data_ends_in_the_same_step(self):
        dropped, repeated, none, one, nothing, _, _ = zip(*self.results["uneven"][:3])
        self.assertEqual(dropped, ([[0, 3], [1, 3], [2, 3]], [[4, 3], [5, 3], [6, 3]], [[7, 3], [8, 3], [9, 3]]))
        self.assertEqual(
            repeated,
            ([[0, 3], [1, 3], [2, 3], [3, 3]], [[4, 3], [5, 3], [6, 3], [6, 3]], [[7, 3], [8, 3], [9, 3], [9, 3]]),
        )
        self.assertEqual(none, ([], [], []))
        self.assertEqual(one, ([["only", 3]],) * 3)
        self.assertEqual(nothing, ([], [], []))

    def test_an_error_on_one_rank_ends_all(self):
        messages = [of_rank[5] for of_rank in self.results["uneven"][:3]]
        self.assertEqual(messages[1], "KeyError: 'broken'")
        self.assertEqual(messages[::2], ["RuntimeError: the iteration failed on another rank"] * 2)

    def test_in_step_reads_nothing_ahead(self):
        self.assertEqual([of_rank[6] for of_rank in self.results["uneven"][:3]], [1, 1, 1])


@needs_torch
class TestGuide(unittest.TestCase):
    def test_every_example_of_the_guide_runs(self):
        path = os.path.join(ROOT, "docs", "frameworks.md")
        with open(path, encoding="utf-8") as file:
            blocks = [block for block in fenced_blocks(file.read()) if block[0] == "py"]
        self.assertGreaterEqual(len(blocks), 4)
        namespace = {"__name__": "__main__"}
        with corpus_folder(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _, line, source in blocks:
                self.assertEqual(run_python(source, path, line, namespace), "")
            self.assertEqual(len(namespace["dataset"]), 30)
            namespace["loader"] = None

    @linux
    def test_the_measurement_runs_and_all_ways_yield_as_many_lines(self):
        script = os.path.join(ROOT, "docs", "benchmark", "torch_loader.py")
        process = run([sys.executable, "-B", script, "light", "--items", "2000", "--rounds", "1"], 100)
        self.assertEqual(process.returncode, 0, process.stderr)
        self.assertEqual(len(re.findall(r"^\| light \| ", process.stdout, re.MULTILINE)), 7)


@needs_torch
class TestInStepAlone(unittest.TestCase):
    def test_a_process_alone_gets_its_items(self):
        self.assertEqual(list(in_step(iter("abc"))), list("abc"))
        self.assertEqual(list(in_step([], drop_last=False)), [])

    def test_a_process_alone_gathers_its_own_state(self):
        shards = make_sharded(1, 0)
        next(shards)
        self.assertEqual(gather(shards), shards.getstate())


@needs_torch
@linux
class TestExamples(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def example(self, name, *options, seconds=90):
        return run([sys.executable, os.path.join(EXAMPLES, name), self.folder] + list(options), seconds)

    def ranks(self, options, name, *arguments, seconds=90):
        return torchrun(options, os.path.join(EXAMPLES, name), [self.folder] + list(arguments), seconds)

    def corpus(self):
        """Return the module that the examples share, and the chunks."""
        with mock.patch.object(sys, "path", [EXAMPLES] + sys.path), mock.patch.object(sys, "dont_write_bytecode", True):
            module = importlib.import_module("corpus")
        return module, module.make_corpus(self.folder)

    def rounds(self, num_epochs, first, last):
        """Return the lines of each round of a run that nothing interrupts."""
        corpus, chunks = self.corpus()
        batches = corpus.make_sharded_batches(chunks, 1, 0, num_epochs)
        rounds = [sorted(numbers_of(" ".join(sum(islice(batches, 12), [])))) for _ in range(last)]
        return dict(enumerate(rounds[first:], start=first))

    def seen(self, output):
        """Return the lines of each round that a job printed."""
        found = {}
        for number, text in lines_of(output, r"round (\d+) rank \d+ of \d+: "):
            found[int(number)] = sorted(found.get(int(number), []) + numbers_of(text))
        return found

    def test_examples_fit_on_a_screen(self):
        for name in os.listdir(EXAMPLES):
            if name.endswith(".py"):
                with open(os.path.join(EXAMPLES, name)) as file:
                    self.assertLessEqual(len(file.readlines()), 60, name)

    def test_a_killed_training_loop_ends_with_the_same_model(self):
        whole = self.example("train.py")
        self.assertRegex(whole.stdout, r"^weight [\d.]+, bias [\d.]+\n$", whole.stderr)
        os.remove(os.path.join(self.folder, "checkpoint.pt"))
        self.assertEqual(self.example("train.py", "--crash-at", "37").returncode, -signal.SIGKILL)
        resumed = self.example("train.py")
        self.assertEqual(resumed.stdout, "continuing at step 30\n" + whole.stdout, resumed.stderr)

    @needs("torchdata")
    def test_data_loaders_read_each_line_once_and_resume(self):
        for workers in (0, 1, 2, 4):
            with self.subTest(workers=workers):
                process = self.example("dataloader.py", "--workers", str(workers))
                self.assertEqual(process.returncode, 0, process.stderr)
                self.assertRegex(
                    process.stdout, r"^(\d+ batches, 240 different lines\n){2}resumed exactly\n$", process.stderr
                )

    def test_a_killed_job_of_four_goes_on_with_two_and_gives_each_line_once(self):
        killed = self.ranks(["--standalone", "--nproc-per-node", "4"], "ddp.py", "--epochs", "1", "--crash-at", "8")
        self.assertNotEqual(killed.returncode, 0)
        self.assertIn("SIGKILL", killed.stderr)
        before = self.seen(killed.stdout)
        resumed = self.ranks(["--standalone", "--nproc-per-node", "2"], "ddp.py", "--epochs", "1")
        self.assertEqual(resumed.returncode, 0, resumed.stderr)
        after = self.seen(resumed.stdout)
        self.assertEqual(min(after), 2)  # rank 0 was killed in the third round
        self.assertEqual(sorted(sum(list(after.values()) + [before[0], before[1]], [])), list(range(240)))

    def test_a_killed_job_of_three_goes_on_as_two_nodes_of_two_with_the_same_rounds(self):
        killed = self.ranks(["--standalone", "--nproc-per-node", "3"], "ddp.py", "--crash-at", "22")
        self.assertIn("SIGKILL", killed.stderr)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        options = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(port)]
        commands = [
            [sys.executable, "-m", "torch.distributed.run"] + options + ["--node-rank", str(node)]
            + [os.path.join(EXAMPLES, "ddp.py"), self.folder, "--rounds", "9"]
            for node in range(2)
        ]  # fmt: skip
        with Started(commands[0]) as first, Started(commands[1]) as second:
            outputs = [process.communicate(timeout=90) for process in (first, second)]
            self.assertEqual((first.returncode, second.returncode), (0, 0), "\n".join(err for _, err in outputs))
        expected = self.rounds(None, 0, 9)
        seen = self.seen(killed.stdout)
        self.assertEqual([seen[number] for number in range(5)], [expected[number] for number in range(5)])
        self.assertEqual(self.seen(outputs[0][0] + outputs[1][0]), {number: expected[number] for number in range(5, 9)})
        self.assertTrue(all("rank {} of 4".format(2 * node) in outputs[node][0] for node in range(2)))

    def test_a_distributed_checkpoint_holds_the_position_for_any_number_of_ranks(self):
        expected = self.rounds(None, 0, 2)
        process = self.ranks(["--standalone", "--nproc-per-node", "2"], "distributed_checkpoint.py")
        self.check_round(process, 2, expected[0])
        corpus, chunks = self.corpus()
        state = {"data": {"json": ""}}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # this process alone
            torch.distributed.checkpoint.load(state, checkpoint_id=os.path.join(self.folder, "dcp"))
        batches = corpus.make_sharded_batches(chunks, 1, 0)
        batches.setstate(json.loads(state["data"]["json"]))
        self.assertEqual(sorted(numbers_of(" ".join(sum(islice(batches, 12), [])))), expected[1])

    def check_round(self, process, num_ranks, expected):
        self.assertEqual(process.returncode, 0, process.stderr)
        lines = lines_of(process.stdout, r"rank (\d): ")
        self.assertEqual(len({rank for rank, _ in lines}), num_ranks)
        self.assertEqual(sorted(sum((numbers_of(text) for _, text in lines), [])), expected)

    @needs("lightning", "torchdata")
    def test_lightning_resumes_in_mid_epoch(self):
        corpus, chunks = self.corpus()
        dataset = IterableDataset(lambda *instance: corpus.make_batches(chunks, *instance), epoch_size=30)
        expected = [
            (str(epoch), str(30 * epoch + step), ", ".join(batch))
            for epoch in range(3)
            for step, batch in enumerate(dataset)
        ]
        pattern = r"epoch (\d) step (\d+): "
        killed = self.example("lightning_trainer.py", "--crash-at", "40")
        self.assertEqual(killed.returncode, -signal.SIGKILL, killed.stderr)
        self.assertEqual(lines_of(killed.stdout, pattern), expected[:41])
        resumed = self.example("lightning_trainer.py")
        self.assertEqual(resumed.returncode, 0, resumed.stderr)
        self.assertEqual(lines_of(resumed.stdout, pattern), expected[35:])

    @needs("accelerate")
    def test_accelerate_saves_and_loads_the_position(self):
        expected = self.rounds(None, 0, 2)
        self.check_round(
            self.ranks(["--standalone", "--nproc-per-node", "2"], "accelerate_loop.py"), 2, expected[0]
        )
        self.check_round(self.example("accelerate_loop.py"), 1, expected[1])

    @needs("ray")
    def test_ray_workers_share_the_data_and_save_the_position(self):
        corpus, chunks = self.corpus()
        process = self.example("ray_train.py", seconds=170)
        self.assertEqual(process.returncode, 0, process.stderr)
        seen = []
        for rank in range(2):
            with open(os.path.join(self.folder, "seen-{}".format(rank))) as file:
                seen += numbers_of(file.read())
        expected = self.rounds(None, 0, 2)
        self.assertEqual(sorted(seen), expected[0])
        (saved,) = re.findall("checkpoint: (.+)", process.stdout)
        batches = corpus.make_sharded_batches(chunks, 1, 0)
        batches.setstate(torch.load(os.path.join(saved, "data.pt"), weights_only=True))
        self.assertEqual(sorted(numbers_of(" ".join(sum(islice(batches, 12), [])))), expected[1])


if __name__ == "__main__":
    unittest.main()
