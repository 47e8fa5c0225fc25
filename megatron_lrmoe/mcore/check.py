"""What a run with these flags would do, without running it: versions, settings with their origin, refusals."""

import contextlib
import io
import logging
import math
import os
import platform
import traceback
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from megatron_lrmoe.config import LrmConfig, dest_of, flag_of
from megatron_lrmoe.mcore import versions
from megatron_lrmoe.mcore.arguments import asks_for_plugin, config_from_args, refuse_yaml, values_from_args
from megatron_lrmoe.mcore.command_line import command_line, parser_error
from megatron_lrmoe.mcore.support import refusals_table
from megatron_lrmoe.mcore.supported import supported_table

REFUSED, BAD_FLAGS = 1, 2
LIBRARIES = (("transformer-engine", "transformer_engine"), ("apex", "apex"), ("deep-ep", "deep_ep"))
COMMAND_LINE, DEFAULT, DERIVED = "command line", "default", "derived"


@dataclass(frozen=True)
class Parsed:
    """Megatron's answer to a command line.

    Args:
        args: the namespace, validated as far as Megatron went; None when its parser refused the line.
        problems: what its parser or its validation said.
    """

    args: Namespace | None
    problems: tuple[str, ...]


def run(flags: Sequence[str]) -> int:
    """Print the report.

    Args:
        flags: of Megatron and of the plugin, as on a launch line; none: versions and the table only.

    Returns:
        0 if nothing is refused, 1 if something is, 2 if Megatron's parser does not take the flags.

    Raises:
        ValueError: the environment names a folder without Megatron.
    """
    checkout = versions.use_checkout()
    _print_block("versions", [f"{name:20}{text}" for name, text in _versions(checkout)])
    status = _report_flags(flags) if flags else 0
    print(f"supported\n\n{supported_table()}\n\nrefused with a retention below 1 or replicas\n\n{refusals_table()}")
    return status


def _report_flags(flags: Sequence[str]) -> int:
    parsed = parse(flags)
    refused = list(parsed.problems)
    if parsed.args is not None:
        rows = settings(parsed.args, flags)
        width = max(len(flag) for flag, _, _ in rows) + 2
        lines = [f"{flag:{width}}{value:16}{origin}" for flag, value, origin in rows]
        if not asks_for_plugin(values_from_args(parsed.args)):
            lines.insert(0, f"{flag_of('retention')} is not below 1, no replicas: Megatron's own classes run")
        _print_block(f"settings, with Megatron's flags validated at WORLD_SIZE {parsed.args.world_size}", lines)
        refused += refusals(parsed.args, flags)
    _print_block("refused with these flags", refused or ["nothing"])
    if parsed.args is None:
        return BAD_FLAGS
    return REFUSED if refused else 0


def _print_block(title: str, lines: Sequence[str]) -> None:
    print("\n  ".join([title, *lines]), end="\n\n")


def _versions(checkout: tuple[str, Any] | None) -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    yield "torch", _library_version("torch", "torch")
    yield "megatron-core", megatron_version(checkout)
    for distribution, module in LIBRARIES:
        yield distribution, _library_version(distribution, module)


def _library_version(distribution: str, module: str) -> str:
    if find_spec(module) is None:
        return "not installed"
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return f"installed, {versions.UNKNOWN}"


def megatron_version(checkout: tuple[str, Any] | None) -> str:
    """Version, where it comes from, and whether the plugin is tested with it.

    Args:
        checkout: environment variable and folder, when the environment names one.
    """
    megatron = versions.installed()
    if megatron is None:
        return "not installed"
    version, folder = megatron
    if checkout is not None and checkout[1] == folder:
        source = f"checkout {folder} ({checkout[0]})"
    else:
        source = f"{'checkout' if (folder / 'pretrain_gpt.py').exists() else 'wheel'} in {folder}"
    untested = "" if versions.is_known(version) else f"; tested are {', '.join(versions.KNOWN.values())}"
    return f"{version}, {source}{untested}"


def parse(flags: Sequence[str]) -> Parsed:
    """Let Megatron's own parser and validation read the flags, on the CPU device where there is no accelerator.

    As many ranks as WORLD_SIZE says, or as few as the parallel sizes allow.

    Raises:
        ValueError: no Megatron that the plugin runs with.
    """
    from megatron_lrmoe.device import activate_if_needed
    from megatron_lrmoe.mcore.adaptor import install

    # The flags are checked as they stand, and those of the CPU device are not added: nothing is said of it.
    logging.getLogger(activate_if_needed.__module__).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    activate_if_needed()
    try:
        install()
    except ImportError as error:
        raise ValueError(str(error)) from error
    from megatron.training.arguments import parse_args, validate_args

    errors = io.StringIO()
    with command_line(flags), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        try:
            args: Namespace = parse_args()
        except SystemExit:
            return Parsed(None, (parser_error(errors.getvalue()),))
        args.world_size = _ranks(args)
        try:
            validate_args(args)
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            return Parsed(args, (f"Megatron: {_said(error)}",))
    return Parsed(args, ())


def _said(error: BaseException) -> str:
    """The message, or the line of code where there is none."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return str(error).strip() or f"{place.line} ({place.filename}:{place.lineno})"


def _ranks(args: Namespace) -> int:
    if "WORLD_SIZE" in os.environ:
        return args.world_size
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    experts = args.expert_model_parallel_size * (args.expert_tensor_parallel_size or tensor)
    return math.lcm(tensor * args.context_parallel_size, experts) * pipeline


def settings(args: Namespace, flags: Sequence[str]) -> list[tuple[str, str, str]]:
    """Flag, effective value and its origin of every setting of the plugin.

    Args:
        args: Megatron's namespace.
        flags: words of the command line.
    """
    given = {word.partition("=")[0] for word in flags}
    values = values_from_args(args)
    if values["min_retention"] is None and values["retention"] not in (None, 1):
        with contextlib.suppress(ValueError):
            values["min_retention"] = float(LrmConfig(retention=values["retention"]).least_share)
    rows = []
    for f in fields(LrmConfig):
        is_derived = values[f.name] != getattr(args, dest_of(f.name), f.default)
        origin = COMMAND_LINE if flag_of(f.name) in given else DERIVED if is_derived else DEFAULT
        value = values[f.name]
        rows.append((flag_of(f.name), "not given" if value is None else str(value), origin))
    return rows


def refusals(args: Namespace, flags: Sequence[str]) -> list[str]:
    """Everything that a run would refuse, by the functions that a run asks.

    Args:
        args: Megatron's namespace.
        flags: words of the command line.
    """
    found: list[str] = []
    try:
        config_from_args(args)
    except ValueError as error:
        found += str(error).splitlines()[1:]
    if getattr(args, "yaml_cfg", None) is not None:
        try:
            refuse_yaml(args, flags)
        except ValueError as error:
            found.append(str(error))
    return found
