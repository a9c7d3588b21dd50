"""What callers are told of an error: no address, topic or path of the relay. The log has the error's own words."""

from __future__ import annotations

import re
from typing import Final

from relaygr_stream.errors import BrokerError, HistoryError, LanesChanged, RelayError, RequestError

#: Of errors that are about the relay's own parts.
_SENTENCES: Final[tuple[tuple[type[RelayError], str], ...]] = (
    (LanesChanged, "the cluster has another number of lanes than this gateway was started with: it must be restarted"),
    (BrokerError, "no broker takes requests, or answers them, now: fall back, or ask again after Retry-After"),
    (HistoryError, "the history store does not answer, or has another history than the reference says"),
    (RelayError, "the gateway cannot serve requests now: ask again after Retry-After, or another one"),
)
#: URLs; addresses, with or without a port; names with a port; absolute and relative paths.
_INTERNAL: Final = r"""
    \w[\w+.-]*://[^\s,;'")\]]+
  | \[[0-9A-Fa-f:.%]+\](?::\d+)?
  | (?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?![\w:])
  | (?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?(?![\w.]\w)
  | (?<![\w.])[A-Za-z][\w.-]*:\d{1,5}(?!\w)
  | (?<![\w…/.])(?:~|\.{1,2})?/[^\s:,;'")\]]+
"""


class Details:
    """What callers are told. prefix: of the topics' names; empty: these are as public as the documentation."""

    def __init__(self, prefix: str) -> None:
        topics = rf"| (?<!\w){re.escape(prefix)}[\w.-]+" if prefix else ""
        self._internal: Final = re.compile(_INTERNAL + topics, re.VERBOSE)

    def text(self, error: RelayError) -> str:
        """The error in words for a caller."""
        if isinstance(error, RequestError):
            return self.public(str(error))
        return next(sentence for kind, sentence in _SENTENCES if isinstance(error, kind))

    def public(self, text: str) -> str:
        """The text with `(internal)` in place of addresses, topics and paths."""
        return self._internal.sub("(internal)", text)
