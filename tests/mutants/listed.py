"""The mutants: a file of the package, text that stands in it once, what to write instead, and who should notice.

Each is a mistake that somebody could make there. One that changes no behaviour does not belong here.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Mutant(NamedTuple):
    """file: below relaygr_stream/. tests: below tests/unit/, without `.py`, separated by blanks."""

    file: str
    text: str
    instead: str
    tests: str


COSTS: Final = "engine/test_costs engine/test_quadratic"
BUDGETS: Final = "engine/test_budgets engine/test_split"
FAMILIES: Final = "engine/test_core_families"
BOUNDS: Final = "trigger/test_bounds"
HISTORY: Final = "history/test_reference"
AWAY: Final = "test_one_broker_away test_replies"
KEPT: Final = "worker/test_histories"
CLIENTS_QUEUE: Final = "engine/test_queue engine/test_clients"

MUTANTS: Final = (
    # worker: what work costs
    Mutant("engine/cost_model.py", "if off > limit:", "if off > 100 * limit:", COSTS),
    Mutant("engine/cost_model.py", "        ratios.clear()\n", "", COSTS),
    Mutant("engine/cost_model.py", "median = sorted(ratios)[LEVEL_SAMPLES // 2]", "median = max(ratios)", COSTS),
    Mutant("engine/cost_model.py", "del used[solved.index(least)]", "del used[0]", COSTS),
    Mutant("engine/cost_model.py", "return tokens - tokens % MIN_CHUNK if", "return tokens if", COSTS),
    Mutant("engine/cost_model.py", "max(self._horizon, position + tokens)", "max(self._horizon, tokens)", COSTS),
    # worker: what triggers may ask for
    Mutant("engine/budgets.py", "while before and now_s - before[0][0] > self._hold_s:", "while before:", BUDGETS),
    Mutant("engine/budgets.py", "return max(self.now, self.before[0][1]) if self.before else", "return", BUDGETS),
    Mutant("engine/budgets.py", "max(self.now, self.before[0][1])", "self.before[0][1]", BUDGETS),
    Mutant("engine/budgets.py", "bound if bound > most else most", "bound", BOUNDS),
    Mutant("engine/budgets.py", "self.before and self.before[-1][1] <= self.now:", "self.before:", BUDGETS),
    Mutant("engine/budgets.py", "budget = min(budget, already + room)", "budget = already + room", BUDGETS),
    Mutant("engine/budgets.py", "                room -= budget - already\n", "", BUDGETS),
    Mutant("engine/budgets.py", "left += total - seen", "left += total", BUDGETS),
    Mutant("engine/budgets.py", "return now if now > before else before", "return now", BUDGETS),
    Mutant("engine/budgets.py", "min(self._cap, 1.0 - self.ranking_share)", "self._cap", BUDGETS),
    # worker: the scheduler and what it steps
    Mutant(
        "engine/scheduler.py", "failed_in_a_row >= GIVE_UP_AFTER:", "failed_in_a_row < 0:", "engine/test_core_failures"
    ),
    Mutant(
        "engine/queue.py", "return min(in_turn, key=lambda head: head[0])[2:]", "return in_turn[-1][2:]", CLIENTS_QUEUE
    ),
    Mutant(
        "engine/rankings.py",
        "if len(batch) > 1:",
        "if len(batch) > 9:",
        "engine/test_core_failures",
    ),
    Mutant("engine/prefill.py", "elif now > job.due:", "elif now < job.due:", "engine/test_core_signals"),
    Mutant("engine/pins.py", "        self._lane_bytes[pin.lane] -= self._freed(pin)\n", "", "engine/test_pins"),
    Mutant("gateway/connections.py", "self._fields_bytes > MAX_HEAD_BYTES", "False", "gateway/test_hostile"),
    Mutant("gateway/app.py", "        self._open[tenant] -= 1\n", "", "gateway/test_hostile"),
    Mutant("engine/signals.py", "self._answered.add(request_key)", "pass", "engine/test_core_signals"),
    Mutant(
        "engine/scheduler.py",
        "        self._end_unwanted(now)\n        self._placement",
        "        self._placement",
        "engine/test_core_signals",
    ),
    Mutant("engine/scheduler.py", "self._end_unwanted(now, cancelled=True)", "pass", "engine/test_core_signals"),
    Mutant("client/relay.py", "        self._pinned = False\n        return", "        return", "test_request"),
    Mutant("engine/executor.py", "            region.length = self.position\n", "", "engine/test_core_failures"),
    Mutant("worker/device.py", "            self.submit(command)\n", "            del command\n", "worker/test_device"),
    Mutant("engine/audit.py", "self.deviating.append(task.user_key)", "pass", "engine/test_audit worker/test_distrust"),
    Mutant("engine/audit.py", "scale = max(scale, float(", "scale = max(0.0, float(", "engine/test_audit"),
    Mutant("engine/audit.py", "    if not half:\n", "    if True:\n", "engine/test_audit"),
    Mutant(
        "engine/audit.py",
        "        else:\n            self._largest",
        "        if True:\n            self._largest",
        "engine/test_audit",
    ),
    Mutant("bus/crashes.py", "        if topic == self._crashes.topic:\n", "        if False:\n", "test_crashes"),
    Mutant(
        "engine/rankings.py", "if task.entry is not None and task.entry.failed:", "if False:", "worker/test_distrust"
    ),
    Mutant("worker/statement.py", "min(total, sys.float_info.max)", "total", "worker/test_distrust"),
    Mutant("history/packed.py", "min(before.tail, before.length - 1)", "before.tail", "history/test_stores"),
    Mutant("worker/requests.py", " or lane == DELEGATED_LANE", "", "worker/test_service_histories"),
    Mutant("trigger/signals.py", "if broker in stuck:", "if False:", "trigger/test_delegated_signals"),
    Mutant("ops/status/overview.py", "            del known[name]", "            pass", "status/test_overview"),
    Mutant(
        "engine/placement.py", "if pinned is not None and self._serves(pinned, task):", "if pinned:", "engine/test_core"
    ),
    Mutant("engine/build.py", "alloc_bytes) - 1) for tokens", "alloc_bytes)) for tokens", "engine/test_build"),
    # a state of one length
    Mutant("cache/entry.py", "(held.shape[1] > wanted.shape[1] and not sliceable)", "False", FAMILIES),
    Mutant("cache/prefix_cache.py", "(entry.computing and not self._sliceable)", "False", FAMILIES),
    Mutant("cache/prefix_cache.py", "not (entry.pins or entry.spill)", "not entry.pins", "cache/test_prefix_cache"),
    # worker: clients among each other
    Mutant("engine/clients.py", "max(account.served_ms, self.floor_ms)", "account.served_ms", "engine/test_clients"),
    Mutant(
        "engine/clients.py",
        "return most if most.of(measure) > task.account.of(measure) + own else None",
        "return most",
        "engine/test_clients",
    ),
    Mutant("engine/clients.py", "        self.nbytes -= task.nbytes\n", "", "engine/test_clients"),
    # worker: forwards
    Mutant("worker/forwarding.py", "if hops >= MOST_HOPS:", "if hops > MOST_HOPS:", "worker/test_forwarding"),
    Mutant(
        "worker/forwarding.py",
        "been = {self._name} if home is None else {self._name, home.worker.name}",
        "been = {self._name}",
        "worker/test_forwarding",
    ),
    Mutant("worker/forwarding.py", "account.spare < LEAST_SPARE:", "account.spare < 0.0:", "worker/test_forwarding"),
    Mutant("worker/forwarding.py", "self._accounts[peer.name].send(cost_ms)", "pass", "worker/test_forwarding"),
    Mutant("worker/forwarding.py", "TRAVEL_MS + peer.queue_ms +", "TRAVEL_MS +", "worker/test_forwarding"),
    Mutant(
        "engine/admission.py",
        "bool(task.hops) and found[1] is Coverage.NONE",
        "bool(task.hops)",
        "engine/test_overload",
    ),
    # trigger: where returning users' prefix KV are
    Mutant(
        "trigger/delegation.py", "kept.is_at(name, owner.worker.incarnation):", "False:", "trigger/test_returning_users"
    ),
    Mutant(
        "trigger/load.py",
        "(self.worker, self.incarnation) == (worker, incarnation)",
        "self.worker == worker",
        "trigger/test_returning_users",
    ),
    Mutant(
        "trigger/delegation.py", "or owned[0].incarnation != kept.incarnation:", ":", "trigger/test_returning_users"
    ),
    Mutant("trigger/delegation.py", "return self._led(lane) and", "return", "trigger/test_delegation"),
    Mutant("trigger/decision.py", "else self._stated.worker.incarnation,", "else 0,", "trigger/test_returning_users"),
    Mutant("trigger/decision.py", "late, within_ms = True, min(", "within_ms = min(", "trigger/test_returning_users"),
    Mutant("trigger/delegation.py", "and kept.delegated and", "and", "trigger/test_returning_users"),
    Mutant("trigger/delegation.py", "> IDLE_SHARE)", "> 0)", "trigger/test_returning_users"),
    Mutant("trigger/delegation.py", "(late or owner", "(owner", "trigger/test_returning_users"),
    Mutant("trigger/load.py", "        self._kept.move_to_end(key)\n", "", "trigger/test_returning_users"),
    Mutant("trigger/load.py", "max(done_s, each.at_s) + each.ms", "done_s + each.ms", "trigger/test_delegation"),
    Mutant("trigger/load.py", "return NEW_SHARE * whole_ms if", "return whole_ms if", "trigger/test_delegation"),
    # worker: delegates
    Mutant(
        "engine/signals.py",
        "self._footprint + delegated:",
        "self._footprint:",
        "worker/test_delegated",
    ),
    Mutant(
        "engine/signals.py",
        "if delegated + self._pins.delegated_more(pinned, self._cache.nbytes(len(task.tokens))) > self._delegated:",
        "if delegated > self._delegated:",
        "worker/test_delegated engine/test_core_machine",
    ),
    Mutant("engine/signals.py", "entry if coverage is Coverage.COVERS else None", "entry", "engine/test_core_machine"),
    Mutant("engine/pins.py", "return held if pins == 1 else 0", "return held", "worker/test_delegated"),
    Mutant(
        "engine/pins.py",
        "max(0, nbytes - self._delegated",
        "max(nbytes, nbytes - self._delegated",
        "worker/test_delegated",
    ),
    Mutant(
        "engine/rankings.py",
        "task.pass_to is not None and not self._placement.is_here(task, found):",
        "False:",
        "worker/test_delegated",
    ),
    Mutant(
        "engine/placement.py",
        "return not entry.computing or self._cache.serves(entry, task.tokens)",
        "return True",
        "worker/test_delegated",
    ),
    Mutant(
        "worker/intake.py", "DELEGATED_LANE if signal.delegate else record.lane", "record.lane", "worker/test_delegated"
    ),
    Mutant(
        "worker/replies.py",
        "replace(task, pass_to=None, answered=False,",
        "replace(task, answered=False,",
        "worker/test_delegated",
    ),
    Mutant("worker/forwarding.py", "TRAVEL_MS + owned[0].queue_ms >", "TRAVEL_MS >", "worker/test_delegated"),
    Mutant("wire/refusals.py", "found is not None and found.pins", "found is not None", "worker/test_delegating_owner"),
    Mutant(
        "worker/delegates.py", "if request_key in self._answered_here:", "if False:", "worker/test_delegating_owner"
    ),
    Mutant("trigger/signals.py", " and not too_large", "", "trigger/test_delegated_signals"),
    Mutant(
        "trigger/signals.py",
        "if signals and producer.broker_of(topic, self._lane) == NO_LEADER:",
        "if False:",
        "trigger/test_delegated_signals",
    ),
    # what rankings wait for, and what failures cost
    Mutant("worker/device.py", "while inbox and clock() <= until:", "while inbox:", "worker/test_device"),
    Mutant("engine/prefill.py", "if job is not None and due < job.due:", "if False:", "engine/test_core_signals"),
    Mutant(
        "engine/rankings.py",
        "min(self._executor.failed_in_a_row, failed + 1)",
        "self._executor.failed_in_a_row",
        "engine/test_core_failures",
    ),
    Mutant("engine/rankings.py", "_charge(task, ms / len(batch))", "pass", "engine/test_core_failures"),
    # erasures and tombstones
    Mutant(
        "cache/prefix_cache.py",
        "for entry in self._table.everyone() if entry.user_id in users",
        "for entry in self._table.everyone() if entry.user_id in users and not entry.retired",
        "engine/test_core",
    ),
    Mutant(
        "cli/history.py",
        "return settings.client.tenant if given is None else given",
        'return given or ""',
        "history/test_commands",
    ),
    Mutant("history/sqlite_store.py", "wal_checkpoint(TRUNCATE)", "wal_checkpoint(PASSIVE)", "history/test_stores"),
    Mutant(
        "wire/worker_status.py",
        "return tombstone.incarnation == status.incarnation",
        "return True",
        "status/test_overview",
    ),
    Mutant("ops/status/overview.py", "                self.reader.verify(record)\n", "", "status/test_overview"),
    # worker: in time or not, room or not
    Mutant("engine/forecast.py", "if 0.0 <= spare < own:", "if spare < own:", "engine/test_overload"),
    Mutant("engine/forecast.py", "self._saved_ms > PAYS_FROM *", "self._saved_ms > 0 *", "engine/test_batching"),
    Mutant("engine/forecast.py", "return self._samples >= MIN_SAMPLES", "return True", "engine/test_overload"),
    Mutant(
        "engine/admission.py",
        "len(self.waiting) >= self._places:",
        "len(self.waiting) > self._places:",
        "engine/test_core engine/test_clients",
    ),
    Mutant(
        "engine/admission.py",
        "self.clients.nbytes + task.nbytes >",
        "self.clients.nbytes >",
        "engine/test_clients engine/test_core_machine",
    ),
    # worker: requests come, answers go
    Mutant("worker/intake.py", "0 <= partition < self._reply", "0 <= partition <= self._reply", "worker/test_intake"),
    Mutant(
        "worker/intake.py", "min(signal.life_ms, self._relay.life_window_ms)", "signal.life_ms", "worker/test_intake"
    ),
    Mutant("worker/intake.py", "min(reply_ms, REPLY_SHARE * timeout_ms)", "reply_ms", "worker/test_intake"),
    Mutant(
        "worker/forwarding.py",
        "task.timeout_ms - task.age_ms - (now - task.arrived) * 1e3)",
        "task.timeout_ms)",
        "worker/test_outbox_forwards",
    ),
    Mutant(
        "worker/replies.py",
        "next_hop(record.value, task.hops + 1,",
        "next_hop(record.value, task.hops,",
        "worker/test_outbox_forwards",
    ),
    # cache
    Mutant("cache/arena.py", "(best is None or found < best)", "best is None", "cache/test_arena"),
    Mutant("cache/arena.py", "end - starts[first + 1] >= need:", "end - starts[first] >= need:", "cache/test_arena"),
    Mutant("cache/arena.py", "before + size + after)", "before + size)", "cache/test_arena"),
    Mutant("cache/arena.py", "if start + whole > offset + size:", "if False:", "cache/test_arena"),
    Mutant("cache/eviction.py", "not self._allowed(key):", "False:", "cache/test_eviction cache/test_dram"),
    Mutant(
        "cache/entry_table.py",
        "if not entry.retired or entry.held or",
        "if not entry.retired or",
        "cache/test_prefix_cache",
    ),
    # trigger
    Mutant("trigger/ledger.py", "return not self.on_hold and ", "return ", "trigger/test_ledger"),
    Mutant("trigger/ledger.py", "if offset >= self._read_to:", "if offset > self._read_to:", "trigger/test_ledger"),
    Mutant("trigger/ledger.py", " or entry.batch < log_end]", "]", "trigger/test_ledger"),
    Mutant("trigger/ledger.py", "_bytes + self._pending_bytes", "_bytes", BOUNDS),
    Mutant("trigger/ledger.py", "_bytes + self._unread_bytes +", "_bytes +", BOUNDS),
    Mutant("trigger/ledger.py", "return self._pinned_bytes + self._unread_bytes", "return self._unread_bytes", BOUNDS),
    Mutant(
        "trigger/ledger.py",
        "self._read_to = status.pre_infer_offset\n",
        "self._read_to = status.pre_infer_offset\n        del self._logged[: self._index(self._read_to)]\n",
        "trigger/test_ledger",
    ),
    Mutant("trigger/ledger.py", "pending.failed_s = now_s", "self._settle(pending)", "trigger/test_ledger"),
    Mutant("trigger/load.py", ">= min(cost_ms, self.depth)", ">= cost_ms", "trigger/test_load"),
    Mutant("trigger/decision.py", " and owner.allows(cost_ms, now_s)", "", "trigger/test_load"),
    Mutant("trigger/decision.py", "            self._owner_bucket.spend(cost_ms, now_s)\n", "", "trigger/test_load"),
    Mutant(
        "wire/messages.py", "int(bool(message.columns and message.columns.user)) + ", "", "trigger/test_explain_live"
    ),
    Mutant("trigger/load.py", "level = self.level(now_s) + more_ms if", "level = self._level_ms + more_ms if", BOUNDS),
    Mutant(
        "trigger/decision.py", "event.candidates) + owner.worker.queue_ms", "event.candidates)", "trigger/test_decision"
    ),
    Mutant(
        "trigger/decision.py",
        "elif stated_wait_ms(owner, now_s) >",
        "elif 0 * stated_wait_ms(owner, now_s) >",
        "trigger/test_decision",
    ),
    Mutant("trigger/delegation.py", "claim.worker.name == owner or", "", "trigger/test_delegation"),
    Mutant(
        "trigger/delegation.py",
        "if sent_bytes + place.nbytes > claim.worker.delegated_bytes:",
        "if place.nbytes > claim.worker.delegated_bytes:",
        "trigger/test_delegation",
    ),
    Mutant("trigger/delegation.py", " + ahead_ms + place.cost_ms", " + place.cost_ms", "trigger/test_delegation"),
    Mutant("trigger/delegation.py", "for each in (None, lane))", "for each in ())", "trigger/test_delegation"),
    Mutant("trigger/delegation.py", "if late else", "if True else", "trigger/test_delegation"),
    Mutant("wire/refusals.py", "and self._clock() <= found.until else", "else", "test_refusals"),
    # background work
    Mutant("telemetry/background.py", "if not self.failed.done():", "if True:", "telemetry/test_background"),
    Mutant(
        "telemetry/background.py", "except skips as error:", "except BrokerError as error:", "telemetry/test_background"
    ),
    Mutant(
        "telemetry/background.py",
        "            self.check()\n            return",
        "            return",
        "telemetry/test_background",
    ),
    # bus
    Mutant(
        "bus/lane_reader.py",
        "next(iter(self._undone), self._position)",
        "next(reversed(self._undone), self._position)",
        "test_offsets",
    ),
    Mutant(
        "bus/crashes.py", "tuple(end for end in before.log_ends if end > committed)", "before.log_ends", "test_crashes"
    ),
    Mutant("bus/assignor.py", ".generation > claims[holder", ".generation < claims[holder", "test_assignor"),
    Mutant("bus/assignor.py", "(len(held[member]) <= quota[member], quota", "(quota", "test_assignor"),
    Mutant("bus/ages.py", "if offset < self._read:", "if offset < 0:", "test_ages"),
    Mutant("bus/ages.py", "believed = min(stated_ms, at_least + WAY_MS)", "believed = stated_ms", "test_ages"),
    # wire: feature columns
    Mutant("wire/features.py", "if known < len(columns):", "if not columns and known:", "test_features"),
    Mutant("wire/features.py", "len(data) != rows * one.row_bytes", "len(data) % one.row_bytes", "test_features"),
    Mutant("wire/features.py", "if stated and stated != self.digest:", "if not stated:", "test_features"),
    Mutant(
        "wire/features.py", "halves[at // 2, at % 2 :: 2] = column", "halves[at // 2, ::2] = column", "test_features"
    ),
    Mutant("models/api.py", "                array[1, 0] = USER_ACTION\n", "", "test_features"),
    # copies of a request: their reply partitions and their lanes
    Mutant("client/answers.py", "heard[0] if heard else min(", "min(", AWAY),
    Mutant("client/answers.py", "key=lambda each: unanswered.get(each, 0))", "key=lambda each: 0)", AWAY),
    Mutant(
        "client/exchange.py", "self._unanswered[reply_to] += error is None", "self._unanswered[reply_to] += 1", AWAY
    ),
    Mutant("client/exchange.py", "self._choices(owner, late_s, tried, reached) or ", "", AWAY),
    Mutant("client/sender.py", "            return math.inf\n", "            return 0.0\n", AWAY),
    # histories by reference
    Mutant("wire/history.py", "_hashed(state, behaviours, at - start, at + BLOCK - start)", "state", HISTORY),
    Mutant("wire/messages.py", "elif (message.min_v or message.v) < HISTORY_VERSION:", "elif False:", HISTORY),
    Mutant(
        "worker/histories.py", "!= reference.digest:\n            return None", "== b'':\n            return None", KEPT
    ),
    Mutant("worker/histories.py", "return kept.behaviours.slice(0, fitting)", "return kept.behaviours", KEPT),
    Mutant(
        "worker/histories.py",
        "            self._drop(user)\n            whole = await",
        "            whole = await",
        KEPT,
    ),
    Mutant(
        "history/packed.py",
        "found = digests(behind, [boundary, length], before.tail, before.block)",
        "found = digests(behind, [boundary, length])",
        "history/test_stores",
    ),
    Mutant(
        "history/packed.py",
        "return (0 if _too_long(before, count, most) else min(before.tail, before.length - 1))",
        "return (before.tail)",
        "history/test_stores",
    ),
    Mutant("ops/erase.py", "return stated == (user_id, tenant)", "return stated[0] == user_id", "history/test_erase"),
    Mutant(
        "wire/worker_status.py",
        "        self.verify(record)\n        return decoder.decode",
        "        return decoder.decode",
        "history/test_erase",
    ),
)
