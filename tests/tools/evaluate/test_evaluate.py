"""The measures of `sparge eval` against plain computation, on tiny random models."""

from __future__ import annotations

import json
import math

import pytest
import torch

pytest.importorskip("transformers")

import itertools

from sparge import KeepAll, Recipe
from sparge_tools.evaluate import cells, logits, run_directory, texts
from sparge_tools.evaluate.cells import prefill_row
from sparge_tools.evaluate.settings import Cell, Settings
from tiny_lm import make_model, make_tokenizer, sentences


@pytest.fixture(scope="module")
def two_models():
    """Two models that differ a little, as dense and sparge do."""
    model, other = make_model(), make_model()
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(0.01 * torch.randn(weight.shape, generator=torch.manual_seed(1)))
    return model, other


def test_slices_say_what_whole_logits_say(two_models, monkeypatch):
    monkeypatch.setattr(logits, "ROWS", 37)
    ids = torch.randint(2, 90, (1, 300), generator=torch.manual_seed(0))
    assert all(logits.splits(model, ids) for model in two_models)
    parts = [logits.outputs_of(model, ids, split=True) for model in two_models]
    assert parts[0].kept.shape == (300, 64)  # hidden states, not logits
    found = logits.compare(*parts, ids)
    with torch.no_grad():
        p, q = (model(ids).logits[0, :-1].double().log_softmax(-1) for model in two_models)
    index = ids[0, 1:, None]
    torch.testing.assert_close(found.dense, -p.gather(1, index)[:, 0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.sparge, -q.gather(1, index)[:, 0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.kl, (p.exp() * (p - q)).sum(-1), rtol=1e-3, atol=1e-5)
    assert torch.equal(found.agree.bool(), p.argmax(-1) == q.argmax(-1))
    assert 0.5 < found.agree.mean() < 1


def test_a_model_against_itself(two_models):
    ids = torch.randint(2, 90, (1, 150), generator=torch.manual_seed(0))
    outputs = logits.outputs_of(two_models[0], ids, split=True)
    found = logits.compare(outputs, outputs, ids)
    assert found.kl.max() < 1e-6
    assert found.agree.all()
    row = cells.perplexity_row(150, [{"density": 1.0, **cells.sums_of(found)}])
    assert row["relative"] == 0 == row["relative_error"]


def test_a_model_that_scales_its_logits_is_not_split():
    """Cohere multiplies them after the output layer."""
    from transformers import CohereConfig, CohereForCausalLM

    config = CohereConfig(
        vocab_size=90,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        logit_scale=0.25,
    )
    model = CohereForCausalLM(config).eval()
    ids = torch.randint(2, 90, (1, 140), generator=torch.manual_seed(0))
    assert not logits.splits(model, ids)
    with torch.no_grad():
        torch.testing.assert_close(
            logits.outputs_of(model, ids, split=False).rows(3, 9), model(ids).logits[0, 3:9]
        )


def comparison(n):
    numbers = torch.rand(4, n, generator=torch.manual_seed(0), dtype=torch.float64)
    return logits.Comparison(numbers[0], numbers[1], numbers[2], (numbers[3] > 0.3).double())


@pytest.mark.parametrize("length", [128, 129, 500, 1024])
def test_buckets_add_up(length):
    found = comparison(length - 1)
    sums = cells.sums_of(found)
    buckets = sums["buckets"]
    assert sum(b["tokens"] for b in buckets) == length - 1
    assert buckets[0]["start"] == 0
    assert buckets[-1]["stop"] == length
    for left, right in itertools.pairwise(buckets):
        assert left["stop"] == right["start"]
    row = cells.perplexity_row(length, [{"density": 0.5, **sums}])
    assert row["dense_perplexity"] == pytest.approx(float(found.dense.mean().exp()))
    assert row["sparge_perplexity"] == pytest.approx(float(found.sparge.mean().exp()))
    extra = found.sparge - found.dense
    assert row["relative"] == pytest.approx(float(extra.mean().exp() - 1))
    error = float(extra.std(correction=0)) / math.sqrt(length - 1)
    assert row["relative_error"] == pytest.approx(error)
    assert row["kl_mean"] == pytest.approx(float(found.kl.mean()))
    assert row["agreement"] == pytest.approx(float(found.agree.mean()))
    if length == 500:
        middle = row["buckets"][1]  # positions 128 to 255 are predicted by rows 127 to 254
        assert middle["dense_perplexity"] == pytest.approx(float(found.dense[127:255].mean().exp()))


def test_windows_count_as_one_text():
    one, two = cells.sums_of(comparison(299)), cells.sums_of(comparison(299))
    alone = cells.perplexity_row(300, [{"density": 0.2, **one}])
    both = cells.perplexity_row(300, [{"density": 0.2, **one}, {"density": 0.4, **two}])
    assert both["windows"] == 2
    assert both["tokens"] == 2 * alone["tokens"]
    assert both["dense_perplexity"] == pytest.approx(alone["dense_perplexity"])
    assert both["density"] == pytest.approx(0.3)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("depth", [10, 50, 90])
def test_the_needle_is_at_its_depth(chat, depth):
    tokenizer = make_tokenizer(chat=chat)
    text = texts.tokenize("words", sentences(3000), tokenizer, needed=512)
    asked = {"length": 512, "depth": depth, "seed": 0}
    made = texts.make_needle(text, tokenizer, **asked)
    assert made == texts.make_needle(text, tokenizer, **asked)
    assert made.answer != texts.make_needle(text, tokenizer, **{**asked, "seed": 1}).answer
    assert 512 - 20 <= made.tokens <= 512
    parts = (made.context, made.question, made.prefix, made.answer)
    assert made.tokens == texts.count_tokens(tokenizer, *parts)
    before, after = made.context.split(f"{made.prefix} {made.answer}.")
    share = len(before) / (len(before) + len(after))
    assert share == pytest.approx(depth / 100, abs=0.06)
    assert before.rstrip().endswith(".")  # between sentences
    assert made.answer not in made.question + made.prefix


def test_a_length_with_no_room_for_a_needle():
    tokenizer = make_tokenizer()
    text = texts.tokenize("words", sentences(3000), tokenizer, needed=128)
    with pytest.raises(ValueError, match="a needle needs a length of at least 5"):
        texts.make_needle(text, tokenizer, length=40, depth=50, seed=0)


def test_the_text_in_windows():
    tokenizer = make_tokenizer()
    text = texts.tokenize("words", sentences(1000), tokenizer, needed=512)
    n = len(text.tokens)
    assert text.window(512).tolist() == [list(text.tokens[:512])]
    middle = round((n - 512) / 2)
    assert text.window(512, 1).tolist() == [list(text.tokens[middle : middle + 512])]
    assert [texts.spread(i) for i in range(6)] == [0, 0.5, 0.25, 0.75, 0.125, 0.625]
    with_start = texts.Text("x", "", text.tokens, prefix=(1,))
    assert with_start.window(512).tolist() == [[1, *text.tokens[:511]]]
    with pytest.raises(ValueError, match=f"at least 2048 tokens .* has {n};"):
        texts.tokenize("words", sentences(1000), tokenizer, needed=2048)
    with pytest.raises(ValueError, match="at least one block of 128 tokens"):
        texts.tokenize("words", sentences(50), tokenizer, needed=50)


def test_depths_are_middles_and_cells_have_one_key_each():
    settings = Settings("m", measures=("prefill", "perplexity", "needle", "errors"), windows=2)
    assert settings.depth_percents == [10, 30, 50, 70, 90]
    made = settings.cells()
    assert len({cell.key for cell in made}) == len(made) == 4 + 6 + 30 + 3
    assert Cell("prefill", 512) in made
    assert Cell("perplexity", 2048, window=0).key == "perplexity length=2048 window=0"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"measures": ("speed",)}, "--measures must be of prefill.*; got 'speed'"),
        ({"measures": ()}, "--measures must be of prefill.*; got ''"),
        ({"measures": ("tasks",)}, "need each other"),
        ({"tasks": ("niah_single_1",)}, "need each other"),
        ({"lengths": (100,)}, "at least one block, 128 tokens; got 100"),
    ],
)
def test_mistakes_in_settings(changes, message):
    with pytest.raises(ValueError, match=message):
        Settings("m", **changes)


