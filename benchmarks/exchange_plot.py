"""Pictures of what `exchange.py --json` wrote: time against tokens, and GB/s against multiprocessors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

PHASES = ("dispatch", "combine")


def series(rows: list[dict[str, Any]], along: str, value: str) -> dict[str, list[tuple[int, float]]]:
    """Points of phases by line, each line in order of `along`; of a point measured more than once the least time, or the most GB/s."""
    pick = min if value.endswith("us") or value == "less_empty" else max
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.get(along):
            line = found.setdefault(line_of(row), {})
            line[row[along]] = pick(line.get(row[along], row[value]), row[value])
    return {name: sorted(line.items()) for name, line in found.items()}


def line_of(row: dict[str, Any]) -> str:
    return f"{row['peer']} {row['format'].upper()}"


def plot(document: dict[str, Any], folder: Path) -> list[Path]:
    """Writes exchange_tokens.png and, where other numbers of blocks were timed, exchange_sms.png. Returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import ScalarFormatter

    rows, about = document["rows"], document["about"]
    caption = ", ".join(f"{key} {value}" for key, value in about.items() if value)
    made: list[Path] = []
    # A line has its colour in every panel.
    names = sorted({line_of(row) for row in rows if "phase" in row})
    palette = [*pyplot.get_cmap("tab10").colors, *pyplot.get_cmap("Dark2").colors]
    colours = {name: palette[number % len(palette)] for number, name in enumerate(names)}

    def draw(name: str, x: str, y: str, value: str, along: str, keep: Callable[[dict[str, Any]], bool], logarithmic: bool) -> None:
        if not any(row.get(along) and keep(row) for row in rows if "phase" in row):
            return
        figure, panels = pyplot.subplots(1, 2, figsize=(13, 5.5), sharey=True)
        for phase, axes in zip(PHASES, panels, strict=True):
            of_phase = [row for row in rows if row.get("phase") == phase and keep(row)]
            for label, points in sorted(series(of_phase, along, value).items()):
                style = "o-" if label.startswith("epdsl") else "s--"
                axes.plot(*zip(*points, strict=True), style, label=label, color=colours[label], markersize=4)
            if logarithmic:
                axes.set_xscale("log", base=2)
                axes.xaxis.set_major_formatter(ScalarFormatter())
                axes.set_yscale("log")
            axes.set(title=phase, xlabel=x)
            axes.grid(True, which="both", alpha=0.3)
            axes.legend(fontsize=7)
        panels[0].set_ylabel(y)
        figure.text(0.5, 0.01, caption, ha="center", fontsize=7)
        figure.tight_layout(rect=(0, 0.03, 1, 1))
        made.append(folder / name)
        figure.savefig(made[-1], dpi=110)
        pyplot.close(figure)

    most = max((row["tokens"] for row in rows if swept(rows, row)), default=0)
    draw("exchange_tokens.png", "tokens of each rank", "microseconds", "less_empty", "tokens", lambda row: True, True)
    draw(
        "exchange_sms.png",
        f"multiprocessors ({most} tokens of each rank)",
        "remote GB/s",
        "remote_gb_s",
        "blocks",
        lambda row: swept(rows, row),
        False,
    )
    return made


def swept(rows: list[dict[str, Any]], row: dict[str, Any]) -> bool:
    """Whether the row is of a mode, format and number of tokens that was timed with several numbers of blocks."""
    if "phase" not in row or not row.get("blocks"):
        return False
    key = ("peer", "phase", "format", "tokens")
    alike = {other["blocks"] for other in rows if "phase" in other and all(other[k] == row[k] for k in key)}
    return len(alike) > 1
