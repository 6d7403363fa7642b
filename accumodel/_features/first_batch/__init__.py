"""The check on the first batch: is this training that of the large batch?

`batches` takes the first fed batches and says what was found; `check` compares;
`runs` is how a step runs on some samples; `kept` puts all of it back.
"""
