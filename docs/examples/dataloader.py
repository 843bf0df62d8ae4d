"""DataLoader and torchdata's StatefulDataLoader, with any number of workers:

    python dataloader.py FOLDER --workers 2
"""

import argparse

import corpus
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from infinibatch.torch import IterableDataset

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--workers", type=int, default=2)
args = parser.parse_args()
chunks = corpus.make_corpus(args.folder)


def make_iterator(num_instances, instance_rank):
    return corpus.make_batches(chunks, num_instances, instance_rank, num_epochs=1)


def make_loader(kind):
    # The pipeline makes the batches: batch_size=None and the identity leave them as they are.
    return kind(
        IterableDataset(make_iterator), batch_size=None, collate_fn=list, num_workers=args.workers,
        persistent_workers=args.workers > 0)


plain = make_loader(DataLoader)
epochs = [list(plain) for _ in range(2)]
for epoch in epochs:
    print(len(epoch), "batches,", len({line for batch in epoch for line in batch}), "different lines")

loader = make_loader(StatefulDataLoader)
seen = []
for number, batch in enumerate(loader, start=1):
    seen.append(batch)
    if number == 7:
        torch.save(loader.state_dict(), args.folder + "/loader.pt")
        break

resumed = make_loader(StatefulDataLoader)
resumed.load_state_dict(torch.load(args.folder + "/loader.pt", weights_only=True))
assert seen + list(resumed) == epochs[0]
assert list(resumed) == epochs[1]
print("resumed exactly")
