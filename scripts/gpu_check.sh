#!/usr/bin/env bash
# Checks the plugin on one GPU, at most five minutes: unit tests on CUDA, 20 training steps over NCCL, backward times.
#
#   bash scripts/gpu_check.sh             on a machine with a GPU
#   bash scripts/gpu_check.sh --dry-run   the same steps, small, on the CPU and gloo
#
# It installs nothing. The Python that it runs must have torch 2.11, pytest, hypothesis and megatron-core 0.19 with its
# training requirements ('pip install .[megatron,dev]'); they do not come with this tree, and what is missing is named
# before anything runs.
#
#   PYTHON=...   the Python to use (.venv/bin/python where there is one, else python3)
#   OUT=...      folder for logs, figures and the table (runs/gpu_check)
set -uo pipefail
cd "$(dirname "$0")/.." || exit

TESTS=(tests/unit/test_compute.py tests/unit/test_grouped.py tests/unit/test_score.py tests/unit/test_selection.py)
STEPS=20
OUT=${OUT:-runs/gpu_check}
DEVICE=cuda
# The CPU of a dry run may be slow and shared, and only a GPU is worth five minutes at most.
SLOWER=1
BENCHMARK=(--dtype bf16 --tokens 16384 --hidden 2048 --width 768 --experts 16 --rounds 10)
TRAINING=(--bf16 --hidden-size 1024 --moe-ffn-hidden-size 512 --seq-length 1024 --max-position-embeddings 1024)

usage() { sed -n '2,13s/^# \{0,1\}//p' "$0"; }

case ${1:-} in
  '') ;;
  --dry-run)
    DEVICE=cpu
    BENCHMARK=(--tokens 256 --hidden 64 --width 64 --rounds 2)
    TRAINING=(--hidden-size 64 --moe-ffn-hidden-size 64 --seq-length 64 --max-position-embeddings 64)
    export CUDA_VISIBLE_DEVICES=''
    ;;
  *)
    usage >&2
    exit 2
    ;;
esac

if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python
fi
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1 LRMOE_TEST_DEVICE=$DEVICE
mkdir -p "$OUT"
FAILED=0
[ "$DEVICE" = cuda ] || SLOWER=10

# Without megatron-core neither the training nor the benchmark can run, so nothing is half done.
check_imports() {
  "$PYTHON" - "$DEVICE" <<'PY'
import importlib.util
import sys

def is_missing(name):
    try:
        return importlib.util.find_spec(name) is None
    except ModuleNotFoundError:
        return True

needed = ("torch", "numpy", "pytest", "hypothesis", "megatron.core", "megatron.training")
missing = [name for name in needed if is_missing(name)]
if missing:
    sys.exit(f"gpu_check: {sys.executable} cannot import {', '.join(missing)}. Install '.[megatron,dev]' or set PYTHON.")
import torch
if sys.argv[1] == "cuda" and not torch.cuda.is_available():
    sys.exit("gpu_check: torch finds no GPU; --dry-run runs the same steps on the CPU")
PY
}

# step NAME LIMIT_S COMMAND...: run with a time limit into a log; a failure is counted and the next step still runs.
step() {
  local name=$1 limit=$(($2 * SLOWER))
  shift 2
  echo "gpu_check: $name (at most $limit s, log in $OUT/$name.log)"
  if ! timeout --kill-after=5 "$limit" "$@" >"$OUT/$name.log" 2>&1; then
    FAILED=$((FAILED + 1))
    echo "gpu_check: $name FAILED; the end of its log:"
    tail -n 20 "$OUT/$name.log"
  fi
}

# Flags for a machine with neither Transformer Engine nor Apex.
train() {
  local name=$1
  shift
  local backend=nccl
  [ "$DEVICE" = cuda ] || backend=gloo
  step "$name" 60 "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 1 -m megatron_lrmoe.pretrain_gpt \
    --distributed-backend "$backend" --transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion \
    --no-gradient-accumulation-fusion --no-rope-fusion --attention-softmax-in-fp32 --num-workers 0 \
    --num-layers 2 --num-attention-heads 8 --position-embedding-type rope --normalization RMSNorm --swiglu \
    --disable-bias-linear --untie-embeddings-and-output-weights --num-experts 8 --moe-router-topk 2 \
    --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 \
    --micro-batch-size 2 --global-batch-size 4 --train-iters "$STEPS" --lr 1e-3 --lr-decay-style constant \
    --mock-data --split 90,5,5 --data-cache-path "$OUT/cache" --tokenizer-type NullTokenizer --vocab-size 256 \
    --log-interval 1 --eval-interval 1000 --eval-iters 0 --seed 1234 "${TRAINING[@]}" "$@"
}

# Megatron prints 'iteration 20/ 20 | ... | lm loss: 5.1E+00 | ...' and, on a GPU, 'max allocated: 123.4'.
losses() { grep -oE 'lm loss: [^ ]+' "$OUT/$1.log" | cut -d' ' -f3; }

training_row() {
  local count
  count=$(losses "$1" | wc -l)
  printf '%-16s steps %s of %s, lm loss %s -> %s, max allocated MB %s\n' "$1" "$count" "$STEPS" \
    "$(losses "$1" | head -n 1)" "$(losses "$1" | tail -n 1)" \
    "$(grep -oE 'max allocated: [0-9.]+' "$OUT/$1.log" | tail -n 1 | cut -d' ' -f3)"
  [ "$count" = "$STEPS" ]
}

table() {
  echo
  echo "gpu_check on $DEVICE, commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
  "$PYTHON" -c 'import sys, torch; print(f"torch {torch.__version__}, Python {sys.version.split()[0]},",
    torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU")'
  printf '%-16s %s\n' 'unit tests' "$(grep -E '(passed|failed|error)' "$OUT/unit-tests.log" | tail -n 1)"
  training_row train-stock || FAILED=$((FAILED + 1))
  training_row train-lrm || FAILED=$((FAILED + 1))
  sed -n '/^variant /,$p;/^T [0-9]/p' "$OUT/backward.log"
  echo "steps that failed: $FAILED"
}

main() {
  check_imports || exit 1
  step unit-tests 120 "$PYTHON" -m pytest -q "${TESTS[@]}"
  train train-stock
  train train-lrm --moe-lrm-retention 0.8 --moe-lrm-start-iter 0
  step backward 60 "$PYTHON" -m benchmarks.backward --device "$DEVICE" --json "$OUT/backward.json" "${BENCHMARK[@]}"
  # Not in a pipe: the table counts failures in this shell.
  table >"$OUT/table.txt"
  cat "$OUT/table.txt"
  [ "$FAILED" = 0 ]
}

main