KEY = {"model": "abc", "recipe": Recipe(keep=KeepAll()).to_dict(), "threads": 2}


def test_cells_survive(tmp_path):
    run = run_directory.open_run(tmp_path / "run", KEY)
    run.keep("a", {"x": 1.5, "nan": math.nan}, took=0.1)
    with pytest.raises(ValueError, match="another process uses"):
        run_directory.open_run(tmp_path / "run", KEY)
    run.close()
    again = run_directory.open_run(tmp_path / "run", KEY)
    assert again.result("a") == {"x": 1.5, "nan": None}
    assert again.result("b") is None
    again.close()


def test_a_line_cut_short_is_a_cell_not_made(tmp_path):
    run = run_directory.open_run(tmp_path, KEY)
    run.keep("a", {"x": 1}, took=0.1)
    run.close()
    file = tmp_path / run_directory.CELL_FILE
    file.write_bytes(file.read_bytes() + b'{"cell": "b", "resu')
    run = run_directory.open_run(tmp_path, KEY)
    assert list(run.cells) == ["a"]
    run.keep("b", {"x": 2}, took=0.1)
    run.close()
    assert [json.loads(line)["cell"] for line in file.read_text().splitlines()] == ["a", "b"]


@pytest.mark.parametrize(
    "file, content, message",
    [
        ("cells.jsonl", b'{"cell": "a"}\n', "damaged in line 1: KeyError"),
        ("cells.jsonl", b"\x00\xff\n", "damaged in line 1"),
        ("run.json", b"{", "is damaged"),
        ("run.json", b'{"format": "other", "key": {}}', "has the format 'other'"),
    ],
)
def test_a_damaged_run_is_refused_and_can_start_anew(tmp_path, file, content, message):
    run = run_directory.open_run(tmp_path, KEY)
    run.keep("a", {"x": 1}, took=0.1)
    run.close()
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=message) as refusal:
        run_directory.open_run(tmp_path, KEY)
    assert "--fresh" in str(refusal.value)
    assert (tmp_path / file).read_bytes() == content
    run = run_directory.open_run(tmp_path, KEY, fresh=True)
    assert run.cells == {}
    run.close()


