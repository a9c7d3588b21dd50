"""A client that knows nothing but docs/reference/protocol.md: the example printed there, run as it stands."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from relaygr_stream.settings.schema import Kafka
from tests.e2e.fleet import serving_fleet

PROTOCOL = Path(__file__).parents[2] / "docs" / "reference" / "protocol.md"
SCORES = r"\['click', 'like'\] \((-?[\d.e-]+, ){5}-?[\d.e-]+\)"
ANSWERED = re.compile(f"ok (hbm|joined|full) {SCORES}")
RELAYED = re.compile(f"ok (hbm|joined) {SCORES}")
TRIES = 8


def example() -> str:
    """The program in the document."""
    blocks = re.findall(r"```python\n(.*?)```", PROTOCOL.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 1
    return str(blocks[0])


def test_the_example_uses_nothing_of_this_package() -> None:
    assert "import relaygr" not in example()
    assert "from relaygr" not in example()


@pytest.mark.timeout(120)
async def test_the_printed_example_gets_its_scores(kafka_settings: Kafka, tmp_path: Path) -> None:
    program = example()
    for said, here in (("localhost:9092", kafka_settings.bootstrap), ('"relaygr.', f'"{kafka_settings.prefix}')):
        assert said in program
        program = program.replace(said, here)
    answers: list[str] = []
    async with serving_fleet(kafka_settings, tmp_path, "w1"):
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
