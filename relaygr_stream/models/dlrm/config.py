"""The shape of a DlrmHSTU, the features that it reads, and which of its parts tie prefix KV to one request."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import Meta, to_builtins

from relaygr_stream.models.kv import KVLayout
from relaygr_stream.models.stu import Count, Positive, StackConfig
from relaygr_stream.wire.features import FeatureColumn

#: How a token's row of the time table is chosen: by its age at the query time, row 0 for all, or by the gap before it.
Times = Literal["query", "constant", "gap"]
#: How a behaviour's row of the position table is chosen: 2 for the newest and so on, 2 for the oldest and so on, or 2.
Positions = Literal["end", "start", "none"]

#: Columns, by the names of the reference's features. Times are Unix times in seconds. Categories are few, so they are
#: sent as int32: with int64 a ranking of 7,163 behaviours and 2,048 candidates has 24 % more bytes.
USER: Final = FeatureColumn(name="user_id", of="user", dtype="int64")
QUERY: Final = FeatureColumn(name="query_time", of="user", dtype="int64")
COUNT: Final = FeatureColumn(name="candidates", of="user", dtype="int32")
CATEGORY: Final = FeatureColumn(name="uih_category_id", of="behaviour", dtype="int32")
TIME: Final = FeatureColumn(name="uih_timestamp", of="behaviour", dtype="int64")
CANDIDATE_CATEGORY: Final = FeatureColumn(name="cand_category_id", of="candidate", dtype="int32")
CANDIDATE_TIME: Final = FeatureColumn(name="cand_query_time", of="candidate", dtype="int64")

#: Bytes of what a prefix's request stated: its query time and its number of candidates, 8 bytes each. A region's state
#: has one element for each, since every type of K/V holds the integers up to 255.
STATED_BYTES: Final = 16


class DlrmConfig(StackConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole definition of a DlrmHSTU apart from its weights.

    scale_tokens: N of the attention scale 1/N; 0: of each request, 1 + history + candidates.
    table_dim: width of the tables of items, categories and users, whose rows these fields count.
    action_weights: an action's bits, each with a row of action_dim numbers. hidden, item_hidden, head_hidden: widths of
    the token's, the item's and the task's MLPs. time_last_row: the largest row of the time table in use (the reference
    has two rules: time_rows - 1 on its Triton kernels, dim - 1 on its PyTorch ones); a row spans about
    √(age / time_bucket_s). min_tokens: history and candidates from which on the user's row is used; 0: always.
    periods: (seconds of a unit, units of a period) of the candidate's time features.
    """

    architecture: ClassVar[str] = "dlrm-hstu"

    scale_tokens: Count
    table_dim: Positive
    items: Positive
    categories: Positive
    users: Positive
    action_weights: Annotated[tuple[Positive, ...], Meta(min_length=1)]
    action_dim: Positive
    hidden: Positive
    item_hidden: Positive
    head_hidden: Positive
    position_rows: Annotated[int, Meta(ge=3)]
    time_rows: Positive
    time_last_row: Count
    time_bucket_s: Positive = 60
    times: Times = "query"
    positions: Positions = "end"
    min_tokens: Count = 20
    periods: tuple[tuple[Positive, Positive], ...] = ((3600, 24), (86400, 7))
    tasks: Annotated[tuple[Annotated[str, Meta(min_length=1)], ...], Meta(min_length=1)]

    def __post_init__(self) -> None:
        if self.time_last_row >= self.time_rows:
            raise ValueError(f"time_last_row = {self.time_last_row} is behind the table of {self.time_rows} rows")
        if self.relative_positions or self.relative_times:
            raise ValueError("a DlrmHSTU has no bias on relative positions or times")

    @property
    def vocab(self) -> int:
        """Items with a row of their own, as in `HSTUConfig`."""
        return self.items

    @property
    def item_table(self) -> tuple[int, int]:
        """The shape of the item table."""
        return self.items, self.table_dim

    @property
    def oov_rows(self) -> int:
        """No rows are for unknown ids, as in `HSTUConfig`: such an id shares the row id mod items."""
        return 0

    @property
    def features(self) -> tuple[FeatureColumn, ...]:
        """The columns that the model reads: those of requests only where prefix KV depend on them."""
        columns = [USER, CATEGORY, CANDIDATE_CATEGORY, CANDIDATE_TIME]
        if self.times == "query":
            columns += [QUERY, TIME]
        if not self.scale_tokens or self.min_tokens:
            columns.append(COUNT)
        return tuple(columns)

    @property
    def stack(self) -> StackConfig:
        """The shape of the layers alone."""
        names = StackConfig.__struct_fields__
        return StackConfig(**{name: getattr(self, name) for name in names} | {"scale_tokens": self.scale_tokens or 1})

    @property
    def incremental(self) -> bool:
        """Whether prefix KV stay valid for later requests of the user."""
        return not self.breaks()

    def breaks(self) -> list[str]:
        """What ties prefix KV to one request, in words."""
        found = []
        if self.positions == "end":
            found.append("positions count from the end: each new behaviour changes the rows of all earlier ones")
        if self.times == "query":
            found.append("times are relative to the query: a later query changes the rows of all behaviours")
        if not self.scale_tokens:
            found.append("N of the scale 1/N is 1 + history + candidates of the request, not a constant")
        if self.min_tokens:
            found.append(f"the user's row is left out under {self.min_tokens} tokens of history and candidates")
        if self.contextual_seq_len:
            found.append(f"the first {self.contextual_seq_len} tokens see the whole history")
        return found

    def layout(self, dtype: Any) -> KVLayout:
        """The prefix KV of one token, and of a request's prefix what the request stated."""
        layout = super().layout(dtype)
        return layout if self.incremental else replace(layout, state=STATED_BYTES)

    def fields(self) -> dict[str, Any]:
        """The fields as config.json has them, and the features, for senders that read the schema there."""
        fields: dict[str, Any] = to_builtins(self)
        own = {name: value for name, value in fields.items() if name not in ("relative_positions", "relative_times")}
        return own | {"features": list(to_builtins(self.features))}

    @classmethod
    def of_fields(cls, fields: dict[str, Any]) -> DlrmConfig:
        """The config that `fields` were made of. Raises msgspec.ValidationError, also for features of another model."""
        stated = fields.pop("features", None)
        found = msgspec.convert(fields, cls)
        if stated is not None and stated != list(to_builtins(found.features)):
            raise msgspec.ValidationError("`features` are not those that the other fields make the model read")
        return found


def changed(config: DlrmConfig, **fields: Any) -> DlrmConfig:
    """The config with other fields, which are checked."""
    return msgspec.structs.replace(config, **fields)