def test_other_settings_are_refused(tmp_path):
    run_directory.open_run(tmp_path, KEY).close()
    with pytest.raises(ValueError, match="other settings: threads was 2, is 1"):
        run_directory.open_run(tmp_path, {**KEY, "threads": 1})
    run_directory.open_run(tmp_path, {**KEY, "threads": 1}, fresh=True).close()


def test_a_directory_of_something_else_is_left_alone(tmp_path):
    mine = tmp_path / "thesis.txt"
    mine.write_text("mine")
    for fresh in (False, True):
        with pytest.raises(ValueError, match="not a run directory"):
            run_directory.open_run(tmp_path, KEY, fresh=fresh)
    with pytest.raises(FileExistsError):
        run_directory.open_run(mine, KEY)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


PREFILL = {
    "rounds": 3,
    "density": 0.4,
    "ran": {"cpu (amx)": 2},
    "fallbacks": {},
    "dense_seconds": [10.0, 12.0, 10.0],
    "sparge_seconds": [5.0, 6.0, 4.0],
    "sparge_attention_seconds": [1.0, 1.0, 1.0],
    "clocked_seconds": [10.0, 10.0, 20.0],
    "clocked_attention_seconds": [6.0, 5.0, 10.0],
}


def test_the_figures_of_a_prefill():
    row = prefill_row(8192, PREFILL)
    assert (row["dense_seconds"], row["sparge_seconds"], row["prefill_speedup"]) == (10, 5, 2)
    assert (row["attention_speedup"], row["attention_share"], row["limit"]) == (6, 0.5, 2)
    assert row["spread"] == 0.25


def test_errors_by_layer():
    cell = {
        "layers": ["l0", "l1", "l2"],
        "error": [[0.1, 0.3], None, [0.0, 0.2]],
        "density": [[0.5, 0.5], None, [1.0, 1.0]],
        "fallbacks": {"too short": 1},
    }
    row = cells.errors_row(256, cell)
    assert row["mean"] == pytest.approx(0.15)
    assert row["median"] == pytest.approx(0.15)
    assert (row["worst_layer"], row["worst_layer_mean"]) == ("l0", pytest.approx(0.2))
    assert cells.errors_row(256, {**cell, "error": [[0.1], None, [0.5]]})["worst_layer"] == "l2"
    nothing = {**cell, "error": [None] * 3}
    assert cells.errors_row(256, nothing)["mean"] is None


def test_rows_only_of_pairs():
    settings = Settings("m", lengths=(256,), measures=("needle",), depths=1)
    dense = {"loss": 0.5, "found": True, "tokens": 250, "density": None}
    found = {"needle length=256 depth=50 variant=dense": dense}
    assert cells.measure_rows(settings, found.get)["needle"] == []
    found["needle length=256 depth=50 variant=sparge"] = {**dense, "found": False, "density": 0.4}
    (row,) = cells.measure_rows(settings, found.get)["needle"]
    assert row["lost"]
    assert row["density"] == 0.4
