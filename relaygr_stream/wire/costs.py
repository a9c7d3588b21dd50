"""What a request will cost: device time of full inference and of the prefix alone, and the bytes of its prefix KV.

Arithmetic on the numbers that the lane's owner states. Knows nothing of budgets.
"""

from __future__ import annotations

from typing import Final

from relaygr_stream.wire.messages import CostModel, WorkerStatus

#: Costs taken for a worker that has measured nothing yet (all its coefficients are zero) or whose fit went wrong: the
#: built-in HSTU (4 layers, D = 128, H·dqk = H·dv = 128) at 50 GFLOP/s, a slow CPU core. Projections: 0.9 MFLOP a token
#: or candidate; attention among n tokens: 1,024·n² FLOP; of m candidates to n tokens: 2,048·n·m. It overestimates any
#: accelerator: rather a pre-inference too many, which the load bound limits, than a missed SLO.
FALLBACK_COSTS: Final = CostModel(c0=1.0, c1=0.02, c2=2e-5, c3=4e-5, c4=0.02)


#: No coefficient is larger: an hour a token, or a token squared, is no measurement. It keeps sums of products with
#: token counts far from where a float overflows to infinity, whose product with 0 is NaN, which passes any bound.
MAX_COEFFICIENT: Final = 3.6e6


def usable_costs(costs: CostModel) -> CostModel:
    """The stated costs if they can be reckoned with, else FALLBACK_COSTS."""
    coefficients = (costs.c0, costs.c1, costs.c2, costs.c3, costs.c4)
    for coefficient in coefficients:
        if not 0 <= coefficient <= MAX_COEFFICIENT:
            return FALLBACK_COSTS
    return costs if any(coefficients) else FALLBACK_COSTS


def charge_ms(costs: CostModel, tokens: int, owner: WorkerStatus) -> float:
    """Device time that a pre-inference is expected to take: most of it is spared where the prefix may be cached."""
    return costs.pre_infer_ms(tokens) * owner.computed_share


def prefix_bytes(tokens: int, owner: WorkerStatus) -> int:
    """HBM that the prefix KV of so many tokens holds on that worker: whole allocation units."""
    return -(-tokens * owner.bytes_per_token // owner.alloc_bytes) * owner.alloc_bytes
