"""Files opened by name: regular ones of a bounded size, text without marks, packaged names before a folder's files."""

from __future__ import annotations

import codecs
import logging
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from relaygr_lab.bench.lengths import costs_named

from relaygr_stream.errors import ConfigError
from relaygr_stream.history.sqlite_store import SqliteStore
from relaygr_stream.models.loading import checkpoint_folder
from relaygr_stream.ops.brokers.distribution import node_properties
from relaygr_stream.ops.children import Child, write_settings
from relaygr_stream.settings.files import read_by_others, write_private
from relaygr_stream.settings.inputs import LFS_POINTER, decode_text, open_regular, read_bytes
from relaygr_stream.settings.load import load_settings, profile_path
from relaygr_stream.settings.schema import Settings
from relaygr_stream.wire.behaviours import Behaviours

PROFILE = b'[kafka]\nbootstrap = "h\xc3\xb6st:9092"\n'


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _socket(path: Path) -> None:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.close()


def _folder(path: Path) -> None:
    path.mkdir()


def _large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


NO_FILES = [(_fifo, "is a pipe"), (_device, "is a device"), (_socket, "is a socket"), (_folder, "is a folder")]


@pytest.mark.parametrize(("make", "words"), [*NO_FILES, (_large, "has more than 1 MiB")])
def test_only_regular_files_of_a_bounded_size_are_read(
    make: Callable[[Path], None], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    file = Path("it.toml")
    make(file)
    with pytest.raises(OSError, match=words):
        read_bytes(file)
    with pytest.raises(ConfigError, match=words):
        load_settings(["it.toml"], environ={})
    secret = "has more than 64 KiB" if make is _large else words
    with pytest.raises(ConfigError, match=secret):
        load_settings(environ={"RELAYGR_HANDOVER_SECRET_FILE": "it.toml"})


def test_a_file_that_git_did_not_fetch_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(LFS_POINTER + b"v1\noid sha256:0\nsize 9\n")
    with pytest.raises(OSError, match=r"Git LFS pointer.*git lfs pull"):
        read_bytes(tmp_path / "x")


def test_a_name_with_a_nul_is_an_error_of_the_file() -> None:
    with pytest.raises(OSError, match="NUL"):
        open_regular("a\0b")


# ---- byte order marks, line ends, invisible characters ----


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_settings_files_may_have_a_byte_order_mark(encoding: str, end: str, tmp_path: Path) -> None:
    file = tmp_path / "it.toml"
    file.write_bytes(PROFILE.decode().replace("\n", end).encode(encoding))
    assert load_settings([file], environ={}).settings.kafka.bootstrap == "höst:9092"


@pytest.mark.parametrize("mark", [codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE])
def test_both_orders_of_utf16_are_read(mark: bytes) -> None:
    encoding = "utf-16-le" if mark == codecs.BOM_UTF16_LE else "utf-16-be"
    assert decode_text(mark + "a = 1".encode(encoding)) == "a = 1"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\r", " \t\r\n", "\n\n", "\u2028", "\x85"])
def test_a_secret_file_holds_the_secret_whatever_wrote_it(encoding: str, end: str, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_bytes(f"acme:0123456789abcdef0123{end}".encode(encoding))
    settings = load_settings(environ={"RELAYGR_GATEWAY_TOKENS_FILE": str(file)}).settings
    assert settings.gateway.tokens == "acme:0123456789abcdef0123"


@pytest.mark.parametrize("sign", ["\ufeff", "\u200b", "\u00ad"])
def test_an_invisible_character_in_a_secret_is_refused_by_its_number(sign: str, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"sixteen characters{sign} and more")
    with pytest.raises(ConfigError, match=rf"handover.secret.*U\+{ord(sign):04X}") as caught:
        load_settings(environ={"RELAYGR_HANDOVER_SECRET_FILE": str(file)})
    assert "sixteen" not in str(caught.value)


def test_a_byte_order_mark_within_any_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"client\.tenant.*U\+FEFF"):
        load_settings(environ={"RELAYGR_CLIENT_TENANT": "\ufeffacme"})
    with pytest.raises(ConfigError, match=r"client\.tenant.*U\+FEFF"):
        load_settings(flags={"client.tenant": "ac\ufeffme"}, environ={})


# ---- which file a name means ----


def test_a_file_of_the_working_folder_is_no_packaged_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("cpu", "evil"):
        Path(name).write_text('[model]\nfactory = "evil:factory"\n')
    assert profile_path("cpu") != Path("cpu")
    assert load_settings(["cpu"], environ={}).settings.model.factory == ""
    assert load_settings(environ={"RELAYGR_CONFIG": "cpu"}).settings.model.factory == ""
    assert load_settings(["./cpu"], environ={}).settings.model.factory == "evil:factory"
    with pytest.raises(ConfigError, match=r"evil: no such .*write \./evil"):
        load_settings(["evil"], environ={})


def test_a_packaged_checkpoint_and_packaged_costs_come_before_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo").mkdir()
    Path("demo", "config.json").write_text("{}")
    Path("cpu").write_text("no costs")
    assert checkpoint_folder("demo").is_absolute()
    assert costs_named("cpu").steps >= 1


# ---- who may read ----


def test_a_secret_that_others_may_read_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "secret"
    file.write_text("sixteen characters and more")
    for mode in (0o644, 0o604):
        file.chmod(mode)
        with caplog.at_level(logging.WARNING):
            load_settings(environ={"RELAYGR_HANDOVER_SECRET_FILE": str(file)})
        assert str(file) in caplog.text
        assert "sixteen" not in caplog.text
        caplog.clear()
    for mode in (0o600, 0o640):  # a group is somebody's choice
        file.chmod(mode)
        load_settings(environ={"RELAYGR_HANDOVER_SECRET_FILE": str(file)})
        assert not caplog.text


def test_secrets_on_a_read_only_mount_are_a_clusters_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret"
    file.write_text("x")
    file.chmod(0o644)
    assert read_by_others(file)
    mounted = os.statvfs(file)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*mounted[:8], os.ST_RDONLY, mounted[9])))
    assert not read_by_others(file)


