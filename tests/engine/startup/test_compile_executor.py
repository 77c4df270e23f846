"""A graph whose pieces torch.compile makes gives the logits of the graph, and an engine with it the same ids."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import fx

from strata import LLM
from strata.engine.engine_config import EngineConfig
from strata.engine.program import program as program_module
from strata.engine.startup import executor as executor_module
from strata.graph.compile import compiled
from strata.graph.walk import operation_counts
from strata.models.config import config_from_dict
from strata.models.families import build
from strata.models.folder import BUILTIN_FOLDER
from tests.dummies import randomize
from tests.engine.program.programs import step_program
from tests.models.batches import packed, random_sequences
from tests.models.sparse_models import SPARSE_CONFIGS

OPTIONS: dict[str, Any] = {"device": "cpu", "num_pages": 20, "max_num_seqs": 2, "max_model_len": 64, "verbose": False}


@torch.no_grad()
def test_logits_are_those_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, rotations and routers are in pieces; experts and attention, with windows too, stay."""
    torch.compiler.reset()
    backends: list[int] = []

    def note(piece: fx.GraphModule, _: object) -> fx.GraphModule:
        backends.append(len(piece.graph.nodes))
        return piece

    monkeypatch.setattr(program_module, "compiled", partial(compiled, backend=note))
    config = config_from_dict(SPARSE_CONFIGS["mixtral-window-tied"] | {"num_hidden_layers": 4})
    model = build(config).requires_grad_(False)
    randomize(model, 0)
    plain, made = (step_program(model, "cpu", False, executor=one).logits for one in ("graph", "compile"))
    batch, rows = packed(random_sequences(config.vocab_size, (7, 4))), torch.tensor([6, 10], dtype=torch.int32)
    torch.testing.assert_close(made.forward(batch, rows), plain.forward(batch, rows), rtol=1e-4, atol=1e-5)
    # In front of the first attention, behind each, behind the experts; behind the last attention and the last experts.
    assert len(backends) == 5, "layers alike are compiled once"
    assert sum(operation_counts(made).values()) > sum(operation_counts(plain).values()), "what is costed is not fused"


def test_an_unknown_executor_is_refused() -> None:
    with pytest.raises(ValueError, match="executor 'jit' is unknown; use graph or compile"):
        EngineConfig("somewhere", executor="jit")


def test_a_cpu_without_a_compiler_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module.shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match=r"needs a C\+\+ compiler on a CPU, and there is no .*: install one"):
        LLM(BUILTIN_FOLDER, executor="compile", **OPTIONS)
