"""For frameworks that build Megatron models themselves and have no Megatron command line: two ways in.

``convert_moe_layers`` changes the MoE layers of a model that is there; ``lrmoe_block_spec`` makes a layer spec that
builds ours. Megatron's training arguments are not needed for either.
"""

import inspect
from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch

from megatron_lrmoe.config import LrmConfig, dest_of, flag_of
from megatron_lrmoe.mcore import clock
from megatron_lrmoe.mcore.adaptor import activate, build_moe_layer, report_metrics
from megatron_lrmoe.mcore.support import conflicts

Spec = Any
"""TransformerBlockSubmodules or ModuleSpec of a layer, as Megatron's ``get_gpt_*_spec`` return them."""


def convert_moe_layers(
    model: torch.nn.Module | Iterable[torch.nn.Module],
    settings: LrmConfig,
    *,
    iteration: Callable[[], int] | None = None,
    seed: Callable[[], int] | None = None,
    pg_collection: Any = None,
) -> list[int]:
    """Make every MoE layer of a built model one of ours, in place.

    Parameters stay the very same tensors under the same names, so it makes no difference whether DDP, the optimizer
    and the loading of weights came before. Every rank has to call it.

    Args:
        model: a model, or its chunks (virtual pipeline stages), wrapped or not.
        settings: as the ``--moe-lrm-*`` flags; ``start_iter`` None is 0, since no learning-rate schedule is known.
        iteration: iterations completed so far, the same on all ranks; None asks Megatron's training loop.
        seed: of the run; None asks Megatron's arguments.
        pg_collection: process groups of the layers; None takes Megatron's global ones.

    Returns:
        Numbers of the layers that are ours now, from 1; none on a pipeline stage without experts.

    Raises:
        ValueError: listing everything in the model that the plugin does not run with. Nothing is changed then.
    """
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from megatron_lrmoe.mcore.layer import LRMoELayer

    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    modules = [module for chunk in chunks for module in chunk.modules()]
    layers = [module for module in modules if isinstance(module, MoELayer)]
    problems = [
        f"{name}: found a {type(layer).__name__}, allowed is Megatron's MoELayer, converted once"
        for chunk in chunks
        for name, layer in chunk.named_modules()
        if isinstance(layer, MoELayer) and type(layer) is not MoELayer
    ]
    wrappers = {type(module).__name__ for module in modules}
    for config in {id(layer.config): layer.config for layer in layers}.values():
        problems += _problems(config, settings, wrappers)
    _raise_if_any(problems)
    if not settings.enabled:
        return []
    clock.follow(iteration, seed)
    report_metrics(settings)
    groups = pg_collection if pg_collection is not None else get_default_pg_collection()
    for layer in layers:
        LRMoELayer.adopt(layer, settings, groups)
    return [layer.number_in_model for layer in layers if isinstance(layer, LRMoELayer)]


def lrmoe_block_spec(
    settings: LrmConfig,
    base: Callable[..., Spec] | None = None,
    *,
    iteration: Callable[[], int] | None = None,
    seed: Callable[[], int] | None = None,
) -> Callable[..., Spec]:
    """A callable layer spec whose MoE layers are ours, for whoever takes ``spec(config, vp_stage=...)``.

    Args:
        settings: as the ``--moe-lrm-*`` flags; ``start_iter`` None is 0.
        base: the spec to change, called with the config, and with ``vp_stage`` where it takes that; None is Megatron's
            ``get_gpt_decoder_block_spec``.
        iteration: iterations completed so far; None asks Megatron's training loop.
        seed: of the run; None asks Megatron's arguments.

    Returns:
        The callable. It raises ValueError for a config that the plugin does not run with, and sets ``config.moe_lrm``.
    """
    stock = base or _decoder_block_spec

    def layer_spec(config: Any, vp_stage: int | None = None) -> Spec:
        _raise_if_any(_problems(config, settings, wrappers=set()))
        takes_stage = "vp_stage" in inspect.signature(stock).parameters
        spec = stock(config, vp_stage=vp_stage) if takes_stage else stock(config)
        if not settings.enabled:
            return spec
        clock.follow(iteration, seed)
        config.moe_lrm = settings
        activate(settings)
        return _with_our_layers(spec)

    return layer_spec


def _decoder_block_spec(config: Any, vp_stage: int | None = None) -> Spec:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    uses_te = config.transformer_impl == "transformer_engine"
    return get_gpt_decoder_block_spec(config, use_transformer_engine=uses_te, vp_stage=vp_stage)


def _with_our_layers(spec: Spec) -> Spec:
    """A copy of a block's or layer's spec in which the plugin decides which MoE layer is built."""
    if hasattr(spec, "layer_specs"):
        return replace(spec, layer_specs=[_with_our_layers(layer) for layer in spec.layer_specs])
    mlp = spec.submodules.mlp
    # Dense layers stay; a MoE layer that is neither of these is refused by name when it is built.
    if isinstance(mlp, partial) and isinstance(mlp.func, type) and mlp.func.__name__ == "MoELayer":
        mlp = partial(build_moe_layer, mlp.func, *mlp.args, **mlp.keywords)
    return replace(spec, submodules=replace(spec.submodules, mlp=mlp))


def _problems(config: Any, settings: LrmConfig, wrappers: set[str]) -> list[str]:
    """What the plugin does not run with, in the words of Megatron's flags.

    Args:
        config: Megatron's TransformerConfig, whose fields have the names of its arguments but for a few.
        settings: of the plugin.
        wrappers: names of the classes around the layers.
    """
    if not settings.enabled:
        return []
    args = Namespace(**{f.name: getattr(config, f.name) for f in fields(config)})
    args.__dict__.update({dest_of(f.name): getattr(settings, f.name) for f in fields(settings)})
    args.num_experts = config.num_moe_experts
    args.te_precision_config_file = getattr(config, "quant_recipe", None)
    args.use_megatron_fsdp = "FullyShardedDataParallel" in wrappers
    args.use_torch_fsdp2 = "TorchFullyShardedDataParallel" in wrappers
    found = conflicts(args)
    if settings.adaptive:
        found.append(f"{flag_of('adaptive')}: found it, allowed is Megatron's own training loop, whose log it follows")
    return found


def _raise_if_any(problems: list[str]) -> None:
    if problems:
        raise ValueError("\n".join(["megatron_lrmoe cannot run with this model:", *problems]))
