"""Trains the model that `relaygr demo` ranks with, on users of the project's own generator.

    python -m examples.demo.train [--out FOLDER] [--run FOLDER] [--threads 1] [--resume]

It is the training of examples/movielens with three differences. Each is for the time of one thread:

- Item rows are no weights. An item's row is a random projection of how much more often than by chance each other item
  comes next to it (Johnson and Lindenstrauss 1984), so items of one series are alike and others nearly orthogonal. A
  table that starts at random learns the same from many times as many behaviours.
- Keys start as the queries do, less a threshold, and values with a common part: attention starts as the similarity of
  items, and a sum over the history as a count of those like the candidate. From independent matrices the loss does not
  move for the first thousand steps.
- The loss is the softmax over the next item and items drawn by popularity, as most of a request's candidates are.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from examples.demo.requests import fresh_requests, histories, offline_quality
from examples.movielens import forward
from examples.movielens.data import DataError, Histories
from examples.movielens.evaluate import Quality
from examples.movielens.recipe import TABLE_STD, Recipe, new_model
from examples.movielens.train import Run, train
from relaygr_stream.errors import RelayError
from relaygr_stream.models.hstu_model import HSTUModel
from relaygr_stream.models.loading import load_checkpoint, save_checkpoint
from relaygr_stream.settings.files import packaged_dir
from relaygr_stream.settings.load import load_settings
from relaygr_stream.workload.items import WorkItem
from relaygr_stream.workload.packaged import ITEM_EXPONENT
from relaygr_stream.workload.tastes import Tastes

ITEMS: Final = 4000
USERS: Final = 2000
#: Users whose histories make the item rows; about 1,600 pairs an item.
ROW_USERS: Final = 8000
SEED: Final = 1
#: Seeds of validation and test: traffic of the demo has others, so none of them is what it measures.
VALIDATION_SEED: Final = 1_000_001
TEST_SEED: Final = 1_000_002
VALIDATION_REQUESTS: Final = 300
TEST_REQUESTS: Final = 600
NEWEST: Final = (200, 50, 20)
#: Initial queries and keys beside independent ones: similar items then stand out of hundreds of others.
QUERY_SCALE: Final = 1.5
#: What the biases of queries and keys take off each initial q·k / √dqk. Unlike items have about 0 ± 2.5, like items 16:
#: only the latter are left, so a sum over hundreds is not drowned by the unlike ones.
THRESHOLD: Final = 6.0

RECIPE: Final = Recipe(
    layers=4, dim=128, heads=2, relative_positions=0, relative_times=0, longest=2048, window=200,
    long_share=0.4, long_epochs=2, positions=32, negatives=9,
    batch_tokens=2048, epochs=4, learning_rate=1e-3, averaging=0.02, dropout=0.0, validate_every=1, seed=SEED,
)  # fmt: skip


class DemoRun(Run):
    """The demo's training: item rows from neighbours, similarity at the start, negatives by popularity."""

    def untrained(self) -> HSTUModel:
        """The model before its first step."""
        model = new_model(self.recipe, len(self.data.names))
        with torch.no_grad():
            model.embedding.item.copy_(self._item_rows()).requires_grad_(False)
            for layer in model.stack.stu_layers():
                heads, dv, dqk = layer.shape
                queries, keys = layer.uvqk_weight[:, -2 * heads * dqk :].chunk(2, 1)
                queries.mul_(QUERY_SCALE)
                keys.copy_(queries)
                layer.uvqk_bias[heads * dv : 2 * heads * dv].normal_()
                bias = layer.uvqk_bias[-2 * heads * dqk :].view(2, heads, dqk)
                bias[0, :, 0] = math.sqrt(THRESHOLD * math.sqrt(dqk))
                bias[1, :, 0] = -bias[0, :, 0]
        return model

    def losses(self, batch: forward.Batch) -> dict[str, Tensor]:
        """The softmax over the next item and sampled ones, at some positions of each window."""
        kv = forward.behaviours(self.model, batch, self.recipe.dropout)
        drawn = torch.rand(len(batch.items), self.recipe.positions) * (batch.lengths[:, None] - 1)
        positions = drawn.long() + 1  # the first behaviour has no history
        targets = batch.items.gather(1, positions)[..., None]
        popularity = torch.from_numpy(Tastes(len(self.data.names), ITEM_EXPONENT).popularity)
        others = popularity.multinomial(targets.numel() * self.recipe.negatives, replacement=True)
        candidates = torch.cat([targets, others.view(*positions.shape, -1)], -1)
        at = positions[..., None].expand_as(candidates).flatten(1)
        out = forward.rows(self.model, kv, at, candidates.flatten(1), batch.times, self.recipe.dropout)
        scores = forward.logits(self.model, out).view(candidates.shape)
        return {"ranking": -scores.log_softmax(-1)[..., 0].mean()}

    def hold(self, model: HSTUModel) -> None:
        """Nothing: every weight may change."""

    def quality(self, model: HSTUModel) -> Quality:
        """HR@10 and NDCG@10 of fresh requests with their own candidates."""
        found = offline_quality(model, demo_requests(VALIDATION_REQUESTS, VALIDATION_SEED)).served
        assert found is not None
        return Quality(found.hr, found.ndcg)

    def against_popularity(self) -> str:
        """Nothing: the card has popularity on the same requests."""
        return ""

    def write_card(self) -> None:
        """None here: the card is that of the rounded checkpoint (`publish`)."""

    def _item_rows(self) -> Tensor:
        """Rows (items, D): for each pair of items how often they are neighbours / how often by chance, projected."""
        users = demo_histories(ROW_USERS).users
        count = len(self.data.names)
        pairs = np.concatenate([user.items[:-1] * count + user.items[1:] for user in users])
        table = np.bincount(pairs, minlength=count * count).reshape(count, count).astype(np.float32)
        table = table + table.T
        often = table.sum(0)
        lift = table * (often.sum() / np.maximum(np.outer(often, often), 1))
        lift -= lift.mean(0)
        directions = np.random.default_rng(self.recipe.seed).standard_normal((count, self.recipe.dim), np.float32)
        rows = lift @ directions
        rows -= rows.mean(0)
        rows *= TABLE_STD * np.sqrt(self.recipe.dim) / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)
        return torch.from_numpy(rows)


