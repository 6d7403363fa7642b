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
    """Features, or their classes."""

    def at(self, *points):
        """Returns what is called so, of those that have it."""
        return [
            getattr(each, point)
            for each in self
            for point in points
            if hasattr(each, point)
        ]

    def needed(self):
        """Returns those that take part in a step."""
        return Features(
            each
            for each in self
            if not hasattr(each, "is_needed") or each.is_needed()
        )
