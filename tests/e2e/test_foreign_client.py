"""A client that knows nothing but docs/reference/protocol.md: the example on that page, run as it stands."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relaygr_stream.client import RelayClient
from relaygr_stream.errors import Rejected
from relaygr_stream.models.api import relative_deviation
from relaygr_stream.models.hstu_model import HSTUConfig
from relaygr_stream.models.loading import random_model, save_checkpoint
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.settings.worker import Model
from relaygr_stream.wire.behaviours import Behaviours, pack_items
from relaygr_stream.wire.features import FeatureColumn, FeatureSchema, FeatureTables
from relaygr_stream.wire.messages import RankingRequest
from tests.e2e.fleet import serving_fleet
from tests.waiting import until

ROOT = Path(__file__).parents[2]
PROTOCOL = ROOT / "docs" / "reference" / "protocol.md"
PROGRAM = ROOT / "examples" / "clients" / "python" / "client.py"
SCORES = r"\['click', 'like'\] \((-?[\d.e-]+, ){5}-?[\d.e-]+\)"
ANSWERED = re.compile(f"ok (hbm|joined|full) {SCORES}")
RELAYED = re.compile(f"ok (hbm|joined) {SCORES}")
TRIES = 8
#: What the document says of its example with features.
COLUMNS = (
    FeatureColumn(name="age", of="user", dtype="int32", rows=100),
    FeatureColumn(name="dwell_s", of="behaviour", dtype="float32"),
    FeatureColumn(name="price", of="candidate", dtype="float32"),
)
#: The line of the program before which the map is whole, in the document's order.
WHOLE = {
    "prefix": "request_id, user",
    "event": 'producer.produce("relaygr.retrieval"',
    "request": "producer.produce(\n",
}


def examples() -> tuple[str, str]:
    """The program that docs/generate.py puts into the document, and the lines there that add features to it."""
    (features,) = re.findall(r"```python\n(.*?)```", PROTOCOL.read_text(encoding="utf-8"), re.DOTALL)
    return PROGRAM.read_text(encoding="utf-8"), features


def with_features() -> str:
    """The program with those lines, each behind the map that it extends."""
    program, features = examples()
    lines = features.splitlines()
    assert [line.partition("[")[0] for line in lines] == list(WHOLE)
    for line, before in zip(lines, WHOLE.values(), strict=True):
        assert program.count(f"\n{before}") == 1
        program = program.replace(f"\n{before}", f"\n{line}\n{before}")
    return program


async def check_relayed(program: str, kafka: Kafka) -> None:
    """Run the program against the relay until an answer came from prefix KV; every answer has its scores."""
    for said, here in (("localhost:9092", kafka.bootstrap), ('"relaygr.', f'"{kafka.prefix}')):
        assert said in program
        program = program.replace(said, here)
    answers: list[str] = []
    # On a busy machine the trigger may need longer than the example waits: then the answer is right, but `full`.
    while len(answers) < TRIES and not any(RELAYED.match(answer) for answer in answers):
        # A new user each time: the prefix KV of a known one may still be there.
        new_user = program.replace("user-17", f"user-{len(answers)}")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", new_user, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await process.communicate()
        assert process.returncode == 0, err.decode()
        answers.append(out.decode())
    assert all(ANSWERED.match(answer) for answer in answers), answers
    assert RELAYED.match(answers[-1]), answers


def test_the_example_uses_nothing_of_this_package() -> None:
    assert "import relaygr" not in with_features()
    assert "from relaygr" not in with_features()


async def test_the_printed_example_gets_its_scores(kafka_settings: Kafka, tmp_path: Path) -> None:
    async with serving_fleet(kafka_settings, tmp_path, "w1"):
        await check_relayed(examples()[0], kafka_settings)


async def test_with_features_it_gets_them_from_a_model_that_reads_them(kafka_settings: Kafka, tmp_path: Path) -> None:
    """And a feature that changed after the announcement is a miss with the scores of full inference."""
    shape = {"layers": 2, "dim": 64, "heads": 2, "dqk": 16, "dv": 16, "vocab": 500, "scale_tokens": 512}
    config = HSTUConfig(**shape, max_positions=600, tasks=("click", "like"), features=COLUMNS)  # type: ignore[arg-type]
    save_checkpoint(random_model(config, 1), tmp_path / "checkpoint")
    async with serving_fleet(
        kafka_settings, tmp_path, "w1", model=Model(checkpoint=str(tmp_path / "checkpoint"))
    ) as fleet:
        await check_relayed(with_features(), kafka_settings)
        schema = FeatureSchema.read(tmp_path / "checkpoint" / "config.json")
        async with RelayClient(settings=fleet.settings, features=schema) as relay:
            history = [1, 2, 3] * 20, [1] * 60, range(60)
            features: dict[str, Any] = {"age": 30, "dwell_s": [0.5] * 60}
            await until(lambda: fleet.pinned() == 0, "nothing pinned for the example any more")
            async with relay.request("user", history, candidates=2, features=features) as announced:
                await fleet.announced(announced.request_id)
                ranking = await announced.rank([7, 8], features={"price": [1.0, 2.0]}, timeout=20)
                assert ranking.outcome in ("hbm", "joined")
            rows = schema.pack(
                {**features, "age": 31, "price": [1.0, 2.0]}, {"user": 1, "behaviour": 60, "candidate": 2}
            )
            changed = RankingRequest(
                request_id="changed",
                user_id="user",
                prefix=msgspec.structs.replace(Behaviours.from_arrays(*history), columns=rows["behaviour"]),
                candidates=pack_items([7, 8]),
                columns=FeatureTables(user=rows["user"], candidate=rows["candidate"]),
            )
            missed = await relay.rank(changed, timeout=20)
            full = await relay.rank(msgspec.structs.replace(changed, request_id="full", mode="full"), timeout=20)
            assert missed.outcome == full.outcome == "full"
            assert relative_deviation(missed.scores, full.scores) <= 1e-5
            assert relative_deviation(missed.scores, ranking.scores) > 1e-3
        async with RelayClient(settings=fleet.settings) as relay:
            with pytest.raises(Rejected, match=r"column 'age' \(user, int32, width 1\) is missing"):
                await relay.rank(msgspec.structs.replace(changed, columns=msgspec.UNSET), timeout=20)
