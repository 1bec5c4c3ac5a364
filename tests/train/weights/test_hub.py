"""Models by their name on the Hub, and pushes, against a small server that speaks its protocol."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from hypothesis import given
from hypothesis import strategies as st

from tests.train.config.built import build, problems
from train import export
from train.config.download import HUB_NAME
from train.config.errors import UserError, field_errors
from train.run.setup import with_local_model
from train.weights import hub
from train.weights.huggingface.contents import INDEX, weight_files

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {"config.json": b"{}", "model.safetensors": b"weights", "pytorch_model.bin": b"the same weights"}
AGAIN = ("original/model.safetensors", "onnx/config.json", "consolidated.safetensors")
FILES |= dict.fromkeys(AGAIN, b"the same weights")


class FakeHub(BaseHTTPRequestHandler):
    """Has one model, a gated one, and a repository that takes commits."""

    asked: list[str]
    pushed: dict[str, bytes]

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        self.asked.append(self.path)
        path = self.path.partition("?")[0]
        if "/org/gated" in path:
            self.answer(403, X_Error_Code="GatedRepo")
        elif "/org/small" not in path:
            self.answer(404, X_Error_Code="RepoNotFound")
        elif COMMIT not in path:
            self.answer(404, X_Error_Code="RevisionNotFound")
        elif path.startswith("/api/"):
            files = [{"type": "file", "path": name, "size": len(body), "oid": name} for name, body in FILES.items()]
            about = {"id": "org/small", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}
            body = json.dumps(files if "/tree/" in path else about).encode()
            self.answer(200, body, Content_Type="application/json")
        else:
            name = path.rpartition("/")[2]
            self.answer(200, FILES[name], ETag=f'"{name}"', X_Repo_Commit=COMMIT)

    do_HEAD = do_GET

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != "Bearer good":
            self.answer(403)
            return
        reply = {"url": f"{constants.ENDPOINT}/org/new"}
        if "/preupload/" in self.path:
            sent = [file["path"] for file in json.loads(body)["files"]]
            reply = {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in sent]}
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.pushed[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            reply = {"commitUrl": f"{constants.ENDPOINT}/org/new/commit/{COMMIT}", "commitOid": COMMIT, "success": True}
        self.answer(200, json.dumps(reply).encode(), Content_Type="application/json")

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    FakeHub.asked, FakeHub.pushed = [], {}
    running = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{running.server_port}")
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", constants.ENDPOINT)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "good")
    # The package waits between its attempts.
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    yield running
    running.shutdown()
    running.server_close()


def local_path(name, revision=COMMIT):
    config, _ = build(f"model.path={name}", f"model.revision={revision}")
    return with_local_model(config).model.path


def test_a_name_is_downloaded_once(server, monkeypatch):
    path = local_path("org/small")
    assert hub.Path(path).name == COMMIT
    read = {str(file.relative_to(path)): file.read_bytes() for file in hub.Path(path).rglob("*") if file.is_file()}
    assert read == {name: FILES[name] for name in ("config.json", "model.safetensors")}  # no weights in other formats
    number = len(FakeHub.asked)
    server.shutdown()
    assert local_path("org/small") == path
    assert len(FakeHub.asked) == number
    # A run is continued from the folder.
    assert local_path(path) == path


def test_an_interrupted_download_is_completed(server):
    path = hub.Path(local_path("org/small"))
    (path / "model.safetensors").unlink()
    assert local_path("org/small") == str(path)
    assert (path / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (b'{"weight_map": {"a": "model-0000', "expected a JSON object with weight_map"),
        (b"<html>", "expected a JSON object with weight_map"),
        (b'{"weight_map": {"a": "model-2.safetensors"}}', "names files that are not there: model-2.safetensors"),
    ],
    ids=["cut", "not-json", "missing-file"],
)
def test_a_damaged_index_is_named(server, monkeypatch, index, expected):
    monkeypatch.delitem(FILES, "model.safetensors")
    monkeypatch.setitem(FILES, INDEX, index)
    for _ in range(2):  # downloaded, then in the cache
        folder = hub.Path(local_path("org/small"))
        with pytest.raises(UserError, match=rf"model\.path: .*{INDEX}.*{expected}"), field_errors("model.path"):
            weight_files(folder)


@pytest.mark.parametrize(
    ("name", "revision", "expected"),
    [
        ("org/nothing", COMMIT, "model.path: the Hub has no model org/nothing, or not for you"),
        ("org/gated", COMMIT, "model.path: org/gated is gated; accept its terms at http://127"),
        ("org/small", "f" * 40, f"model.revision: org/small has no commit {'f' * 40}; see http"),
    ],
)
def test_refusal_of_the_hub_names_the_fix(server, name, revision, expected):
    with pytest.raises(UserError) as caught:
        local_path(name, revision)
    assert str(caught.value).startswith(expected)


def test_no_network_names_the_download(server, tmp_path):
    server.shutdown()
    server.server_close()
    with pytest.raises(UserError, match=r"model\.path: cannot reach http.* for org/small: .*Connection refused; where"):
        local_path("org/small")
    with pytest.raises(UserError, match="--push: cannot reach"):
        hub.make_repository("org/new")


def test_a_revision_is_a_commit_of_a_name(tmp_path):
    assert problems("model.path=org/small", "model.revision=main") == [
        "model.revision: got 'main', expected the full hash of a commit, 40 hexadecimal digits "
        "(a branch or tag can move) or null"
    ]
    (line,) = problems(f"model.path={tmp_path}", f"model.revision={COMMIT}")
    assert line.endswith("which is no name on the Hub, as org/name; leave it out for a folder")
    (line,) = problems(f"model.revision={COMMIT}")
    assert line == "model.revision: got a commit without model.path; set that to org/name"


NAMES = st.text("aZ0-_./é", max_size=12) | st.sampled_from(["a" * 97, "a" * 96, "a/b.git", "a.git/b", "org/..", "../b"])


@given(st.lists(NAMES, min_size=2, max_size=2).map("/".join) | NAMES)
def test_name_is_taken_as_the_hub_takes_it(name):
    try:
        validate_repo_id(name)
        accepted = name.count("/") == 1
    except HFValidationError:
        accepted = False
    assert (HUB_NAME.fullmatch(name) is not None) == accepted


@pytest.mark.parametrize("name", ["org/..", "org/a--b", "../model", "org/.hidden", "org/name.git", "-org/name", "name"])
def test_name_of_no_repository_is_refused(name):
    (line,) = problems(f"model.path={name}", f"model.revision={COMMIT}")
    assert line.startswith(f"model.revision: got a commit for {name!r}, which is no name on the Hub, as org/name")
    with pytest.raises(UserError, match=r"--push: got .*, expected the name of a repository, as org/name"):
        hub.make_repository(name)


def test_a_folder_is_pushed_as_one_commit(server, tmp_path):
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "adapter.json").write_bytes(b"1")
    hub.make_repository("org/new")
    assert hub.push(folder, "org/new", "Step 3") == f"{constants.ENDPOINT}/org/new/commit/{COMMIT}"
    assert FakeHub.pushed["adapter.json"] == b"1"


def test_push_without_write_access_is_refused(server, monkeypatch):
    with pytest.raises(UserError, match=r"--push: got 'name', expected the name of a repository, as org/name"):
        hub.make_repository("name")
    monkeypatch.setenv("HF_TOKEN", "bad")
    with pytest.raises(UserError, match=r"answered 403 for org/new; run \S*hf auth login with a token that may write"):
        hub.make_repository("org/new")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(UserError, match="--push: nobody is logged in to the Hub"):
        hub.make_repository("org/new")


def test_export_without_a_target_is_refused(capsys):
    assert export.main(["runs/none"]) == 2
    assert "--to: got nothing, expected a folder to write; or give --push org/name" in capsys.readouterr().err
