"""Documents to train on: records, their tokens, and rows and batches of them.

- `records` are read from files, `tokens` made of them, in a `spool`; `rows` of one length of those,
  and `batches` of rows.
- `chat`: what a chat template says of where an answer begins and ends.
"""
