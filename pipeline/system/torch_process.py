"""Process-wide PyTorch settings: allocator, rounding, random state."""

import json
import os
import random
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables that configure the allocator."""

EXPANDABLE = "expandable_segments:True"


def use_expandable_segments(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Let freed GPU memory serve requests of any size; call this before the first allocation.

    A step of RL alternates between training and generation, whose tensors have different sizes:
    segments of a fixed size would become fragmented.

    Returns:
        False if the user has configured the allocator, which is then unchanged.
    """
    if any(name in environment for name in ALLOCATOR_SETTINGS):
        return False
    environment[ALLOCATOR_SETTINGS[0]] = EXPANDABLE
    if torch.cuda.is_available():  # CUDA may have read the environment already
        torch._C._accelerator_setAllocatorSettings(EXPANDABLE)  # noqa: SLF001
    return True


@contextmanager
def gpu_numerics(*, tf32: bool, deterministic: bool) -> Iterator[None]:
    """Context manager that applies the rounding settings of GPUs; CPUs are not affected.

    With `tf32`, fp32 matmuls use 10 mantissa bits (Ampere and later). With `deterministic`,
    operators use kernels with a fixed order of additions, and cuBLAS uses the workspace that this
    needs. Operators without such a kernel warn. `pipeline.models.forward.attention` handles
    attention, whose backward pass uses such a kernel only if all others are disallowed.
    """
    previous = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    is_deterministic = torch.cuda.is_available() and deterministic
    if is_deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Our code writes every buffer before reading it.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyrefly: ignore[missing-attribute]
        torch.use_deterministic_algorithms(mode=True, warn_only=True)
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = previous
        if is_deterministic:
            torch.use_deterministic_algorithms(mode=False)


def seed_generators(seed: int) -> None:
    """Seed the generators of PyTorch, Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  # the global generator, which libraries use


def random_state() -> dict[str, Tensor]:
    """Return the states of PyTorch's, Python's and NumPy's generators as 1-D tensors by name."""
    state = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    states = [random.getstate(), np.random.get_state(legacy=False)]  # noqa: NPY002
    text = json.dumps(states, default=np.ndarray.tolist)
    state["python_and_numpy"] = torch.tensor(list(text.encode()), dtype=torch.uint8)
    return state


def set_random_state(state: Mapping[str, Tensor]) -> None:
    """Restore the generators from the result of `random_state`."""
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    python, numpy = json.loads(bytes(state["python_and_numpy"].tolist()))
    random.setstate((python[0], tuple(python[1]), python[2]))
    np.random.set_state(numpy)  # noqa: NPY002
