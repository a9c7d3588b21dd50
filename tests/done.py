"""Who reads records, for tests of what has them done."""

from __future__ import annotations

from relaygr_stream.wire.records import Record


class DoneRecords(list[Record]):
    """Those that are done, in this order."""

    def done(self, record: Record) -> None:
        self.append(record)
