"""The commit of a record is that of the code that ran, or there is none."""

import hashlib
import shutil
import subprocess

import pytest

import afd_testkit
from afd_testkit import own_code
from afd_testkit.evidence import RunInfo, build_record
from afd_testkit.own_code import Relation, package_folder
from afd_testkit.provenance import Source, read_source

pytestmark = pytest.mark.cpu


def git(folder, *arguments):
    identity = ["-c", "user.name=A", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments],
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


@pytest.fixture
def lone_git(monkeypatch, tmp_path):
    """git as it is without variables that point elsewhere, blind to checkouts further up."""
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.resolve()))


@pytest.mark.usefixtures("lone_git")
def test_source_follows_the_checkout(tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "a.txt").write_text("1")
    git(folder, "add", "a.txt")
    git(folder, "commit", "-q", "-m", "one")
    head = git(folder, "rev-parse", "HEAD")
    assert read_source(folder)[0] == Source(head, dirty=False, untracked=0)
    (folder / "b.txt").write_text("2")
    assert read_source(folder)[0] == Source(head, dirty=False, untracked=1)
    (folder / "a.txt").write_text("3")
    assert read_source(folder)[0] == Source(head, dirty=True, untracked=1)


@pytest.mark.usefixtures("lone_git")
def test_source_outside_a_checkout_says_so(tmp_path):
    (tmp_path / "plain").mkdir()
    source, root = read_source(tmp_path / "plain")
    assert root is None
    assert (source.commit, source.dirty, source.untracked) == (None, None, None)
    assert "not a git repository" in source.note


def test_source_without_git_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    source, root = read_source(tmp_path)
    assert root is None
    assert source.commit is None
    assert "git is not installed" in source.note


# --- whether the checkout is what ran


FILES = {
    "afd_plugin/__init__.py": "",
    "afd_plugin/rules.py": "a = 1",
    "afd_testkit/__init__.py": "",
    "afd_testkit/data/texts.jsonl": "{}",
    "afd_testkit/evidence.schema.json": "{}",
    "afd_testkit/templates/page.css": "b {}",
    "afd_testkit/templates/page.html.j2": "<b>",
}


def put(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def commit(folder, files):
    """A checkout of ``files``, committed; its commit."""
    if not folder.exists():
        folder.mkdir()
        git(folder, "init", "-q")
    put(folder, files)
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "files")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def installed(tmp_path, monkeypatch, lone_git):
    """A folder with both packages, as if they were imported from there."""
    folder = tmp_path / "installed"
    put(folder, FILES)
    monkeypatch.setattr(own_code, "package_folder", lambda name: folder / name)
    return folder


def begin(directory):
    run = RunInfo.begin(["x"], directory=directory)
    record = build_record(run, [])
    return run.source, record["code"]


def test_the_same_files_keep_commit_and_state(tmp_path, installed):
    checkout = tmp_path / "checkout"
    head = commit(checkout, {**FILES, "README.md": "x"})
    source, code = begin(checkout / "afd_plugin")
    assert source == Source(head, dirty=False, untracked=0)
    assert code["checkout"] == "same"
    # The definition: sha256sum's lines, in the order of the paths.
    lines = "".join(
        f"{hashlib.sha256(FILES[name].encode()).hexdigest()}  {name}\n" for name in sorted(FILES)
    )
    assert code["sha256"] == hashlib.sha256(lines.encode()).hexdigest()


@pytest.mark.parametrize("name", sorted(FILES))
@pytest.mark.parametrize("change", ["content", "gone", "added"])
def test_one_file_of_the_checkout_that_did_not_run_takes_the_commit(
    tmp_path, installed, name, change
):
    checkout = tmp_path / "checkout"
    if change == "content":
        commit(checkout, {**FILES, name: FILES[name] + " "})
    elif change == "gone":
        commit(checkout, {key: value for key, value in FILES.items() if key != name})
    else:
        commit(checkout, FILES)
        (installed / name).unlink()
    source, code = begin(checkout)
    assert source == Source(
        None,
        None,
        None,
        "the installed afd_plugin and afd_testkit differ from this checkout "
        f"(first: {name}); reinstall, for example with tox -e gate",
    )
    assert code["checkout"] == "differs"


def test_a_commit_made_after_the_install_is_not_recorded(tmp_path, installed):
    checkout = tmp_path / "checkout"
    first = commit(checkout, FILES)
    before, code = begin(checkout)
    commit(checkout, {"afd_plugin/rules.py": "a = 2"})
    after, same_code = begin(checkout)
    assert (before.commit, after.commit) == (first, None)
    assert code["sha256"] == same_code["sha256"]
    put(installed, {"afd_plugin/rules.py": "a = 2"})  # installed anew
    assert begin(checkout)[1]["checkout"] == "same"
    assert begin(checkout)[1]["sha256"] != code["sha256"]


@pytest.mark.parametrize("package", ["afd_plugin", "afd_testkit"])
def test_a_package_that_is_missing_on_one_side_differs(tmp_path, installed, package):
    checkout = tmp_path / "checkout"
    commit(checkout, {name: text for name, text in FILES.items() if name.startswith(package)})
    assert begin(checkout)[1]["checkout"] == "differs"
    shutil.rmtree(installed / package)
    assert begin(checkout)[1]["checkout"] == "differs"


def test_another_project_keeps_its_commit_and_tells_the_code(tmp_path, installed):
    ours, other = tmp_path / "ours", tmp_path / "other"
    commit(ours, FILES)
    head = commit(other, {"engine.py": "x = 1"})
    source, code = begin(other)
    assert source == Source(head, dirty=False, untracked=0)
    assert code == {**begin(ours)[1], "checkout": "another project"}


def test_compiled_files_and_other_kinds_do_not_count(tmp_path, installed):
    checkout = tmp_path / "checkout"
    put(installed, {"afd_plugin/__pycache__/rules.cpython-311.pyc": "x", "afd_plugin/py.typed": ""})
    commit(checkout, FILES)
    assert begin(checkout)[1]["checkout"] == "same"


def test_outside_a_checkout_the_code_is_still_told(tmp_path, installed):
    (tmp_path / "plain").mkdir()
    commit(tmp_path / "checkout", FILES)
    source, code = begin(tmp_path / "plain")
    assert source.commit is None
    assert code == {**begin(tmp_path / "checkout")[1], "checkout": "none"}
    assert code["checkout"] == Relation.NONE


def test_a_package_is_found_where_it_is_imported_from():
    folder = package_folder("afd_testkit")
    assert folder is not None
    assert str(folder / "__init__.py") == afd_testkit.__file__
    assert package_folder("afd_no_such_package") is None
