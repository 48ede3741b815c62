"""The picture of `bench staleness`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

HEIGHTS = {"reward_end": "reward, mean of the last 20 steps", "ess_sequence": "effective sample size of answers"}


def draw(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """rows: those of the kind `mean`. A column for each rate, reward above ESS; a line for each arm, which in the upper
    panels has a band from the least to the most of its seeds."""
    rates = sorted({row["learning_rate"] for row in rows})
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    lags = sorted({row["lag"] for row in rows})
    # A figure of its own, without pyplot: no window system is asked for, and no state is left behind.
    figure = Figure(figsize=(5 * len(rates) + 2, 7), layout="constrained")
    axes = figure.subplots(len(HEIGHTS), len(rates), sharex=True, sharey="row", squeeze=False)
    for column, rate in enumerate(rates):
        for panel, key in zip(axes[:, column], HEIGHTS, strict=True):
            for number, arm in enumerate(arms):
                line = sorted(
                    (row for row in rows if (row["arm"], row["learning_rate"]) == (arm, rate)),
                    key=lambda row: row["lag"],
                )
                # By place and not by number: lag 8 is not eight times as interesting as lag 1.
                places = [lags.index(row["lag"]) for row in line]
                panel.plot(places, [row[key] for row in line], "o-", color=f"C{number}", label=arm, markersize=4)
                if key == "reward_end":
                    least, most = ([row[f"reward_end_{end}"] for row in line] for end in ("least", "most"))
                    panel.fill_between(places, least, most, color=f"C{number}", alpha=0.08)
            panel.set_ylim(0, 1.02)
            panel.grid(alpha=0.3)
            panel.set_xticks(range(len(lags)), [str(lag) for lag in lags])
        axes[0, column].set_title(f"learning rate {rate:g}")
        axes[-1, column].set_xlabel("lag, updates")
    for panel, label in zip(axes[:, 0], HEIGHTS.values(), strict=True):
        panel.set_ylabel(label)
    axes[0, -1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    figure.savefig(file, format="png", dpi=120)
