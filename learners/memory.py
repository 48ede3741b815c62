"""What a learner rank holds in memory, part by part, from the recipe and the model's shapes alone. Pure; no torch.

Parts are of two kinds. What is *certain* is there whatever the batch: parameters, gradients, moments, copies of them.
What is *estimated* depends on the batch or on the allocator: activations, logits, a process's libraries. Only what is
certain may refuse a run. With P parameters of which F are trained, on R ranks, in bytes a rank:

    weights 4 P / R     gradients 4 F / R     AdamW 8 F / R     reference 4 F / R     each version kept s F / R

and on rank 0 the snapshot that a checkpoint is written from, 12 F: of trained weights and of moments. s is the size of
what is served, and F of an adapter the elements of A and B. Of a micro-batch of N tokens, of which M pass through the
model (less than N where prompts are shared), each layer keeps for the backward pass

    float32:   4 (M (6 h + 3 a + 4 i) + N 2 a)     bfloat16:   M (26 h + 6 a + 8 i) + N 4 a       + 2 P' in all

h, i: hidden and intermediate size; a: heads x head_dim; P': parameters of the layers' matrices, whose copies in
bfloat16 the graph holds. That is: two norms, their inputs in float32 and what they give once for each product that
casts it; what attention takes and gives, keys and values once for every sequence and every head (on a CPU, for fewer
heads where the model has fewer); four tensors of a gated MLP. `docs/memory.md` has it against what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.recipe import Recipe
from asyncrl.learners.shapes import Shapes

LOGITS = 430_000_000
"""Logits that may exist at once: 1.6 GiB in float32. A pass keeps so many for its backward pass, since what is computed
again costs a fourth product of tokens, width and vocabulary beside the three that there are anyway."""

PLAIN = 1 << 24
"""Logits up to which a pass in float32 takes the plain way, four tensors like them: 256 MiB. By blocks there is one, in
no more time; but where a vocabulary is small there is nothing to save."""

BLOCK = 1 << 22
"""Logits of one block, 16 MiB, which fit into a cache: products for 4,096 tokens are 1,024 wide."""

PROCESS = 400 << 20
"""Bytes of a process in which torch and transformers are loaded, and which has computed something."""

SIZE = {"float32": 4, "bfloat16": 2}
"""Bytes of an element, by `model.dtype`."""

SHARED = "shared memory"
"""Where images lie: what parts in it take is of the host's memory too."""

PROMPT = 1024
"""Tokens that a prompt is taken to have where `model.max_length` does not say how long a row gets."""


@dataclass(frozen=True, slots=True)
class Part:
    """Something that takes memory: `most` bytes, or as few as `least` (None: the same). certain: nothing is estimated.
    count: so many alike on this host. on_gpu: there, where the process has a GPU; apart: each of them on its own; gpu:
    on that one, by its number on this host. keys: of the recipe, by which it becomes smaller."""

    where: str
    what: str
    most: int
    certain: bool
    keys: tuple[str, ...] = ()
    on_gpu: bool = False
    count: int = 1
    apart: bool = False
    least: int | None = None
    gpu: int | None = None

    def span(self, count: int | None = None) -> tuple[int, int]:
        """Least and most of so many of them, all by default."""
        times = self.count if count is None else count
        return times * (self.most if self.least is None else self.least), times * self.most


@dataclass(frozen=True, slots=True)
class Pass:
    """The largest micro-batch. tokens: N. If all prompts are as long as rows leave room for and are shared in full,
    computed: M, and predicted: tokens that reach the head, those of answers. N is the most of either."""

    tokens: int
    computed: int
    predicted: int


def row_tokens(recipe: Recipe, shapes: Shapes) -> int:
    """Tokens of the longest row: what the recipe bounds it to, else an answer after a prompt of PROMPT tokens."""
    guess = recipe.model.max_length or PROMPT + recipe.collector.sampling.max_tokens
    return guess if shapes.longest is None else min(guess, shapes.longest)


