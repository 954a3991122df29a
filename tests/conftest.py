"""Settings of the whole suite."""

import os
import signal

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
