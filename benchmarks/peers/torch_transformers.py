"""The Trainer of Transformers, with `compute_loss_func` where it helps."""

import tempfile

import torch
import transformers
from torch.nn import functional

from benchmarks.peers import torch_loop
from benchmarks.peers.data import EPOCHS

IGNORED = -100


class Model(torch.nn.Module):
    """Computes its own loss where the Trainer's count of labels is no help."""

    def __init__(self, case):
        super().__init__()
        self.case = case
        self.model = torch_loop.make_model(case)

    def forward(self, x, weights, labels=None):
        z = self.model(x)
        if self.case.loss in ("weighted", "pairs"):
            return {"loss": torch_loop.loss_of(self.case, z, labels, weights)}
        return {"logits": z}


def mean_over_labels(outputs, labels, num_items_in_batch=None):
    """As `ForCausalLM` does: a sum over the labels of all micro-batches."""
    z = outputs["logits"]
    losses = functional.cross_entropy(
        z.flatten(0, -2), labels.flatten(), reduction="sum"
    )
    return losses / num_items_in_batch


def make_data_set(case):
    data = torch_loop.make_data_set(case).tensors
    x, labels, weights = data
    if case.loss == "masked":
        labels = labels.where(weights > 0, IGNORED)
    return [
        {"x": a, "labels": b, "weights": c}
        for a, b, c in zip(x, labels, weights, strict=True)
    ]


class Trainer(transformers.Trainer):
    def _get_train_sampler(self, *args):
        return None  # in order


def train(case, batch_size, steps):
    if case.average:
        raise NotImplementedError  # a callback of one's own
    model = Model(case)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            gradient_accumulation_steps=steps,
            disable_tqdm=True,
            logging_strategy="no",
            max_grad_norm=0.0,
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=batch_size,
            remove_unused_columns=False,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
        )
        counted = case.loss in ("mean", "masked")
        trainer = Trainer(
            model,
            arguments,
            train_dataset=make_data_set(case),
            compute_loss_func=mean_over_labels if counted else None,
            optimizers=torch_loop.make_optimizer(case, model),
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return torch_loop.weights_of(model.model)
