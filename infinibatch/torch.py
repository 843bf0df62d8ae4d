"""
A pipeline as a PyTorch data set, and what ranks need to do together.

The shortest way needs none of this: a pipeline is an iterator, so a training loop reads it in place of a loader.
`instance` says which part of the data this process has:

    batches = make_batches(*infinibatch.torch.instance())
    for batch in batches:
        ...

`IterableDataset` is for code that wants a `torch.utils.data.DataLoader`, with or without worker processes. `gather`
and `in_step` are for several ranks. docs/frameworks.md compares the ways, docs/examples holds complete programs.

This is the only module of the package that imports torch.
"""
import os
import warnings
from functools import partial
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Tuple, TypeVar, cast

import torch  # type: ignore[import-not-found, unused-ignore]
import torch.distributed as dist  # type: ignore[import-not-found, unused-ignore]
from torch.utils.data import get_worker_info  # type: ignore[import-not-found, unused-ignore]

from .checkpoint import merge
from .iterators import (
    CheckpointableIterator,
    Keyed,
    _adopt,
    _all_stages,
    _copied,
    _function,
    _integer,
    _keys,
    _seed_of,
    _Shards,
    _Stage,
)

__all__ = ["IterableDataset", "gather", "in_step", "instance"]

T = TypeVar("T")

_MAX_WORKERS = 1024


def instance() -> Tuple[int, int]:
    """
    Return `(num_instances, instance_rank)` of this process: how many share the data, and which one this is.

    The number of ranks and this one's are those of `torch.distributed` if it is initialised, else of the environment
    variables `WORLD_SIZE` and `RANK`, which `torchrun` sets, else 1 and 0. In worker w of W of a `DataLoader`, rank r
    of N is instance `r * W + w` of `N * W`.

    Raises:
        ValueError: only one of the variables is set, or they are no numbers that fit each other.

    >>> instance()
    (1, 0)
    """
    return _instance_of(_ranks())


