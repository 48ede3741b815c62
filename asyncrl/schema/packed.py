"""Groups back to back, as a learner takes them, and what one group says of itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from asyncrl.schema.columns import SUPPORT_COLUMNS, TOKEN_COLUMNS, entries, starts_of, values_of
from asyncrl.schema.support import Support
from asyncrl.staleness import Weights


@dataclass(frozen=True, slots=True)
class Packed:
    """Groups back to back: per-token columns of all rows, which are read-only, and where each row starts. N tokens, R
    rows."""

    token_ids: NDArray[np.int32]  # [N]
    loss_mask: NDArray[np.uint8]  # [N]
    logprobs: NDArray[np.float32]  # [N]
    versions: NDArray[np.int32]  # [N]
    cu_seqlens: NDArray[np.int64]  # [R + 1]
    rewards: NDArray[np.float64]  # [R]; NaN = unscored
    groups: NDArray[np.int64]  # [R] index of the row's group in the batch
    answers: NDArray[np.int64]  # [R] index of the member whose answer the row is, or a segment of
    support: Support | None  # of N draws; None: every token was drawn between all of the vocabulary
    table: pa.Table  # every column as the groups have it, and so what keeps them alive


def pack(batches: Sequence[pa.RecordBatch]) -> Packed:
    """Put groups back to back, in the order given: what is one entry per token is copied once (one group: not even
    that), the rest not at all.

    Batches must be sound (`decode_all`): joining broken offsets reads what is not theirs.
    """
    if not batches:
        raise ValueError("nothing to pack: no group")
    table = together(batches)
    tokens = table.select(list(TOKEN_COLUMNS)).combine_chunks()
    columns = {name: tokens.column(name).chunk(0) for name in TOKEN_COLUMNS}
    return Packed(
        **{name: entries(column).to_numpy() for name, column in columns.items()},
        cu_seqlens=starts_of(columns["token_ids"]).astype(np.int64),
        rewards=table.column("reward").to_numpy(),
        groups=np.repeat(np.arange(len(batches)), [batch.num_rows for batch in batches]),
        answers=np.cumsum(table.column("segment").to_numpy() == 0) - 1,
        support=Support.joined([(support_of(batch), len(values_of(batch, "token_ids"))) for batch in batches]),
        table=table,
    )


def support_of(batch: pa.RecordBatch) -> Support | None:
    """Of all tokens of a group; None where nothing was restricted."""
    if not set(SUPPORT_COLUMNS) <= set(batch.schema.names):
        return None
    return Support(*(values_of(batch, name) for name in SUPPORT_COLUMNS))


def together(batches: Sequence[pa.RecordBatch]) -> pa.Table:
    """One table with a chunk a group: nothing is copied. Columns that only some of them have are filled with nulls."""
    if all(batch.schema.equals(batches[0].schema) for batch in batches):  # no columns to compare one by one
        return pa.Table.from_batches(batches)
    tables = [pa.Table.from_batches([batch]) for batch in batches]
    return pa.concat_tables(tables, promote_options="default")


def apart(rows: pa.RecordBatch) -> list[pa.RecordBatch]:
    """The groups of rows that `together` put together, each with the columns that it had: no copies."""
    cuts = np.flatnonzero(np.diff(rows.column("ticket").to_numpy())) + 1  # a group's rows follow each other
    groups = [rows.slice(first, last - first) for first, last in pairwise([0, *cuts, rows.num_rows])]
    return [group.drop_columns(_missing(group)) for group in groups]


def _missing(group: pa.RecordBatch) -> list[str]:
    names = [name for name in SUPPORT_COLUMNS if name in group.schema.names]
    return [name for name in names if group.column(name).null_count == group.num_rows]


def version_range(batch: pa.RecordBatch) -> tuple[int, int]:
    """(oldest, newest) version over the trainable tokens. Raises ValueError if there is none."""
    trained = values_of(batch, "versions")[values_of(batch, "loss_mask") == 1]
    if not len(trained):
        raise ValueError("no trainable token in the group")
    return int(trained.min()), int(trained.max())


def span_weights(batch: pa.RecordBatch) -> tuple[Weights, ...]:
    """Every (lineage, version) that sampled a token of the group, ascending; the last is the newest."""
    spans = entries(batch.column("spans"))
    lineages, versions = (spans.field(name).to_numpy().tolist() for name in ("lineage", "version"))
    return tuple(Weights(*pair) for pair in sorted(set(zip(lineages, versions, strict=True))))


def sampled_tokens(batch: pa.RecordBatch) -> int:
    """How many tokens of the group were sampled."""
    return int(values_of(batch, "loss_mask").sum(dtype=np.int64))
