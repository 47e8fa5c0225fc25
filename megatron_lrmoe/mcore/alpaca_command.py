"""The command line of ``megatron-lrmoe data alpaca``."""

import argparse
import sys
from pathlib import Path


def add(kinds: argparse._SubParsersAction) -> None:
    """Add the kind to those of ``data``."""
    alpaca = kinds.add_parser(
        "alpaca",
        help="from instructions in Alpaca's format (.json, .jsonl) or plain .jsonl text",
        description="Write records with instruction, input and output, or with a text, as a Megatron indexed dataset. "
        "A bad record is named with its line.",
    )
    alpaca.add_argument("files", nargs="+", type=Path, metavar="FILE")
    alpaca.add_argument("--output", required=True, type=Path, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx")
    alpaca.add_argument("--tokenizer", type=Path, metavar="DIR", help="of Hugging Face (default: a token a byte)")
    alpaca.add_argument("--seq-length", type=int, metavar="N", help="pack whole examples into documents of N tokens")
    alpaca.add_argument("--mask-prompt", action="store_true", help="learn the outputs only, in runs with the plugin")
    alpaca.add_argument("--template", type=Path, metavar="FILE", help="prompt with {instruction} and {input}")
    alpaca.add_argument("--json-key", default="text", help="field of a plain text record (default: text)")
    alpaca.add_argument("--on-error", choices=("stop", "skip"), default="stop", help="at bad records (default: stop)")
    alpaca.add_argument(
        "--too-long",
        choices=("truncate", "skip", "stop"),
        default="truncate",
        help="with --seq-length, at longer examples (default: truncate)",
    )
    alpaca.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from megatron_lrmoe.mcore import alpaca, loss_mask, tokens

    options = alpaca.Options(
        seq_length=args.seq_length,
        mask_prompt=args.mask_prompt,
        template=_read(args.template),
        json_key=args.json_key,
        on_error=args.on_error,
        too_long=args.too_long,
    )
    tokenizer = tokens.hugging_face(args.tokenizer) if args.tokenizer else tokens.byte_level()
    written = alpaca.build(args.files, args.output, tokenizer, options)
    for sentence in written.skipped:
        print(f"left out: {sentence}", file=sys.stderr)
    print(
        f"{written.prefix}: {written.examples} examples in {written.documents} documents, {written.tokens} tokens, "
        f"{written.filling} filling; {written.truncated} examples cut, {written.too_long} too long and left out, "
        f"{written.bad} bad records left out"
    )
    length = f" --seq-length {args.seq_length}" if args.seq_length else ""
    print(f"train on it with: --data-path {written.prefix} {' '.join(tokenizer.flags)}{length}")
    if written.masked:
        print(f"loss mask: {loss_mask.mask_of(written.prefix)}; Megatron without the plugin does not read it")
    return 0


def _read(path: Path | None) -> str | None:
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--template: {path}: cannot be read: {error}") from error
