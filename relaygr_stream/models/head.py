"""The multi-task head: the stack's output of a candidate → one logit per task. float32, whatever the stack runs in."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from relaygr_stream.models.stu import NORM_EPS


class TaskHead(nn.Module):
    """LayerNorm and one linear layer; its weights stay float32."""

    def __init__(self, dim: int, tasks: int) -> None:
        super().__init__()
        self.norm_weight = nn.Parameter(torch.empty(dim), requires_grad=False)
        self.norm_bias = nn.Parameter(torch.empty(dim), requires_grad=False)
        self.weight = nn.Parameter(torch.empty(dim, tasks), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(tasks), requires_grad=False)

    @torch.no_grad()
    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x (m, D) of any floating type → (m, tasks) float32."""
        normed = functional.layer_norm(x.float(), x.shape[-1:], self.norm_weight, self.norm_bias, NORM_EPS)
        return torch.addmm(self.bias, normed, self.weight)
