"""Settings of the whole suite."""

import gc
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest
from jaxtyping import install_import_hook

from tests.shapes import check_shapes
from tests.sources import PACKAGES, ROOT

# The models of the tests are too small for several threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts the tests in the background makes them ignore Ctrl-C, which the processes
# that a test starts and interrupts would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


def annotated_modules() -> list[str]:
    """Return the modules with annotated tensor shapes."""
    files = (file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return [
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in files
        if "from jaxtyping import" in file.read_text(encoding="utf-8")
    ]


jaxtyping.jaxtyped = check_shapes  # the import hook decorates functions with it
install_import_hook(annotated_modules(), "beartype.beartype")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import everything without the garbage collector, which would scan it repeatedly."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the files of long tests first, so that no worker idles at the end."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        jobs = Counter(item.path for item in items if item.get_closest_marker("jobs"))
        items.sort(key=lambda item: -jobs[item.path])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the models of step 3."""
    from tests.step3_ppo.toy import save_models

    directory = tmp_path_factory.mktemp("models")
    save_models(directory)
    return directory
