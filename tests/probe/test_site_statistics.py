"""Saving, loading and merging all that is kept of a site; nothing kept holds a row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loka_serve.errors import ProbeError
from loka_serve.probe.site_statistics import SiteStatistics, load_statistics, save_statistics

OFFSETS = torch.tensor([0, 10, 10, 40])


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_sites(seed: int = 0) -> dict[str, SiteStatistics]:
    sites = {
        "plain": SiteStatistics(6),
        "experts": SiteStatistics(4, groups=3),
        "values only": SiteStatistics(6, covariance=False),
        "unseen": SiteStatistics(5),
    }
    sites["plain"].update(gaussian(40, 6, seed=seed))
    sites["experts"].update(gaussian(40, 4, seed=seed), OFFSETS)
    sites["values only"].update(gaussian(40, 6, seed=seed))
    return sites


def states(site: SiteStatistics) -> dict[str, torch.Tensor]:
    return {**site.table.state(), **(site.gaussian.state() if site.gaussian else {})}


def test_a_round_trip_keeps_every_bit(tmp_path: Path) -> None:
    sites = make_sites()
    save_statistics(sites, tmp_path / "probe")
    loaded = load_statistics(tmp_path / "probe")
    assert list(loaded) == list(sites)
    for name, site in sites.items():
        assert (loaded[name].width, loaded[name].is_grouped) == (site.width, site.is_grouped)
        for ours, theirs in zip(states(site).values(), states(loaded[name]).values(), strict=True):
            assert torch.equal(ours, theirs)
    assert loaded["plain"].total().summary() == sites["plain"].total().summary()
    loaded["plain"].update(gaussian(3, 6))  # and goes on
    assert loaded["plain"].total().rows == 43


def test_the_size_of_a_file_does_not_depend_on_the_rows(tmp_path: Path) -> None:
    sizes = []
    for rows in (10, 1000):
        site = SiteStatistics(6)
        site.update(gaussian(rows, 6))
        save_statistics({"a": site}, tmp_path / str(rows))
        sizes.append((tmp_path / f"{rows}.safetensors").stat().st_size)
    assert sizes[0] == sizes[1]


def test_saved_shards_merge_to_the_whole(tmp_path: Path) -> None:
    whole = SiteStatistics(6)
    for seed in range(3):
        part = SiteStatistics(6)
        part.update(gaussian(40, 6, seed=seed))
        whole.update(gaussian(40, 6, seed=seed))
        save_statistics({"a": part}, tmp_path / str(seed))
    merged = SiteStatistics(6)
    for seed in (2, 0, 1):
        merged.merge(load_statistics(tmp_path / str(seed))["a"])
    for ours, theirs in zip(states(whole).values(), states(merged).values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-5)  # float32 products summed in another order


def test_statistics_see_all_rows_and_a_covariance_some() -> None:
    site = SiteStatistics(4)
    rows = gaussian(1500, 4)
    rows[7] = 100.0  # every third row goes into the covariance; this one does not
    site.update(rows)
    assert site.gaussian is not None and site.gaussian.counts.item() == 500
    assert site.total().rows == 1500 and site.total().absmax == 100.0


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (SiteStatistics(7), "1 groups of 7 inputs: expected 1 of 6"),
        (SiteStatistics(6, groups=2), "2 groups of 6"),
        (SiteStatistics(6, covariance=False), "one has covariances"),
    ],
)
def test_other_shapes_do_not_merge(other: SiteStatistics, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SiteStatistics(6).merge(other)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "probe"
    with pytest.raises(ProbeError, match=r"probe\.json: expected loka-probe-statistics 1"):
        load_statistics(path)
    save_statistics(make_sites(), path)
    description, data = tmp_path / "probe.json", tmp_path / "probe.safetensors"
    tensors, text = load_file(data), description.read_text()

    save_file({name: tensor for name, tensor in tensors.items() if name != "plain/values.counts"}, data)
    with pytest.raises(ProbeError, match=r"probe\.safetensors: site plain: counts: expected torch.int64"):
        load_statistics(path)
    save_file(tensors | {"experts/gaussian.mean": torch.zeros(3, 5, dtype=torch.float64)}, data)
    with pytest.raises(ProbeError, match="site experts: squares: expected"):
        load_statistics(path)
    data.write_bytes(b"no tensors")
    with pytest.raises(ProbeError, match=r"probe\.safetensors: not a readable safetensors file"):
        load_statistics(path)
    for content in ("[", json.dumps({"format": "other", "format_version": 1, "sites": {}}), '{"sites": 3}'):
        description.write_text(content)
        with pytest.raises(ProbeError, match=r"probe\.json: expected"):
            load_statistics(path)
    description.write_text(text)
