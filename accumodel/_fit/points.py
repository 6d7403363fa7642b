"""The points at which features take part in a training.

The core is the promise: sums, weights, the split, the loop, the step, `fit`. It
knows no feature by its name. `model.py` gives it a list of classes, `compile`
makes one of each that is on, and here is where they are called. A feature has a
method for each point that it takes part in, and `is_on`, which says whether the
options of `compile` ask for it.

| point                         | called                                       |
|-------------------------------|----------------------------------------------|
| `begin_fit(given)`            | by `fit`, with its arguments by name         |
| `first_batches(batches,       | before a function runs for the first time;   |
| trains)`                      | returns the same batches                     |
| `end_batch(plan, train_step)` | when all micro-batches of a fed batch were   |
|                               | added, and before it counts                  |
"""


class Features(tuple):
    """The features of a model that are on."""

    def at(self, point):
        """Returns the methods of this name, of those that have it."""
        return [getattr(each, point) for each in self if hasattr(each, point)]
