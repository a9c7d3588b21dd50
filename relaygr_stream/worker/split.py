"""How the device's time is split between ranking and pre-inference: what triggers may ask for follows what ranking
leaves over, with nobody tuning it.

Ranking takes what it needs, full inferences included; pre-inference gets the rest, up to its cap. When requests run in
full because too little was admitted, their full inference is ranking time: as long as the device has time to spare,
each grant is a little larger than the last, until all is admitted that is worth it; without, pre-inference is shed
first.

Triggers cannot know what is cached. The owner can: it states which share of what was asked for had to be computed
lately, and an admission is charged with so much of its prefix. Knows nothing of lanes or of Kafka.
"""

from __future__ import annotations

from typing import Final

#: Ranking's share of the device is averaged over about a second; the share of prefix tokens that had to be computed
#: over some ten seconds, since it depends on which users come.
RANKING_AVERAGE_S: Final = 1.0
REUSE_AVERAGE_S: Final = 10.0
#: A worker that has seen nothing takes everything for new; this many tokens of evidence outweigh that.
PRIOR_TOKENS: Final = 10_000.0
#: No less is charged: should all users be new from one moment to the next, at most ten times too much is admitted for
#: some seconds, and waits behind ranking.
LEAST_COMPUTED: Final = 0.1


class LoadSplit:
    """Device milliseconds a second that triggers may ask for. cap: share of the device for pre-inference at most."""

    def __init__(self, cap: float) -> None:
        self._cap = cap
        self.ranking_share = 0.0  # of the device's time, averaged over about a second
        self._last_ranking_ms = 0.0
        self._last_asked = self._last_computed = 0.0
        self._asked = self._computed = 0.0

    @property
    def computed_share(self) -> float:
        """Share of the tokens asked for that had to be computed, LEAST_COMPUTED…1."""
        share = (PRIOR_TOKENS + self._computed) / (PRIOR_TOKENS + self._asked)
        return min(1.0, max(LEAST_COMPUTED, share))

    def update(self, ranking_ms: float, asked: float, computed: float, seconds: float) -> float:
        """The grant from now on, in milliseconds a second.

        All running totals: device time of ranking (full inference included), prefix tokens that signals asked for,
        and those of them that had to be computed. seconds: since the last call.
        """
        busy = min(1.0, max(0.0, ranking_ms - self._last_ranking_ms) / (seconds * 1e3))
        self.ranking_share += min(1.0, seconds / RANKING_AVERAGE_S) * (busy - self.ranking_share)
        keep = max(0.0, 1.0 - seconds / REUSE_AVERAGE_S)
        self._asked = keep * self._asked + max(0.0, asked - self._last_asked)
        self._computed = keep * self._computed + max(0.0, computed - self._last_computed)
        self._last_ranking_ms, self._last_asked, self._last_computed = ranking_ms, asked, computed
        free = max(0.0, min(self._cap, 1.0 - self.ranking_share))
        return 1e3 * free
