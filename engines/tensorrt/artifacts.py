"""What the build leaves in a bundle for the tensorrt engine: `tensorrt.json`, with steps and what plans are tied to."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from loka_serve.engines.base import EngineLimits
from loka_serve.engines.hopper.buckets import Buckets
from loka_serve.engines.tensorrt.runtimes.base import RowProfile, SegmentRuntime
from loka_serve.engines.tensorrt.steps import BATCH, BEAMS, CONTEXT, Stitching
from loka_serve.errors import BundleError, EngineError

ARTIFACTS_FILE = "tensorrt.json"
TIMING_CACHE_FILE = "timing.cache"
PLAN_SUFFIX = ".plan"


@dataclass(frozen=True)
class Artifacts:
    """A stitching, built.

    Attributes:
        runtime, dtype: of the runtime that built it.
        environment: what the plans are tied to.
        limits: rows that the plans hold, as those of a batch.
        plans: file by segment; none where the runtime needs no plans.
        profiles: rows that each segment was built for.
    """

    runtime: str
    dtype: str
    environment: Mapping[str, str]
    limits: EngineLimits
    stitching: Stitching
    plans: Mapping[str, str]
    profiles: Mapping[str, tuple[RowProfile, ...]]

    def save(self, directory: Path) -> None:
        values = {
            "runtime": self.runtime,
            "dtype": self.dtype,
            "environment": dict(self.environment),
            "limits": asdict(self.limits),
            "plans": dict(self.plans),
            "profiles": {name: [astuple(profile) for profile in held] for name, held in self.profiles.items()},
            **self.stitching.to_dict(),
        }
        (directory / ARTIFACTS_FILE).write_text(json.dumps(values, indent=1) + "\n")

    @classmethod
    def load(cls, directory: Path) -> Artifacts:
        """Read what a bundle holds; raises BundleError where that is nothing, or of another form."""
        file = directory / ARTIFACTS_FILE
        if not file.is_file():
            raise BundleError(f"{directory}: holds no {ARTIFACTS_FILE}: build it with --engine tensorrt")
        try:
            values: dict[str, Any] = json.loads(file.read_text())
            return cls(
                runtime=values["runtime"],
                dtype=values["dtype"],
                environment=dict(values["environment"]),
                limits=EngineLimits(**values["limits"]),
                stitching=Stitching.from_dict(values, directory),
                plans={name: Path(plan).name for name, plan in values["plans"].items()},
                profiles={name: tuple(RowProfile(*rows) for rows in held) for name, held in values["profiles"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BundleError(f"{file}: not as the build writes it: {error!r}: build the bundle again") from error

    def check(self, runtime: SegmentRuntime, limits: EngineLimits) -> None:
        """Raises EngineError where the plans are of another GPU or version, or do not hold batches of these limits."""
        found = runtime.environment()
        if found != dict(self.environment):
            differing = sorted(
                key for key in {*found, *self.environment} if found.get(key) != self.environment.get(key)
            )
            details = "; ".join(f"{key} {self.environment.get(key)} there, {found.get(key)} here" for key in differing)
            raise EngineError(
                f"the bundle's {self.runtime} plans are of another GPU or version ({details}): build the bundle on "
                "this machine, with its versions"
            )
        if self.plans:
            for name in ("batch", "beam", "context"):
                wanted, held = getattr(limits, name), getattr(self.limits, name)
                if wanted > held:
                    raise EngineError(f"limits.{name} {wanted}: the bundle's plans were built for at most {held}")


def build_artifacts(
    directory: Path,
    stitching: Stitching,
    runtime: SegmentRuntime,
    buckets: Buckets,
    progress: Callable[[int], object] = lambda done: None,
) -> Artifacts:
    """Build every segment, write plans and timing cache into `directory`, and `tensorrt.json` at last.

    Raises:
        EngineError: names the segment that the runtime does not build.
    """
    limits = EngineLimits(buckets.batches[-1], buckets.beams[-1], buckets.contexts[-1], len(_heads(stitching)))
    cache, plans, profiles = b"", {}, {}
    for segment in stitching.segments:
        profiles[segment.name] = tuple(row_profiles(buckets, stitching.rows_of(segment.name)))
        built = runtime.build(segment, profiles[segment.name], cache)
        cache = built.cache or cache
        if built.plan:
            plans[segment.name] = f"segment-{segment.name}{PLAN_SUFFIX}"
            (directory / plans[segment.name]).write_bytes(built.plan)
        progress(1)
    if cache:
        (directory / TIMING_CACHE_FILE).write_bytes(cache)
    artifacts = Artifacts(runtime.name, runtime.dtype, runtime.environment(), limits, stitching, plans, profiles)
    artifacts.save(directory)
    return artifacts


def row_profiles(buckets: Buckets, dimensions: set[str]) -> list[RowProfile]:
    """Profiles that together hold 1 row to the most that any bucket has, each best at its largest.

    A bucket of less than twice the rows of the one below shares its profile: plans stay small and build in time.

    Args:
        dimensions: of the graph, which are a segment's rows.
    """
    rows = set()
    for bucket in buckets.all():
        sizes = {
            BATCH: bucket.batch,
            BEAMS: bucket.batch * bucket.beam,
            CONTEXT: bucket.batch * (1 + bucket.context),
        }
        rows |= {sizes[dimension] for dimension in dimensions}
    kept: list[int] = []
    for count in sorted(rows, reverse=True):
        if not kept or 2 * count <= kept[-1]:
            kept.append(count)
    kept.reverse()
    starts = [1, *(count + 1 for count in kept[:-1])]
    return [RowProfile(start, most, most) for start, most in zip(starts, kept, strict=True)]


def _heads(stitching: Stitching) -> Sequence[str]:
    return [step.inputs[0] for step in stitching.steps if getattr(step, "operation", "") == "LevelSelect"]
