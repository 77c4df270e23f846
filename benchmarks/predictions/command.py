"""`strata bench predictions`: predicted steps held against measured ones."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Annotated

import typer

from strata.bench.result import provenance, short_dtype
from strata.bench.run import Setup, device_name, engine
from strata.cli.bench.options import Report, SetupOptions
from strata.cli.groups import OptionGroup, Values, grouped
from strata.text.counted import counted

if TYPE_CHECKING:
    from benchmarks.predictions.errors import StepError

_MAX_LENGTH = 20_000
_UNKNOWN = "no calls were measured on this device, so predictions are analytic: what its peaks allow, and no host time"


@grouped
def predictions(
    models: Annotated[str, typer.Option(help="Shapes or models, several between commas.")] = "0.6B,8B,1B,30B-A3B",
    *,
    engines: Annotated[Values, OptionGroup(SetupOptions, "load_format dtype device")],
    repeat: Annotated[int, typer.Option(min=1, help="How often each case is measured.")] = 3,
    to: Report,
) -> None:
    """Measure steps of decodes, prompts and both, and say how far the cost model's predictions are from them.

    Every line of the results has the step, what it took and what was predicted. The cases' sizes are none at which
    calls were measured for the predictions.

    Example: strata bench predictions --models 0.6B,8B --save predictions.jsonl
    """
    from benchmarks.predictions.cases import fitting, predicted_and_measured
    from benchmarks.predictions.errors import ErrorSummary
    from strata.bench.explain.predicted_steps import predicted
    from strata.plan.meta_model import find_config

    everything: list[StepError] = []
    setups = [Setup(model, **engines) for model in models.split(",")]
    lengths = [find_config(setup.source).longest for setup in setups]  # a name that is none is told before any runs
    for setup, longest in zip(setups, lengths, strict=True):
        given = setup.llm_options() | {"max_model_len": min(_MAX_LENGTH, longest)}
        llm = engine(given)
        times, sources = predicted(llm, setup)
        cases = fitting(llm, given, times)
        known = "" if times.predictor.knows_calls else f"; {_UNKNOWN}"
        typer.echo(f"{setup.model:8} {counted(len(cases), 'case')}, each run {repeat + 1} times{known}", err=to.as_json)
        if not to.as_json:
            for source in (*sources, *times.sources):
                typer.echo(f"{setup.model:8} predicted from {source}")
        for errors in predicted_and_measured(llm, cases, times, repeat):
            everything += errors
            for one in errors:
                line = {"test": "predictions", "model": setup.model, "dtype": short_dtype(setup.dtype)} | one.values()
                line |= {"device": device_name(llm)} | provenance()
                to.report(line, _text(setup.model, one))
        del llm
        gc.collect()  # a GPU's memory holds one engine
    if to.as_json:
        return
    for kind in ("decode", "prompt", "mixed", None):
        of_kind = [one.error for one in everything if kind in (None, one.kind)]
        if of_kind:
            typer.echo(f"{kind or 'all':8} {ErrorSummary.of(of_kind).text()}")


def _text(model: str, one: StepError) -> str:
    step = f"{counted(one.sequences, 'sequence')}, {counted(one.tokens, 'token')} over {one.keys:,}"
    times = f"{one.measured * 1e3:9.3f} ms, predicted {one.predicted * 1e3:9.3f} ({one.error:+.1%}, {one.origin})"
    return f"{model:8} {one.kind:7} {step:42} {times}"
