"""The model card: what the checkpoint is, what it was trained on, and what it is not for."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from examples.movielens.data import Histories

if TYPE_CHECKING:
    from examples.movielens.recipe import Recipe

CARD_FILE: Final = "README.md"

CARD: Final = """\
# HSTU, next item

The built-in HSTU of RelayGR Stream, trained by `examples/movielens/train.py` as it ranks: a candidate is a token behind
the history. One score column, `next`: a logit, higher is likelier. Scores compare candidates of one request only.

| | |
| --- | --- |
| trained on | {users:,} users, {items:,} items, {interactions:,} behaviours, {times} |
| held out | each user's last behaviour (test) and the one before it (validation) |
| chosen | epoch {epoch} of {epochs}, by validation NDCG@10 = {best:.4f} on {validation:,} users |
| trained for | {minutes:.1f} minutes, seed {seed} |
| longest history | {longest:,} behaviours; later positions share a row that no training reached |

Item ids are rows of the file's items: `items.json` lists the file's own ids in this order. Actions are rows, too:
`actions` in `config.json` lists what the file calls them, `""` where it has none. Where the file has no times, send
equal times: a gap then is the 0 that training saw.

Not for: items that the file does not have; users whose histories are unlike the file's; any conclusion about people.
The data's licence decides whether the weights may be passed on.

Recipe: {recipe}.
"""


def write_card(folder: Path, data: Histories, recipe: Recipe, epoch: int, best: float, seconds: float) -> None:
    """Write the card of the checkpoint in `folder`, chosen at `epoch` with validation NDCG@10 `best`."""
    fields = asdict(recipe)
    text = CARD.format(
        users=len(data.users), items=len(data.names), interactions=data.interactions,
        times="with times" if data.has_times else "without times", epoch=epoch, epochs=recipe.epochs, best=best,
        validation=min(recipe.validation_users, len(data.users)), minutes=seconds / 60, seed=recipe.seed,
        longest=recipe.longest, recipe=", ".join(f"{name} {value:g}" for name, value in fields.items()),
    )  # fmt: skip
    (folder / CARD_FILE).write_text(text, encoding="utf-8")
