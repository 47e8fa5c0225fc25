"""The ``--moe-lrm-*`` flags: from the dataclass to Megatron's parser and from its namespace back."""

import typing
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import Field, fields
from typing import Any

from megatron_lrmoe.config import FLAG_PREFIX, LrmConfig, dest_of, field_help, flag_of, parse_layers
from megatron_lrmoe.mcore.support import conflicts


def add_flags(parser: ArgumentParser) -> ArgumentParser:
    """Add one flag per field of LrmConfig, in the field's group; those that a parser has are left alone."""
    help_of = field_help()
    groups: dict[str, Any] = {}
    for f in fields(LrmConfig):
        if flag_of(f.name) in parser._option_string_actions:
            continue
        title = f.metadata["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        groups[title].add_argument(
            flag_of(f.name),
            dest=dest_of(f.name),
            default=f.default,
            help=f"{help_of[f.name]} Default: {f.default}.".replace("%", "%%"),
            **_argparse_type(f),
        )
    _mend_help(parser)
    return parser


def _mend_help(parser: ArgumentParser) -> None:
    """Megatron 0.19 has a help text with a bare percent sign ("1.10 = 10%"), at which --help ends in an error."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        try:
            formatter._expand_help(action)
        except (ValueError, TypeError, KeyError):
            action.help = (action.help or "").replace("%", "%%")


def _argparse_type(f: Field) -> dict[str, Any]:
    if f.type is bool:
        return {"action": "store_true"}
    choices = typing.get_args(f.type)
    if typing.get_origin(f.type) is typing.Literal:
        return {"choices": choices}
    kind = next((c for c in choices if c is not type(None)), f.type)
    return {"type": kind}


def config_from_args(args: Namespace) -> LrmConfig:
    """The plugin's settings; a namespace from an old checkpoint may lack some of them.

    Raises:
        ValueError: listing every value out of range and every flag of Megatron that the plugin refuses.
    """
    values: dict[str, Any] = {f.name: getattr(args, dest_of(f.name), f.default) for f in fields(LrmConfig)}
    problems: list[str] = []
    config = LrmConfig()
    try:
        config = LrmConfig(**values)
    except ValueError as error:
        problems = str(error).splitlines()
    if values["retention"] not in (None, 1):
        problems += conflicts(args)
        problems += _layers_without_experts(values["layers"], args)
    if problems:
        raise ValueError("megatron_lrmoe cannot run with these flags:\n" + "\n".join(problems))
    return config


def refuse_yaml(args: Namespace, argv: Sequence[str]) -> None:
    """Megatron replaces all flags by the file that ``--yaml-cfg`` names, so ours would be lost unnoticed.

    Args:
        args: the namespace made from the file.
        argv: words of the command line.

    Raises:
        ValueError: the file or the command line has a setting of the plugin.
    """
    found = [word.partition("=")[0] for word in argv if word.startswith(FLAG_PREFIX)]
    found += [dest_of(f.name) for f in fields(LrmConfig) if hasattr(args, dest_of(f.name))]
    if found:
        raise ValueError(
            f"--yaml-cfg: found it together with {', '.join(found)}, allowed is Megatron's command line: the "
            "plugin cannot be set up from a file yet"
        )


def _layers_without_experts(layers: str | None, args: Namespace) -> list[str]:
    try:
        chosen = parse_layers(layers)
    except ValueError:
        return []
    if chosen is None or getattr(args, "num_layers", None) is None:
        return []
    # Megatron's own parser has turned expressions such as ([0]+[1]*3) into a list.
    frequency = getattr(args, "moe_layer_freq", 1)
    is_moe = [i % frequency == 0 for i in range(args.num_layers)] if isinstance(frequency, int) else frequency
    # Multi-token prediction repeats the last decoder layer's kind, and its layers count on from there.
    is_moe = [*is_moe, *(getattr(args, "mtp_num_layers", None) or 0) * is_moe[-1:]]
    moe_layers = [i + 1 for i, moe in enumerate(is_moe) if moe]
    wrong = sorted(chosen - set(moe_layers))
    if not wrong:
        return []
    return [f"{flag_of('layers')}: found {wrong}, allowed are this model's MoE layers {moe_layers}"]
