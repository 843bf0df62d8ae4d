"""Lightning's Trainer, killed in mid-epoch and resumed from its last checkpoint, which holds the data position:

    python lightning_trainer.py FOLDER --crash-at 40; python lightning_trainer.py FOLDER
"""

import argparse
import os
import signal

import corpus
import lightning
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from infinibatch.torch import IterableDataset

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--crash-at", type=int)
args = parser.parse_args()
chunks = corpus.make_corpus(args.folder)


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(1, 1)

    def training_step(self, batch):
        print("epoch {} step {}: {}".format(self.current_epoch, self.global_step, ", ".join(batch)), flush=True)
        if self.global_step == args.crash_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return corpus.loss(self.model, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def make_iterator(num_instances, instance_rank):
    return corpus.make_batches(chunks, num_instances, instance_rank)


# Without a length, Lightning would read one batch ahead of what it trains on, and save that position.
dataset = IterableDataset(make_iterator, epoch_size=30)
loader = StatefulDataLoader(dataset, batch_size=None, collate_fn=list, num_workers=args.workers)
saving = lightning.pytorch.callbacks.ModelCheckpoint(args.folder, filename="last", every_n_train_steps=7, save_top_k=1,
                                                     enable_version_counter=False)
trainer = lightning.Trainer(max_epochs=3, callbacks=[saving], logger=False, accelerator="cpu",
                            enable_progress_bar=False, enable_model_summary=False)
lightning.seed_everything(1)
module = Module()
path = os.path.join(args.folder, "last.ckpt")
trainer.fit(module, loader, ckpt_path=path if os.path.exists(path) else None)
print("weight {!r}".format(module.model.weight.item()))
