"""A small random Llama with a tokenizer, as transformers lays it out, and an engine factory over it."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Tests run side by side: threads of one that wait for a core hold up all others of their team. Read when torch loads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Else each process that compiles C++ first compiles a program for each kind of vector, to see which run here.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
# Many containers keep Python from writing what it has compiled: each process that a test starts would compile this
# package anew, most of a second, and each worker rewrite the assertions of all tests in every run.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest
import torch
from hypothesis import HealthCheck, settings
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from strata import LLM

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

sys.dont_write_bytecode = False  # in this process, which has read the variable already

# A shell's job in the background ignores interrupts, and so would every command that a test starts and interrupts.
# Only the main thread may change that; where it does not run the tests, nothing is changed.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)


# How long an example takes, and how soon one is made, says nothing where other tests have the cores.
settings.register_profile("strata", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("strata")


# Leaves what is there out of all later searches for garbage. An engine does so too, and at its end all would be
# searched again: that is left out of tests.
_freeze = gc.freeze
gc.freeze = gc.unfreeze = lambda: None
_MODULES = pytest.StashKey[int]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """What tests import and are made of is no garbage: every search through it takes most of a second."""
    _leave_out_imports(session.config)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """The same of what a test was the first to import: transformers and SymPy are another tenth of a second."""
    yield
    if len(sys.modules) > item.config.stash[_MODULES] + 100:
        _leave_out_imports(item.config)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Tests that are coroutines run in a loop of their own: that of the fixture `loop_factory`, if there is one."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    values = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    with asyncio.Runner(loop_factory=pyfuncitem.funcargs.get("loop_factory")) as runner:
        runner.run(asyncio.wait_for(pyfuncitem.obj(**values), 240))
    return True


def _leave_out_imports(config: pytest.Config) -> None:
    config.stash[_MODULES] = len(sys.modules)
    gc.collect()
    _freeze()


TEXT = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen jugs", "größer, 東京, naïve 🙂"] * 3
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _tokenizer() -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast  # slow to import, and most tests do without

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=TEMPLATE)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")  # with the lowest versions there is none
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tokenizer = _tokenizer()
    config = LlamaConfig(
        vocab_size=307,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        eos_token_id=0,
        bos_token_id=None,
        tie_word_embeddings=False,
        initializer_range=0.25,
    )
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def broken(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, but for the embedding of "z", which is NaN."""
    path = tmp_path_factory.mktemp("broken")
    for file in folder.iterdir():
        path.joinpath(file.name).write_bytes(file.read_bytes())
    weights = load_file(path / "model.safetensors")
    ids = Tokenizer.from_file(str(path / "tokenizer.json")).encode("z").ids
    weights["model.embed_tokens.weight"][ids] = torch.nan
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="session")
def reference(folder: Path) -> LlamaForCausalLM:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


@pytest.fixture(scope="session")
def engine(folder: Path) -> Callable[..., LLM]:
    """An LLM over the model; equal options share one, since every request leaves it as it was."""
    made: dict[str, LLM] = {}

    def make(**options: Any) -> LLM:
        key = repr(sorted(options.items()))
        if key not in made:
            made[key] = LLM(folder, device="cpu", **{"num_pages": 200, "seed": 0, **options})
        return made[key]

    return make
