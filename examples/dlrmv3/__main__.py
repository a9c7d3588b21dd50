"""Does a longer history predict ratings better on DLRMv3's generated traffic? Trains the built-in HSTU on it and says.

    python -m examples.dlrmv3 [--users N] [--epochs N] [--seed N] [--quick]

The traffic is `relaygr_lab.dlrmv3.workload`, a tenth of the behaviours and a catalogue of 12,800 items. The task is
DLRMv3's: is a candidate's rating 3.5 or more? Training asks it of every behaviour of random windows, from what stands
before it. The test asks it of the candidates of each user's last request, behind the newest 10, 25, … behaviours, and
prints AUC, normalised entropy (cross entropy over that of the mean rate) and NDCG@10 (a liked one gains 1), beside what
one would reach who knows the user's taste and the items' ratings.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from relaygr_lab.dlrmv3.workload import Drawn, Visit, Workload, chance_of
from torch import Tensor
from torch.nn import functional

from examples.dlrmv3.measures import LIKED, auc, entropies, ndcg
from examples.movielens import forward
from examples.movielens.evaluate import Floats, paired_gain
from examples.movielens.recipe import Recipe, new_model
from examples.movielens.training import schedule
from relaygr_stream.models.hstu_model import HSTUModel

LENGTHS: Final = (10, 25, 50, 100, 200, 400, 800)
#: The length that others are compared with.
SHORT: Final = 50
SHORTEST_WINDOW: Final = 8
CANDIDATES: Final = 64
#: Behaviours of a window that training asks about.
ASKED: Final = 256


class User(NamedTuple):
    """A user's last request: what is known, what is asked."""

    visit: Visit
    history: Drawn
    candidates: Drawn


class Figures(NamedTuple):
    """Of all users' candidates: AUC and normalised entropy; of each user, (users,): NDCG@10 and normalised entropy."""

    auc: float
    ndcg: Floats
    entropies: Floats

    @property
    def entropy(self) -> float:
        """Cross entropy over the entropy of the mean rate: 1 for who knows only that."""
        return float(self.entropies.mean())


@dataclass(frozen=True)
class Options:
    """A run: epochs of one window a user."""

    users: int
    epochs: int
    seed: int

    def workload(self) -> Workload:
        """Reduced: see the top."""
        return Workload(users=self.users, candidates=CANDIDATES, scale=0.1, seed=self.seed, items=12_800)

    def recipe(self) -> Recipe:
        """Two layers of width 64."""
        return Recipe(layers=2, longest=max(LENGTHS), relative_positions=max(LENGTHS), seed=self.seed)


def users_of(workload: Workload) -> list[User]:
    """Each user with the last request, in the order of users."""
    last = {visit.user: visit for visit in workload.requests[1]}
    return [User(visit, *workload.drawn(visit)) for _, visit in sorted(last.items())]


def batch_of(histories: list[Drawn]) -> forward.Batch:
    """Histories padded at their end. A behaviour's action is its rating, rounded down."""
    rows = torch.zeros((2, len(histories), max(len(one.items) for one in histories)), dtype=torch.int64)
    for index, one in enumerate(histories):
        rows[0, index, : len(one.items)] = torch.from_numpy(one.items)
        rows[1, index, : len(one.items)] = torch.from_numpy(one.ratings.astype(np.int64))
    nothing = torch.zeros_like(rows[0])
    return forward.Batch(rows[0], rows[1], nothing, nothing, torch.tensor([len(one.items) for one in histories]))


def newest(drawn: Drawn, length: int, end: int | None = None) -> Drawn:
    """The last `length` before `end`."""
    stop = len(drawn.items) if end is None else end
    kept = slice(max(0, stop - length), stop)
    return Drawn(drawn.levels[kept], drawn.categories[kept], drawn.items[kept], drawn.ratings[kept])


def windows(users: list[User], draw: np.random.Generator, tokens: int) -> Iterator[list[Drawn]]:
    """One window of each user, as often short as long, those of about the same length together."""
    made = []
    for user in users:
        known = user.visit.length - user.visit.new
        length = int(np.exp(draw.uniform(np.log(SHORTEST_WINDOW), np.log(min(known, max(LENGTHS))))))
        made.append(newest(user.history, length, int(draw.integers(length, known + 1))))
    made.sort(key=lambda one: len(one.items))
    groups: list[list[Drawn]] = [[]]
    for one in made:
        if groups[-1] and (len(groups[-1]) + 1) * len(one.items) > tokens:
            groups.append([])
        groups[-1].append(one)
    for index in draw.permutation(len(groups)):
        yield groups[index]


