"""Logging to stderr: readable lines on a terminal, JSON lines otherwise. structlog and stdlib logging share a pipeline.

Every line about a request has `request_log_fields`. The pipeline replaces user ids by a keyed hash if the settings ask
for it, hides fields whose names mark secrets, and shortens long values.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import sys
import threading
from functools import partial
from typing import Any, Final

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from relaygr_stream.settings.schema import Telemetry
from relaygr_stream.settings.section import SECRET_SHOWN
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.telemetry.printable import printable, printable_json, printable_lines

__all__ = [
    "LogLimiter",
    "configure_logging",
    "hash_user_ids",
    "hide_and_shorten",
    "print_plain_tracebacks",
    "request_log_fields",
    "writes_json",
]

#: Longest value of a field, in characters: a line about a bad message must not contain the message.
MAX_VALUE: Final = 500
#: Longest traceback, in characters; its end, with the innermost frames, is kept.
MAX_TRACEBACK: Final = 20_000
#: A field with one of these words in its name is hidden.
SECRET_WORDS: Final = ("password", "secret", "hash_key", "credential", "private_key")

_LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}
#: Warnings of aiokafka that are normal: a rebalance is announced to a member in this way at every join or leave.
_EXPECTED: Final = ("because it is rebalancing",)


def configure_logging(telemetry: Telemetry, process: str, **bound: Any) -> None:
    """Send lines of structlog and stdlib logging to stderr, with the settings' format and level.

    process, bound: fields of every line. Call it once per process, before the first line; a second call replaces the
    first. Stdlib loggers (aiokafka, asyncio) pass from `warning` on.
    """
    level = _LEVELS[telemetry.log_level]
    fields = {"process": process, **bound}
    processors: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _with_fields(fields),
        structlog.processors.format_exc_info,
    ]
    if telemetry.hash_user_ids:
        processors.append(hash_user_ids(telemetry.hash_key))
    processors.append(hide_and_shorten)
    if writes_json(telemetry):
        processors += [_main_fields_first, structlog.processors.JSONRenderer(serializer=_to_json)]
    else:
        processors.append(_without_controls)
        processors.append(structlog.dev.ConsoleRenderer(colors=_is_terminal(), sort_keys=False))
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=_StderrLogger,
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    root.handlers = [_IntoStructlog()]
    root.setLevel(max(logging.WARNING, level))


def print_plain_tracebacks() -> None:
    """Print lines to stderr, without the values of variables in tracebacks: for commands that are no process.

    structlog's own default prints the variables of every frame, such as histories and item ids, to stdout.
    """
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%Y-%m-%d %H:%M:%S", utc=False),
            structlog.processors.format_exc_info,
            hide_and_shorten,
            _without_controls,
            structlog.dev.ConsoleRenderer(colors=_is_terminal(), sort_keys=False),
        ],
        logger_factory=_StderrLogger,
        cache_logger_on_first_use=False,
    )
    # What it reports is raised, too; without any handler logging would print it beside the error.
    logging.getLogger("aiokafka").addHandler(logging.NullHandler())


def writes_json(telemetry: Telemetry) -> bool:
    """Whether lines are JSON."""
    return telemetry.log_format == "json" or (telemetry.log_format == "auto" and not _is_terminal())


def request_log_fields(
    request_id: str, user_id: str, lane: int | None = None, outcome: str | None = None
) -> dict[str, Any]:
    """The fields of every line about a request; lane and outcome are null until they are known.

    outcome: where the prefix KV was found (messages.Outcome), or the status or reason if there are no scores.
    Log an answered request at debug and a failed one at info or warning, through a `LogLimiter`.
    """
    return {"request_id": request_id, "user_id": user_id, "lane": lane, "outcome": outcome}


def hash_user_ids(key: str) -> Processor:
    """A processor that replaces the field `user_id` by 12 hex digits of a keyed BLAKE2b hash.

    An empty key means a random one: hashes are then comparable within this process only.
    """
    raw = key.encode() or secrets.token_bytes(32)
    # BLAKE2b takes keys of at most 64 bytes.
    raw = raw if len(raw) <= hashlib.blake2b.MAX_KEY_SIZE else hashlib.blake2b(raw).digest()

    def processor(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        user = event.get("user_id")
        if user is not None:
            event["user_id"] = hashlib.blake2b(str(user).encode(), key=raw, digest_size=6).hexdigest()
        return event

    return processor


def hide_and_shorten(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """A processor that hides secrets by name, shows bytes as their length and structs as their type, cuts long text."""
    for name, value in event.items():
        if any(word in name.lower() for word in SECRET_WORDS):
            event[name] = SECRET_SHOWN
        elif name == "exception":
            event[name] = _keep_end(str(value), MAX_TRACEBACK)
        elif not isinstance(value, int | float | None):
            event[name] = _shorten(_hidden(value))
    return event


def _hidden(value: Any) -> Any:
    """The value without bytes and structs, which may hold secrets or user ids, also inside lists and tables."""
    match value:
        case bytes() | bytearray() | memoryview():
            return f"<{len(value)} bytes>"
        case msgspec.Struct():
            return f"<{type(value).__name__}>"
        case dict():
            secret = {name for name in value if any(word in str(name).lower() for word in SECRET_WORDS)}
            return {name: SECRET_SHOWN if name in secret else _hidden(inner) for name, inner in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_hidden(inner) for inner in value]
    return value


class _StderrLogger:
    """Writes whole lines, one at a time, to the current sys.stderr (the live view replaces it)."""

    _lock: Final = threading.Lock()

    def __init__(self, name: str = "") -> None:
        self.name = name

    def msg(self, line: str) -> None:
        """Write the line; a closed stderr does not fail the caller."""
        with self._lock:
            try:
                sys.stderr.write(line + "\n")
                sys.stderr.flush()
            except (OSError, ValueError):
                return

    debug = info = warning = error = critical = fatal = exception = warn = log = msg


class _IntoStructlog(logging.Handler):
    """Passes stdlib log records into the structlog pipeline, with a limit on repeated lines."""

    def __init__(self) -> None:
        super().__init__()
        self._limiter = LogLimiter()

    def emit(self, record: logging.LogRecord) -> None:
        """Log the record; never raises."""
        try:
            log = structlog.get_logger(record.name)
            message = record.getMessage()
            failed = record.exc_info is not None and record.exc_info[0] is not None
            fields = {"exc_info": record.exc_info} if failed else {}
            if record.name.startswith("aiokafka") and any(words in message for words in _EXPECTED):
                log.debug(message)
            else:
                level = min(logging.CRITICAL, record.levelno // 10 * 10)  # structlog supports only the standard levels
                # Limited by the template: the text names another node or partition each time. asyncio's own errors are
                # no template, but their first line names nothing.
                kind = str(record.msg).partition("\n")[0]
                self._limiter.limited(partial(log.log, level), f"{record.name}: {kind}")(message, **fields)
        except Exception:
            self.handleError(record)


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _with_fields(fields: dict[str, Any]) -> Processor:
    def processor(logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        if name := getattr(logger, "name", ""):
            event.setdefault("logger", name)
        for name, value in fields.items():
            event.setdefault(name, value)
        return event

    return processor


def _without_controls(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Escape control characters, so that text from messages (ids, errors) cannot control the terminal."""
    return {
        name: (printable_lines if name == "exception" else printable)(value) if isinstance(value, str) else value
        for name, value in event.items()
    }


def _main_fields_first(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    first = {name: event.pop(name) for name in ("timestamp", "level", "process", "event") if name in event}
    return {**first, **event}


def _shorten(value: Any) -> Any:
    """The value itself if its text is short, so that JSON keeps lists and tables; otherwise the text's beginning."""
    text = value if isinstance(value, str) else str(value)
    return value if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}… ({len(text)} characters)"


def _keep_end(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"… ({len(text)} characters)\n{text[-limit:]}"


def _to_json(event: EventDict, **_: Any) -> str:
    try:
        return printable_json(_encode(event).decode())
    except UnicodeEncodeError:  # a lone surrogate, which JSON can express and UTF-8 cannot
        return json.dumps(event, default=str)


# str for types that JSON lacks (paths, exceptions, arrays), so that every line can be written.
_encode: Final = msgspec.json.Encoder(enc_hook=str).encode
