#!/usr/bin/env bash
# Train GLM-4.5-Air 106B-A12B with the backward of the least valuable pairs left out, under Slurm: sbatch --nodes=N scripts/glm45_air_106b_a12b.slurm.sh
#
# The variables of glm45_air_106b_a12b.sh, and its --dry-run, which prints what srun would start.
#SBATCH --job-name=glm45_air_106b_a12b
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
  printf 'srun --ntasks-per-node=1 bash -c %q %q\n' "$TASK" "$SCRIPTS/glm45_air_106b_a12b.sh"
  exec bash "$SCRIPTS/glm45_air_106b_a12b.sh" "$@"
fi
exec srun --ntasks-per-node=1 bash -c "$TASK" "$SCRIPTS/glm45_air_106b_a12b.sh" "$@"
