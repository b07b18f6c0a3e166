"""Colours that are legible on light and dark backgrounds, as matplotlib's settings."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final


class Theme(StrEnum):
    """The background."""

    LIGHT = "light"
    DARK = "dark"


#: Background, text, secondary text, grid lines.
_INKS: Final = {
    Theme.LIGHT: ("#ffffff", "#1f2933", "#5f6b7a", "#e3e7ec"),
    Theme.DARK: ("#12161c", "#e6eaf0", "#9aa7b8", "#2a313b"),
}
#: Okabe's and Ito's colours, which all people can distinguish, darker or lighter for the background.
_COLOURS: Final = {
    Theme.LIGHT: ("#0072b2", "#d55e00", "#009e73", "#b4548d", "#b8860b", "#3a9bd9", "#4d4d4d"),
    Theme.DARK: ("#56b4e9", "#f0883e", "#2fc79b", "#e08fc0", "#f0c94a", "#8ea8ff", "#b0b0b0"),
}


def settings_of(theme: Theme) -> dict[str, Any]:
    """Return matplotlib's settings."""
    paper, text, secondary, grid = _INKS[theme]
    return {
        "axes.axisbelow": True,
        "axes.edgecolor": secondary,
        "axes.facecolor": paper,
        "axes.grid": True,
        "axes.labelcolor": secondary,
        "axes.prop_cycle": f"cycler(color={_COLOURS[theme]})",
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlecolor": text,
        "axes.titlelocation": "left",
        "axes.titlepad": 14,
        "axes.titlesize": 13,
        "axes.titleweight": "bold",
        "figure.constrained_layout.h_pad": 0.14,
        "figure.constrained_layout.w_pad": 0.14,
        "figure.facecolor": paper,
        "figure.figsize": (8.0, 4.5),
        "font.family": ["DejaVu Sans"],
        "font.size": 10,
        "grid.color": grid,
        "grid.linewidth": 0.8,
        "hatch.color": paper,
        "hatch.linewidth": 1.0,
        "legend.frameon": False,
        "legend.labelcolor": text,
        "savefig.facecolor": paper,
        # Ids within an SVG would be random.
        "svg.hashsalt": "kqueue",
        # Text stays text, for search and for screen readers.
        "svg.fonttype": "none",
        "text.color": text,
        # A dollar sign in a label does not begin a formula.
        "text.parse_math": False,
        "timezone": "UTC",
        "xtick.color": secondary,
        "ytick.color": secondary,
        "xtick.labelcolor": secondary,
        "ytick.labelcolor": text,
    }
