"""Fetching from a local server: downloads resume, are checked and unpacked safely, and are never half there."""

import gzip
import hashlib
import io
import json
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from attnlab.tasks import fetch, unpack
from attnlab.tasks.classification import Classification, ClassificationConfig
from attnlab.tasks.conversions import convert_imdb, convert_newsgroups
from attnlab.tasks.sources import SETS, Download, NamedSet
from attnlab.tasks.translation import Translation, TranslationConfig

CONTENT = bytes(range(256)) * 4099  # more than one piece


class Server:
    """Serves bytes by path; `cut` is the number of answers that end early, `ranges` whether it serves ranges."""

    def __init__(self):
        self.files, self.cut, self.ranges, self.asked = {}, 0, True, []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                server.answer(self)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, request):
        wanted = request.headers.get("Range")
        self.asked.append(wanted)
        data = self.files.get(request.path)
        if data is None:
            return request.send_error(404)
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.ranges else 0
        if start >= len(data):
            return request.send_error(416)
        request.send_response(206 if start else 200)
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        request.send_header("Content-Length", str(len(data) - start))
        request.end_headers()
        part = data[start:]
        if self.cut:
            self.cut -= 1
            part = part[: len(part) // 2]
        request.wfile.write(part)


@pytest.fixture
def server():
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("ATTNLAB_DATA", raising=False)


def sha(data):
    return "sha256:" + hashlib.sha256(data).hexdigest()


def left(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.name != ".lock")


def a_set(*downloads, **changes):
    settings = {"name": "toy", "task": "language", "licence": "free", "home": "http://toy", "folder": "toy"} | changes
    return NamedSet(**settings, downloads=downloads)


def test_a_file_arrives_whole_and_the_licence_is_said_once(server, tmp_path, capsys):
    server.files |= {"/a.txt": CONTENT, "/b.txt": CONTENT}
    names = ("a.txt", "b.txt")
    toy = a_set(*(Download((f"{server.url}/{name}",), {name: None}, sha(CONTENT)) for name in names), licence="toys")
    for _ in range(2):
        for name in names:
            assert fetch.obtain_file(toy, name).read_bytes() == CONTENT
    assert len(server.asked) == 2
    assert capsys.readouterr().err == "toy: licence: toys (http://toy)\n"
    assert left(tmp_path) == ["a.txt", "b.txt"]


def test_a_download_larger_than_any_set_is_refused(server, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "MOST_BYTES", len(CONTENT) - 1)
    server.files["/a.txt"] = CONTENT
    with pytest.raises(OSError, match="1,049,344 bytes, more than"):
        fetch.obtain_file(a_set(Download((f"{server.url}/a.txt",), {"a.txt": None}, sha(CONTENT))), "a.txt")
    assert left(tmp_path) == []


def test_a_cut_connection_is_taken_up_where_it_ended(server):
    server.files["/a.txt"], server.cut = CONTENT, 2
    toy = a_set(Download((f"{server.url}/a.txt",), {"a.txt": None}, sha(CONTENT)))
    assert fetch.obtain_file(toy, "a.txt").read_bytes() == CONTENT
    half, quarters = len(CONTENT) // 2, len(CONTENT) // 2 + (len(CONTENT) - len(CONTENT) // 2) // 2
    assert server.asked == [None, f"bytes={half}-", f"bytes={quarters}-"]


def test_a_later_command_goes_on_from_what_an_earlier_one_left(server, tmp_path):
    server.files["/a.txt"], server.cut = CONTENT, fetch.ATTEMPTS
    toy = a_set(Download((f"{server.url}/a.txt",), {"a.txt": None}, sha(CONTENT)))
    with pytest.raises(OSError, match=r"of 1,049,344 bytes.*resume"):
        fetch.obtain_file(toy, "a.txt")
    assert left(tmp_path) == [".download-a.txt.part"]
    assert fetch.obtain_file(toy, "a.txt").read_bytes() == CONTENT
    assert server.asked[-1] is not None
    assert left(tmp_path) == ["a.txt"]


def test_a_server_without_ranges_is_asked_for_everything_again(server):
    server.files["/a.txt"], server.cut, server.ranges = CONTENT, 1, False
    toy = a_set(Download((f"{server.url}/a.txt",), {"a.txt": None}, sha(CONTENT)))
    assert fetch.obtain_file(toy, "a.txt").read_bytes() == CONTENT


@pytest.mark.parametrize("stale", [b"something else", CONTENT + b"and more"])
def test_a_stale_part_is_thrown_away(server, tmp_path, stale):
    folder = tmp_path / "cache/attnlab/data/toy"
    folder.mkdir(parents=True)
    (folder / ".download-a.txt.part").write_bytes(stale)
    server.files["/a.txt"] = CONTENT
    toy = a_set(Download((f"{server.url}/a.txt",), {"a.txt": None}, sha(CONTENT)))
    assert fetch.obtain_file(toy, "a.txt").read_bytes() == CONTENT


def test_a_whole_part_needs_no_more_bytes(server, tmp_path):
    folder = tmp_path / "cache/attnlab/data/toy"
    folder.mkdir(parents=True)
    (folder / ".download-a.txt.part").write_bytes(CONTENT)
    server.files["/a.txt"] = CONTENT
    toy = a_set(Download((f"{server.url}/a.txt",), {"a.txt": None}, sha(CONTENT)))
    assert fetch.obtain_file(toy, "a.txt").read_bytes() == CONTENT
    assert server.asked == [f"bytes={len(CONTENT)}-"]


def test_two_at_once_fetch_it_once(server):
    server.files["/a.txt"] = CONTENT
    toy = a_set(Download((f"{server.url}/a.txt",), {"a.txt": None}, sha(CONTENT)))
    threads = [threading.Thread(target=fetch.obtain_file, args=(toy, "a.txt")) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(server.asked) == 1


def test_a_wrong_checksum_leaves_nothing(server, tmp_path):
    server.files["/a.txt"] = CONTENT
    toy = a_set(Download((f"{server.url}/a.txt",), {"a.txt": None}, sha(b"other")))
    with pytest.raises(OSError, match=r"cannot fetch toy:\n.*wrong checksum.*\nTo use it"):
        fetch.obtain_file(toy, "a.txt")
    assert left(tmp_path) == []


def test_wrong_content_leaves_nothing(server, tmp_path, monkeypatch):
    server.files["/a.txt.gz"] = gzip.compress(CONTENT)
    monkeypatch.setattr("attnlab.tasks.sources.CONTENTS", {"toy": {"a.txt": "0" * 64}})
    with pytest.raises(OSError, match=r"a\.txt: wrong checksum"):
        fetch.obtain_file(a_set(Download((f"{server.url}/a.txt.gz",), {"a.txt": None})), "a.txt")
    assert left(tmp_path) == []
    monkeypatch.setattr("attnlab.tasks.sources.CONTENTS", {"toy": {"a.txt": hashlib.sha256(CONTENT).hexdigest()}})
    path = fetch.obtain_file(a_set(Download((f"{server.url}/a.txt.gz",), {"a.txt": None})), "a.txt")
    assert path.read_bytes() == CONTENT


def test_a_mirror_is_tried_when_the_first_address_fails(server):
    server.files["/good/a.txt"] = CONTENT
    server.files["/bad/a.txt"] = b"an error page"
    urls = tuple(f"{server.url}/{place}/a.txt" for place in ("gone", "bad", "good"))
    toy = a_set(Download(urls, {"a.txt": None}, sha(CONTENT)))
    assert fetch.obtain_file(toy, "a.txt").read_bytes() == CONTENT


def test_every_failure_is_told_with_what_to_do(server):
    toy = a_set(Download((f"{server.url}/a.txt", "file:///etc/hostname"), {"a.txt": None}, sha(CONTENT)))
    with pytest.raises(OSError, match="cannot fetch toy") as caught:
        fetch.obtain_file(toy, "a.txt")
    message = str(caught.value)
    assert "HTTP Error 404" in message
    assert "must begin with http" in message
    assert message.endswith(
        "To use it, get it from http://toy; put it into a folder DIR/toy/ and set ATTNLAB_DATA=DIR or data_dir=DIR."
    )


def test_what_cannot_be_checked_is_not_fetched(server):
    server.files["/a.txt"] = CONTENT
    with pytest.raises(FileNotFoundError, match=r"a\.txt is missing\. To use it"):
        fetch.obtain_file(a_set(Download((f"{server.url}/a.txt",), {"a.txt": None})), "a.txt")
    assert server.asked == []


def test_ones_own_folder_comes_first_and_data_dir_before_all(tmp_path, monkeypatch):
    for name, content in (("env", b"env"), ("given", b"given"), ("cache/attnlab/data", b"cache")):
        (tmp_path / name / "toy").mkdir(parents=True)
        (tmp_path / name / "toy/a.txt.gz").write_bytes(gzip.compress(content))
    toy = a_set()
    assert "cache" in str(fetch.obtain_file(toy, "a.txt"))
    monkeypatch.setenv("ATTNLAB_DATA", str(tmp_path / "env"))
    assert fetch.obtain_file(toy, "a.txt") == tmp_path / "env/toy/a.txt.gz"
    assert fetch.obtain_file(toy, "a.txt", str(tmp_path / "given")) == tmp_path / "given/toy/a.txt.gz"
    with pytest.raises(FileNotFoundError, match=r"toy/b\.txt\[\.gz\].*To use it"):
        fetch.obtain_file(toy, "b.txt", str(tmp_path / "given"))


def tar_of(members):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
            else:
                info.size = len(content)
            tar.addfile(info, io.BytesIO(content) if isinstance(content, bytes) else None)
    return data.getvalue()


def zip_of(members):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            info = zipfile.ZipInfo(name)
            if isinstance(content, str):
                info.external_attr = 0o120777 << 16
            file.writestr(info, content)
    return data.getvalue()


PACKERS = {"set.tar.gz": tar_of, "set.tgz": tar_of, "set.zip": zip_of}


@pytest.mark.parametrize("archive", PACKERS)
def test_members_come_out_under_our_names_alone(server, tmp_path, archive):
    server.files[f"/{archive}"] = data = PACKERS[archive]({"deep/in/it.txt": b"wanted", "other.txt": b"not"})
    toy = a_set(Download((f"{server.url}/{archive}",), {"a.txt": "deep/in/it.txt"}, sha(data)))
    assert fetch.obtain_file(toy, "a.txt").read_bytes() == b"wanted"
    assert left(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("archive", PACKERS)
@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"../../evil.txt": b"x", "a.txt": b"y"}, "leads outside the archive"),
        ({"/etc/evil": b"x", "a.txt": b"y"}, "leads outside the archive"),
        ({"C:\\evil": b"x", "a.txt": b"y"}, "leads outside the archive"),
        ({"a.txt": "/etc/passwd"}, "is a link"),
        ({"b.txt": b"y"}, "the archive lacks a.txt"),
        ({"a.txt": bytes(2**21)}, "unpacks to more than"),
        ({"b.txt": bytes(2**21), "a.txt": b"y"}, "unpacks to more than"),
        ({f"{k}.txt": b"" for k in range(99)}, "more than 50 members"),
    ],
)
def test_hostile_archives_are_refused_whole(server, tmp_path, monkeypatch, archive, members, message):
    monkeypatch.setattr(unpack, "MOST_BYTES", 2**20)
    monkeypatch.setattr(unpack, "MOST_MEMBERS", 50)
    server.files[f"/{archive}"] = data = PACKERS[archive](members)
    toy = a_set(Download((f"{server.url}/{archive}",), {"a.txt": "a.txt"}, sha(data)))
    with pytest.raises(OSError, match=message):
        fetch.obtain_file(toy, "a.txt")
    assert left(tmp_path) == []


