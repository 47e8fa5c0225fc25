"""What the plugin does not run with yet, by the name of Megatron's flag. Refused, never silently dense."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_lrmoe.mcore.cuda_graphs import captures_experts, may_capture_preprocess


@dataclass(frozen=True)
class Refusal:
    """One setting of Megatron that the plugin refuses.

    Args:
        flag: as the user writes it.
        dest: attribute of Megatron's namespace after ``validate_args``.
        refused: whether a value is one that is refused.
        allowed: what to use instead.
        why: one clause.
        applies: whether the run's other settings let this one have an effect.
    """

    flag: str
    dest: str
    refused: Callable[[Any], bool]
    allowed: str
    why: str
    applies: Callable[[Namespace], bool] = lambda _: True

    def sentence(self, args: Namespace) -> str | None:
        """Flag, what was found, what is allowed and why; None if nothing is refused.

        Settings that this version of Megatron does not have count as not given.
        """
        value = getattr(args, self.dest, None)
        if not self.refused(value) or not self.applies(args):
            return None
        same_name = self.flag.removeprefix("--").replace("-", "_") == self.dest
        found = repr(value) if same_name else f"{self.dest}={value!r}"
        return f"{self.flag}: found {found}, allowed is {self.allowed}: {self.why}"


def _more_than_one(value: Any) -> bool:
    return value is not None and value > 1


def _offloads_experts(modules: Any) -> bool:
    return bool({"expert_fc1", "moe_act", "fused_group_mlp"} & set(modules or ()))


def _without(flag: str, why: str) -> Refusal:
    return Refusal(flag, flag.removeprefix("--").replace("-", "_"), bool, "without it", why)


def _set_to(dest: str, *values: Any) -> Callable[[Namespace], bool]:
    return lambda args: getattr(args, dest, None) in values


def _with_other_dispatchers(flag: str, refused: str, allowed: str) -> Refusal:
    return Refusal(
        flag,
        flag.removeprefix("--").replace("-", "_"),
        lambda v: v == refused,
        f"{allowed} with --moe-token-dispatcher-type allgather (Megatron's default) or flex",
        "with those a pair's source does not learn whether the pair was kept",
        _set_to("moe_token_dispatcher_type", "allgather", "flex"),
    )


REFUSALS = (
    Refusal(
        "--num-experts",
        "num_experts",
        lambda v: not v,
        "an MoE model",
        "there is no routed pair in a dense model",
    ),
    Refusal(
        "--moe-flex-dispatcher-backend",
        "moe_flex_dispatcher_backend",
        lambda v: v == "ncclep",
        "deepep or hybridep",
        "NCCL EP brings rows in buffers of fixed size",
    ),
    _with_other_dispatchers("--moe-lrm-scope", "source", "expert"),
    _with_other_dispatchers("--moe-lrm-router-grad", "baseline", "drop"),
    Refusal(
        "--moe-lrm-replica-policy",
        "moe_lrm_replica_policy",
        lambda v: v not in (None, "none"),
        "none with --moe-token-dispatcher-type allgather (Megatron's default) or flex",
        "rows are sent to replicas by the all-to-all dispatcher",
        _set_to("moe_token_dispatcher_type", "allgather", "flex"),
    ),
    Refusal(
        "--moe-lrm-replica-policy",
        "moe_lrm_replica_policy",
        lambda v: v not in (None, "none"),
        "none where --cuda-graph-modules has moe_preprocess, or moe_router with --cuda-graph-impl local",
        "rows are sorted by replica, and replicas change from step to step",
        may_capture_preprocess,
    ),
    Refusal(
        "--expert-tensor-parallel-size",
        "expert_tensor_parallel_size",
        _more_than_one,
        "1 (not given, it is the tensor-parallel size)",
        "a score needs the whole fc2 input row, which expert tensor parallelism splits",
    ),
    Refusal(
        "--expert-tensor-parallel-num-weight-shards",
        "expert_gtp_weight_remat_size",
        _more_than_one,
        "the expert-tensor-parallel size",
        "expert weights are read outside their modules, which gather the shards",
    ),
    _without("--heterogeneous-layers-config-path", "heterogeneous layers have no experts"),
    _without("--heterogeneous-layers-config-encoded-json", "heterogeneous layers have no experts"),
    Refusal(
        "--hybrid-layer-pattern",
        "hybrid_layer_pattern",
        lambda v: "E" in (v or "").partition("/")[2],
        "a pattern without E after the slash",
        "Megatron gives experts of prediction layers the numbers of decoder layers",
    ),
    Refusal(
        "--transformer-impl",
        "transformer_impl",
        lambda v: v == "inference_optimized",
        "transformer_engine or local",
        "there is no backward in inference",
    ),
    Refusal(
        "--disable-bias-linear",
        "add_bias_linear",
        bool,
        "--disable-bias-linear given",
        "experts with biases are not supported",
    ),
    Refusal(
        "--fp8-format",
        "fp8",
        bool,
        "without it",
        "quantised GEMMs need padded groups, and kept groups are not padded",
    ),
    Refusal(
        "--fp4-format",
        "fp4",
        bool,
        "without it",
        "quantised GEMMs need padded groups, and kept groups are not padded",
    ),
    _without("--te-precision-config-file", "expert GEMMs would not follow its precisions"),
    _without("--kitchen-config-file", "expert GEMMs would not follow its precisions"),
    Refusal(
        "--kitchen-recipe-number",
        "kitchen_recipe_number",
        lambda v: v is not None,
        "without it",
        "expert GEMMs would not follow its precisions",
    ),
    _without("--use-transformer-engine-op-fuser", "the fused expert MLP is one opaque operation"),
    _without("--moe-use-grouped-tensor", "row counts must be on the host"),
    _without("--use-te-activation-func", "its backward is TE's own"),
    _without("--overlap-moe-expert-parallel-comm", "its schedule detaches tensors between the layer's steps"),
    _without("--delay-wgrad-compute", "weight gradients are not postponed"),
    _without("--overlap-dispatch-backward-with-experts-wgrad", "weight gradients are not postponed"),
    Refusal(
        "--cuda-graph-impl",
        "cuda_graph_impl",
        lambda v: v == "full_iteration",
        "none, or local or transformer_engine with --cuda-graph-modules",
        "row counts change from step to step",
    ),
    Refusal(
        "--cuda-graph-modules",
        "cuda_graph_modules",
        captures_experts,
        "attn, mlp, mamba, moe_router and moe_preprocess, with --cuda-graph-impl local or transformer_engine",
        "row counts change from step to step",
        _set_to("cuda_graph_impl", "local", "transformer_engine"),
    ),
    Refusal(
        "--moe-lrm-router-grad",
        "moe_lrm_router_grad",
        lambda v: v == "baseline",
        "drop where --cuda-graph-modules has moe_preprocess, or moe_router with --cuda-graph-impl local",
        "the tokens' summed output is then in a graph",
        may_capture_preprocess,
    ),
    _without("--rl-training-cuda-graphs", "it captures the router after the layer was built"),
    Refusal(
        "--batch-invariant-mode",
        "batch_invariant_mode",
        bool,
        "without it",
        "its rows have an order of their own",
    ),
    _without("--moe-pad-expert-input-to-capacity", "padding rows are no pairs"),
    _without("--moe-router-padding-for-quantization", "padding rows are no pairs"),
    _without("--moe-router-padding-for-fp8", "padding rows are no pairs"),
    Refusal(
        "--moe-expert-rank-capacity-factor",
        "moe_expert_rank_capacity_factor",
        lambda v: v is not None,
        "without it",
        "row counts must be those that were routed",
    ),
    _without("--moe-apply-probs-on-input", "the score expects the combine weight inside the fc2 input"),
    _without("--moe-single-grouped-weight", "one weight per expert is expected"),
    _without("--moe-mlp-glu-interleave-size", "gate and linear halves are expected side by side"),
    _without("--moe-paged-stash", "saved rows are gathered in backward"),
    _without("--use-megatron-fsdp", "expert weights are read outside their modules"),
    _without("--use-torch-fsdp2", "expert weights are read outside their modules"),
    Refusal(
        "--offload-modules",
        "offload_modules",
        _offloads_experts,
        "modules other than expert_fc1, moe_act and fused_group_mlp",
        "saved rows are gathered in backward",
        _set_to("fine_grained_activation_offloading", True),
    ),
)


def conflicts(args: Namespace) -> list[str]:
    """One sentence for each flag of Megatron that does not go with the plugin.

    Args:
        args: Megatron's namespace, validated.
    """
    return [sentence for refusal in REFUSALS if (sentence := refusal.sentence(args)) is not None]


def refusals_table() -> str:
    """What is refused, as a Markdown table; docs/support.md holds it, and a test compares the two."""
    rows = [f"| `{r.flag}` | {r.allowed} | {r.why} |" for r in REFUSALS]
    return "\n".join(["| flag | allowed | because |", "|---|---|---|", *rows])
