"""Every command in README and docs is run by a test, is what CI itself runs, or is marked as needing GPUs."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_lrmoe import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "patches" / "README.md"]
_PROGRAM = r"(?:make|megatron-lrmoe|torchrun|bash|pip|python3?|\.venv/bin/\S+|sbatch|git|scripts/\S+)"
_COMMAND = re.compile(rf"(?:\$ )?((?:[A-Z_]+=\S+ )*{_PROGRAM} .*)")

# What a documented command begins with, the test that runs it (maybe at smaller sizes), and words of it in that test.
RUN_BY = {
    r"megatron-lrmoe check": ("tests/contract/test_check.py", '"check"'),
    r"megatron-lrmoe patch CHECKOUT( --reverse| --check)?$": ("tests/unit/test_patch.py", '"--reverse"'),
    r"megatron-lrmoe recipes list": ("tests/unit/test_recipes.py", '"recipes", "list"'),
    r"megatron-lrmoe recipes show": ("tests/unit/test_recipes.py", '"recipes", "show"'),
    r"megatron-lrmoe recipes run \w+ --dry-run": ("scripts/qwen3_30b_a3b.sh", "recipes run qwen3_30b_a3b"),
    r"megatron-lrmoe data build": ("tests/unit/test_cli.py", '"data", "build"'),
    r"megatron-lrmoe data corpus": ("tests/integration/test_benchmarks.py", '"data", "corpus"'),
    r"megatron-lrmoe data alpaca": ("tests/unit/test_alpaca.py", '"data", "alpaca"'),
    r"megatron-lrmoe plan\b": ("tests/unit/test_plan_report.py", 'cli.main(["plan"'),
    r"megatron-lrmoe ablate configs/ablation/headline.yaml": ("tests/integration/test_ablate.py", '"ablate"'),
    r"git apply adaptor.patch": ("tests/unit/test_patch.py", '"apply"'),
    r"torchrun \.\.\. CHECKOUT/pretrain_gpt.py": ("tests/checkout/test_checkouts.py", '"pretrain_gpt.py"'),
    r"torchrun \.\.\. -m megatron_lrmoe.run": ("tests/integration/test_stock_on_cpu.py", "SCRIPT_ENTRY"),
    r"torchrun \.\.\. -m megatron_lrmoe.pretrain_gpt": ("tests/integration/test_ablate.py", "WHEEL_ENTRY"),
    r"torchrun --nproc-per-node 2 docs/examples/own_loop.py": (
        "tests/integration/test_own_loop.py",
        "docs.examples.own_loop",
    ),
    r"make demo": ("tests/integration/test_demo.py", '"demo"'),
    r".*bash scripts/\w+.sh --dry-run": ("tests/integration/test_scripts.py", '"--dry-run"'),
    r".*bash scripts/\w+.sh --smoke": ("tests/integration/test_scripts.py", '"--smoke"'),
    r"bash scripts/\w+.sh -- ": ("tests/integration/test_scripts.py", '"--", "--train-iters"'),
    r".*-m benchmarks.backward": ("tests/integration/test_benchmarks.py", 'said("backward"'),
    r".*-m benchmarks.hot_rank --bias": ("tests/integration/test_benchmarks.py", 'said("hot_rank", "--bias"'),
    r".*-m benchmarks.hot_rank --memory": ("tests/integration/test_benchmarks.py", 'said("hot_rank", "--memory"'),
    r".*-m benchmarks.gradient_error": ("tests/integration/test_benchmarks.py", 'said("gradient_error"'),
    r".*-m benchmarks.from_scratch": ("tests/integration/test_benchmarks.py", 'said("from_scratch"'),
    r".*-m benchmarks.replica_budget": ("tests/integration/test_benchmarks.py", 'said("replica_budget"'),
    r".*-m benchmarks.time_to_loss": ("tests/integration/test_benchmarks.py", 'said("time_to_loss"'),
    r".*-m benchmarks.planner": ("tests/integration/test_benchmarks.py", 'said("planner"'),
    r".*-m pytest -s tests/upstream": ("tests/upstream/test_upstream_moe.py", "def test"),
    r".*-m pytest tests/checkout": ("tests/checkout/test_checkouts.py", "def test"),
}
# CI is `make lint` and `make test`, and both begin with `make setup`, which installs the project and its extras.
CI_ITSELF = (r"(MEGATRON_LM_PATH=CHECKOUT )?make test", r"make (lint|setup)", r"pip install ")
NEEDS_GPUS = (
    r"(DATA_PATH=\S+ )(TOKENIZER=\S+ )?bash scripts/\w+.sh$",
    r"sbatch ",
    r"bash scripts/gpu_check.sh$",
    r"megatron-lrmoe recipes run$",
)


@dataclass(frozen=True)
class Command:
    """A command in a document, without its comment, and the line or paragraph around it."""

    page: str
    words: str
    around: str


def commands(page: Path) -> list[Command]:
    """Commands of code blocks line by line, and inline code that begins like one."""
    text, found = page.read_text(), []
    fence = re.compile(r"^ *```\w*\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
    for block in fence.findall(text):
        found += [(line, line) for line in block.replace("\\\n", " ").splitlines()]
    for paragraph in re.split(r"\n\s*\n|(?<=\|)\n", fence.sub("", text)):
        found += [(code, paragraph) for code in re.findall(r"`([^`]+)`", paragraph)]
    clean = [(" ".join(words.split(" #")[0].split()), around) for words, around in found]
    return [Command(page.name, m[1], around) for words, around in clean if (m := _COMMAND.fullmatch(words))]


ALL = [command for page in PAGES for command in commands(page)]


def ids(command: Command) -> str:
    return f"{command.page}: {command.words}"


@pytest.mark.parametrize("command", ALL, ids=ids)
def test_every_command_is_run_or_marked(command: Command) -> None:
    if any(re.match(pattern, command.words) for pattern in NEEDS_GPUS):
        assert "GPU" in command.around, "say beside it that it needs GPUs"
        return
    assert any(re.match(pattern, command.words) for pattern in (*RUN_BY, *CI_ITSELF)), "no test runs this command"


@pytest.mark.parametrize("pattern", RUN_BY)
def test_the_test_that_is_named_runs_it(pattern: str) -> None:
    file, words = RUN_BY[pattern]
    assert words in (ROOT / file).read_text()
    assert any(re.match(pattern, command.words) for command in ALL), "no document has it any more"


@pytest.mark.parametrize("command", [c for c in ALL if c.words.startswith("megatron-lrmoe ")], ids=ids)
def test_our_command_line_knows_the_flags(command: Command) -> None:
    words = command.words.replace("YOUR FLAGS", "--num-experts 8").replace("...", "").split()[1:]
    if words in (["plan"], ["check"], ["recipes", "run"]):
        return  # named in a sentence, not a whole command
    known = cli.parse(words)
    assert callable(known.run)
