"""Site by site: measure every recipe and choose one; then hand over the quantized weights and let the float ones go."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from loka_serve.errors import QuantizationError
from loka_serve.models.layers import GroupedLinear, Linear, SparseMoE
from loka_serve.models.onerec_v2 import OneRecV2
from loka_serve.probe.choose import PREFERENCES, choose, fixed
from loka_serve.probe.collect import SiteInputs
from loka_serve.probe.cost import ModelCost
from loka_serve.probe.measure import RecipeError, Routing, measure_site
from loka_serve.probe.report import GroupReport, SiteReport
from loka_serve.probe.sites import SiteKind, site_kind
from loka_serve.probe.statistics import GroupStatistics, Summary, TensorStatistics
from loka_serve.probe.synthesis import PAIRS, synthesize_errors
from loka_serve.quantization.recipes import RECIPES, State

AUTO = "auto"


@dataclass(frozen=True)
class ProbeOptions:
    """How thoroughly to measure, and what to choose from.

    Attributes:
        pairs: synthetic pairs a site; 0 for none, and then `inputs` need no covariance.
        candidates: recipes that the engine runs at a site of that name; None for the usual ones.
    """

    pairs: int = PAIRS
    seed: int = 0
    candidates: Callable[[str], tuple[str, ...]] | None = None


def probe(
    model: OneRecV2,
    inputs: dict[str, SiteInputs],
    recipe: str,
    options: ProbeOptions,
    progress: Callable[[int], object] = lambda done: None,
) -> list[SiteReport]:
    """Measure every recipe at every site, and choose; the model stays as it is.

    Args:
        inputs: from `collect`; emptied on the way.
        recipe: `auto`, or one recipe for all linear and grouped sites.
        progress: called with the number of sites just done.

    Raises:
        QuantizationError: names the site.
    """
    reports = []
    for name, module in model.sites().items():
        try:
            reports.append(_one_site(model, name, module, inputs.pop(name), recipe, options))
        except QuantizationError as error:
            raise QuantizationError(f"site {name}: {error}") from error
        progress(1)
    return reports


def recipes_to_cost(sites: Sequence[SiteReport]) -> dict[str, str]:
    """The recipe whose cost for the whole model is worth knowing: the chosen one, or the first that could have been."""
    return {
        site.name: PREFERENCES[site.kind][0] if site.choice.recipe == "bf16" else site.choice.recipe
        for site in sites
        if site.errors
    }


def with_costs(sites: Sequence[SiteReport], costs: Mapping[str, ModelCost]) -> list[SiteReport]:
    """The reports with what each site costs the model."""
    return [replace(site, cost=costs.get(site.name)) for site in sites]


def quantize(
    model: OneRecV2,
    sites: Sequence[SiteReport],
    store: Callable[[str, State], None],
    progress: Callable[[int], object] = lambda done: None,
) -> None:
    """Quantize every site as chosen; afterwards the model has no linear weights left.

    Args:
        sites: from `probe`, all of the model's.
        store: takes a site's name and its quantized weight.
        progress: called with the number of sites just done.

    Raises:
        QuantizationError: names the site.
    """
    modules = model.sites()
    for site in sites:
        module, chosen = modules[site.name], RECIPES[site.choice.recipe]
        assert module.weight is not None
        try:
            amax = site.inputs.absmax if chosen.needs_input_amax else None
            store(site.name, chosen.quantize_weight(module.weight.data, amax))
        except QuantizationError as error:
            raise QuantizationError(f"site {site.name}: {error}") from error
        module.weight, module.method = None, None
        progress(1)


def _one_site(
    model: OneRecV2,
    name: str,
    module: Linear | GroupedLinear,
    inputs: SiteInputs,
    recipe: str,
    options: ProbeOptions,
) -> SiteReport:
    assert module.weight is not None
    weight = module.weight.data
    kind = site_kind(name, module)
    seen = inputs.total().summary()
    errors = _errors(model, name, kind, inputs, seen.absmax, module)
    candidates = None if options.candidates is None else options.candidates(name)
    chosen = choose(kind, errors, None, candidates) if recipe == AUTO else fixed(kind, recipe, errors, candidates)
    of_weight = GroupStatistics(weight.shape[0] if weight.ndim == 3 else 1)
    for group, matrix in enumerate(weight if weight.ndim == 3 else weight[None]):
        of_weight.update_group(group, matrix)
    synthetic = None
    if inputs.gaussian is not None:
        synthetic = synthesize_errors(weight, inputs.gaussian, seen.absmax, options.pairs, seed=options.seed)
    return SiteReport(
        name=name,
        kind=kind,
        shape=tuple(weight.shape),
        inputs=seen,
        weight=of_weight.total().summary(),
        groups=_groups(inputs, of_weight),
        errors=errors,
        choice=chosen,
        weight_bytes=_bytes(chosen.recipe, tuple(weight.shape)),
        synthetic=synthetic,
    )


def _groups(inputs: SiteInputs, of_weight: GroupStatistics) -> tuple[GroupReport, ...]:
    if inputs.group_statistics is None:
        return ()
    pairs = zip(inputs.group_statistics.groups, of_weight.groups, strict=True)
    return tuple(_group(group, matrix.summary()) for group, matrix in pairs)


def _group(inputs: TensorStatistics, weight: Summary) -> GroupReport:
    seen = inputs.summary()
    return GroupReport(
        rows=seen.rows,
        absmax=seen.absmax,
        p99=seen.p99,
        variance=seen.variance,
        kurtosis=seen.kurtosis,
        weight_absmax=weight.absmax,
        weight_p99=weight.p99,
        weight_variance=weight.variance,
        weight_kurtosis=weight.kurtosis,
    )


def _bytes(recipe: str, shape: tuple[int, ...]) -> int:
    """What the quantized weight takes, scales included."""
    shapes = RECIPES[recipe].state_shapes(shape).values()
    return sum(dtype.itemsize * math.prod(extent) for dtype, extent in shapes)


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
