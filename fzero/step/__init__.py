"""Steps: a pure function of a state and a batch, and a shell that checks, places and donates.

- `factories`: `train_step`, `accumulate_step`, `eval_step`, `predict_step`.
- `steps`: the shells that they return.
- `checks`: what a shell refuses before anything runs; `scalars`: numbers, and a key, that users
  wrote into the state.
- `row_sums`: whether a loss is a sum over rows; `row_counts`: whether it counts as one;
  `row_buffers`: whether buffers count rows, `row_kept`: whether they keep them, `row_decays`:
  whether sums decay; `row_traces` traces with other numbers of rows.
- `passes`: gradients and evaluation of a batch, as one program or as a pipeline.
- `compose`: how a pass and an update make a step: one program, or one after the other.
- `update`, `placed_update`, `host_update`: the optimizer's update: as a pure function, by site or
  streamed, and on the host.
- `skips`: what a step that is skipped leaves as it was.
- `looks`: names the first value that is not finite; `values`: what the passes hand to the update.
"""

from fzero.step.factories import accumulate_step as accumulate_step
from fzero.step.factories import eval_step as eval_step
from fzero.step.factories import predict_step as predict_step
from fzero.step.factories import train_step as train_step
