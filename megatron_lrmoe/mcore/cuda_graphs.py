"""Which part of an MoE layer Megatron's CUDA graphs may capture, by its own settings."""

from typing import Any

ROUTING = {"moe_router", "moe_preprocess"}
OUTSIDE = {"attn", "mlp", "mamba"}


def module_names(modules: Any) -> set[str]:
    """Names of ``--cuda-graph-modules``, which are members of an enumeration of Megatron's; none: the whole layer."""
    return {getattr(module, "name", module) for module in modules or ["whole layer"]}


def may_capture_preprocess(config: Any) -> bool:
    """Whether ``MoELayer.preprocess``, which permutes the rows, is or will be in a graph.

    ``transformer_engine`` leaves it out without moe_preprocess (moe_utils.py:1597-1612); ``local`` captures all up to
    the dispatch, and what follows the combine, with either module (transformer_layer.py:1647-1719).
    """
    names = module_names(getattr(config, "cuda_graph_modules", None))
    captures = {"transformer_engine": {"moe_preprocess"}, "local": ROUTING}
    return bool(names & captures.get(getattr(config, "cuda_graph_impl", "none"), set()))


def captures_experts(modules: Any) -> bool:
    """Whether a graph of these modules would hold experts, whose row counts change from step to step."""
    return not module_names(modules) <= ROUTING | OUTSIDE
