#!/bin/bash
# On every node (NODES of them, HEAD is the first one's address); a process for each GPU:
#   NODES=2 HEAD=node-0 bash examples/cluster/torchrun.sh train.py
# torchrun starts, watches and restarts the processes; `fz.join()` in the script reads its variables.
exec torchrun --nnodes "${NODES:-1}" --nproc-per-node "${GPUS:-8}" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-endpoint "${HEAD:-localhost}:29400" "$@"
