#!/bin/bash
# Two nodes of eight GPUs, a process for each GPU:  sbatch examples/cluster/slurm.sh
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=12:00:00
#SBATCH --requeue
# SIGTERM two minutes before the time is over: fzero train saves at an agreed step and exits 0.
#SBATCH --signal=TERM@120

OUT=${OUT:-/shared/run}   # a directory that all nodes see
RESUME=$([ -e "$OUT/run.json" ] && echo --resume)   # also where it has no checkpoint yet

# fzero finds its world in what srun sets. One lost process ends all (exit code 75).
srun --kill-on-bad-exit=1 fzero train --model hf:gpt2.json --data /shared/text/*.txt \
    --out "$OUT" --zero 3 --precision bf16 --batch 256 --save-every 500 $RESUME
