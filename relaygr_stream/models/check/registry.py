"""The list of properties: name, rule, and the usual cause of a failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from relaygr_stream.models.check import features, prefix_kv, properties
from relaygr_stream.models.check.probe import Applies, Measure, Probe

#: Why what is about K and V of single tokens does not apply.
STATE_ONLY: Final = "its layout has a state alone, and no K/V per token"


@dataclass(frozen=True)
class Property:
    """A rule that every model must keep.

    usually: the usual cause of a failure. hazard: the heading in docs/explanation/exactness.md, "" for none.
    incremental_only: applies only to models with incremental = True. applies: whether it applies to the model; unless:
    the reason if it does not. basic: if it fails, the other results would mean nothing, and they are not run. method:
    of the model, the one at fault where no call raised.
    """

    name: str
    holds: str
    usually: str
    run: Callable[[Probe], Measure | None]
    hazard: str = ""
    incremental_only: bool = False
    applies: Applies = lambda probe: True
    unless: str = ""
    basic: bool = False
    method: str = "score"


PROPERTIES: Final = (
    Property(
        "contract",
        "prefill advances kv.length by what it appended, in place; score returns float32 (candidates, tasks), finite",
        "prefill lacks `kv.length += len(tokens)`, or score returns another shape, type or device",
        properties.contract,
        basic=True,
    ),
    Property(
        "half precision",
        "in half precision, scores are finite and nearer to float32's than noise",
        "sums or squares that overflow float16 (65,504), or a scale applied after the sum: keep norms and softmax in "
        "float32",
        properties.half_precision,
        hazard="half-precision",
        basic=True,
    ),
    Property(
        "cross features stay out",
        "prefix KV do not depend on the candidates' features that were scored before, nor do later scores",
        "score() adds candidate or cross features to state that prefill() reads, or to the region",
        features.cross_stay_out,
        hazard="cross-features-in-the-prefix",
        applies=features.reads("candidate"),
        unless="it reads no features of candidates",
    ),
    Property(
        "user features changed",
        "the same behaviours with other features of the user score as if the first ones had never been there",
        "the user's vector is kept by user, behaviours or address instead of being computed from the first token",
        features.user_changed,
        hazard="user-features-that-changed",
        applies=features.reads("user"),
        unless="it reads no features of users",
        method="prefill",
    ),
    Property(
        "features are read",
        "another value of a declared column gives another score, where the history has the row",
        "the schema names a column that the model does not read: senders pay for it, and prefix KV are missed for it",
        features.are_read,
        applies=lambda probe: bool(probe.schema),
        unless="it declares no features",
    ),
    Property(
        "determinism",
        "the same call gives the same scores, with any calls in between",
        "dropout or another random layer is still on (call .eval()), or state is kept between calls outside the region",
        properties.determinism,
        hazard="state-outside-the-region",
        basic=True,
    ),
    Property(
        "version",
        "made twice it is the same version with the same scores; another dtype is another version, or is refused by a "
        "ModelError",
        "weights drawn from an unseeded generator, or a version that leaves out the dtype: prefix KV of one would be "
        "scored by the other; or a factory that raises in a type that it does not offer",
        properties.version,
        hazard="a-version-that-says-too-little",
        method="__init__",
    ),
    Property(
        "reads up to kv.length",
        "memory behind kv.length may hold anything, NaN too",
        "attention reads the whole capacity and masks the rest (0 × NaN is NaN): slice K and V to kv.length",
        prefix_kv.reads_to_length,
        hazard="reading-behind-kvlength",
    ),
    Property(
        "score only reads",
        "score leaves kv as it is, bit for bit, the memory behind kv.length included",
        "score writes the suffix's K/V behind kv.length: another request may be appending to the same region",
        prefix_kv.score_reads_only,
        hazard="writing-to-what-others-read",
    ),
    Property(
        "prefill only appends",
        "prefill leaves the K/V of earlier tokens as they are, bit for bit",
        "K/V are rescaled, re-rotated or normalised when the sequence grows: store what never changes",
        prefix_kv.appends_only,
        hazard="writing-to-what-others-read",
        incremental_only=True,
        applies=prefix_kv.has_tokens,
        unless=STATE_ONLY,
    ),
    Property(
        "earlier K/V do not depend on later tokens",
        "K/V of the first n tokens are the same for any tokens that follow them",
        "positions counted back from the end, times relative to the newest behaviour, a scale 1/N from the length, or "
        "attention that is not causal (contextual tokens: set incremental = False)",
        prefix_kv.causal,
        hazard="positions-or-times-counted-from-the-end",
        incremental_only=True,
        applies=prefix_kv.has_tokens,
        unless=STATE_ONLY,
        method="prefill",
    ),
    Property(
        "the region is all there is",
        "a region's bytes, spilled, reloaded elsewhere and scored, give the same scores",
        "the model keeps something of a prefix outside the region, by its address or by user; it must be in K/V",
        prefix_kv.relocation,
        hazard="state-outside-the-region",
        method="prefill",
    ),
    Property(
        "chunks",
        "prefill in chunks is prefill at once",
        "a chunk does not see the tokens before it, or its causal mask or positions start at 0 instead of kv.length",
        prefix_kv.chunks,
        hazard="chunks-that-start-anew",
        incremental_only=True,
        method="prefill",
    ),
    Property(
        "steps",
        "prefill in the model's own steps, with rankings and another prefill's steps in between or abandoned half-way, "
        "is prefill at once",
        "kv.length moves or a state is rewritten before the last step, or a workspace is shared with score or with "
        "another prefill",
        prefix_kv.steps,
        hazard="chunks-that-start-anew",
        applies=prefix_kv.has_steps,
        unless="it has no prefill_in_steps: the worker makes chunks shorter instead",
        method="prefill_in_steps",
    ),
    Property(
        "extension",
        "a cached prefix that grew, in place or by a move, scores as the longer prefix",
        "as `chunks`; or the model keeps state from before the prefix grew",
        prefix_kv.extension,
        hazard="chunks-that-start-anew",
        incremental_only=True,
        method="prefill",
    ),
    Property(
        "suffix",
        "the scores do not depend on where history is cut into prefix and suffix",
        "a suffix's positions or gaps start at 0 again, a suffix row does not see the prefix, or candidates have the "
        "position kv.length instead of the position behind the suffix",
        properties.suffix,
        hazard="positions-or-times-counted-from-the-end",
        incremental_only=True,
    ),
    Property(
        "candidates apart",
        "a candidate's score does not depend on the other candidates",
        "candidates attend to each other, have different positions, or are normalised over the request",
        properties.candidates_apart,
        hazard="candidates-that-see-each-other",
    ),
    Property(
        "edges",
        "no history, one behaviour, and one candidate are scored as in full",
        "a softmax over nothing (NaN), or a shape that assumes at least one token",
        properties.edges,
    ),
    Property(
        "batch apart",
        "a ranking's scores do not depend on its neighbours in a batch",
        "padding to one length that is masked by multiplication, or a norm or 1/N that spans the batch",
        properties.batch_apart,
        hazard="neighbours-in-a-batch",
    ),
    Property(
        "unknown items",
        "any item id of the wire, 0 to 4,294,967,295, is scored finitely, and as in full",
        "an embedding that raises for an id behind its table, maps it to another row in score() than in prefill(), or "
        "maps it in the caller's array",
        properties.unknown_items,
    ),
    Property(
        "longest",
        "the largest request that the relay settings allow is scored as in full",
        "a position table, mask or buffer that is shorter than relay.max_prefix_tokens + relay.max_suffix_tokens, or "
        "for suffixes one that is shorter than relay.max_suffix_tokens + worker.max_stale_tokens",
        properties.longest,
    ),
)
