"""A picture of the experts' load."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

_MOST_TICKS = 24


def check_matplotlib() -> None:
    """Check that a picture can be drawn.

    Raises:
        ModuleNotFoundError: it can't.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            "the heat map of the experts' load needs matplotlib: pip install matplotlib, or leave "
            "picture=... out.",
            name="matplotlib",
        )


def draw_heatmap(shares: Tensor, layers: Sequence[str], path: str | Path) -> None:
    """Write a PNG: a row per layer, a column per expert, coloured by tokens over an even load.

    Args:
        shares: [L, E], of each layer's routes; NaN where a layer has fewer experts.
        layers: names of the L layers.
        path: the file; its folder is made.
    """
    check_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    loads = shares.float() * shares.isfinite().sum(1, keepdim=True)
    height = min(max(0.22 * len(layers) + 1.2, 2.2), 12.0)
    figure = Figure(figsize=(8, height), dpi=100, layout="constrained")
    axes = figure.subplots()
    most = max(2.0, float(loads.nan_to_num().amax()))
    image = axes.imshow(loads.numpy(), aspect="auto", interpolation="nearest", vmin=0, vmax=most)
    step = -(-len(layers) // _MOST_TICKS)
    axes.set_yticks(range(0, len(layers), step), [_short(name) for name in layers[::step]])
    axes.set(title="Load of the experts in training", xlabel="expert", ylabel="layer")
    figure.colorbar(image, label="tokens over an even load")
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(str(target))


def _short(name: str) -> str:
    """The layer's number, where a name has one."""
    return next((part for part in name.split(".") if part.isdigit()), name)
