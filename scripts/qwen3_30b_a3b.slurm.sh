#!/usr/bin/env bash
# Train Qwen3-30B-A3B with the backward of the least valuable pairs left out, under Slurm: sbatch --nodes=N scripts/qwen3_30b_a3b.slurm.sh
#
# The variables of qwen3_30b_a3b.sh, and its --dry-run, which prints what srun would start.
#SBATCH --job-name=qwen3_30b_a3b
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
set -euo pipefail

# Slurm runs a copy of this file from elsewhere; the scripts are where the job was submitted, or where SCRIPTS says.
SCRIPTS=${SCRIPTS:-${SLURM_SUBMIT_DIR:-$PWD}/scripts}
NODES=${SLURM_JOB_NODELIST:-}
export NNODES=${SLURM_JOB_NUM_NODES:-1}
export MASTER_ADDR=${MASTER_ADDR:-$(if [ -n "$NODES" ]; then scontrol show hostnames "$NODES" | head -n 1; else echo localhost; fi)}
export MASTER_PORT=${MASTER_PORT:-6000}

# One task a node; SLURM_NODEID is each task's own.
# shellcheck disable=SC2016  # expanded by the task, not here
TASK='NODE_RANK=$SLURM_NODEID exec bash "$0" "$@"'
if [ "${1:-}" = --dry-run ]; then
  printf 'srun --ntasks-per-node=1 bash -c %q %q\n' "$TASK" "$SCRIPTS/qwen3_30b_a3b.sh"
  exec bash "$SCRIPTS/qwen3_30b_a3b.sh" "$@"
fi
exec srun --ntasks-per-node=1 bash -c "$TASK" "$SCRIPTS/qwen3_30b_a3b.sh" "$@"
