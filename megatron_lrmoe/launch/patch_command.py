"""The command line of ``megatron-lrmoe patch``."""

import argparse
from pathlib import Path


def add(commands: argparse._SubParsersAction) -> None:
    """Add the command to the others."""
    patch = commands.add_parser(
        "patch",
        help="put the plugin's import into a checkout of Megatron-LM, or take it out again",
        description="Add 'import megatron_lrmoe.megatron_adaptor' under 'import torch' in pretrain_gpt.py and "
        "pretrain_hybrid.py. All files or none; a tree that does not match is left as it is, exit status 1.",
        epilog="For example: megatron-lrmoe patch Megatron-LM",
    )
    patch.add_argument("checkout", type=Path, metavar="CHECKOUT")
    action = patch.add_mutually_exclusive_group()
    for name, text in {
        "check": "say whether it is applied or could be",
        "reverse": "take it out again, byte for byte",
        "dry-run": "say what would be done",
        "diff": "print the patch for this checkout's version",
    }.items():
        action.add_argument(f"--{name}", dest="action", action="store_const", const=name, help=text)
    patch.set_defaults(run=_run, action="apply")


def _run(args: argparse.Namespace) -> int:
    from megatron_lrmoe.launch import patch

    return patch.run(args.checkout, args.action)