def demo_histories(users: int) -> Histories:
    """The training histories of the first `users` users."""
    return histories(demo_requests(users, SEED), ITEMS)


def demo_requests(count: int, seed: int) -> list[WorkItem]:
    """Requests of the demo's shape, each by another user."""
    return fresh_requests(load_settings(["demo"]).settings, ITEMS, count, seed)


CARD: Final = """\
# The demo's model

The built-in HSTU of RelayGR Stream, trained on its own workload generator (`relaygr_stream/workload/tastes.py`).
`relaygr demo` ranks with it. One score column, `next`: a logit, higher is likelier. Scores compare candidates of one
request only.

    {command}

| | |
| --- | --- |
| trained on | {users:,} generated users, {behaviours:,} behaviours, {items:,} items; rows from {row_users:,} users |
| trained for | epoch {epoch} of {epochs}, {minutes:.0f} minutes of a processor ({processor}); seed {seed} |
| weights | {weights:,}, in bfloat16 but for the head |

Full inference of {requests} requests by users of another seed, in this process, 100 candidates each:

| behaviours known | HR@10 | NDCG@10 |
| --- | --- | --- |
{table}

A longer history shows more of the user's interests, so more of the next items are in the first ten. NDCG@10 is best
with the newest 200: among more behaviours, the model puts the items of the present session less surely first.

Not for: anything but generated users with these item ids and `item_exponent` = {exponent}; of real ones it knows
nothing.

Recipe: {recipe}.
"""


def publish(run: Run, folder: Path, command: str) -> None:
    """Write the best epoch's model to `folder` in bfloat16, and a card with the quality of what is written."""
    save_checkpoint(load_checkpoint(run.folder).place(torch.device("cpu"), torch.bfloat16), folder)
    model = load_checkpoint(folder)
    requests = demo_requests(TEST_REQUESTS, TEST_SEED)
    meters = {known: offline_quality(model, requests, known) for known in (None, *NEWEST)}
    qualities = {"all" if known is None else f"the newest {known}": one.served for known, one in meters.items()}
    qualities |= {"all, by popularity": meters[None].popularity, "none, by chance": meters[None].chance}
    rows = [f"| {name} | {found.hr:.3f} | {found.ndcg:.3f} |" for name, found in qualities.items() if found]
    fields = asdict(run.recipe)
    text = CARD.format(
        command=command, users=len(run.data.users), behaviours=run.data.interactions, items=ITEMS,
        row_users=ROW_USERS, epoch=run.progress.best_epoch, epochs=run.recipe.epochs,
        minutes=run.progress.processor_seconds / 60, processor=_processor(), seed=SEED,
        weights=sum(value.numel() for value in model.parameters()), requests=TEST_REQUESTS, table="\n".join(rows),
        exponent=ITEM_EXPONENT,
        recipe=", ".join(f"{name} {value:g}" for name, value in fields.items()),
    )  # fmt: skip
    (folder / "README.md").write_text(text, encoding="utf-8")
    print(text)


def _processor() -> str:
    """The processor's name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser("train", description="Train the checkpoint of `relaygr demo`.")
    parser.add_argument(
        "--out", type=Path, default=packaged_dir("checkpoints") / "demo", help="the checkpoint's folder"
    )
    parser.add_argument("--run", type=Path, default=Path("out/demo-training"), help="folder of the run")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --run")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    try:
        run = train(demo_histories(USERS), RECIPE, options.run, resume=options.resume, task=DemoRun)
        publish(run, options.out, "python -m examples.demo.train")
    except (DataError, RelayError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
