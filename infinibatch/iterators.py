r"""
All checkpointable iterators, and the advanced guide to them.

The tutorial is the page of the package, `infinibatch`; here is what lies behind it.

# Pipelines

A pipeline is a tree of `CheckpointableIterator` objects. At the leaves are *sources*, every other iterator takes one or
more iterators as its own sources, and whoever trains reads from the root:

>>> numbers = NativeCheckpointableIterator(range(10))
>>> squares = MapIterator(numbers, lambda n: n * n)
>>> batches = FixedBatchIterator(squares, batch_size=4)
>>> batches  # doctest: +ELLIPSIS
FixedBatchIterator(batch_size=4)
  MapIterator(transform=<function <lambda> at 0x...>)
    NativeCheckpointableIterator(iterable=range(0, 10))
>>> list(batches)
[[0, 1, 4, 9], [16, 25, 36, 49], [64, 81]]

# Laziness

Building a pipeline reads nothing, draws nothing and starts nothing. All work is done in `next()`, and each stage asks
its source for as much as it needs: one item for `MapIterator`, a block for `BlockwiseShuffleIterator`, a window for
`BucketedReadaheadBatchIterator`. A function that the caller gave is called when its result is asked for.
`SamplingRandomMapIterator` and `RecurrentIterator` take source items ahead, as many as they use up in about a
millisecond.

Between stages items move in runs: a stage that needs 100,000 items gets slices of chunks, not 100,000 times one item.
What leaves the pipeline at the root should therefore be worth a Python call, such as a batch.

# Checkpointing

`getstate()` of the root returns the position of the whole pipeline, as dicts, lists, tuples, numbers and text.
`setstate()` of the same pipeline, or of another one built alike, goes there. The other one may live in another process,
on another machine, under another version of Python, and the checkpoint may have travelled through `pickle` or `json`.
`infinibatch.checkpoint` writes it to a file, atomically.

>>> batches.setstate(None)  # the very start
>>> next(batches)
[0, 1, 4, 9]
>>> checkpoint = batches.getstate()
>>> import json
>>> batches.setstate(json.loads(json.dumps(checkpoint)))
>>> next(batches)
[16, 25, 36, 49]

A checkpoint stores where items are, not the items: the state of the source before the current block and the number of
items of it that are out. (`BufferedShuffleIterator` is the exception, its buffer is its state.) It is checked as a
whole before anything moves; one of another pipeline is refused.

>>> batches.setstate({"source_state": {"index": 3}})  # doctest: +ELLIPSIS
Traceback (most recent call last):
    ...
ValueError: the checkpoint of NativeCheckpointableIterator lacks the key 'num_items_yielded', it has 'index': ...

An error in a callback loses nothing. `next()` raises it and moves nothing; the next `next()` tries the same item again;
`getstate()` in between is the last good position. A `StopIteration` out of a callback is a `RuntimeError`, not the end.

>>> shares = MapIterator(NativeCheckpointableIterator([1, 0, 2]), lambda n: 6 // n)
>>> next(shares)
6
>>> next(shares)
Traceback (most recent call last):
    ...
ZeroDivisionError: integer division or modulo by zero
>>> shares.getstate()
{'num_items_yielded': 1}

# Ownership of sources

An iterator owns its sources. Once an iterator is the source of another one, nobody else reads from it, and nobody asks
it for its state. Two stages cannot share a source: each needs one of its own.

A pipeline serves one caller at a time. While `next()` is at work, neither another thread, nor a function that the
pipeline calls, nor a handler of a signal may use the same pipeline: let the handler set a flag, and save the state when
`next()` has returned. Only `close()` may come from anywhere.

An iterator that keeps a position of its own rewinds its source when it is built; `MapIterator`, `FilterIterator` and
`ZipIterator`, which keep none, leave it where it is. `close()` of the root closes all; as a context manager, a pipeline
closes itself.

A pipeline whose functions can be pickled can itself be pickled and copied, and goes on from where it was.

# Random numbers

Each random stage has one `random.Random` of its own, made from its seed. Stages of one pipeline should have different
seeds, see `infinibatch.datasets.bump_seed`: two with the same seed draw the same numbers. `seed=None` draws a seed
once, when the stage is built: `setstate(None)` repeats the order, and checkpoints carry it into other pipelines.

# The families

**Sources.** `NativeCheckpointableIterator` wraps a list or another iterable. `InfinitePermutationSourceIterator` and
`ChunkedSourceIterator` yield the names of chunks, for one of several instances: endlessly in random order for training,
once for inference; `create_source_iterator` chooses. `PermutationSourceIterator` ends after a number of epochs.
`RandomIterator` yields random numbers.

**Mapping and flattening.** `MapIterator` applies a function, `SamplingRandomMapIterator` with random numbers,
`RecurrentIterator` with a state that is carried on. `SelectManyIterator` yields the items of what a function returns:
it turns the names of chunks into their items. `FilterIterator` leaves items out, `TakeIterator` ends after some, and
`EnumerateIterator` counts them.

**Shuffling.** `BlockwiseShuffleIterator` shuffles one block after the other, and stores positions only.
`BufferedShuffleIterator` shuffles in a sliding buffer, and stores the buffer.

**Batching.** `FixedBatchIterator` counts, `WindowedIterator` lets batches overlap, `BucketedReadaheadBatchIterator`
puts items of like length together. `PackIterator` joins sequences of tokens, and cuts them into packs of one size.

**Combining.** `ZipIterator` pairs items of several sources, `ChainIterator` takes one source after the other,
`MixIterator` draws from them by weight, and `MultiplexIterator` takes each item from the source that another iterator
names:

>>> corpora = [NativeCheckpointableIterator("abcdef"), NativeCheckpointableIterator("123")]
>>> "".join(MixIterator(corpora, weights=[4, 1], seed=1, until="drained"))  # one in five from the second corpus
'a1bcdef23'

**Working ahead.** `PrefetchIterator` has the items below it ready when they are asked for. `ParallelMapIterator` and
`ParallelSelectManyIterator` apply a function, or read chunks, in several processes, and keep the order. A checkpoint of
a pipeline with a `PrefetchIterator` also restores in the same one without it, unless a `FilterIterator` is next to it.

**Any number of ranks.** `ShardedIterator` serves a rank's share of a fixed number of shards, so that a run goes on with
more ranks, or with fewer.

# A pipeline for training

Lines of text in random order, mixed with noise that is drawn anew in each epoch, in batches of up to 60 characters; the
last stage makes what the model takes. On several GPUs, `num_instances` and `instance_rank` say which part this is.

>>> def training_pipeline(chunks, read_chunk, num_instances=1, instance_rank=0):
...     names = InfinitePermutationSourceIterator(chunks, 1, True, num_instances, instance_rank)
...     lines = BlockwiseShuffleIterator(SelectManyIterator(names, read_chunk), block_size=1000, seed=2)
...     noisy = SamplingRandomMapIterator(lines, lambda rng, line: line.replace(rng.choice("aeiou"), "_"), seed=3)
...     batches = BucketedReadaheadBatchIterator(
...         noisy, read_ahead=100, key=len, batch_size=lambda longest: 60 // len(longest), seed=4
...     )
...     return MapIterator(batches, "|".join)
>>> chunks = {"a": ["the first line", "and the second"], "b": ["a third one", "the fourth line"]}
>>> training = training_pipeline(list(chunks), chunks.get)
>>> for _ in range(2):
...     print(next(training))
_ third one|a th_rd one|_ third one|a third one
and the sec_nd|the first line|and th_ s_cond|the first line

# A pipeline for inference

Each line once, in order; each of two instances does its part.

>>> def inference_pipeline(chunks, read_chunk, num_instances=1, instance_rank=0):
...     names = ChunkedSourceIterator(chunks, num_instances, instance_rank)
...     return FixedBatchIterator(SelectManyIterator(names, read_chunk), batch_size=3)
>>> for rank in range(2):
...     print(list(inference_pipeline(list(chunks), chunks.get, num_instances=2, instance_rank=rank)))
[['the first line', 'and the second']]
[['a third one', 'the fourth line']]

# What determines memory, start and resume

*Memory*: the list of chunk names, the block of each shuffle, the window of each read-ahead, and one chunk, or of a
reader that returns a generator, what that holds. Each process of a `PrefetchIterator` holds what the stages below it
hold, and the items that it has ready.

*Start*: the first item needs the first block, and the first batch the first window. Both are read then, not when the
pipeline is built.

*Resume*: each stage reads again at most what it holds: the current block, the current window, and the chunks in which
these lie. A chunk that is a sequence (a list, not a generator) is entered in constant time. Nothing that lies before is
read, so resuming at the end of an epoch takes as long as at its start.

*Checkpoints*: 625 numbers for each random stage, two if its seed is `Keyed`, a few for any other; taking one takes
microseconds.
"""

import copy
import logging
import operator
import os
import random
import sys
from _thread import get_ident
from abc import abstractmethod
from collections import abc, deque
from functools import partial
from heapq import heapify, heappop, heapreplace
from itertools import accumulate, chain, islice, repeat
from math import ceil, isfinite
from time import perf_counter
from typing import (
    Any,
    Callable,
    Deque,
    Dict,
    Iterable,
    Iterator,
    List,
    NoReturn,
    Optional,
    Sequence,
    Set,
    Tuple,
    TypeVar,
    Union,
    cast,
)

S = TypeVar("S")
T = TypeVar("T")
Checkpoint = Dict[str, Any]

logger = logging.getLogger(__name__)


# ---------------------------------------------------------------------------------------------------------------------
# Checks of arguments and checkpoints, and plain helpers
# ---------------------------------------------------------------------------------------------------------------------


def _integer(name: str, value: Any, minimum: int = 1) -> int:
    """Return an argument as an int of at least `minimum`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError("{} must be an integer of at least {}, got {!r}".format(name, minimum, value)) from None
    if number < minimum:
        raise ValueError("{} must be at least {}, got {}".format(name, minimum, number))
    return number


def _list(name: str, value: Any) -> List[Any]:
    """Return an argument that must be a list, or another iterable, as a list of its own."""
    if not isinstance(value, abc.Iterable) and not hasattr(value, "__getitem__"):
        raise TypeError("{} must be a list, got {!r:.80}".format(name, value))
    return list(value)


def _source_list(value: Any) -> List[Any]:
    if isinstance(value, CheckpointableIterator):  # whose items are no sources, and may have no end
        raise ValueError("source_iterators must be a list of iterators, got the iterator {!r:.80}".format(value))
    return _list("source_iterators", value)


def _instance(num_instances: Any, instance_rank: Any) -> Tuple[int, int]:
    """Return the number of instances and the rank of this one, checked."""
    number, rank = _integer("num_instances", num_instances), _integer("instance_rank", instance_rank, 0)
    if rank >= number:
        raise ValueError("instance_rank must be less than num_instances = {}, got {}".format(number, rank))
    return number, rank


def _function(name: str, value: Any) -> Any:
    """Return an argument that must be callable."""
    if not callable(value):
        raise TypeError("{} must be callable, got {!r}".format(name, value))
    return value


class Keyed:
    """
    A seed for random stages whose checkpoints hold a few integers instead of a generator's state of 625 words.

    Permutation, block or window number k of a stage is drawn from a generator of its own. That is
    `random.Random(int.from_bytes(sha256(ascii((seed, number, scope, k)).encode()).digest(), "big"))`, where `number` is
    the number of stages with a `Keyed` seed below the stage (in a tree, of all that come before it), and `scope` the
    list of `(num_instances, instance_rank)` of the sources below that deal out their items to more than one instance,
    and of `(num_shards, num_instances, instance_rank)` of a `ShardedIterator` below. In a shard it is
    `[(num_shards, shard)]`, save that sources which deal out a permutation all draw the same one; in the i-th further
    `ShardedIterator` of a tree, `(i,)` stands behind it. So stages with one seed do not repeat each other, nor do
    instances and shards; stages without randomness and processes change nothing; and any position is reached without
    those before. Stages that draw for each item (`SamplingRandomMapIterator`, `BufferedShuffleIterator`,
    `RandomIterator`, `MixIterator`) pay some microseconds an item for it.

    A checkpoint holds k and a checksum of the rest: other than with the generator of a plain seed, the pipeline that it
    is restored into needs the same seed, and refuses it otherwise.

    Args:
        seed: an int, float, str or bytes.

    Raises:
        TypeError: the seed is of another type.

    >>> items = BlockwiseShuffleIterator(NativeCheckpointableIterator(range(6)), block_size=3, seed=Keyed(1))
    >>> list(items)
    [0, 2, 1, 5, 4, 3]
    >>> items.getstate()["source_state"]["recurrent_state"]
    (2, 1780064756)
    """

    def __init__(self, seed: Any) -> None:
        if seed is None or isinstance(seed, Keyed):
            raise TypeError("seed must be an int, float, str or bytes, got {!r}".format(seed))
        # Exactly of these types, whose text is the same everywhere: True, or a number of NumPy, has another one.
        seed = _seed(seed)
        self.seed = seed[:] if isinstance(seed, (str, bytes)) else float(seed) if isinstance(seed, float) else int(seed)

    def __repr__(self) -> str:
        return "Keyed({!r})".format(self.seed)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Keyed) and self.seed == other.seed

    def __hash__(self) -> int:
        return hash((Keyed, self.seed))


class _StageKey(Keyed):
    """The seed of one stage. What is added to a tree later may change its number: see `_number_keys`."""

    used = False

    def __init__(self, seed: Any, inputs: Sequence["_Stage[Any]"]) -> None:
        super().__init__(seed)
        self.number = len(_keys_of(inputs))
        self.scope: List[Tuple[int, ...]] = []
        for stage in _all_stages(inputs):
            if isinstance(stage, _ListSource) and stage._num_instances > 1:
                self.scope.append((stage._num_instances, stage._instance_rank))
            elif isinstance(stage, ShardedIterator):
                self.scope.append((stage._num_shards, stage._num_instances, stage._instance_rank))

    def generator(self, position: int) -> random.Random:
        import hashlib

        self.used = True
        name = ascii((self.seed, self.number, self.scope, position))
        return random.Random(int.from_bytes(hashlib.sha256(name.encode("ascii")).digest(), "big"))

    def checksum(self) -> int:
        import zlib

        return zlib.crc32(ascii((self.seed, self.number, self.scope)).encode("ascii"))


class _Generators:
    """In place of the generator of a keyed stage: one for each permutation, block or window."""

    def __init__(self, key: _StageKey, position: int) -> None:
        self._key, self._position = key, position

    def getstate(self) -> Tuple[int, int]:
        return self._position, self._key.checksum()

    def setstate(self, state: Tuple[int, int]) -> None:
        self._position = state[0]

    def next(self) -> random.Random:
        self._position += 1
        return self._key.generator(self._position - 1)

    def random(self) -> float:
        return self.next().random()


class _EachItem:
    """A transform that gets another generator for each item."""

    def __init__(self, transform: Callable[[random.Random, Any], Any]) -> None:
        self._transform = transform

    def __call__(self, generators: _Generators, item: Any) -> Any:
        return self._transform(generators.next(), item)

    def __repr__(self) -> str:
        return repr(self._transform)


def _unit(generator: Any) -> random.Random:
    """Return what the next permutation, block or window is drawn from."""
    return generator.next() if type(generator) is _Generators else cast(random.Random, generator)


def _units(generator: Any, n: int) -> Iterator[random.Random]:
    """Return what each of the next n items is drawn from."""
    return (generator.next() for _ in range(n)) if type(generator) is _Generators else repeat(generator, n)


def _all_stages(stages: Iterable[Any], seen: Optional[Set[int]] = None) -> Iterator[Any]:
    """Yield the stages of several trees, sources first; those of a user's own class are what its attributes hold."""
    seen = set() if seen is None else seen
    for stage in stages:
        if isinstance(stage, CheckpointableIterator) and id(stage) not in seen:
            seen.add(id(stage))
            if isinstance(stage, _Stage):
                yield from _all_stages(stage._sources(), seen)
            else:
                for value in list(getattr(stage, "__dict__", {}).values()):
                    yield from _all_stages(value if isinstance(value, (list, tuple)) else [value], seen)
            yield stage


def _seed_of(stage: Any) -> Any:
    return stage.__dict__.get("_seed") if isinstance(stage, _Stage) else None


def _keys_of(stages: Iterable[Any]) -> List[_StageKey]:
    return [key for key in map(_seed_of, _all_stages(stages)) if isinstance(key, _StageKey)]


def _number_keys(inputs: Sequence["_Stage[Any]"]) -> None:
    """Number the random stages of a tree, where several sources come together."""
    for number, key in enumerate(_keys_of(inputs)):
        if key.used and key.number != number:
            raise ValueError("sources with Keyed seeds must be fresh when they come together, one has been read")
        key.number = number
    for number, stage in enumerate(stage for stage in _all_stages(inputs) if isinstance(stage, ShardedIterator)):
        stage._set_place(number)


class _Drawn(int):
    """A seed that was drawn, since None was given."""


def _seed(value: Any, inputs: Sequence["_Stage[Any]"] = (), needed_by: Optional[str] = None) -> Any:
    """Return a seed; None becomes one drawn from the operating system, so that a rewind repeats the order."""
    if value is None:
        if needed_by:
            raise ValueError(
                "seed must be given to shuffle for {}, got None: each instance would draw an order of its own".format(
                    needed_by
                )
            )
        return _Drawn(random.SystemRandom().getrandbits(64))
    if isinstance(value, Keyed):
        return _StageKey(value.seed, inputs)
    if isinstance(value, (int, float, str, bytes)):
        if value != value:
            raise ValueError("seed must not be NaN, which draws other numbers each time")
        return value
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError("seed must be an int, float, str, bytes, Keyed or None, got {!r}".format(value)) from None


def _keys(stage: Any, checkpoint: Any, *keys: str) -> Tuple[Any, ...]:
    """Return the values of `keys` in the checkpoint of `stage`; what else it holds is ignored."""
    name = type(stage).__name__
    if not isinstance(checkpoint, dict):
        raise ValueError(
            "a checkpoint of {} is a dict with the keys {}, got {}: it belongs to another pipeline".format(
                name, ", ".join(map(repr, keys)), type(checkpoint).__name__
            )
        )
    for key in keys:
        if key not in checkpoint:
            raise ValueError(
                "the checkpoint of {} lacks the key {!r}, it has {}: it is damaged, or belongs to another "
                "pipeline".format(name, key, ", ".join(map(repr, checkpoint)) or "none")
            )
    return tuple(checkpoint[key] for key in keys)


