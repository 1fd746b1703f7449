"""Files of a run: whole or absent, unique, and never lost when the folder fails."""

import errno
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jinja2  # noqa: F401  (imported here, so that no single test is the first to load it)
import jsonschema  # noqa: F401
import pytest

import afd_testkit.page
from afd_testkit import results_folder
from afd_testkit.evidence import ResultsFolderError, RunInfo, check_writable, load_record, write_run
from afd_testkit.own_code import Code, Relation
from afd_testkit.provenance import Machine, Source
from afd_testkit.results import CheckResult, Outcome
from afd_testkit.results_folder import write_atomic

pytestmark = pytest.mark.cpu

CHECK = CheckResult("split", "vllm-cpu", "qwen3-moe", "float32", "case", "token", Outcome.PASSED)


def a_run(run_id="run-1"):
    return RunInfo(
        run_id=run_id,
        started="2025-01-31T23:59:59.000Z",
        command=("tox",),
        source=Source(None, None, None, "no git"),
        code=Code("ab" * 32, "0.1.0", Relation.NONE),
        versions={"python": "3.11.9", "afd-testkit": "0.1.0"},
        machine=Machine("Linux", "Some CPU", 2, 4, None, ()),
    )


@pytest.fixture
def spare(tmp_path, monkeypatch):
    """A folder that stands in for the system's temporary folder."""
    folder = tmp_path / "spare"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def raiser(error):
    def fail(*args, **kwargs):
        raise error

    return fail


# --- before a run


def test_check_writable_makes_the_folder_and_leaves_it_empty(tmp_path):
    folder = tmp_path / "a" / "b"
    check_writable(folder)
    check_writable(folder)
    assert list(folder.iterdir()) == []


def test_check_writable_refuses_a_file(tmp_path):
    place = tmp_path / "results"
    place.write_text("mine")
    with pytest.raises(ResultsFolderError, match="exists and is not a folder") as caught:
        check_writable(place)
    assert caught.value.path == place
    assert place.read_text() == "mine"


def test_check_writable_refuses_a_path_through_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ResultsFolderError, match="a part of the path is a file"):
        check_writable(tmp_path / "file" / "results")


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_check_writable_reports_what_the_system_says(tmp_path, monkeypatch, code):
    error = OSError(code, os.strerror(code))
    with monkeypatch.context() as patch:
        patch.setattr(results_folder.tempfile, "mkstemp", raiser(error))
        with pytest.raises(ResultsFolderError) as caught:
            check_writable(tmp_path)
    assert caught.value.reason == os.strerror(code)[0].lower() + os.strerror(code)[1:]
    for part in (str(tmp_path), caught.value.reason, caught.value.remedy):
        assert part in str(caught.value)
    assert "Name a folder" in caught.value.remedy


def test_check_writable_reports_a_folder_that_cannot_be_made(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", raiser(PermissionError(errno.EACCES, "Permission denied")))
        with pytest.raises(ResultsFolderError, match="permission denied"):
            check_writable(tmp_path / "new")


def test_check_writable_cleans_up_after_a_full_disk(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(results_folder.os, "write", raiser(OSError(errno.ENOSPC, "No space left")))
        with pytest.raises(ResultsFolderError, match="no space left"):
            check_writable(tmp_path)
    assert list(tmp_path.iterdir()) == []


# --- one file


@pytest.mark.parametrize("step", ["replace", "fsync"])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "I/O error"), KeyboardInterrupt()])
def test_a_failure_half_way_leaves_the_old_file_and_nothing_else(
    tmp_path, monkeypatch, step, error
):
    target = tmp_path / "x.json"
    target.write_bytes(b"old")
    with monkeypatch.context() as patch:
        patch.setattr(results_folder.os, step, raiser(error))
        with pytest.raises(type(error)):
            write_atomic(target, b"new")
    assert list(tmp_path.iterdir()) == [target]
    assert target.read_bytes() == b"old"
    write_atomic(target, b"new")
    assert target.read_bytes() == b"new"


def test_the_file_appears_only_when_it_is_whole(tmp_path, monkeypatch):
    target = tmp_path / "x.json"
    seen = []
    real = os.replace

    def look(source, destination):
        seen.append((target.exists(), Path(source).parent, Path(source).read_bytes()))
        real(source, destination)

    monkeypatch.setattr(results_folder.os, "replace", look)
    write_atomic(target, b"all of it")
    assert seen == [(False, tmp_path, b"all of it")]


# --- the files of a run


def test_a_second_record_of_the_same_name_gets_another(tmp_path):
    first = write_run(a_run(), [CHECK], tmp_path)
    before = first.record.read_bytes()
    second = write_run(a_run(), [CHECK, CHECK], tmp_path)
    assert first.record.read_bytes() == before
    assert (second.record.name, second.page.name) == ("afd-run-1-2.json", "afd-run-1-2.html")