def test_a_gzip_bomb_and_a_member_that_lies_about_its_size_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(unpack, "MOST_BYTES", 2**20)
    path = tmp_path / "bomb.txt.gz"
    path.write_bytes(gzip.compress(bytes(2**24)))
    with pytest.raises(ValueError, match="unpacks to more than"):
        [list(pieces) for _, pieces in unpack.read_members(path, lambda _: True)]
    lying = bytearray(zip_of({"a.txt": bytes(2**24)}))
    for signature, offset in ((b"PK\x01\x02", 24), (b"PK\x03\x04", 22)):
        at = lying.index(signature) + offset
        lying[at : at + 4] = (5).to_bytes(4, "little")
    (tmp_path / "lying.zip").write_bytes(lying)
    with pytest.raises(ValueError, match=r"damaged|more than is allowed"):
        [list(pieces) for _, pieces in unpack.read_members(tmp_path / "lying.zip", lambda _: True)]


@pytest.mark.parametrize("archive", PACKERS)
def test_a_damaged_archive_is_refused(server, tmp_path, archive):
    data = PACKERS[archive]({"a.txt": CONTENT})
    server.files[f"/{archive}"] = data = data[: len(data) // 2]
    toy = a_set(Download((f"{server.url}/{archive}",), {"a.txt": "a.txt"}, sha(data)))
    with pytest.raises(OSError, match="damaged"):
        fetch.obtain_file(toy, "a.txt")
    assert left(tmp_path) == []


def test_archives_of_single_files_become_one_file_a_part(tmp_path):
    reviews = {"aclImdb/train/neg/10_2.txt": b"bad\tvery", "aclImdb/train/neg/9_1.txt": b"worse",
               "aclImdb/train/pos/0_9.txt": b"good", "aclImdb/train/unsup/0_0.txt": b"?",
               "aclImdb/test/pos/3_10.txt": "schön".encode(), "aclImdb/README": b""}  # fmt: skip
    (tmp_path / "imdb.tar.gz").write_bytes(tar_of(reviews))
    assert dict(convert_imdb(tmp_path / "imdb.tar.gz")) == {
        "train.tsv": b"0\t1\t9\tworse\n0\t2\t10\tbad very\n1\t9\t0\tgood\n",
        "test.tsv": "1\t10\t3\tschön\n".encode(),
    }
    posts = {"20news-bydate-train/rec.sport.hockey/52": b"caf\xe9", "20news-bydate-train/sci.med/3": b"no",
             "20news-bydate-test/rec.sport.baseball/104": b"Subject: x\n\ny"}  # fmt: skip
    (tmp_path / "news.tar.gz").write_bytes(tar_of(posts))
    made = {
        name: [json.loads(line) for line in data.splitlines()]
        for name, data in convert_newsgroups(tmp_path / "news.tar.gz")
    }
    assert made == {
        "train.jsonl": [{"label": "rec.sport.hockey", "id": "52", "text": "café"}],
        "test.jsonl": [{"label": "rec.sport.baseball", "id": "104", "text": "Subject: x\n\ny"}],
    }


@pytest.mark.parametrize("dataset", SETS.values(), ids=SETS)
def test_every_set_can_be_checked_or_says_how_to_come_by_it(dataset):
    assert dataset.licence
    assert dataset.home.startswith("http")
    assert dataset.downloads or dataset.steps
    for download in dataset.downloads:
        assert all(url.startswith(("http://", "https://")) for url in download.urls)
        kind, _, value = (download.checksum or "").partition(":")
        assert len(value) == {"sha256": 64, "md5": 32, "": 0}[kind]
        assert download.checksum or set(download.files) <= set(dataset.contents)


def test_without_data_and_network_the_error_says_what_to_do(monkeypatch, tmp_path):
    def nothing(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr("urllib.request.urlopen", nothing)
    with pytest.raises(OSError, match=r"(?s)cannot fetch multi30k.*no network.*set ATTNLAB_DATA=DIR or data_dir="):
        Translation.prepare(TranslationConfig(), tmp_path / "run")
    with pytest.raises(FileNotFoundError, match="accept Yelp's terms"):
        Classification.prepare(ClassificationConfig(data="yelp"), tmp_path / "run")
    with pytest.raises(FileNotFoundError, match=r"prepare-iwslt14\.sh"):
        Translation.prepare(TranslationConfig(data="iwslt14"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
