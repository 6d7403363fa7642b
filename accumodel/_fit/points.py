"""The points at which features take part in a training.

The core is the promise: sums, weights, the split, the loop, the step, `fit`. It
knows no feature by its name. `model.py` gives it a list of classes, `compile`
makes one of each that is on, and the core asks them at these points. A feature
has a method for each point that it takes part in.

| point                          | asked                                       |
|--------------------------------|---------------------------------------------|
| `is_on(options)`               | when options change; static: whether the    |
|                                | feature is to be made                       |
| `check(model, options)`        | before that; static: raises                 |
| `ARGUMENTS`, `CONFLICTS`       | after that: its arguments of `compile`, and |
|                                | a dict of what they cannot be combined with |
| `is_needed()`                  | when a step is planned                      |
| `begin_fit(given)`,            | by `fit`, with its arguments by name, and   |
| `end_epoch(logs)`              | at the end of each epoch                    |
| `first_batches(batches,        | before each run of a function; returns the  |
| trains)`                       | same batches                                |
| `around(function, trains)`     | for what to call instead of a function      |
| `around_batch()`,              | for scopes in which a fed batch, or one of  |
| `around_parts(plan, trains)`   | its micro-batches, is traced                |
| `order(plan, data)`            | for a fed batch that is put in order, and   |
|                                | knows how to cut each micro-batch           |
| `train(plan, fed_batch, data)`,| instead of the loop over the micro-batches  |
| `test(plan, data)`             |                                             |
| `keeps_test_step()`            | whether a custom one gets the batch whole   |
| `call_compiled(function, data)`| to run what XLA compiled for a micro-batch  |
| `check_graph(graph)`           | when a micro-batch was traced               |
| `current_size()`               | for the largest micro-batch so far          |
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
