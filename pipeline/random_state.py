"""Every random number generator of a process: its seed, and its state as tensors."""

import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def seed_generators(seed: int) -> None:
    """Begin at `seed` with torch, Python and NumPy, which would otherwise begin anywhere."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  # the one that libraries share


def random_state() -> dict[str, Tensor]:
    """State of torch on CPU and GPU, of Python and of NumPy: 1-D tensors by name."""
    state = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    _, words, gauss = random.getstate()
    state["python"] = torch.tensor(words, dtype=torch.int64)
    state["python_gauss"] = _optional(gauss)
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002  # the one that libraries share
    assert isinstance(numpy, dict)
    inner = numpy["state"]
    state["numpy"] = torch.tensor([*inner["key"].tolist(), inner["pos"]], dtype=torch.int64)
    state["numpy_gauss"] = _optional(numpy["gauss"] if numpy["has_gauss"] else None)
    return state


def set_random_state(state: Mapping[str, Tensor]) -> None:
    """Have every generator go on where `random_state` was taken."""
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    version = random.getstate()[0]
    gauss = state["python_gauss"].tolist()
    random.setstate((version, tuple(state["python"].tolist()), gauss[0] if gauss else None))
    *key, position = state["numpy"].tolist()
    gauss = state["numpy_gauss"].tolist()
    np.random.set_state(  # noqa: NPY002
        {
            "bit_generator": "MT19937",
            "state": {"key": np.array(key, dtype=np.uint32), "pos": position},
            "has_gauss": len(gauss),
            "gauss": gauss[0] if gauss else 0.0,
        }
    )


def _optional(value: float | None) -> Tensor:
    return torch.tensor([] if value is None else [value], dtype=torch.float64)
