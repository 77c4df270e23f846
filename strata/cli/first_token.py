"""A process that starts an engine, generates one token and says so: what the start-up benchmark waits for.

Run as `python -m strata.cli.first_token OPTIONS`, with the keyword arguments of LLM as JSON. Prints one JSON object,
{"device": the device's name}, as soon as the token is there.
"""

from __future__ import annotations

import json
import sys

from strata.cli.ending import ending


def main() -> None:
    """Generate the token that `sys.argv` asks for."""
    from strata import SamplingParams
    from strata.bench.run import device_name, engine

    llm = engine(json.loads(sys.argv[1]))
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    llm.generate([{"prompt_token_ids": [1] * 16}], params, use_tqdm=False)
    print(json.dumps({"device": device_name(llm)}), flush=True)


if __name__ == "__main__":
    with ending():
        main()
