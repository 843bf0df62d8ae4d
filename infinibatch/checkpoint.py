"""Checkpoints as files: written whole or not at all, and read only if they are what was written.

A file is one JSON object in UTF-8:

    {"infinibatch_checkpoint": 1, "crc32": …, "state": …}

The number is that of this layout, so that a later one is told apart. The checksum is that of the state, written as
`json.dumps(state, ensure_ascii=False)` does: a digit that a disk or an editor changed is noticed, a file that a tool
laid out anew (indented, say) is still good. Other keys at the top are ignored, and a file without the checksum is
believed.
"""

import contextlib
import errno
import json
import os
from binascii import crc32, hexlify
from typing import TYPE_CHECKING, Any, Dict, Iterable, Iterator, List, Optional, Tuple, Union

if TYPE_CHECKING:
    from infinibatch.iterators import CheckpointableIterator

__all__ = ["diff", "load", "merge", "read", "save", "show"]

_Path = Union[str, "os.PathLike[str]"]

_LAYOUT = 1
_PLAIN = frozenset([str, int, float, bool, type(None)])

# By which keys the state of a stage is recognised when it is shown; the first that fits counts.
_STAGES = [
    ("the command stream", {"settings", "num_written"}),
    ("BucketedReadaheadBatchIterator", {"source_state", "random_state", "num_served"}),
    ("BufferedShuffleIterator", {"source_state", "random_state", "buffer"}),
    ("ShardedIterator", {"num_shards", "shards"}),
    ("a shard", {"shard", "num_served"}),
    ("MixIterator", {"source_states", "turn"}),
    ("MultiplexIterator", {"control_iterator_state", "source_iterator_states"}),
    ("PrefetchIterator", {"source_state", "item_offset"}),
    ("WindowedIterator", {"source_state", "item_index"}),
    ("RecurrentIterator or SamplingRandomMapIterator", {"source_state", "recurrent_state"}),
    ("PackIterator", {"source_state", "num_tokens"}),
    ("ChainIterator", {"source_state", "index"}),
    ("TakeIterator or EnumerateIterator", {"source_state", "num_items_yielded"}),
    ("SelectManyIterator", {"source_state", "flattened_items_yielded"}),
    ("ZipIterator", {"input_states"}),
    ("PermutationSourceIterator", {"random_state", "index", "epoch"}),
    ("InfinitePermutationSourceIterator", {"random_state", "index"}),
    ("NativeCheckpointableIterator or ChunkedSourceIterator", {"num_items_yielded"}),
    ("RandomIterator", {"random_state"}),
    ("FixedBatchIterator", {"source_state"}),
]


def save(iterator: "CheckpointableIterator[Any]", path: _Path) -> None:
    """Write the position of a pipeline to a file, as JSON.

    The file appears as a whole or not at all, also if the process or the machine dies meanwhile: it is written under
    another name in the same folder, flushed to disk and renamed. If anything fails, a checkpoint that was there before
    stays, and nothing else is left. A symbolic link stays one; the file it points to is replaced.

    A state that JSON would give back changed is refused rather than altered: dictionary keys other than str, bytes,
    sets, arrays, objects of any class. Such data come from a `RecurrentIterator` or a shuffle buffer of the program's
    own; the library's stages put in none. Tuples become lists, which every `setstate` takes; int, float (NaN and the
    infinities too) and str come back exactly.

    Cost: microseconds for a few kilobytes, and however long the disk takes to confirm (milliseconds).

    Args:
        iterator: A pipeline, or whatever else has a `getstate`.
        path: The file, as str or `PathLike`. Its folder must exist.

    Raises:
        TypeError: The state holds something that JSON would change; the message says where.
        OSError: The file cannot be written, or `path` is a folder, a device or a pipe.

    >>> import tempfile
    >>> from infinibatch.iterators import NativeCheckpointableIterator
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = os.path.join(folder.name, "position.json")
    >>> numbers = NativeCheckpointableIterator(range(10))
    >>> next(numbers), next(numbers)
    (0, 1)
    >>> save(numbers, path)
    >>> resumed = NativeCheckpointableIterator(range(10))
    >>> load(resumed, path)
    >>> next(resumed)
    2
    >>> folder.cleanup()
    """
    state = iterator.getstate()
    _check_plain(state, "state")
    text = _dumps(state)
    document = '{{"infinibatch_checkpoint": {}, "crc32": {}, "state": {}}}\n'.format(_LAYOUT, _checksum(text), text)
    path = os.path.realpath(os.fsdecode(path))
    if os.path.exists(path) and not os.path.isfile(path):  # a device or a pipe would be replaced by a file
        raise OSError(errno.EINVAL, "path must be that of a file", path)
    temporary = "{}.{}.tmp".format(path, hexlify(os.urandom(6)).decode())
    try:
        with open(temporary, "xb") as file:
            file.write(_encode(document))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise
    _flush_folder(os.path.dirname(path))


