"""Pipelines described as plain data, for the reference files under ``data``.

A description is an object: ``op`` names a class or function of `infinibatch.iterators` or `infinibatch.datasets`, the
other keys are its parameters. Where a parameter is no plain data: sources are descriptions, functions are names from
the table here, ``items`` is what a source is made of (``iterable`` or ``source_items``), ``sources`` are positional,
and ``chunks`` holds the items of each chunk of a chunked data set, with ``"reader": "gz"`` read from gzip files.
"""

import gzip
import json
import os
import zlib
from functools import partial

from infinibatch import datasets, iterators

FUNCTION_PARAMETERS = ("transform", "collection_selector", "key", "batch_size", "boundary_key", "step_function")


def build(description, folder=None):
    """Build the pipeline; chunk files, if it reads any, are written to the folder."""
    parameters = dict(description)
    op = parameters.pop("op")
    positional = [build(source, folder) for source in parameters.pop("sources", [])]
    for name in ("source_iterator", "control_iterator"):
        if name in parameters:
            parameters[name] = build(parameters[name], folder)
    if "source_iterators" in parameters:
        parameters["source_iterators"] = [build(source, folder) for source in parameters["source_iterators"]]
    if "items" in parameters:
        parameters["iterable" if op == "NativeCheckpointableIterator" else "source_items"] = parameters.pop("items")
    if "chunks" in parameters:
        chunks = parameters.pop("chunks")
        if parameters.pop("reader", None) == "gz":
            parameters["chunk_refs"], parameters["read_chunk_fn"] = write_gzip_chunks(chunks, folder), read_gzip_lines
        else:
            parameters["chunk_refs"] = list(range(len(chunks)))
            parameters["read_chunk_fn"] = partial(read_chunk, chunks)
    for name in FUNCTION_PARAMETERS:
        if isinstance(parameters.get(name), str):
            parameters[name] = globals()[parameters[name]]
    module = datasets if op == "chunked_dataset_iterator" else iterators
    return getattr(module, op)(*positional, **parameters)


def as_json(value):
    """Return what the value is after a way through JSON."""
    return json.loads(json.dumps(value))


def read_chunk(chunks, index):
    return iter(chunks[index])


def write_gzip_chunks(chunks, folder):
    paths = []
    for index, lines in enumerate(chunks):
        paths.append(os.path.join(folder, "corpus.{:02}.txt.gz".format(index)))
        if not os.path.exists(paths[-1]):
            with gzip.open(paths[-1], "wt", encoding="utf-8") as file:
                file.writelines(line + "\n" for line in lines)
    return sorted(paths)


def read_gzip_lines(path):
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return iter(file.read().splitlines())


def canon(x):
    return json.dumps(x)


def crc(x):
    return zlib.crc32(canon(x).encode("ascii"))


def map_pair(x):
    return x, crc(x) % 10


def map_none_some(x):
    return None if crc(x) % 4 == 0 else x


def map_crc(x):
    return crc(x) % 1000


def map_index_float2(x):
    return int(x * 2)


def tr_upper(x):
    return x.upper()


def sel_range(x):
    return [(crc(x) % 100, i) for i in range(1 + crc(x) % 4)]


def sel_gen(x):
    yield x
    yield canon(x)[:5]


def key_chars(x):
    return len(x)


def key_len(x):
    return len(canon(x))


def key_crc(x):
    return crc(x) % 50


def bs_150chars(x):
    return 150 // len(x)


def bs_min1(x):
    return max(1, 60 // len(canon(x)))


def bs_dyn40(x):
    return 40 // len(canon(x))


def bk_text(x):
    return canon(x)[:1]


def bk_crc3(x):
    return crc(x) % 3


def step_sum(state, x):
    total = (state or 0) + crc(x) % 100
    return total, total


def step_append(state, x):
    state.append(crc(x) % 10)
    return state, list(state[-3:])


def rnd_rand(random, x):
    return x, random.random()


def rnd_randint(random, x):
    return random.randint(0, 99), x


def rnd_gauss(random, x):
    return x, round(random.gauss(0, 1), 9)


def rnd_shuffle_copy(random, x):
    y = list(x) if isinstance(x, (list, tuple)) else list(canon(x)[:6])
    random.shuffle(y)
    return y