def _ranks() -> Tuple[int, int]:
    """Return the number of ranks and that of this one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    number, rank = os.environ.get("WORLD_SIZE"), os.environ.get("RANK")
    if number is None and rank is None:
        return 1, 0
    try:
        ranks = int(cast(str, number)), int(cast(str, rank))
    except (TypeError, ValueError):
        ranks = 0, 0
    if not 0 <= ranks[1] < ranks[0]:
        raise ValueError(
            "RANK must be a number below that of WORLD_SIZE, and both be set or none, got {!r} and {!r}".format(
                rank, number
            )
        )
    return ranks


def _instance_of(ranks: Tuple[int, int]) -> Tuple[int, int]:
    worker = get_worker_info()
    number, rank = ranks
    return (number, rank) if worker is None else (number * worker.num_workers, rank * worker.num_workers + worker.id)


class IterableDataset(torch.utils.data.IterableDataset):  # type: ignore[misc, type-arg, unused-ignore]
    """
    A pipeline as a data set for `torch.utils.data.DataLoader` and torchdata's `StatefulDataLoader`.

    Each worker of each rank builds its own pipeline, for its own share of the data: `make_iterator` passes its
    arguments on to the pipeline's source. Without workers the pipeline runs in the main process.

    **Epochs.** Each `iter()` is the next epoch. Without `epoch_size` an epoch is one pass through the pipeline: epoch 0
    is the pipeline as built, and later ones draw from other seeds, made from the pipeline's own and the number of the
    epoch, so that a finite pipeline that shuffles comes in another order each time, the same in each run. (A pipeline
    that does not shuffle repeats its order, as validation data should.) With `epoch_size` the pipeline is read on
    from epoch to epoch, so many items each; if it ends, it starts over with other seeds. A loop that breaks off skips
    the rest of its epoch: the next one is the same as if it had not.

    **Checkpoints.** `state_dict()` is the position within the epoch; after `load_state_dict()` the next `iter()` goes
    on from there. `StatefulDataLoader` asks its workers for it, and so is exact with any number of them; a plain
    `DataLoader` is exact without workers. A state says which instance of how many it belongs to, and no other accepts
    it: to go on with another number of ranks or workers, use a `ShardedIterator`, which is such a pipeline by itself.
    It holds plain data, which `torch.load(…, weights_only=True)` reads.

    Cost: a state is that of the pipeline and six values. Workers that do not persist are started for each epoch, and
    with `epoch_size` pass over all earlier epochs: use `persistent_workers=True` there.

    Args:
        make_iterator: function from `num_instances` and `instance_rank` to a `CheckpointableIterator`. For workers that
            are not forked (`spawn`, `forkserver`) it must be picklable, such as a function of a module.
        epoch_size: number of items in an epoch on each rank, shared out among the rank's workers; then `len()` is
            known, and is right for a `DataLoader` with `batch_size=None`, if the items are batches already. None:
            an epoch ends where the pipeline ends.

    Raises:
        TypeError: `make_iterator` is not callable, or `epoch_size` no integer.
        ValueError: `epoch_size` is below 1; from `load_state_dict()`, the state belongs to another instance, another
            number of them, or another pipeline; from `iter()`, `make_iterator` returned no `CheckpointableIterator`.
        RuntimeError: from an iterator, if a newer `iter()` or `load_state_dict()` came between, or `epoch_size` is
            given and this instance's pipeline has no items.

    >>> from infinibatch.datasets import chunked_dataset_iterator
    >>> chunks = {"a": [1, 2, 3], "b": [4, 5, 6]}
    >>> def make_iterator(num_instances, instance_rank):
    ...     return chunked_dataset_iterator(
    ...         list(chunks), chunks.get, buffer_size=6, seed=1, num_epochs=1,
    ...         num_instances=num_instances, instance_rank=instance_rank)
    >>> loader = torch.utils.data.DataLoader(IterableDataset(make_iterator), batch_size=3)
    >>> for epoch in range(2):
    ...     print([batch.tolist() for batch in loader])
    [[6, 1, 5], [2, 3, 4]]
    [[4, 6, 5], [3, 2, 1]]
    """

    def __init__(
        self, make_iterator: Callable[[int, int], CheckpointableIterator[Any]], epoch_size: Optional[int] = None
    ) -> None:
        self._make_iterator = _function("make_iterator", make_iterator)
        self._epoch_size = None if epoch_size is None else _integer("epoch_size", epoch_size)
        self._pipeline: Optional[_Stage[Any]] = None
        self._state: Any = None  # that of the pipeline, while there is none
        self._instance: Optional[Tuple[int, int]] = None  # the one whose position this is; None before the first item
        self._epoch = 0
        self._num_served = 0  # items of this epoch
        self._ended = False  # whether the epoch has
        self._pass = 0  # how often the pipeline had been read to its end
        self._untouched = True  # nobody has asked for an item since this epoch was set up, or a position loaded
        self._loaded_in: Optional[int] = None  # the process in which that was
        self._iteration: Optional["_Iteration"] = None  # the one that may read
        self._main_ranks: Optional[Tuple[int, int]] = None  # those of the process that started this worker
        self._begun = self._new_counters()

    @staticmethod
    def _new_counters() -> Any:
        # For each worker, how many workers there were and how many epochs they have begun. In shared memory, since the
        # next epoch may be that of other processes, of which the main process knows nothing but this.
        counters = torch.zeros((_MAX_WORKERS, 2), dtype=torch.int64)
        return counters.share_memory_()  # type: ignore[no-untyped-call, unused-ignore]

    def __len__(self) -> int:
        """Return `epoch_size`, the number of items of an epoch on this rank."""
        if self._epoch_size is None:
            raise TypeError("an IterableDataset has a len() only if it was given an epoch_size")
        return self._epoch_size

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch, or go on with the one whose position was loaded."""
        begun = self._counter()
        if begun is not None and begun[1] and self._loaded_in != os.getpid():
            self._begin(int(begun[1]))
        elif not self._untouched:
            self._begin(self._epoch + 1)
        if begun is not None:
            begun[1] = self._epoch + 1
        self._loaded_in = None
        self._iteration = _Iteration(self)
        return self._iteration

    def _counter(self) -> Any:
        """Return this worker's row of the counters, or None in the main process."""
        worker = get_worker_info()
        if worker is None:
            return None
        if worker.num_workers > _MAX_WORKERS:
            raise ValueError("num_workers must be at most {}, got {}".format(_MAX_WORKERS, worker.num_workers))
        row = self._begun[worker.id]
        if row[0] != worker.num_workers:  # those of another loader
            row[0], row[1] = worker.num_workers, 0
        return row

    def _begin(self, epoch: int) -> None:
        if self._epoch_size is None:
            self._rewind(epoch)
        else:
            before = self._pass, self._instance, self._epoch, self._num_served
            state = self._position()
            try:
                if self._instance not in (None, self._here()):  # as that of a loader with another number of workers
                    self._rewind(0)
                    self._epoch = self._num_served = 0
                self._pass_over((epoch - self._epoch) * self._share() - self._num_served)
            except BaseException:
                self._release(state)
                self._pass, self._instance, self._epoch, self._num_served = before
                raise
        self._epoch, self._num_served, self._ended, self._untouched = epoch, 0, False, True

    def _share(self) -> int:
        """Return how many items of an epoch are this worker's."""
        worker = get_worker_info()
        size = cast(int, self._epoch_size)
        return size if worker is None else size // worker.num_workers + (worker.id < size % worker.num_workers)

    def _here(self) -> Tuple[int, int]:
        """Return `instance()`, also where the group of processes was left behind in the main process."""
        if self._main_ranks is None or get_worker_info() is None:
            return instance()
        return _instance_of(self._main_ranks)

    def _open(self) -> "_Stage[Any]":
        """Return the pipeline, at its position."""
        here = self._here()
        if self._instance not in (None, here):
            raise _other_instance(self._instance or here, here)
        if self._pipeline is None:
            pipeline = self._build(here, self._pass)
            if self._state is not None:
                pipeline.setstate(self._state)
            self._pipeline, self._state, self._instance = pipeline, None, here
        return self._pipeline

    def _build(self, here: Tuple[int, int], number: int) -> "_Stage[Any]":
        pipeline = _adopt(self._make_iterator(*here), "what make_iterator returns")
        if number:
            _reseed(pipeline, number)
        return pipeline

    def _release(self, state: Any) -> None:
        if self._pipeline is not None:
            self._pipeline.close()
        self._pipeline, self._state = None, state

    def _position(self) -> Any:
        return _copied(self._state) if self._pipeline is None else self._pipeline.getstate()

    def _rewind(self, number: int) -> None:
        """Stand at the start of a pass through the pipeline."""
        self._release(None)
        self._pass, self._instance = number, None

    def _start_over(self, was_empty: bool) -> None:
        """Begin the next pass through the pipeline within an epoch."""
        if was_empty:
            raise RuntimeError(
                "epoch_size is {}, but the pipeline of instance {} of {} has no items".format(
                    self._epoch_size, *reversed(self._here())
                )
            )
        self._rewind(self._pass + 1)

    def _pass_over(self, number: int) -> None:
        fresh = False
        while number:
            skipped = self._open()._skip(number)
            number -= skipped
            if number:
                self._start_over(fresh and not skipped)
                fresh = True

    def _next(self, iteration: "_Iteration") -> Any:
        if iteration is not self._iteration:
            raise RuntimeError("this iterator is out of date: the data set was iterated over anew, or its state loaded")
        if self._ended or self._epoch_size is not None and self._num_served >= self._share():
            self._ended, self._untouched = True, False
            raise StopIteration
        fresh = False
        while True:
            pipeline = self._open()
            self._untouched = False
            try:
                item = next(pipeline)
            except StopIteration:
                if self._epoch_size is None:
                    break
                self._start_over(fresh)
                fresh = True
                continue
            self._num_served += 1
            return item
        if self._num_served == 0 and self._epoch == 0:
            self._warn_if_idle()
        self._ended = True
        self._release(pipeline.getstate())
        raise StopIteration

    def _warn_if_idle(self) -> None:
        number, rank = cast(Tuple[int, int], self._instance)
        if number > 1 and rank == number - 1:  # the last is idle if any is, so that one of them speaks for all
            warnings.warn(
                "instance {} of {} has no data, and others may have none: there are fewer chunks than ranks times "
                "workers".format(rank, number),
                RuntimeWarning,
                stacklevel=4,
            )

    def state_dict(self) -> Dict[str, Any]:
        """
        Return the position of this process: of the data set in the main process, or of the copy in a worker.

        It is plain data that nothing changes later. `StatefulDataLoader.state_dict()` has those of all workers.
        """
        number, rank = self._instance or self._here()
        return {
            "epoch": self._epoch,
            "num_served": self._num_served,
            "ended": self._ended,
            "pass": self._pass,
            "num_instances": number,
            "instance_rank": rank,
            "state": self._position(),
        }

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """
        Go to a position: the next `iter()` continues its epoch, or begins the next one if it had ended.

        In a worker an epoch that had ended for this worker stays ended, since other workers may have more of it.

        Args:
            state_dict: what `state_dict` returned in the same instance of the same number of instances.

        Raises:
            ValueError: the state belongs to another instance, another number of them, or another pipeline; the data
                set keeps the position that it had.
        """
        here, worker = self._here(), get_worker_info()
        epoch, served, ended, number, *there, state = _keys(
            self, state_dict, "epoch", "num_served", "ended", "pass", "num_instances", "instance_rank", "state"
        )
        if tuple(there) != here:
            raise _other_instance(tuple(there), here)
        for key, value in ("epoch", epoch), ("num_served", served), ("pass", number):
            if type(value) is not int or value < 0:
                raise ValueError("the state of IterableDataset has {!r} = {!r}, not a count".format(key, value))
        pipeline = self._build(here, number)
        pipeline.setstate(state)
        self._release(None)
        self._pipeline, self._instance = pipeline, here
        self._epoch, self._num_served, self._ended, self._pass = epoch, served, bool(ended), number
        self._untouched = not ended or worker is not None
        self._loaded_in, self._iteration = os.getpid(), None
        if worker is None:
            self._begun.zero_()  # workers begin where this process stands

    def close(self) -> None:
        """End the processes and threads of the pipeline in this process. Workers of a `DataLoader` end with it."""
        self._release(self._position())

    def __getstate__(self) -> Dict[str, Any]:
        from multiprocessing.context import get_spawning_popen

        state = dict(self.__dict__, _pipeline=None, _state=self._position(), _iteration=None, _loaded_in=None)
        if get_spawning_popen() is None:
            del state["_begun"]  # a copy counts for itself
            return state
        from multiprocessing.reduction import ForkingPickler

        try:
            ForkingPickler.dumps(self._make_iterator)
        except Exception as error:
            raise TypeError(
                "make_iterator must be picklable for workers that are not forked, got {!r} ({}): define it in a "
                "module, or give the DataLoader multiprocessing_context='fork'".format(self._make_iterator, error)
            ) from error
        state["_main_ranks"] = _ranks()
        return state

    def __setstate__(self, state: Dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "_begun" not in state:
            self._begun = self._new_counters()


class _Iteration:
    """One epoch, or the rest of one. No generator, which an exception would end."""

    def __init__(self, dataset: IterableDataset) -> None:
        self._dataset = dataset

    def __iter__(self) -> "_Iteration":
        return self

    def __next__(self) -> Any:
        return self._dataset._next(self)


def _other_instance(there: Tuple[Any, ...], here: Tuple[int, int]) -> ValueError:
    return ValueError(
        "the state of IterableDataset does not fit: it is of instance {} of {}, this is instance {} of {}; restore it "
        "with the same number of ranks and of workers, or use a ShardedIterator, which goes on with any".format(
            there[1], there[0], here[1], here[0]
        )
    )


def _reseed(pipeline: CheckpointableIterator[Any], number: int) -> None:
    """Give each random stage of a pipeline that was just built the seed of another pass, and rewind it."""
    for stage in list(_all_stages([pipeline])):
        seed = _seed_of(stage)
        if isinstance(stage, _Shards):
            stage._make_shard = partial(_make_reseeded, stage._make_shard, number)
        elif isinstance(seed, Keyed):
            seed.seed = "{!r}, pass {}".format(seed.seed, number)  # each stage has a seed object of its own
        elif seed is not None:
            stage.__dict__["_seed"] = "{!r}, pass {}".format(seed, number)
    pipeline.setstate(None)


def _make_reseeded(make_shard: Callable[[int, int], Any], number: int, num_shards: int, shard: int) -> Any:
    pipeline = make_shard(num_shards, shard)
    if isinstance(pipeline, CheckpointableIterator):
        _reseed(pipeline, number)
    return pipeline


def gather(iterator: CheckpointableIterator[Any], group: Any = None) -> Any:
    """
    Return the state of the whole run: what `infinibatch.checkpoint.merge` makes of the states of all ranks.

    All ranks call it in the same step, and all get the result, which restores on any number of ranks. Without
    `torch.distributed`, or before it is initialised, it is this process's own state.

    Cost: one `all_gather_object`; some kilobytes from each rank.

    Args:
        iterator: this rank's `ShardedIterator`.
        group: the process group; None is the default one.

    Raises:
        ValueError: on all ranks, if one's iterator is no `ShardedIterator`, or they are not of the same moment.

    >>> from infinibatch.iterators import NativeCheckpointableIterator, ShardedIterator
    >>> shards = ShardedIterator(lambda num_shards, shard: NativeCheckpointableIterator("ab"), num_shards=2)
    >>> next(shards)
    'a'
    >>> gather(shards) == shards.getstate()
    True
    """
    states = [iterator.getstate()]
    if dist.is_available() and dist.is_initialized():
        states *= dist.get_world_size(group)
        dist.all_gather_object(states, states[0], group)
    return merge(states)


def in_step(iterable: Iterable[T], drop_last: bool = True, group: Any = None) -> Iterator[T]:
    """
    Yield this rank's items, and end in the same step on all ranks, so that no rank waits for another's collective.

    An exception on one rank, too, ends all of them: there it is raised as it is, elsewhere as a `RuntimeError`.
    Without `torch.distributed`, or before it is initialised, it yields the items and nothing else.

    Cost: one `all_reduce` of three bytes a step, before the item is yielded; nothing is read ahead, so that the state
    of a pipeline is that behind the item that was yielded last. (At the end, with `drop_last`, some ranks have read
    the item that is dropped.)

    Args:
        iterable: this rank's items, such as batches of validation data. The ranks may have different numbers of them.
        drop_last: whether to end when the first rank has no more, so that the others drop the rest. Otherwise all go on
            until the last one ends, and who has no more repeats its last item (one who never had any, another
            rank's first, which must be picklable), as `torch.utils.data.DistributedSampler` does.
        group: the process group; None is the default one.

    Raises:
        RuntimeError: the iteration failed on another rank.

    >>> list(in_step("abc"))
    ['a', 'b', 'c']
    """
    if not (dist.is_available() and dist.is_initialized()):
        yield from iterable
        return
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
    items: Optional[Iterator[T]] = None
    held: List[T] = []
    more, first = True, True
    while True:
        failure: Optional[Exception] = None
        if more:
            try:
                items = iter(iterable) if items is None else items
                held = [next(items)]
            except StopIteration:
                more = False
            except Exception as error:
                failure = error
        flags = torch.tensor([more, not more, failure is not None], dtype=torch.uint8, device=device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group)
        one_has_more, one_has_none, one_failed = flags.tolist()
        if failure is not None:
            raise failure
        if one_failed:
            raise RuntimeError("the iteration failed on another rank")
        if not one_has_more or drop_last and one_has_none:
            return
        if first and one_has_none:
            gathered: List[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(gathered, held, group)
            held = held or next(filter(None, gathered))
        first = False
        yield held[0]
