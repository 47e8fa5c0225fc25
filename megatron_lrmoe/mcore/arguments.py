"""The ``--moe-lrm-*`` flags: from the dataclass to Megatron's parser and from its namespace back."""

import math
import typing
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from fractions import Fraction
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


def values_from_args(args: Namespace) -> dict[str, Any]:
    """Value of each setting of the plugin, unchecked; what follows from Megatron's flags is filled in."""
    values: dict[str, Any] = {f.name: getattr(args, dest_of(f.name), f.default) for f in fields(LrmConfig)}
    if values["start_iter"] is None and asks_for_plugin(values):
        values["start_iter"] = warm_up_iterations(args)
    return values


def asks_for_plugin(values: Mapping[str, Any]) -> bool:
    """Whether these settings, checked or not, put the plugin's classes in place."""
    return values["retention"] not in (None, 1) or values["replica_policy"] != "none"


def config_from_args(args: Namespace) -> LrmConfig:
    """The plugin's settings; a namespace from an old checkpoint may lack some of them.

    Raises:
        ValueError: listing every value out of range and every flag of Megatron that the plugin refuses.
    """
    values = values_from_args(args)
    problems: list[str] = []
    config = LrmConfig()
    try:
        config = LrmConfig(**values)
    except ValueError as error:
        problems = str(error).splitlines()
    if asks_for_plugin(values):
        problems += conflicts(args)
        problems += _layers_without_experts(values["layers"], args)
    if problems:
        raise ValueError(f"{flag_of('retention')}: megatron_lrmoe cannot run with these flags:\n" + "\n".join(problems))
    return config


def differences(checkpoint_args: Namespace, args: Namespace) -> list[str]:
    """One sentence for each flag of the plugin whose value is not that of the run that saved the checkpoint.

    Args:
        checkpoint_args: Megatron's namespace as the checkpoint holds it; without our flags if it is stock Megatron's.
        args: of this run, which count.
    """
    sentences = []
    for field in fields(LrmConfig):
        here, there = (getattr(a, dest_of(field.name), field.default) for a in (args, checkpoint_args))
        if here != there:
            sentences.append(
                f"{flag_of(field.name)}: {_said(here)} on the command line, {_said(there)} in the checkpoint"
            )
    return sentences


def _said(value: Any) -> str:
    return "not given" if value is None else repr(value)


def warm_up_iterations(args: Namespace) -> int:
    """Iterations until the learning rate has warmed up, rounded up; 0 without a warm-up.

    As Megatron's get_optimizer_param_scheduler (training.py:1907-1937) reads the flags, in its order. A warm-up given
    in samples is counted at the final batch size.
    """

    def given(name: str) -> int:
        return getattr(args, name, None) or 0

    samples_each = 1 if given("train_iters") else given("global_batch_size") or 1
    if fraction := getattr(args, "lr_warmup_fraction", None):
        total = given("lr_decay_iters") or given("train_iters") or given("lr_decay_samples") or given("train_samples")
        # The decimal fraction that was written: 0.07 of 100 is 7, and not above it.
        return math.ceil(Fraction(repr(fraction)) * total / samples_each)
    return math.ceil(Fraction(given("lr_warmup_iters") or given("lr_warmup_samples"), samples_each))


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
    moe_layers = _moe_layers(args)
    wrong = sorted(chosen - set(moe_layers))
    if not wrong:
        return []
    return [f"{flag_of('layers')}: found {wrong}, allowed are this model's MoE layers {moe_layers}"]


def _moe_layers(args: Namespace) -> list[int]:
    """Numbers from 1 of the layers with experts; those of multi-token prediction count on after the decoder's."""
    if pattern := getattr(args, "hybrid_layer_pattern", None):
        # Stages end at a bar, E has experts, and those of prediction depths, after a slash, are refused.
        decoder = pattern.partition("/")[0].replace("|", "")
        return [i + 1 for i, kind in enumerate(decoder) if kind == "E"]
    is_moe = decoder_layers_with_experts(args)
    # Multi-token prediction repeats the last decoder layer's kind.
    is_moe = [*is_moe, *(getattr(args, "mtp_num_layers", None) or 0) * is_moe[-1:]]
    return [i + 1 for i, moe in enumerate(is_moe) if moe]


def decoder_layers_with_experts(args: Namespace) -> list[bool]:
    """Of each decoder layer of a GPT, whether it has experts."""
    # Megatron's own parser has turned expressions such as ([0]+[1]*3) into a list.
    frequency = getattr(args, "moe_layer_freq", 1)
    return [i % frequency == 0 for i in range(args.num_layers)] if isinstance(frequency, int) else frequency