def load(iterator: "CheckpointableIterator[Any]", path: _Path) -> None:
    """Set a pipeline to the position that `save` wrote.

    Args:
        iterator: A pipeline built like the one that was saved. It keeps its position if this fails.
        path: The file, as str or `PathLike`.

    Raises:
        FileNotFoundError: There is no such file. Starting anew is the caller's decision, never taken here.
        ValueError: The file is empty, cut off, damaged or no checkpoint, or its state does not fit this pipeline.
        RuntimeError: The position lies beyond the end of the pipeline's data.
        OSError: The file cannot be read.
    """
    state = read(path)
    try:
        iterator.setstate(state)
    except ValueError as error:
        raise ValueError("{}: {}".format(os.fsdecode(path), error)) from error
    except RuntimeError as error:
        raise RuntimeError("{}: {}".format(os.fsdecode(path), error)) from error


def read(path: _Path) -> Any:
    """Return the state that `save` wrote, without a pipeline: for `merge`, or to look at it.

    Args:
        path: The file, as str or `PathLike`.

    Raises:
        ValueError: The file is empty, cut off, damaged or no checkpoint.
        OSError: The file is missing or cannot be read.

    >>> import tempfile
    >>> from infinibatch.iterators import NativeCheckpointableIterator
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "position.json")
    ...     save(NativeCheckpointableIterator("abc"), path)
    ...     read(path)
    {'num_items_yielded': 0}
    """
    path = os.fsdecode(path)
    with open(path, "rb") as file:
        data = file.read()
    try:
        document = json.loads(data.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        reason = "the file is empty" if not data else "it is cut off or damaged ({})".format(error)
        raise ValueError("{} is no checkpoint: {}".format(path, reason)) from error
    if not isinstance(document, dict) or not {"infinibatch_checkpoint", "state"}.issubset(document):
        raise ValueError("{} is no checkpoint: it lacks 'infinibatch_checkpoint' or 'state'".format(path))
    if document["infinibatch_checkpoint"] != _LAYOUT:
        raise ValueError(
            "{} has layout {!r}, and this version reads {}".format(path, document["infinibatch_checkpoint"], _LAYOUT)
        )
    state = document["state"]
    if "crc32" in document and document["crc32"] != _checksum(_dumps(state)):
        raise ValueError("{} is damaged: its state does not match its checksum".format(path))
    return state


def merge(states: Iterable[Any]) -> Any:
    """Unite what the ranks of a run saved of their `ShardedIterator`.

    The result fits a `ShardedIterator` of any rank out of any number of them.

    Args:
        states: What `getstate` of each rank returned, in any order. Ranks that served the same shards, as with tensor
            parallelism, may both be there if they agree.

    Returns:
        The state of the whole run.

    Raises:
        ValueError: There is no state, one is not of a `ShardedIterator`, they differ in their number of shards, or two
            say different things of one shard.

    >>> merge([{"num_shards": 2, "shards": {"0": {"num_served": 1}}}, {"num_shards": 2, "shards": {"1": {}}}])
    {'num_shards': 2, 'shards': {'0': {'num_served': 1}, '1': {}}}
    """
    shards: Dict[str, Any] = {}
    numbers = []
    for i, state in enumerate(states):
        if not isinstance(state, dict) or not isinstance(state.get("shards"), dict) or "num_shards" not in state:
            raise ValueError("states[{}] is not the state of a ShardedIterator: {!r:.80}".format(i, state))
        numbers.append(state["num_shards"])
        if numbers[0] != numbers[-1]:
            raise ValueError("states differ in their number of shards: {} and {}".format(numbers[0], numbers[-1]))
        for shard, content in state["shards"].items():
            if shard in shards and _comparable(shards[shard]) != _comparable(content):
                raise ValueError(
                    "states must be of the same moment, two differ in shard {}: {!r:.80} and {!r:.80}".format(
                        shard, shards[shard], content
                    )
                )
            shards[shard] = content
    if not numbers:
        raise ValueError("states must be at least 1, got 0")
    return {"num_shards": numbers[0], "shards": {shard: shards[shard] for shard in sorted(shards, key=int)}}


def show(path: _Path) -> str:
    """Describe for a reader where each stage of a saved pipeline stands.

    One line a stage, the last stage of the pipeline first and its sources below it. Stages are named by what their
    state looks like; those without a state of their own (`MapIterator`) do not appear. Generator states are shortened
    to a checksum and their position, lists to their length; a generator that has not been used yet is left out.

    Args:
        path: A file that `save` wrote.

    Returns:
        The description, without a newline at its end.

    Raises:
        FileNotFoundError, ValueError, OSError: As for `load`.

    >>> import tempfile
    >>> from infinibatch.iterators import FixedBatchIterator, NativeCheckpointableIterator
    >>> batches = FixedBatchIterator(NativeCheckpointableIterator("abcdef"), batch_size=2)
    >>> next(batches)
    ['a', 'b']
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(batches, os.path.join(folder, "position.json"))
    ...     print(show(os.path.join(folder, "position.json")))
    FixedBatchIterator
      NativeCheckpointableIterator or ChunkedSourceIterator: num_items_yielded 2
    """
    return "\n".join(_lines(read(path), ""))


def diff(path: _Path, other: _Path) -> str:
    """Describe for a reader in which stages two saved positions differ, and how.

    One line a stage that differs, or whose sources do, as in `show`: what the first file says, a bar, and what the
    other says.

    Args:
        path: A file that `save` wrote.
        other: Another one.

    Returns:
        The description, without a newline at its end; empty if the positions are the same.

    Raises:
        FileNotFoundError, ValueError, OSError: As for `load`.

    >>> import tempfile
    >>> from infinibatch.iterators import FixedBatchIterator, NativeCheckpointableIterator
    >>> batches = FixedBatchIterator(NativeCheckpointableIterator("abcdef"), batch_size=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     paths = [os.path.join(folder, name) for name in ("a.json", "b.json")]
    ...     for path in paths:
    ...         batch = next(batches)
    ...         save(batches, path)
    ...     print(diff(*paths))
    FixedBatchIterator
      NativeCheckpointableIterator or ChunkedSourceIterator: num_items_yielded 2 | 4
    """
    return "\n".join(_differences(read(path), read(other), ""))


def _dumps(state: Any) -> str:
    # Escapes would join a pair of lone surrogates to one character on the way back.
    return json.dumps(state, ensure_ascii=False)


def _comparable(state: Any) -> str:
    """Return a text that equal states share, also if one has been through JSON; other data as they show themselves."""
    return json.dumps(state, sort_keys=True, skipkeys=True, default=repr)


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _checksum(text: str) -> int:
    return crc32(_encode(text)) & 0xFFFFFFFF


def _check_plain(value: Any, name: str) -> None:
    kind = type(value)
    if kind is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise TypeError("{} has the key {!r:.80}; JSON keeps keys of type str only".format(name, key))
            _check_plain(item, "{}[{!r}]".format(name, key))
    elif kind is list or kind is tuple:
        if not _PLAIN.issuperset(map(type, value)):  # long lists are mostly words of a generator, or lines
            for index, item in enumerate(value):
                _check_plain(item, "{}[{}]".format(name, index))
    elif kind not in _PLAIN:
        raise TypeError(
            "{} is of type {}.{}, which JSON does not give back; a saved state holds dict, list, tuple, str, int, "
            "float, bool and None only, got {!r:.80}".format(name, kind.__module__, kind.__qualname__, value)
        )


def _flush_folder(folder: str) -> None:
    # A rename survives a crash of the machine only once its folder is on disk, too. Some systems cannot open or flush
    # folders, and by now the checkpoint is in place.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _lines(state: Any, indent: str) -> Iterator[str]:
    """Yield the description of a stage and, deeper, those of its sources."""
    if not isinstance(state, dict):
        yield indent + _brief(state)
        return
    name, own, sources = _stage(state)
    yield indent + name + (": " if own else "") + _briefly(own)
    for source in sources:
        yield from _lines(source, indent + "  ")


def _differences(first: Any, second: Any, indent: str) -> Iterator[str]:
    if _same(first, second):
        return
    if isinstance(first, dict) and isinstance(second, dict):
        name, own, sources = _stage(first)
        other_name, other_own, other_sources = _stage(second)
        if name == other_name and len(sources) == len(other_sources):
            details = ", ".join(_changes(own, other_own, ""))
            yield indent + name + (": " if details else "") + details
            for source, other_source in zip(sources, other_sources):
                yield from _differences(source, other_source, indent + "  ")
            return
    yield "{}{} | {}".format(indent, next(_lines(first, "")), next(_lines(second, "")))


def _changes(first: Any, second: Any, prefix: str) -> Iterator[str]:
    for key in list(first) + [key for key in second if key not in first]:
        value, other = first.get(key), second.get(key)
        if isinstance(value, dict) and isinstance(other, dict):
            yield from _changes(value, other, "{}{}.".format(prefix, key))
        elif not _same(value, other):
            texts = [_brief(value), _brief(other)]
            if texts[0] == texts[1]:
                texts[1] += " of other content"
            yield "{}{} {} | {}".format(prefix, key, *texts)


def _same(first: Any, second: Any) -> bool:
    return first == second or _dumps(first) == _dumps(second)  # the latter for NaN


def _stage(state: Any) -> Tuple[str, Any, List[Any]]:
    """Return a stage's name, what its state says of itself, and the states of its sources."""
    shuffled = _block_shuffle(state)
    if shuffled is not None:
        return shuffled
    own: Dict[str, Any] = {}
    sources: List[Any] = []
    for key, value in state.items():
        if key in ("input_states", "source_iterator_states", "source_states") and isinstance(value, (list, tuple)):
            sources += value
        elif key == "shards" and isinstance(value, dict):
            for shard, saved in value.items():
                sources.append(dict({"shard": shard}, **saved) if isinstance(saved, dict) else saved)
        elif key in ("source_state", "control_iterator_state") or key == "state" and "shard" in state:
            sources.append(value)
        else:
            own[key] = value
    names = (name for name, keys in _STAGES if keys.issubset(state))
    return next(names, "stage"), own, sources


def _block_shuffle(state: Any) -> Optional[Tuple[str, Any, List[Any]]]:
    # Its state is written as if three stages made it up.
    try:
        inner = state["source_state"]
        own = {key: state[key] for key in state if key != "source_state"}
        own["random_state"] = inner["recurrent_state"]
        return "BlockwiseShuffleIterator", own, [inner["source_state"]["source_state"]]
    except (KeyError, TypeError):
        return None


def _briefly(values: Any) -> str:
    return ", ".join("{} {}".format(key, _brief(value)) for key, value in values.items() if value is not None)


def _brief(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + _briefly(value) + "}"
    if isinstance(value, (list, tuple)):
        if len(value) == 3 and isinstance(value[1], (list, tuple)) and len(value[1]) == 625:
            return "generator {:08x} at word {} of 624".format(_checksum(_dumps(value)), value[1][-1])
        return "[{} items]".format(len(value))
    return "at its start" if value is None else "{!r:.60}".format(value)
