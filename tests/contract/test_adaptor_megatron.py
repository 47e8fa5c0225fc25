"""The adaptor inside the real Megatron: settings, and the classes that its specs build.

Module-level functions without a test's name run in the gloo workers, which have the CPU device.
"""

import importlib
import logging
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from megatron_lrmoe.mcore import versions
from megatron_lrmoe.mcore.adaptor import NEEDED, PATCHED
from tests.contract.command_lines import ALLTOALL, ON, SMALL, arguments_module, on_cpu, parsed
from tests.gloo import ROOT, Pool
from tests.layers import parallel


def built_classes(words: str) -> dict[str, Any]:
    """What a model built as pretrain_gpt builds it consists of: a list of class names per MoE layer, and more."""
    arguments_module()
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import get_submodules
    from megatron.training import arguments, global_vars

    args = parsed(on_cpu(f"{SMALL} {words}"))
    parallel(1)
    settings, provider = versions.gpt_model(args)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    if provider is None:
        config = settings.transformer
        model = settings.get_builder_cls()(settings).build_model(groups, pre_process=True, post_process=True)
    else:
        config, args.padded_vocab_size = arguments.core_transformer_config_from_args(args), args.vocab_size
        global_vars.set_args(args)
        model = provider(config=config, pg_collection=groups)
        global_vars.destroy_global_vars()
    heads = model.mtp.layers if hasattr(model, "mtp") else []
    layers = [*model.decoder.layers, *(head.mtp_model_layer for head in heads)]
    specs = get_gpt_decoder_block_spec(config, use_transformer_engine=False).layer_specs
    return {
        "settings": getattr(config, "moe_lrm", None),
        "layers": [parts_of(layer.mlp) for layer in layers],
        "keys": sorted(model.state_dict()),
        "experts in spec": [hasattr(get_submodules(s.submodules.mlp), "experts") for s in specs],
    }


def parts_of(mlp: Any) -> list[str]:
    parts = [mlp, getattr(mlp, "token_dispatcher", None), getattr(mlp, "experts", None)]
    return [type(part).__name__ for part in parts if part is not None]


STOCK = ["MoELayer", "MoEAlltoAllTokenDispatcher", "SequentialMLP"]
OURS = ["LRMoELayer", "LRMAlltoAllTokenDispatcher", "LRMSequentialMLP"]


def test_stock_classes_without_the_flag_and_at_retention_one(gloo2: Pool) -> None:
    for words in (ALLTOALL, f"{ALLTOALL} --moe-lrm-retention 1.0 --moe-lrm-selection topk"):
        for built in gloo2(built_classes, words):
            assert built["settings"] is None
            assert built["layers"] == [STOCK, STOCK]


def test_our_classes_with_the_flag_under_the_same_parameter_names(gloo2: Pool) -> None:
    (stock, _), (ours, _) = gloo2(built_classes, ALLTOALL), gloo2(built_classes, f"{ALLTOALL} {ON}")
    assert ours["settings"].retention == 0.8
    assert ours["layers"] == [OURS, OURS]
    assert ours["keys"] == stock["keys"]
    assert ours["experts in spec"] == stock["experts in spec"] == [True, True]


def test_dense_layers_stay_dense_and_mtp_gets_our_layer(gloo2: Pool) -> None:
    version, _ = versions.installed() or ("", None)
    if version.startswith("0.20.") and find_spec("transformer_engine") is None:
        pytest.skip("Megatron's main builds multi-token prediction with Transformer Engine only")
    words = f"{ALLTOALL} {ON} --moe-layer-freq [0,1] --mtp-num-layers 1"
    for built in gloo2(built_classes, words):
        assert built["layers"] == [["MLP"], OURS, OURS]
        assert built["experts in spec"] == [False, True]


