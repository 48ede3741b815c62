"""The trajectory record: one group is one Arrow record batch in IPC stream form, one row per trajectory.

| columns                                    | type                                  | note                          |
|--------------------------------------------|---------------------------------------|-------------------------------|
| token_ids, loss_mask, logprobs, versions   | list of int32, uint8, float32, int32  | one entry per token, aligned  |
| ticket; attempt, member, segment, lineage  | int64; int32                          | lineage: of the newest span   |
| prompt_length; turn_offsets, turn_rewards  | int32; list of int32, list of float64 | positions in token_ids        |
| reward; reward_parts                       | float64; map of string to float64     | unscored: NaN; null           |
| finish_reason, failure                     | string                                |                               |
| issued, first_token, done, scored, put     | float64, unix seconds                 | 0: did not happen             |
| collector, engine, task, row_id            | string                                |                               |
| sampling                                   | struct: temperature ... min_p, seed   | seed: of the row's own request|
| spans                                      | list of struct                        | which weights, by checksum    |
| info                                       | string                                | a JSON object                 |
| support_counts, support_ids                | list of int32                         | only where draws were         |
|                                            |                                       | restricted (`Support`)        |

The per-token columns are built on ONE offsets buffer, so that putting batches back to back gives packed arrays and
`cu_seqlens` with no loop over rows. Further columns may be added without a new schema version; a reader ignores what
it does not know.
"""

from __future__ import annotations

from asyncrl.schema.columns import (
    FINISH_REASONS,
    SCHEMA,
    SCHEMA_VERSION,
    SUPPORTED_SCHEMA,
    TOKEN_COLUMNS,
    check_schema,
)
from asyncrl.schema.packed import Packed, apart, pack, sampled_tokens, span_weights, together, version_range
from asyncrl.schema.record import Group, Trajectory, VersionSpan, to_batch
from asyncrl.schema.rules import validate
from asyncrl.schema.stream import decode, decode_all, digest, encode, max_group_bytes
from asyncrl.schema.support import Support

__all__ = [
    "FINISH_REASONS",
    "SCHEMA",
    "SCHEMA_VERSION",
    "SUPPORTED_SCHEMA",
    "TOKEN_COLUMNS",
    "Group",
    "Packed",
    "Support",
    "Trajectory",
    "VersionSpan",
    "apart",
    "check_schema",
    "decode",
    "decode_all",
    "digest",
    "encode",
    "max_group_bytes",
    "pack",
    "sampled_tokens",
    "span_weights",
    "to_batch",
    "together",
    "validate",
    "version_range",
]
