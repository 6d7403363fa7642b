"""What rounding is less than, by dtype: one table for all that compare."""

# Of what is computed once, as a share of its largest entry; and of the weights
# of a training, some of which it moves by 0.01 to 0.1. A GPU multiplies float32
# in TF32: 30 trainings differed by at most 7e-4 there.
_ROUNDING = {
    "float64": (1e-13, 1e-13),
    "float32": (5e-6, 2e-6),
    "TF32": (2e-3, 5e-4),
    "float16": (5e-3, 5e-4),
    "bfloat16": (3e-2, 2e-3),
}


def rounding_of(dtypes, is_trained=False):
    """Returns what rounding is less than in the coarsest of some dtypes."""
    known = [_ROUNDING[each] for each in dtypes if each in _ROUNDING]
    return max([_ROUNDING["float64"], *known])[is_trained]
