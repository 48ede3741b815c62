"""Log-probs by blocks of the vocabulary on several ranks: `python sharded_head.py RANK SIZE FOLDER`.

FOLDER holds model/ and meeting/, and gets from rank 0 `gradients.pt`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from asyncrl.learners import predictions
from asyncrl.learners.forward import token_predictions
from asyncrl.learners.model import load_model
from asyncrl.learners.parallel import Ranks, Sharded, in_folder

LIMIT_S = 120.0
PASSES = 4


def gradients(ranks: Ranks, folder: Path) -> dict[str, torch.Tensor]:
    """Of a sum of log-probs and entropies over PASSES passes, dealt out to the ranks."""
    model = load_model(folder / "model", "float32", "auto")
    ranks.shard(model)
    for number in range(ranks.rank, PASSES, ranks.size):
        ids = torch.randint(0, 24, (9,), generator=torch.Generator().manual_seed(number))
        found = token_predictions(
            model, ids, torch.tensor([0, 4, 9]), temperature=0.7, share_prefixes=True, spread=True
        )
        assert found.entropy is not None
        torch.autograd.backward((found.logprobs * torch.linspace(-1, 1, 9) + 0.3 * found.entropy).sum())
    return {name: ranks.whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def by_blocks() -> None:
    """From now on no logit is kept, and a block has at most 30."""
    predictions.PLAIN, predictions.LOGITS, predictions.BLOCK = 0, 0, 30


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    by_blocks()
    ranks = Sharded(rank, size, meeting=in_folder(folder / "meeting", rank, size), step_s=LIMIT_S, silence_s=LIMIT_S)
    found = gradients(ranks, folder)
    if rank == 0:
        torch.save(found, folder / "gradients.pt")
    ranks.close()


if __name__ == "__main__":
    main()
