#!/usr/bin/env bash
# Train Qwen3-30B-A3B with the backward of the least valuable pairs left out
#
#   bash scripts/qwen3_30b_a3b.sh [--dry-run] [--smoke] [-- further flags of Megatron]
#
# --dry-run prints the command and what the flags mean; --smoke runs two steps at toy widths on this machine's CPU.
# Every variable can be set from outside; a bad value is refused before anything starts.
set -euo pipefail

export MEGATRON_PATH=${MEGATRON_PATH:-}      # checkout of Megatron-LM; empty: the megatron-core wheel
export DATA_PATH=${DATA_PATH:-}              # prefix of an indexed dataset; empty: mock data
export TOKENIZER=${TOKENIZER:-}              # folder of the Hugging Face tokenizer; empty: token numbers as they are
export GPUS=${GPUS:-8}                       # on each node
export NNODES=${NNODES:-1}
export EP=${EP:-8}
export SEQ=${SEQ:-8192}
export MICRO_BATCH=${MICRO_BATCH:-4}
export POLICY=${POLICY:-lrm}                 # stock, lrm or lrm+replicas
export RETENTION=${RETENTION:-0.8}
export SAVE=${SAVE:-}                        # folder of checkpoints; a restart goes on from them
export TENSORBOARD=${TENSORBOARD:-}          # folder
export WANDB_PROJECT=${WANDB_PROJECT:-}

exec "${PYTHON:-python3}" -m megatron_lrmoe.cli recipes run qwen3_30b_a3b "$@"
