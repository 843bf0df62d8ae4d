"""Common pipelines, wired from the iterators."""
from functools import partial
from typing import Any, Callable, Iterable, List, Optional, TypeVar, cast

from .iterators import (
    BlockwiseShuffleIterator,
    BufferedShuffleIterator,
    CheckpointableIterator,
    Keyed,
    MapIterator,
    ParallelSelectManyIterator,
    PermutationSourceIterator,
    PrefetchIterator,
    SelectManyIterator,
    ShardedIterator,
    _function,
    _integer,
    _list,
    create_source_iterator,
)

R = TypeVar("R")
T = TypeVar("T")


def bump_seed(seed: Any, step: int = 1) -> Any:
    """
    Return the seed for another stage of the same pipeline.

    Args:
        seed: a number, or None or `Keyed`, which stay what they are.
        step: what is added to the number.

    Raises:
        TypeError: the seed is text, or something else that is no number.

    >>> bump_seed(1), bump_seed(None)
    (2, None)
    """
    if seed is None or isinstance(seed, Keyed):
        return seed
    try:
        return seed + step
    except TypeError:
        raise TypeError(
            "seed must be a number or None for a pipeline of several random stages, got {!r}".format(seed)
        ) from None


def _chunks(chunk_refs: Any) -> List[Any]:
    if isinstance(chunk_refs, (str, bytes)):  # whose characters would be the chunks
        raise TypeError(
            "chunk_refs must be a list of chunks, got {!r:.80} (infinibatch.readers.find_chunks makes one of a "
            "pattern)".format(chunk_refs)
        )
    return _list("chunk_refs", chunk_refs)


def chunked_dataset_iterator(
    chunk_refs: Iterable[R],
    read_chunk_fn: Callable[[R], Iterable[T]],
    buffer_size: int,
    train: bool = True,
    seed: Any = None,
    shuffle: bool = True,
    use_windowed: bool = False,
    transform: Optional[Callable[[Any], Any]] = None,
    prefetch: bool = False,
    num_instances: int = 1,
    instance_rank: int = 0,
    *,
    num_workers: int = 0,
    num_epochs: Optional[int] = None
) -> CheckpointableIterator[Any]:
    """
    Read a data set that is stored in chunks: permute the chunks, read them, shuffle their items.

    Cost: `buffer_size` items in memory, as many more with `prefetch`; restoring reads the chunks in which they lie.

    Args:
        chunk_refs: one reference for each chunk, such as its path; the same list for each instance.
        read_chunk_fn: function from a reference to the chunk's items, such as `infinibatch.readers.read_lines`.
        buffer_size: number of items that are shuffled at a time.
        train: whether to go through the data endlessly; else once, each instance through a consecutive part.
        seed: a number, or `Keyed`; None draws one, which checkpoints carry on.
        shuffle: whether to shuffle; must be False if `train` is.
        use_windowed: whether to shuffle with `BufferedShuffleIterator` instead of `BlockwiseShuffleIterator`.
        transform: function that is applied to each item.
        prefetch: whether to read ahead `buffer_size` items in another process.
        num_instances: number of instances, usually of GPUs, that share the data.
        instance_rank: number of this one, from 0 to `num_instances` - 1.
        num_workers: number of processes that read chunks, each another one; 0 reads them in this process. Order and
            checkpoints do not depend on it.
        num_epochs: number of times to go through the data, with `train`; None goes on endlessly.

    Raises:
        ValueError: `buffer_size` is below 1, `instance_rank` is out of range, the list is empty, `shuffle` without
            `train`, `num_epochs` is below 1 or given without `train`, or several instances shuffle without a seed.
        TypeError: `read_chunk_fn` or `transform` is not callable, or `chunk_refs` is no list.

    >>> chunks = {"a": [1, 2, 3], "b": [4, 5]}
    >>> items = chunked_dataset_iterator(["a", "b"], chunks.get, buffer_size=5, seed=1)
    >>> sorted(next(items) for _ in range(5))
    [1, 2, 3, 4, 5]
    """
    chunk_refs = _chunks(chunk_refs)
    _function("read_chunk_fn", read_chunk_fn)
    _integer("buffer_size", buffer_size)
    refs: CheckpointableIterator[R]
    if num_epochs is None:
        refs = create_source_iterator(chunk_refs, train, seed, shuffle, num_instances, instance_rank)
    elif train:
        refs = PermutationSourceIterator(chunk_refs, num_epochs, seed, shuffle, num_instances, instance_rank)
    else:
        raise ValueError("num_epochs must be None if train is False, got {!r}".format(num_epochs))
    items: CheckpointableIterator[Any]
    if _integer("num_workers", num_workers, 0):
        items = ParallelSelectManyIterator(refs, read_chunk_fn, num_workers)
    else:
        items = SelectManyIterator(refs, read_chunk_fn)
    if prefetch:
        items = PrefetchIterator(items, buffer_size)
    if shuffle:
        shuffler = BufferedShuffleIterator if use_windowed else BlockwiseShuffleIterator
        items = shuffler(items, buffer_size, bump_seed(seed))
    if transform is not None:
        items = MapIterator(items, transform)
    return items


def sharded_dataset_iterator(
    chunk_refs: Iterable[R],
    read_chunk_fn: Callable[[R], Iterable[Any]],
    buffer_size: int,
    num_shards: int = 64,
    num_epochs: Optional[int] = None,
    seed: Any = 0,
    shuffle: bool = True,
    transform: Optional[Callable[[Any], Any]] = None,
    make_batches: Optional[Callable[[CheckpointableIterator[Any]], CheckpointableIterator[Any]]] = None,
    num_instances: int = 1,
    instance_rank: int = 0,
    num_processes: int = 0,
) -> CheckpointableIterator[Any]:
    """
    Read a data set so that a run can go on with another number of ranks or processes, exactly.

    The pipeline of `chunked_dataset_iterator`, once for each of `num_shards` shards, with a `Keyed` seed, behind a
    `ShardedIterator`, whose documentation says how checkpoints of all ranks are merged and shared out again.

    Cost: `buffer_size` items in memory if one rank serves all shards, on N ranks an N-th of it each.

    Args:
        chunk_refs: one reference for each chunk; the same list for each rank, at least as many as shards.
        read_chunk_fn: function from a reference to the chunk's items.
        buffer_size: number of items that are shuffled at a time, in all shards together. It does not depend on the
            number of ranks, since each shard's blocks must not either.
        num_shards: number of shards, for the whole life of the run.
        num_epochs: number of times to go through the data; None goes on endlessly.
        seed: int, float, str, bytes or `Keyed`.
        shuffle: whether to shuffle chunks and items.
        transform: function that is applied to each item.
        make_batches: function from a shard's items to an iterator of batches, for example
            `lambda items: FixedBatchIterator(items, 32)`; None serves items. A random stage in it should have a `Keyed`
            seed: with a plain one it draws the same numbers in each shard, and is most of the checkpoint.
        num_instances: number of ranks.
        instance_rank: number of this one, from 0 to `num_instances` - 1.
        num_processes: number of processes that run the shards; 0 runs them in this one.

    Raises:
        ValueError: a number is out of range, or there are fewer chunks than shards.
        TypeError: a function is not callable, `chunk_refs` is no list, or the seed is none.

    >>> chunks = {name: [name + str(i) for i in range(4)] for name in "abcd"}
    >>> def make(num_instances, instance_rank):
    ...     return sharded_dataset_iterator(
    ...         list(chunks), chunks.get, 8, num_shards=4, num_epochs=1,
    ...         num_instances=num_instances, instance_rank=instance_rank)
    >>> ranks = [make(2, 0), make(2, 1)]
    >>> first = [next(rank) for rank in ranks for _ in range(3)]  # then the run is stopped
    >>> from infinibatch.checkpoint import merge
    >>> state = merge([rank.getstate() for rank in ranks])
    >>> ranks = [make(3, rank) for rank in range(3)]  # and goes on, with another number of ranks
    >>> for rank in ranks:
    ...     rank.setstate(state)
    >>> sorted(first + [item for rank in ranks for item in rank]) == sorted(sum(chunks.values(), []))
    True
    """
    refs = _chunks(chunk_refs)
    _function("read_chunk_fn", read_chunk_fn)
    if len(refs) < _integer("num_shards", num_shards):
        raise ValueError("num_shards must be at most the number of chunks, {}, got {}".format(len(refs), num_shards))
    make_shard = partial(
        _make_shard,
        refs=refs,
        read_chunk_fn=read_chunk_fn,
        buffer_size=-(-_integer("buffer_size", buffer_size) // num_shards),
        num_epochs=num_epochs if num_epochs is None else _integer("num_epochs", num_epochs),
        seed=seed if isinstance(seed, Keyed) else Keyed(seed),
        shuffle=shuffle,
        transform=transform if transform is None else _function("transform", transform),
        make_batches=make_batches if make_batches is None else _function("make_batches", make_batches),
    )
    return ShardedIterator(make_shard, num_shards, num_instances, instance_rank, num_processes)


def _make_shard(
    num_shards: int,
    shard: int,
    refs: List[Any],
    read_chunk_fn: Any,
    buffer_size: int,
    num_epochs: Optional[int],
    seed: Keyed,
    shuffle: bool,
    transform: Any,
    make_batches: Any,
) -> CheckpointableIterator[Any]:
    items = chunked_dataset_iterator(
        refs,
        read_chunk_fn,
        buffer_size,
        seed=seed,
        shuffle=shuffle,
        transform=transform,
        num_instances=num_shards,
        instance_rank=shard,
        num_epochs=num_epochs,
    )
    return items if make_batches is None else cast(CheckpointableIterator[Any], make_batches(items))
