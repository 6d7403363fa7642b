"""Accelerate: `with accelerator.accumulate(model)`."""

import accelerate
import torch

from benchmarks.peers import torch_loop
from benchmarks.peers.data import EPOCHS


def train(case, batch_size, steps):
    accelerator = accelerate.Accelerator(
        cpu=True, gradient_accumulation_steps=steps
    )
    model = torch_loop.make_model(case)
    average = torch_loop.make_average(case, model)
    loader = torch.utils.data.DataLoader(
        torch_loop.make_data_set(case), batch_size
    )
    model, optimizer, scheduler, loader = accelerator.prepare(
        model, *torch_loop.make_optimizer(case, model), loader
    )
    for _ in range(EPOCHS):
        for x, y, weights in loader:
            with accelerator.accumulate(model):
                loss = torch_loop.loss_of(case, model(x), y, weights)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if average and accelerator.sync_gradients:
                average.update_parameters(model)
    return torch_loop.weights_of(average.module if average else model)
