"""A training loop that may be killed at any moment and ends as if it had not been:

    python train.py FOLDER --steps 50 --crash-at 37; python train.py FOLDER --steps 50
"""

import argparse
import os
import signal

import corpus
import torch

from infinibatch.torch import instance

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--crash-at", type=int)
args = parser.parse_args()

torch.manual_seed(1)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
batches = corpus.make_batches(corpus.make_corpus(args.folder), *instance())
step, path = 0, os.path.join(args.folder, "checkpoint.pt")

if os.path.exists(path):
    saved = torch.load(path, weights_only=True)
    step = saved["step"]
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    batches.setstate(saved["data"])
    print("continuing at step", step)

while step < args.steps:
    loss = corpus.loss(model, next(batches))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if step == args.crash_at:
        os.kill(os.getpid(), signal.SIGKILL)
    if step % 10 == 0:
        state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(dict(state, data=batches.getstate()), path + ".new")
        os.replace(path + ".new", path)  # all at once: a kill leaves the old file or the new one

print("weight {!r}, bias {!r}".format(model.weight.item(), model.bias.item()))