def _unfit(stage: Any, key: str, rule: str, value: Any) -> ValueError:
    name = type(stage).__name__
    return ValueError("the checkpoint of {} does not fit: {!r} must be {}, got {!r:.80}".format(name, key, rule, value))


def _count(stage: Any, key: str, value: Any) -> int:
    """Return a number of items out of a checkpoint."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _unfit(stage, key, "an integer of at least 0", value)
    return value


def _source_and_count(stage: Any, checkpoint: Any, key: str) -> Tuple[Any, int]:
    """Return, of a stage that stores nothing else, its source's state and a number of items."""
    if checkpoint is None:
        checkpoint = {"source_state": None, key: 0}
    source_state, number = _keys(stage, checkpoint, "source_state", key)
    stage._source._check(source_state)
    return source_state, _count(stage, key, number)


_scratch = random.Random(0)  # states are tried, and positions inside a run of draws are found, on this one


def _random_state(stage: Any, key: str, value: Any) -> Any:
    """Return the state of a generator out of a checkpoint, in which JSON may have made lists of the tuples."""
    if value is None:
        return None
    if isinstance(stage._seed, _StageKey):
        if not isinstance(value, (list, tuple)) or len(value) != 2:
            raise _unfit(stage, key, "what a Keyed seed leaves, a position and a checksum", value)
        position = _count(stage, key, value[0])
        if value[1] != stage._seed.checksum():
            raise _unfit(stage, key, "of the same Keyed seed and as many random stages before this one", value)
        return position, value[1]
    try:
        version, words, gauss_next = value
        state = (version, tuple(words), gauss_next)
        _scratch.setstate(state)
        if gauss_next is not None:
            gauss_next + 0.0
    except (TypeError, ValueError, OverflowError):
        raise _unfit(stage, key, "the state of a random.Random", value) from None
    return state


def _generator(seed: Any, state: Any) -> Any:
    """Return a generator in the given state, or as seeded where that is None."""
    if isinstance(seed, _StageKey):
        return _Generators(seed, 0 if state is None else state[0])
    generator = random.Random(seed)
    if state is not None:
        generator.setstate(state)
    return generator


_ATOMS = frozenset([type(None), bool, int, float, complex, str, bytes, range])


def _all_immutable(items: Iterable[Any]) -> bool:
    return _ATOMS.issuperset(map(type, items)) or all(map(_is_immutable, items))


def _is_immutable(item: Any) -> bool:
    kind = type(item)
    return kind in _ATOMS or kind is tuple and _all_immutable(item) or isinstance(item, os.PathLike)


def _copied(state: Any) -> Any:
    """Return a copy that shares only what cannot change, such as the states of generators."""
    kind = type(state)
    if kind in _ATOMS:
        return state
    if kind is dict:
        return {key: _copied(value) for key, value in state.items()}
    if kind is list:
        return state[:] if _ATOMS.issuperset(map(type, state)) else [_copied(value) for value in state]
    if kind is tuple:
        return state if _ATOMS.issuperset(map(type, state)) else tuple([_copied(value) for value in state])
    return copy.deepcopy(state)


def _shuffled(items: List[T], generator: Any) -> List[T]:
    """
    Return what `generator.shuffle` would make of a copy of the list, leaving the generator where that would leave it.

    The loops of `Random.shuffle` and `Random._randbelow` in one: 0.4 to 0.7 of their time. An interrupted shuffle sets
    the generator back.
    """
    shuffled = items[:]
    state = generator.getstate()
    try:
        getrandbits = _unit(generator).getrandbits
        last = len(shuffled) - 1
        while last > 0:
            bits = (last + 1).bit_length()
            for i in range(last, max((1 << (bits - 1)) - 2, 0), -1):  # as long as i + 1 has that many bits
                j = getrandbits(bits)
                while j > i:
                    j = getrandbits(bits)
                shuffled[i], shuffled[j] = shuffled[j], shuffled[i]
            last = (1 << (bits - 1)) - 2
        return shuffled
    except BaseException:
        generator.setstate(state)
        raise


def _reraise(error: BaseException, culprit: str) -> NoReturn:
    """Raise what came out of a callback; a StopIteration would be taken for the end of the data."""
    if isinstance(error, StopIteration):
        raise RuntimeError("{} raised StopIteration".format(culprit)) from error
    raise error


def _gather(source: "CheckpointableIterator[T]", items: List[T], number: int) -> None:
    """Append to `items` until it holds `number` of them or the source ends."""
    length = len(items)
    while length < number:
        source._fill(items, number - length)
        if len(items) == length:
            return
        length = len(items)


def _pass_over(source: "CheckpointableIterator[Any]", number: int) -> int:
    """Skip items of a source that was just restored, all or (at the end, as 0.1.1 left it) none; return how many."""
    state = source.getstate()
    try:
        skipped = source._skip(number)
    except BaseException:
        source.setstate(state)
        raise
    if 0 < skipped < number:
        source.setstate(state)
        raise _beyond(source, number, skipped)
    return skipped


def _beyond(stage: Any, number: int, available: int) -> RuntimeError:
    return RuntimeError(
        "the checkpoint lies beyond the end of the data: {} cannot pass over {} items, it has {}".format(
            type(stage).__name__, number, available
        )
    )


def _advance_iterator(iterator: Iterator[Any], n: int) -> int:
    """Call `next` n times and return n; RuntimeError if the iterator ends before."""
    for i in range(n):
        try:
            next(iterator)
        except StopIteration:
            raise _beyond(iterator, n, i) from None
    return n


# ---------------------------------------------------------------------------------------------------------------------
# The protocol
# ---------------------------------------------------------------------------------------------------------------------


class CheckpointableIterator(Iterator[T]):
    """
    Iterate, and say at any moment where: the abstract base of all iterators here.

    A class of one's own defines `getstate`, `setstate` and `__next__`, and `close` if it holds resources.
    `infinibatch.testing.check_iterator` tells whether it keeps the contract.

    >>> class Countdown(CheckpointableIterator):
    ...     def __init__(self, start):
    ...         self._start = start
    ...         self.setstate(None)
    ...     def getstate(self):
    ...         return {"left": self._left}
    ...     def setstate(self, checkpoint):
    ...         self._left = self._start if checkpoint is None else checkpoint["left"]
    ...     def __next__(self):
    ...         if self._left == 0:
    ...             raise StopIteration
    ...         self._left -= 1
    ...         return self._left
    >>> batches = FixedBatchIterator(Countdown(5), batch_size=2)
    >>> next(batches)
    [4, 3]
    >>> batches.getstate()
    {'source_state': {'left': 3}}
    """

    # Beside `__next__` an iterator moves many items at once. These are internal: the library's stages have their own,
    # and everybody else's class is asked for one item after the other.

    def _fill(self, out: List[T], n: int) -> None:
        """
        Append at least one and at most n items; none only at the end of the data.

        If an item raises, those before it are in the list, and the iterator stands right behind them.
        """
        append = out.append
        for _ in range(n):
            try:
                append(next(self))
            except StopIteration:
                return

    def _skip(self, n: int) -> int:
        """Pass over n items, fewer only at the end of the data, and return their number."""
        for i in range(n):
            try:
                next(self)
            except StopIteration:
                return i
        return n

    def _back(self, n: int) -> None:
        """Take back the last n, at least one, of the items that the last call of `__next__` or `_fill` gave."""
        raise NotImplementedError("{} cannot take items back".format(type(self).__name__))

    def _parse(self, checkpoint: Any) -> Tuple[Any, ...]:
        """Return what the checkpoint says, everything checked that the library's stages below wrote into it."""
        return (checkpoint,)

    def _check(self, checkpoint: Any) -> None:
        """Raise what `setstate` would raise for this checkpoint, and stay."""
        self._parse(checkpoint)

    _shown: Tuple[str, ...] = ()  # the parameters in repr()

    _own_state = True  # whether a class outside this module defines what the state means …
    _foreign = True  # … or what the items are: then the bulk operations of its parents do not stand for it

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)

        def is_own(name: str) -> bool:
            return next(parent for parent in cls.__mro__ if name in parent.__dict__).__module__ != __name__

        cls._own_state = is_own("getstate") or is_own("setstate")
        cls._foreign = cls._own_state or is_own("__next__")

    @abstractmethod
    def getstate(self) -> Checkpoint:
        """
        Return the position of the whole pipeline, as plain data that nothing changes later.

        May be called at any moment: before the first item, between items, after the end, after an error, after
        `close()`. (After an error and then `close()`, a stage that has to read its source again to know where it is
        raises a RuntimeError if there are workers below it: take the state first.)
        """

    @abstractmethod
    def setstate(self, checkpoint: Optional[Checkpoint]) -> None:
        """
        Go to the position of a checkpoint, of this or of an equally built pipeline; None is the very start.

        Args:
            checkpoint: what `getstate` returned, also after pickle, or after JSON made lists of its tuples.

        Raises:
            ValueError: the checkpoint does not fit this pipeline, which keeps the position that it had.
            RuntimeError: the position lies beyond the end of the data (where that shows only when items are read,
                the next `next()` raises it).
        """

    @abstractmethod
    def __next__(self) -> T:
        """
        Return the next item and move on, or raise and stay.

        Raises:
            StopIteration: at the end of the data, and again at each later call.
            Exception: what a source or callback raised; the next call tries the same item again.
        """

    def close(self) -> None:
        """End the processes and threads of the whole pipeline; more than once does no harm."""
        for source in _named_sources(self):
            source.close()

    def state_dict(self) -> Checkpoint:
        """Return `getstate()`, under the name that training frameworks look for."""
        return self.getstate()

    def load_state_dict(self, state_dict: Optional[Checkpoint]) -> None:
        """Call `setstate(state_dict)`, under the name that training frameworks look for."""
        self.setstate(state_dict)

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        """Show the pipeline, one stage a line, sources below."""
        import reprlib  # here: it costs an import something, and few programs ask

        short = reprlib.Repr()
        short.maxother = short.maxstring = 60
        parameters = ["{}={}".format(name, short.repr(getattr(self, "_" + name))) for name in self._shown]
        lines = ["{}({})".format(type(self).__name__, ", ".join(parameters))]
        for source in _named_sources(self):
            lines += ["  " + line for line in repr(source).split("\n")]
        return "\n".join(lines)


def _named_sources(iterator: CheckpointableIterator[Any]) -> Sequence[CheckpointableIterator[Any]]:
    """Return the sources of an iterator; of a class of the user's own, the one that is named as here."""
    if isinstance(iterator, _Stage):
        return iterator._sources()
    source = getattr(iterator, "_source_iterator", None)
    return [source] if isinstance(source, CheckpointableIterator) else []


class _Stage(CheckpointableIterator[T]):
    """
    What the library's own iterators share.

    A stage defines `_save` (its state), `_parse` (what a checkpoint says, checked) and `_restore` (go there). It keeps
    its configuration apart from the fields named in `_transient`, which `_restore` makes anew and pickle leaves out.
    """

    _inputs: Tuple["_Stage[Any]", ...] = ()
    _transient: Tuple[str, ...] = ()
    _positioned = True  # False in stages that have no position before their first setstate()

    def _read_from(self, source_iterator: CheckpointableIterator[Any]) -> None:
        """Take what a constructor was given as the only source."""
        self._source_iterator, self._source = source_iterator, _adopt(source_iterator)
        self._inputs = (self._source,)

    def _save(self) -> Checkpoint:
        raise NotImplementedError

    def _restore(self, *fields: Any) -> None:
        raise NotImplementedError

    def _step(self) -> T:
        """In stages that make one item after the other, what `__next__` does: a subclass may do more there."""
        raise NotImplementedError

    def _fill(self, out: List[T], n: int) -> None:
        for _ in range(n):
            try:
                out.append(self._step())
            except StopIteration:
                return

    def _skip(self, n: int) -> int:
        skipped = 0
        while skipped < n:
            passed: List[T] = []
            self._fill(passed, min(n - skipped, 1000))
            if not passed:
                break
            skipped += len(passed)
        return skipped

    def _state(self) -> Checkpoint:
        return self._save()

    def getstate(self) -> Checkpoint:
        return self._state()

    def _offsets(self) -> Tuple[int, bool]:
        """
        Return how many PrefetchIterators wrap their offsets around this stage's checkpoint, itself among them.

        And whether it matters where they are: offsets before and behind a FilterIterator count other items.
        """
        return 0, False

    def _own(self, checkpoint: Any) -> Tuple[Any, int]:
        """Return a checkpoint without that of PrefetchIterators that are not there, and their offsets' sum."""
        number, matters = self._offsets()
        offsets, inner = [], checkpoint
        while isinstance(inner, dict) and "item_offset" in inner and "source_state" in inner:
            offsets.append(inner["item_offset"])
            inner = inner["source_state"]
        ahead = 0
        for offset in offsets[: max(len(offsets) - number, 0)]:
            ahead += _count(self, "item_offset", offset)
            checkpoint = checkpoint["source_state"]
        if ahead and matters:
            raise ValueError(
                "the checkpoint of {} does not fit: it was made with a PrefetchIterator before or behind a "
                "FilterIterator, and restores only with one at the same place".format(type(self).__name__)
            )
        return checkpoint, ahead

    def _check(self, checkpoint: Any) -> None:
        self._parse(self._own(checkpoint)[0])

    def setstate(self, checkpoint: Optional[Checkpoint]) -> None:
        checkpoint, ahead = self._own(checkpoint)
        fields = self._parse(checkpoint)
        if not ahead and not (self._positioned and self._holds_foreign()):
            self._restore(*fields)
            self._positioned = True
            return
        try:
            before = self._state() if self._positioned else None
        except Exception:  # a source that fails for good, which setstate() may mend
            before = None
        try:
            self._restore(*fields)
            self._positioned = True
            if ahead:
                _pass_over(_adopt(self), ahead)
        except BaseException:  # out of a user's own class or callback: all others go back to where they were
            if before is not None:
                self._restore(*self._parse(before))
            raise

    def _holds_foreign(self) -> bool:
        return any(isinstance(source, _Foreign) or source._holds_foreign() for source in self._inputs)

    def _sources(self) -> Sequence[CheckpointableIterator[Any]]:
        return self._inputs

    def __getstate__(self) -> Tuple[Dict[str, Any], Checkpoint]:
        left_out = {name for parent in type(self).__mro__ for name in parent.__dict__.get("_transient", ())}
        return {k: v for k, v in self.__dict__.items() if k not in left_out}, self.getstate()

    def __setstate__(self, state: Tuple[Dict[str, Any], Checkpoint]) -> None:
        configuration, checkpoint = state
        self.__dict__.update(configuration)
        self._positioned = False
        self.setstate(checkpoint)

    def __copy__(self: S) -> S:
        return copy.deepcopy(self)  # two pipelines cannot share a source


def _adopt(source: Any, name: str = "source_iterator") -> "_Stage[Any]":
    """Return a source as a stage: itself, or a user's own class in its adapter."""
    if not isinstance(source, CheckpointableIterator):
        raise ValueError("{} must be a CheckpointableIterator, got {!r:.80}".format(name, source))
    if source._foreign:
        return _Foreign(source)
    return cast("_Stage[Any]", source)


_END: Any = object()  # in place of a run

_RUNS: Set[type] = {list, tuple, range, str, bytes}  # their iterators say where they are, and can be set

# Two ways to keep a position, the cheaper one first, and the adapter of a user's own class. Stages that need neither
# give back to their sources what they have not passed on.


class _RunIterator(_Stage[T]):
    """
    A stage that yields runs: a chunk, a shuffled block, the batches of a window.

    The position in a run is kept by the run's own iterator, `_rest`: `_end` items up to the end of the run, less what
    `_rest` has left. A run that is no plain sequence is a `_stream`, its items counted in `_end` as they come.

    A stage defines `_read`: return the next run, or `_END`. If that raises, it holds what it has read and
    goes on with it at the next call.
    """

    _run: Sequence[T] = ()
    _rest: Any = iter(())
    _stream: Optional[Iterator[T]] = None
    _end = 0
    _start: Any = None  # where the run starts, as `_now` said then; None: as things stand
    _pending = True  # the run is still to be read, and `_end` of its items to be passed over
    _positioned = False
    _transient: Tuple[str, ...] = ("_run", "_rest", "_stream", "_end", "_start", "_pending")

    def _now(self) -> Any:
        """Return the state in which the next run would be read."""

    def _read(self) -> Iterable[T]:
        raise NotImplementedError

    def _rewind(self, position: int) -> None:
        """Stand before the given item of the run that would be read as things stand."""
        self._run, self._rest, self._stream = (), iter(()), None
        self._start, self._end, self._pending = None, position, True

    def _position(self) -> Tuple[Any, int]:
        """Return where the current run starts, and how many of its items are out."""
        left = self._rest.__length_hint__()
        if not left and not self._pending and self._stream is None:
            return self._now(), 0  # the next run: restoring need not read this one again
        if self._start is None:
            self._start = self._now()
        return _copied(self._start), self._end - left

    def _open(self) -> bool:
        """Read the next run; False at the end of the data."""
        if not self._pending:
            self._rewind(0)
        if self._start is None:
            self._start = self._now()
        try:
            run = self._read()
        except StopIteration as error:
            _reraise(error, "a function called by {}".format(type(self).__name__))
        if run is _END:
            self._end = 0  # 0.1.1 left the length of the last run here
            return False
        if type(run) in _RUNS:
            self._run = cast("Sequence[T]", run)
            if self._end > len(self._run):
                raise self._too_far(len(self._run))
            self._seek(self._end)
            self._end = len(self._run)
        elif isinstance(run, abc.Sequence):
            if self._end > len(run):
                raise self._too_far(len(run))
            # Lines of a mapped file come in lists; another sequence may compute an item only when it is asked for.
            runs = getattr(run, "_infinibatch_runs", None)
            self._stream = chain.from_iterable(runs(self._end)) if runs else _items_from(run, self._end)
        else:
            stream = iter(run)
            passed = sum(1 for _ in islice(stream, min(self._end, sys.maxsize)))
            if passed < self._end:
                raise self._too_far(passed)
            self._stream = stream
        self._pending = False
        return True

    def _load(self) -> bool:
        """Read runs until there is one that has items left; False at the end of the data."""
        while self._open():
            if self._rest.__length_hint__() or self._stream is not None:
                return True
        return False

    def _too_far(self, available: int) -> RuntimeError:
        error = _beyond(self, self._end, available)
        self._restore(*self._parse(self._save()))  # back before what was read, so that the next call says the same
        return error

    def _seek(self, position: int) -> None:
        rest: Any = iter(self._run)
        if position:
            rest.__setstate__(position)
        self._rest = rest

    def __next__(self) -> T:
        item: T
        for item in self._rest:
            return item
        while self._stream is not None or self._load():
            if self._stream is None:
                item = next(self._rest)
                return item
            try:
                for item in self._stream:
                    self._end += 1
                    return item
            except BaseException:
                self._stream, self._pending = None, True
                raise
            self._stream = None
        raise StopIteration

    def _fill(self, out: List[T], n: int) -> None:
        length = len(out)
        while len(out) == length and n > 0:  # n is 0 only if several threads read at once: not a loop without end
            left = self._rest.__length_hint__()
            if left:
                run = self._run
                position = len(run) - left
                out += run[position : position + n]
                self._rest = iter(run)
                self._rest.__setstate__(position + min(n, left))
                return
            if self._stream is not None:
                try:
                    out.extend(islice(self._stream, min(n, sys.maxsize)))
                except BaseException:
                    self._pending = True
                    raise
                finally:
                    self._end += len(out) - length
                    if self._pending or len(out) - length < n:
                        self._stream = None
            elif not self._load():
                return

    def _skip(self, n: int) -> int:
        skipped = 0
        while skipped < n:
            left = self._rest.__length_hint__()
            if left:
                step = min(left, n - skipped)
                self._seek(len(self._run) - left + step)
            elif self._stream is not None:
                passed: List[T] = []
                self._fill(passed, min(n - skipped, 1000))
                step = len(passed)
            elif self._load():
                continue
            else:
                break
            skipped += step
        return skipped

    def _back(self, n: int) -> None:
        if len(self._run):
            self._seek(len(self._run) - self._rest.__length_hint__() - n)
        else:
            self._stream, self._pending = None, True
            self._end -= n

    def close(self) -> None:
        if self._stream is not None:
            self._stream, self._pending = None, True  # ends the generator that reads a chunk, and its file with it
        super().close()


