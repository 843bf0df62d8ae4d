"""What test_torch.py starts with torchrun on four ranks: rank 0 writes what was seen to the file that is named."""

import datetime
import json
import os
import sys

import torch
import torch.distributed as dist
from test_torch import epoch_of, loader_of, make_finite, make_sharded
from torch.utils.data import DataLoader

from infinibatch.iterators import ChunkedSourceIterator, InfinitePermutationSourceIterator, NativeCheckpointableIterator
from infinibatch.torch import IterableDataset, gather, in_step, instance

results = {}


def on_all_ranks(name, value):
    """Record what each rank has to say."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    results[name] = values


def message_of(function, *arguments, **options):
    try:
        return "returned {!r}".format(function(*arguments, **options))
    except Exception as error:
        return "{}: {}".format(type(error).__name__, error)


def endless(num_instances, instance_rank):
    return InfinitePermutationSourceIterator(range(16), 1, True, num_instances, instance_rank)


def evaluate(items, group, **options):
    """Sum up on all ranks what each of them has, batch by batch, as validation does."""
    seen = []
    for item in in_step(items, group=group, **options):
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        seen.append([item, int(total)])
    return seen


def failing(rank):
    yield 1
    if rank == 1:
        raise KeyError("broken")
    yield from range(100)


dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=40))
rank = dist.get_rank()
three = dist.new_group([0, 1, 2])

on_all_ranks("instance", instance())

# Data loaders

on_all_ranks("finite", epoch_of(loader_of(DataLoader, IterableDataset(make_finite), 2)))
on_all_ranks("endless", epoch_of(loader_of(DataLoader, IterableDataset(endless, 4), 2, persistent=False)))
del os.environ["RANK"], os.environ["WORLD_SIZE"]
on_all_ranks("without variables", instance())

# States

dataset = IterableDataset(make_finite)
next(iter(dataset))
states = [None] * 4
dist.all_gather_object(states, dataset.state_dict())
on_all_ranks("own state", message_of(dataset.load_state_dict, states[rank]))
on_all_ranks("state of another rank", message_of(dataset.load_state_dict, states[rank - 1]))

shards = make_sharded(*instance())
on_all_ranks("before", [next(shards)])
state = gather(shards)
on_all_ranks("merged", state)
shards = make_sharded(*instance())
shards.setstate(state)
on_all_ranks("after", list(shards))

shards = make_sharded(2, rank // 2)  # two processes for each part of the data, as with tensor parallelism
next(shards)
on_all_ranks("merged in pairs", gather(shards))
if rank == 3:
    next(shards)
on_all_ranks("of different moments", message_of(gather, shards))
on_all_ranks("without shards", message_of(gather, NativeCheckpointableIterator([1])))

# Uneven data

if rank < 3:
    part = ChunkedSourceIterator(list(range(10)), 3, rank)
    mine = [evaluate(part, three), evaluate(ChunkedSourceIterator(list(range(10)), 3, rank), three, drop_last=False)]
    mine += [evaluate(ChunkedSourceIterator(["only"], 3, rank), three, drop_last=drop) for drop in (True, False)]
    mine += [evaluate([], three, drop_last=False), message_of(evaluate, failing(rank), three)]
    part = ChunkedSourceIterator(list(range(10)), 3, rank)
    steps = in_step(part, group=three)
    next(steps)
    mine.append(part.getstate()["num_items_yielded"])
else:
    mine = None
on_all_ranks("uneven", mine)

if rank == 0:
    with open(sys.argv[1], "w") as file:
        json.dump(results, file)
dist.destroy_process_group()
