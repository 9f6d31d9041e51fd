"""The page of a showcase: its numbers are the data's, and it stands alone."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

pytest.importorskip("matplotlib")

import torch

from showcases import make_reading, make_show
from sparge import Recipe
from sparge.cli.screen import Table, to_json
from sparge_tools.showcase import page as page_module
from sparge_tools.showcase.page import make_page

LIGHT = page_module.THEMES["light"]
VOID = {"meta", "img", "source", "br"}


class Reader(HTMLParser):
    """The text of a page, and every tag with its attributes; fails on tags that do not match."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.words = [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.words))


@pytest.fixture(scope="module")
def drawn():
    return page_module.make_figures(make_show())


def read(show, drawn):
    return Reader(make_page(show, drawn))


def size_of_png(uri):
    data = base64.b64decode(uri.removeprefix("data:image/png;base64,"), validate=True)
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert data.endswith(b"IEND\xaeB`\x82")
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_the_numbers_of_a_showcase():
    show = make_show()
    assert show.rounds == 3
    # Of the ratios 2, 3 and 5, and 5, 3 and 5, the median; not the ratio of the medians.
    assert (show.speedup, show.attention_speedup) == (3.0, 5.0)
    assert (show.dense.first_token, show.sparge.attention_seconds) == (25.0, 3.0)
    assert show.dense.attention_share == 0.5
    assert show.limit == 2.0
    assert show.perplexity_change == pytest.approx(0.02)
    found = json.loads(to_json(show.to_dict()))
    assert found["speedup"] == 3.0
    assert found["dense"]["first_token"] == 25.0
    assert found["heads"][1] == {
        "layer": 0,
        "head": 1,
        "density": pytest.approx(0.3),
        "mass_kept": 0.9,
        "error": 0.01,
    }
    assert Recipe.from_dict(found["recipe"]) == show.recipe


def test_the_page_says_what_the_data_says(drawn):
    show = make_show()
    text = read(show, drawn).text
    for row in page_module.comparison_rows(show):
        assert " ".join(row.values()) in text
    for words in (
        "The first token came 3.00× sooner with sparge: after 10.0 s instead of 25.0 s.",
        "It computed 34% of the attention blocks; perplexity changed by +2.00%; both found",
        "3.00×",
        "2.00× if attention took no time",
        "12.500 → 12.750",
        "hidden at token 117 of 300 (40% into the text)",
        show.needle.fact,
        show.needle.question,
        show.command,
        show.where["machine_line"],
        "sparge 9.8.7, torch 7.6.5",
        "3 times each, median, in the order dense, sparge, dense, sparge, dense, sparge",
        "24×: one query <decode>",
        "cpu (avx2) 2×",
        "layers 0, 1",
        json.dumps(show.recipe.to_dict()),
    ):
        assert words in text
    assert "triton" not in text


def test_the_page_stands_alone_and_escapes(drawn):
    evil = "</mark><script src='https://example.org/x.js'></script>"
    show = make_show(sparge=make_reading(answer=evil, found=False))
    found = read(show, drawn)
    assert evil in found.text
    used = {tag for tag, _ in found.tags}
    assert not used & {"script", "link", "iframe", "object", "base"}
    for tag, attributes in found.tags:
        for name in ("src", "srcset", "href", "style"):
            assert attributes.get(name, "data:").startswith("data:"), (tag, name)
    assert not re.search(r"https?://|@import|url\(", make_page(make_show(), drawn))


def test_the_pictures_are_there_for_light_and_dark(drawn):
    assert list(drawn) == ["time", "plans", "sparsity"]
    tags = read(make_show(), drawn).tags
    shown = [a["src"] for tag, a in tags if tag == "img"]
    dark = [a["srcset"] for tag, a in tags if tag == "source"]
    for light_uri, dark_uri, uris in zip(shown, dark, drawn.values(), strict=True):
        assert uris == {"light": light_uri, "dark": dark_uri}
        assert light_uri != dark_uri
        width, height = size_of_png(light_uri)
        assert (width, height) == size_of_png(dark_uri)
        assert width > 1000
        assert height > 200


