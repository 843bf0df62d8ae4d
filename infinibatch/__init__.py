r'''
Randomised loading of data sets far larger than memory, with checkpoints that restore bit for bit.

Infinibatch is a library of *checkpointable iterators* in pure Python, without dependencies. One reads a corpus that is
stored in chunks, another shuffles it, another groups lines of like length into batches; each takes another one as its
source, so that together they form a pipeline. At any moment a pipeline says in a few kilobytes where it is
(`getstate`), and another one built alike goes on from there (`setstate`), with exactly the item that would have come
next.

This page is a tutorial: it builds the pipeline of a typical training run, step by step. Its examples run as they stand.

# Data preparation

Infinibatch reads a data set that is cut into *chunks*: files of which any one fits into memory, which can be read in
any order, and of which there are many more than GPUs. What is in them is up to you. Here a corpus of six lines of text
goes into three chunks, gzip files with one line of text for each item:

>>> import gzip, os, tempfile
>>> corpus = [
...     "Lorem ipsum dolor sit amet,",
...     "consectetur adipiscing elit,",
...     "sed do eiusmod tempor incididunt",
...     "ut labore et dolore magna aliqua.",
...     "Ut enim ad minim veniam,",
...     "quis nostrud exercitation ullamco laboris nisi",
... ]
>>> folder = tempfile.TemporaryDirectory()
>>> for i in range(3):
...     with gzip.open(os.path.join(folder.name, "corpus-{}.txt.gz".format(i)), "wt", encoding="utf-8") as chunk:
...         print(*corpus[2 * i : 2 * i + 2], sep="\n", file=chunk)

`infinibatch.readers.find_chunks` lists them, in an order that is the same on every machine. That matters: a checkpoint
counts on the same list.

>>> from infinibatch.readers import find_chunks
>>> chunks = find_chunks(os.path.join(folder.name, "corpus-*.txt.gz"))
>>> [os.path.basename(path) for path in chunks]
['corpus-0.txt.gz', 'corpus-1.txt.gz', 'corpus-2.txt.gz']

# Reading the lines in random order

`infinibatch.datasets.chunked_dataset_iterator` makes the usual pipeline: it permutes the chunks, reads one after the
other, and shuffles the items of `buffer_size` at a time, which is all that is in memory. The larger the buffer, the
better items of different chunks are mixed; a million lines of text is common. The other thing it needs is a function
that gets what names a chunk and returns its items; `infinibatch.readers.read_lines` is one.

>>> from infinibatch.datasets import chunked_dataset_iterator
>>> from infinibatch.readers import read_lines
>>> lines = chunked_dataset_iterator(chunks, read_lines, buffer_size=6, seed=1)
>>> for _ in range(6):
...     print(next(lines))
Ut enim ad minim veniam,
quis nostrud exercitation ullamco laboris nisi
ut labore et dolore magna aliqua.
Lorem ipsum dolor sit amet,
consectetur adipiscing elit,
sed do eiusmod tempor incididunt

The stream does not end: the next item is the first one of another permutation.

>>> next(lines)
'quis nostrud exercitation ullamco laboris nisi'

With several GPUs each process builds the same pipeline with `num_instances`, the number of GPUs, and `instance_rank`,
its own number. The permuted chunks are dealt out among them, so that no two read the same.

>>> for rank in range(2):
...     part = chunked_dataset_iterator(chunks, read_lines, buffer_size=6, seed=1, num_instances=2, instance_rank=rank)
...     print(rank, next(part))
0 Lorem ipsum dolor sit amet,
1 Ut enim ad minim veniam,

# Batches of lines of like length

A batch is padded to its longest line, so lines of like length should share one.
`infinibatch.iterators.BucketedReadaheadBatchIterator` reads ahead, sorts what it has read by length, cuts it into
batches, and returns these in random order. Here it reads six lines ahead; thousands are usual.

>>> from infinibatch.iterators import BucketedReadaheadBatchIterator
>>> lines = chunked_dataset_iterator(chunks, read_lines, buffer_size=6, seed=1)
>>> batches = BucketedReadaheadBatchIterator(lines, read_ahead=6, key=len, batch_size=2, seed=1)
>>> for _ in range(3):
...     print(next(batches))
['sed do eiusmod tempor incididunt', 'consectetur adipiscing elit,']
['Lorem ipsum dolor sit amet,', 'Ut enim ad minim veniam,']
['quis nostrud exercitation ullamco laboris nisi', 'ut labore et dolore magna aliqua.']

What fits into a GPU is a number of tokens, not of lines. So `batch_size` may be a function: it gets the first, longest
line of a batch and returns how many lines the batch shall have. Batches of up to 150 characters, padding included:

>>> lines = chunked_dataset_iterator(chunks, read_lines, buffer_size=6, seed=1)
>>> batches = BucketedReadaheadBatchIterator(
...     lines, read_ahead=6, key=len, batch_size=lambda longest: 150 // len(longest), seed=1
... )
>>> for _ in range(2):
...     print(*next(batches), sep=" | ")
consectetur adipiscing elit, | Lorem ipsum dolor sit amet, | Ut enim ad minim veniam,
quis nostrud exercitation ullamco laboris nisi | ut labore et dolore magna aliqua. | sed do eiusmod tempor incididunt

# From batches to arrays

`infinibatch.iterators.MapIterator` applies a function to each item. This one turns the lines of a batch into numbers
and pads them, into what `numpy.array` or `torch.tensor` takes:

>>> from infinibatch.iterators import MapIterator
>>> def collate(batch):
...     width = max(map(len, batch))
...     return [[ord(character) for character in line] + [0] * (width - len(line)) for line in batch]
>>> arrays = MapIterator(batches, collate)
>>> array = next(arrays)
>>> len(array), len(array[0])
(3, 28)

# Checkpoints

The last iterator stands for the whole pipeline: ask it where it is, and nobody else. What it returns is plain data of
a few kilobytes, which does not grow with the data set.

>>> checkpoint = arrays.getstate()
>>> expected = [next(arrays) for _ in range(10)]
>>> arrays.setstate(checkpoint)
>>> [next(arrays) for _ in range(10)] == expected
True

The same checkpoint works in a second pipeline that is built in the same way, in another process, on another machine,
under another version of Python. `infinibatch.checkpoint` keeps it in a file:

>>> from infinibatch.checkpoint import load, save
>>> save(arrays, os.path.join(folder.name, "position.json"))
>>> expected = next(arrays)
>>> def make_pipeline():
...     lines = chunked_dataset_iterator(chunks, read_lines, buffer_size=6, seed=1)
...     batches = BucketedReadaheadBatchIterator(
...         lines, read_ahead=6, key=len, batch_size=lambda longest: 150 // len(longest), seed=1
...     )
...     return MapIterator(batches, collate)
>>> resumed = make_pipeline()
>>> load(resumed, os.path.join(folder.name, "position.json"))
>>> next(resumed) == expected
True
>>> folder.cleanup()

# Where to go next

- `infinibatch.iterators` has all the stages, and is the advanced guide: what is lazy, who owns what, what a checkpoint
  costs, a complete pipeline for training and one for inference.
- `infinibatch.readers` reads what chunks hold.
- `infinibatch.torch` makes a pipeline a PyTorch data set, and does what several ranks must do together.
- `infinibatch.testing` checks an iterator of your own.
- `python -m infinibatch demo` shows a run that is killed and resumed, `python -m infinibatch stream` shuffles a corpus
  from the shell.
'''
from typing import Any

