"""The command line of ``megatron-lrmoe recipes``."""

import argparse


def add(commands: argparse._SubParsersAction) -> None:
    """Add the command to the others."""
    recipes = commands.add_parser("recipes", help="models with their flags: list, show and run them")
    kinds = recipes.add_subparsers(dest="kind", required=True, metavar="KIND")
    kinds.add_parser("list", help="names, sizes and what each is").set_defaults(run=_list)
    show = kinds.add_parser("show", help="print a recipe, with the source of every value")
    show.add_argument("name", metavar="NAME")
    show.set_defaults(run=_show)
    run = kinds.add_parser(
        "run",
        usage="megatron-lrmoe recipes run [-h] NAME [--dry-run] [--smoke] [-- MEGATRON FLAGS ...]",
        help="train a recipe",
        description="Train a recipe with torchrun. Environment variables say where and how: MEGATRON_PATH, DATA_PATH, "
        "TOKENIZER, GPUS, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, TP, PP, EP, SEQ, MICRO_BATCH, GLOBAL_BATCH, "
        "ITERATIONS, RETENTION, POLICY (stock, lrm, lrm+replicas), SAVE, SAVE_INTERVAL, TENSORBOARD, WANDB_PROJECT. "
        "What follows -- goes to Megatron and wins.",
        allow_abbrev=False,
    )
    run.add_argument("name", metavar="NAME")
    run.add_argument("--dry-run", action="store_true", help="print the command and the check's report, run nothing")
    run.add_argument("--smoke", action="store_true", help="two iterations at toy widths on this machine's CPU")
    run.set_defaults(run=_run)


def _list(_: argparse.Namespace) -> int:
    from megatron_lrmoe.launch import recipes

    for name in recipes.names():
        recipe = recipes.load(name)
        total, active = recipes.parameters(recipe.flags)
        print(f"{name:22} {total / 1e9:7.2f} B parameters, {active / 1e9:5.2f} B for a token  {recipe.summary}")
    return 0


def _show(args: argparse.Namespace) -> int:
    from megatron_lrmoe.launch import recipes

    print(recipes.load(args.name).text, end="")
    return 0


def _run(args: argparse.Namespace) -> int:
    from megatron_lrmoe.launch import launcher, recipes
    from megatron_lrmoe.launch.settings import Settings

    job = launcher.launch(recipes.load(args.name), Settings.read())
    if args.smoke:
        job = launcher.smoke(job)
    job = launcher.with_flags(job, [word for word in args.flags if word != "--"])
    return launcher.dry_run(job) if args.dry_run else launcher.start(job)
