"""Runs the properties on a model in order, and prints a table of findings and a text for each failure."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

import torch
from msgspec.structs import replace

from relaygr_stream.errors import ConfigError, ModelError, RelayError
from relaygr_stream.models.api import RankingModel
from relaygr_stream.models.check.probe import Failed, Probe, RequestBounds
from relaygr_stream.models.check.registry import PROPERTIES, Property
from relaygr_stream.models.loading import config_of, load_model
from relaygr_stream.models.own_line import definition, own_line
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.printable import Say

Verdict = Literal["passed", "FAILED", "not applicable", "not run"]

DOCUMENT: Final = "docs/explanation/exactness.md"
NAME_WIDTH: Final = max(len(one.name) for one in PROPERTIES)


@dataclass(frozen=True)
class Finding:
    """The result of one property. detail: the deviation, or why it does not apply; seen: what failed; at: the author's
    line that raised, or that defines the method which failed."""

    about: Property
    verdict: Verdict
    detail: str = ""
    seen: str = ""
    at: str = ""


def probe_for(settings: Settings, device: torch.device, dtype: torch.dtype, seed: int) -> Probe:
    """A probe of the model that the settings name. Raises the errors of `load_model`.

    Raises ConfigError if the model cannot be made in float32, which half precision is compared with.
    """
    relay = settings.relay
    model = settings.model
    # A factory's own shape is not known: it is asked for ids as those of random weights.
    shape = config_of(replace(model, checkpoint="") if model.factory else model)
    if shape.contextual_seq_len and relay.max_suffix_tokens:
        relay = replace(relay, max_suffix_tokens=0)  # a worker requires this setting for such a model

    kernels = settings.worker.kernels

    def make(wanted: torch.dtype) -> RankingModel:
        try:
            return load_model(settings.model, relay, device=device, dtype=wanted, kernels=kernels)
        except ModelError:
            if wanted == dtype or kernels == "auto":
                raise
        # Of another type, for comparison only, which these kernels may not offer.
        return load_model(settings.model, relay, device=device, dtype=wanted)

    bounds = RequestBounds(
        relay.max_prefix_tokens, relay.max_suffix_tokens, relay.max_candidates, shape.vocab,
        min(settings.worker.max_stale_tokens, relay.max_prefix_tokens - 1),
    )  # fmt: skip
    try:
        return Probe(make, device, dtype, bounds, seed)
    except RelayError:
        if dtype == torch.float32:
            raise
        make(dtype)  # if this type fails too, its own error is the better one
        raise ConfigError(
            f"the check in {dtype} compares with the same model in float32, and the model cannot be made in float32"
        ) from None


def run_properties(probe: Probe) -> Iterator[Finding]:
    """Yield the finding of each property when it is known. After a basic property fails, the rest are not run."""
    broken = ""
    for about in PROPERTIES:
        if broken:
            yield Finding(about, "not run", f"without `{broken}` it would mean nothing")
            continue
        finding = _run(about, probe)
        if about.basic and finding.verdict == "FAILED":
            broken = about.name
        yield finding


def _reason_not_applicable(about: Property, probe: Probe) -> str:
    """Why the property does not apply to this model; "" if it does."""
    if about.incremental_only and not probe.model.incremental:
        return "incremental = False: the prefix is computed whole" + (", without a suffix" * (not probe.takes_suffix))
    if about.name == "half precision" and not probe.half:
        return "the check runs in float32; see --dtype"
    return "" if about.applies(probe) else about.unless


def _run(about: Property, probe: Probe) -> Finding:
    if reason := _reason_not_applicable(about, probe):
        return Finding(about, "not applicable", reason)
    try:
        measure = about.run(probe)
    except Failed as failed:
        return Finding(about, "FAILED", "–", str(failed), _line(about, probe, failed))
    if measure is None:
        return Finding(about, "passed")
    if measure.holds:
        return Finding(about, "passed", str(measure))
    seen = "the RMS deviation from float32's scores is {:.3g} times that of full inference" if measure.ratio else (
        "the largest deviation from full inference is {:.3g} of the largest score"
    )  # fmt: skip
    return Finding(about, "FAILED", str(measure), seen.format(measure.value), definition(probe.model, about.method))


def _line(about: Property, probe: Probe, failed: Failed) -> str:
    """Where the model raised; of a call that did not, its method; else the property's."""
    if failed.__cause__ is None:
        called = re.match(r"(\w+)\(\)", str(failed))
        return definition(probe.model, called[1] if called else about.method)
    return own_line(failed.__cause__, type(probe.model).__module__)


def heading() -> str:
    """The table's header."""
    return f"{'property':<{NAME_WIDTH}}  {'verdict':<14}  largest deviation (allowed)"


def row(finding: Finding) -> str:
    """The table's line for one finding."""
    return f"{finding.about.name:<{NAME_WIDTH}}  {finding.verdict:<14}  {finding.detail or 'exact'}".rstrip()


def in_words(finding: Finding) -> str:
    """The text of a failure: the rule, what the check saw and where, the usual cause, and where to read on."""
    about = finding.about
    at = [f"    At {finding.at}"] if finding.at else []  # code is not wrapped
    see = [_wrapped(f"See {DOCUMENT}#{about.hazard}.")] if about.hazard else []
    first = _wrapped(f"{about.name}: {about.holds}.", "")
    return "\n".join((first, _wrapped(f"Seen: {finding.seen}."), *at, _wrapped(f"Usually: {about.usually}."), *see))


def _wrapped(line: str, indent: str = "    ") -> str:
    return textwrap.fill(line, 110, initial_indent=indent, subsequent_indent="    ")


def check_model(probe: Probe, say: Say) -> bool:
    """Run all properties and pass each line of output to `say`. Returns whether every applicable property holds."""
    failed = []
    say(heading())
    for finding in run_properties(probe):
        say(row(finding))
        if finding.verdict == "FAILED":
            failed.append(finding)
    for finding in failed:
        say("")
        say(in_words(finding))
    say("")
    say("every property holds" if not failed else f"{len(failed)} failed: {', '.join(f.about.name for f in failed)}")
    return not failed
