"""The page as a file: verdict, plots and table in one HTML document."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any

from tensordict import NestedKey
from torchrl.data import ReplayBuffer

from gfn_rb.arguments import as_count, kind_of, require_kind
from gfn_rb.buffers.summary import N_TOP, Describe
from gfn_rb.checkpoint.atomic import published
from gfn_rb.envs import GFNEnv
from gfn_rb.envs.base import require_env
from gfn_rb.errors import ArgumentError, EmptyBufferError, GfnRbError
from gfn_rb.page.content import BufferContent, FeatureSource, read_content
from gfn_rb.page.curves import checked_curves

logger = logging.getLogger(__name__)

_YOUNG = 50  # policy versions


def view(
    rb: ReplayBuffer | Mapping[str, ReplayBuffer],
    path: str | PathLike[str],
    *,
    env: GFNEnv | None = None,
    describe: Describe | None = None,
    features: FeatureSource = None,
    curves: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    objects: NestedKey | None = None,
    key: NestedKey | None = None,
    batch_size: int | None = None,
    title: str = "Replay buffer",
) -> Path:
    """Write one HTML page that shows what a buffer keeps and what it draws.

    The page opens from disk in any browser and requests nothing from a network. It shows a verdict,
    which letters the best sequences have in each place, a map of the objects beside their ages, a
    table of them, rewards of kept and of drawn rows, and how draws concentrate on few rows. A
    selection in a plot selects the rows in the other plot and in the table. Of more than 20,000
    rows, the best and a random part of the others are shown.

    Args:
        rb: the buffer, which is not changed; or buffers by name. Each gets a verdict, and the first
            one the other parts.
        path: file to create or replace.
        env: environment of the rows, for words, features and modes.
        describe: callable from objects [n, *S] to a text for each, instead of that of ``env``.
        features: what the map is made of, by its first two principal components: a key, or a
            callable from rows [n] to a tensor [n, d]. Default: the features of a
            ``DiversityWriter``, else what networks see of states in ``env``, else the objects.
        curves: measurements of runs: for each configuration a list of runs, each a dictionary of
            columns [k] or a DataFrame, with ``reward_calls`` and any other columns. ``loss``,
            ``modes_found`` and others that ``gfn-rb train`` measures share plots; each other column
            gets a plot of its own. Several runs become their mean and range.
        objects: entry that holds the object of each row; see ``rb.summary``.
        key: entry to rank rows by; see ``rb.best``.
        batch_size: number of rows of a batch, for expected draws. Default: that of the buffer, or
            64 if it has none.
        title: heading of the page.

    Returns:
        The path of the page. What could not be shown is logged as a warning, and the page says so.

    Raises:
        GfnRbError: Bokeh is not installed.
        ArgumentError: an argument is of another kind, or ``curves`` are no such columns.
        KeyMismatchError: rows have no entry ``objects``.
        EmptyBufferError: there are neither rows nor curves.
        CheckpointError: writing to the disk failed.

    Examples:
        >>> gfn_rb.view(rb, "page.html", env=TFBind8())
    """
    try:
        import bokeh.document  # noqa: F401 (as early as this, before anything is read)
    except ModuleNotFoundError as error:
        raise GfnRbError("bokeh is not installed: pip install 'gfn_rb[view]'") from error
    measured = {} if curves is None else checked_curves(curves)
    buffers = rb if isinstance(rb, Mapping) else {"": rb}
    for each in buffers.values():
        if isinstance(rb, (list, tuple)):
            raise ArgumentError(
                f"rb must be a ReplayBuffer, or several in a dict by name, got {kind_of(rb)}"
            )
        require_kind("rb", each, ReplayBuffer)
    if env is not None:
        require_env(env)
    if batch_size is not None:
        as_count("batch_size", batch_size)
    contents = {
        name: read_content(each, env, describe, features, batch_size, objects, key)
        for name, each in buffers.items()
    }
    held = {name: each for name, each in contents.items() if each.summary.n_rows}
    if not held and not measured:
        raise EmptyBufferError("rb must hold rows for a page without curves, got none")
    html = _html(held, measured, title, is_curves_first=len(buffers) > 1)
    with published(path := Path(path)) as stream:
        stream.write(html.encode(errors="replace"))
    return path


def _html(
    held: dict[str, BufferContent], measured: dict[str, Any], title: str, is_curves_first: bool
) -> str:
    """Return the page of buffers that hold rows, and of curves."""
    from bokeh.document import Document
    from bokeh.embed import file_html
    from bokeh.resources import INLINE

    from gfn_rb.page.plots import plot_curves, plot_draws, plot_logos, plot_objects

    document, sections = Document(), {"Runs": [*plot_curves(measured)]}
    for name, content in [*held.items()][:1]:
        parts, scripts = plot_objects(content)
        document.js_on_event("document_ready", *scripts)
        parts = [*plot_logos(content), *parts, *plot_draws(content)]
        of_buffer = {f"Buffer of {name}" if name else "Buffer": parts}
        sections = sections | of_buffer if is_curves_first else of_buffer | sections
    notes = []
    for part, note in chain(*(each.notes.items() for each in held.values())):
        notes.append(note)
        if part not in ("rows", "kept"):  # which are not a failure
            logger.warning("%s", note)
    for each in chain(*sections.values()):
        if each.model is None:
            notes.append(each.text)
        else:
            each.model.name = each.name
            document.add_root(each.model)
    html: str = file_html(
        document, INLINE, title, template=files("gfn_rb.page").joinpath("page.html").read_text(),
        template_variables={
            "verdicts": [{"": name, **_verdict(each)} for name, each in held.items()],
            "notes": notes, "sections": sections,
        },
    )  # fmt: skip
    return html


def _verdict(content: BufferContent) -> dict[str, str]:
    """Return what a buffer holds and draws, in words, by what it is."""
    summary, age = content.summary, content.columns.age
    n, found = summary.n_rows, {}
    if summary.log_rewards is not None and content.words:
        name, _, unit = content.reward_title.partition(", ")
        best = f"{content.words[-1]}, {name} = {summary.log_rewards[-1]:.3f} {unit}".rstrip()
        found["best object" if content.columns.object_number is not None else "best row"] = best
    found["rows"] = f"{n:,}"
    if content.modes:
        found["modes in the buffer"] = content.modes
    if summary.effective_rows is not None:
        share = summary.effective_rows / n
        found["effective rows drawn"] = f"{summary.effective_rows:,.1f} ({share:.1%})"
    if summary.top_share is not None:
        found[f"draws of the best {N_TOP} rows"] = f"{summary.top_share:.1%}"
    if summary.mean_draw_age is not None:
        found["mean age of a draw, steps"] = f"{summary.mean_draw_age:,.1f}"
    if age is not None:
        n_young = int((age < _YOUNG).sum())
        found[f"rows younger than {_YOUNG} steps"] = f"{n_young:,} ({n_young / n:.0%})"
    return found