def test_a_page_alone_also_keeps_its_name(tmp_path):
    (tmp_path / "afd-run-1.html").write_text("someone's")
    files = write_run(a_run(), [CHECK], tmp_path)
    assert (tmp_path / "afd-run-1.html").read_text() == "someone's"
    assert files.record.stem == files.page.stem == "afd-run-1-2"


def test_threads_writing_at_once_into_one_new_folder(tmp_path):
    folder = tmp_path / "results"

    def work(number):
        run = RunInfo.begin(["prog", str(number)], directory=tmp_path)
        return write_run(run, [CHECK] * number, folder)

    with ThreadPoolExecutor(8) as pool:
        written = list(pool.map(work, range(1, 25)))
    assert len({files.record for files in written}) == 24
    assert len(list(folder.iterdir())) == 48
    for number, files in enumerate(written, start=1):
        record = load_record(files.record)
        assert (record["command"], len(record["checks"])) == (["prog", str(number)], number)


def test_processes_writing_at_once_into_one_folder(tmp_path):
    code = (
        "import sys; from pathlib import Path\n"
        "from afd_testkit.evidence import RunInfo, write_run\n"
        "folder = Path(sys.argv[1])\n"
        "for n in range(10): write_run(RunInfo.begin([sys.argv[2], str(n)]), [], folder)\n"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "r"), name])
        for name in ("a", "b")
    ]
    assert [process.wait(timeout=60) for process in started] == [0, 0]
    records = [load_record(path) for path in (tmp_path / "r").glob("*.json")]
    assert sorted(record["command"] for record in records) == sorted(
        [name, str(n)] for name in ("a", "b") for n in range(10)
    )
    assert len(list((tmp_path / "r").iterdir())) == 40


def test_a_folder_lost_at_the_end_sends_the_files_to_the_temporary_folder(tmp_path, spare):
    folder = tmp_path / "results"
    check_writable(folder)
    folder.rmdir()
    folder.write_text("in the way")
    files = write_run(a_run(), [CHECK], folder)
    assert (files.record.parent, files.page.parent) == (spare, spare)
    assert load_record(files.record)["verdict"] == "passed"
    for notice, path in zip(files.notices, (files.record, files.page), strict=True):
        assert f"{str(folder)!r} became unwritable" in notice
        assert str(path) in notice


def test_the_fallback_overwrites_nothing(tmp_path, spare):
    (spare / "afd-run-1.json").write_text("someone's")
    folder = tmp_path / "results"
    folder.write_text("in the way")
    files = write_run(a_run(), [CHECK], folder)
    assert (spare / "afd-run-1.json").read_text() == "someone's"
    assert files.record == spare / "afd-run-1-2.json"


def test_a_disk_full_after_the_record_moves_only_the_page(tmp_path, spare, monkeypatch):
    folder = tmp_path / "results"
    real = os.replace

    def full(source, destination):
        if Path(destination).parent == folder and Path(destination).suffix == ".html":
            raise OSError(errno.ENOSPC, "No space left on device")
        real(source, destination)

    monkeypatch.setattr(results_folder.os, "replace", full)
    files = write_run(a_run(), [CHECK], folder)
    assert (files.record.parent, files.page.parent) == (folder, spare)
    assert len(files.notices) == 1
    assert list(folder.iterdir()) == [files.record]


def test_no_folder_at_all_is_an_error_that_names_both(tmp_path, spare, monkeypatch):
    monkeypatch.setattr(results_folder.os, "replace", raiser(OSError(errno.EROFS, "Read-only")))
    with pytest.raises(ResultsFolderError) as caught:
        write_run(a_run(), [CHECK], tmp_path / "results")
    assert str(tmp_path / "results") in str(caught.value)
    assert str(spare) in str(caught.value)
    assert list(spare.iterdir()) == []


def test_a_page_that_cannot_be_made_does_not_cost_the_record(tmp_path, monkeypatch):
    monkeypatch.setattr(afd_testkit.page, "render_page", raiser(ZeroDivisionError("drawing")))
    with pytest.raises(ZeroDivisionError) as caught:
        write_run(a_run(), [CHECK], tmp_path)
    (record,) = tmp_path.iterdir()
    assert load_record(record)["verdict"] == "passed"
    assert any(str(record) in note for note in caught.value.__notes__)


def test_a_record_holds_one_check_a_line(tmp_path):
    lines = write_run(a_run(), [CHECK] * 3, tmp_path).record.read_text("ascii").splitlines()
    checks = [line for line in lines if line.startswith('  {"gate"')]
    assert [json.loads(line.rstrip(","))["case"] for line in checks] == ["case"] * 3
