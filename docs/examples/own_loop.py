"""A Megatron model in a training loop of one's own, with no Megatron command line: convert it, then train.

    torchrun --nproc-per-node 2 docs/examples/own_loop.py

On a machine without a GPU it runs on the CPU, with gloo.
"""

import os

import torch

from megatron_lrmoe.config import LrmConfig
from megatron_lrmoe.device import activate_if_needed

ON_CPU = activate_if_needed()  # before Megatron is imported; does nothing where there is a GPU

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

from megatron_lrmoe.mcore.frameworks import convert_moe_layers  # noqa: E402

SEQUENCE, VOCABULARY, STEPS = 64, 128, 5


def build_model() -> GPTModel:
    """Two layers of 8 experts, as any framework builds them."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_moe_experts=8,
        moe_ffn_hidden_size=64,
        moe_router_topk=2,
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=2,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        transformer_impl="local",
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    return GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE, position_embedding_type="rope")


def main() -> None:
    """Train a few steps and print what each costs."""
    torch.distributed.init_process_group("gloo" if ON_CPU else "nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)

    step = 0
    model = build_model().cuda()
    converted = convert_moe_layers(model, LrmConfig(retention=0.8), iteration=lambda: step, seed=lambda: 1234)
    ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)

    tokens = torch.randint(VOCABULARY, (4, SEQUENCE + 1)).cuda()
    positions = torch.arange(SEQUENCE).expand(4, SEQUENCE).cuda()
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1).cuda()
    for step in range(STEPS):
        ddp.zero_grad_buffer()
        loss = ddp(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean()
        loss.backward()
        ddp.finish_grad_sync()
        for weight in ddp.parameters():
            weight.grad = weight.main_grad
        optimizer.step()
        if torch.distributed.get_rank() == 0:
            print(f"layers {converted}, step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