def loss_of(model: HSTUModel, group: list[Drawn], recipe: Recipe, draw: np.random.Generator) -> Tensor:
    """Cross entropy of the windows' ratings, each from what stands before it."""
    batch = batch_of(group)
    count = batch.items.shape[1]
    at = torch.from_numpy(np.sort(draw.choice(count, min(count, ASKED), replace=False)))[None]
    kv = forward.behaviours(model, batch, recipe.dropout)
    out = forward.rows(model, kv, at, batch.items[:, at[0]], batch.times, recipe.dropout)
    liked = torch.zeros((len(group), count))
    for index, one in enumerate(group):
        liked[index, : len(one.items)] = torch.from_numpy(one.ratings >= LIKED)
    real = at < batch.lengths[:, None]
    return functional.binary_cross_entropy_with_logits(forward.logits(model, out)[real], liked[:, at[0]][real])


def train(users: list[User], options: Options) -> HSTUModel:
    """The averaged model after the last epoch; a line for each tenth of them."""
    recipe = options.recipe()
    model = new_model(recipe, options.workload().items)
    model.embedding.action.requires_grad_(True)
    average = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    started = time.monotonic()
    for epoch in range(options.epochs):
        draw = np.random.default_rng([options.seed, epoch])
        losses = []
        groups = list(windows(users, draw, recipe.batch_tokens))
        for index, group in enumerate(groups):
            for parameters in optimizer.param_groups:
                parameters["lr"] = recipe.learning_rate * schedule((epoch + index / len(groups)) / options.epochs)
            loss = loss_of(model, group, recipe, draw)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            with torch.no_grad():
                for name, value in model.named_parameters():
                    average[name].lerp_(value, recipe.averaging)
        if (epoch + 1) % max(1, options.epochs // 10) == 0:
            minutes = (time.monotonic() - started) / 60
            print(f"epoch {epoch + 1}/{options.epochs}  loss {np.mean(losses):.4f}  {minutes:.1f} min", flush=True)
    model.load_state_dict(average)
    return model


@torch.no_grad()
def chances(model: HSTUModel, users: list[User], length: int, at_once: int = 16) -> npt.NDArray[np.float64]:
    """(users, candidates): the model's chance that each candidate is liked, behind the newest `length` behaviours."""
    found = []
    for start in range(0, len(users), at_once):
        group = users[start : start + at_once]
        batch = batch_of([newest(user.history, length) for user in group])
        items = torch.from_numpy(np.stack([user.candidates.items for user in group]))
        positions = batch.lengths[:, None].expand(items.shape)
        out = forward.rows(model, forward.behaviours(model, batch), positions, items, batch.times)
        found.append(torch.sigmoid(forward.logits(model, out)).double().numpy())
    return np.concatenate(found)


def figures(predicted: npt.NDArray[np.float64], users: list[User]) -> Figures:
    """How good predictions (users, candidates) are."""
    ratings = np.stack([user.candidates.ratings for user in users])
    liked = ratings >= LIKED
    return Figures(auc(predicted.ravel(), liked.ravel()), ndcg(predicted, liked), entropies(predicted, liked))


def report(by_length: dict[int, Figures], possible: Figures, users: int) -> Iterator[str]:
    """The table, and in one sentence up to which length more behaviours predict better."""
    yield f"{users:,} users, {CANDIDATES} candidates each"
    yield f"{'newest behaviours':>18}  {'AUC':>6}  {'NE':>6}  {'NDCG@10':>7}  NE less than with {SHORT}, 95 %"
    for length, one in by_length.items():
        beside = "" if length == SHORT else str(paired_gain(by_length[SHORT].entropies, one.entropies))
        yield f"{length:18,}  {one.auc:.4f}  {one.entropy:.4f}  {one.ndcg.mean():7.4f}  {beside}"
    yield f"{'all is known':>18}  {possible.auc:.4f}  {possible.entropy:.4f}  {possible.ndcg.mean():7.4f}"
    enough = enough_of(by_length)
    yield f"more behaviours predict better up to {enough:,}, of {', '.join(f'{length:,}' for length in by_length)}"


def enough_of(by_length: dict[int, Figures]) -> int:
    """The shortest length that no longer one is better than, by the 95 % interval of entropies."""
    lengths = sorted(by_length)
    for index, length in enumerate(lengths):
        gains = (paired_gain(by_length[length].entropies, by_length[each].entropies) for each in lengths[index + 1 :])
        if all(gain.low <= 0 for gain in gains):
            return length
    return lengths[-1]


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser("examples.dlrmv3", description="Does length pay on DLRMv3's traffic?")
    parser.add_argument("--users", type=int, default=1500)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads (default: all)")
    parser.add_argument("--quick", action="store_true", help="300 users, 4 epochs: too few to conclude from")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    options = Options(300, 4, given.seed) if given.quick else Options(given.users, given.epochs, given.seed)
    users = users_of(options.workload())
    model = train(users, options)
    by_length = {length: figures(chances(model, users, length), users) for length in LENGTHS}
    known = np.stack([chance_of(LIKED, user.candidates, user.visit.timestamp) for user in users])
    for line in report(by_length, figures(known, users), len(users)):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
