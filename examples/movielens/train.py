"""Trains the built-in HSTU as it ranks: a candidate is a token behind a history, and the head scores it.

    python -m examples.movielens.train --data FILE --out FOLDER [--epochs N] [--seed N] [--resume]

All candidates share what they ask of the history, so every position is trained on the whole catalogue (catalogue.py).
In the last `--ranking-epochs`, none by default, they ask for themselves, too (the ranking loss of losses.py). The
served model has the same weights and makes the same scores at every step of both.

Writes a checkpoint for `model.checkpoint`, items.json (the file's own item ids), a model card, and what resumes a run.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from examples.movielens import catalogue, forward
from examples.movielens.card import write_card
from examples.movielens.data import DataError, Histories, History, Ints, exit_code, read_histories
from examples.movielens.evaluate import VALIDATION, Quality, evaluate, ndcg, paired_gain, popularity_ranks, quality
from examples.movielens.losses import losses
from examples.movielens.recipe import QUICK, Recipe, new_model
from examples.movielens.training import PROGRESS_FILE, Training, epoch_line, grouped
from relaygr_stream.models.embeddings import gap_buckets
from relaygr_stream.models.hstu_model import HSTUModel
from relaygr_stream.models.loading import load_checkpoint

#: Last behaviours that training never sees: validation's item and the test's.
HELD_OUT: Final = 2


# Batches: one window per user and epoch, windows of about the same length together.


def batches(
    users: list[History], recipe: Recipe, draw: np.random.Generator, *, long: bool = False
) -> Iterator[forward.Batch]:
    """One epoch's windows in random order, padded at their end. long: whether it is one of the `long_epochs`."""
    share = 1.0 if long else recipe.long_share
    windows = [_window(user, recipe, share, draw) for user in users]
    for group in grouped([len(window) for window in windows], recipe.batch_tokens, draw):
        yield padded([windows[index] for index in group])


def _window(user: History, recipe: Recipe, long_share: float, draw: np.random.Generator) -> History:
    """Half of the windows end at the newest behaviour that training may see, the others anywhere."""
    count = len(user) - HELD_OUT
    length = min(count, recipe.longest if draw.random() < long_share else recipe.window)
    stop = count if draw.random() < 0.5 else int(draw.integers(length, count + 1))
    return user.slice(stop - length, stop)


def padded(windows: list[History]) -> forward.Batch:
    """The windows as one batch; padding is item 0, which no row sees."""
    rows = np.zeros((4, len(windows), max(map(len, windows))), np.int64)
    for index, window in enumerate(windows):
        rows[:, index, : len(window)] = window.items, window.actions, gap_buckets(window.gaps()), window.times
    items, actions, gaps, times = torch.from_numpy(rows)
    return forward.Batch(items, actions, gaps, times, torch.tensor([len(window) for window in windows]))


# The run.


