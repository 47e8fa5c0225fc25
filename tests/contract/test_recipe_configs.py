"""Every recipe at its real size through Megatron's own parser and validation, on a CPU with a pretended world size."""

import subprocess
import sys

import pytest

from megatron_lrmoe.launch import recipes
from megatron_lrmoe.launch.launcher import launch
from megatron_lrmoe.launch.settings import Settings

# One process for all: importing Megatron takes seconds.
CODE = """
import json, os, sys
from megatron_lrmoe.mcore import check
said = {}
for key, (ranks, flags) in json.load(sys.stdin).items():
    os.environ["WORLD_SIZE"] = str(ranks)
    parsed = check.parse(flags)
    found = list(parsed.problems)
    if parsed.args is not None:
        found += check.refusals(parsed.args, flags)
        assert parsed.args.world_size == ranks
    said[key] = found
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def answers() -> dict[str, list[str]]:
    import json

    lines = {}
    for name in recipes.names():
        recipe = recipes.load(name)
        for policy in ("stock", "lrm", "lrm+replicas"):
            job = launch(recipe, Settings.read({"POLICY": policy}))
            lines[f"{name} {policy}"] = [recipe.gpus, recipes.words(job.flags)]
            # The parallel sizes also fit one node more or fewer.
            if recipe.gpus == 8:
                lines[f"{name} {policy}, 32 GPUs"] = [32, recipes.words(job.flags)]
    broken = launch(recipes.load("toy"), Settings.read({"EP": "3"}))
    lines["broken"] = [6, recipes.words(broken.flags)]
    run = subprocess.run([sys.executable, "-c", CODE], input=json.dumps(lines), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("policy", ["stock", "lrm", "lrm+replicas"])
@pytest.mark.parametrize("name", recipes.names())
def test_megatron_and_the_plugin_take_the_recipe(answers: dict[str, list[str]], name: str, policy: str) -> None:
    assert answers[f"{name} {policy}"] == []


def test_the_recipes_for_one_node_also_run_on_four(answers: dict[str, list[str]]) -> None:
    four = {key: said for key, said in answers.items() if "32 GPUs" in key}
    assert four and not any(four.values())


def test_a_recipe_that_does_not_fit_is_refused(answers: dict[str, list[str]]) -> None:
    assert answers["broken"]
