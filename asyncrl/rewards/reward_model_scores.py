"""What a reward model gives conversations: batches of similar length, padded, none of which changes another's number.

The number is that of the last real token. transformers looks for it as the last token that is not the padding token;
where that is also a real token, such as the end of an answer, it looks one too early. So each batch is padded with a
token that ends none of its conversations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging as transformers_logging

from asyncrl.config.rewards import RewardModel
from asyncrl.rewards.conversation import Messages
from asyncrl.rewards.parts import BAD_ROW
from asyncrl.rewards.reward_model_process import Number
from asyncrl.rewards.worker import last_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TOO_LONG = "reward_model_too_long"
MEMORY = "reward_model_memory"


class RewardScores:
    """The model of a recipe's part. Raises, when built, what loading raises, and ValueError for what is no reward
    model."""

    def __init__(self, part: RewardModel) -> None:
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self._part = part
        self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            part.path, revision=part.revision, trust_remote_code=False
        )
        if self._tokenizer.chat_template is None:
            raise ValueError(f"{part.path} has no chat template, by which conversations would be rendered")
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            part.path,
            revision=part.revision,
            dtype=getattr(torch, part.dtype),
            output_loading_info=True,
            trust_remote_code=False,  # not said, and transformers asks whoever is at the terminal
        )
        if missing := sorted(loading["missing_keys"]):  # a language model: its head would be drawn at random
            raise ValueError(f"{part.path} is no reward model: it has no weights {', '.join(missing[:3])}")
        if model.config.num_labels != 1:
            raise ValueError(f"{part.path} has {model.config.num_labels} labels; a reward model has one")
        model.config.use_cache = False  # else the keys and values of every layer are kept, for nobody
        if getattr(model, "_hf_peft_config_loaded", False):  # without its head: what it was trained to say is in that
            raise ValueError(
                f"{part.path} is an adapter, whose own head transformers leaves out. Merge it into its base model "
                "(peft: merge_and_unload), save that, and give its folder"
            )
        self._longest, self._longest_by = part.max_length, "max_length"
        if (most := positions(model.config)) is not None and most < self._longest:
            self._longest, self._longest_by = most, "the positions of the model,"
        self._model: PreTrainedModel = model.to(part.device).eval()

    def of(self, conversations: Sequence[Messages]) -> Iterator[list[Number]]:
        """The numbers of all, batch by batch as they are done, by index."""
        refused: list[Number] = []
        found: list[tuple[int, list[int]]] = []
        for index, conversation in enumerate(conversations):
            try:
                text = self._tokenizer.apply_chat_template(conversation, tokenize=False)
                token_ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            except Exception as error:  # the template is a program of the model's, and refuses what it likes
                refused.append(Number(index, failure=BAD_ROW, detail=f"the chat template: {last_line(error)}"))
                continue
            if not token_ids:
                refused.append(Number(index, failure=BAD_ROW, detail="the chat template makes nothing of it"))
            elif len(token_ids) > self._longest:
                detail = f"{len(token_ids)} tokens are more than {self._longest_by} {self._longest}"
                refused.append(Number(index, failure=TOO_LONG, detail=detail))
            else:
                found.append((index, token_ids))
        if refused:
            yield refused
        for batch in batches(found, max_tokens=self._part.max_tokens_per_batch):
            yield self._numbers(batch)

    def _numbers(self, batch: Sequence[tuple[int, list[int]]]) -> list[Number]:
        """Of one batch; by halves where it is too much for the memory."""
        try:
            values = self._values([token_ids for _, token_ids in batch])
        except torch.OutOfMemoryError as error:
            detail = last_line(error)
        else:
            return [Number(index, value) for (index, _), value in zip(batch, values, strict=True)]
        # Only here is the exception gone, and with its frames the tensors that filled the memory.
        if self._part.device != "cpu":
            torch.cuda.empty_cache()
        if len(batch) == 1:
            return [Number(batch[0][0], failure=MEMORY, detail=detail)]
        half = len(batch) // 2
        return self._numbers(batch[:half]) + self._numbers(batch[half:])

    @torch.inference_mode()
    def _values(self, sequences: Sequence[list[int]]) -> list[float]:
        pad = padding(sequences)
        longest = max(map(len, sequences))
        device = self._model.device
        token_ids = torch.tensor([s + [pad] * (longest - len(s)) for s in sequences], device=device)
        mask = torch.tensor([[1] * len(s) + [0] * (longest - len(s)) for s in sequences], device=device)
        self._model.config.get_text_config().pad_token_id = pad
        output: Any = self._model(input_ids=token_ids, attention_mask=mask)
        values: list[float] = output.logits.float().squeeze(-1).tolist()
        return values


def positions(config: Any) -> int | None:
    """The tokens that a model was made for. None: it does not say, or they are stretched (YaRN and the like), where
    models do not agree on what they say."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    if any(kind.get("rope_type", "default") != "default" for kind in kinds):
        return None
    most = getattr(text, "max_position_embeddings", None)
    return most if isinstance(most, int) and most > 0 else None


def batches(
    sequences: Sequence[tuple[int, list[int]]], *, max_tokens: int
) -> Iterator[Sequence[tuple[int, list[int]]]]:
    """The sequences by length, in batches of at most `max_tokens` with their padding; a longer one is alone."""
    ordered = sorted(sequences, key=lambda pair: len(pair[1]))
    batch: list[tuple[int, list[int]]] = []
    for pair in ordered:
        if batch and (len(batch) + 1) * len(pair[1]) > max_tokens:
            yield batch
            batch = []
        batch.append(pair)
    if batch:
        yield batch


def padding(sequences: Sequence[list[int]]) -> int:
    """A token that ends none of them.

    >>> padding([[5, 0], [7, 2, 1]])
    2
    """
    ends = {sequence[-1] for sequence in sequences}
    return next(token for token in range(len(ends) + 1) if token not in ends)
