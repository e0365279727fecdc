"""Documents to train on: records, their tokens, and rows and batches of them."""
