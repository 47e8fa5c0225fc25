"""Time of the whole MoE layer's forward and backward, ours against Megatron's SequentialMLP layer.

    OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.backward
    .venv/bin/python -m benchmarks.backward --device cuda --dtype bf16 --tokens 16384 --hidden 2048 --width 768

One process, one thread, EP1. All variants share weights and input and take turns within every round, so a slow
moment of the machine hits them alike; medians are compared, on the CPU of process CPU time, on a GPU of the time until
the GPU is done, with the peak memory that torch allocated. The ratio is to ``stock``: Megatron's layer with the unfused
activation.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch

VARIANTS = ("stock", "stock fused", "lrm 0.8", "lrm 0.5", "lrm 0.8 topk", "lrm 0.8 source")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> None:
    """Measure and print a table."""
    options = parse()
    start_megatron(options.device)
    layers = {name: build(name, options).to(options.device, DTYPES[options.dtype]) for name in VARIANTS}
    state = layers["stock"].state_dict()
    for layer in layers.values():
        layer.load_state_dict(state)
    x_TD, g_TD = (
        torch.randn(options.tokens, 1, options.hidden, generator=torch.Generator().manual_seed(seed)).to(
            options.device, DTYPES[options.dtype]
        )
        for seed in (1, 2)
    )
    g_TD /= options.tokens
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in VARIANTS}
    for round_number in range(options.rounds + 1):
        names = VARIANTS[round_number % len(VARIANTS) :] + VARIANTS[: round_number % len(VARIANTS)]
        for name in names:
            measured = once(layers[name], x_TD, g_TD)
            if round_number:  # the first round warms caches and allocator
                times[name].append(measured)
    show(times, options)


def parse() -> argparse.Namespace:
    """Shape and number of rounds; the defaults are the issue's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, default in (("tokens", 2048), ("hidden", 512), ("width", 512), ("experts", 16), ("top-k", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp32")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser.parse_args()


def start_megatron(device: str = "cpu") -> None:
    """One process that Megatron takes for a whole job.

    Raises:
        RuntimeError: the device is 'cuda', and torch finds no GPU.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("--device: found 'cuda', allowed is 'cpu': torch finds no GPU")
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    from megatron_lrmoe.device import activate_if_needed

    activate_if_needed()
    from megatron.core import parallel_state, tensor_parallel

    torch.set_num_threads(1)
    backend = "nccl" if device == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def build(name: str, options: argparse.Namespace) -> torch.nn.Module:
    """A layer with Megatron's own router; ours by the adaptor's spec, as in training."""
    import torch.nn.functional as F
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import moe_module_specs
    from megatron.core.transformer.transformer_config import TransformerConfig

    import megatron_lrmoe.megatron_adaptor  # noqa: F401
    from megatron_lrmoe.config import LrmConfig
    from megatron_lrmoe.mcore import clock

    clock.follow(lambda: 0, lambda: 1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=options.hidden,
        num_attention_heads=8,
        moe_ffn_hidden_size=options.width,
        num_moe_experts=options.experts,
        moe_router_topk=options.top_k,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=name == "stock fused",
    )
    if name.startswith("lrm"):
        _, retention, *rest = name.split()
        config.moe_lrm = LrmConfig(
            retention=float(retention),
            selection="topk" if "topk" in rest else "unbiased",
            scope="source" if "source" in rest else "expert",
        )
    spec = moe_module_specs.get_moe_module_spec_for_backend(LocalSpecProvider(), num_experts=options.experts)
    layer = spec(config=config, pg_collection=None, is_mtp_layer=False, name="mlp")
    layer.set_layer_number(1)
    return layer.train()


def once(layer: torch.nn.Module, x_TD: torch.Tensor, g_TD: torch.Tensor) -> tuple[float, float, float]:
    """Seconds of one forward and one backward, and on a GPU the peak GiB."""
    layer.zero_grad(set_to_none=True)
    x_TD = x_TD.detach().requires_grad_()
    on_gpu = x_TD.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    start = now(on_gpu)
    out, _ = layer(x_TD)
    middle = now(on_gpu)
    out.backward(g_TD)
    end = now(on_gpu)
    return middle - start, end - middle, torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0


def now(on_gpu: bool) -> float:
    """Process CPU seconds, or on a GPU the seconds when it has done all its work."""
    if not on_gpu:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def show(times: dict[str, list[tuple[float, float, float]]], options: argparse.Namespace) -> None:
    """Medians and ratios to ``stock``."""
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in times.items()}
    base = medians["stock"]
    print(
        f"T {options.tokens}, hidden {options.hidden}, F {options.width}, {options.experts} experts, "
        f"top-{options.top_k}, {options.dtype}, {options.device}, EP1, {options.rounds} rounds, "
        f"torch {torch.__version__}"
    )
    memory_title = f" {'peak GiB':>9}" if options.device == "cuda" else ""
    print(f"{'variant':16} {'forward ms':>10} {'ratio':>6} {'backward ms':>12} {'ratio':>6}{memory_title}")
    for name, (forward, backward, peak) in medians.items():
        memory = f" {peak:9.2f}" if options.device == "cuda" else ""
        print(
            f"{name:16} {forward * 1e3:10.1f} {forward / base[0]:6.3f} "
            f"{backward * 1e3:12.1f} {backward / base[1]:6.3f}{memory}"
        )
    if options.json:
        options.json.write_text(json.dumps(medians, indent=1))


if __name__ == "__main__":
    main()
