"""Write ``data/legacy``: checkpoints that Infinibatch 0.1.1 took, and the items that followed in 0.1.1.

Run where that version is installed and this tree's package is not on the path::

    python test/generate_legacy.py

Both files are compressed by gzip. ``checkpoints.json.gz`` holds, for each pipeline of the table here, a list of objects
with the state at a position, the items from there (a tuple is written as a list; at most AHEAD), whether the end of
the data follows them, and whether the state was taken after the end had been met. ``checkpoints.pickle.gz``, protocol
2, holds the states alone, in the same order.
"""

import gzip
import io
import json
import os
import pickle

from described_pipelines import as_json, build

AHEAD = 20
FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", "legacy")

WORDS = "zinc oak river a stone bright cloud it meadow of lantern by harbour so quiet ember on willow pine up".split()
LINES = [" ".join(WORDS[(i * 7 + k * 3) % len(WORDS)] for k in range(1 + i * 5 % 8)) for i in range(40)]
CHUNKS = [LINES[start : start + 2 + start % 4] for start in (0, 2, 6, 9, 14, 16, 20, 24)]


def stage(op, **parameters):
    return dict(parameters, op=op)


def on(source_iterator, op, **parameters):
    return stage(op, source_iterator=source_iterator, **parameters)


def native(items):
    return stage("NativeCheckpointableIterator", items=items)


def source(items, **parameters):
    return stage("InfinitePermutationSourceIterator", items=items, **parameters)


def dataset(**parameters):
    return stage("chunked_dataset_iterator", chunks=CHUNKS, buffer_size=7, **parameters)


