"""DLRMv3's model with random weights, whole or reduced, and how much work a request is by its formulas."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from relaygr_lab.dlrmv3.workload import CATEGORIES, Visit
from relaygr_lab.simulate.costs import DeviceCosts
from relaygr_stream.errors import ConfigError
from relaygr_stream.models.dlrm.config import DlrmConfig
from relaygr_stream.models.dlrm.model import DlrmHSTU
from relaygr_stream.models.loading import draw_weights, save_checkpoint

LAYERS: Final = 5
DIM: Final = 512
HEADS: Final = 4
#: Rows of the item table, for 10⁹ ids: an id has row id mod rows. The table takes no part in how long layers take.
ITEM_ROWS: Final = 100_000
ACTIONS: Final = (1, 2, 4, 8, 16)
ACTION_DIM: Final = 8
#: N of the attention's scale: the published longest sequence.
SCALE_TOKENS: Final = 16_384


@dataclass(frozen=True)
class Shape:
    """The model's shape; all widths follow from dim as in the published model. Raises ConfigError."""

    layers: int = LAYERS
    dim: int = DIM

    def __post_init__(self) -> None:
        if self.dim % (2 * HEADS):
            raise ConfigError(f"dim = {self.dim}: must be a multiple of {2 * HEADS}, the heads' and halves' widths")

    def config(self, users: int) -> DlrmConfig:
        """Prefix KV stay valid for the user's later requests: N is a constant, positions count from the start."""
        each, half = self.dim // HEADS, self.dim // 2
        return DlrmConfig(
            layers=self.layers, dim=self.dim, heads=HEADS, dqk=each, dv=each, scale_tokens=SCALE_TOKENS,
            table_dim=self.dim, items=ITEM_ROWS, categories=CATEGORIES, users=users, action_weights=ACTIONS,
            action_dim=ACTION_DIM, hidden=half, item_hidden=self.dim, head_hidden=self.dim, position_rows=8192,
            time_rows=2049, time_last_row=2048, times="constant", positions="start", min_tokens=0, tasks=("rating",),
        )  # fmt: skip

    def save(self, users: int, seed: int, folder: Path) -> Path:
        """Write such a model with random weights to a folder for `model.checkpoint`, and return it."""
        model = DlrmHSTU(self.config(users))
        save_checkpoint(model.load_weights(draw_weights(model.state_dict(), seed), ""), folder)
        return folder

    def scale(self, costs: DeviceCosts) -> DeviceCosts:
        """The costs of a device for this model, by arithmetic from those for the model of the cost file."""
        return costs.scaled(self.layers / costs.kv.layers, self.dim / (costs.kv.heads * costs.kv.dqk))

    def flop(self, visit: Visit, candidates: int, *, reused: bool) -> float:
        """Floating-point operations of a request; reused: prefix KV of the user's last one are extended.

        Pairs that attend to each other, projections of the layers, MLPs of tokens and head; no norms, no tables.
        """
        width, half, actions = self.dim, self.dim // 2, len(ACTIONS) * ACTION_DIM
        new = visit.new if reused else visit.length
        pairs = new * (visit.length - new) + new * new / 2 + candidates * visit.length
        rows = new + candidates
        layer = pairs * 2 * width + rows * (width * 4 * width + 3 * width * width)
        tokens = rows * (4 * width * half + actions * half + half * width)
        head = candidates * (2 * width * width + width * width + width * width + width * width)
        return 2.0 * (self.layers * layer + tokens + head)
