"""Training loss from scratch, stock against dropping from the first step, with paired data and weights.

    .venv/bin/megatron-lrmoe data corpus --output runs/shakespeare
    OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.from_scratch runs/shakespeare

Byte-level, 2 layers, hidden 96, 16 experts of width 64, top-4, 2048 tokens a step, one process. Prints the mean
training loss of the last tenth of the steps.
"""

import argparse
import tempfile
from pathlib import Path

from tests import training
from tests.gloo import Pool
from tests.integration.launch import tiny_args

VARIANTS = {
    "stock": {},
    "unbiased": {"moe_lrm_retention": 0.8, "moe_lrm_start_iter": 0},
    "topk": {"moe_lrm_retention": 0.8, "moe_lrm_start_iter": 0, "moe_lrm_selection": "topk"},
}


def main() -> None:
    """Train every variant with every seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", type=Path, help="prefix of a byte-level indexed dataset")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    pool = Pool(1)
    try:
        for seed in options.seeds:
            for name, lrm in VARIANTS.items():
                args = flags("from_scratch", options.data, steps=options.steps, lr=options.lr, seed=seed, **lrm)
                run = pool(training.run, args, limit_s=3600)[0]
                last = [float(loss) for loss in run.losses[-max(1, options.steps // 10) :]]
                print(f"lr {options.lr} seed {seed} {name:9} {sum(last) / len(last):.4f}", flush=True)
    finally:
        pool.close()


def flags(name: str, data: Path, *, steps: int, lr: float, seed: int, **changed: object) -> list[str]:
    """Megatron's flags of a run of the small model.

    Args:
        name: of the run's folder among temporary files.
        data: prefix of a byte-level indexed dataset.
        steps: iterations; the learning rate rises over the first twentieth.
        lr: highest learning rate.
        seed: of weights and data.
        changed: further settings, or other values of these.
    """
    settings = {
        "data_path": data,
        "expert_model_parallel_size": 1,
        "hidden_size": 96,
        "moe_ffn_hidden_size": 64,
        "ffn_hidden_size": 192,
        "seq_length": 256,
        "max_position_embeddings": 256,
        "num_experts": 16,
        "moe_router_topk": 4,
        "micro_batch_size": 8,
        "train_iters": steps,
        "lr": lr,
        "min_lr": lr / 10,
        "lr_decay_style": "cosine",
        "lr_warmup_iters": steps // 20,
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "vocab_size": 257,
        "split": "95,5,0",
        "eval_iters": 0,
        "seed": seed,
        "attention_dropout": 0,
        "hidden_dropout": 0,
    }
    return tiny_args(Path(tempfile.gettempdir()) / name, **(settings | changed))


if __name__ == "__main__":
    main()
