"""The service: `uvicorn examples.service.app:app`. Settings of the relay come from the environment (RELAYGR_…).

    POST /users/{user}/behaviours   {"item": 17, "action": 1}      what the user did just now
    GET  /users/{user}/recommendations?count=10                     retrieved, then ranked over the relay

Each recommendation announces the user's history as retrieval starts, so that a worker infers it meanwhile, and ranks
what retrieval found. Where the relay does not answer in time, the order is retrieval's own, and the answer says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import numpy as np
from fastapi import FastAPI, HTTPException, Path, Query
from pydantic import BaseModel, Field

from examples.service.store import Behaviour, Catalogue, Histories
from relaygr_stream import RelayClient, RelayError

#: How many candidates retrieval looks for, and how long a ranking may take.
CANDIDATES = 100
RANK_S = 0.5
#: The newest behaviours are the suffix: they change with each request, the long prefix does not.
SUFFIX = 8

User = Annotated[str, Path(min_length=1, max_length=256)]


class Did(BaseModel):
    """A behaviour as it is posted."""

    item: int = Field(ge=0, le=2**63 - 1, strict=True)
    action: int = Field(default=1, ge=0, le=255)


class Recommendations(BaseModel):
    """Item ids, best first."""

    items: list[int]
    ranked_by: str  # "relay", or "retrieval": the relay did not answer in time
    prefix: str = ""  # where the worker found the history: hbm, joined, full, …
    detail: str = ""  # why it is retrieval's order


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """One relay client for the whole service."""
    async with RelayClient() as relay:
        app.state.relay, app.state.histories, app.state.catalogue = relay, Histories(), Catalogue()
        yield


app = FastAPI(title="Recommendations over RelayGR Stream", lifespan=lifespan)


@app.post("/users/{user}/behaviours", status_code=204)
async def behave(user: User, did: Did) -> None:
    """Note what a user did."""
    history: list[Behaviour] = app.state.histories.of(user)
    if history:
        app.state.catalogue.follows(history[-1].item, did.item)
    app.state.histories.add(user, did.item, did.action)


@app.get("/users/{user}/recommendations")
async def recommend(user: User, count: Annotated[int, Query(ge=1, le=CANDIDATES)] = 10) -> Recommendations:
    """Retrieve and rank."""
    relay: RelayClient = app.state.relay
    catalogue: Catalogue = app.state.catalogue
    history: list[Behaviour] = app.state.histories.of(user)
    if not history:
        raise HTTPException(404, f"user {user} has done nothing yet: POST /users/{user}/behaviours first")
    rows = np.array([(each.item, each.action, each.at_ms) for each in history], np.int64).T
    long, recent = rows[:, :-SUFFIX], rows[:, -SUFFIX:]
    candidates: list[int] = []
    try:
        async with relay.request(user, tuple(long), candidates=CANDIDATES) as request:  # a worker starts on the history
            candidates = await asyncio.to_thread(catalogue.retrieve, history, CANDIDATES)
            if not candidates:  # nothing to rank: leaving cancels the request
                return Recommendations(items=[], ranked_by="retrieval", detail="nothing goes with this history yet")
            ranking = await request.rank(candidates, suffix=tuple(recent), timeout=RANK_S)
    except RelayError as error:  # never an error for the visitor
        return Recommendations(items=candidates[:count], ranked_by="retrieval", detail=str(error))
    best = ranking.top(count, task=ranking.tasks[0])
    return Recommendations(items=best.tolist(), ranked_by="relay", prefix=ranking.outcome)
