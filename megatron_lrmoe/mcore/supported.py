"""What is supported, and the tests that say so; what is refused is in ``support.py``."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Supported:
    """Something of Megatron's or the plugin's that runs with dropped backward work.

    Args:
        what: as users know it, with what is not covered.
        tests: paths from the project's root.
    """

    what: str
    tests: tuple[str, ...]


SUPPORTED = (
    Supported(
        "replicas by lrm, ultraep and symi with the all-to-all dispatcher: plans of all kinds, 2 and 4 ranks, both "
        "scopes and selections, selection in forward; pipelines, recompute and the distributed optimizer in the matrix",
        (
            "tests/dist/test_replicas.py",
            "tests/dist/test_replica_faults.py",
            "tests/integration/test_replica_training.py",
            "tests/integration/test_matrix.py",
            "tests/unit/test_training_plan.py",
            "tests/unit/test_reroute.py",
        ),
    ),
    Supported("traces of loads", ("tests/unit/test_trace_writer.py", "tests/dist/test_trace.py")),
    Supported(
        "all-to-all dispatcher, EP1 and EP2, top-1 to top-8, empty experts, an empty rank, one token",
        ("tests/dist/test_layer_gradients.py",),
    ),
    Supported(
        "random routings, scores and gradients, both scopes and selections",
        ("tests/dist/test_random_routings.py",),
    ),
    Supported(
        "all-gather dispatcher, EP1 and EP2: only the experts' GEMMs are compacted",
        ("tests/dist/test_other_dispatchers.py",),
    ),
    Supported(
        "flex dispatcher with DeepEP or HybridEP: only the experts' GEMMs are compacted; tested over fakes on"
        " gloo, not yet run on hardware",
        ("tests/dist/test_other_dispatchers.py",),
    ),
    Supported(
        "options against each other: pairs of dispatcher, EP2 and EP4, EP2 x DP2, EP2 x PP2 (interleaved, "
        "uneven, a stage without experts), dtype, recompute, routers, optimizers, shared experts, latent "
        "experts, capacity, multi-token prediction and the plugin's own; 64 runs of 3 steps, every gradient "
        "of one step against the reference",
        ("tests/integration/test_matrix.py",),
    ),
    Supported(
        "CP2 x EP2, TP2 with sequence parallelism x EP2 (one layer)",
        ("tests/dist/test_parallel_layouts.py",),
    ),
    Supported(
        "SequentialMLP (`--transformer-impl local`)",
        (
            "tests/dist",
            "tests/integration",
        ),
    ),
    Supported(
        "TEGroupedMLP: class, parameter names, attributes, sharded keys, gradients on TE's weights with every"
        " dispatcher; skipped where TE is absent, TE 2.20.2 on a CPU by hand",
        (
            "tests/dist/test_te_experts.py",
            "tests/dist/test_te_options.py",
        ),
    ),
    Supported(
        "SwiGLU fused and unfused, GeGLU, plain activations",
        (
            "tests/dist/test_layer_gradients.py",
            "tests/unit/test_activation.py",
        ),
    ),
    Supported(
        "fp32, bf16, fp16 with loss scaling",
        (
            "tests/dist/test_off_is_off.py",
            "tests/integration/test_training.py",
            "tests/integration/test_matrix.py",
        ),
    ),
    Supported(
        "recompute: full (uniform, block), selective `moe`, `layernorm`, `shared_experts`; `moe_act`, which "
        "is for grouped GEMMs alone and has no effect while pairs are dropped, since what it would free is "
        "never saved",
        (
            "tests/integration/test_training.py",
            "tests/integration/test_matrix.py",
            "tests/dist/test_te_experts.py",
        ),
    ),
    Supported(
        "distributed optimizer, overlapped gradient reduce and parameter gather",
        (
            "tests/integration/test_training.py",
            "tests/integration/test_matrix.py",
        ),
    ),
    Supported(
        "gradient accumulation fusion (`main_grad`), with a stand-in for DDP's buffer",
        ("tests/unit/test_compute.py",),
    ),
    Supported(
        "several microbatches, gradient clipping, aux, seq-aux, global-aux and z losses, sigmoid router with "
        "expert bias, group-limited routing",
        (
            "tests/integration/test_training.py",
            "tests/integration/test_matrix.py",
        ),
    ),
    Supported(
        "shared experts, also overlapped (`--moe-shared-expert-overlap`) with all-to-all and flex, latent "
        "experts with a stand-in for TE's projection, capacity factor without padding",
        (
            "tests/integration/test_matrix.py",
            "tests/dist/test_options.py",
        ),
    ),
    Supported(
        "hybrid models: their spec builds our layer; a whole one is built with TE and has stock's names and "
        "sharded keys, and has not been run",
        (
            "tests/contract/test_adaptor_megatron.py",
            "tests/dist/test_te_options.py",
        ),
    ),
    Supported(
        "quota policies, row and byte limits, with both scopes and selections",
        ("tests/dist/test_quota_policies.py",),
    ),
    Supported(
        "router baseline, shrink, probes",
        (
            "tests/dist/test_router_grad.py",
            "tests/unit/test_keep_plan.py",
            "tests/integration/test_training.py",
        ),
    ),
    Supported(
        "selection in forward, both scopes and selections, recompute, saved bytes",
        (
            "tests/dist/test_forward_choice.py",
            "tests/unit/test_forward_choice.py",
            "tests/integration/test_training.py",
        ),
    ),
    Supported(
        "adaptive retention: equal on ranks, in recompute, exact resume",
        (
            "tests/dist/test_adaptive.py",
            "tests/integration/test_training.py",
        ),
    ),
    Supported(
        "data-parallel groups draw differently (EP2 x DP2, 4 ranks)",
        ("tests/dist/test_unbiased.py",),
    ),
    Supported(
        "host syncs: none beyond Megatron's in forward; in backward one for scope `expert`, none for `source`",
        ("tests/dist/test_host_syncs.py",),
    ),
    Supported(
        "CUDA graphs of attn, mlp, mamba, moe_router and moe_preprocess, with a stand-in for graphs on the "
        "CPU, not yet run on hardware; where the permutation is in a graph, kept rows alone move between the "
        "ranks all the same",
        (
            "tests/dist/test_cuda_graphs.py",
            "tests/unit/test_arguments.py",
        ),
    ),
    Supported(
        "torch.compile around the model: our layer breaks the graph once and is not traced again as row counts change",
        ("tests/dist/test_user_demand_compile.py",),
    ),
    Supported(
        "padding masks: quotas are shares of the pairs that are not padding (with selection in forward, of "
        "all pairs; in calls after a CUDA graph, of all pairs)",
        ("tests/dist/test_user_demand_parallel.py",),
    ),
    Supported(
        "router replay, deterministic mode",
        ("tests/dist/test_options.py",),
    ),
    Supported(
        "evaluation and inference: Megatron's own to the last bit, and training goes on as without them",
        ("tests/dist/test_evaluation.py",),
    ),
    Supported(
        "checkpoints with stock Megatron both ways, exact resume; flags of the plugin that differ from the "
        "saved run are named",
        (
            "tests/integration/test_training.py",
            "tests/integration/test_user_demand_training.py",
        ),
    ),
    Supported(
        "multi-token prediction and dense layers get the right classes",
        ("tests/contract/test_adaptor_megatron.py",),
    ),
    Supported(
        "patched checkouts of 0.18, 0.19 and main; trees made by the tests with every `make test`, real ones by hand",
        ("tests/unit/test_patch.py", "tests/unit/test_user_demand_patch.py", "tests/checkout/test_checkouts.py"),
    ),
    Supported(
        "models that another framework has built, or builds by a spec: names, shapes, attributes and sharded keys are "
        "stock's, and a loop that is not Megatron's trains them; Megatron-Bridge and ms-swift themselves were not run",
        ("tests/dist/test_frameworks.py", "tests/integration/test_own_loop.py"),
    ),
    Supported(
        "recipes at their real sizes through Megatron's parser and validation, launch scripts at toy widths; resuming "
        "from a script's checkpoint",
        ("tests/contract/test_recipe_configs.py", "tests/integration/test_scripts.py"),
    ),
    Supported(
        "loss masks beside a dataset, with GPTDataset",
        ("tests/contract/test_loss_mask.py",),
    ),
    Supported(
        "`--log-throughput`: one warning, and `moe-lrm/flops_share` to multiply by",
        ("tests/integration/test_training.py",),
    ),
)


def supported_table() -> str:
    """As a Markdown table; docs/support.md holds it, and a test compares the two and looks for the tests."""
    rows = [f"| {s.what} | {', '.join(f'`{test}`' for test in s.tests)} |" for s in SUPPORTED]
    return "\n".join(["| Megatron feature | test |", "|---|---|", *rows])
