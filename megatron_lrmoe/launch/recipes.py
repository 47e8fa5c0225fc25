"""Recipes: the YAML files under configs/ as Megatron's flags, and how many parameters they describe."""

import ast
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lrmoe.launch.shipped import folder

Flags = dict[str, str | bool | list[str]]
"""Value of each flag, by the flag as it is written; True for a switch."""


@dataclass(frozen=True)
class Recipe:
    """One model and how it is trained.

    Args:
        name: of the file, without its suffix.
        summary: its first line.
        gpus: that its parallel sizes are meant for.
        environment: variables of the training processes.
        flags: of Megatron.
        text: the file.
    """

    name: str
    summary: str
    gpus: int
    environment: dict[str, str]
    flags: Flags
    text: str


def names() -> list[str]:
    """Every recipe there is."""
    return sorted(path.stem for path in folder("configs").glob("*.yaml"))


def load(name: str) -> Recipe:
    """Read a recipe.

    Raises:
        ValueError: there is none of this name, or its file is not in the form that is expected.
    """
    path = folder("configs") / f"{name}.yaml"
    if name not in names():
        raise ValueError(f"recipe: found {name!r}, allowed are {', '.join(names())}")
    return parse(path, path.read_text())


def parse(path: Path, text: str) -> Recipe:
    """A recipe from its file's text.

    Raises:
        ValueError: listing everything that is not in the form of Megatron's functional tests.
    """
    try:
        import yaml
    except ImportError as error:
        raise ValueError("recipes need pyyaml: pip install 'megatron-lrmoe[report]'") from error
    summary, gpus = (re.search(pattern, text, re.MULTILINE) for pattern in (r"\A# (.+)$", r"^# GPUs: (\d+)$"))
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: found no YAML: {error}") from error
    problems = _problems(content)
    if summary is None or gpus is None:
        problems.append("found no first lines '# SUMMARY' and '# GPUs: N'")
    if problems or summary is None or gpus is None:
        raise ValueError("\n".join([f"{path}: not a recipe:", *problems]))
    environment = {name: str(value) for name, value in content["ENV_VARS"].items()}
    flags = {flag: _value(value) for flag, value in content["MODEL_ARGS"].items()}
    return Recipe(path.stem, summary[1], int(gpus[1]), environment, flags, text)


def _problems(content: Any) -> list[str]:
    if not isinstance(content, dict) or set(content) != {"ENV_VARS", "MODEL_ARGS"}:
        return ["expected the two mappings ENV_VARS and MODEL_ARGS"]
    if wrong := [name for name, part in content.items() if not isinstance(part, dict)]:
        return [f"{name}: expected a mapping" for name in wrong]
    problems = []
    for flag, value in content["MODEL_ARGS"].items():
        if not re.fullmatch(r"--[a-z][a-z0-9-]*", str(flag)):
            problems.append(f"MODEL_ARGS: found {flag!r}, allowed is a flag such as --num-layers")
        if value is None or value is False or isinstance(value, dict):
            problems.append(f"{flag}: found {value!r}, allowed are true, a number, a text or a list of them")
    return problems


def _value(value: Any) -> str | bool | list[str]:
    if value is True:
        return True
    return [str(part) for part in value] if isinstance(value, list) else str(value)


def words(flags: Mapping[str, str | bool | list[str]]) -> list[str]:
    """The flags as they stand on a command line."""
    line: list[str] = []
    for flag, value in flags.items():
        line += [flag, *([] if value is True else value if isinstance(value, list) else [str(value)])]
    return line


def parameters(flags: Flags) -> tuple[int, int]:
    """All parameters of the model, and those that a token's forward uses, its embedding and output layer among them.

    For decoders with gated or plain experts, grouped queries, RMSNorm, rotary positions; norms are counted, layers of
    multi-token prediction are not.
    """

    def number(name: str, default: int = 0) -> int:
        return int(str(flags.get(f"--{name}", default)))

    hidden, layers, heads = number("hidden-size"), number("num-layers"), number("num-attention-heads")
    head = number("kv-channels", hidden // heads)
    groups = number("num-query-groups", heads) if flags.get("--group-query-attention") else heads
    matrices = 3 if flags.get("--swiglu") else 2
    attention = hidden * head * (heads + 2 * groups) + heads * head * hidden + 2 * hidden
    attention += head * (heads + 2 * groups) if flags.get("--add-qkv-bias") else 0
    attention += 2 * head if flags.get("--qk-layernorm") else 0
    expert = matrices * hidden * number("moe-ffn-hidden-size")
    shared = matrices * hidden * number("moe-shared-expert-intermediate-size")
    router = number("num-experts") * hidden
    with_experts = sum(moe_layers(str(flags.get("--moe-layer-freq", "1")), layers))
    dense = (layers - with_experts) * matrices * hidden * number("ffn-hidden-size")
    multiple = number("make-vocab-size-divisible-by", 128)
    vocabulary = 128 * multiple if multiple > 1000 else multiple
    ends = vocabulary * hidden * (2 if flags.get("--untie-embeddings-and-output-weights") else 1) + hidden
    common = layers * attention + dense + with_experts * (router + shared) + ends
    return (
        common + with_experts * number("num-experts") * expert,
        common + with_experts * number("moe-router-topk") * expert,
    )


def moe_layers(frequency: str, layers: int) -> list[int]:
    """For each layer 1 if it has experts, from the text of ``--moe-layer-freq``: a number, or lists with + and *."""

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
            return (operator.add if isinstance(node.op, ast.Add) else operator.mul)(value(node.left), value(node.right))
        return ast.literal_eval(node)

    pattern = value(ast.parse(frequency, mode="eval").body)
    return [int(layer % pattern == 0) for layer in range(layers)] if isinstance(pattern, int) else pattern
