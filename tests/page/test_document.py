"""The page as a file, and as a browser shows it."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest
import torch
from factories import rows
from page.chromium import BROWSER, DRIVER, browser
from page.test_content import ENV, grid_buffer
from tensordict import TensorDict

import gfn_rb
from gfn_rb import diverse_buffer, fifo_buffer
from gfn_rb.errors import ArgumentError, GfnRbError
from gfn_rb.page.curves import checked_curves

CURVES = {
    "replay": [
        {"reward_calls": [0, 10, 20], "loss": [None, 4.0, 1.0], "modes_found": [0, 1, 3]},
        {"reward_calls": [0, 10, 20], "loss": [None, 2.0, 3.0], "modes_found": [0, 3, 5]},
    ],
    "no replay": [{"reward_calls": [0, 20], "loss": [None, 9.0], "modes_found": [0, 1]}],
}


def text_of(path: Path) -> str:
    """What stands in a page outside of its scripts and styles."""
    text = re.sub(r"(?s)<(script|style).*?</\1>", " ", path.read_text())
    return " ".join(re.sub(r"<[^>]*>", " ", text).split())


def test_a_page_begins_with_the_verdict(tmp_path) -> None:
    path = gfn_rb.view(grid_buffer(), tmp_path / "page.html", env=ENV, title="A grid & more")
    assert path == tmp_path / "page.html"
    best, modes = ENV.log_reward(ENV.terminating_states()).max(), ENV.n_modes
    rb = grid_buffer()
    p = rb.sampler.log_probs(rb.storage).exp()
    text = text_of(path)
    start = text.index("A grid &amp; more best object (")
    told = text[start : text.index("Buffer Map")]
    assert f"log R = {best:.3f} nats rows 64 modes in the buffer {modes} of {modes}" in told
    assert f"effective rows drawn {1 / p.square().sum():.1f} (" in told
    assert "draws of the best 100 rows 100.0%" in told
    age = 63 - torch.arange(64)
    order = rb.storage.get(range(64))["policy_version"]
    assert f"mean age of a draw, steps {p @ (63 - order).double():.1f}" in told
    assert f"rows younger than 50 steps {(age < 50).sum()} (78%)" in told


def test_curves_of_several_runs_stand_before_the_rows_of_the_first(tmp_path) -> None:
    rbs = {"first": grid_buffer(), "second": grid_buffer()}
    text = text_of(gfn_rb.view(rbs, tmp_path / "page.html", env=ENV, curves=CURVES))
    order = "first", "second", "Runs", "Loss", "Modes found", "Buffer of first", "Map of objects"
    places = [text.index(each) for each in order]
    assert places == sorted(places)
    assert "Lines are means over runs, bands their range." in text


def test_text_that_is_no_unicode_makes_a_page(tmp_path) -> None:
    words = ["\ud800" for _ in range(64)]
    path = gfn_rb.view(grid_buffer(), tmp_path / "page.html", describe=lambda state: words)
    assert "best object ?, log R" in text_of(path)


def test_curves_alone_make_a_page(tmp_path) -> None:
    text = text_of(gfn_rb.view({}, tmp_path / "page.html", curves=CURVES))
    assert "Modes found" in text
    assert "Map" not in text


def test_several_runs_become_their_mean_and_range() -> None:
    from gfn_rb.page.plots import plot_curves

    losses, modes = plot_curves(checked_curves(CURVES))
    band, replay, without = (each.data_source.data for each in modes.model.renderers)
    assert replay["y"][-1] == 4
    assert (band["y1"][-1], band["y2"][-1]) == (3, 5)
    assert without["y"].tolist() == [0, 1]
    labels = [item.label.value for item in losses.model.legend[0].items]
    assert labels == ["replay, fresh: 2", "no replay, fresh: 9"]
    assert losses.model.renderers[-1].glyph.marker == "circle"  # a line of one point shows nothing


def test_a_mean_is_over_the_calls_that_all_runs_have() -> None:
    from gfn_rb.page.plots import plot_curves

    runs = [
        {"reward_calls": [first, 20, last], "modes_found": [0, 1, 3]}
        for first, last in ((0, 30), (10, 40))
    ]
    (modes,) = plot_curves(checked_curves({"replay": runs}))
    for each in modes.model.renderers:  # the band and the line
        x = each.data_source.data["x"]
        assert (x[0], x[-1]) == (10, 30)


def test_own_measurements_are_drawn(tmp_path) -> None:
    own = {
        "reward_calls": [0, 10],
        "top_k_reward": [0.5, 0.75],
        "loss": [2.0, 1.0],
        "kl": [None] * 2,
    }
    text = text_of(gfn_rb.view({}, tmp_path / "page.html", curves={"mine": [own]}))
    assert "top_k_reward Measurements given in curves." in text
    assert "Loss" in text
    assert "No curve of kl: it has no finite number." in text
    frames = pytest.importorskip("pandas")
    (run,) = checked_curves({"mine": [frames.DataFrame(own)]})["mine"]
    assert run["top_k_reward"].tolist() == [0.5, 0.75]


WRONG_CURVES = {
    r"curves must be a Mapping, got a list": [{"reward_calls": [0]}],
    r"curves\['a'\] must be a list of runs, .*: put the run in a list, \{'a': \[run\]\}": {
        "a": {"reward_calls": [0], "loss": [1.0]}
    },
    r"curves\['a'\]\[1\] must be a run, a dict of columns or a DataFrame, got a list": {
        "a": [{"reward_calls": [0]}, [1.0, 2.0]]
    },
    r"curves\['a'\]\[0\] must have the column 'reward_calls', .* got \['step', 'loss'\]": {
        "a": [{"step": [0], "loss": [1.0]}]
    },
    r"curves\['a'\]\[0\]\['kl'\] must have 2 numbers, as many as 'reward_calls', got 3": {
        "a": [{"reward_calls": [0, 1], "kl": [1, 2, 3]}]
    },
    r"curves\['a'\]\[0\]\['kl'\] must be a list of numbers or None, got a list: \['low'\]": {
        "a": [{"reward_calls": [0], "kl": ["low"]}]
    },
    r"curves\['a'\]\[0\]\['kl'\] must be a list of numbers or None, got a float: 0.5": {
        "a": [{"reward_calls": [0], "kl": 0.5}]
    },
}


@pytest.mark.parametrize("message", WRONG_CURVES)
def test_each_mistake_in_curves_has_its_message(message, tmp_path, unchecked) -> None:
    with pytest.raises(ArgumentError, match=message):
        gfn_rb.view({}, tmp_path / "page.html", curves=WRONG_CURVES[message])
    assert not (tmp_path / "page.html").exists()


# Rows whose object and reward have other names.


def returns_buffer(**more):
    rb = fifo_buffer(10)
    rb.extend({"length": [3, 4], "score": [0.5, 2.0], "step_count": [7, 8], **more})
    return rb


def test_a_page_names_objects_and_units_only_where_they_are_known(tmp_path) -> None:
    rb, path = returns_buffer(reward=[1.0, 2.5]), tmp_path / "page.html"
    text = text_of(gfn_rb.view(rb, path))
    assert "best row row 1, reward = 2.500 rows 2" in text
    assert "nats" not in text
    rb = returns_buffer(smiles_id=[[1, 2], [3, 4]], parent=[[1, 2], [3, 4]], reward=[1.0, 2.5])
    text = text_of(gfn_rb.view(rb, path))
    assert "view(..., objects=...) names their entry, of smiles_id, parent" in text
    text = text_of(gfn_rb.view(rb, path, objects="smiles_id", key="score"))
    assert "best object (3, 4), score = 2.000" in text
    assert "Colour is score." in text


def test_shares_of_draws_add_up_from_the_most_drawn_row() -> None:
    from gfn_rb.page.content import read_content
    from gfn_rb.page.plots import plot_draws

    content = read_content(grid_buffer(), ENV)
    rewards, shares = plot_draws(content)
    curve, uniform = (each.data_source.data for each in shares.model.renderers)
    p = content.columns.log_prob.exp().sort(descending=True).values
    assert curve["y"][0] == pytest.approx(float(p[0]))
    assert curve["y"][-1] == pytest.approx(1)
    assert uniform["y"].tolist() == pytest.approx((uniform["x"] / 64).tolist())
    for name in ("kept rows", "drawn rows"):
        line = next(
            item.renderers[0].data_source.data
            for item in rewards.model.legend[0].items
            if item.label.value == name
        )
        assert line["y"][1:-1:2].sum() == pytest.approx(1)


def test_what_is_missing_is_said_once_and_logged_where_it_failed(tmp_path, caplog) -> None:
    rb = diverse_buffer(10, features="x", cutoff_distance=0.1)
    rb.extend(rows([1.0, 2.0]))
    path = gfn_rb.view(rb, tmp_path / "page.html", features=lambda td: torch.rand(3, 2))
    text = text_of(path)
    assert text.count("No ages recorded: rows have no policy_version.") == 1
    assert "Map of objects" not in text
    note = "No map: ShapeError: features must return a tensor of shape [n, d] with n=2, got [3, 2]"
    assert note in text
    assert [each.getMessage() for each in caplog.records] == [note]


UNREWARDED = {"log_reward": torch.full((5,), -torch.inf), "is_terminating": torch.zeros(5).bool()}


@pytest.mark.parametrize("more", [UNREWARDED, {}], ids=["visited", "without rewards"])
def test_a_page_of_rows_that_are_no_whole_objects_shows_their_draws(more, tmp_path) -> None:
    rb = fifo_buffer(10)
    rb.extend(TensorDict({"state": torch.rand(5, 3), **more}, [5]))
    text = text_of(gfn_rb.view(rb, tmp_path / "page.html"))
    assert "rows 5 effective rows drawn 5.0 (100.0%)" in text
    assert "Concentration of draws" in text
    assert ("No rewards recorded: rows have no log_reward." in text) is (more == {})
    assert "best object" not in text


def test_without_bokeh_one_line_names_the_extra(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "bokeh.document", None)
    with pytest.raises(GfnRbError, match=r"bokeh is not installed: pip install 'gfn_rb\[view\]'"):
        gfn_rb.view(grid_buffer(), tmp_path / "page.html")


@pytest.mark.slow
@pytest.mark.skipif(not (BROWSER and DRIVER), reason="needs Chromium and its chromedriver")
def test_a_selection_filters_plot_and_table_in_a_browser(tmp_path) -> None:
    hostile = "</script><img src='http://example.org/x' onerror='alert(1)'>"
    path = gfn_rb.view(
        grid_buffer(), tmp_path / "page.html", env=ENV, curves=CURVES, title=hostile,
        describe=lambda state: [f"{x} {y} {hostile}" for x, y in state.tolist()],
    )  # fmt: skip
    with browser(tmp_path / "profile") as window:
        for width in (1400, 400):
            window.open(path, width)
            assert wait_for(window, "64 rows are listed.")
            assert window.run("return document.documentElement.scrollWidth") <= width
            first, *_ = listed(window)
            assert first.endswith(hostile)
            left, top, right, bottom = window.run(INNER)
            middle = (left + right) / 2
            window.drag((left + 1, top + 1), (middle, bottom - 1))
            chosen = [row for row in ENV.terminating_states().tolist() if row[0] < 4]
            assert wait_for(window, f"{len(chosen)} of 64 rows are selected.")
            shown = [list(map(int, text.split()[:2])) for text in listed(window)]
            assert shown
            assert all(row in chosen for row in shown)
            window.run("Bokeh.index.find_one_by_id(Bokeh.documents[0].get_model_by_name('ages').id)"
                       ".reset()")  # fmt: skip
            assert wait_for(window, "64 rows are listed.")
            said = [each for each in window.logs("browser") if each["level"] != "INFO"]
            assert said == []
        schemes = {url.partition(":")[0] for url in window.requests()}
        assert "file" in schemes
        own = {"chrome", "chrome-untrusted"}  # of the empty first page
        assert schemes <= {"file", "data", "blob", *own}


# The inner frame of the map, in the window.
INNER = """
const plot = Bokeh.documents[0].get_model_by_name("map");
document.querySelector(".map").scrollIntoView();
const view = Bokeh.index.find_one_by_id(plot.id), box = view.el.getBoundingClientRect();
const inner = view.frame.bbox;
return [box.x + inner.left, box.y + inner.top, box.x + inner.right, box.y + inner.bottom];
"""
CELLS = """
const table = Bokeh.index.find_one_by_id(Bokeh.documents[0].get_model_by_name("table").id);
return [...table.shadow_el.querySelectorAll(".slick-row .slick-cell.l0")].map((x) => x.textContent);
"""


def listed(window) -> list[str]:
    """The objects in the part of the table that can be seen."""
    return window.run(CELLS)


def wait_for(window, text: str) -> bool:
    """Whether the line above the table becomes this within some seconds."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if window.run("return document.getElementById('listed')?.textContent") == text:
            return True
        time.sleep(0.1)
    return False
