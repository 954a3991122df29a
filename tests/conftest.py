"""Settings of the whole suite."""

import os
import signal
from collections.abc import Iterator

import pytest
from jaxtyping import install_import_hook

from tests.sources import PACKAGES, ROOT

# The models of the tests are so small that threads would only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts the suite in the background has it ignore Ctrl-C, and every process that a
# test starts and interrupts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def annotated_modules() -> list[str]:
    """Modules that say the shapes of their tensors."""
    files = (file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return [
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in files
        if "from jaxtyping import" in file.read_text(encoding="utf-8")
    ]


# Every call is held to the shapes and dtypes that its annotations say. Other modules have nothing
# but types that pyright checks, and the checks would make loops over rows ten times slower.
install_import_hook(annotated_modules(), "beartype.beartype")


# Where the kernel takes the place of PyTorch's products of bf16, it does so for one test, or for
# the fixtures of one file. An engine of bf16 weights takes it for the whole process, on processors
# without instructions for them; tests that compute without an engine would depend on which ran
# before them.


@pytest.fixture(autouse=True, scope="module")
def products_of_pytorch_after_each_file() -> Iterator[None]:
    """What a file's own fixtures took is given back."""
    from pipeline.kernels.products.dispatch import given_back  # after the hook above

    with given_back():
        yield


@pytest.fixture(autouse=True)
def products_of_pytorch_after_each_test() -> Iterator[None]:
    """What a test took is given back."""
    from pipeline.kernels.products.dispatch import given_back  # after the hook above

    with given_back():
        yield
