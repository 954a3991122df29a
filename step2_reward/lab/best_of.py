"""Over-optimization: what the best of n by a proxy is worth by the truth, as n grows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class BestOf:
    """The best of n responses by the proxy."""

    n: int
    kl: float
    """At most so far from the model that was sampled, in nats: log n - (n - 1) / n."""
    proxy: float
    gold: float


def kl_bound(n: int) -> float:
    """Bound of KL(best-of-n || model) (Stiennon et al. 2020; Beirami et al. 2024, 2401.01879)."""
    return math.log(n) - (n - 1) / n


def best_of(proxy: Sequence[float], gold: Sequence[float], n: int) -> tuple[float, float]:
    """Expected (proxy, gold) of the response that is best by the proxy among n of the samples.

    The unbiased estimator over all subsets (Nakano et al. 2021, 2112.09332, appendix I): with the
    samples in ascending order, the i-th is the best of C(i - 1, n - 1) of the C(N, n) subsets.
    Samples of equal proxy are drawn at random.

    Args:
        proxy: of each of N samples of one prompt.
        gold: of each, the truth.
        n: at most N.
    """
    total = math.comb(len(proxy), n)
    order = sorted(range(len(proxy)), key=lambda place: proxy[place])
    worth = [0.0, 0.0]
    done = 0
    for value, group in groupby(order, key=lambda place: proxy[place]):
        places = list(group)
        weight = (math.comb(done + len(places), n) - math.comb(done, n)) / total
        worth[0] += weight * value
        worth[1] += weight * sum(gold[place] for place in places) / len(places)
        done += len(places)
    return worth[0], worth[1]


def curve(proxies: Sequence[Sequence[float]], golds: Sequence[Sequence[float]]) -> list[BestOf]:
    """Means over prompts at n = 1, 2, 4, ..., N, of N samples for each prompt."""
    most = min(map(len, proxies))
    sizes = sorted(
        {*(2**power for power in range(most.bit_length())), most} & {*range(1, most + 1)}
    )
    found: list[BestOf] = []
    for n in sizes:
        each = [best_of(p, g, n) for p, g in zip(proxies, golds, strict=True)]
        means = [sum(pair[place] for pair in each) / len(each) for place in (0, 1)]
        found.append(BestOf(n, kl_bound(n), means[0], means[1]))
    return found
