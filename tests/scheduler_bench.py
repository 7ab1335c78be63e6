"""The scheduler's side with vLLM's real block pool, a store that is a dict, and I/O that runs when
the test says so. `request`, `admit`, `step` and `finish` stand for the engine.
"""

from __future__ import annotations

import hashlib
from collections import deque
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from small_specs import group, outside
from vllm.v1.core.block_pool import BlockPool

from kvfold import identity
from kvfold.errors import StoreGone
from kvfold.mesh import Mesh
from kvfold.plan import PlanOptions, plan
from kvfold.spans import with_chunks
from kvfold.vllm.agreement import Agreed
from kvfold.vllm.io_thread import run_logged
from kvfold.vllm.messages import LoadFailure, StepResults
from kvfold.vllm.requests import Geometry
from kvfold.vllm.scheduler import SchedulerSide

SPAN = 16
"""Tokens per block of attention."""
FULL, WINDOW, STATE, DRAFT = range(4)
"""The groups of `hybrid`, as the store numbers them."""
LOST = "neither in host memory nor on disk"


def agreed(groups, *, alignment=16, hash_tokens=None, chunk=1, modes=None, mesh=None):
    """What workers with these groups agree on. `modes`: of the states, by the engine's group."""
    mesh = mesh or Mesh(tp=1)
    period, chunked = with_chunks(groups, mesh.dcp, alignment, chunk)
    planned = plan(chunked, mesh, PlanOptions(chunk, hash_tokens))
    stored = tuple((modes or {}).get(g.index, "") for g in planned.stored)
    return Agreed(planned, period, stored, ())


def geometry(groups, *, num_blocks=400, max_step_tokens=2048, hash_bytes=32, lag=0, **options):
    """The geometry of such groups."""
    return Geometry.of(
        agreed(groups, **options),
        hash_bytes=hash_bytes,
        num_blocks=num_blocks,
        max_step_tokens=max_step_tokens,
        draft_lag=lag,
    )


class Store:
    """A client that knows some keys, by tier."""

    store_id = "s"

    def __init__(self):
        self.tiers, self.tickets, self.told, self.asked = {}, [], [], []
        self.fail = False

    def lookup(self, keys, timeout_s):
        self.asked.append(keys)
        if self.fail:
            raise StoreGone("gone")
        return bytes(self.tiers.get(key, 0) for key in split(keys))

    def open_ticket(self, ticket, group, namespace, keys, readers):
        self.tickets.append((ticket, group, namespace, keys, readers))

    def tell(self, request, record):
        self.told.append((request, dict(record)))


class Io:
    """Runs tasks at once, or when told."""

    def __init__(self):
        self.tasks, self.inline = deque(), True

    def put(self, task):
        if self.inline:
            run_logged(task)
        else:
            self.tasks.append(task)

    def run(self):
        while self.tasks:
            run_logged(self.tasks.popleft())

    def close(self):
        self.run()


def split(keys):
    return [keys[i : i + 32] for i in range(0, len(keys), 32)]