def test_a_private_file_is_its_users_alone(tmp_path: Path) -> None:
    write_private(tmp_path / "new", "text")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o600
    (tmp_path / "old").write_text("")
    (tmp_path / "old").chmod(0o644)
    write_private(tmp_path / "old", b"text")
    assert stat.S_IMODE((tmp_path / "old").stat().st_mode) == 0o644


async def test_files_with_histories_are_their_users_alone(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "histories")
    await store.append("u", "", Behaviours.from_arrays([1], [0], [5]))
    child = Child("x", ["--version"], tmp_path)
    await child.wait()
    written = [*_found(tmp_path), child.log, Path(write_settings(tmp_path / "s.toml", Settings()))]
    await store.close()
    assert len(written) >= 4  # SQLite's journals, too
    assert [(file.name, oct(_mode(file))) for file in written if file.exists() and _mode(file) != 0o600] == []


def _found(folder: Path) -> list[Path]:
    return list(folder.glob("histories*"))


def _mode(file: Path) -> int:
    return stat.S_IMODE(file.stat().st_mode)


# ---- files for other programs ----


def test_properties_are_in_the_characters_that_java_reads(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "server.properties").write_text("# größer\nlog.dirs=/x\n", encoding="utf-8")
    text = node_properties(tmp_path, {"log.dirs": "/tmp/größe 𝄞\\n", "b": " x"})
    assert text.isascii()
    assert text.splitlines() == [r"# gr\u00f6\u00dfer", r"log.dirs=/tmp/gr\u00f6\u00dfe \ud834\udd1e\\n", r"b=\ x"]
