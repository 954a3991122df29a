"""Servers and a browser for the tests of a file."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.inference.serve.serving import CHROMIUM, LiveServer, serving, serving_page


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def page_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving_page(tmp_path_factory.mktemp("out")) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with playwright.sync_playwright() as play:
        chromium = play.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield chromium
        chromium.close()
