"""What a run shows a person: tables in the terminal and a picture of its curves."""

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from jaxpg.parallel import distributed


def progress(console: Console) -> Progress:
    """A live bar that ends in the numbers of the moment: `progress.update(task, numbers="reward 0.7")`."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[numbers]}"),
    )
    return Progress(*columns, console=console)


@contextlib.contextmanager
def watch_sampling(rows: int, *, console: Console | None = None):
    """A live bar of rows that have ended, with tokens/s, for one call of `sampling.generate`.

        with report.watch_sampling(rows=64) as watch:
            rollout = generate(..., progress=watch)

    Args:
      rows: of the call, greedy ones among them.
      console: where to; default the terminal.
    """
    with progress(console or Console()) as bar:
        task, started = bar.add_task("sampling", total=rows, numbers=""), time.perf_counter()

        def watch(ended: int, tokens: int) -> None:
            speed = tokens / max(time.perf_counter() - started, 1e-9)
            bar.update(task, completed=ended, numbers=f"{tokens:,} tokens  {speed:,.0f} tokens/s")

        yield watch


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """A table of anything that prints; the first column is text, the others are set to the right."""
    built = Table(title=title)
    for i, name in enumerate(columns):
        built.add_column(name, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        built.add_row(*map(str, row))
    return built


def shorten(text: str, most: int = 300) -> str:
    """The end of a long text."""
    return text if len(text) <= most else "…" + text[-most:]


def in_words(rows: Sequence[dict], *, group_size: int | None = None) -> list[str]:
    """Says what people ask about the numbers of a policy-gradient run: rows of `rollout.describe` and of an update.

    Args:
      rows: one a step. What an update does not tell is left out.
      group_size: samples a prompt; with 1, nothing is said of groups.
    """

    def mean(name: str) -> float:
        return sum(row[name] for row in rows) / len(rows)

    first, last, said = rows[0], rows[-1], []
    if "loss" in first:
        said.append(
            f"The loss was {mean('loss'):.4f} on average. On policy its value is minus the mean advantage, 0 where "
            "advantages are centered, whatever the gradient is: watch the reward, not the loss."
        )
    if group_size != 1:
        said.append(
            f"In {mean('zero_variance_groups'):.0%} of the groups all samples had the same reward "
            f"({last['zero_variance_groups']:.0%} in the last step): comparing them teaches nothing."
        )
    said.append(
        f"{mean('cut_completions'):.1%} of the completions were cut by the budget of new tokens "
        f"({last['cut_completions']:.1%} in the last step); their mean length went from "
        f"{first['completion_length']:.1f} to {last['completion_length']:.1f} tokens."
    )
    if "log_prob_gap" in first:
        said.append(
            "Before the first update of a rollout, log-probs of sampler and trainer differed by "
            f"{mean('log_prob_gap'):.1e} a token."
        )
    if any(row["scored"] < 1 for row in rows):
        failed = sum(row["scorer_failures"] for row in rows)
        said.append(
            f"{1 - mean('scored'):.1%} of the completions had no score: no scorer applied to them, or it failed, which "
            f"happened {failed} times."
        )
    skipped = [row for row in rows if row.get("nonfinite_updates")]
    if skipped:
        said.append(
            f"{sum(row['nonfinite_updates'] for row in skipped)} updates were skipped, in {len(skipped)} steps, since "
            "their loss or gradient was not finite."
        )
    if "sampled_groups" in rows[0]:
        said.append(f"{mean('sampled_groups'):.2f} groups were drawn for each one that was kept.")
    return said


def draw_curves(
    path: Path,
    curves: dict[str, dict[str, tuple[Sequence[float], Sequence[float]]]],
    *,
    title: str,
    x: str = "step",
    limits: tuple[float, float] | None = (-0.02, 1.02),
):
    """Draws one panel per entry, with its named curves.

    Args:
      path: of the picture.
      curves: panel title -> curve name -> (x, y).
      title: above all.
      x: what the horizontal axes show.
      limits: of the vertical axes; None: those of the curves.
    """
    import matplotlib.figure  # takes half a second, and most callers draw once, at the end

    figure = matplotlib.figure.Figure(figsize=(5 * len(curves), 3.6), layout="constrained")
    figure.suptitle(title)
    for axes, (panel, lines) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True):
        for name, points in lines.items():
            axes.plot(*points, label=name, linewidth=1.2)
        axes.set(title=panel, xlabel=x, ylim=limits)
        axes.grid(alpha=0.3)
        axes.legend()
    _save(figure, path)


def draw_histogram(path: Path, values: dict[str, Sequence[float]], *, title: str, x: str):
    """Draws how often each value occurs, the named samples over each other.

    Args:
      path: of the picture.
      values: name -> sample.
      title: above all.
      x: what the values are.
    """
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, sample in values.items():
        axes.hist(sample, bins=40, alpha=0.5, label=name)
    axes.set(title=title, xlabel=x, ylabel="how many")
    axes.grid(alpha=0.3)
    axes.legend()
    _save(figure, path)


class Band(NamedTuple):
    """A curve with its spread."""

    x: Sequence[float]
    middle: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def draw_bands(path: Path, panels: dict[str, dict[str, Band]]):
    """Draws one panel per entry, with its named curves and, in a lighter shade, their spread."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(7 * len(panels), 5.2), layout="constrained")
    styles = ("-", "--", ":")  # ten colours, then the same dashed
    for axes, (panel, bands) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for i, (name, band) in enumerate(bands.items()):
            axes.plot(band.x, band.middle, styles[i // 10 % 3], label=name, linewidth=1.4, color=f"C{i % 10}")
            axes.fill_between(band.x, band.low, band.high, alpha=0.12, color=f"C{i % 10}", linewidth=0)
        axes.set(title=panel)
        axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    _save(figure, path)


def draw_points(path: Path, points: dict[str, dict[str, tuple[float, float]]], *, x: str, y: str):
    """Draws one panel per entry, with its named points; y is logarithmic.

    Args:
      path: of the picture.
      points: panel title -> point name -> (x, y).
      x: what the horizontal axis shows.
      y: what the vertical axis shows.
    """
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(7.5 * len(points), 6.5), layout="constrained")
    for axes, (panel, named) in zip(figure.subplots(1, len(points), squeeze=False)[0], points.items(), strict=True):
        for i, (name, (horizontal, vertical)) in enumerate(sorted(named.items(), key=lambda item: item[1])):
            axes.scatter(horizontal, vertical, s=18)
            # Neighbours get their names on different sides, or they would hide each other.
            offset, side = ((6, 0), "left") if i % 2 == 0 else ((-6, 0), "right")
            axes.annotate(name, (horizontal, vertical), offset, textcoords="offset points", fontsize=7, ha=side)
        axes.set(title=panel, xlabel=x, ylabel=y, yscale="log")
        axes.margins(0.25)
        axes.grid(alpha=0.3)
    _save(figure, path)


def _save(figure, path: Path) -> None:
    """Writes a picture, the first process for all."""
    if distributed.is_primary():
        figure.savefig(path, dpi=120)