# name -> (description, positions at which checkpoints are taken; those beyond the end stand for the end)
PIPELINES = {
    "native": (native(list(range(9))), [0, 1, 5, 9, 99]),
    "permutations": (source(list(range(7)), seed=11), [0, 1, 6, 7, 8, 14, 30]),
    "permutations, seed as text": (source(list(range(7)), seed="eleven"), [0, 7, 9]),
    "permutations, not shuffled": (source(WORDS[:5], shuffle=False), [0, 4, 5, 13]),
    "permutations, rank 1 of 3": (source(list(range(7)), seed=12, num_instances=3, instance_rank=1), [0, 2, 3, 12]),
    "permutations, rank 4 of 5, fewer items than ranks": (
        source([1, 2, 3], seed=13, num_instances=5, instance_rank=4),
        [0, 1, 2, 9],
    ),
    "chunk of a list, rank 1 of 3": (
        stage("ChunkedSourceIterator", items=list(range(10)), num_instances=3, instance_rank=1),
        [0, 1, 3, 99],
    ),
    "source for training": (
        stage("create_source_iterator", items=WORDS, seed=14, num_instances=2, instance_rank=1),
        [0, 9, 10, 11],
    ),
    "source for inference": (
        stage("create_source_iterator", items=WORDS, train=False, shuffle=False, num_instances=2, instance_rank=1),
        [0, 4, 99],
    ),
    "select many, lists": (on(native([[1, 2], [], [3], [], [], [4, 5, 6], []]), "SelectManyIterator"), list(range(8))),
    "select many, selector": (
        on(source(list(range(6)), seed=15), "SelectManyIterator", collection_selector="sel_range"),
        [0, 1, 2, 3, 17, 40],
    ),
    "select many, generator": (
        on(native(WORDS), "SelectManyIterator", collection_selector="sel_gen"),
        [0, 1, 2, 25, 99],
    ),
    "map": (on(native(WORDS), "MapIterator", transform="map_none_some"), [0, 3, 20, 99]),
    "parallel map": (
        on(
            native(list(range(23))),
            "ParallelMapIterator",
            transform="map_pair",
            num_processes=2,
            num_items_per_process=3,
        ),
        [0, 1, 5, 6, 7, 12, 22, 99],
    ),
    "parallel map, endless": (
        on(
            source(WORDS, seed=16),
            "ParallelMapIterator",
            transform="tr_upper",
            num_processes=3,
            num_items_per_process=2,
        ),
        [0, 6, 20, 31],
    ),
    "zip": (
        stage("ZipIterator", sources=[native(WORDS[:6]), source([1, 2, 3], seed=17), native(list(range(9)))]),
        [0, 3, 4, 6, 99],
    ),
    "windows": (on(native(list(range(13))), "WindowedIterator", width=4), [0, 1, 3, 4, 5, 9, 10, 99]),
    "windows over permutations": (on(source([1, 2, 3, 4], seed=18), "WindowedIterator", width=3), [0, 2, 3, 10]),
    "fixed batches": (on(native(list(range(11))), "FixedBatchIterator", batch_size=4), [0, 1, 2, 3, 99]),
    "fixed batches of permutations": (on(source(WORDS, seed=19), "FixedBatchIterator", batch_size=6), [0, 3, 4, 11]),
    "random numbers": (stage("RandomIterator", seed=20), [0, 1, 7]),
    "recurrent": (on(native(WORDS), "RecurrentIterator", step_function="step_sum", initial_state=3), [0, 1, 9, 99]),
    "recurrent, state changed in place": (
        on(native(WORDS), "RecurrentIterator", step_function="step_append", initial_state=[1]),
        [0, 1, 9, 99],
    ),
    "random map": (on(native(WORDS), "SamplingRandomMapIterator", transform="rnd_randint", seed=21), [0, 1, 13, 99]),
    "random map, gauss": (
        on(source(WORDS[:3], seed=22), "SamplingRandomMapIterator", transform="rnd_gauss", seed="t"),
        [0, 3, 4],
    ),
    "blockwise shuffle": (
        on(native(list(range(17))), "BlockwiseShuffleIterator", block_size=5, seed=23),
        [0, 1, 4, 5, 6, 15, 16, 17, 99],
    ),
    "blockwise shuffle, default seed, endless": (
        on(source(list(range(6)), seed=24), "BlockwiseShuffleIterator", block_size=4),
        [0, 4, 7, 24],
    ),
    "buffered shuffle": (
        on(native(list(range(17))), "BufferedShuffleIterator", buffer_size=5, seed=25),
        [0, 1, 7, 12, 15, 99],
    ),
    "buffered shuffle larger than the data": (
        on(native(WORDS[:8]), "BufferedShuffleIterator", buffer_size=40, seed=26),
        [0, 3, 99],
    ),
    "buckets": (
        on(native(LINES), "BucketedReadaheadBatchIterator", read_ahead=15, key="key_chars", batch_size=4, seed=27),
        [0, 1, 3, 4, 5, 8, 99],
    ),
    "buckets, dynamic size and boundary": (
        on(
            source(LINES, seed=28),
            "BucketedReadaheadBatchIterator",
            read_ahead=12,
            key="key_len",
            batch_size="bs_dyn40",
            boundary_key="bk_crc3",
            seed=29,
        ),
        [0, 1, 30],
    ),
    "buckets, no key, not shuffled": (
        on(
            native(LINES),
            "BucketedReadaheadBatchIterator",
            read_ahead=9,
            key=None,
            batch_size="bs_150chars",
            shuffle=False,
        ),
        [0, 2, 5, 99],
    ),
    "buckets in buckets": (
        on(
            on(
                dataset(seed=30),
                "BucketedReadaheadBatchIterator",
                read_ahead=10,
                key="key_chars",
                batch_size=3,
                seed=31,
            ),
            "BucketedReadaheadBatchIterator",
            read_ahead=4,
            key="key_len",
            batch_size="bs_min1",
            seed=32,
        ),
        [0, 1, 9],
    ),
    "multiplex": (
        stage(
            "MultiplexIterator",
            control_iterator=native([0, 1, 1, 0, 2, 1, 0]),
            source_iterators=[native([1, 2, 3]), native([10, 20, 30]), source(WORDS[:3], seed=33)],
        ),
        [0, 1, 4, 5, 7, 99],
    ),
    "multiplex, random control": (
        stage(
            "MultiplexIterator",
            control_iterator=on(stage("RandomIterator", seed=34), "MapIterator", transform="map_index_float2"),
            source_iterators=[
                source(WORDS[:5], seed=35),
                on(native(list(range(60))), "MapIterator", transform="map_crc"),
            ],
        ),
        [0, 5, 14],
    ),
    "prefetch": (on(native(list(range(19))), "PrefetchIterator", buffer_size=4), [0, 1, 4, 5, 8, 18, 19, 99]),
    "prefetch, buffer in the main process": (
        on(native(list(range(19))), "PrefetchIterator", buffer_size=4, buffer_in_main_process=True),
        [0, 1, 4, 5, 8, 18, 19, 99],
    ),
    "prefetched batches": (
        on(
            on(
                dataset(seed=36), "BucketedReadaheadBatchIterator", read_ahead=8, key="key_chars", batch_size=3, seed=37
            ),
            "PrefetchIterator",
            buffer_size=3,
        ),
        [0, 2, 3, 10],
    ),
    "sampled, windowed, batched": (
        on(
            on(
                on(dataset(seed=38, shuffle=False), "SamplingRandomMapIterator", transform="rnd_rand", seed=39),
                "WindowedIterator",
                width=2,
            ),
            "FixedBatchIterator",
            batch_size=3,
        ),
        [0, 1, 7],
    ),
}

