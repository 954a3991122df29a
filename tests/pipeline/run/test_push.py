"""`--push-to-hub`, with a server that has the Hub's routes for uploads."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants

from pipeline.run.orchestrator import main
from pipeline.system.errors import ConfigError
from pipeline.system.hub import PROXIES
from tests.pipeline.stages import TOY_STAGES


class Hub(ThreadingHTTPServer):
    """A hub of one user, with the files of the last commit."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Requests)
        self.role, self.is_full = "write", False
        self.created, self.files = dict[str, object](), dict[str, bytes]()


class Requests(BaseHTTPRequestHandler):
    """The routes of the Hub that an upload calls."""

    server: Hub

    def do_GET(self) -> None:
        token = {"role": self.server.role}
        self.reply({"name": "me", "orgs": [{"name": "lab"}], "auth": {"accessToken": token}})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        url = f"{constants.ENDPOINT}/lab/chat"
        if "/commit/" in self.path:
            lines = [json.loads(line)["value"] for line in body.splitlines()[1:]]
            self.server.files = {line["path"]: base64.b64decode(line["content"]) for line in lines}
            self.reply({"commitUrl": f"{url}/commit/1", "commitOid": "1"})
        elif "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            mode = {"uploadMode": "regular", "shouldIgnore": False}
            self.reply({"files": [{"path": name, **mode} for name in names]})
        else:
            if self.path == "/api/repos/create":
                self.server.created = json.loads(body)
            self.reply({"url": url, "errors": [], "warnings": []})

    def reply(self, value: object) -> None:
        content = json.dumps(value).encode()
        self.send_response(403 if self.server.is_full and self.command == "POST" else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    with Hub() as server:
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setenv("HF_TOKEN", "hf_a")
        monkeypatch.setattr(constants, "ENDPOINT", url)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def run(out: Path, *argv: str) -> None:
    options = ("--plan", "off", "--step", "1", "--sft.model.path", "a/base")
    main(["--output-dir", str(out), *options, "--push-to-hub", *argv], TOY_STAGES)


def test_model_is_uploaded_with_a_card_and_failure_prints_a_command(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, "lab/chat")

    assert hub.created == {"name": "chat", "organization": "lab", "visibility": "private"}
    assert sorted(hub.files) == ["README.md", "config.json", "deep/weights"]
    _, metadata, text = hub.files["README.md"].decode().split("---\n", 2)
    assert yaml.safe_load(metadata) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "a/base",
        "datasets": ["Dahoas/rm-static"],
        "tags": ["rlhf-pipeline", "sft"],
    }
    assert "| step1_sft | sft | Dahoas/rm-static | 2 | 30 | perplexity_before 9, perp" in text

    (tmp_path / "step1_sft" / "README.md").write_text("mine")
    hub.is_full = True

    with pytest.raises(SystemExit, match="1"):
        run(tmp_path, "lab/chat", "--resume")

    assert (tmp_path / "step1_sft" / "README.md").read_text() == "mine"
    assert f"`hf upload lab/chat {tmp_path}/step1_sft . --private" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "role", "message"),
    [
        ("a b", "write", "is not the name of a repository"),
        ("me/chat", "read", "needs a token with write access"),
        ("you/chat", "write", "me can only write to me, lab"),
    ],
)
def test_impossible_upload_raises_before_the_run(
    hub: Hub, tmp_path: Path, name: str, role: str, message: str
) -> None:
    hub.role = role

    with pytest.raises(ConfigError, match=message):
        run(tmp_path, name)
