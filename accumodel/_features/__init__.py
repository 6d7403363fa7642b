"""What is not the promise itself: each feature in one module or folder.

Only `model.py` imports this. A feature meets the core in the methods of
`Feature`, in `_micro_batch/feature.py`: to remove one is to remove its home and
its line here.
"""

from accumodel._features import rematerialization
from accumodel._features.auto import Auto, Fastest
from accumodel._features.first_batch.batches import FirstBatch
from accumodel._features.trim_padding import Trimmer
from accumodel._features.whole_batch.stages import WholeBatch
from accumodel._keras_and_tf import hooks

FEATURES = (FirstBatch, Auto, Fastest, WholeBatch, Trimmer)
hooks.replace_rematerialized(rematerialization.rematerialize)
