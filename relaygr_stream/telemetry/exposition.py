"""What /metrics answers. A page is rendered once a second at most, however often it is asked for."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import parse_qs

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import choose_encoder, gzip_accepted

from relaygr_stream.telemetry.pages import Page

#: Seconds for which a rendered page is answered again. Rendering takes milliseconds of the process's only interpreter.
FRESH_S: Final = 1.0
#: Pages with `name[]` rendered in FRESH_S; there are endlessly many. Whole pages are few, so none waits for another.
MAX_PARTS: Final = 4
#: Versions of formats that are answered; others of the same format are answered as text 0.0.4.
VERSIONS: Final = ("0.0.4", "1.0.0")

_TOO_MANY: Final[Page] = ("429 Too Many Requests", [("Retry-After", "1"), ("Content-Length", "0")], b"")


class Exposition:
    """The pages of one registry, in the formats that prometheus_client's own application has."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._render = make_wsgi_app(registry)
        self._pages: dict[tuple[str, bool, str], tuple[float, Page]] = {}

    def page(self, query: str, accept: str, accept_encoding: str, now: float) -> Page:
        """The page that a request with this query string and these headers gets, at most FRESH_S old.

        now: seconds of one monotonic clock.
        """
        accept, kind = readable_accept(accept)
        part = query if "name[]" in parse_qs(query) else ""
        key = kind, gzip_accepted(accept_encoding), part
        self._pages = {key: made for key, made in self._pages.items() if now < made[0] + FRESH_S}
        if key in self._pages:
            return self._pages[key][1]
        if part and sum(bool(each) for _, _, each in self._pages) >= MAX_PARTS:
            return _TOO_MANY
        page = self._rendered(part, accept, accept_encoding)
        self._pages[key] = now, page
        return page

    def _rendered(self, query: str, accept: str, accept_encoding: str) -> Page:
        answered: list[Any] = []
        environ = {
            "REQUEST_METHOD": "GET",
            "PATH_INFO": "/metrics",
            "QUERY_STRING": query,
            "HTTP_ACCEPT": accept,
            "HTTP_ACCEPT_ENCODING": accept_encoding,
        }
        body = b"".join(self._render(environ, lambda status, found: answered.extend((status, found))))
        return answered[0], [*answered[1], ("Content-Length", str(len(body)))], body


def readable_accept(header: str) -> tuple[str, str]:
    """The Accept header and the content type that answers it, one of a few.

    The header is "" where prometheus_client raises an error at it, as it does at unknown versions, or would repeat any
    version in its answer.
    """
    try:
        kind = choose_encoder(header)[1]
    except (TypeError, ValueError):
        return readable_accept("")
    version = kind.partition("version=")[2].partition(";")[0]
    return (header, kind) if version in VERSIONS else readable_accept("")
