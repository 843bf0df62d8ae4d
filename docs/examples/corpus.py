"""What the examples share: a small corpus, and the pipeline that reads it."""

import gzip
import os

import torch

from infinibatch import datasets, iterators, readers


def make_corpus(folder):
    """Write 24 chunks of 10 lines each, unless they are there, and return their paths."""
    for number in range(24):
        path = os.path.join(folder, "chunk-{}.gz".format(number))
        if not os.path.exists(path):
            lines = ["line {}{}\n".format(10 * number + i, " and more" * (i % 5)) for i in range(10)]
            temporary = "{}.{}".format(path, os.getpid())  # every process of a job may do this
            with open(temporary, "wb") as file:
                file.write(gzip.compress("".join(lines).encode()))
            os.replace(temporary, path)
    return readers.find_chunks(os.path.join(folder, "chunk-*.gz"))


def make_batches(chunks, num_instances=1, instance_rank=0, num_epochs=None):
    """Return lines of like length in batches, for one of several processes."""
    lines = datasets.chunked_dataset_iterator(
        chunks, readers.read_lines, 60, seed=1, num_epochs=num_epochs,
        num_instances=num_instances, instance_rank=instance_rank)
    return iterators.BucketedReadaheadBatchIterator(lines, read_ahead=20, key=len, batch_size=5, seed=2)


def make_sharded_batches(chunks, num_instances, instance_rank, num_epochs=None):
    """Return the same for a run that may go on with another number of processes: 12 shards, shared out among them."""
    return datasets.sharded_dataset_iterator(
        chunks, readers.read_lines, 60, num_shards=12, seed=1, num_epochs=num_epochs,
        make_batches=lambda lines: iterators.FixedBatchIterator(lines, 5),
        num_instances=num_instances, instance_rank=instance_rank)


def loss(model, lines):
    """Return how badly the model tells the number of words from the number of characters."""
    characters = torch.tensor([[len(line) / 10] for line in lines])
    words = torch.tensor([[float(len(line.split()))] for line in lines])
    return torch.nn.functional.mse_loss(model(characters), words)
