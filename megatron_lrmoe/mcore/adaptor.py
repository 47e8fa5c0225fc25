"""Put the plugin into Megatron, from outside, and only where a run asks for it.

What is replaced at once, and changes nothing in a run without ``--moe-lrm-retention``:

- ``megatron.training.arguments.add_megatron_arguments``: adds the ``--moe-lrm-*`` flags. ``parse_args`` looks
  it up when called, and an ``extra_args_provider`` stays free for others.
- ``core_transformer_config_from_args`` in ``argument_utils`` and ``arguments``: checks the flags before any
  model is built, and puts the settings on the config as ``config.moe_lrm``.
- ``core_transformer_config_from_yaml`` in ``yaml_arguments``: refuses a run that asks for the plugin beside
  ``--yaml-cfg``, which drops every flag.
- ``check_checkpoint_args`` in ``checkpointing``: names the plugin's flags whose values are not those of the run that
  saved the checkpoint, so that no run goes on with other settings unnoticed.
- ``get_moe_module_spec_for_backend`` in ``moe_module_specs`` and ``gpt_layer_specs``: its spec builds our
  layer when the config says so, Megatron's otherwise.
- the MoE layer in ``hybrid_stack_spec`` of ``hybrid_layer_specs``, in the same way: that spec is made while Megatron is
  imported, so a changed function comes too late for it.
- ``GPTDataset.__getitem__``: uses the loss mask that ``megatron-lrmoe data alpaca`` has written beside a dataset.

What is replaced when the first config asks for the plugin:

- ``MoEMetricsTracker.report``: adds our scalars to its line.
- ``MoELayer.__init__``: refuses a layer that is not ours, so that no spec made elsewhere trains it in full.

What is replaced when the first config has ``--moe-lrm-adaptive``, in ``megatron.training``:

- ``training.training_log``: afterwards, each layer's retention takes its step.
- ``checkpointing.check_checkpoint_args``: takes the retention from a checkpoint's arguments.
"""

import importlib
import logging
import os
import sys
from argparse import Namespace
from functools import partial, wraps
from operator import attrgetter
from typing import Any

from megatron_lrmoe.config import LrmConfig
from megatron_lrmoe.mcore import versions

logger = logging.getLogger(__name__)

_CONFIG = "core_transformer_config_from_args"
_YAML = "core_transformer_config_from_yaml"
_CHECKPOINT = "check_checkpoint_args"
_SPEC = "get_moe_module_spec_for_backend"
_HYBRID = ("megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec.submodules.moe_layer.submodules")

PATCHED = (
    ("megatron.training.arguments", "add_megatron_arguments"),
    ("megatron.training.argument_utils", _CONFIG),
    ("megatron.training.arguments", _CONFIG),
    ("megatron.training.yaml_arguments", _YAML),
    ("megatron.training.checkpointing", _CHECKPOINT),
    ("megatron.core.models.gpt.moe_module_specs", _SPEC),
    ("megatron.core.models.gpt.gpt_layer_specs", _SPEC),
)
"""(module, name) of every function that is replaced at once."""

NEEDED = (
    ("megatron.core.datasets.gpt_dataset", "GPTDataset.__getitem__"),
    ("megatron.core.datasets.gpt_dataset", "GPTDataset._query_document_sample_shuffle_indices"),
    ("megatron.training.global_vars", "get_args"),
    ("megatron.core.transformer.moe.moe_logging", "MoEMetricsTracker.report"),
    ("megatron.core.transformer.moe.moe_utils", "get_default_pg_collection"),
    ("megatron.core.transformer.moe.moe_layer", "MoELayer.forward"),
    ("megatron.core.transformer.moe.moe_layer", "MoELayer.route"),
    ("megatron.core.transformer.moe.moe_layer", "MoELayer.preprocess"),
    ("megatron.core.transformer.moe.moe_layer", "MoELayer.dispatch"),
    ("megatron.core.transformer.moe.experts", "SequentialMLP.forward"),
    ("megatron.core.transformer.moe.experts", "TEGroupedMLP.forward"),
    ("megatron.core.transformer.moe.token_dispatcher", "maybe_move_tensor_to_cpu"),
    ("megatron.core.transformer.moe.token_dispatcher", "MoEAllGatherTokenDispatcher"),
    ("megatron.core.transformer.moe.token_dispatcher", "MoEFlexTokenDispatcher"),
    *(
        ("megatron.core.transformer.moe.token_dispatcher", f"MoEAlltoAllTokenDispatcher.{method}")
        for method in (
            "preprocess",
            "_maybe_dtoh_and_synchronize",
            "dispatch_preprocess",
            "token_dispatch",
            "dispatch_postprocess",
            "combine_preprocess",
            "token_combine",
            "combine_postprocess",
        )
    ),
)
"""(module, name) of what our classes call or override: an override of what is gone would never run."""

