"""What differs between the versions of Megatron that the plugin runs with; everything else asks here.

The seam itself is the same in all of them: the functions that the adaptor replaces, the methods that our classes
override, the metrics tracker, ``args.curr_iteration``. What differs, and is found by looking and not by a number, since
forks carry numbers of their own:

| | 0.18.2 | 0.19.2 | main, 0.20.0 |
|---|---|---|---|
| GPT model without a checkout's scripts | none, so it is built here | GPTModelConfig | GPTModelConfig |
| ``pretrain`` | needs ``model_provider``, third | optional, fifth | optional, fifth |
| packed documents in the data loader | none | ``--dataloader-inter-document-masking`` | the same |
| ``get_batch_on_this_tp_rank`` | ``is_sft`` | ``has_cu_seqlens`` | ``has_cu_seqlens`` |
| ``get_batch_on_this_cp_rank`` | | ``use_per_sequence_balancing`` | the same |
| ``GPTDatasetConfig`` | | ``inter_document_masking`` | the same |
| ``PackedSeqParams`` | | ``tokens_per_sample`` | the same |

Nothing of Megatron is imported before a function is called.
"""

import importlib
import inspect
import logging
import os
import runpy
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

KNOWN = {"0.18": "0.18.2", "0.19": "0.19.2", "0.20": "main (0.20.0)"}
"""The version that is tested of each minor version that is known."""

CHECKOUT_VARIABLES = ("MEGATRON_LM_PATH", "MEGATRON_PATH")
"""Environment variables that name a checkout of Megatron-LM."""

UNKNOWN = "(version unknown)"

_NOT_BUILT = {
    "spec": "--spec",
    "heterogeneous_layers_config_path": "--heterogeneous-layers-config-path",
    "experimental_attention_variant": "--experimental-attention-variant",
    "record_memory_history": "--record-memory-history",
}


def found() -> str:
    """Version of the Megatron that is imported."""
    try:
        info = importlib.import_module("megatron.core.package_info")
        return _without_strange_commit(str(info.__version__), Path(str(info.__file__)).parents[2])
    except (ImportError, AttributeError):
        return UNKNOWN


def _without_strange_commit(version: str, folder: Path) -> str:
    """Megatron appends the commit of the repository that it lies in, which for a wheel is somebody else's."""
    return version if (folder / ".git").exists() else version.partition("+")[0]


def is_known(version: str) -> bool:
    """Whether the plugin is tested with this minor version."""
    return ".".join(version.split(".")[:2]) in KNOWN


def warn_if_unknown() -> None:
    """Say once, on the first rank, that the Megatron found is not one that the plugin is tested with."""
    version = found()
    if not is_known(version) and os.environ.get("RANK", "0") == "0":
        logger.warning("found Megatron %s, megatron_lrmoe is tested with %s", version, ", ".join(KNOWN.values()))


def use_checkout() -> tuple[str, Path] | None:
    """Let the checkout that the environment names win over an installed Megatron.

    Returns:
        The variable and the folder; None when no variable is set.

    Raises:
        ValueError: the folder is no checkout.
    """
    variable = next((name for name in CHECKOUT_VARIABLES if os.environ.get(name)), None)
    if variable is None:
        return None
    folder = Path(os.environ[variable]).resolve()
    if not (folder / "megatron" / "core" / "package_info.py").is_file():
        raise ValueError(f"{variable}: found {str(folder)!r}, allowed is a checkout of Megatron-LM")
    sys.path.insert(0, str(folder))
    return variable, folder


def installed() -> tuple[str, Path] | None:
    """Version and folder of the Megatron that an import would find, without importing it; None without one."""
    try:
        spec = find_spec("megatron.core")
    except ModuleNotFoundError:
        return None
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    folder = package.parents[1]
    version = runpy.run_path(str(package / "package_info.py")).get("__version__", UNKNOWN)
    return _without_strange_commit(str(version), folder), folder


@lru_cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def accepted(function: Callable[..., Any], **values: Any) -> dict[str, Any]:
    """Those keyword arguments that a function or class of this version has."""
    return {name: value for name, value in values.items() if name in _parameters(function)}


def packs_documents(args: Namespace) -> bool:
    """Whether the data loader packs documents that attention keeps apart."""
    return bool(getattr(args, "dataloader_inter_document_masking", False))


def flat_batch(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch of packed sequences as one sequence, where this version packs them."""
    from megatron.core import utils

    flatten = getattr(utils, "flatten_batch_for_packed_sequences", None)
    return batch if flatten is None else flatten(batch)


def gpt_model(args: Namespace) -> tuple[Any, Callable[..., Any] | None]:
    """How ``pretrain`` gets its GPT: the model settings of its container, or a model provider.

    Raises:
        ValueError: this version's wheel builds no GPT of these flags.
    """
    from megatron.training import argument_utils

    from_args = getattr(argument_utils, "gpt_config_from_args", None)
    if from_args is not None:
        return from_args(args), None
    refused = [flag for dest, flag in _NOT_BUILT.items() if getattr(args, dest, None)]
    if refused:
        raise ValueError(
            f"{', '.join(refused)}: found, but megatron_lrmoe.pretrain_gpt does not build such a model with Megatron "
            f"{found()}; allowed with Megatron-LM's own pretrain_gpt.py under megatron_lrmoe.run"
        )
    return None, built_gpt


def built_gpt(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> Any:
    """One pipeline stage of the GPT of Megatron's arguments, as a model provider of Megatron 0.18 is called."""
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.training import arguments, get_args

    args: Any = get_args()
    config = config or arguments.core_transformer_config_from_args(args)
    te = args.transformer_impl == "transformer_engine"
    kind = {"normalization": args.normalization, "qk_l2_norm": args.qk_l2_norm, "vp_stage": vp_stage}
    heads = None
    if args.mtp_num_layers is not None:
        # Heads for multi-token prediction are built like the decoder's last layer, wherever that one is.
        last = gpt_layer_specs.get_gpt_decoder_layer_specs(config, use_transformer_engine=te, **kind)[-1]  # type: ignore[index]
        heads = gpt_layer_specs.get_gpt_mtp_block_spec(config, last, use_transformer_engine=te, vp_stage=vp_stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=te, **kind),  # type: ignore[arg-type]
        mtp_block_spec=heads,  # type: ignore[arg-type]
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        rope_scaling=args.use_rope_scaling,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )
