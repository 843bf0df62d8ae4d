"""Ray Train with two workers on a local cluster; started again, it goes on from the checkpoint that is named:

    python ray_train.py FOLDER [--workers 2] [--resume CHECKPOINT]
"""

import argparse
import os
import tempfile

import corpus
import ray.train.torch
import torch

from infinibatch.torch import gather, instance

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=os.path.abspath)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--resume")


def train(config):
    model = ray.train.torch.prepare_model(torch.nn.Linear(1, 1))  # this starts torch.distributed, too
    batches = corpus.make_sharded_batches(corpus.make_corpus(config["folder"]), *instance())
    if config["resume"]:
        batches.setstate(torch.load(os.path.join(config["resume"], "data.pt"), weights_only=True))
    context = ray.train.get_context()
    with open(os.path.join(config["folder"], "seen-{}".format(context.get_world_rank())), "w") as file:
        for _ in range(12 // context.get_world_size()):  # one batch of each shard
            batch = next(batches)
            corpus.loss(model, batch).backward()
            print(*batch, sep="\n", file=file)
    state = gather(batches)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if context.get_world_rank() == 0:
            torch.save(state, os.path.join(folder, "data.pt"))
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({}, checkpoint=checkpoint)


if __name__ == "__main__":
    args = parser.parse_args()
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config=vars(args),
        scaling_config=ray.train.ScalingConfig(num_workers=args.workers, resources_per_worker={"CPU": 0.5}),
        run_config=ray.train.RunConfig(name="run", storage_path=args.folder))
    print("checkpoint:", trainer.fit().checkpoint.path)
