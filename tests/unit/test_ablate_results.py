"""A cell's result: read from the log, written whole, and no longer believed when anything it depends on changed."""

import dataclasses
import json

import pytest

from megatron_lrmoe.report import ablate_results
from megatron_lrmoe.report.ablate_results import from_log, path_of, read, write
from tests.ablation import cells, result

LINE = (
    " [2026-01-02 03:04:05.678901] iteration {i:8}/      30 | consumed samples: 16 | elapsed time per iteration (ms): "
    "8.2 | learning rate: 2.0E-04 | global batch size: 8 | lm loss: {loss:E} |{more} grad norm: 8.801 |\n"
)
VALIDATION = " validation loss at iteration {i} on validation set | lm loss value: {loss:E} | lm loss PPL: 8.8E+01 | \n"
REPLIES = [{"wall_s": 2.0, "cpu_s": 1.25, "pairs": 640}, {"wall_s": 2.5, "cpu_s": 1.0, "pairs": 640}]


def log_of(first: int, last: int, more: str = "") -> list[str]:
    lines = [LINE.format(i=i, loss=5 - 0.1 * i, more=more) for i in range(first, last + 1)]
    return ["building\n", *lines, "done\n", VALIDATION.format(i=last, loss=2.5)]


def test_a_log_becomes_a_result(tmp_path):
    cell = cells(tmp_path)["warm/topk@0.8/s1"]
    more = " moe-lrm/kept_share: 0.75 | moe-lrm/imbalance: 1.25 |"
    log = log_of(11, 20) + log_of(21, 30, more)
    found = from_log(cell, log, REPLIES, {"torch": "2"}, "abc")
    assert found.losses[0] == pytest.approx(3.9) and len(found.losses) == 20
    assert found.validation_loss == 2.5
    # Before the start iteration nothing is dropped and nothing logged.
    assert found.rows == (640.0,) * 10 + (480.0,) * 10
    assert found.mean("imbalance") == 1.25 and found.mean("kappa") is None
    assert (found.wall_s, found.cpu_s, found.key, found.source) == (2.5, 2.25, cell.key, "abc")
    assert found.training_loss == pytest.approx((2.0 + 2.1) / 2)


@pytest.mark.parametrize(("first", "last"), [(11, 29), (12, 30), (1, 30)])
def test_a_log_of_other_iterations_is_refused(tmp_path, first, last):
    cell = cells(tmp_path)["warm/stock/s1"]
    with pytest.raises(ValueError, match="does not hold iterations 11 to 30"):
        from_log(cell, log_of(first, last), REPLIES, {}, None)


def test_a_validation_must_be_there_where_one_was_asked_for(tmp_path):
    found = cells(tmp_path)
    with pytest.raises(ValueError, match="no validation loss"):
        from_log(found["scratch/stock/s1"], log_of(1, 20)[:-1], REPLIES, {}, None)
    assert from_log(found["memorise/stock/s1"], log_of(1, 20)[:-1], REPLIES, {}, None).validation_loss is None


def test_a_result_comes_back_as_it_was(tmp_path):
    cell = cells(tmp_path)["scratch/topk@0.8/s2"]
    made = result(cell, (3.0, 2.5), scalars={"kept_share": (None, 0.8), "kappa": (1.5, None)})
    path_of(cell, tmp_path).parent.mkdir(parents=True)
    write(cell, made, tmp_path)
    assert read(cell, tmp_path) == made
    assert [p.name for p in path_of(cell, tmp_path).parent.iterdir()] == ["s2.json"]


def test_a_result_of_another_key_is_none(tmp_path):
    cell = cells(tmp_path)["scratch/topk@0.8/s2"]
    path_of(cell, tmp_path).parent.mkdir(parents=True)
    write(cell, result(cell), tmp_path)
    assert read(dataclasses.replace(cell, key="other"), tmp_path) is None


@pytest.mark.parametrize("text", ["", '{"key": "', "[]", "{}", None])
def test_what_is_no_result_is_none(tmp_path, text):
    cell = cells(tmp_path)["scratch/stock/s1"]
    path = path_of(cell, tmp_path)
    path.parent.mkdir(parents=True)
    if text is not None:
        path.write_text(text)
    assert read(cell, tmp_path) is None


def test_a_stop_in_the_middle_of_writing_leaves_the_old_result(tmp_path, monkeypatch):
    cell = cells(tmp_path)["scratch/stock/s1"]
    path_of(cell, tmp_path).parent.mkdir(parents=True)
    old = result(cell)
    write(cell, old, tmp_path)

    def half(content, out):
        out.write(json.dumps(content)[:20])
        raise KeyboardInterrupt

    monkeypatch.setattr(ablate_results.json, "dump", half)
    with pytest.raises(KeyboardInterrupt):
        write(cell, result(cell, (1.0, 1.0)), tmp_path)
    assert read(cell, tmp_path) == old