_active = False
_adapts = False


def install() -> None:
    """Replace the functions in PATCHED. A second call does nothing.

    Raises:
        ImportError: something is not where this version of Megatron should have it.
        RuntimeError: another module holds one of the old functions already, so the plugin would be bypassed.
    """
    for place in NEEDED:
        _find(*place)
    originals = {place: _find(*place) for place in PATCHED}
    originals = {place: f for place, f in originals.items() if not hasattr(f, "_megatron_lrmoe")}
    _refuse_stale_bindings(originals)
    if originals:
        versions.warn_if_unknown()
    wrap = {
        "add_megatron_arguments": _with_flags,
        _CONFIG: _with_settings,
        _YAML: _without_yaml,
        _CHECKPOINT: _with_differences,
        _SPEC: _with_layer,
    }
    for (module, name), original in originals.items():
        replacement = wrap[name](original)
        replacement._megatron_lrmoe = True
        setattr(sys.modules[module], name, replacement)
    _touch_hybrid_spec()
    _read_loss_masks()


def _find(module: str, name: str) -> Any:
    try:
        return attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"megatron_lrmoe needs {module}.{name}, which Megatron {versions.found()} does not have: {error}"
        ) from error


def _refuse_stale_bindings(originals: dict[tuple[str, str], Any]) -> None:
    """Modules that took an old function by name before us would go on calling it."""
    ours = {module for module, _ in originals}
    old = {id(original) for original in originals.values()}
    stale = {
        f"{module_name}.{attribute}"
        for module_name, module in list(sys.modules.items())
        if module_name not in ours
        for attribute, value in list(getattr(module, "__dict__", {}).items())
        if id(value) in old
    }
    if stale:
        raise RuntimeError(
            "megatron_lrmoe.megatron_adaptor was imported too late: import it right after torch. "
            f"These names hold Megatron's own functions already: {', '.join(sorted(stale))}"
        )


def _with_flags(stock: Any) -> Any:
    @wraps(stock)
    def add_megatron_arguments(parser: Any) -> Any:
        from megatron_lrmoe.mcore.arguments import add_flags

        return add_flags(stock(parser))

    return add_megatron_arguments


def _with_settings(stock: Any) -> Any:
    # Megatron's get_batch calls this at every step, so it stays cheap and says nothing twice.
    @wraps(stock)
    def core_transformer_config_from_args(args: Namespace, config_class: Any = None) -> Any:
        from megatron_lrmoe.mcore.arguments import config_from_args

        settings = config_from_args(args)
        config = stock(args, config_class)
        if settings.enabled:
            config.moe_lrm = settings
            activate(settings)
            if settings.adaptive:
                _adapt()
        return config

    return core_transformer_config_from_args


def _without_yaml(stock: Any) -> Any:
    @wraps(stock)
    def core_transformer_config_from_yaml(args: Namespace, *rest: Any, **kwargs: Any) -> Any:
        from megatron_lrmoe.mcore.arguments import refuse_yaml

        refuse_yaml(args, sys.argv[1:])
        return stock(args, *rest, **kwargs)

    return core_transformer_config_from_yaml


