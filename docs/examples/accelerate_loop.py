"""Hugging Face Accelerate, with the data position in save_state and load_state, on any number of processes:

    torchrun --nproc-per-node 2 accelerate_loop.py FOLDER; torchrun --nproc-per-node 1 accelerate_loop.py FOLDER
"""

import os
import sys

import corpus
import torch
from accelerate import Accelerator

from infinibatch.torch import gather, instance


class Position:
    """The position of all processes: Accelerate writes that of the main one alone."""

    def __init__(self, batches):
        self.batches = batches

    def state_dict(self):
        return gather(self.batches)

    def load_state_dict(self, state):
        self.batches.setstate(state)


accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(1, 1)
# Not the data: its pipeline deals itself out, and accelerator.prepare() would deal out each share again.
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
batches = corpus.make_sharded_batches(corpus.make_corpus(sys.argv[1]), *instance())
accelerator.register_for_checkpointing(Position(batches))
path = os.path.join(sys.argv[1], "accelerate")
if os.path.exists(path):
    accelerator.load_state(path)

for _ in range(12 // accelerator.num_processes):  # one batch of each shard
    batch = next(batches)
    print("rank {}: {}".format(accelerator.process_index, ", ".join(batch)), flush=True)
    optimizer.zero_grad()
    accelerator.backward(corpus.loss(model, batch))
    optimizer.step()
accelerator.save_state(path)
accelerator.end_training()