def hybrid_layer() -> list[str]:
    """Classes that the hybrid stack's own spec builds, with expert modules that need no Transformer Engine."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    arguments = arguments_module()
    parallel(1)
    config = arguments.core_transformer_config_from_args(parsed(on_cpu(f"{SMALL} {ALLTOALL} {ON}")))
    spec = hybrid_stack_spec.submodules.moe_layer.submodules.mlp
    local = get_moe_module_spec_for_backend(LocalSpecProvider(), num_experts=4).keywords["submodules"]
    return parts_of(spec(config=config, submodules=local, pg_collection=None, is_mtp_layer=False, name="mlp"))


def test_the_hybrid_stack_made_at_import_builds_our_layer(gloo2: Pool) -> None:
    assert gloo2(hybrid_layer) == [OURS, OURS]


def refused_layer() -> str:
    from functools import partial

    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import moe_module_specs
    from megatron.core.models.hybrid import hybrid_layer_specs

    arguments = arguments_module()
    parallel(1)
    config = arguments.core_transformer_config_from_args(parsed(on_cpu(f"{SMALL} {ALLTOALL} {ON}")))
    early = hybrid_layer_specs.moe
    foreign = partial(dict, submodules=None)
    stock = moe_module_specs.get_moe_module_spec_for_backend.__wrapped__
    late = stock(LocalSpecProvider(), num_experts=4)
    said = []
    for spec in (
        early,
        late,
        partial(moe_module_specs.get_moe_module_spec_for_backend(LocalSpecProvider(), 4).func, foreign),
    ):
        with pytest.raises(RuntimeError) as caught:
            spec(config=config, pg_collection=None, is_mtp_layer=False, name="mlp")
        said.append(str(caught.value))
    return "\n".join(said)


def test_a_layer_that_would_run_the_full_backward_is_refused(gloo2: Pool) -> None:
    for said in gloo2(refused_layer):
        early, late, foreign = said.splitlines()
        for line in (early, late):
            assert line.startswith("--moe-lrm-retention: found a MoELayer that would run the full backward, allowed")
        assert foreign.startswith("--moe-lrm-retention: found MoE layers of functools.partial")


def log_of_two_configs(rank: str) -> list[str]:
    from megatron_lrmoe.mcore import adaptor

    arguments = arguments_module()
    args = parsed(on_cpu(f"{SMALL} {ALLTOALL} {ON}"))
    off = parsed(on_cpu(f"{SMALL} {ALLTOALL}"))
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    adaptor.logger.addHandler(handler)
    before, adaptor._active = (os.environ["RANK"], adaptor._active), False
    os.environ["RANK"] = rank
    try:
        arguments.core_transformer_config_from_args(off)
        assert not lines
        for _ in range(2):
            arguments.core_transformer_config_from_args(args)
    finally:
        os.environ["RANK"], adaptor._active = before
        adaptor.logger.removeHandler(handler)
    return lines


def test_one_log_line_on_rank_zero_names_what_was_replaced(gloo2: Pool) -> None:
    (line,) = gloo2(log_of_two_configs, "0")[0]
    assert "retention=0.8" in line
    for module, name in PATCHED:
        assert f"{module}.{name}" in line
    assert "MoEMetricsTracker.report" in line and "MoELayer.__init__" in line
    assert gloo2(log_of_two_configs, "1")[0] == []


def overrides_without_a_parent() -> list[str]:
    from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    from megatron_lrmoe.mcore.dispatcher import LRMAlltoAllTokenDispatcher
    from megatron_lrmoe.mcore.layer import LRMoELayer

    checked = {f"{module}.{name}" for module, name in NEEDED}
    for stock in (SequentialMLP, TEGroupedMLP):
        assert "forward" in vars(stock)
    return [
        f"{parent.__module__}.{parent.__name__}.{name}"
        for ours, parent in ((LRMoELayer, MoELayer), (LRMAlltoAllTokenDispatcher, MoEAlltoAllTokenDispatcher))
        for name, value in vars(ours).items()
        if callable(value)
        and name != "__init__"
        and name in dir(parent)
        and f"{parent.__module__}.{parent.__name__}.{name}" not in checked
    ]


def test_every_method_we_override_is_checked_at_import(gloo2: Pool) -> None:
    assert gloo2(overrides_without_a_parent) == [[], []]


# What pretrain_gpt.py and the files beside it import of Megatron.
PRETRAIN_IMPORTS = (
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.experimental_attention_variant_module_specs",
    "megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs",
    "megatron.core.models.hybrid.hybrid_layer_specs",
    "megatron.core.tokenizers.utils.build_tokenizer",
    "megatron.core.transformer.multi_token_prediction",
    "megatron.training",
    "megatron.training.argument_utils",
    "megatron.training.arguments",
    "megatron.training.checkpointing",
    "megatron.training.datasets.sft_dataset",
    "megatron.training.initialize",
    "megatron.training.models.gpt",
    "megatron.training.models.hybrid",
    "megatron.training.training",
    "megatron.training.utils",
    "megatron.training.yaml_arguments",
)


def stale_bindings() -> list[str]:
    """Names in any module that still hold a function of Megatron which the adaptor has replaced."""
    arguments_module()
    for module in PRETRAIN_IMPORTS:
        if find_spec(module) is not None:
            importlib.import_module(module)
    old = {id(getattr(sys.modules[module], name).__wrapped__) for module, name in PATCHED}
    return [
        f"{name}.{attribute}"
        for name, module in list(sys.modules.items())
        for attribute, value in list(getattr(module, "__dict__", {}).items())
        if id(value) in old
    ]


def test_no_module_of_megatron_holds_an_old_function(gloo2: Pool) -> None:
    assert gloo2(stale_bindings) == [[], []]


@pytest.mark.slow
def test_imported_after_all_of_megatron_it_replaces_the_same_names() -> None:
    code = f"""
import importlib.util
from megatron_lrmoe.device import activate_if_needed
activate_if_needed()
for module in {PRETRAIN_IMPORTS!r}:
    if importlib.util.find_spec(module) is not None:
        importlib.import_module(module)
from tests.contract.command_lines import SMALL, ALLTOALL, ON, on_cpu, parsed
from tests.contract.test_adaptor_megatron import stale_bindings
assert stale_bindings() == []
from megatron.training import arguments
config = arguments.core_transformer_config_from_args(parsed(on_cpu(f"{{SMALL}} {{ALLTOALL}} {{ON}}")))
assert config.moe_lrm.retention == 0.8
"""
    python_path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    environment = os.environ | {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
