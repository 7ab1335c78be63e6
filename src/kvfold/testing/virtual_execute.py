"""How a virtual worker executes a step: as vLLM's model runner does, on virtual pages.

Block tables are kept as the runner keeps them, from the scheduler's messages alone. Everything
that attention or a recurrent layer would read is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvfold.testing.virtual_pages import (
    SCRATCH,
    STATE,
    Page,
    Pages,
    Strand,
    Tale,
    WrongBlock,
    next_token,
)

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Run:
    """A request as the workers know it, and the truth about its tokens."""

    def __init__(self, request: Request, salt: str, version: int, groups: int) -> None:
        self.request, self._salt = request, salt
        self.tale = Tale(salt, version)
        self.tables: list[list[int]] = [[] for _ in range(groups)]
        self.state_index: int | None = None
        self.promised = 0
        self.everything: list[int] = request._all_token_ids
        """All tokens of the request, growing."""

    def retell(self, version: int) -> None:
        """The weights changed: what is computed from now on is something else."""
        self.tale = Tale(self._salt, version)

    def tale_of(self, version: int) -> Tale:
        """The truth under these weights, for all known tokens."""
        if self.tale.version != version:
            self.retell(version)
        self.tale.extend(self.everything)
        return self.tale

    def prophecy(self, count: int) -> list[int]:
        """The next tokens that the model will say."""
        self.tale.extend(self.everything)
        tags, said = list(self.tale.tags), []
        for _ in range(count):
            said.append(next_token(tags[-1]))
            tags += self.tale.after(len(self.tale.tags), said)[-1:]
        return said


class Execution:
    """Executes steps on the pages of all ranks alike."""

    def __init__(self, strands: Sequence[Strand], pages: Sequence[Pages]) -> None:
        self._strands, self._pages = strands, pages
        self.draft_misses = 0
        """Positions' worth of blocks in which a draft found garbage: allowed, but to be seen."""

    def run(self, output: Any, runs: dict[str, Run]) -> dict[str, list[int]]:
        """Execute a step; returns the tokens sampled for each scheduled request."""
        computed = self._tables(output, runs)
        for pages in self._pages:
            for block in output.new_block_ids_to_zero or ():
                pages.clear(block)
            for copy in output.kv_cache_block_copies or ():
                pages.copy(copy.src_block_id, copy.dst_block_id)
        steps = []
        for name, count in output.num_scheduled_tokens.items():
            run, first = runs[name], computed[name]
            guesses = output.scheduled_spec_decode_tokens.get(name, [])
            run.tale.extend(run.everything)
            steps.append((run, first, count, guesses))
        for run, first, count, _ in steps:
            self._move_states(run, first, count)
        for run, first, count, guesses in steps:
            self._write(run, first, count, guesses)
        for run, first, count, guesses in steps:
            self._read(run, first, count, guesses)
        return {
            run.request.request_id: self._sample(run, first, count, guesses)
            for run, first, count, guesses in steps
        }

    def _tables(self, output: Any, runs: dict[str, Run]) -> dict[str, int]:
        """Update block tables; returns how many tokens each scheduled request had computed."""
        cached = output.scheduled_cached_reqs
        for name in (*output.preempted_req_ids, *cached.resumed_req_ids):
            if name in runs:
                runs[name].state_index = None
        computed = {}
        for new in output.scheduled_new_reqs:
            runs[new.req_id].tables = [list(ids) for ids in new.block_ids]
            computed[new.req_id] = new.num_computed_tokens
        for name, blocks, tokens in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            computed[name] = tokens
            if name in cached.resumed_req_ids:
                runs[name].tables = [list(ids) for ids in blocks]
            elif blocks is not None:
                for table, ids in zip(runs[name].tables, blocks, strict=True):
                    table.extend(ids)
        return computed

    def _move_states(self, run: Run, first: int, count: int) -> None:
        """Copy the running state to the block that this step ends in ("align" mode)."""
        spans = {s.block_tokens for s in self._strands if s.kind == STATE}
        if not spans:
            return
        (span,) = spans
        before = run.state_index if run.state_index is not None else (first - 1) // span
        now = run.state_index = -(-(first + count) // span) - 1
        if before in (-1, now):
            return
        for strand in self._strands:
            if strand.kind == STATE:
                table = run.tables[strand.group]
                for pages in self._pages:
                    source = pages.peek(strand, table[before])
                    pages.page(strand, table[now])[:] = source or [0, 0]

    def _values(self, run: Run, strand: Strand, guesses: Sequence[int]) -> list[int]:
        values = run.tale.values(strand)
        if not guesses:
            return values
        after = run.tale.after(len(run.tale.tags), guesses)
        return values + [tag + strand.number for tag in after]

    def _write(self, run: Run, first: int, count: int, guesses: Sequence[int]) -> None:
        for strand in self._strands:
            table = run.tables[strand.group]
            if strand.kind == SCRATCH:
                continue
            if strand.kind == STATE:
                self._write_state(run, strand, first, count)
                continue
            values = self._values(run, strand, guesses)[first : first + count]
            if len(values) != count:
                raise WrongBlock(f"{run.request.request_id}: {count} tokens, {len(values)} known")
            for pages in self._pages:
                pages.write(strand, table, first, values)

    def _write_state(self, run: Run, strand: Strand, first: int, count: int) -> None:
        assert run.state_index is not None
        block = run.tables[strand.group][run.state_index]
        for pages in self._pages:
            if first:
                self._check_state(run, strand, first, pages.peek(strand, block), block)
            pages.page(strand, block)[:] = run.tale.state(strand, first + count)

    @staticmethod
    def _check_state(run: Run, strand: Strand, first: int, found: Page | None, block: int) -> None:
        if found != run.tale.state(strand, first):
            raise WrongBlock(
                f"{run.request.request_id} at {first}: block {block} holds the state {found}, not "
                f"its own; {strand}"
            )

    def _read(self, run: Run, first: int, count: int, guesses: Sequence[int]) -> None:
        request = run.request
        for strand in self._strands:
            if strand.kind in (SCRATCH, STATE):
                continue
            begin = strand.reads(first, request.replay_start)
            values = self._values(run, strand, guesses)
            for pages in self._pages:
                try:
                    pages.check(
                        strand,
                        run.tables[strand.group],
                        begin,
                        first + count,
                        values,
                        f"{request.request_id} at {first}",
                    )
                except WrongBlock:
                    if not strand.draft:
                        raise
                    self.draft_misses += 1

    @staticmethod
    def _sample(run: Run, first: int, count: int, guesses: Sequence[int]) -> list[int]:
        """What the model says: nothing before the last known token, then accepted guesses and one
        more token."""
        tale = run.tale
        if first + count < len(tale.tags):
            return []
        said = [next_token(tale.tags[-1])]
        for guess, tag in zip(guesses, tale.after(len(tale.tags), guesses), strict=True):
            if guess != said[-1]:
                break
            said.append(next_token(tag))
        return said


class Promises:
    """Which prefix each block hash stands for: what a chunk with its key must hold."""

    def __init__(self, hash_tokens: int) -> None:
        self._hash_tokens = hash_tokens
        self._ends: dict[bytes, tuple[Run, int]] = {}

    def note(self, run: Run) -> None:
        """Learn the request's new block hashes."""
        hashes = run.request.block_hashes
        while run.promised < len(hashes):
            run.promised += 1
            self._ends[hashes[run.promised - 1]] = (run, run.promised * self._hash_tokens)

    def check(
        self,
        strand: Strand,
        namespace: bytes,
        key: bytes,
        pages: Sequence[Page | None],
        version: int,
    ) -> None:
        """Raise `WrongBlock` unless `pages` hold what the key promises under these weights."""
        mask = int.from_bytes(namespace, "little")
        block_hash = (int.from_bytes(key, "little") ^ mask).to_bytes(len(key), "little")
        promise = self._ends.get(block_hash)
        if promise is None:
            raise WrongBlock(f"{strand}: a key was ordered that no request has")
        run, end = promise
        tale = run.tale_of(version)
        if strand.kind == STATE:
            expected = [tale.state(strand, end)]
        else:
            span = strand.block_tokens
            values = tale.values(strand)
            first = end - len(pages) * span
            expected = [values[at : at + span] for at in range(first, end, span)]
        if list(pages) != expected:
            raise WrongBlock(
                f"{strand}: the chunk of {run.request.request_id} that ends at {end} would be "
                f"stored with wrong content {pages}"
            )
