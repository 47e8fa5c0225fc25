"""Megatron's parser reads sys.argv and nothing else."""

import contextlib
import sys
from collections.abc import Iterator, Sequence


@contextlib.contextmanager
def command_line(flags: Sequence[str]) -> Iterator[None]:
    """Let ``sys.argv`` be these flags of a training script."""
    before = sys.argv
    sys.argv = ["pretrain_gpt.py", *flags]
    try:
        yield
    finally:
        sys.argv = before


def parser_error(printed: str) -> str:
    """The error at the end of what argparse printed, after the usage of some thousand lines."""
    return printed.rpartition("error: ")[2].strip()
