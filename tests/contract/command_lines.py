"""Command lines parsed by the real Megatron with the plugin, in a gloo worker."""

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

SMALL = """--num-layers 2 --hidden-size 16 --ffn-hidden-size 16 --num-attention-heads 2 --seq-length 8
--max-position-embeddings 8 --micro-batch-size 1 --train-iters 2 --lr 1e-3 --vocab-size 64 --swiglu
--disable-bias-linear --num-experts 4 --moe-ffn-hidden-size 16 --position-embedding-type rope --mock-data
--untie-embeddings-and-output-weights --use-cpu-initialization --tokenizer-type NullTokenizer"""
ALLTOALL = "--moe-token-dispatcher-type alltoall"
ON = "--moe-lrm-retention 0.8"


@contextlib.contextmanager
def command_line(words: str, world_size: int = 2) -> Iterator[None]:
    before = sys.argv, os.environ["WORLD_SIZE"]
    sys.argv, os.environ["WORLD_SIZE"] = ["pretrain", *words.split()], str(world_size)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        sys.argv, os.environ["WORLD_SIZE"] = before


def arguments_module() -> Any:
    importlib.import_module("megatron_lrmoe.megatron_adaptor")
    return importlib.import_module("megatron.training.arguments")


def parsed(words: str, world_size: int = 2, provider: Callable[[Any], Any] | None = None) -> Any:
    """Megatron's validated namespace of a command line."""
    arguments = arguments_module()
    with command_line(words, world_size):
        args = arguments.parse_args(provider)
        arguments.validate_args(args)
    return args


def on_cpu(words: str) -> str:
    from megatron_lrmoe.device import cpu_flags

    return f"{words} {' '.join(cpu_flags())}"
