"""What a start leaves alone, because it takes long."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
from strata import LLM, SamplingParams
llm = LLM(device="cpu", num_pages=20, max_num_seqs=2, max_model_len=64, verbose=False)
llm.generate("1 + 1", SamplingParams(max_tokens=2), use_tqdm=False)
print(sorted({"sympy", "torch._dynamo", "torch._inductor", "transformers"} & sys.modules.keys()))
"""


def test_a_start_imports_no_compiler_and_no_symbolic_algebra() -> None:
    """Half a second and more, which weights on the meta device once cost."""
    told = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"