# The data set with every combination of its options.
for number, (kind, transform, prefetch, instances) in enumerate(
    (kind, transform, prefetch, instances)
    for kind in ("blockwise", "windowed", "not shuffled", "inference")
    for transform in (None, "tr_upper")
    for prefetch in (False, True)
    for instances in (1, 2)
):
    parameters = {"seed": 40, "transform": transform, "prefetch": prefetch}
    parameters.update(num_instances=instances, instance_rank=instances - 1)
    if kind == "windowed":
        parameters["use_windowed"] = True
    elif kind == "not shuffled":
        parameters["shuffle"] = False
    elif kind == "inference":
        parameters.update(seed=None, train=False, shuffle=False)
    name = "data set, {}, transform {}, prefetch {}, instance {} of {}".format(
        kind, transform, prefetch, instances - 1, instances
    )
    PIPELINES[name] = (dataset(**parameters), [0, 1 + number % 9, 99 if kind == "inference" else 20 + number % 9])


def read(iterator, num_items):
    """Return up to so many items, and whether the end came before."""
    items = []
    while len(items) < num_items:
        try:
            items.append(next(iterator))
        except StopIteration:
            return items, True
    return items, False


def entries_of(description, positions):
    """Return the states of one pipeline, with the items that follow them."""
    iterator = build(description)
    items, ended = read(iterator, max(positions) + AHEAD)
    iterator.close()
    entries = []
    for position in positions:
        iterator = build(description)
        before, after_end = read(iterator, position)
        state = iterator.getstate()
        iterator.close()
        following = items[len(before) :][:AHEAD]
        entries.append(
            {
                "position": len(before),
                "after_end": after_end,
                "state": state,
                "items": as_json(following),
                "ends": ended and len(before) + len(following) == len(items),
            }
        )
        restored = build(description)
        restored.setstate(state)
        again, _ = read(restored, len(following))
        restored.close()
        if again != following:
            print("0.1.1 itself does not restore", description["op"], position)
    return entries


def write(name, data):
    with open(os.path.join(FOLDER, name), "wb") as file:
        with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as compressed:
            compressed.write(data)


def main():
    checkpoints = {name: entries_of(*PIPELINES[name]) for name in sorted(PIPELINES)}
    states = {name: [entry["state"] for entry in entries] for name, entries in checkpoints.items()}
    write("checkpoints.json.gz", json.dumps(checkpoints, indent=0).encode("ascii"))
    pickled = io.BytesIO()
    pickle.dump(states, pickled, protocol=2)
    write("checkpoints.pickle.gz", pickled.getvalue())


if __name__ == "__main__":
    main()
