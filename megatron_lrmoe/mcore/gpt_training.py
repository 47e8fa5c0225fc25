"""GPT pretraining on Megatron's builders, datasets and training loop.

Megatron's wheel has everything but the script. This is the script: which batch a rank needs, what the loss
is, and which data sets there are.
"""

import json
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets import utils as dataset_utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import (
    StragglerDetector,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers, inprocess_restart, pretrain, print_rank_0
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron_lrmoe.mcore import versions
from megatron_lrmoe.mcore.versions import accepted

TOKEN_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
PACKING_KEYS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")
CONTEXT_KEYS = ("local_cp_size", "hybrid_cp_group")
BATCH_KEYS = TOKEN_KEYS + PACKING_KEYS + CONTEXT_KEYS

# A loss ten times the largest seen so far counts as spiky, as in Megatron's script.
SPIKE = 10

DATASET_FIELDS_NAMED_AS_FLAGS = (
    "allow_ambiguous_pad_tokens",
    "context_parallel_size",
    "data_parallel_size",
    "eod_mask_loss",
    "full_validation",
    "hybrid_context_parallel",
    "mid_level_dataset_surplus",
    "mmap_bin_files",
    "multiple_validation_sets",
    "num_dataset_builder_threads",
    "object_storage_cache_path",
    "reset_attention_mask",
    "reset_position_ids",
    "split",
)

straggler_timer = StragglerDetector()

# Megatron declares its groups as ProcessGroup | int | None, and takes only ProcessGroup.
parallel: Any = parallel_state


def arguments() -> Any:
    """Megatron's parsed arguments, which it declares as None."""
    return get_args()


def model_config() -> Any:
    """Megatron's model settings, made of its arguments."""
    return core_transformer_config_from_args(get_args())


def train() -> None:
    """Parse the command line and train."""
    use_compiled_index_builder()
    train_function, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    # Megatron asks this attribute whether every rank calls the provider, or the first of a group only.
    datasets.is_distributed = True  # type: ignore[attr-defined]
    settings, model_provider = versions.gpt_model(args)
    train_function(
        pretrain_cfg_container_from_args(args, settings),
        datasets,
        model_provider=model_provider,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
        store=store,
        get_embedding_ranks=embedding_ranks,
    )


def use_compiled_index_builder() -> None:
    """Keep Megatron from running make, which the wheel has no Makefile for, when the builder is compiled."""
    makefile = Path(str(dataset_utils.__file__)).with_name("Makefile")
    if not makefile.exists() and find_spec("megatron.core.datasets.helpers_cpp"):
        dataset_utils.compile_helpers = lambda: None


def forward_step(data_iterator: Iterator[Any], model: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
    """One microbatch through the model, or its schedule plan, with the function that makes the loss of it."""
    timers: Any = get_timers
    timer = timers()("batch-generator", log_level=2)
    timer.start()
    with straggler_timer(bdata=True):
        batch = next_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    packing = None if batch["cu_seqlens"] is None else packed_sequences(batch)
    timer.stop()

    inputs = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
    targets = {"labels": batch["labels"], "loss_mask": batch["loss_mask"]}
    with straggler_timer:
        if return_schedule_plan:
            output = model.build_schedule_plan(*inputs, **targets)
        else:
            output = model(*inputs, **targets, packed_seq_params=packing)
    return output, partial(loss_and_report, batch["loss_mask"])


def loss_and_report(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Summed loss over the tokens that count, their number, and what is logged."""
    loss = (output.reshape(-1).float() * mask.reshape(-1).float()).sum()
    tokens = mask.sum().detach().to(torch.int)
    args = arguments()
    machine = get_rerun_state_machine()
    checks = []
    if args.check_for_nan_in_loss_and_grad:
        checks.append((torch.isnan, "NaN in the loss of this rank", True))
        checks.append((torch.isinf, "Inf in the loss of this rank", True))
    if args.check_for_spiky_loss:
        spiky = partial(machine.is_unexpectedly_large, threshold=SPIKE, context="loss")
        checks.append((spiky, "spiky loss", False))
    for rejects, message, fatal in checks:
        # Tolerance 0: a forward pass that is run again must give the same bits.
        machine.validate_result(loss, rejects, message=message, tolerance=0.0, fatal=fatal)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens])}


def next_batch(data_iterator: Iterator[Any], vp_stage: int | None) -> dict[str, Any]:
    """This rank's share of the next microbatch; None for what its pipeline stage does not need."""
    args = arguments()
    packed = versions.packs_documents(args)
    mtp = mtp_is_here(vp_stage)
    needs_tokens = mtp or is_first_or_last_pipeline_stage(vp_stage)
    if not needs_tokens and not packed:
        return dict.fromkeys(BATCH_KEYS)
    tp_rank = parallel.get_tensor_model_parallel_rank()
    sample: dict[str, Any] = {}
    if tp_rank == 0:
        # The sample may hold other things as well, such as the number of the data set it is from.
        sample = next(data_iterator)
        for key in BATCH_KEYS:
            tensor = sample.get(key)
            sample[key] = None if tensor is None else tensor.cuda(non_blocking=True)
    batch = get_batch_on_this_tp_rank(
        sample,
        broadcast_src_rank=parallel.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel.get_tensor_model_parallel_group(),
        tp_rank=tp_rank,
        **accepted(get_batch_on_this_tp_rank, has_cu_seqlens=packed, is_sft=packed),
        is_hybrid_cp=args.hybrid_context_parallel,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=mtp,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=parallel.is_pipeline_first_stage(),
        is_pipeline_last_stage=parallel.is_pipeline_last_stage(),
    )
    batch = versions.flat_batch(batch)
    if not needs_tokens:
        return {**dict.fromkeys(BATCH_KEYS), **{key: batch[key] for key in PACKING_KEYS}}
    return get_batch_on_this_cp_rank(
        batch,
        is_hybrid_cp=args.hybrid_context_parallel,
        cp_group=parallel.get_context_parallel_group(),
        hybrid_cp_group_func=parallel.get_hybrid_data_context_parallel_groups,
        **accepted(get_batch_on_this_cp_rank, use_per_sequence_balancing=packed),
    )


def packed_sequences(batch: dict[str, Any]) -> PackedSeqParams:
    """Where the documents of a packed microbatch begin and end, for attention."""
    # Attention wants them flat; the batch has a dimension of 1 before them.
    real: torch.Tensor = batch["cu_seqlens"].squeeze(0)
    padded: Any = batch["cu_seqlens_padded"]
    if padded is not None:
        padded = padded.squeeze(0)
    # Attention computes nothing for padding, and neither may the FLOP count.
    update_seqlen_stats_from_cu_seqlens(real)
    bounds = real if padded is None else padded
    longest = int(batch["max_seqlen"].item())
    fields: dict[str, Any] = {
        "cu_seqlens_q": bounds,
        "cu_seqlens_kv": bounds,
        "cu_seqlens_q_padded": padded,
        "cu_seqlens_kv_padded": padded,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
        "cp_group": batch["hybrid_cp_group"],
        **accepted(PackedSeqParams, tokens_per_sample=arguments().seq_length),
    }
    if batch["local_cp_size"] is not None:
        fields["local_cp_size"] = int(batch["local_cp_size"].item())
    return PackedSeqParams(qkv_format="thd", **fields)


def datasets(train_valid_test_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Training, validation and test set with at least these numbers of samples."""
    args = arguments()
    kind = MockGPTDataset if args.mock_data else GPTDataset
    print_rank_0("> building the data sets ...")
    is_built_here = partial(dataset_is_here, vp_stage)
    train, valid, test = BlendedMegatronDatasetBuilder(
        kind, train_valid_test_samples, is_built_here, dataset_config(args)
    ).build()
    print_rank_0("> data sets are ready")
    return train, valid, test


def dataset_is_here(vp_stage: int | None) -> bool:
    """Whether this rank reads data: the first of its tensor-parallel group, on a stage that needs tokens."""
    first = parallel.get_tensor_model_parallel_rank() == 0
    return first and (is_first_or_last_pipeline_stage(vp_stage) or mtp_is_here(vp_stage))


def dataset_config(args: Any) -> GPTDatasetConfig:
    """Data set settings in the parsed arguments."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences_per_dataset = None
    if args.per_dataset_sequences_path is not None:
        with open(args.per_dataset_sequences_path) as file:
            sequences_per_dataset = json.load(file)
    return GPTDatasetConfig(
        **{name: getattr(args, name) for name in DATASET_FIELDS_NAMED_AS_FLAGS},
        blend=blend,
        blend_per_split=blend_per_split,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        fast_cache_load=args.dataloader_fast_cache_load,
        **accepted(GPTDatasetConfig, inter_document_masking=versions.packs_documents(args)),
        path_to_cache=args.data_cache_path,
        random_seed=args.seed,
        sequence_length=args.seq_length,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
        sequences_per_dataset=sequences_per_dataset,
        tokenizer=build_tokenizer(args),
    )


def mtp_is_here(vp_stage: int | None) -> bool:
    """Whether a multi-token-prediction layer is on this pipeline stage."""
    config = model_config()
    return mtp_on_this_rank(
        layout=config.pipeline_model_parallel_layout,
        mtp_num_layers=config.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )


def embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Ranks of a pipeline with word embeddings: the first, the last if it shares them, those with MTP."""
    if len(pp_ranks) == 1:
        return pp_ranks
    last = [] if arguments().untie_embeddings_and_output_weights else [pp_ranks[-1]]
    mtp = get_mtp_ranks(pp_ranks, model_config())
    return sorted({pp_ranks[0], *last, *mtp})
