"""Common pipelines, wired from the iterators."""
from typing import Any, Callable, Iterable, Optional, TypeVar

from .iterators import (
    BlockwiseShuffleIterator,
    BufferedShuffleIterator,
    CheckpointableIterator,
    MapIterator,
    ParallelSelectManyIterator,
    PrefetchIterator,
    SelectManyIterator,
    _function,
    _integer,
    create_source_iterator,
)

R = TypeVar("R")
T = TypeVar("T")


def bump_seed(seed: Any, step: int = 1) -> Any:
    """
    Return the seed for another stage of the same pipeline.

    Args:
        seed: a number, or None, which stays None.
        step: what is added to the number.

    Raises:
        TypeError: the seed is text.

    >>> bump_seed(1), bump_seed(None)
    (2, None)
    """
    if seed is None:
        return None
    if isinstance(seed, (str, bytes, bytearray)):
        raise TypeError("seed must be a number or None for a pipeline of several random stages, got {!r}".format(seed))
    return seed + step


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
    num_workers: int = 0
) -> CheckpointableIterator[Any]:
    """
    Read a data set that is stored in chunks: permute the chunks, read them, shuffle their items.

    Cost: `buffer_size` items in memory, as many more with `prefetch`; restoring reads the chunks in which they lie.

    Args:
        chunk_refs: one reference for each chunk, such as its path; the same list for each instance.
        read_chunk_fn: function from a reference to the chunk's items, such as `infinibatch.readers.read_lines`.
        buffer_size: number of items that are shuffled at a time.
        train: whether to go through the data endlessly; else once, each instance through a consecutive part.
        seed: a number; None draws one, which checkpoints carry on.
        shuffle: whether to shuffle; must be False if `train` is.
        use_windowed: whether to shuffle with `BufferedShuffleIterator` instead of `BlockwiseShuffleIterator`.
        transform: function that is applied to each item.
        prefetch: whether to read ahead `buffer_size` items in another process.
        num_instances: number of instances, usually of GPUs, that share the data.
        instance_rank: number of this one, from 0 to `num_instances` - 1.
        num_workers: number of processes that read chunks, each another one; 0 reads them in this process. Order and
            checkpoints do not depend on it.

    Raises:
        ValueError: `buffer_size` is below 1, `instance_rank` is out of range, the list is empty, `shuffle` without
            `train`, or several instances shuffle without a seed.
        TypeError: `read_chunk_fn` or `transform` is not callable.

    >>> chunks = {"a": [1, 2, 3], "b": [4, 5]}
    >>> items = chunked_dataset_iterator(["a", "b"], chunks.get, buffer_size=5, seed=1)
    >>> sorted(next(items) for _ in range(5))
    [1, 2, 3, 4, 5]
    """
    _function("read_chunk_fn", read_chunk_fn)
    _integer("buffer_size", buffer_size)
    refs = create_source_iterator(chunk_refs, train, seed, shuffle, num_instances, instance_rank)
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