def _items_from(items: Sequence[T], position: int) -> Iterator[T]:
    for i in range(position, len(items)):
        try:
            item = items[i]
        except StopIteration as error:
            _reraise(error, "{}.__getitem__".format(type(items).__name__))
        yield item


class _ReplayIterator(_Stage[T]):
    """
    A stage whose steps cannot be taken back.

    It takes a snapshot of its state every so many steps. Only after a failure it goes there again and repeats the good
    steps since. A snapshot that takes long is taken less often. A stage defines `_move`: go to a checkpoint.
    """

    _interval = 256
    _left = 0  # steps until the next snapshot; 0 also after a failure
    _snapshot: Any = None
    _broken = False
    _good = 0  # steps since the snapshot, once broken
    _marked = _cost = 0.0  # when the last snapshot was taken, and the seconds that it took
    _positioned = False
    _transient: Tuple[str, ...] = ("_interval", "_left", "_snapshot", "_broken", "_good", "_marked", "_cost")

    def _move(self, *fields: Any) -> None:
        raise NotImplementedError

    def _restore(self, *fields: Any) -> None:
        self._broken, self._left = False, 0
        self._move(*fields)

    def _taken(self) -> int:
        """Return the number of good steps since the snapshot."""
        return self._good if self._broken else self._interval - self._left

    def _fail(self, good: int) -> None:
        """Note that only the first `good` steps since the snapshot count."""
        self._broken, self._good, self._left = True, good, 0

    def _recover(self) -> None:
        """Stand behind the last good step."""
        if not self._broken:
            return
        snapshot, good = self._snapshot, self._good
        try:
            self._restore(*self._parse(snapshot))
            repeated: List[T] = []
            _gather(self, repeated, good)
            if len(repeated) < good:
                raise _beyond(self, good, len(repeated))
        except BaseException:
            self._snapshot = snapshot
            self._fail(good)
            raise

    def _mark(self) -> None:
        """Take a snapshot."""
        begin = perf_counter()
        self._snapshot = self._save()
        self._marked = perf_counter()
        self._cost = self._marked - begin

    def _prepare(self) -> None:
        """Be ready for at least one more step."""
        self._recover()
        if not self._left:
            if self._cost * 20 > perf_counter() - self._marked:
                self._interval = min(2 * self._interval, 1 << 16)
            self._mark()
            self._left = self._interval

    def _state(self) -> Checkpoint:
        self._recover()
        return self._save()

    def _back(self, n: int) -> None:
        self._fail(self._taken() - n)


class _Foreign(_ReplayIterator[T]):
    """A user's own iterator as a stage: its end is the end, and items can be taken back."""

    _ended = False
    _transient: Tuple[str, ...] = ("_ended",)

    def __init__(self, iterator: CheckpointableIterator[T]) -> None:
        self._iterator = iterator

    def _offsets(self) -> Tuple[int, bool]:
        return sys.maxsize, False  # the keys mean what the class says

    def _save(self) -> Checkpoint:
        return cast(Checkpoint, _copied(self._iterator.getstate()))

    def _parse(self, checkpoint: Any) -> Tuple[Any, ...]:
        if not self._iterator._own_state:
            self._iterator._check(checkpoint)
        return (checkpoint,)

    def _move(self, checkpoint: Any) -> None:
        self._ended = False
        self._iterator.setstate(_copied(checkpoint))

    def __next__(self) -> T:
        if not self._left:
            self._prepare()
        if self._ended:
            raise StopIteration
        try:
            item = next(self._iterator)
        except StopIteration:
            self._ended = True
            raise
        self._left -= 1
        return item

    def _fill(self, out: List[T], n: int) -> None:
        if not self._left:
            self._prepare()
        append = out.append
        for _ in range(min(n, self._left)):
            if self._ended:
                return
            try:
                append(next(self._iterator))
            except StopIteration:
                self._ended = True
                return
            self._left -= 1

    def _sources(self) -> Sequence[CheckpointableIterator[Any]]:
        return [self._iterator]

    def _holds_foreign(self) -> bool:
        return True

    def __repr__(self) -> str:
        return repr(self._iterator)


# ---------------------------------------------------------------------------------------------------------------------
# Sources
# ---------------------------------------------------------------------------------------------------------------------


class NativeCheckpointableIterator(_RunIterator[T]):
    """
    Yield the items of an iterable.

    Cost: nothing is copied. A sequence is entered at any position in constant time, another iterable is read again up
    to the position.

    Args:
        iterable: a list, a range, or anything else that gives the same items each time it is iterated over. It must
            not change while it is read.

    Raises:
        ValueError: the iterable is an iterator, which cannot be rewound, or a range of more than `sys.maxsize` items.
        TypeError: it is no iterable.

    >>> letters = NativeCheckpointableIterator("abc")
    >>> next(letters)
    'a'
    >>> letters.getstate()
    {'num_items_yielded': 1}
    >>> list(letters)
    ['b', 'c']
    """

    _shown = ("iterable",)

    def __init__(self, iterable: Iterable[T]) -> None:
        if isinstance(iterable, abc.Iterator):
            raise ValueError(
                "iterable must be one that can be iterated over again, such as a list, got the iterator "
                "{!r:.80}".format(iterable)
            )
        if not isinstance(iterable, abc.Iterable) and not hasattr(iterable, "__getitem__"):
            raise TypeError("iterable must be an iterable, got {!r:.80}".format(iterable))
        if isinstance(iterable, range) and len(iterable[: sys.maxsize]) == sys.maxsize and iterable[sys.maxsize :]:
            raise ValueError("iterable must have at most {} items, got {!r}".format(sys.maxsize, iterable))
        self._iterable = iterable
        self.setstate(None)

    def _parse(self, checkpoint: Any) -> Tuple[int]:
        if checkpoint is None:
            return (0,)
        (number,) = _keys(self, checkpoint, "num_items_yielded")
        number = _count(self, "num_items_yielded", number)
        if isinstance(self._iterable, abc.Sequence) and number > len(self._iterable):
            raise _beyond(self, number, len(self._iterable))
        return (number,)

    def _restore(self, number: int) -> None:
        self._rewind(number)

    def _save(self) -> Checkpoint:
        return {"num_items_yielded": self._end - self._rest.__length_hint__()}

    def _open(self) -> bool:
        return self._pending and super()._open()

    def _read(self) -> Iterable[T]:
        return self._iterable