class Bench:
    """One engine's scheduler side; chunks are numbered as in `kvfold.spans`."""

    def __init__(self, groups=None, *, settings=None, **shape):
        self.store, self.io, self.now, self.connected = Store(), Io(), 100.0, True
        self.geometry = g = geometry(groups or [group(0)], **shape)
        digests = [bytes([number] * 32) for number in range(len(g.groups))]
        options = {"lookup_wait_s": 0.02, "audit_chunks": 2, "audit_every": 0} | (settings or {})
        self.side = SchedulerSide(
            g, digests, lambda: (self.store, 1) if self.connected else None, engine="e",
            clock=lambda: self.now, io=self.io, **options,
        )  # fmt: skip
        self.pool = self.side.holds.pool = BlockPool(g.num_blocks, True, g.tokens_per_hash)
        self.null = self.pool.null_block
        self.engine_groups = 1 + max(known.index for known in groups or [group(0)])
        self.spans = {known.index: known for known in g.groups}
        self.tables, self.asked_tables = {}, []

    # -- requests -------------------------------------------------------------------------------

    def request(self, name, tokens, *, salt="", lora=None, **changes):
        """A request of `tokens` prompt tokens; prompts of one salt share their prefixes."""
        hashes = [
            hashlib.sha256(f"{salt}{i}".encode()).digest()[: self.geometry.hash_bytes]
            for i in range(tokens // self.geometry.tokens_per_hash)
        ]
        fields = {
            "request_id": name, "block_hashes": hashes, "num_tokens": tokens,
            "num_prompt_tokens": tokens, "num_computed_tokens": 0,
            "skip_reading_prefix_cache": False, "lora_request": None, "shared_prefix_boundary": 0,
        }  # fmt: skip
        if lora is not None:
            fields["lora_request"] = SimpleNamespace(lora_int_id=lora[0], lora_path=str(lora[1]))
        return SimpleNamespace(**fields | changes)

    def arrive(self, name, tokens, know=0, **changes):
        """A new request, of which the store has the first `know` chunks of every group."""
        request = self.request(name, tokens, **changes)
        self.know(request, range(know))
        self.side.on_new_request(request)
        return request

    def key(self, request, chunk, number=0, mask=b""):
        """The key of a chunk, from scratch."""
        last = (chunk + 1) * self.geometry.hashes_per_chunk - 1
        block_hash = request.block_hashes[last].ljust(32, b"\0")
        parts = (block_hash, self.side.namespaces[number], mask or bytes(32))
        return bytes(a ^ b ^ c for a, b, c in zip(*parts, strict=True))

    def keys(self, request, chunks, number=0):
        return b"".join(self.key(request, chunk, number) for chunk in chunks)

    def know(self, request, chunks, groups=None, tier=2, mask=b""):
        """The store has these chunks, of all groups or the given ones; tier 0: not any more."""
        for number in range(len(self.geometry.groups)) if groups is None else groups:
            for chunk in chunks:
                self.store.tiers[self.key(request, chunk, number, mask)] = tier

    def offer(self, request, local=0):
        return self.side.offer(request, local)

    def retry(self, request, local=0):
        """The offer after a failed load: the first ask is put off."""
        assert self.side.offer(request, local) is None
        return self.side.offer(request, local)

    # -- blocks ---------------------------------------------------------------------------------

    def compute(self, request, tokens=None):
        """Blocks for the first `tokens` of a request that has them all computed here."""
        tokens = request.num_tokens if tokens is None else tokens
        self.tables[request.request_id] = tuple(
            self.pool.get_new_blocks(-(-tokens // self.spans[index].tokens_per_block))
            if index in self.spans
            else [self.null]
            for index in range(self.engine_groups)
        )
        return request

    def admit(self, request, local, external):
        """Blocks for a load, with holes where the engine needs nothing: the rules of its own."""
        end, tables = local + external, []
        for index in range(self.engine_groups):
            shape = self.spans.get(index)
            if shape is None:
                tables.append([self.null])
                continue
            span = shape.tokens_per_block
            skipped = {
                "all": 0,
                "window": max(0, end - shape.look_back),
                "chunked": end - end % max(1, shape.look_back),
                "state": end - 1,
            }[shape.need] // span
            count = max(0, -(-end // span) - skipped)
            tables.append([self.null] * skipped + self.pool.get_new_blocks(count))
        self.tables[request.request_id] = tuple(tables)
        self.side.start_load(request, self.tables[request.request_id], external)

    def ids(self, name, index=0):
        return [block.block_id for block in self.tables[name][index]]

    def rows(self, name, index, first, last, width):
        """Block ids [first, last) of a table as a chunk table."""
        ids = self.ids(name, index)[first:last]
        return [ids[i : i + width] for i in range(0, len(ids), width)]

    def drop(self, name, index, blocks):
        """The engine frees some blocks of a running request."""
        table = self.tables[name][index]
        for place in blocks:
            if not table[place].is_null:
                self.pool.free_blocks([table[place]])
                table[place] = self.null

    def free(self, name):
        for table in self.tables.pop(name):
            self.pool.free_blocks([b for b in reversed(table) if not b.is_null])

    @property
    def used(self):
        """Blocks that are referenced, without the engine's hole."""
        return self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks()

    # -- steps ----------------------------------------------------------------------------------

    def step(self, *scheduled, handed=None, hide=()):
        """One step that computes (request, tokens) pairs; `handed`: boundary states by id; `hide`:
        requests without tables."""
        names = {request.request_id for request, _ in scheduled} - set(hide)
        output = SimpleNamespace(
            num_scheduled_tokens={request.request_id: count for request, count in scheduled},
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=lambda name: self._ids(name) if name in names else None,
                boundary_state_offloads=handed or {},
            ),
        )
        orders = self.side.build_orders(output)
        for request, count in scheduled:
            request.num_computed_tokens += count
        return orders

    def _ids(self, name):
        self.asked_tables.append(name)
        return tuple([block.block_id for block in table] for table in self.tables[name])

    def finish(self, request, free=True):
        """End a request as the engine does, and free its blocks."""
        self.side.request_finished(request, self._ids(request.request_id))
        if free:
            self.free(request.request_id)

    def done(self, *orders, workers=1):
        """Workers report jobs as ended."""
        self.side.update(StepResults(jobs={order.job: workers for order in orders}), set())

    def load_of(self, request, tokens, local=0):
        """Admit an offer and return its order."""
        self.admit(request, local, tokens)
        (order,) = self.step().loads
        return order

    def failed(
        self,
        request,
        order,
        part=0,
        index=0,
        reason="neither in host memory nor on disk",
        ended=True,
    ):
        """A worker reports a load as failed."""
        name = request.request_id
        failure = LoadFailure(order.load, part, index, reason)
        self.side.update(StepResults(failures={name: [failure]}), {name} if ended else set())
        if ended:
            request.num_computed_tokens = 0
            self.free(name)

    def loaded(self, request, tokens):
        """All workers report a load as complete: `tokens` are computed now."""
        self.side.update(None, {request.request_id})
        request.num_computed_tokens = tokens

    def counted(self, metric):
        """What was counted since the last call, by label."""
        taken = self.side.recorder.take()
        return {} if taken is None else taken.data.get(metric.name, {})

    @property
    def outcomes(self):
        return [record["outcome"] for _, record in self.store.told]


def hybrid(**options):
    """Period 64: attention (4 blocks a chunk), a window (2), states of 128 tokens, a draft."""
    groups = [
        group(0), outside(1), group(2, "sliding_window", 16, window=33), group(3, "gdn", 128),
        group(0, "full_attention", 16, draft=True),
    ]  # fmt: skip
    return Bench(groups, alignment=64, hash_tokens=16, modes={3: "align"}, **options)


def index_of(orders, number):
    """The one store order of a group."""
    (order,) = [order for order in orders.stores if order.group == number]
    return order


def namespace(number, epoch=b""):
    """The namespace of the bench's groups."""
    return identity.namespace(bytes([number] * 32), number, epoch)
