"""Checkpoint formats: readers give a `Checkpoint` of lazy tensors, writers take one (not `peft`).

- `content`: what a checkpoint holds, whatever its format; `state` makes it of a training state,
  `adapters` of an adapter, `adam` of an optimizer.
- `files` and `write` write it, `staging` whole or not at all, `multiprocess_write` and `turns` in
  several processes; `stream` gives it away tensor by tensor. `read` finds out what a path is;
  `restore` makes a state of it, under the module's names (`names_in_files`). `remote`: the same in
  object stores.
- One format each: `safetensors_files`, `torch_files` (`mapped_tensors` reads slices of them), `dcp`
  and `dcp_write`, `deepspeed` (reads a directory: its `deepspeed_files`, of them
  the optimizer's in `deepspeed_zero`, and `deepspeed_universal`), `lightning`, `peft`.
- Adam's moments: `deepspeed_zero` and `deepspeed_universal` read them by parameter, `adam` maps
  them between a torch optimizer's numbers and parameters' names, `restore` puts them into the
  state (`torch_bridge.moments`).
"""
