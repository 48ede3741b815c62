"""An engine that generates, in a process that waits to be killed: `python -m tests.vllm.orphan_child FOLDER`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from .models import make_engine, make_model, next_weights, request, staged


async def main(folder: Path) -> None:
    model = make_model("qwen3", seed=1)
    model.save_pretrained(folder)
    engine = make_engine(folder)
    await engine.start()
    await engine.stage(staged(model, next_weights(engine)))
    await engine.activate()
    sys.stdout.write("serving\n")
    sys.stdout.flush()
    while True:
        await engine.generate(request("a", max_tokens=1500))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