from . import datasets, iterators
from .datasets import bump_seed, chunked_dataset_iterator, sharded_dataset_iterator
from .iterators import (
    BlockwiseShuffleIterator,
    BucketedReadaheadBatchIterator,
    BufferedShuffleIterator,
    ChainIterator,
    CheckpointableIterator,
    ChunkedSourceIterator,
    EnumerateIterator,
    FilterIterator,
    FixedBatchIterator,
    InfinitePermutationSourceIterator,
    Keyed,
    MapIterator,
    MixIterator,
    MultiplexIterator,
    NativeCheckpointableIterator,
    PackIterator,
    ParallelMapIterator,
    ParallelSelectManyIterator,
    PermutationSourceIterator,
    PrefetchIterator,
    RandomIterator,
    RecurrentIterator,
    SamplingRandomMapIterator,
    SelectManyIterator,
    ShardedIterator,
    TakeIterator,
    WindowedIterator,
    ZipIterator,
    create_source_iterator,
)

__version__ = "0.2.0"

__all__ = [
    "BlockwiseShuffleIterator",
    "BucketedReadaheadBatchIterator",
    "BufferedShuffleIterator",
    "ChainIterator",
    "CheckpointableIterator",
    "ChunkedSourceIterator",
    "EnumerateIterator",
    "FilterIterator",
    "FixedBatchIterator",
    "InfinitePermutationSourceIterator",
    "Keyed",
    "MapIterator",
    "MixIterator",
    "MultiplexIterator",
    "NativeCheckpointableIterator",
    "PackIterator",
    "ParallelMapIterator",
    "ParallelSelectManyIterator",
    "PermutationSourceIterator",
    "PrefetchIterator",
    "RandomIterator",
    "RecurrentIterator",
    "SamplingRandomMapIterator",
    "SelectManyIterator",
    "ShardedIterator",
    "TakeIterator",
    "WindowedIterator",
    "ZipIterator",
    "bump_seed",
    "chunked_dataset_iterator",
    "create_source_iterator",
    "datasets",
    "iterators",
    "sharded_dataset_iterator",
]


def __getattr__(name: str) -> Any:
    if name == "__pdoc__":  # what the generated reference leaves out
        from importlib.util import find_spec

        return {} if find_spec("torch") else {"torch": False}
    raise AttributeError("module {!r} has no attribute {!r}".format(__name__, name))