def largest_pass(recipe: Recipe, shapes: Shapes) -> Pass:
    """A micro-batch is filled up to the budget with the rows of a rank's groups; a row longer than that goes alone, and
    so does each where attention does not pack."""
    row, size = row_tokens(recipe, shapes), recipe.collector.group_size
    answer = min(recipe.collector.sampling.max_tokens, row)
    if recipe.model.attn_implementation in ("eager", "flash_attention_2"):
        return Pass(row, row, answer)
    groups = -(-recipe.learner.groups_per_step // (recipe.learner.updates_per_step * recipe.learner.ranks))
    tokens = min(max(recipe.learner.max_tokens_per_microbatch, row), groups * size * row)
    computed = max(1, tokens * (row - answer + size * answer) // (size * row))
    return Pass(tokens, computed, max(1, tokens * answer // row))


def activation_bytes(shapes: Shapes, dtype: str, tokens: int, computed: int, *, again: bool = False) -> int:
    """What the layers of a micro-batch keep for its backward pass, and the gradients of one of them. again: with
    `learner.gradient_checkpointing`, only their inputs, and one layer in full."""
    layer = layer_bytes(shapes, dtype, tokens, computed)
    copies = 0 if dtype == "float32" else 2 * shapes.matrices
    if again:
        return shapes.layers * 4 * computed * shapes.hidden + 2 * layer + copies // shapes.layers
    return (shapes.layers + 1) * layer + copies


def layer_bytes(shapes: Shapes, dtype: str, tokens: int, computed: int) -> int:
    """What one layer computes of them, and would keep."""
    h, i, a = shapes.hidden, shapes.intermediate, shapes.heads * shapes.head_dim
    if dtype == "float32":
        return 4 * (computed * (6 * h + 3 * a + 4 * i) + tokens * 2 * a)
    return computed * (26 * h + 6 * a + 8 * i) + tokens * 4 * a


def logits_bytes(shapes: Shapes, dtype: str, tokens: int) -> int:
    """What log-probs take (`predictions.py`): four tensors like the logits on the plain way; else those that are kept,
    two blocks, hidden states in float32 and their gradient, and the gradient of the head's matrix."""
    logits = tokens * shapes.vocabulary
    if dtype == "float32" and logits <= PLAIN:
        return 4 * 4 * logits
    head = shapes.vocabulary * shapes.hidden
    return 4 * (min(logits, LOGITS) + 2 * BLOCK + 2 * tokens * shapes.hidden + head)


def rank_parts(recipe: Recipe, shapes: Shapes) -> list[Part]:
    """Of a learner's ranks, all of which are on this host. Raises nothing; shapes are taken as they are."""
    ranks, dtype, lora = recipe.learner.ranks, recipe.model.dtype, recipe.model.lora
    where = "learner" if ranks == 1 else "each rank"
    everything = shapes.parameters
    trained = everything if lora is None else shapes.adapter(lora.r, lora.target_modules)
    share = -(-trained // ranks)
    smaller = ("model.path",) if lora is not None else ("model.lora",)
    again, offload = recipe.learner.gradient_checkpointing, recipe.learner.cpu_offload

    def part(what: str, most: int, keys: tuple[str, ...], *, on_gpu: bool = True, least: int | None = None) -> Part:
        return Part(where, what, most, least is None, keys, on_gpu, count=ranks, apart=True, least=least)

    held = everything + (trained if lora is not None else 0)
    parts = [
        part("weights, float32", 4 * -(-held // ranks), ("model.path",), on_gpu=not offload),
        part("gradients", 4 * share, smaller, on_gpu=not offload),
        part("AdamW's moments", 8 * share, smaller, on_gpu=not offload),
    ]
    if recipe.objective.beta and lora is None:
        parts.append(part("reference", 4 * share, ("objective.beta", "model.lora"), on_gpu=False))
    if recipe.objective.proximal == "behaviour-version":
        version = share * (4 if lora is not None else SIZE[dtype])
        keys = ("objective.proximal", "buffer.max_trajectory_age", *smaller)
        parts.append(part("newest version, kept", version, keys, on_gpu=False))
        older = version * recipe.buffer.max_trajectory_age  # whole, or as small as differences get
        parts.append(part("older versions", older, keys, on_gpu=False, least=0))
    if ranks > 1 or offload:
        # One rank has no copy unless weights really come and go, which they do for a GPU only.
        copied = {"certain": True} if ranks > 1 else {"certain": False, "least": 0}
        parts.append(Part("rank 0" if ranks > 1 else where, "whole weights", 4 * held, keys=("model.path",), **copied))
        gathered = 4 * (shapes.vocabulary * shapes.hidden + 2 * everything // shapes.layers)
        parts.append(part("gathered layers", gathered, ("model.path",), least=0))
    if recipe.learner.checkpoint.async_save:
        rank_0 = "learner" if ranks == 1 else "rank 0"  # it writes for all
        sooner = ("learner.checkpoint.async_save", *smaller)
        parts.append(Part(rank_0, "a checkpoint's snapshot", 12 * trained, True, sooner))
    largest = largest_pass(recipe, shapes)
    budget = ("learner.max_tokens_per_microbatch",)
    fewer_kept = budget if again else (*budget, "learner.gradient_checkpointing")
    tokens, computed = largest.tokens, largest.computed
    activations, shared = (
        activation_bytes(shapes, dtype, tokens, through, again=again) for through in (tokens, computed)
    )
    logits, fewer = (logits_bytes(shapes, dtype, through) for through in (tokens, largest.predicted))
    parts.append(part(f"activations of {tokens} tokens", activations, fewer_kept, least=shared))
    parts.append(part("their logits", logits, budget, least=fewer))
    parts.append(part("process", PROCESS, (), on_gpu=False, least=PROCESS))
    return parts


def image_parts(recipe: Recipe, shapes: Shapes) -> list[Part]:
    """Versions on their way to the engines (`weights/image.py`): the newest and the one that is written next."""
    lora = recipe.model.lora
    if lora is not None and recipe.weights.lora == "adapter":
        nbytes = 4 * shapes.adapter(lora.r, lora.target_modules)
    else:
        nbytes = SIZE[recipe.model.dtype] * shapes.parameters
    several = 2 if recipe.run.max_steps >= recipe.weights.publish_every else 1
    keys = ("model.dtype", "model.path") if lora is None else ("weights.lora", "model.dtype", "model.path")
    return [Part(SHARED, "versions of the weights", nbytes, True, keys, count=several)]
