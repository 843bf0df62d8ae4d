"""Model and data position in one torch.distributed.checkpoint, restored on any number of processes:

    torchrun --nproc-per-node 4 distributed_checkpoint.py FOLDER
    torchrun --nproc-per-node 2 distributed_checkpoint.py FOLDER
"""

import json
import os
import sys

import corpus
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from infinibatch.torch import gather, instance


class Position:
    """The position of all processes. As text, since a checkpoint takes a dictionary apart, and wants its keys back."""

    def __init__(self, batches):
        self.batches = batches

    def state_dict(self):
        return {"json": json.dumps(gather(self.batches))}

    def load_state_dict(self, state):
        self.batches.setstate(json.loads(state["json"]))


dist.init_process_group("gloo")
path = os.path.join(sys.argv[1], "dcp")
batches = corpus.make_sharded_batches(corpus.make_corpus(sys.argv[1]), *instance())
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
state = {"model": model.state_dict(), "data": Position(batches)}
if os.path.exists(path):
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])

for _ in range(12 // dist.get_world_size()):  # one batch of each shard
    print("rank {}: {}".format(dist.get_rank(), ", ".join(next(batches))), flush=True)
dist.barrier()
dcp.save(state, checkpoint_id=path)
dist.destroy_process_group()