def _with_differences(stock: Any) -> Any:
    @wraps(stock)
    def check_checkpoint_args(checkpoint_args: Namespace, *args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        from megatron_lrmoe.mcore.arguments import differences

        run: Any = get_args()
        found = differences(checkpoint_args, run)
        if found and run.rank == 0:
            logger.warning("%s; the command line counts", "; ".join(found))
        return stock(checkpoint_args, *args, **kwargs)

    return check_checkpoint_args


def _with_layer(stock: Any) -> Any:
    @wraps(stock)
    def get_moe_module_spec_for_backend(*args: Any, **kwargs: Any) -> Any:
        spec = stock(*args, **kwargs)
        return partial(build_moe_layer, spec.func, *spec.args, **spec.keywords)

    return get_moe_module_spec_for_backend


def _read_loss_masks() -> None:
    """Let datasets with a loss mask beside them use it; all others give what they gave."""
    dataset = _find("megatron.core.datasets.gpt_dataset", "GPTDataset")
    if not hasattr(dataset.__getitem__, "_megatron_lrmoe"):
        from megatron_lrmoe.mcore.loss_mask import masked

        dataset.__getitem__ = masked(dataset.__getitem__)
        dataset.__getitem__._megatron_lrmoe = True


def _touch_hybrid_spec() -> None:
    """Let hybrid models build our layer; without such a spec, a layer that is not ours is refused when built."""
    try:
        submodules = _find(*_HYBRID)
    except ImportError:
        return
    spec = submodules.mlp
    if isinstance(spec, partial) and spec.func is not build_moe_layer:
        submodules.mlp = partial(build_moe_layer, spec.func, *spec.args, **spec.keywords)


def build_moe_layer(stock_layer: Any, *args: Any, config: Any, **kwargs: Any) -> Any:
    """Build our layer if ``config.moe_lrm`` asks for it, else ``stock_layer``.

    Raises:
        RuntimeError: another plugin has put a layer of its own where Megatron's is expected.
    """
    if not isinstance(getattr(config, "moe_lrm", None), LrmConfig):
        return stock_layer(*args, config=config, **kwargs)
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megatron_lrmoe.mcore.layer import LRMoELayer

    if stock_layer is not MoELayer:
        raise RuntimeError(f"--moe-lrm-retention: found MoE layers of {stock_layer}, allowed is {MoELayer}")
    return LRMoELayer(config, *args, **kwargs)


def activate(settings: LrmConfig) -> None:
    """What the first config that asks for the plugin sets in motion."""
    global _active
    if _active:
        return
    _active = True
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker

    report_metrics(settings)
    MoELayer.__init__ = _refusing_others(MoELayer.__init__)
    if os.environ.get("RANK", "0") == "0":
        places = [f"{module}.{name}" for module, name in PATCHED]
        for method in (MoEMetricsTracker.report, MoELayer.__init__):
            places.append(f"{method.__module__}.{method.__qualname__}")
        # A warning, because Megatron sets its own logging level only later.
        logger.warning(
            "%s: %s; replaced in Megatron %s: %s",
            f"dropping MoE backward work from iteration {settings.first_iteration} on"
            if settings.drops
            else "replicas of experts, nothing is dropped",
            settings,
            versions.found(),
            ", ".join(places),
        )


def report_metrics(settings: LrmConfig) -> None:
    """Add our scalars to the line of Megatron's MoE metrics, once."""
    from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker

    from megatron_lrmoe.mcore.metrics import reporting

    if not hasattr(MoEMetricsTracker.report, "_megatron_lrmoe"):
        MoEMetricsTracker.report = reporting(MoEMetricsTracker.report, settings.log_detail)
        MoEMetricsTracker.report._megatron_lrmoe = True


def _adapt() -> None:
    """What the first config with ``--moe-lrm-adaptive`` sets in motion."""
    global _adapts
    if _adapts:
        return
    _adapts = True
    _find("megatron.training.training", "training_log")
    from megatron_lrmoe.mcore import adaptive

    adaptive.install()


def _refusing_others(stock_init: Any) -> Any:
    @wraps(stock_init)
    def checked_init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        from megatron_lrmoe.mcore.layer import LRMoELayer

        if isinstance(getattr(config, "moe_lrm", None), LrmConfig) and not isinstance(self, LRMoELayer):
            raise RuntimeError(
                f"--moe-lrm-retention: found a {type(self).__name__} that would run the full backward, allowed "
                "are layers of GPT specs that were made after megatron_lrmoe.megatron_adaptor was imported"
            )
        stock_init(self, config, *args, **kwargs)

    return checked_init
