"""The preference methods: each is a row of settings over the one loop of `step3_preference.train`.

A row lies just above the defaults: whatever a file or the command line says wins over it.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


def _row(**settings: Any) -> Mapping[str, Any]:  # noqa: ANN401
    return MappingProxyType(settings)


METHODS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # Rafailov et al. 2023, eq. 7.
        "dpo": _row(),
        # Mitchell 2023, eq. 3.
        "cdpo": _row(label_smoothing=0.1),
        # Chowdhury et al. 2024, eq. 12.
        "rdpo": _row(label_smoothing=0.1, robust=True),
        # Lambert et al. 2024 (Tulu 3), section 5.2.
        "ldpo": _row(logp="mean", beta=5.0),
        # Azar et al. 2023, eq. 17, with log-probabilities per token: half a nat of each to gain.
        "ipo": _row(loss="ipo", beta=1.0),
        # Zhao et al. 2023 (SLiC), with the reference of Liu et al. 2024 (RSO, eq. 11).
        "hinge": _row(loss="hinge"),
        # Meng et al. 2024, eq. 6.
        "simpo": _row(reference_free=True, logp="mean", beta=2.5, gamma=1.375),
        # Xu et al. 2024, eq. 3 and section 3.
        "cpo": _row(reference_free=True, nll_coef=1.0),
        # Hong et al. 2024, eq. 6 and 7.
        "orpo": _row(loss="orpo", reference_free=True, nll_coef=1.0),
        # Ethayarajh et al. 2024, eq. 7 and 8.
        "kto": _row(loss="kto"),
    }
)
"""By the setting `method`; docs/preference.md says when to use which."""

TITLES = {
    "dpo": "DPO (Rafailov et al. 2023)",
    "cdpo": "conservative DPO (Mitchell 2023)",
    "rdpo": "robust DPO (Chowdhury et al. 2024)",
    "ldpo": "length-normalized DPO (Lambert et al. 2024)",
    "ipo": "IPO (Azar et al. 2023)",
    "hinge": "the hinge loss of SLiC (Zhao et al. 2023)",
    "simpo": "SimPO (Meng et al. 2024)",
    "cpo": "CPO (Xu et al. 2024)",
    "orpo": "ORPO (Hong et al. 2024)",
    "kto": "KTO (Ethayarajh et al. 2024)",
}
"""By the name of the method, as the model card has it; messages have what is before the paper."""
