"""Floating-point operations of a pass over a Llama, in two ways: counted by torch from the calls that are made, and by
formula from the lengths.

A product of [m, k] and [k, n] has 2 m k n. A pair of a query and a key that attention looks at has 4 head_dim a head: a
score, and a share of the output; its backward pass, which makes the score again, 10 head_dim. With T tokens through
the layers, whose matrices have P elements each token, A pairs in each of L layers, Y tokens that reach the head:

    forward 2 T L P + 4 A L heads head_dim + 2 Y h V        backward twice that, of attention 2.5 times
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig

FORWARD, BACKWARD = 4, 10
"""Operations of a pair of query and key, per element of a head: two products, and five."""


def counted(work: Callable[[], object]) -> int:
    """What torch counts of the products in `work`, and what it does not know: its CPU kernel of attention, and products
    that are added to a tensor in place.

    Of a call that is causal, pairs above the diagonal are left out, as the kernel leaves them out; with a mask it
    computes all of them.
    """
    aten: Any = torch.ops.aten
    kernels = {
        aten._scaled_dot_product_flash_attention_for_cpu: _forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
        aten.addmm_: _product,
    }
    with FlopCounterMode(display=False, custom_mapping=kernels) as counter:
        work()
    return int(counter.get_total_flops())


def _product(to: Sequence[int], a: Sequence[int], b: Sequence[int], **_: Any) -> int:
    return 2 * a[0] * a[1] * b[1]


def _forward(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], dropout: float = 0.0, causal: bool = False, **_: Any
) -> int:
    return FORWARD * _elements(q, k, causal)


def _backward(
    grad: Sequence[int],
    q: Sequence[int],
    k: Sequence[int],
    v: Sequence[int],
    out: Sequence[int],
    logsumexp: Sequence[int],
    dropout: float,
    causal: bool,
    **_: Any,
) -> int:
    return BACKWARD * _elements(q, k, causal)


def _elements(q: Sequence[int], k: Sequence[int], causal: bool) -> int:
    """Pairs x head_dim of all rows and heads; as many queries as keys where it is causal."""
    rows, heads, own, head_dim = q
    return rows * heads * head_dim * (own * (own + 1) // 2 if causal else own * k[2])


def by_formula(config: LlamaConfig, *, computed: int, pairs: int, predicted: int, backward: bool = True) -> int:
    """computed, pairs, predicted: T, A and Y; `pairs_of` has A of sequences."""
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    kv_heads, head_dim = config.num_key_value_heads or heads, config.head_dim or config.hidden_size // heads
    matrices = config.hidden_size * ((2 * heads + 2 * kv_heads) * head_dim + 3 * config.intermediate_size)
    products = 2 * (computed * layers * matrices + predicted * config.hidden_size * config.vocab_size)
    attention = pairs * layers * heads * head_dim
    return 3 * products + (FORWARD + BACKWARD) * attention if backward else products + FORWARD * attention


def pairs_of(lengths: Sequence[int], own: Sequence[int] | None = None) -> int:
    """Pairs of a query and a key that it sees, over sequences of these lengths, of whose tokens the last `own` are
    queries; None: all. Of n tokens, n (n + 1) / 2.

    >>> pairs_of([3]), pairs_of([3, 3], [3, 1])
    (6, 9)
    """
    asked = lengths if own is None else own
    return sum(n * (n + 1) // 2 - (n - m) * (n - m + 1) // 2 for n, m in zip(lengths, asked, strict=True))