@pytest.mark.parametrize(
    "dense, sparge, words",
    [
        (True, True, "both found the needle"),
        (True, False, "sparge lost the needle that dense found"),
        (False, True, "sparge found the needle, dense did not"),
        (False, False, "neither found the needle, so it says nothing"),
    ],
)
def test_the_needle_is_told_as_it_was(dense, sparge, words, drawn):
    show = make_show(dense=make_reading(found=dense), sparge=make_reading(found=sparge))
    text = read(show, drawn).text
    assert words in text
    assert (text.count("✓"), text.count("✗")) == (dense + sparge, 2 - dense - sparge)


def test_a_loss_is_told_as_a_loss(drawn):
    slow = make_reading(seconds=(40.0, 60.0, 50.0), attention=(20.0, 24.0, 30.0))
    show = make_show(sparge=slow, order=("dense", "sparge"))
    assert "came 2.00× later with sparge: after 50.0 s instead of 25.0 s" in read(show, drawn).text
    assert '<b class="bad">0.50×</b>' in make_page(show, drawn)
    once = replace(
        show,
        dense=make_reading(seconds=(0.5,), attention=(0.01,)),
        sparge=make_reading(seconds=(0.25,), attention=(0.01,)),
    )
    assert "once each, in the order dense, sparge, after a warm-up of 100" in read(once, drawn).text
    assert "0.25 s instead of 0.50 s" in read(once, drawn).text


def test_nothing_sparse_is_said_and_not_drawn():
    why = {"shorter than the <crossover>": 2}
    show = make_show(
        heads=(),
        density_by_head=(None, None),
        error=None,
        error_layers=(),
        sparge=make_reading(fallbacks=why),
    )
    drawn = page_module.make_figures(show)
    assert list(drawn) == ["time"]
    text = read(show, drawn).text
    assert "No layer ran sparse, so there is no plan to draw: shorter than the <crossover>" in text
    assert "0.0321" not in text


def test_the_bars_are_as_long_as_the_seconds():
    show = make_show()
    for parts, reading in (
        (page_module.dense_parts(show, LIGHT), show.dense),
        (page_module.sparge_parts(show, LIGHT), show.sparge),
    ):
        assert sum(spent for _, spent, _ in parts) == pytest.approx(reading.seconds[0])
    names = [name for name, _, _ in page_module.sparge_parts(show, LIGHT)]
    assert [name.split(": ")[1] for name in names] == [
        "prepare",
        "predict",
        "select",
        "attend",
        "rest of the model",
    ]
    mixed = replace(show, sparge=replace(show.sparge, attention=(4.0, 4.0, 4.0)))
    own = page_module.sparge_parts(mixed, LIGHT)[4]
    assert own[:2] == ("sparge: the model's own attention", pytest.approx(2.0))
    figure = page_module.time_figure(show, LIGHT)
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    assert widths == pytest.approx([10, 10, 0.25, 0.25, 0.25, 1.25, 8])


def test_the_heat_maps_hold_the_data():
    show = make_show()
    grid = page_module.sparsity_figure(show, LIGHT).axes[0].images[0].get_array()
    # Heads downwards, layers across; the second layer ran dense.
    assert grid[:, 0].tolist() == [75.0, 50.0]
    assert grid.mask[:, 1].all()
    panel = page_module.plans_figure(show, LIGHT).axes[0]
    assert "layer 0, head 0\n20% of the blocks, 90.0% of the attention" in panel.get_title()
    skipped, computed = (image.get_array() for image in panel.images)
    view = show.heads[0]
    future = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]).bool()
    assert torch.equal(torch.tensor(~computed.mask), view.kept)
    assert torch.equal(torch.tensor(skipped.mask), view.kept | future)
    drawn = torch.where(view.kept, torch.tensor(computed.data), torch.tensor(skipped.data))
    drawn = drawn[~future]
    assert torch.allclose(drawn, view.mass[~future].double().clamp(min=page_module.FAINTEST))


def test_the_table_is_one_of_the_house():
    table = page_module.comparison_table(make_show())
    assert isinstance(table, Table)
    assert table.cells()[0] == ["seconds to the first token", "25.0 s", "10.0 s", "3.00x the speed"]
