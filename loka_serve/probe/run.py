"""Site by site: measure every recipe, choose one, hand over the quantized weight and let the float one go."""

from __future__ import annotations

from collections.abc import Callable

from loka_serve.errors import QuantizationError
from loka_serve.models.layers import GroupedLinear, Linear, SparseMoE
from loka_serve.models.onerec_v2 import OneRecV2
from loka_serve.probe.choose import choose, fixed
from loka_serve.probe.collect import SiteInputs
from loka_serve.probe.measure import RecipeError, Routing, measure_site
from loka_serve.probe.report import GroupReport, SiteReport
from loka_serve.probe.sites import SiteKind, site_kind
from loka_serve.probe.statistics import TensorStatistics
from loka_serve.quantization.recipes import RECIPES, State

AUTO = "auto"


def probe_and_quantize(
    model: OneRecV2,
    inputs: dict[str, SiteInputs],
    recipe: str,
    store: Callable[[str, State], None],
    progress: Callable[[int], object] = lambda done: None,
) -> list[SiteReport]:
    """Choose and quantize every site; afterwards the model has no linear weights left.

    Args:
        inputs: from `collect`; emptied on the way.
        recipe: `auto`, or one recipe for all linear and grouped sites.
        store: takes a site's name and its quantized weight.
        progress: called with the number of sites just done.

    Raises:
        QuantizationError: names the site.
    """
    reports = []
    for name, module in model.sites().items():
        try:
            report, state = _one_site(model, name, module, inputs.pop(name), recipe)
        except QuantizationError as error:
            raise QuantizationError(f"site {name}: {error}") from error
        store(name, state)
        module.weight, module.method = None, None
        reports.append(report)
        progress(1)
    return reports


def _one_site(
    model: OneRecV2, name: str, module: Linear | GroupedLinear, inputs: SiteInputs, recipe: str
) -> tuple[SiteReport, State]:
    assert module.weight is not None
    weight = module.weight.data
    kind = site_kind(name, module)
    seen = inputs.total().summary()
    errors = _errors(model, name, kind, inputs, seen.absmax, module)
    choice = choose(kind, errors) if recipe == AUTO else fixed(kind, recipe, errors)
    chosen = RECIPES[choice.recipe]
    state = chosen.quantize_weight(weight, seen.absmax if chosen.needs_input_amax else None)
    statistics = TensorStatistics()
    for matrix in weight if weight.ndim == 3 else weight[None]:
        statistics.update(matrix)
    groups = inputs.group_statistics.groups if inputs.group_statistics else []
    report = SiteReport(
        name=name,
        kind=kind,
        shape=tuple(weight.shape),
        inputs=seen,
        weight=statistics.summary(),
        groups=tuple(GroupReport(group.rows, group.absmax) for group in groups),
        errors=errors,
        choice=choice,
        weight_bytes=sum(tensor.nbytes for tensor in state.values()),
    )
    return report, state


def _errors(
    model: OneRecV2,
    name: str,
    kind: SiteKind,
    inputs: SiteInputs,
    input_amax: float,
    module: Linear | GroupedLinear,
) -> dict[str, RecipeError]:
    rows, group_offsets = inputs.sample()
    if not len(rows):
        return {}
    assert module.weight is not None
    return measure_site(
        module.weight.data,
        rows,
        group_offsets,
        input_amax,
        list(RECIPES),  # whatever was asked for: the report and the gate say what `auto` would do
        is_head=kind == "head",
        routing=_routing(model, name) if kind == "router" else None,
    )


def _routing(model: OneRecV2, router: str) -> Routing:
    moe = model.get_submodule(router.rpartition(".")[0])
    assert isinstance(moe, SparseMoE)
    return Routing(moe.selection_bias.data, moe.experts_per_token)
