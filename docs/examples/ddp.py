"""DistributedDataParallel that may be killed, and goes on with any number of processes that divides the 12 shards:

    torchrun --nproc-per-node 4 ddp.py FOLDER --rounds 8; torchrun --nproc-per-node 2 ddp.py FOLDER --rounds 16
"""

import argparse
import os
import signal

import corpus
import torch
import torch.distributed as dist

from infinibatch.torch import gather, in_step, instance

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--rounds", type=int, help="stop after so many batches of each shard")
parser.add_argument("--epochs", type=int, help="how often to go through the data (default: endlessly)")
parser.add_argument("--crash-at", type=int, help="step in which rank 0 is killed")
args = parser.parse_args()

dist.init_process_group("gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batches = corpus.make_sharded_batches(corpus.make_corpus(args.folder), *instance(), num_epochs=args.epochs)
done, path = 0, os.path.join(args.folder, "ddp.pt")
if os.path.exists(path):
    saved = torch.load(path, weights_only=True)
    done = saved["round"]
    model.load_state_dict(saved["model"])
    batches.setstate(saved["data"])  # that of all ranks; each takes what it serves

last = None
for step, batch in enumerate(in_step(batches, drop_last=False), start=1):
    loss = corpus.loss(model, batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if batch is not last:  # at the end of the data, who has no more repeats its last batch
        print("round {} rank {} of {}: {}".format(done, rank, num_ranks, ", ".join(batch)), flush=True)
    last = batch
    if step == args.crash_at and rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if step % (12 // num_ranks) == 0:  # each shard has given one more batch
        done += 1
        data = gather(batches)
        if rank == 0:
            torch.save({"round": done, "model": model.state_dict(), "data": data}, path + ".new")
            os.replace(path + ".new", path)
        if done == args.rounds:
            break

dist.barrier()  # no rank leaves while another may still need it
dist.destroy_process_group()
