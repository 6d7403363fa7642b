"""One micro-batch: how it is split off, what it computes, weighs and logs."""
