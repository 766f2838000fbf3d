"""Half an hour at full load: memory, throughput and errors."""

from __future__ import annotations

import threading
import time

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.reliability.case import Case, Figure, Setting
from benchmarks.reliability.servers import groceries_requests, groceries_server, scripted_requests, scripted_server
from loadtest.closed_loop import run_closed
from loadtest.samples import Samples

CLIENTS = 6
SECONDS, WARMUP_SECONDS, SAMPLE_SECONDS = 1800.0, 120.0, 5.0
QUICK_SECONDS, QUICK_WARMUP_SECONDS, QUICK_SAMPLE_SECONDS = 6.0, 2.0, 0.25
PARTS = 30  # of the soak, each with a throughput; single ones may be disturbed by what else the machine does
MOST_RSS_SLOPE, MOST_DRIFT = 1.0, 2.0
QUICK_RSS_SLOPE, QUICK_DRIFT = 60.0, 50.0  # a few seconds tell a broken measurement, not a leak
MEBIBYTE = 1 << 20


class Watch:
    """Memory and CPU time of a server's processes, read in a thread every few seconds."""

    def __init__(self, pid: int, seconds: float) -> None:
        self._root, self._seconds = psutil.Process(pid), seconds
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._read_on, daemon=True)
        self.rows: list[tuple[float, float, float]] = []
        self._thread.start()

    def stop(self) -> NDArray[np.float64]:
        """[n, 3]: `time.monotonic()`, MiB resident and CPU seconds of all processes together."""
        self._end.set()
        self._thread.join()
        return np.array(self.rows)

    def _read_on(self) -> None:
        while not self._end.wait(self._seconds):
            processes = [self._root, *self._root.children(recursive=True)]
            resident = sum(process.memory_info().rss for process in processes)
            times = [process.cpu_times() for process in processes]
            self.rows.append((time.monotonic(), resident / MEBIBYTE, sum(spent.user + spent.system for spent in times)))


def slope_per_minute(times: NDArray[np.float64], values: NDArray[np.float64]) -> float:
    """Theil-Sen: the median slope between all pairs of points, which single jumps do not move."""
    first, second = np.triu_indices(len(times), 1)
    return 60.0 * float(np.median((values[second] - values[first]) / (times[second] - times[first])))


def drift_percent(per_part: NDArray[np.float64]) -> float:
    """How far the median of the last third is from that of the first third, in percent."""
    third = len(per_part) // 3
    begin, end = np.median(per_part[:third]), np.median(per_part[-third:])
    return 100.0 * abs(float(end / begin) - 1.0)


def figures(samples: Samples, watched: NDArray[np.float64], most_slope: float, most_drift: float) -> list[Figure]:
    """What the soak found, of the time after its warm-up."""
    load, counted = samples.load, samples.rows[samples.rows["scheduled"] >= 0]
    watched = watched[(watched[:, 0] >= samples.started) & (watched[:, 0] <= samples.started + load.seconds)]
    times, resident, spent = watched.T
    edges = np.linspace(0.0, load.seconds, PARTS + 1)
    # A request counts where it was answered; those that the last clients had under way at the end are left out.
    per_part, _ = np.histogram(counted["done"][counted["right"]], edges)
    answered, _ = np.histogram(samples.started + counted["done"][counted["right"]], times)
    per_cpu_second = answered / np.maximum(np.diff(spent), 1e-3)
    return [
        Figure("minutes", load.seconds / 60),
        Figure("requests", len(counted)),
        Figure("errors", int((~counted["right"]).sum()), most=0),
        Figure("RSS slope", slope_per_minute(times, resident), "MiB/min", most=most_slope),
        Figure("RSS at the end", float(resident[-1]), "MiB"),
        Figure("throughput", float(per_part.sum() / load.seconds), "req/s"),
        Figure("throughput drift", drift_percent(per_part.astype(np.float64)), "%", most=most_drift),
        Figure("drift of requests a CPU second", drift_percent(per_cpu_second), "%"),
    ]


def soak(setting: Setting) -> list[Figure]:
    """The groceries' model under as many clients as keep it busy; quick: the scripted engine for some seconds."""
    if setting.quick:
        with scripted_server(setting, engine=["--seconds", "0.01"]) as server:
            watch = Watch(server.process.pid, QUICK_SAMPLE_SECONDS)
            samples = run_closed(server.url, scripted_requests(), CLIENTS, QUICK_SECONDS, QUICK_WARMUP_SECONDS)
            return figures(samples, watch.stop(), QUICK_RSS_SLOPE, QUICK_DRIFT)
    requests = groceries_requests(setting.work_dir)
    with groceries_server(setting) as server:
        watch = Watch(server.process.pid, SAMPLE_SECONDS)
        samples = run_closed(server.url, requests, CLIENTS, SECONDS, WARMUP_SECONDS)
        return figures(samples, watch.stop(), MOST_RSS_SLOPE, MOST_DRIFT)


CASES = (Case("soak", "30 minutes at full load", soak, slow=True),)
