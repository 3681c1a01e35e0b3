"""Whether something can be written is found out before the work whose result it is."""

import os

import pytest

from pagedjax.errors import ConfigError
from pagedjax.folders import check_file_target, check_folder_target


def test_a_file_that_can_be_written_is_left_as_it_was(tmp_path):
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_text("content")
    for path in ("", str(new), str(old)):
        check_file_target("--output", path)
    assert not new.exists()
    assert old.read_text() == "content"


def test_files_that_cannot_be_written(tmp_path):
    with pytest.raises(ConfigError, match=f"--output={tmp_path}: is a folder"):
        check_file_target("--output", str(tmp_path))
    with pytest.raises(ConfigError, match=f"--output={tmp_path}/a/b: there is no folder {tmp_path}/a"):
        check_file_target("--output", str(tmp_path / "a" / "b"))


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="no /proc, where even root cannot write")
def test_where_nobody_may_write():
    with pytest.raises(ConfigError, match="--output=/proc/x: cannot be written"):
        check_file_target("--output", "/proc/x")
    with pytest.raises(ConfigError, match="--plots=/proc/x: cannot be written to"):
        check_folder_target("--plots", "/proc/x")


def test_folders_are_made(tmp_path):
    check_folder_target("--plots", str(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b").is_dir()
    check_folder_target("--plots", str(tmp_path / "a" / "b"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file, name a folder"):
        check_folder_target("--plots", str(tmp_path / "file"))