class _ListSource(_RunIterator[T]):
    """
    A source made from a list: its checkpoints say from which, and for which instance; others are refused.

    What tells lists apart is their length, and a digest of the items' names where they are paths or text.
    """

    _source_items: List[T]
    _num_instances: int
    _instance_rank: int
    _digest: Any = _END
    _transient: Tuple[str, ...] = ("_digest",)

    def _origin(self) -> Checkpoint:
        items = self._source_items
        if self._digest is _END:
            self._digest = None
            if items and all(isinstance(item, (str, os.PathLike)) for item in items):
                import hashlib  # here: it takes milliseconds to load

                names = "\n".join([os.path.basename(os.fsdecode(cast(str, item))) for item in items])
                self._digest = hashlib.sha256(names.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        return {
            "length": len(items),
            "num_instances": self._num_instances,
            "instance_rank": self._instance_rank,
            "digest": self._digest,
        }

    def _share_list(self, other: "_ListSource[T]") -> None:
        """Hold the list of another source, if it is the same: of many shards, one list is in memory, digested once."""
        here, there = self._source_items, other._source_items
        if len(here) == len(there) and all(map(operator.is_, here, there)):
            self._source_items, self._digest = there, other._origin()["digest"]

    def _log_if_idle(self, number: int) -> None:
        if number <= self._instance_rank:
            logger.info("instance %d of %d gets none of %d items", self._instance_rank, self._num_instances, number)

    def _check_source(self, checkpoint: Checkpoint) -> None:
        if "source" not in checkpoint:  # as in checkpoints of Infinibatch 0.1.1
            return
        here = self._origin()
        for key, there in zip(here, _keys(self, checkpoint["source"], *here)):
            if there != here[key]:
                raise ValueError(
                    "the checkpoint of {} does not fit: it was made with {}, here it is {}{}".format(
                        type(self).__name__,
                        {
                            "length": "a list of {} items",
                            "num_instances": "num_instances = {}",
                            "instance_rank": "instance_rank = {}",
                            "digest": "a list of items with other names (digest {})",
                        }[key].format(there),
                        here[key],
                        "; only a ShardedIterator goes on with another number" if key == "num_instances" else "",
                    )
                )


class ChunkedSourceIterator(_ListSource[T]):
    """
    Yield the items of a list once; of several instances each yields a consecutive part of it.

    The parts differ by at most one item, the longer ones come first. Cost: the list of references is copied.

    Args:
        source_items: the list, the same for each instance.
        num_instances: number of parts.
        instance_rank: which part this instance yields, from 0 to `num_instances` - 1.

    Raises:
        ValueError: `num_instances` is below 1, or `instance_rank` out of range.

    >>> [list(ChunkedSourceIterator([1, 2, 3, 4, 5], num_instances=2, instance_rank=rank)) for rank in (0, 1)]
    [[1, 2, 3], [4, 5]]
    """

    _shown = ("source_items", "num_instances", "instance_rank")

    def __init__(self, source_items: Iterable[T], num_instances: int = 1, instance_rank: int = 0) -> None:
        self._source_items = _list("source_items", source_items)
        self._num_instances, self._instance_rank = _instance(num_instances, instance_rank)
        self._log_if_idle(len(self._source_items))
        self.setstate(None)

    def _part(self) -> Tuple[int, int]:
        size, longer = divmod(len(self._source_items), self._num_instances)
        first = self._instance_rank * size + min(self._instance_rank, longer)
        return first, first + size + (self._instance_rank < longer)

    def _parse(self, checkpoint: Any) -> Tuple[int]:
        if checkpoint is None:
            return (0,)
        (number,) = _keys(self, checkpoint, "num_items_yielded")
        number = _count(self, "num_items_yielded", number)
        self._check_source(checkpoint)
        first, end = self._part()
        if number > end - first:
            raise _beyond(self, number, end - first)
        return (number,)

    def _restore(self, number: int) -> None:
        self._rewind(number)

    def _save(self) -> Checkpoint:
        return {"num_items_yielded": self._end - self._rest.__length_hint__(), "source": self._origin()}

    def _open(self) -> bool:
        return self._pending and super()._open()

    def _read(self) -> Sequence[T]:
        first, end = self._part()
        return self._source_items[first:end]


class InfinitePermutationSourceIterator(_ListSource[T]):
    """
    Yield the items of a list in a random order, then in another one, and so on without end.

    The permutations form one endless stream; of N instances, instance r gets its positions r, r + N, r + 2 N, … Items
    that can be changed are yielded as copies, so that whoever changes one finds it unchanged in the next permutation.

    Cost: two lists of references; a checkpoint holds the generator's state, restoring draws one permutation.

    Args:
        source_items: the list, the same for each instance. It is copied.
        seed: int, float, str or bytes for `random.Random`, or `Keyed`. None draws one, which checkpoints carry on.
        shuffle: False yields the items in the order of the list, over and over, the same objects each time.
        num_instances: number of instances that share the stream.
        instance_rank: number of this one, from 0 to `num_instances` - 1.

    Raises:
        ValueError: the list is empty, `instance_rank` is out of range, or several instances shuffle without a seed.

    >>> from itertools import islice
    >>> list(islice(InfinitePermutationSourceIterator([1, 2, 3, 4], seed=1), 8))
    [4, 1, 3, 2, 4, 2, 1, 3]
    >>> list(islice(InfinitePermutationSourceIterator([1, 2, 3], shuffle=False, num_instances=2), 4))
    [1, 3, 2, 1]
    """

    _shown: Tuple[str, ...] = ("source_items", "seed", "shuffle", "num_instances", "instance_rank")
    _drawn = False  # whether the seed was drawn here: then another pipeline needs it even before the first item
    _num_epochs: Optional[int] = None
    _copies: Optional[bool] = None  # whether each permutation must have items of its own
    _transient: Tuple[str, ...] = ("_copies", "_random", "_index", "_epoch")

    def __init__(
        self,
        source_items: Iterable[T],
        seed: Any = 0,
        shuffle: bool = True,
        num_instances: int = 1,
        instance_rank: int = 0,
    ) -> None:
        items = _list("source_items", source_items)
        if not items:
            raise ValueError("source_items must have at least one item, got none")
        self._num_instances, self._instance_rank = _instance(num_instances, instance_rank)
        several = "num_instances = {}".format(self._num_instances) if shuffle and self._num_instances > 1 else None
        self._seed = _seed(seed, needed_by=several)
        self._drawn = seed is None
        self._shuffle = bool(shuffle)
        self._source_items = items if _all_immutable(items) else copy.deepcopy(items)
        self.setstate(None)

    def _parse(self, checkpoint: Any) -> Tuple[Any, ...]:
        if checkpoint is None:
            return None, self._instance_rank
        state, index = _keys(self, checkpoint, "random_state", "index")
        state, index = _random_state(self, "random_state", state), _count(self, "index", index)
        self._check_source(checkpoint)
        if index >= len(self._source_items) + self._num_instances:
            raise _unfit(self, "index", "less than the number of items and instances", index)
        return state, index

    def _restore(self, state: Any, index: int, epoch: int = 0) -> None:
        if self._seed is None or type(self._seed) is Keyed:  # in a subclass with a constructor of its own
            self._seed, self._drawn = _seed(self._seed), self._seed is None
        self._random = _generator(self._seed, state)
        self._rewind(0)
        self._index = index  # in the current permutation, of the first item of the run
        self._epoch = epoch  # the number of permutations before the current one
        self._start = state

    def _now(self) -> Any:
        return self._random.getstate() if self._shuffle else None

    def _save(self) -> Checkpoint:
        left = self._rest.__length_hint__()
        if self._pending:
            index, state = self._index, self._start
            if state is None and self._drawn:
                state = self._now()
        elif left:
            index, state = self._index + self._num_instances * (self._end - left), self._start
        else:
            index, state = self._next_index(), self._now()
        return {"random_state": state, "index": index, "source": self._origin()}

    def _next_index(self) -> int:
        """Return where the next item lies in the permutations that begin behind the current one."""
        return self._index + self._num_instances * len(self._run) - len(self._source_items)

    def _open(self) -> bool:
        items = self._source_items
        if not self._pending:
            index = self._next_index()
            self._rewind(0)
            self._index, self._epoch, self._start = index, self._epoch + 1, self._now()
        while self._epoch != self._num_epochs and self._index >= len(items):  # this instance gets nothing of these
            if self._shuffle:
                _shuffled(items if type(self._random) is random.Random else [], self._random)
            self._index, self._epoch, self._start = self._index - len(items), self._epoch + 1, self._now()
        if self._epoch == self._num_epochs:
            return False
        self._start = self._now()
        if self._shuffle:
            if self._copies is None:
                self._copies = not _all_immutable(items)
            items = _shuffled([copy.deepcopy(item) for item in items] if self._copies else items, self._random)
        self._run = items if (self._index, self._num_instances) == (0, 1) else items[self._index :: self._num_instances]
        self._end, self._pending = len(self._run), False
        self._seek(0)
        return True


class PermutationSourceIterator(InfinitePermutationSourceIterator[T]):
    """
    Yield the first permutations of `InfinitePermutationSourceIterator`, then end.

    Positions are dealt to the instances in the same way, so that together they yield each item once in each epoch.

    Cost: as there.

    Args:
        source_items: the list, the same for each instance. It is copied.
        num_epochs: number of permutations.
        seed: int, float, str or bytes for `random.Random`, or `Keyed`. None draws one, which checkpoints carry on.
        shuffle: False yields the items in the order of the list, `num_epochs` times.
        num_instances: number of instances that share the stream.
        instance_rank: number of this one, from 0 to `num_instances` - 1.

    Raises:
        ValueError: the list is empty, `num_epochs` is below 1, `instance_rank` is out of range, or several instances
            shuffle without a seed.

    >>> list(PermutationSourceIterator([1, 2, 3, 4], num_epochs=2, seed=1))
    [4, 1, 3, 2, 4, 2, 1, 3]
    """

    _shown = ("source_items", "num_epochs", "seed", "shuffle", "num_instances", "instance_rank")

    def __init__(
        self,
        source_items: Iterable[T],
        num_epochs: int = 1,
        seed: Any = 0,
        shuffle: bool = True,
        num_instances: int = 1,
        instance_rank: int = 0,
    ) -> None:
        self._num_epochs = _integer("num_epochs", num_epochs)
        super().__init__(source_items, seed, shuffle, num_instances, instance_rank)
        self._log_if_idle(len(self._source_items) * self._num_epochs)

    def _parse(self, checkpoint: Any) -> Tuple[Any, ...]:
        if checkpoint is None:
            return super()._parse(None)
        (epoch,) = _keys(self, checkpoint, "epoch")
        return super()._parse(checkpoint) + (_count(self, "epoch", epoch),)

    def _save(self) -> Checkpoint:
        between = not self._pending and not self._rest.__length_hint__()
        return dict(super()._save(), epoch=self._epoch + between)

    def _open(self) -> bool:
        if self._pending and self._epoch > cast(int, self._num_epochs):
            raise _beyond(self, self._epoch, cast(int, self._num_epochs))
        return super()._open()


def create_source_iterator(
    source_items: Iterable[T],
    train: bool = True,
    seed: Any = None,
    shuffle: bool = True,
    num_instances: int = 1,
    instance_rank: int = 0,
) -> CheckpointableIterator[T]:
    """
    Return the source for training, `InfinitePermutationSourceIterator`, or else `ChunkedSourceIterator`.

    Args:
        source_items: the list, the same for each instance.
        train: whether to yield the items endlessly.
        seed: as `InfinitePermutationSourceIterator` takes it.
        shuffle: whether to shuffle; must be False if `train` is.
        num_instances: number of instances.
        instance_rank: number of this one, from 0 to `num_instances` - 1.

    Raises:
        ValueError: `shuffle` without `train`, and what the two classes raise.

    >>> list(create_source_iterator([1, 2, 3], train=False, shuffle=False))
    [1, 2, 3]
    """
    if train:
        return InfinitePermutationSourceIterator(source_items, seed, shuffle, num_instances, instance_rank)
    if shuffle:
        raise ValueError("shuffle must be False if train is False, got {!r}".format(shuffle))
    return ChunkedSourceIterator(source_items, num_instances, instance_rank)


class RandomIterator(_ReplayIterator[float]):
    """
    Yield the floats of `random.Random(seed).random()`, without end.

    Cost: a checkpoint holds the generator's state.

    Args:
        seed: int, float, str or bytes for `random.Random`, or `Keyed`. None draws one, which checkpoints carry on.

    >>> numbers = RandomIterator(seed=1)
    >>> round(next(numbers), 3), round(next(numbers), 3)
    (0.134, 0.847)
    """

    _shown = ("seed",)
    _transient: Tuple[str, ...] = ("_random",)

    def __init__(self, seed: Any = 0) -> None:
        self._seed = _seed(seed)
        self.setstate(None)

    def _parse(self, checkpoint: Any) -> Tuple[Any]:
        if checkpoint is None:
            return (None,)
        (state,) = _keys(self, checkpoint, "random_state")
        return (_random_state(self, "random_state", state),)

    def _move(self, state: Any) -> None:
        self._random = _generator(self._seed, state)

    def _save(self) -> Checkpoint:
        return {"random_state": self._random.getstate()}

    def __next__(self) -> float:
        if not self._left:
            self._prepare()
        number: float = self._random.random()
        self._left -= 1
        return number

    def _fill(self, out: List[float], n: int) -> None:
        if not self._left:
            self._prepare()
        n = min(n, self._left)
        out += [unit.random() for unit in _units(self._random, n)]
        self._left -= n


# ---------------------------------------------------------------------------------------------------------------------
# Mapping and flattening
# ---------------------------------------------------------------------------------------------------------------------


class MapIterator(_Stage[T]):
    """
    Apply a function to each item.

    The function is called when its result is asked for. Cost: none of its own; the state is the source's.

    Args:
        source_iterator: where the items come from. It is not rewound.
        transform: function of one item. If it raises, the next `next()` calls it again with the same item.

    Raises:
        ValueError: `source_iterator` is no `CheckpointableIterator`.
        TypeError: `transform` is not callable.

    >>> list(MapIterator(NativeCheckpointableIterator(["a", "b"]), str.upper))
    ['A', 'B']
    """

    _shown = ("transform",)
    _transient: Tuple[str, ...] = ("_held",)

    def __init__(self, source_iterator: CheckpointableIterator[Any], transform: Callable[[Any], T]) -> None:
        self._read_from(source_iterator)
        self._transform = _function("transform", transform)
        self._held: List[Any] = []  # source items whose transform has not succeeded yet

    def _offsets(self) -> Tuple[int, bool]:
        return self._source._offsets()  # the state is the source's

    def _parse(self, checkpoint: Any) -> Tuple[Any, ...]:
        self._source._check(checkpoint)
        return (checkpoint,)

    def _restore(self, checkpoint: Any) -> None:
        self._held = []
        self._source.setstate(checkpoint)

    def _save(self) -> Checkpoint:
        self._give_back()
        return self._source.getstate()

    def __next__(self) -> T:
        if self._held:
            output: List[T] = []
            self._fill(output, 1)
            return output[0]
        item = next(self._source)
        try:
            result: T = self._transform(item)
            return result
        except BaseException as error:
            self._held = [item]
            _reraise(error, "transform")

    def _fill(self, out: List[T], n: int) -> None:
        if not self._held:
            try:
                self._source._fill(self._held, n)
            except Exception:
                self._deliver(out, n)  # what came before the failure comes first
                raise
        self._deliver(out, n)

    def _deliver(self, out: List[T], n: int) -> None:
        length, append, transform = len(out), out.append, self._transform
        try:
            for item in self._held if len(self._held) <= n else self._held[:n]:
                append(transform(item))
        except StopIteration as error:
            _reraise(error, "transform")
        finally:
            del self._held[: len(out) - length]

    def _skip(self, n: int) -> int:
        held = min(n, len(self._held))
        del self._held[:held]
        return held + (self._source._skip(n - held) if n > held else 0)

    def _give_back(self) -> None:
        if self._held:
            self._source._back(len(self._held))
            self._held = []

    def _back(self, n: int) -> None:
        self._give_back()
        self._source._back(n)


class FilterIterator(_Stage[T]):
    """
    Yield the items for which a function is true.

    Cost: none of its own; the state is the source's.

    Args:
        source_iterator: where the items come from. It is not rewound.
        predicate: function of one item. If it raises, the next `next()` calls it again with the same item.

    Raises:
        ValueError: `source_iterator` is no `CheckpointableIterator`.
        TypeError: `predicate` is not callable.

    >>> list(FilterIterator(NativeCheckpointableIterator(range(6)), lambda n: n % 2))
    [1, 3, 5]
    """

    _shown = ("predicate",)
    _transient: Tuple[str, ...] = ("_items", "_tried", "_passed")

    def __init__(self, source_iterator: CheckpointableIterator[T], predicate: Callable[[T], Any]) -> None:
        self._read_from(source_iterator)
        self._predicate = _function("predicate", predicate)
        self._let_go()

    def _let_go(self) -> None:
        self._items: List[T] = []  # what the last call of the source gave …
        self._tried = 0  # … how many of these were tried …
        self._passed: List[int] = []  # … and which of them the last call of this stage gave

    def _offsets(self) -> Tuple[int, bool]:
        return self._source._offsets()[0], True

    def _parse(self, checkpoint: Any) -> Tuple[Any, ...]:
        self._source._check(checkpoint)
        return (checkpoint,)

    def _restore(self, checkpoint: Any) -> None:
        self._let_go()
        self._source.setstate(checkpoint)

    def _save(self) -> Checkpoint:
        self._give_back()
        return self._source.getstate()

    def __next__(self) -> T:
        if self._tried < len(self._items):
            out: List[T] = []
            self._fill(out, 1)
            return out[0] if out else next(self)
        predicate = self._predicate
        while True:
            item: T = next(self._source)
            try:
                if predicate(item):
                    self._items, self._tried, self._passed = [item], 1, [0]
                    return item
            except BaseException as error:
                self._items, self._tried, self._passed = [item], 0, []
                _reraise(error, "predicate")

    def _fill(self, out: List[T], n: int) -> None:
        self._passed = []
        predicate = self._predicate
        while not self._passed:
            if self._tried == len(self._items):
                self._items, self._tried = [], 0
                self._source._fill(self._items, n)
                if not self._items:
                    return
            items = self._items
            try:
                for i in range(self._tried, len(items)):
                    if predicate(items[i]):
                        out.append(items[i])
                        self._passed.append(i)
                    self._tried = i + 1
                    if len(self._passed) == n:
                        break
            except StopIteration as error:
                _reraise(error, "predicate")

    def _give_back(self) -> None:
        if self._tried < len(self._items):
            self._source._back(len(self._items) - self._tried)
            del self._items[self._tried :]

    def _back(self, n: int) -> None:
        self._tried = self._passed[-n]
        del self._passed[-n:]
        self._give_back()


class SelectManyIterator(_RunIterator[T]):
    """
    Yield the items of a collection selected for each source item.

    Cost: nothing is copied, and a sequence is entered at any position in constant time; another iterable is read again
    up to the position.

    Args:
        source_iterator: where the source items come from, for example the names of chunks.
        collection_selector: function from a source item to an iterable of any kind, for example a reader of chunks.
            None takes the source item itself.

    Raises:
        ValueError: `source_iterator` is no `CheckpointableIterator`.
        TypeError: `collection_selector` is not callable.

    >>> list(SelectManyIterator(NativeCheckpointableIterator([1, 3]), lambda n: range(n)))
    [0, 0, 1, 2]
    """

    _shown = ("collection_selector",)
    _transient: Tuple[str, ...] = ("_item",)

    def __init__(
        self,
        source_iterator: CheckpointableIterator[Any],
        collection_selector: Optional[Callable[[Any], Iterable[T]]] = None,
    ) -> None:
        self._read_from(source_iterator)
        if collection_selector is not None:
            _function("collection_selector", collection_selector)
        self._collection_selector = collection_selector
        self.setstate(None)

    def _parse(self, checkpoint: Any) -> Tuple[Any, int]:
        return _source_and_count(self, checkpoint, "flattened_items_yielded")

    def _restore(self, source_state: Any, number: int) -> None:
        self._source.setstate(source_state)
        self._rewind(number)

    def _rewind(self, position: int) -> None:
        self._item: List[Any] = []  # the source item of the run, from its reading to the run's end
        super()._rewind(position)

    def _now(self) -> Any:
        return self._source.getstate()

    def _save(self) -> Checkpoint:
        source_state, number = self._position()
        return {"source_state": source_state, "flattened_items_yielded": number}

    def _read(self) -> Iterable[T]:
        if not self._item:
            self._source._fill(self._item, 1)
            if not self._item:
                return cast("Iterable[T]", _END)
        if self._collection_selector is None:
            return cast("Iterable[T]", self._item[0])
        return self._collection_selector(self._item[0])


class RecurrentIterator(_ReplayIterator[T]):
    """
    Apply a function that carries a state from item to item.

    Cost: `getstate()` copies the state, also every few hundred steps.

    Args:
        source_iterator: where the items come from.
        step_function: `step_function(state, item)` returns `(new_state, output)`. It may change its state in place.
            After it raised, good steps may be repeated, with the same arguments.
        initial_state: the state before the first item. It is copied.

    Raises:
        ValueError: `source_iterator` is no `CheckpointableIterator`.
        TypeError: `step_function` is not callable.

    >>> def running_sum(state, item):
    ...     return state + item, state + item
    >>> list(RecurrentIterator(NativeCheckpointableIterator([1, 2, 3]), running_sum, initial_state=0))
    [1, 3, 6]
    """

    _shown = ("step_function", "initial_state")
    _interval = 1
    _transient: Tuple[str, ...] = ("_recurrent_state", "_items", "_rest", "_error")

    def __init__(
        self,
        source_iterator: CheckpointableIterator[Any],
        step_function: Callable[[Any, Any], Tuple[Any, T]],
        initial_state: Any = None,
    ) -> None:
        self._read_from(source_iterator)
        self._step_function = _function("step_function", step_function)
        self._initial_state = _copied(initial_state)
        self.setstate(None)

    def _parse(self, checkpoint: Any) -> Tuple[Any, Any]:
        if checkpoint is None:
            checkpoint = {"recurrent_state": self._initial_state, "source_state": None}
        recurrent_state, source_state = _keys(self, checkpoint, "recurrent_state", "source_state")
        self._source._check(source_state)
        return recurrent_state, source_state

    def _move(self, recurrent_state: Any, source_state: Any) -> None:
        self._source.setstate(source_state)
        self._set(recurrent_state)
        self._items: List[Any] = []  # source items since the snapshot …
        self._rest: Any = iter(self._items)  # … and those of them that are still to be treated
        self._error: Optional[Exception] = None  # what the source raised behind them

    def _set(self, state: Any) -> None:
        self._recurrent_state = _copied(state)

    def _save(self) -> Checkpoint:
        return {"recurrent_state": _copied(self._recurrent_state), "source_state": self._source.getstate()}

    def _state(self) -> Checkpoint:
        self._recover()
        left = self._rest.__length_hint__()
        if left:
            self._source._back(left)
            del self._items[-left:]
            self._rest, self._error, self._interval = iter(()), None, 1
        return self._save()

    def _taken(self) -> int:
        return self._good if self._broken else len(self._items) - self._rest.__length_hint__()

    def _fail(self, good: int) -> None:
        super()._fail(good)
        self._rest = iter(())

    def _load(self, n: int) -> bool:
        """Have source items at hand, at most n; False at the end of the data."""
        self._recover()
        if not self._rest.__length_hint__():
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            self._mark()
            self._items = []
            try:
                self._source._fill(self._items, n)
            except Exception as error:
                if not self._items:
                    raise
                self._error = error  # it comes after them
            finally:
                self._rest = iter(self._items)
        return bool(self._rest.__length_hint__())

    def _ahead(self) -> bool:
        """Have source items at hand: twice as many as before if those were gone in a millisecond."""
        elapsed = perf_counter() - self._marked
        if elapsed < 0.001 or elapsed < 20 * self._cost:
            self._interval = min(2 * self._interval, 256)
        return self._load(self._interval)

    def __next__(self) -> T:
        output: T
        while True:
            for item in self._rest:
                try:
                    self._recurrent_state, output = self._step_function(self._recurrent_state, item)
                except BaseException as error:
                    self._fail(self._taken() - 1)
                    _reraise(error, "step_function")
                return output
            if not self._ahead():
                raise StopIteration

    def _steps(self, items: Iterator[Any], append: Callable[[T], None]) -> None:
        step = self._step_function
        for item in items:
            self._recurrent_state, output = step(self._recurrent_state, item)
            append(output)

    def _fill(self, out: List[T], n: int) -> None:
        if self._load(min(n, 1000)):
            try:
                self._steps(islice(self._rest, n), out.append)
            except BaseException as error:
                self._fail(self._taken() - 1)
                _reraise(error, self._shown[0])


class SamplingRandomMapIterator(RecurrentIterator[T]):
    """
    Apply a function that draws random numbers, all items from one generator.

    Cost: a checkpoint holds the generator's state, which is also taken every few hundred items.

    Args:
        source_iterator: where the items come from.
        transform: `transform(random, item)` with a `random.Random`. After it raised, good calls may be repeated, with
            the same arguments.
        seed: int, float, str or bytes for `random.Random`, or `Keyed`. None draws one, which checkpoints carry on.

    Raises:
        ValueError: `source_iterator` is no `CheckpointableIterator`.
        TypeError: `transform` is not callable.

    >>> def jitter(random, item):
    ...     return round(item + random.random(), 3)
    >>> list(SamplingRandomMapIterator(NativeCheckpointableIterator([10, 20, 30]), jitter, seed=1))
    [10.134, 20.847, 30.764]
    """

    _shown = ("transform", "seed")
    _transient: Tuple[str, ...] = ("_random",)

    def __init__(
        self,
        source_iterator: CheckpointableIterator[Any],
        transform: Callable[[random.Random, Any], T],
        seed: Any = 0,
    ) -> None:
        self._read_from(source_iterator)
        self._seed = _seed(seed, self._inputs)
        self._transform: Callable[[Any, Any], T] = _function("transform", transform)
        if isinstance(self._seed, _StageKey):
            self._transform = _EachItem(transform)
        self.setstate(None)

    def _parse(self, checkpoint: Any) -> Tuple[Any, Any]:
        if checkpoint is None:
            return None, None
        state, source_state = _keys(self, checkpoint, "recurrent_state", "source_state")
        self._source._check(source_state)
        return _random_state(self, "recurrent_state", state), source_state

    def _set(self, state: Any) -> None:
        self._random = _generator(self._seed, state)

    def _save(self) -> Checkpoint:
        return {"recurrent_state": self._random.getstate(), "source_state": self._source.getstate()}

    def __next__(self) -> T:
        output: T
        while True:
            for item in self._rest:
                try:
                    output = self._transform(self._random, item)
                except BaseException as error:
                    self._fail(self._taken() - 1)
                    _reraise(error, "transform")
                return output
            if not self._ahead():
                raise StopIteration

    def _steps(self, items: Iterator[Any], append: Callable[[T], None]) -> None:
        transform, generator = self._transform, self._random
        for item in items:
            append(transform(generator, item))


# ---------------------------------------------------------------------------------------------------------------------
# Shuffling
# ---------------------------------------------------------------------------------------------------------------------


class BlockwiseShuffleIterator(_RunIterator[T]):
    """
    Cut the source into consecutive blocks and shuffle each.

    Cost: one block in memory; a checkpoint holds the generator's state; restoring reads one block again.

    Args:
        source_iterator: where the items come from.
        block_size: number of items in a block; the last may be shorter.
        seed: int, float, str or bytes for `random.Random`, or `Keyed`. None draws one, which checkpoints carry on.

    Raises:
        ValueError: `block_size` is below 1, or `source_iterator` is no `CheckpointableIterator`.

    >>> list(BlockwiseShuffleIterator(NativeCheckpointableIterator(range(8)), block_size=4, seed=1))
    [3, 0, 2, 1, 7, 5, 4, 6]
    """

    _shown = ("block_size", "seed")
    _transient: Tuple[str, ...] = ("_random", "_block")

    def __init__(self, source_iterator: CheckpointableIterator[T], block_size: int, seed: Any = 0) -> None:
        self._read_from(source_iterator)
        self._block_size = _integer("block_size", block_size)
        self._seed = _seed(seed, self._inputs)
        self.setstate(None)

    def _parse(self, checkpoint: Any) -> Tuple[Any, Any, int]:
        if checkpoint is None:
            return None, None, 0
        start, number = _keys(self, checkpoint, "source_state", "flattened_items_yielded")
        state = source_state = None
        if start is not None:
            state, source_state = _keys(self, start, "recurrent_state", "source_state")
            if source_state is not None:
                (source_state,) = _keys(self, source_state, "source_state")
        self._source._check(source_state)
        number = _count(self, "flattened_items_yielded", number)
        if number > self._block_size:
            raise _unfit(self, "flattened_items_yielded", "at most block_size = {}".format(self._block_size), number)
        return _random_state(self, "recurrent_state", state), source_state, number

    def _restore(self, state: Any, source_state: Any, number: int) -> None:
        self._source.setstate(source_state)
        self._random = _generator(self._seed, state)
        self._block: List[T] = []  # the block that is being gathered
        self._rewind(number)

    def _now(self) -> Any:
        return {"recurrent_state": self._random.getstate(), "source_state": {"source_state": self._source.getstate()}}

    def _save(self) -> Checkpoint:
        start, number = self._position()
        return {"source_state": start, "flattened_items_yielded": number}

    def _read(self) -> List[T]:
        _gather(self._source, self._block, self._block_size)
        if not self._block:
            return cast("List[T]", _END)
        shuffled = _shuffled(self._block, self._random)
        self._block = []
        return shuffled


_EMPTY: Any = type("_Empty", (), {"__reduce__": lambda self: "_EMPTY", "__repr__": lambda self: "<empty>"})()


class BufferedShuffleIterator(_Stage[T]):
    """
    Shuffle in a buffer: each source item takes a random slot, and what that held is yielded.

    Cost: `buffer_size` items in memory, and in each checkpoint, where items that can be changed are copied.
    `BlockwiseShuffleIterator` needs neither.

    Args:
        source_iterator: where the items come from.
        buffer_size: number of slots.
        seed: int, float, str or bytes for `random.Random`, or `Keyed`. None draws one, which checkpoints carry on.

    Raises:
        ValueError: `buffer_size` is below 1, or `source_iterator` is no `CheckpointableIterator`.

    >>> list(BufferedShuffleIterator(NativeCheckpointableIterator(range(8)), buffer_size=4, seed=1))
    [1, 4, 5, 6, 7, 2, 0, 3]
    """

    _shown = ("buffer_size", "seed")
    _positioned = False
    _transient: Tuple[str, ...] = ("_random", "_slots", "_drawn", "_before", "_buffer", "_undo", "_ended")

    def __init__(self, source_iterator: CheckpointableIterator[T], buffer_size: int, seed: Any = 0) -> None:
        self._read_from(source_iterator)
        self._buffer_size = _integer("buffer_size", buffer_size)
        self._seed = _seed(seed, self._inputs)
        self.setstate(None)

    def _parse(self, checkpoint: Any) -> Tuple[Any, Any, Any]:
        if checkpoint is None:
            return None, [_EMPTY] * self._buffer_size, None
        source_state, buffer, state = _keys(self, checkpoint, "source_state", "buffer", "random_state")
        if not isinstance(buffer, list) or len(buffer) > self._buffer_size:
            raise _unfit(self, "buffer", "a list of at most buffer_size = {} items".format(self._buffer_size), buffer)
        self._source._check(source_state)
        full = checkpoint.get("none_slots", [])
        if not isinstance(full, list) or not all(i in range(len(buffer)) and buffer[i] is None for i in full):
            raise _unfit(self, "none_slots", "a list of slots of the buffer that hold None", full)
        buffer = [_EMPTY if item is None else item for item in _copied(buffer)]
        for slot in full:
            buffer[slot] = None
        buffer += [_EMPTY] * (self._buffer_size - len(buffer))  # emptied at the end of the data
        return source_state, buffer, _random_state(self, "random_state", state)

    def _restore(self, source_state: Any, buffer: List[Any], state: Any) -> None:
        self._source.setstate(source_state)
        self._random = _generator(self._seed, state)
        self._slots: List[int] = []  # the slots for the next source items, drawn at once …
        self._before = self._random.getstate()  # … from this state of the generator …
        self._drawn = 0  # … and the number of them that are used
        self._buffer = buffer
        self._undo: List[Tuple[int, Any]] = []  # the slots that the last source items took, and what these held
        self._ended = False

    def _save(self) -> Checkpoint:
        generator = _generator(self._seed, self._before)
        for unit in _units(generator, self._drawn):
            unit.randrange(self._buffer_size)
        checkpoint = {
            "source_state": self._source.getstate(),
            "buffer": _copied([None if item is _EMPTY else item for item in self._buffer]),
            "random_state": generator.getstate(),
        }
        full = [slot for slot, item in enumerate(self._buffer) if item is None]
        if full:
            checkpoint["none_slots"] = full
        return checkpoint

    def _draw(self) -> None:
        size, bits, generator = self._buffer_size, self._buffer_size.bit_length(), self._random
        before, slots = generator.getstate(), []
        for unit in _units(generator, 256):
            getrandbits = unit.getrandbits
            slot = getrandbits(bits)
            while slot >= size:  # as Random.randrange(size) does
                slot = getrandbits(bits)
            slots.append(slot)
        self._before, self._slots, self._drawn = before, slots, 0

    def __next__(self) -> T:
        while not self._ended:
            if self._drawn == len(self._slots):
                self._draw()
            try:
                item = next(self._source)
            except StopIteration:
                self._ended = True
                break
            slot = self._slots[self._drawn]
            self._drawn += 1
            old: T = self._buffer[slot]
            self._buffer[slot] = item
            if old is not _EMPTY:
                self._undo = [(slot, old)]
                return old
        out: List[T] = []
        self._fill(out, 1)
        if not out:
            raise StopIteration
        return out[0]

    def _fill(self, out: List[T], n: int) -> None:
        length, buffer = len(out), self._buffer
        while len(out) == length and not self._ended:
            if self._drawn == len(self._slots):
                self._draw()
            items: List[T] = []
            try:
                self._source._fill(items, min(n, len(self._slots) - self._drawn))
                self._ended = not items
            finally:
                undo = []
                for slot, item in zip(self._slots[self._drawn : self._drawn + len(items)], items):
                    old = buffer[slot]
                    buffer[slot] = item
                    undo.append((slot, old))
                    if old is not _EMPTY:
                        out.append(old)
                self._drawn += len(items)
                self._undo = undo
        if self._ended and len(out) == length:
            self._undo = []
            while buffer and len(out) < length + n:
                item = buffer.pop()
                if item is not _EMPTY:
                    out.append(item)
                    self._undo.append((len(buffer), item))

    def _back(self, n: int) -> None:
        taken = 0
        while n:
            slot, old = self._undo.pop()
            if self._ended:
                self._buffer += [_EMPTY] * (slot - len(self._buffer)) + [old]
            else:
                self._buffer[slot] = old
                taken += 1
            n -= old is not _EMPTY
        if taken:
            self._drawn -= taken
            self._source._back(taken)


# ---------------------------------------------------------------------------------------------------------------------
# Batching
# ---------------------------------------------------------------------------------------------------------------------


class FixedBatchIterator(_ReplayIterator[List[T]]):
    """
    Collect items in lists of a fixed size; the last may be shorter.

    Cost: one batch in memory.

    Args:
        source_iterator: where the items come from.
        batch_size: number of items in a batch.

    Raises:
        ValueError: `batch_size` is below 1, or `source_iterator` is no `CheckpointableIterator`.

    >>> list(FixedBatchIterator(NativeCheckpointableIterator(range(5)), batch_size=2))
    [[0, 1], [2, 3], [4]]
    """

    _shown = ("batch_size",)
    _transient: Tuple[str, ...] = ("_batch",)

    def __init__(self, source_iterator: CheckpointableIterator[T], batch_size: int) -> None:
        self._read_from(source_iterator)
        self._batch_size = _integer("batch_size", batch_size)
        self.setstate(None)

    def _parse(self, checkpoint: Any) -> Tuple[Any]:
        source_state = None
        if checkpoint is not None:
            (source_state,) = _keys(self, checkpoint, "source_state")
        self._source._check(source_state)
        return (source_state,)

    def _move(self, source_state: Any) -> None:
        self._source.setstate(source_state)
        self._batch: List[T] = []  # the batch that is being gathered

    def _recover(self) -> None:
        if self._batch and not self._broken:
            self._fail(self._taken())
        super()._recover()

    def _save(self) -> Checkpoint:
        return {"source_state": self._source.getstate()}

    def __next__(self) -> List[T]:
        if not self._left:
            self._prepare()
        batch = self._batch
        self._source._fill(batch, self._batch_size - len(batch))
        if len(batch) < self._batch_size:
            _gather(self._source, batch, self._batch_size)
            if not batch:
                raise StopIteration
        self._batch = []
        self._left -= 1
        return batch

    def _fill(self, out: List[List[T]], n: int) -> None:
        if not self._left:
            self._prepare()
        size, batch = self._batch_size, self._batch
        end = None
        try:
            _gather(self._source, batch, min(n, self._left) * size)
            end = len(batch)
        finally:
            if end is None:
                end = len(batch) // size * size
            out += [batch[i : i + size] for i in range(0, end, size)]
            self._left -= (end + size - 1) // size
            self._batch = batch[end:]

    def _skip(self, n: int) -> int:
        self._prepare()
        try:
            skipped = self._source._skip(n * self._batch_size)
        except BaseException:
            self._fail(self._taken())
            raise
        self._left = 0
        return (skipped + self._batch_size - 1) // self._batch_size


class _Windows:
    """Wide windows over a list, made when they are asked for: together they would fill the memory."""

    def __init__(self, items: List[Any], width: int) -> None:
        self._items, self._width = items, width

    def __len__(self) -> int:
        return max(len(self._items) - self._width + 1, 0)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index >= len(self):
            raise IndexError(index)
        return tuple(self._items[index : index + self._width])


_RUNS.add(_Windows)


class WindowedIterator(_RunIterator[Tuple[T, ...]]):
    """
    Yield tuples of consecutive items, each starting one item after the one before.

    Cost: up to twice the width, or some thousand items, in memory, which restoring reads again.

    Args:
        source_iterator: where the items come from. Nothing is yielded if it has fewer than `width`.
        width: number of items in a window.

    Raises:
        ValueError: `width` is below 1, or `source_iterator` is no `CheckpointableIterator`.

    >>> list(WindowedIterator(NativeCheckpointableIterator(range(5)), width=3))
    [(0, 1, 2), (1, 2, 3), (2, 3, 4)]
    """

    _shown = ("width",)
    _transient: Tuple[str, ...] = ("_items", "_next", "_size")

    def __init__(self, source_iterator: CheckpointableIterator[T], width: int) -> None:
        self._read_from(source_iterator)
        self._width = _integer("width", width)
        self.setstate(None)

    def _parse(self, checkpoint: Any) -> Tuple[Any, int]:
        return _source_and_count(self, checkpoint, "item_index")

    def _restore(self, source_state: Any, number: int) -> None:
        self._source.setstate(source_state)
        self._items: List[T] = []  # from the first item of the next run on …
        self._next: Any = None  # … and the source's state before it, taken before the run's last windows need more
        self._size = self._width  # number of windows in the next run
        self._rewind(number)

    def _now(self) -> Any:
        return _copied(self._next) if self._items else self._source.getstate()

    def _save(self) -> Checkpoint:
        source_state, number = self._position()
        return {"source_state": source_state, "item_index": number}

    def _read(self) -> Sequence[Tuple[T, ...]]:
        if self._end:  # restored: windows that are out are not made again
            _pass_over(self._source, self._end)
            self._start, self._end = self._source.getstate(), 0
        size, width, items = self._size, self._width, self._items
        if len(items) <= size:
            _gather(self._source, items, size)
            self._next = self._source.getstate()
        _gather(self._source, items, size + width - 1)
        if len(items) < width:
            return cast("Sequence[Tuple[T, ...]]", _END)
        self._items = items[size:]
        self._size = min(2 * size, max(width, 1000))
        if width > 1000:
            return cast("Sequence[Tuple[T, ...]]", _Windows(items, width))
        return list(zip(*[items[i : len(items) - width + 1 + i] for i in range(width)]))


class BucketedReadaheadBatchIterator(_RunIterator[List[T]]):
    """
    Group items of like length into batches: read ahead a window, sort it, cut it into batches, shuffle the batches.

    Cost: `read_ahead` items in memory; a checkpoint holds the generator's state; restoring reads one window again.

    Args:
        source_iterator: where the items come from.
        read_ahead: number of items in a window; the last may be shorter.
        key: function from an item to what it is sorted by, largest first, such as `len`. None leaves the order.
        batch_size: number of items in a batch, or a function from the first (longest) item of a batch to that number;
            below 1 counts as 1.
        boundary_key: function from an item to anything but None; a batch ends where its value changes.
        shuffle: whether the batches of a window are shuffled.
        seed: int, float, str or bytes for `random.Random`, or `Keyed`. None draws one, which checkpoints carry on.

    Raises:
        ValueError: `read_ahead` or `batch_size` is below 1, or `source_iterator` is no `CheckpointableIterator`.
        TypeError: `key`, `batch_size` or `boundary_key` is neither callable nor what else is allowed.

    >>> lines = NativeCheckpointableIterator(["a", "bbb", "cc", "ddd", "e", "ff"])
    >>> list(BucketedReadaheadBatchIterator(lines, 6, key=len, batch_size=lambda line: 6 // len(line), seed=1))
    [['cc', 'ff', 'a'], ['e'], ['bbb', 'ddd']]
    """

    _shown = ("read_ahead", "key", "batch_size", "boundary_key", "shuffle", "seed")
    _transient: Tuple[str, ...] = ("_random", "_window")

    def __init__(
        self,
        source_iterator: CheckpointableIterator[T],
        read_ahead: int,
        key: Optional[Callable[[T], Any]],
        batch_size: Union[int, Callable[[T], Any]],
        boundary_key: Optional[Callable[[T], Any]] = None,
        shuffle: bool = True,
        seed: Any = 0,
    ) -> None:
        self._read_from(source_iterator)
        self._read_ahead = _integer("read_ahead", read_ahead)
        self._key = key if key is None else _function("key", key)
        self._batch_size = batch_size if callable(batch_size) else _integer("batch_size", batch_size)
        self._boundary_key = boundary_key if boundary_key is None else _function("boundary_key", boundary_key)
        self._shuffle = bool(shuffle)
        self._seed = _seed(seed, self._inputs)
        self.setstate(None)

    def _parse(self, checkpoint: Any) -> Tuple[Any, Any, int]:
        if checkpoint is None:
            checkpoint = {"source_state": None, "random_state": None, "num_served": 0}
        source_state, state, number = _keys(self, checkpoint, "source_state", "random_state", "num_served")
        self._source._check(source_state)
        number = _count(self, "num_served", number)
        if number > self._read_ahead:
            raise _unfit(self, "num_served", "at most read_ahead = {}".format(self._read_ahead), number)
        return source_state, _random_state(self, "random_state", state), number

    def _restore(self, source_state: Any, state: Any, number: int) -> None:
        self._source.setstate(source_state)
        self._random = _generator(self._seed, state)
        self._window: List[T] = []  # the window that is being gathered
        self._rewind(number)

    def _now(self) -> Any:
        return {
            "source_state": self._source.getstate(),
            "random_state": self._random.getstate() if self._shuffle else None,
        }

    def _save(self) -> Checkpoint:
        start, number = self._position()
        return dict(start, num_served=number)

    def _read(self) -> List[List[T]]:
        _gather(self._source, self._window, self._read_ahead)
        if not self._window:
            return cast("List[List[T]]", _END)
        batches = self._cut(self._window if self._key is None else sorted(self._window, key=self._key, reverse=True))
        if self._shuffle:
            batches = _shuffled(batches, self._random)
        self._window = []
        return batches

    def _cut(self, window: List[T]) -> List[List[T]]:
        size, boundary_key = self._batch_size, self._boundary_key
        if boundary_key is None and not callable(size):
            return [window[i : i + size] for i in range(0, len(window), size)]
        boundaries = None if boundary_key is None else [self._boundary(item) for item in window]
        batches: List[List[T]] = []
        start = 0
        while start < len(window):
            number = size(window[start]) if callable(size) else size
            if type(number) is not int:
                number = ceil(min(number, len(window))) if number > 1 else 1  # it may be infinite, or NaN
            end = start + max(number, 1)
            if boundaries is not None:
                boundary = boundaries[start]
                end = next((i for i in range(start + 1, min(end, len(window))) if boundaries[i] != boundary), end)
            batches.append(window[start:end])
            start = end
        return batches

    def _boundary(self, item: T) -> Any:
        boundary = cast("Callable[[T], Any]", self._boundary_key)(item)
        if boundary is None:
            raise ValueError("boundary_key must not return None, but did for {!r:.80}".format(item))
        return boundary


# ---------------------------------------------------------------------------------------------------------------------
# Combining
# ---------------------------------------------------------------------------------------------------------------------


class ZipIterator(_Stage[Tuple[Any, ...]]):
    """
    Yield tuples of one item from each source, to the end of the shortest.

    Cost: none of its own; the state is that of the sources.

    Args:
        source_iterators: where the items come from. They are not rewound.

    Raises:
        ValueError: a source is no `CheckpointableIterator`, or there is none.

    >>> list(ZipIterator(NativeCheckpointableIterator("ab"), NativeCheckpointableIterator([1, 2, 3])))
    [('a', 1), ('b', 2)]
    """

    _transient: Tuple[str, ...] = ("_held", "_holding")

    def __init__(self, *source_iterators: CheckpointableIterator[Any]) -> None:
        if not source_iterators:
            raise ValueError("source_iterators must be at least 1, got 0")
        self._inputs = tuple([_adopt(source, "source_iterators") for source in source_iterators])
        _number_keys(self._inputs)
        self._let_go()

    def _let_go(self) -> None:
        self._held: List[List[Any]] = [[] for _ in self._inputs]  # items whose partners are not there yet
        self._holding = False

    def _parse(self, checkpoint: Any) -> Tuple[Any, ...]:
        if checkpoint is None:
            return (None,) * len(self._inputs)
        (states,) = _keys(self, checkpoint, "input_states")
        return _parse_each(self, "input_states", states, self._inputs)

    def _restore(self, *states: Any) -> None:
        self._let_go()
        for source, state in zip(self._inputs, states):
            source.setstate(state)

    def _save(self) -> Checkpoint:
        self._give_back()
        return {"input_states": tuple([source.getstate() for source in self._inputs])}

    def __next__(self) -> Tuple[Any, ...]:
        items: List[Any] = []
        if self._holding:
            self._fill(items, 1)
            if not items:
                raise StopIteration
            return cast("Tuple[Any, ...]", items[0])
        try:
            for source in self._inputs:
                items.append(next(source))
        except BaseException:
            self._held, self._holding = [items[i : i + 1] for i in range(len(self._inputs))], True
            raise
        return tuple(items)

    def _fill(self, out: List[Tuple[Any, ...]], n: int) -> None:
        self._holding = True
        for source, held in zip(self._inputs, self._held):
            if not held:
                source._fill(held, n)
        n = min(n, min(map(len, self._held)))
        out += zip(*[held[:n] for held in self._held])
        for held in self._held:
            del held[:n]
        self._holding = any(self._held)

    def _skip(self, n: int) -> int:
        self._give_back()
        return min([source._skip(n) for source in self._inputs])

    def _give_back(self) -> None:
        for source, held in zip(self._inputs, self._held):
            if held:
                source._back(len(held))
        self._let_go()

    def _back(self, n: int) -> None:
        self._give_back()
        for source in self._inputs:
            source._back(n)


def _parse_each(stage: Any, key: str, states: Any, sources: Sequence["_Stage[Any]"]) -> Tuple[Any, ...]:
    if not isinstance(states, (list, tuple)) or len(states) != len(sources):
        raise _unfit(stage, key, "a list of the states of its {} sources".format(len(sources)), states)
    for source, state in zip(sources, states):
        source._check(state)
    return tuple(states)


class MultiplexIterator(_Stage[T]):
    """
    Take each next item from the source whose index another iterator yields.

    Ends when the control ends, or the source that it names.

    Cost: none of its own; the state is that of the sources.

    Args:
        control_iterator: yields indices into `source_iterators`.
        source_iterators: where the items come from.

    Raises:
        ValueError: `control_iterator` or a source is no `CheckpointableIterator`.
        IndexError: from `next()`, an index is out of range.
        TypeError: from `next()`, an index is no integer.

    >>> control = NativeCheckpointableIterator([0, 1, 1])
    >>> list(MultiplexIterator(control, [NativeCheckpointableIterator("ab"), NativeCheckpointableIterator("xyz")]))
    ['a', 'x', 'y']
    """

    _positioned = False
    _transient: Tuple[str, ...] = ("_index", "_last")

    def __init__(
        self, control_iterator: CheckpointableIterator[int], source_iterators: Sequence[CheckpointableIterator[T]]
    ) -> None:
        self._control = _adopt(control_iterator, "control_iterator")
        self._items_from = [_adopt(source, "source_iterators") for source in _source_list(source_iterators)]
        self._inputs = (self._control,) + tuple(self._items_from)
        _number_keys(self._inputs)
        self.setstate(None)

    def _parse(self, checkpoint: Any) -> Tuple[Any, ...]:
        if checkpoint is None:
            return (None,) * len(self._inputs)
        control_state, states = _keys(self, checkpoint, "control_iterator_state", "source_iterator_states")
        self._control._check(control_state)
        return (control_state,) + _parse_each(self, "source_iterator_states", states, self._items_from)

    def _restore(self, *states: Any) -> None:
        self._index: Any = _END  # of the source that has not given its item yet; anything the control yields
        for source, state in zip(self._inputs, states):
            source.setstate(state)

    def _save(self) -> Checkpoint:
        if self._index is not _END:
            self._control._back(1)
            self._index = _END
        return {
            "control_iterator_state": self._control.getstate(),
            "source_iterator_states": [source.getstate() for source in self._items_from],
        }

    def _step(self) -> T:
        if self._index is _END:
            self._index = next(self._control)
        try:
            source = self._items_from[self._index]
        except (IndexError, TypeError) as error:
            number = len(self._items_from)
            raise type(error)(
                "control_iterator must yield indices of {} sources, got {!r:.80}".format(number, self._index)
            ) from None
        item: T = next(source)
        self._last = source
        self._index = _END
        return item

    __next__ = _step

    def _fill(self, out: List[T], n: int) -> None:
        super()._fill(out, 1)  # one, which can be taken back: each source can take back its last call alone

    def _back(self, n: int) -> None:
        self._last._back(1)
        self._control._back(1)


class MixIterator(_ReplayIterator[T]):
    """
    Take each next item from a source that is drawn by weight, or from the sources in turn.

    Cost: none of its own; the state is that of the sources, and of the generator.

    Args:
        source_iterators: where the items come from. Starting one over repeats its order: who wants another order each
            time gives an endless source.
        weights: one number for each source, its share of the items, in any unit; None takes the sources in turn. A
            source of weight 0 is never drawn.
        seed: int, float, str or bytes for `random.Random`, or `Keyed`. None draws one, which checkpoints carry on.
        until: when to end. "first": the source drawn has no more. "drained": all are empty; one that is drops out, and
            the others go on by their weights, so that every item comes once. "all": each has ended once; until then
            one that ended starts over. A source without items drops out.

    Raises:
        ValueError: there is no source, a source is no `CheckpointableIterator`, the weights are not as many, negative,
            not finite or all zero, or `until` is none of these.

    >>> def sources():
    ...     return [NativeCheckpointableIterator(items) for items in ("abc", "1234")]
    >>> "".join(MixIterator(sources())), "".join(MixIterator(sources(), until="drained"))
    ('a1b2c3', 'a1b2c34')
    >>> "".join(MixIterator(sources(), weights=[1, 3], seed=1))
    'a1234'
    """

    _shown = ("weights", "seed", "until")
    _transient: Tuple[str, ...] = ("_random", "_turn", "_index", "_dropped", "_ended", "_drawn_from", "_cumulated")

    def __init__(
        self,
        source_iterators: Sequence[CheckpointableIterator[T]],
        weights: Optional[Sequence[float]] = None,
        seed: Any = 0,
        until: str = "first",
    ) -> None:
        self._inputs = tuple([_adopt(source, "source_iterators") for source in _source_list(source_iterators)])
        if not self._inputs:
            raise ValueError("source_iterators must be at least 1, got 0")
        _number_keys(self._inputs)
        self._weights = None if weights is None else _weights(weights, len(self._inputs))
        if until not in ("first", "drained", "all"):
            raise ValueError("until must be 'first', 'drained' or 'all', got {!r}".format(until))
        self._drawable = [i for i in range(len(self._inputs)) if self._weights is None or self._weights[i]]
        self._until = until
        self._seed = _seed(seed, self._inputs)
        self.setstate(None)

    def _parse(self, checkpoint: Any) -> Tuple[Any, ...]:
        if checkpoint is None:
            return (None, 0, None, [], []) + (None,) * len(self._inputs)
        state, turn, index, dropped, ended, states = _keys(
            self, checkpoint, "random_state", "turn", "index", "dropped", "ended", "source_states"
        )
        sources = range(len(self._inputs))
        if _count(self, "turn", turn) not in sources:
            raise _unfit(self, "turn", "the index of a source", turn)
        if index is not None and _count(self, "index", index) not in sources:
            raise _unfit(self, "index", "the index of a source, or None", index)
        for key, indices in (("dropped", dropped), ("ended", ended)):
            if not isinstance(indices, list) or not all(_count(self, key, i) in sources for i in indices):
                raise _unfit(self, key, "a list of indices of sources", indices)
        state = _random_state(self, "random_state", state)
        return (state, turn, index, dropped, ended) + _parse_each(self, "source_states", states, self._inputs)

    def _move(
        self, state: Any, turn: int, index: Optional[int], dropped: List[int], ended: List[int], *states: Any
    ) -> None:
        self._random = _generator(self._seed, state)
        self._turn = turn  # where to look for the next source, if they come in turn
        self._index = index  # the source that was drawn and has not given its item yet
        self._ended = set(ended)  # the sources that have ended once …
        self._dropped: Set[int] = set()  # … and those that are not drawn any more
        self._drop(*dropped)
        for source, source_state in zip(self._inputs, states):
            source.setstate(source_state)

    def _save(self) -> Checkpoint:
        return {
            "random_state": None if self._weights is None else self._random.getstate(),
            "turn": self._turn,
            "index": self._index,
            "dropped": sorted(self._dropped),
            "ended": sorted(self._ended),
            "source_states": [source.getstate() for source in self._inputs],
        }

    def _drop(self, *indices: int) -> None:
        self._dropped.update(indices)
        self._drawn_from = [i for i in self._drawable if i not in self._dropped]
        self._cumulated = list(accumulate([self._weights[i] for i in self._drawn_from] if self._weights else []))

    def _draw(self) -> Optional[int]:
        """Return the index of the next source; None if none is left."""
        if self._weights is not None:
            return (
                _unit(self._random).choices(self._drawn_from, cum_weights=self._cumulated)[0]
                if self._drawn_from
                else None
            )
        for _ in self._inputs:
            index = self._turn
            self._turn = (index + 1) % len(self._inputs)
            if index not in self._dropped:
                return index
        return None

    def _step(self) -> T:
        if not self._left:
            self._prepare()
        while True:
            if self._index is None:
                self._index = self._draw()
                if self._index is None:
                    raise StopIteration
            source = self._inputs[self._index]
            item: T = next(source, _END)
            if item is _END and self._until == "all":
                self._ended.add(self._index)
                if not self._ended.issuperset(self._drawable):
                    source.setstate(None)
                    item = next(source, _END)
            if item is not _END:
                self._index = None
                self._left -= 1
                return item
            if self._until == "first" or self._ended.issuperset(self._drawable):
                raise StopIteration
            self._drop(self._index)
            self._index = None

    __next__ = _step

    def _fill(self, out: List[T], n: int) -> None:
        if not self._left:
            self._prepare()
        super()._fill(out, min(n, self._left))


def _weights(values: Any, number: int) -> List[float]:
    """Return the weights of so many sources, checked."""
    try:
        weights = [value + 0.0 for value in values]
        fit = len(weights) == number and isfinite(sum(weights)) and min(weights) >= 0 and any(weights)
    except (TypeError, OverflowError):
        fit = False
    if not fit:
        raise ValueError(
            "weights must be {} finite numbers of at least 0, not all 0, got {!r:.80}".format(number, values)
        )
    return weights


class PackIterator(_ReplayIterator[Any]):
    """
    Join sequences of tokens and cut them into packs of one size, a sequence running on into the next pack.

    Cost: one pack and one sequence in memory; restoring reads the sequence in progress again.

    Args:
        source_iterator: yields sequences of tokens: lists, tuples, or arrays (`array.array`, NumPy, PyTorch), of which
            the first dimension is cut.
        size: number of tokens in a pack.
        drop_last: whether to leave out the last pack if it is shorter.

    Raises:
        ValueError: `size` is below 1, or `source_iterator` is no `CheckpointableIterator`.

    >>> documents = NativeCheckpointableIterator([[1, 2, 3], [4], [5, 6, 7, 8]])
    >>> list(PackIterator(documents, size=3))
    [[1, 2, 3], [4, 5, 6], [7, 8]]
    """

    _shown = ("size", "drop_last")
    _transient: Tuple[str, ...] = ("_pieces", "_number", "_document", "_position")

    def __init__(self, source_iterator: CheckpointableIterator[Any], size: int, drop_last: bool = False) -> None:
        self._read_from(source_iterator)
        self._size = _integer("size", size)
        self._drop_last = bool(drop_last)
        self.setstate(None)

    def _parse(self, checkpoint: Any) -> Tuple[Any, int]:
        return _source_and_count(self, checkpoint, "num_tokens")

    def _move(self, source_state: Any, number: int) -> None:
        self._source.setstate(source_state)
        self._pieces: List[Any] = []  # of the pack that is being gathered …
        self._number = 0  # … and their number of tokens
        self._document: Any = None  # the sequence in progress, None if it is still to be read …
        self._position = number  # … and how many of its tokens are taken

    def _recover(self) -> None:
        if self._pieces and not self._broken:
            self._fail(self._taken())
        super()._recover()

    def _give_back(self) -> None:
        if self._document is not None:
            self._source._back(1)
            self._document = None

    def _save(self) -> Checkpoint:
        self._give_back()
        return {"source_state": self._source.getstate(), "num_tokens": self._position}

    def _step(self) -> Any:
        if not self._left:
            self._prepare()
        while self._number < self._size:
            if self._document is None:
                documents: List[Any] = []
                self._source._fill(documents, 1)
                if not documents:
                    break
                self._document = documents[0]
            length = len(self._document)
            if self._position > length:
                self._give_back()
                raise _beyond(self, self._position, length)
            piece = self._document[self._position : self._position + self._size - self._number]
            if len(piece):
                self._pieces.append(piece)
                self._number += len(piece)
                self._position += len(piece)
            if self._position == length:
                self._document, self._position = None, 0
        if self._number < self._size and (self._drop_last or not self._number):
            self._pieces, self._number = [], 0
            raise StopIteration
        pack = _joined(self._pieces)
        self._pieces, self._number = [], 0
        self._left -= 1
        return pack

    __next__ = _step

    def _fill(self, out: List[Any], n: int) -> None:
        if not self._left:
            self._prepare()
        super()._fill(out, min(n, self._left))


def _joined(pieces: List[Any]) -> Any:
    first = pieces[0]
    if isinstance(first, (list, tuple, range)):
        return list(chain.from_iterable(pieces))
    for package, array, join in (("numpy", "ndarray", "concatenate"), ("torch", "Tensor", "cat")):
        if package in sys.modules and isinstance(first, getattr(sys.modules[package], array)):
            return getattr(sys.modules[package], join)(pieces)
    if hasattr(first, "shape"):  # adding another package's arrays would add up their tokens
        raise TypeError("PackIterator cannot join arrays of the type {}".format(type(first).__qualname__))
    joined = first[:]
    for piece in pieces[1:]:
        joined += piece
    return joined


class ChainIterator(_Stage[T]):
    """
    Yield the items of one finite source after the other.

    Cost: none of its own; the state is that of the source that is read.

    Args:
        source_iterators: where the items come from.

    Raises:
        ValueError: a source is no `CheckpointableIterator`, or there is none.

    >>> list(ChainIterator(NativeCheckpointableIterator("ab"), NativeCheckpointableIterator("c")))
    ['a', 'b', 'c']
    """

    _positioned = False
    _transient: Tuple[str, ...] = ("_index",)

    def __init__(self, *source_iterators: CheckpointableIterator[T]) -> None:
        if not source_iterators:
            raise ValueError("source_iterators must be at least 1, got 0")
        self._inputs = tuple([_adopt(source, "source_iterators") for source in source_iterators])
        _number_keys(self._inputs)
        self.setstate(None)

    def _parse(self, checkpoint: Any) -> Tuple[int, Any]:
        if checkpoint is None:
            return 0, None
        index, state = _keys(self, checkpoint, "index", "source_state")
        if _count(self, "index", index) >= len(self._inputs):
            raise _unfit(self, "index", "less than the number of sources, {}".format(len(self._inputs)), index)
        self._inputs[index]._check(state)
        return index, state

    def _restore(self, index: int, state: Any) -> None:
        self._index = index
        for i, source in enumerate(self._inputs):
            source.setstate(state if i == index else None)

    def _save(self) -> Checkpoint:
        return {"index": self._index, "source_state": self._inputs[self._index].getstate()}

    def __next__(self) -> T:
        while True:
            try:
                item: T = next(self._inputs[self._index])
                return item
            except StopIteration:
                if self._index + 1 == len(self._inputs):
                    raise
                self._index += 1

    def _fill(self, out: List[T], n: int) -> None:
        length = len(out)
        self._inputs[self._index]._fill(out, n)
        while len(out) == length and self._index + 1 < len(self._inputs):
            self._index += 1
            self._inputs[self._index]._fill(out, n)

    def _skip(self, n: int) -> int:
        skipped = self._inputs[self._index]._skip(n)
        while skipped < n and self._index + 1 < len(self._inputs):
            self._index += 1
            skipped += self._inputs[self._index]._skip(n - skipped)
        return skipped

    def _back(self, n: int) -> None:
        self._inputs[self._index]._back(n)


class _CountingIterator(_Stage[T]):
    """A stage that counts the items that are out, and ends after so many of them."""

    _num_items = sys.maxsize
    _positioned = False
    _transient: Tuple[str, ...] = ("_number",)

    def __init__(self, source_iterator: CheckpointableIterator[Any]) -> None:
        self._read_from(source_iterator)
        self.setstate(None)

    def _parse(self, checkpoint: Any) -> Tuple[Any, int]:
        source_state, number = _source_and_count(self, checkpoint, "num_items_yielded")
        if number > self._num_items:
            raise _unfit(self, "num_items_yielded", "at most num_items = {}".format(self._num_items), number)
        return source_state, number

    def _restore(self, source_state: Any, number: int) -> None:
        self._source.setstate(source_state)
        self._number = number

    def _save(self) -> Checkpoint:
        return {"source_state": self._source.getstate(), "num_items_yielded": self._number}

    def __next__(self) -> T:
        if self._number >= self._num_items:
            raise StopIteration
        item: T = next(self._source)
        self._number += 1
        return item

    def _fill(self, out: List[T], n: int) -> None:
        n = min(n, self._num_items - self._number)
        length = len(out)
        if n > 0:
            try:
                self._source._fill(out, n)
            finally:
                self._number += len(out) - length

    def _skip(self, n: int) -> int:
        skipped = self._source._skip(min(n, self._num_items - self._number))
        self._number += skipped
        return skipped

    def _back(self, n: int) -> None:
        self._source._back(n)
        self._number -= n


class TakeIterator(_CountingIterator[T]):
    """
    Yield the first items of the source.

    Cost: none of its own.

    Args:
        source_iterator: where the items come from.
        num_items: number of items, after which this iterator ends.

    Raises:
        ValueError: `num_items` is below 1, or `source_iterator` is no `CheckpointableIterator`.

    >>> list(TakeIterator(InfinitePermutationSourceIterator("abc", shuffle=False), 4))
    ['a', 'b', 'c', 'a']
    """

    _shown = ("num_items",)

    def __init__(self, source_iterator: CheckpointableIterator[T], num_items: int) -> None:
        self._num_items = _integer("num_items", num_items)
        super().__init__(source_iterator)


class EnumerateIterator(_CountingIterator[Tuple[int, T]]):
    """
    Yield pairs of an item's position in the whole stream and the item, also after any number of resumes.

    Cost: none of its own.

    Args:
        source_iterator: where the items come from.
        start: the position of the first item.

    Raises:
        ValueError: `source_iterator` is no `CheckpointableIterator`.
        TypeError: `start` is no integer.

    >>> list(EnumerateIterator(NativeCheckpointableIterator("ab"), start=1))
    [(1, 'a'), (2, 'b')]
    """

    _shown = ("start",)

    def __init__(self, source_iterator: CheckpointableIterator[T], start: int = 0) -> None:
        try:
            self._start = operator.index(start)
        except TypeError:
            raise TypeError("start must be an integer, got {!r}".format(start)) from None
        super().__init__(source_iterator)

    def __next__(self) -> Tuple[int, T]:
        item: T = next(self._source)
        self._number += 1
        return self._start + self._number - 1, item

    def _fill(self, out: List[Tuple[int, T]], n: int) -> None:
        items: List[Any] = []
        first = self._start + self._number
        try:
            super()._fill(items, n)
        finally:
            out += enumerate(items, first)


# ---------------------------------------------------------------------------------------------------------------------
# Working ahead, and in several processes
# ---------------------------------------------------------------------------------------------------------------------


class _AheadIterator(_RunIterator[T]):
    """
    A stage whose runs come from workers: processes or threads that are ahead of it.

    The state is the source's state at the last mark, `_start`, and the number of items since. Marks lie every so many
    items, wherever runs begin and end; `_mark` is the one at the end of the run, if there is one. Workers start when
    the first item is asked for, and again, from the position, after an error, after `setstate()`, and in a process
    forked from this one.
    """

    _start_method: Optional[str]
    _closed = False
    _workers: Sequence[Any] = ()
    _ended = False
    _moved = False  # whether the source may have been read further than the mark
    _mark: Any = None
    _began = 0.0
    _left_behind: Sequence[Any] = ()  # threads that were closed and may still read the source
    _reader = 0, 0  # process and thread whose call deals with the workers, if any
    # Of a closed one, a copy is open: it stands where that stood.
    _transient: Tuple[str, ...] = (
        "_closed",
        "_workers",
        "_left_behind",
        "_reader",
        "_ended",
        "_moved",
        "_mark",
        "_began",
    )

    def _receive(self) -> Optional[Tuple[List[T], Any]]:
        """Return the next run and the source's state behind it, which is None where no mark lies; None at the end."""
        raise NotImplementedError

    def _begin(self) -> None:
        """Start the workers from the position."""
        raise NotImplementedError

    def _restore(self, source_state: Any, number: int) -> None:
        self._check_source_is_free()
        self._source.setstate(source_state)
        self._rewind(number)
        self._mark, self._moved, self._ended = None, False, False

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("{} is closed".format(type(self).__name__))

    def _now(self) -> Any:
        return self._source.getstate()

    def _position(self) -> Tuple[Any, int]:
        left = self._rest.__length_hint__()
        if not left and self._mark is not None:
            return _copied(self._mark), 0
        if self._start is None:
            self._start = self._now()
        return _copied(self._start), self._end - left

    def _open(self) -> bool:
        self._check_open()
        me = os.getpid(), get_ident()
        if self._reader != me and self._reader[0] == me[0]:  # this thread's own is left from an interrupt
            raise RuntimeError("{} is being read: it serves one caller at a time".format(type(self).__name__))
        if self._ended:
            return False
        if self._mark is not None:
            self._start, self._end, self._mark = self._mark, 0, None
        elif self._start is None:
            self._start = self._now()
        self._run, self._rest = (), iter(())
        if self._workers and not self._workers[0].owned:
            self._workers = ()  # this process is a fork of the one that they work for
        end = self._end
        try:
            self._reader = me
            if not self._workers:
                self._check_source_is_free()
                if self._moved:
                    self._source.setstate(self._start)
                self._moved = True
                self._begin()
                self._began = perf_counter()
            received = self._receive()
            if received is None:
                self._ended = True
                self._stop()
                return False
            self._run, self._mark = received
            self._end += len(self._run)
            self._pending = False
            self._seek(0)
            return True
        except BaseException as error:
            self._run, self._rest, self._mark, self._end = (), iter(()), None, end
            self._stop()
            if self._closed and isinstance(error, (IndexError, OSError)):  # by another thread, in the middle of this
                raise RuntimeError("{} is closed".format(type(self).__name__)) from error
            raise
        finally:
            self._reader = 0, 0

    def _stop(self) -> None:
        workers, self._workers = self._workers, ()
        if workers:
            from . import _workers

            _workers.close(workers)
        self._left_behind = [worker for worker in [*self._left_behind, *workers] if worker.left_behind]

    def _check_source_is_free(self) -> None:
        self._stop()
        if self._left_behind:
            raise RuntimeError(
                "{} cannot go on: a thread that was closed is still blocked in its source".format(type(self).__name__)
            )

    def close(self) -> None:
        """End the processes and threads of the whole pipeline, which then gives no more items."""
        self._stop()
        if not self._closed:
            self._closed = True
            if self._start is None:
                self._start = self._now()
            left = self._rest.__length_hint__()
            self._end -= left
            if left:
                self._mark = None
            self._run, self._rest = (), iter(())
        super().close()

    def _back(self, n: int) -> None:
        if not self._run:  # closed: the position is counted from the mark before the run
            self._mark = None
        super()._back(n)

    @property
    def waiting(self) -> Dict[str, float]:
        """
        Tell who waited for whom since the workers started, as shares of that time between 0 and 1.

        'consumer' is the share that `next()` waited for the workers: if it is high, they are what to speed up.
        'workers' is the share that they waited, to be given work or to get rid of it, on average: if it is high, more
        of them would change nothing. As last heard from them; empty while none runs.
        """
        if not self._workers:
            return {}
        elapsed = max(perf_counter() - self._began, 1e-9)
        return {
            "consumer": round(min(sum(worker.waited for worker in self._workers) / elapsed, 1.0), 3),
            "workers": round(
                min(sum(worker.worker_waited for worker in self._workers) / elapsed / len(self._workers), 1.0), 3
            ),
        }

    @property
    def _waiting(self) -> Dict[str, float]:  # for repr()
        return self.waiting


def _checked_start(value: Optional[str]) -> Optional[str]:
    if value not in (None, "fork", "thread", "spawn"):
        raise ValueError("start must be 'fork', 'thread', 'spawn' or None, got {!r}".format(value))
    return value


def _send(link: Any, items: List[Any], *more: Any) -> None:
    """Send a run from a worker; if an item cannot be pickled, those before it, and then its error."""
    try:
        link.send((items,) + more)
    except TypeError:
        if len(items) == 1:
            raise
        for item in items:
            link.send(([item],) + (None,) * len(more))
        raise


def _adapted(size: int, limit: int, number: int, seconds: float, num_bytes: int = 0) -> int:
    """
    Return the size of the next message, by the last one's number of items, seconds and bytes.

    That is what takes 2 ms. Of large items it is fewer, about a MiB: one can be on its way while the next is made, and
    those that are made lie in the processor's cache.
    """
    return max(min(2 * size, limit, int(0.002 * number / max(seconds, 1e-9)), (number << 20) // max(num_bytes, 1)), 1)


def _interval(state: Any, size: int) -> int:
    """Return the number of items between marks: `size`, or as many times twice that as a large state demands."""
    weight, rest = 0, [state]
    while rest:
        part = rest.pop()
        if isinstance(part, dict):
            part = list(part.values())
        weight += len(part) if isinstance(part, (list, tuple, str, bytes)) else 0
        if isinstance(part, (list, tuple)) and not _ATOMS.issuperset(map(type, part)):
            rest += part
    while 64 * size < weight:
        size *= 2
    return size


def _run_ahead(source: _Stage[Any], start: Any, number: int, buffer_size: int, shared: bool, link: Any) -> None:
    """What the worker of a `PrefetchIterator` does: send runs, with the state behind them where a mark lies."""
    try:
        if number:
            _pass_over(source, number)
        left = _interval(start, buffer_size) - number  # items to the next mark
        mark: Optional[Checkpoint] = None
        if left <= 0:
            mark = source.getstate()
            left = _interval(mark, buffer_size)
            link.send(([], mark))
        credit = buffer_size + 1  # items that may be computed before the consumer asks for another one
        size, limit = 1, max(buffer_size // 2, 1)
        while True:
            if credit < size:
                credit += link.granted(block=credit == 0)
            items: List[Any] = []
            begin = perf_counter()
            try:
                n = min(size, credit, left)
                while len(items) < n:
                    length = len(items)
                    source._fill(items, min(n - length, 256))  # in steps, for items may become slow at any time
                    if len(items) == length or perf_counter() - begin > 0.001:
                        break
            except BaseException:
                if items:
                    _send(link, items, None)
                raise
            if not items:
                return
            seconds = perf_counter() - begin
            credit -= len(items)
            left -= len(items)
            mark = None
            if left == 0:
                mark = source.getstate()
                left = _interval(mark, buffer_size)
            _send(link, items, mark)
            size = _adapted(size, limit, len(items), seconds, link.num_bytes)
    finally:
        if not shared:
            source.close()


class PrefetchIterator(_AheadIterator[T]):
    """
    Yield the same items as the source, computed ahead in another process.

    The process starts when the first item is asked for, and ends with `close()`, with the iterator, or with this
    process, however that ends. If it dies, or the source raises, `next()` raises; the next `next()` starts another one
    from the position. It is forked, so that the pipeline below may hold whatever it likes: closures, lambdas, open
    data sets. What cannot be forked, such as CUDA, or locks that other threads hold, needs `start="spawn"`.

    Cost: `buffer_size` items, and a copy of what the pipeline below touches. An item travels by pickle (arrays and
    tensors are copied once in and once out), so this pays where computing an item takes longer than that. A checkpoint
    holds the source's state up to `buffer_size` items ago, restoring reads these again.

    Args:
        source_iterator: where the items come from. Each item must be an object of its own: a source that yields one
            array again and again, filled anew, cannot be prefetched.
        buffer_size: number of items that are computed and not yet returned, at most.
        buffer_in_main_process: accepted for programs written for Infinibatch 0.1.1, without effect.
        log_empty_buffer_warning: whether to log a warning, now and then, when no item is ready.
        start: "fork"; "thread", which shares the interpreter with the consumer; "spawn", a fresh process, for
            pipelines that can be pickled. None takes fork on Linux and BSD, a thread on macOS and Windows.

    Raises:
        ValueError: `buffer_size` is below 1, `start` is none of these, or `source_iterator` is no
            `CheckpointableIterator`.
        RuntimeError: from `next()`, the process died, or the iterator is closed.

    >>> with PrefetchIterator(NativeCheckpointableIterator("abc"), buffer_size=2) as items:
    ...     list(items)
    ['a', 'b', 'c']
    """

    _shown = ("buffer_size", "waiting")
    _logged = float("-inf")
    _transient: Tuple[str, ...] = ("_logged", "_returned")

    def __init__(
        self,
        source_iterator: CheckpointableIterator[T],
        buffer_size: int,
        buffer_in_main_process: bool = False,
        log_empty_buffer_warning: bool = False,
        *,
        start: Optional[str] = None,
    ) -> None:
        self._read_from(source_iterator)
        self._buffer_size = _integer("buffer_size", buffer_size)
        self._log_empty_buffer_warning = bool(log_empty_buffer_warning)
        self._start_method = _checked_start(start)
        self.setstate(None)

    def _offsets(self) -> Tuple[int, bool]:
        number, matters = self._source._offsets()
        return number + 1, matters

    def _parse(self, checkpoint: Any) -> Tuple[Any, int]:
        self._check_open()
        return _source_and_count(self, checkpoint, "item_offset")

    def _save(self) -> Checkpoint:
        source_state, number = self._position()
        return {"source_state": source_state, "item_offset": number}

    def _begin(self) -> None:
        from . import _workers

        start = self._start_method or _workers.default_start()
        shared = start == "thread"
        target = partial(_run_ahead, self._source, self._start, self._end, self._buffer_size, shared)
        self._workers = [_workers.Worker(target, start, room=256 << 20)]
        self._returned = 0  # items of the last run

    def _receive(self) -> Optional[Tuple[List[T], Any]]:
        worker = self._workers[0]
        if self._returned:
            worker.grant(self._returned)
            self._returned = 0
        if self._log_empty_buffer_warning and perf_counter() > self._logged + 60 and not worker.ready():
            self._logged = perf_counter()
            logger.warning("no item is ready in %s (said once a minute)", repr(self).split("\n")[0])
        try:
            items, mark = worker.receive()
        except worker.Ended:
            return None
        self._returned = len(items)
        return items, mark


def _map_blocks(transform: Callable[[Any], Any], link: Any) -> None:
    """What a worker of a `ParallelMapIterator` does: send the results of each block, and the seconds that it took."""
    while True:
        items = link.receive()
        results: List[Any] = []
        begin = perf_counter()
        try:
            for item in items:
                results.append(transform(item))
        except BaseException:
            if results:
                _send(link, results, None)
            raise
        del items
        _send(link, results, perf_counter() - begin)


class _SharedWorkIterator(_AheadIterator[T]):
    """A stage that reads the source itself and hands what it reads to several workers in turn."""

    _num_processes: int
    _room = 4 << 20  # bytes that may wait for their turn at each worker
    _transient: Tuple[str, ...] = ("_sent", "_turn", "_last", "_error")

    def _target(self) -> Callable[[Any], None]:
        """Return the function that runs in each worker."""
        raise NotImplementedError

    def _begin(self) -> None:
        from . import _workers

        self._sent: Deque[Tuple[int, int, Any]] = deque()  # what is on its way: worker, number of items, mark behind it
        self._turn = 0  # the worker that gets the next message …
        self._last = 0  # … and the one that gave the last
        self._error: Optional[Exception] = None  # what the source raised behind all that is on its way
        start, target = self._start_method or _workers.default_start(), self._target()
        self._workers = [_workers.Worker(target, start, self._room) for _ in range(self._num_processes)]

    def _read_ahead(self, n: int) -> List[Any]:
        items: List[Any] = []
        try:
            self._source._fill(items, n)
        except Exception as error:
            self._error = error
        return items

    def _give(self, message: Any, number: int, mark: Any) -> bool:
        """Send a message to the worker whose turn it is; False if it cannot be pickled, which is `_error` then."""
        try:
            self._workers[self._turn].send(message)
        except TypeError as error:
            self._error = error
            return False
        self._sent.append((self._turn, number, mark))
        self._turn = (self._turn + 1) % self._num_processes
        return True

    def _raise_pending(self) -> None:
        """Raise what stopped the reading, unless that was the end of the data."""
        try:
            if self._error is not None:
                raise self._error
        finally:
            self._error = None  # its traceback refers to this object

    def _take(self) -> Tuple[Any, int, Any]:
        """Return the next message, and what stands in `_sent` about it."""
        self._last, number, mark = self._sent.popleft()
        others = [worker for i, worker in enumerate(self._workers) if i != self._last]
        return self._workers[self._last].receive(others), number, mark


class ParallelMapIterator(_SharedWorkIterator[T]):
    """
    Apply a function to each item, in several processes, keeping the order.

    This process reads the source and sends the items to the others. They start when the first item is asked for, and
    end with `close()`, with the iterator, or with this process, however that ends. Under fork, `transform` may be any
    function: a closure, a lambda, a method of an open data set. If a process dies, or `transform` raises, `next()`
    raises; the next `next()` goes on from the position, with the same item.

    Cost: twice `num_processes * num_items_per_process` items on their way, at most; items and results travel by pickle.
    A checkpoint holds the source's state up to that many items ago; restoring reads these again, without transforming
    them.

    Args:
        source_iterator: where the items come from.
        transform: function of one item.
        num_processes: number of processes.
        num_items_per_process: largest number of items that are sent to a process together.
        start: how processes start, see `PrefetchIterator`.

    Raises:
        ValueError: a number is below 1, `start` is unknown, or `source_iterator` is no `CheckpointableIterator`.
        TypeError: `transform` is not callable; from `next()`, an item or a result cannot be pickled.
        RuntimeError: from `next()`, a process died, or the iterator is closed.

    >>> with ParallelMapIterator(NativeCheckpointableIterator("abc"), lambda x: x * 2, 2, 10) as items:
    ...     list(items)
    ['aa', 'bb', 'cc']
    """

    _shown = ("transform", "num_processes", "num_items_per_process", "waiting")
    _size = 1  # number of items in the next block
    _transient: Tuple[str, ...] = ("_size", "_left")

    def __init__(
        self,
        source_iterator: CheckpointableIterator[Any],
        transform: Callable[[Any], T],
        num_processes: int,
        num_items_per_process: int,
        *,
        start: Optional[str] = None,
    ) -> None:
        self._read_from(source_iterator)
        self._transform = _function("transform", transform)
        self._num_processes = _integer("num_processes", num_processes)
        self._num_items_per_process = _integer("num_items_per_process", num_items_per_process)
        self._block_size = self._num_processes * self._num_items_per_process  # number of items between marks
        self._start_method = _checked_start(start)
        self.setstate(None)

    def _parse(self, checkpoint: Any) -> Tuple[Any, int]:
        self._check_open()
        if checkpoint is None:
            checkpoint = {"source_state": None, "flattened_items_yielded": 0}
        state, number = _keys(self, checkpoint, "source_state", "flattened_items_yielded")
        if state is not None:
            (state,) = _keys(self, state, "source_state")
        self._source._check(state)
        return state, _count(self, "flattened_items_yielded", number)

    def _save(self) -> Checkpoint:
        source_state, number = self._position()
        return {"source_state": {"source_state": source_state}, "flattened_items_yielded": number}

    def _skip(self, n: int) -> int:
        if self._workers or self._rest.__length_hint__():
            return super()._skip(n)
        self._start, self._end = self._position()
        if self._moved:
            self._source.setstate(self._start)
        self._moved = True
        _pass_over(self._source, self._end)
        skipped = 0
        while skipped < n:
            if self._end >= self._block_size:
                self._start, self._end = self._source.getstate(), 0
            step = self._source._skip(min(n - skipped, self._block_size - self._end))
            if not step:
                break
            self._end += step
            skipped += step
        return skipped

    def _begin(self) -> None:
        super()._begin()
        _pass_over(self._source, self._end)
        self._left = self._block_size - self._end  # items to the next mark

    def _target(self) -> Callable[[Any], None]:
        return partial(_map_blocks, self._transform)

    def _receive(self) -> Optional[Tuple[List[T], Any]]:
        if self._left <= 0:  # restored far behind a mark
            self._left = self._block_size
            return [], self._source.getstate()
        on_their_way = sum(number for _, number, _ in self._sent)
        while self._error is None and len(self._sent) < 4 * self._num_processes and on_their_way < 2 * self._block_size:
            items = self._read_ahead(min(self._size, self._left))
            if not items:
                break
            self._left -= len(items)
            on_their_way += len(items)
            mark = None
            if not self._left:
                mark, self._left = self._source.getstate(), self._block_size
            if not self._give(items, len(items), mark):
                for item in items:  # those before the one that cannot be pickled
                    if not self._give([item], 1, None):
                        break
        if not self._sent:
            self._raise_pending()
            return None
        (results, seconds), number, mark = self._take()
        if len(results) < number:  # an error comes behind them
            self._sent.appendleft((self._last, number - len(results), mark))
            return results, None
        if seconds is not None:
            self._size = _adapted(self._size, self._num_items_per_process, number, seconds)
        return results, mark


def _read_chunks(collection_selector: Optional[Callable[[Any], Iterable[T]]], link: Any) -> None:
    """What a worker of a `ParallelSelectManyIterator` does: send the items of each chunk, and say where it ends."""
    size = 1
    while True:
        item, number = link.receive()
        chunk = SelectManyIterator(NativeCheckpointableIterator([item]), collection_selector)
        chunk._rewind(number)
        done = False
        while not done:
            items: List[T] = []
            begin = perf_counter()
            try:
                chunk._fill(items, size)
            except BaseException:
                if items:
                    _send(link, items, False)
                raise
            seconds = perf_counter() - begin
            # The stage that reads in this process stands behind a list with its last item, behind a stream with the
            # first item of the next one.
            done = not items or len(chunk._run) > 0 and not chunk._rest.__length_hint__()
            _send(link, items, done)
            if items:
                size = _adapted(size, 2000, len(items), seconds, link.num_bytes)


class ParallelSelectManyIterator(_SharedWorkIterator[T]):
    """
    Yield the items of a collection selected for each source item, like `SelectManyIterator`, in several processes.

    This process reads the source, and the others call `collection_selector`, each for another source item, and send
    the items. Order and checkpoints are those of `SelectManyIterator`. A process that is ahead of its turn keeps what
    it has read, up to 64 MiB of pickled items, and goes on.

    Args:
        source_iterator: where the source items come from, for example the names of chunks.
        collection_selector: function from a source item to an iterable of any kind, for example a reader of chunks.
            None takes the source item itself.
        num_processes: number of processes.
        start: how processes start, see `PrefetchIterator`.

    Raises:
        ValueError: `num_processes` is below 1, `start` is unknown, or `source_iterator` is no `CheckpointableIterator`.
        TypeError: `collection_selector` is not callable; from `next()`, an item cannot be pickled.
        RuntimeError: from `next()`, a process died, or the iterator is closed.

    >>> with ParallelSelectManyIterator(NativeCheckpointableIterator([1, 3]), lambda n: range(n), 2) as items:
    ...     list(items)
    [0, 0, 1, 2]
    """

    _shown = ("collection_selector", "num_processes", "waiting")
    _room = 64 << 20
    _transient: Tuple[str, ...] = ("_skipped",)

    def __init__(
        self,
        source_iterator: CheckpointableIterator[Any],
        collection_selector: Optional[Callable[[Any], Iterable[T]]],
        num_processes: int,
        *,
        start: Optional[str] = None,
    ) -> None:
        self._read_from(source_iterator)
        if collection_selector is not None:
            _function("collection_selector", collection_selector)
        self._collection_selector = collection_selector
        self._num_processes = _integer("num_processes", num_processes)
        self._start_method = _checked_start(start)
        self.setstate(None)

    def _parse(self, checkpoint: Any) -> Tuple[Any, int]:
        self._check_open()
        return _source_and_count(self, checkpoint, "flattened_items_yielded")

    def _save(self) -> Checkpoint:
        source_state, number = self._position()
        return {"source_state": source_state, "flattened_items_yielded": number}

    def _begin(self) -> None:
        super()._begin()
        self._skipped = self._end  # items of the first chunk that are out

    def _target(self) -> Callable[[Any], None]:
        return partial(_read_chunks, self._collection_selector)

    def _receive(self) -> Optional[Tuple[List[T], Any]]:
        while self._error is None and len(self._sent) < 2 * self._num_processes:
            item = self._read_ahead(1)
            if not item:
                break
            self._give((item[0], self._skipped), 0, self._source.getstate())
            self._skipped = 0
        if not self._sent:
            self._raise_pending()
            return None
        (items, done), _, mark = self._take()
        if done:
            return items, mark
        self._sent.appendleft((self._last, 0, mark))
        return items, None


# ---------------------------------------------------------------------------------------------------------------------
# Any number of ranks
# ---------------------------------------------------------------------------------------------------------------------


def _shard_states(shards: Sequence[int], states: Checkpoint) -> Dict[int, Checkpoint]:
    """Return what is known of each shard: as a checkpoint says, or as new."""
    new = {"num_served": 0, "ended": False, "state": None}
    return {shard: dict(states.get(str(shard), new)) for shard in shards}


def _saved_shards(states: Dict[int, Checkpoint]) -> Checkpoint:
    """Return what a checkpoint says of the shards."""
    return {str(shard): dict(state, state=_copied(state["state"])) for shard, state in states.items()}


class _Shards(_Stage[Tuple[int, Any, Any, bool]]):
    """
    Serve several shards in turn, the one that has given least first.

    Yields (shard, item, the shard's state behind the item if a mark lies there, whether the shard has ended instead).
    A mark lies behind the first item of a shard, so that a checkpoint says early which data it is of, and behind every
    `_EVERY`-th. The state of a shard is that at its last mark.
    """

    _EVERY = 16
    _place: List[Tuple[int, ...]] = []  # among the sharded iterators of a tree, [] for the first and [(i,)] for others
    _closed = False
    _pipelines: Dict[int, _Stage[Any]]
    _positioned = False
    _transient: Tuple[str, ...] = ("_closed", "_states", "_queue", "_pipelines", "_standing")

    def __init__(self, make_shard: Callable[[int, int], Any], num_shards: int, shards: Sequence[int]) -> None:
        self._make_shard, self._num_shards, self._shards = make_shard, num_shards, list(shards)
        self.setstate(None)

    def _parse(self, checkpoint: Any) -> Tuple[Any, ...]:
        states: Checkpoint = {} if checkpoint is None else checkpoint
        for shard in self._shards:
            if str(shard) in states and states[str(shard)]["state"] is not None:
                self._pipeline(shard)._check(states[str(shard)]["state"])
        return (states,)

    def _restore(self, states: Checkpoint) -> None:
        self._states = _shard_states(self._shards, states)
        # A heap of the shards that have not ended: number of items served, shard.
        self._queue = [(state["num_served"], shard) for shard, state in self._states.items() if not state["ended"]]
        heapify(self._queue)
        self._standing: Set[int] = set()  # the shards whose pipeline stands where it should
        for shard, pipeline in self.__dict__.get("_pipelines", {}).items():
            if self._states[shard]["state"] is not None and pipeline._holds_foreign():
                pipeline.setstate(self._states[shard]["state"])  # for the user's own class may refuse it

    def _holds_foreign(self) -> bool:
        return any(pipeline._holds_foreign() for pipeline in self.__dict__.get("_pipelines", {}).values())

    def _save(self) -> Checkpoint:
        return _saved_shards(self._states)

    def _pipeline(self, shard: int) -> _Stage[Any]:
        """Return the pipeline of a shard, built when it is first asked for."""
        pipelines = self.__dict__.setdefault("_pipelines", {})
        if shard not in pipelines:
            pipeline = _adopt(self._make_shard(self._num_shards, shard), "what make_shard returns")
            stages = list(_all_stages([pipeline]))
            for stage in stages:
                key = _seed_of(stage)
                if isinstance(key, _Drawn):  # a shard is built again on another rank, and after its end
                    raise ValueError(
                        "seed of {} must be given in a shard, got None: it would be another one each time that the "
                        "shard is built".format(type(stage).__name__)
                    )
                if isinstance(key, _StageKey):
                    dealt_out = isinstance(stage, _ListSource) and stage._num_instances > 1
                    key.scope = ([] if dealt_out else [(self._num_shards, shard)]) + self._place
            for first in list(pipelines.values())[:1]:
                for stage, other in zip(stages, _all_stages([first])):
                    if isinstance(stage, _ListSource) and isinstance(other, _ListSource):
                        stage._share_list(other)
            if self._closed:
                pipeline.close()
            pipelines.setdefault(shard, pipeline)  # where a worker is a thread, it may have been faster
        return self._pipelines[shard]

    def _ready(self, shard: int) -> _Stage[Any]:
        """Return the pipeline of a shard at its position."""
        pipeline = self._pipeline(shard)
        if shard not in self._standing:
            state = self._states[shard]
            pipeline.setstate(state["state"])
            number = state["num_served"]
            mark = 0 if state["state"] is None else number - number % self._EVERY or 1
            behind = number - mark
            passed = pipeline._skip(behind)
            if passed < behind:
                raise _beyond(pipeline, behind, passed)
            self._standing.add(shard)
        return pipeline

    def _step(self) -> Tuple[int, Any, Any, bool]:
        if not self._queue:
            raise StopIteration
        _, shard = self._queue[0]
        state = self._states[shard]
        items: List[Any] = []
        pipeline = self._ready(shard)
        pipeline._fill(items, 1)
        if not items:
            pipeline.close()
            del self._pipelines[shard]
            heappop(self._queue)
            state.update(ended=True, state=None)
            return shard, None, None, True
        number = state["num_served"] + 1
        mark = None
        if number == 1 or number % self._EVERY == 0:
            try:
                mark = state["state"] = pipeline.getstate()
            except BaseException:
                pipeline._back(1)
                raise
        state["num_served"] = number
        heapreplace(self._queue, (number, shard))
        return shard, items[0], mark, False

    __next__ = _step

    def close(self) -> None:
        self._closed = True
        for pipeline in list(self.__dict__.get("_pipelines", {}).values()):
            pipeline.close()


class ShardedIterator(_ReplayIterator[T]):
    """
    Serve this rank's share of a fixed number of shards, so that a run can go on with any number of ranks and processes.

    A run fixes `num_shards` for its whole life. Each shard is a pipeline of its own; rank r of N serves the shards v
    with `v % N == r` in turn, the one that has given least first. Each shard's state moves with it: what all ranks
    save together (`infinibatch.checkpoint.merge`) is the state of the run, whatever N was. Where N divides
    `num_shards`, all ranks together serve the same items in each round, whatever N is. A shard that ends is not asked
    again, the others go on.

    Cost: the memory of `num_shards / num_instances` pipelines. Restoring reads again what each of these reads, and up
    to 15 items; a pipeline is built when its first item is asked for.

    Args:
        make_shard: `make_shard(num_shards, shard)` returns the pipeline of a shard, for example
            `chunked_dataset_iterator(..., num_instances=num_shards, instance_rank=shard)` with batching behind it. With
            random stages of `Keyed` seeds it draws other numbers than the other shards, and its checkpoints are small.
        num_shards: number of shards, a multiple of any number of ranks that one wants to use.
        num_instances: number of ranks.
        instance_rank: number of this one, from 0 to `num_instances` - 1.
        num_processes: number of processes that run the shards; 0 runs them in this one. Order and state are the same.
        start: how processes start, see `PrefetchIterator`.

    Raises:
        ValueError: a number is out of range; from `setstate()`, the checkpoint has another number of shards, lacks
            some that this rank serves, or has the state of one that does not fit; from `next()`, `make_shard` returned
            no `CheckpointableIterator`, or a pipeline with a `seed` of None.
        TypeError: `make_shard` is not callable.

    >>> def make_shard(num_shards, shard):
    ...     return ChunkedSourceIterator("abcdefgh", num_instances=num_shards, instance_rank=shard)
    >>> list(ShardedIterator(make_shard, num_shards=4))
    ['a', 'c', 'e', 'g', 'b', 'd', 'f', 'h']
    >>> ranks = [ShardedIterator(make_shard, 4, num_instances=2, instance_rank=rank) for rank in (0, 1)]
    >>> [next(rank) for rank in ranks]
    ['a', 'c']
    >>> from infinibatch.checkpoint import merge
    >>> single = ShardedIterator(make_shard, 4)
    >>> single.setstate(merge([rank.getstate() for rank in ranks]))
    >>> list(single)
    ['e', 'g', 'b', 'd', 'f', 'h']
    """

    _shown = ("make_shard", "num_shards", "num_instances", "instance_rank", "num_processes")
    _transient: Tuple[str, ...] = ("_states", "_queue")

    def __init__(
        self,
        make_shard: Callable[[int, int], CheckpointableIterator[T]],
        num_shards: int,
        num_instances: int = 1,
        instance_rank: int = 0,
        num_processes: int = 0,
        *,
        start: Optional[str] = None,
    ) -> None:
        self._make_shard = _function("make_shard", make_shard)
        self._num_shards = _integer("num_shards", num_shards)
        self._num_instances, self._instance_rank = _instance(num_instances, instance_rank)
        self._num_processes = _integer("num_processes", num_processes, 0)
        _checked_start(start)
        self._shards = list(range(self._instance_rank, self._num_shards, self._num_instances))
        if not self._shards:
            logger.warning("instance %d of %d serves none of %d shards", instance_rank, num_instances, num_shards)
        number = max(min(self._num_processes, len(self._shards)), 1)
        groups = [_Shards(make_shard, self._num_shards, self._shards[i::number]) for i in range(number)]
        self._groups = groups
        self._inputs = tuple(groups)
        if self._num_processes:
            self._inputs = tuple([PrefetchIterator(group, 4 * len(group._shards) + 4, start=start) for group in groups])
        self.setstate(None)

    def _parse(self, checkpoint: Any) -> Tuple[Any, ...]:
        if checkpoint is None:
            return ({},)
        if isinstance(checkpoint, dict) and "shards" not in checkpoint:
            raise ValueError(
                "the checkpoint of {} lacks the key 'shards': it is of a pipeline without shards, and goes on only in "
                "such a one, with the num_instances that it was saved with".format(type(self).__name__)
            )
        number, states = _keys(self, checkpoint, "num_shards", "shards")
        if number != self._num_shards:
            rule = "{}, as in this pipeline (a run keeps its number of shards)".format(self._num_shards)
            raise _unfit(self, "num_shards", rule, number)
        if not isinstance(states, dict):
            raise _unfit(self, "shards", "a dict", states)
        missing = [shard for shard in self._shards if str(shard) not in states]
        if missing:
            raise ValueError(
                "the checkpoint of {} lacks {} of the {} shards of this instance ({}): merge the states of all "
                "instances".format(type(self).__name__, len(missing), len(self._shards), ", ".join(map(str, missing)))
            )
        found = {}
        for shard in self._shards:
            served, ended, state = _keys(self, states[str(shard)], "num_served", "ended", "state")
            served = _count(self, "num_served", served)
            if type(ended) is not bool:
                raise _unfit(self, "ended", "true or false", ended)
            if state is None and not ended and served >= _Shards._EVERY:
                raise _unfit(self, "state", "that of a shard that has served {} items".format(served), state)
            # Copied, since it is needed when the shard is asked, and the caller may have changed it by then.
            found[str(shard)] = {"num_served": served, "ended": ended, "state": _copied(state)}
        for group, own in zip(self._inputs, self._dealt(found)):
            group._parse(own)
        return (found,)

    def _set_place(self, place: int) -> None:
        """Let the shards draw other numbers than those of the sharded iterators before this one in a tree."""
        scope: List[Tuple[int, ...]] = [(place,)] if place else []
        for group in self._groups:
            if group._place != scope:
                if any(state["num_served"] for state in self._states.values()):
                    raise ValueError("a ShardedIterator must be fresh when it comes together with others, one was read")
                group._place = scope
                group.__dict__.pop("_pipelines", None)  # built to check a state

    def _dealt(self, states: Checkpoint) -> List[Checkpoint]:
        """Return for each group its shards' part of the states."""
        parts = [
            {str(shard): states[str(shard)] for shard in self._shards[i :: len(self._inputs)] if str(shard) in states}
            for i in range(len(self._inputs))
        ]
        return [{"source_state": part, "item_offset": 0} for part in parts] if self._num_processes else parts

    def _move(self, states: Checkpoint) -> None:
        for group, own in zip(self._inputs, self._dealt(states)):
            group.setstate(own)
        self._states = _shard_states(self._shards, states)
        # A heap of the shards that have not ended: number of items served, shard, index of its group.
        self._queue = [
            (self._states[shard]["num_served"], shard, i % len(self._inputs))
            for i, shard in enumerate(self._shards)
            if not self._states[shard]["ended"]
        ]
        heapify(self._queue)

    def _save(self) -> Checkpoint:
        return {"num_shards": self._num_shards, "shards": _saved_shards(self._states)}

    def _step(self) -> T:
        if not self._left:
            self._prepare()
        while self._queue:
            number, shard, group = self._queue[0]
            item: T
            served, item, mark, ended = next(self._inputs[group])
            assert served == shard, "each group serves its shards in the order of the whole"
            state = self._states[shard]
            if ended:
                heappop(self._queue)
                state.update(ended=True, state=None)
                continue
            heapreplace(self._queue, (number + 1, shard, group))
            state["num_served"] = number + 1
            if mark is not None:
                state["state"] = mark
            self._left -= 1
            return item
        raise StopIteration

    __next__ = _step

    def _fill(self, out: List[T], n: int) -> None:
        if not self._left:
            self._prepare()
        super()._fill(out, min(n, self._left))