class Run(Training[HSTUModel, forward.Batch]):
    """Next items by the built-in HSTU.

    Another task overrides `untrained`, `losses`, `hold`, `quality`, `against_popularity` and `write_card`.
    """

    def untrained(self) -> HSTUModel:
        """The model before its first step. What does not require a gradient stays as it is."""
        model = new_model(self.recipe, len(self.data.names), self.data.has_times, self.data.actions)
        catalogue.restrict(model)
        return model

    def batches(self, draw: np.random.Generator) -> Iterator[forward.Batch]:
        """One window of each user. A single behaviour has nothing before it to be ranked by."""
        long = self.progress.epoch >= self.recipe.epochs - self.recipe.long_epochs
        made = batches(self.data.users, self.recipe, draw, long=long)
        return (batch for batch in made if batch.items.shape[1] > 1)

    def losses(self, batch: forward.Batch) -> dict[str, Tensor]:
        """The losses that are minimised together, by name; in nats."""
        ranking = self.progress.epoch >= self.recipe.epochs - self.recipe.ranking_epochs
        return losses(self.model, batch, self.recipe, ranking=ranking)

    def hold(self, model: HSTUModel) -> None:
        """Set the weights again that a step, or an average, must not change."""
        catalogue.hold(model)

    def quality(self, model: HSTUModel) -> Quality:
        """Validation: the quality by which the best epoch is chosen."""
        return quality(self._ranks(model))

    def _users(self) -> list[History]:
        """The users of validation."""
        order = np.random.default_rng(self.recipe.seed).permutation(len(self.data.users))
        return [self.data.users[index] for index in order[: self.recipe.validation_users]]

    def _ranks(self, model: HSTUModel) -> Ints:
        return evaluate(model, self._users(), len(self.data.names), self.recipe.longest, VALIDATION)

    def against_popularity(self) -> str:
        """The best epoch beside ranking by popularity, same users; and what to do where it is not clearly better."""
        if not self.progress.best_epoch:
            return ""
        ours = self._ranks(load_checkpoint(self.folder))
        theirs = popularity_ranks(self.data, self._users(), VALIDATION)
        gain = paired_gain(ndcg(ours), ndcg(theirs))
        text = (
            f"validation, {len(ours):,} users: epoch {self.progress.best_epoch} {quality(ours)}; "
            f"popularity {quality(theirs)}; difference in NDCG@10 {gain}"
        )
        if gain.low > 0:
            return text
        return (
            f"{text}\n--epochs {self.recipe.epochs} was too short for {len(self.data.names):,} items and "
            f"{self.data.interactions:,} behaviours: the model is not clearly better than popularity, so its rankings "
            f"show nothing; train for more epochs, into another --out"
        )

    def write_card(self) -> None:
        """Write the model card of the best epoch's checkpoint."""
        at = self.progress
        write_card(self.folder, self.data, self.recipe, at.best_epoch, at.best, at.seconds)


def parse(parser: argparse.ArgumentParser, arguments: list[str] | None) -> tuple[argparse.Namespace, Recipe]:
    """The parser's own options, --data, --out, --threads and --quick; and the recipe, each field an option."""
    parser.add_argument("--data", type=Path, required=True, help="ratings.dat, u.data, `user item` lines, or a CSV")
    parser.add_argument("--out", type=Path, help="folder of the run (default: out/movielens, or out/movielens-quick)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads (default: all)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a run of minutes on 100,000 ratings: fewer epochs, too few for large catalogues",
    )
    for name, value in asdict(Recipe()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), help=f"(default: {value})")
    options = parser.parse_args(arguments)
    options.out = options.out or Path("out/movielens-quick" if options.quick else "out/movielens")
    named = {name: getattr(options, name) for name in asdict(Recipe()) if getattr(options, name) is not None}
    return options, Recipe(**((QUICK if options.quick else {}) | named))


def train(data: Histories, recipe: Recipe, folder: Path, *, resume: bool, task: type[Run] = Run) -> Run:
    """Train or resume, printing a line per epoch; writes the model card at the end. Raises DataError."""
    run = task(data, recipe, folder)
    if resume:
        run.resume()
    elif (folder / PROGRESS_FILE).exists():
        raise DataError(f"{folder} has a run already: go on with --resume, or name another --out")
    folder.mkdir(parents=True, exist_ok=True)
    weights = sum(value.numel() for value in run.model.parameters())
    times = "with" if data.has_times else "without"
    print(
        f"{len(data.users)} users, {len(data.names)} items, {data.interactions} behaviours {times} times; "
        f"{weights:,} weights"
    )
    for epoch in run.epochs():
        print(epoch_line(epoch, recipe.epochs), flush=True)
    run.write_card()
    if told := run.against_popularity():
        print(told)
    return run


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser("train", description="Train the built-in HSTU as it ranks.")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    options, recipe = parse(parser, arguments)
    torch.set_num_threads(options.threads)

    def work() -> int:
        run = train(read_histories(options.data), recipe, options.out, resume=options.resume)
        best, epoch = run.progress.best, run.progress.best_epoch
        print(f"checkpoint: {options.out}, epoch {epoch} (validation NDCG@10 {best:.4f})")
        return 0

    return exit_code(work, "stopped; --resume goes on")


if __name__ == "__main__":
    sys.exit(main())
