#!/usr/bin/env bash
# One process on each of four nodes, which find each other through Slurm's variables:
#     sbatch tools/slurm.sh experiments/ladder/grpo.py --mesh data=-1,fsdp=8 --run-dir /shared/runs/grpo
# Slurm sends SIGTERM 120 seconds before the limit: the run saves, ends with 143 and is queued again.
#SBATCH --job-name=jaxpg
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

srun .venv/bin/python "$@" --distributed --resume || {
    code=$?
    if [ "$code" -eq 143 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
    exit "$code"
}
