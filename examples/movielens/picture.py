"""The picture of what length buys: NDCG@10 and latency over the number of behaviours, with the SLO's line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from relaygr_lab.drawing import BLUE, GREY, ORANGE, RED

from examples.movielens.evaluate import ENOUGH_USERS, Floats
from examples.movielens.serve import Latency

#: z of a 95 % interval of a mean.
Z95: Final = 1.96


def draw(
    file: Path, by_group: Mapping[str, Mapping[int, Floats]], latencies: Sequence[Latency], slo_ms: float, title: str
) -> None:
    """Write the picture. by_group: for each group of users, length → NDCG@10 (users,). Needs matplotlib."""
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.ticker import FixedLocator, NullLocator  # noqa: PLC0415

    figure = Figure(figsize=(8, 6.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for (name, curve), colour in zip(by_group.items(), (BLUE, ORANGE, GREY), strict=False):
        lengths = list(curve)
        means = np.array([values.mean() for values in curve.values()])
        if min(map(len, curve.values())) < ENOUGH_USERS:
            above.plot(lengths, means, "o:", color=colour, label=f"{name}: too few to conclude from")
            continue
        spread = np.array([Z95 * values.std() / np.sqrt(len(values)) for values in curve.values()])
        above.plot(lengths, means, "o-", color=colour, label=name)
        above.fill_between(lengths, means - spread, means + spread, color=colour, alpha=0.15, linewidth=0)
    above.set_ylabel("NDCG@10 (95 % interval)")
    above.set_ylim(bottom=0)
    above.set_title(title)
    above.legend(loc="lower left")
    shown = [one.length for one in latencies]
    below.plot(shown, [one.full[0] for one in latencies], "s-", color=RED, label="full inference, P50")
    below.plot(shown, [one.full[1] for one in latencies], "s:", color=RED, label="full inference, P99")
    below.plot(shown, [one.relay[0] for one in latencies], "o-", color=BLUE, label="relay (hit), P50")
    below.plot(shown, [one.relay[1] for one in latencies], "o:", color=BLUE, label="relay (hit), P99")
    below.axhline(slo_ms, color=GREY, linestyle="--", label=f"SLO, {slo_ms:g} ms")
    below.set_xscale("log")
    below.set_ylim(bottom=0)
    below.xaxis.set_major_locator(FixedLocator(shown))
    below.xaxis.set_minor_locator(NullLocator())
    below.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    below.set_ylabel("latency at the client, ms")
    below.set_xlabel("behaviours")
    below.legend(loc="lower left", ncols=2)
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(file)
