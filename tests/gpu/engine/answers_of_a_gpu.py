"""One process of several, each with an engine on a GPU of its own: what it answers, and what it takes of the first."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from strata import LLM, SamplingParams


def main() -> None:
    rank = int(os.environ["RANK"])
    llm = LLM(device=f"cuda:{rank}", max_num_seqs=4, num_pages=200)
    asked = SamplingParams(temperature=0, max_tokens=40)
    answers = llm.generate(["12 + 30 =", "The word"], asked, use_tqdm=False)
    ids = [list(answer.outputs[0].token_ids) for answer in answers]
    found = {"ids": ids, "is_there": llm.engine.device.index == rank, "of_first": torch.cuda.memory_allocated(0)}
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
