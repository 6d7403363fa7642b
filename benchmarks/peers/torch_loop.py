"""PyTorch: the loop that most people write, and what all ways share."""

import torch
from torch.nn import functional
from torch.optim import swa_utils

from benchmarks.peers.data import (
    AVERAGE,
    CLASSES,
    DROPOUT,
    EPOCHS,
    FEATURES,
    LEARNING_RATE,
    UNITS,
    make_data,
    make_weights,
)

LAYERS = {
    None: torch.nn.Identity,
    "dropout": lambda: torch.nn.Dropout(DROPOUT),
    "normalization": lambda: torch.nn.BatchNorm1d(UNITS),
}


def make_model(case):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, UNITS),
        torch.nn.Tanh(),
        LAYERS[case.layer](),
        torch.nn.Linear(UNITS, CLASSES),
    )
    kernel, bias, last_kernel, last_bias = map(torch.tensor, make_weights())
    with torch.no_grad():
        model[0].weight.copy_(kernel.T)
        model[0].bias.copy_(bias)
        model[3].weight.copy_(last_kernel.T)
        model[3].bias.copy_(last_bias)
    return model


def make_data_set(case):
    x, y, weights = make_data(case)
    return torch.utils.data.TensorDataset(
        torch.tensor(x), torch.tensor(y), torch.tensor(weights)
    )


def make_optimizer(case, model):
    """Returns the optimizer, and the schedule, which may be a constant one."""
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    if case.schedule:
        schedules = torch.optim.lr_scheduler
        return optimizer, schedules.CosineAnnealingLR(optimizer, case.updates)
    return optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)


def make_average(case, model):
    if not case.average:
        return None
    function = swa_utils.get_ema_multi_avg_fn(AVERAGE)
    average = swa_utils.AveragedModel(model, multi_avg_fn=function)
    average.update_parameters(model)  # begins with the first weights
    return average


def loss_of(case, z, y, weights):
    if case.loss == "pairs":
        return ((z @ z.T - (y[:, None] == y).float()) ** 2).mean()
    losses = functional.cross_entropy(
        z.flatten(0, -2), y.flatten(), reduction="none"
    )
    if case.loss == "mean":
        return losses.mean()
    weights = weights.flatten()
    return (losses * weights).sum() / weights.sum()


def weights_of(model):
    return [
        value.detach().numpy()
        for value in model.state_dict().values()
        if value.is_floating_point()
    ]


def train(case, batch_size, steps):
    model = make_model(case)
    average = make_average(case, model)
    optimizer, scheduler = make_optimizer(case, model)
    loader = torch.utils.data.DataLoader(make_data_set(case), batch_size)
    for _ in range(EPOCHS):
        for i, (x, y, weights) in enumerate(loader):
            loss = loss_of(case, model(x), y, weights) / steps
            loss.backward()
            if (i + 1) % steps == 0 or i + 1 == len(loader):
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                if average:
                    average.update_parameters(model)
    return weights_of(average.module if average else model)
