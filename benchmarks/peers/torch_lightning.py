"""Lightning: `Trainer(accumulate_grad_batches=...)`."""

import logging
import warnings

import lightning
import torch
from lightning.pytorch import callbacks

from benchmarks.peers import torch_loop
from benchmarks.peers.data import AVERAGE, EPOCHS

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class Module(lightning.LightningModule):
    def __init__(self, case):
        super().__init__()
        self.case = case
        self.model = torch_loop.make_model(case)

    def training_step(self, batch):
        x, y, weights = batch
        return torch_loop.loss_of(self.case, self.model(x), y, weights)

    def configure_optimizers(self):
        optimizer, scheduler = torch_loop.make_optimizer(self.case, self.model)
        scheduler = {"scheduler": scheduler, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def train(case, batch_size, steps):
    module = Module(case)
    average = callbacks.EMAWeightAveraging(decay=AVERAGE)
    loader = torch.utils.data.DataLoader(
        torch_loop.make_data_set(case), batch_size
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        accumulate_grad_batches=steps,
        callbacks=[average] if case.average else [],
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
        max_epochs=EPOCHS,
    )
    trainer.fit(module, loader)
    return torch_loop.weights_of(module.model)
