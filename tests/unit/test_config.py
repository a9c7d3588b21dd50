"""Settings: each layer beats the one before it, every value knows its source, every mistake is named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relaygr_stream.errors import ConfigError
from relaygr_stream.settings.load import FIELDS, REMOVED, RETIRED, Config, injected_names, load_settings, profile_path
from relaygr_stream.settings.schema import Settings
from relaygr_stream.settings.section import SECRET_SHOWN

PASSWORD = "of-the-key"


def value_of(config: Config, key: str) -> tuple[Any, str]:
    (value,) = [value for value in config.values if value.field.key == key]
    return value.value, value.source


def write(folder: Path, text: str, name: str = "relay.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_without_any_source_the_defaults_hold() -> None:
    config = load_settings(environ={})
    assert config.settings == Settings()
    assert {value.source for value in config.values} == {"default"}
    assert {value.field.key for value in config.values} == set(FIELDS)


def test_each_layer_beats_the_one_before_and_says_so(tmp_path: Path) -> None:
    first = write(tmp_path, "[relay]\nslo_ms = 11\nlife_window_ms = 21\nmax_candidates = 31\n", "first.toml")
    second = write(
        tmp_path, "[relay]\nlife_window_ms = 22\nmax_candidates = 32\nmax_suffix_tokens = 42\n", "second.toml"
    )
    environ = {"RELAYGR_RELAY_MAX_CANDIDATES": "33", "RELAYGR_RELAY_MAX_SUFFIX_TOKENS": "43"}
    config = load_settings([first, second], {"relay.max_suffix_tokens": "44", "relay.slo_ms": None}, environ)
    assert value_of(config, "relay.slo_ms") == (11.0, str(first))
    assert value_of(config, "relay.life_window_ms") == (22.0, str(second))
    assert value_of(config, "relay.max_candidates") == (33, "environment RELAYGR_RELAY_MAX_CANDIDATES")
    assert value_of(config, "relay.max_suffix_tokens") == (44, "flag for relay.max_suffix_tokens")
    assert config.settings.relay.max_suffix_tokens == 44


def test_a_file_named_by_the_environment_comes_first(tmp_path: Path) -> None:
    named = write(tmp_path, "[relay]\nslo_ms = 11\nmax_candidates = 31\n", "named.toml")
    given = write(tmp_path, "[relay]\nslo_ms = 12\n", "given.toml")
    config = load_settings([given], environ={"RELAYGR_CONFIG": str(named)})
    assert config.settings.relay.slo_ms == 12
    assert config.settings.relay.max_candidates == 31


def test_every_setting_can_be_set_by_its_environment_variable() -> None:
    for field in FIELDS.values():
        default = field.default
        text = str(default).lower() if isinstance(default, bool) else str(default)
        if isinstance(default, tuple):
            text = ",".join(default)
        config = load_settings(environ={field.env: text})
        assert value_of(config, field.key) == (default, f"environment {field.env}")
        assert field.description, field.key


@pytest.mark.parametrize(
    ("text", "number"),
    [("1024", 1024), ("512MiB", 512 << 20), ("1.5 GiB", 3 << 29), ("2kib", 2048), ("7B", 7), ("1TiB", 1 << 40)],
)
def test_sizes_may_have_units(text: str, number: int, tmp_path: Path) -> None:
    assert load_settings(environ={"RELAYGR_WORKER_HBM_BYTES": text}).settings.worker.hbm_bytes == number
    path = write(tmp_path, f'[worker]\nhbm_bytes = "{text}"\n')
    assert load_settings([path], environ={}).settings.worker.hbm_bytes == number


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"RELAYGR_RELAY_SLO": "1"},
            "environment RELAYGR_RELAY_SLO: no such setting; did you mean `RELAYGR_RELAY_SLO_MS`?",
        ),
        ({"RELAYGR_WORKER_HBM": "1GiB"}, "did you mean `RELAYGR_WORKER_HBM_BYTES`?"),
        ({"RELAYGR_WORKER_DRAM": "1GiB"}, "did you mean `RELAYGR_WORKER_DRAM_BYTES`"),
        ({"RELAYGR_HBM_BYTES": "1GiB"}, "did you mean `RELAYGR_WORKER_HBM_BYTES`?"),
        ({"RELAYGR_TRIGGER_HBM_BYTES": "1GiB"}, "did you mean `RELAYGR_WORKER_HBM_BYTES`?"),
        ({"RELAYGR_KAFKA_SERVERS": "k:1"}, "no such setting; `relaygr config show` lists them"),
        ({"RELAYGR_WORKER_HBM_BYTE": "1GiB"}, "did you mean `RELAYGR_WORKER_HBM_BYTES`?"),
        ({"RELAYGR_WORKER_XYZZY": "1"}, "no such setting; `relaygr config show` lists them"),
        ({"RELAYGR_RELAY_SLO_MS": "fast"}, "environment RELAYGR_RELAY_SLO_MS: `relay.slo_ms` = 'fast'"),
        ({"RELAYGR_RELAY_SLO_MS": "0"}, "`relay.slo_ms` = '0'"),
        ({"RELAYGR_RELAY_SLO_MS": "nan"}, "`relay.slo_ms` = 'nan'"),
        ({"RELAYGR_RELAY_SLO_MS": ""}, "`relay.slo_ms` = ''"),
        ({"RELAYGR_WORKER_PINNED_SHARE": "nan"}, "`worker.pinned_share` = 'nan'"),
        ({"RELAYGR_WORKER_PINNED_SHARE": "1.1"}, "`worker.pinned_share` = '1.1'"),
        ({"RELAYGR_WORKER_HBM_BYTES": "1 GB"}, "`worker.hbm_bytes` = '1 GB': write a number of bytes, or one with KiB"),
        ({"RELAYGR_WORKER_HBM_BYTES": "-1"}, "`worker.hbm_bytes` = '-1'"),
        ({"RELAYGR_WORKER_HBM_BYTES": "0"}, "`worker.hbm_bytes` = '0'"),
        ({"RELAYGR_WORKER_DTYPE": "int8"}, "`worker.dtype` = 'int8': write one of bfloat16, float16, float32;"),
        ({"RELAYGR_TELEMETRY_HASH_USER_IDS": "perhaps"}, "`telemetry.hash_user_ids` = 'perhaps'"),
        ({"RELAYGR_WORKER_NAME": "a b"}, "`worker.name` = 'a b'"),
        ({"RELAYGR_WORKER_NAME": "x" * 300}, "xxx… (300 characters): Expected `str` of length <= 128"),
        ({"RELAYGR_KAFKA_PREFIX": "x" * 65}, "Expected `str` of length <= 64"),
        ({"RELAYGR_KAFKA_TOPICS_DIR": f"/a/{'x' * 256}/b"}, "has a name of 256 bytes, at most 255 are possible"),
        ({"RELAYGR_WORKER_DRAM_PATH": "\N{SNOWMAN}" * 86}, "has a name of 258 bytes, at most 255 are possible"),
        ({"RELAYGR_MODEL_PATH": f"a:{'b/' * 2048}"}, "has a path of 4096 bytes, at most 4095 are possible"),
        ({"RELAYGR_TLS_CA": "a\0b"}, "`tls.ca` has a NUL: remove it"),
        ({"RELAYGR_HISTORY_STORE": f"redis://u:secret@{'x' * 249}"}, f"= {SECRET_SHOWN}: has a name of 256 bytes"),
        ({"RELAYGR_CONFIG": "absent.toml"}, "absent.toml: no such file"),
        ({"RELAYGR_CONFIG": "x" * 256}, "File name too long"),
    ],
)
def test_a_mistake_in_the_environment_names_variable_and_value(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_settings(environ=environ)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[relay]\nslo = 1\n", "no setting `relay.slo`; did you mean `relay.slo_ms`?"),
        ("[elsewhere]\nxyzzy = 1\n", "no setting `elsewhere.xyzzy`"),
        ("slo_ms = 1\n", "`slo_ms` stands outside any section"),
        ('[relay]\nslo_ms = "50 ms"\n', "`relay.slo_ms` = '50 ms'"),
        ("[relay]\nmax_candidates = 1.5\n", "`relay.max_candidates` = 1.5"),
        ("[relay]\nmax_candidates = true\n", "`relay.max_candidates` = True"),
        ("[relay\n", "relay.toml: "),
    ],
)
def test_a_mistake_in_a_file_names_file_and_key(text: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load_settings([path], environ={})
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "kafka:\n  bootstrap: kafka:9092\n", "a.yaml: a YAML file, not TOML: "),
        ("a.yml", "kafka: {bootstrap: kafka}\n", "a.yml: a YAML file, not TOML: "),
        ("a.json", '{"kafka": {}}', "a.json: a JSON file, not TOML: "),
        ("a.conf", "kafka:\n  bootstrap: kafka:9092\n", "a.conf: not TOML: "),
    ],
)
def test_a_file_of_another_format_is_called_one(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load_settings([path], environ={})
    assert 'TOML looks like the line [kafka], and below it bootstrap = "kafka:9092"' in str(caught.value)


def test_a_mistake_in_a_flag_names_it() -> None:
    with pytest.raises(ConfigError, match=r"flag for relay.slo_mss: no setting `relay.slo_mss`; did you mean"):
        load_settings(flags={"relay.slo_mss": "1"}, environ={})


def test_secrets_are_neither_shown_nor_quoted_in_errors() -> None:
    config = load_settings(environ={"RELAYGR_TELEMETRY_HASH_KEY": "hunter2"})
    (value,) = [value for value in config.values if value.field.key == "telemetry.hash_key"]
    assert value.value == "hunter2"
    assert value.shown == "********"
    with pytest.raises(ConfigError) as caught:
        load_settings(flags={"telemetry.hash_key": 7}, environ={})
    assert "7" not in str(caught.value)


def test_variables_for_tests_and_other_programs_are_left_alone() -> None:
    assert load_settings(environ={"RELAYGR_TEST_BOOTSTRAP": "x", "KAFKA_HOME": "y"}).settings == Settings()


@pytest.mark.parametrize("name", ["cpu", "cuda", "npu", "trigger", "workers/cpu.toml"])
def test_every_packaged_profile_is_valid_and_found_from_anywhere(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert profile_path(name).is_file()
    load_settings([name], environ={})


@pytest.mark.parametrize("name", ["fleet.toml", "./cpu.toml", "cpu.toml"])
def test_a_file_that_is_not_here_is_never_taken_for_a_packaged_profile(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"{name}: no such file"):
        profile_path(name)


def test_an_unknown_profile_lists_those_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"gpu: no such file, and no packaged profile .*cpu, cuda, .*npu, .*trigger"):
        load_settings(["gpu"], environ={})


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"kafka.tail_max_wait_ms": "10000"}, "is not below `kafka.request_timeout_ms` = 10000"),
        ({"kafka.request_timeout_ms": "50"}, "`kafka.fetch_max_wait_ms` = 50 is not below"),
        ({"worker.group": "trigger"}, "`trigger.group` and `worker.group` are both 'trigger'"),
        ({"worker.status_interval_ms": "1001"}, "more than two thirds of `client.silence_ms` = 1500"),
        ({"worker.status_interval_ms": "800", "client.silence_ms": "9000", "trigger.max_status_age_ms": "1000"},
         "more than two thirds of `trigger.max_status_age_ms` = 1000"),
        ({"tls.ca": "ca.pem"}, "no connection uses them: set `kafka.security_protocol` = SSL"),
        ({"kafka.prefix": "relay\n"}, "kafka.prefix"),
        ({"worker.device": "cuda\n"}, "worker.device"),
        ({"worker.hbm_bytes": "9" * 400}, "a number of 400 digits is no size"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_settings_with_which_nothing_would_work_are_refused(flags: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_settings([], flags, {})


def test_settings_are_frozen() -> None:
    with pytest.raises(AttributeError):
        setattr(Settings().relay, "slo_ms", 1)  # noqa: B010 - a plain assignment is what mypy forbids
    assert msgspec.structs.replace(Settings().relay, slo_ms=1).slo_ms == 1


INJECTED = {  # Kubernetes, for the services relaygr, relaygr-trigger, relaygr-worker, relaygr-telemetry
    "RELAYGR_PORT": "tcp://10.0.0.1:9400",
    "RELAYGR_SERVICE_HOST": "10.0.0.1",
    "RELAYGR_TRIGGER_PORT": "tcp://10.0.0.2:9400",
    "RELAYGR_TRIGGER_PORT_9400_TCP": "tcp://10.0.0.2:9400",
    "RELAYGR_TRIGGER_PORT_9400_TCP_PROTO": "tcp",
    "RELAYGR_TRIGGER_PORT_9400_TCP_PORT": "9400",
    "RELAYGR_TRIGGER_PORT_9400_TCP_ADDR": "10.0.0.2",
    "RELAYGR_WORKER_SERVICE_HOST": "fd00::3",
    "RELAYGR_WORKER_SERVICE_PORT": "9400",
    "RELAYGR_WORKER_SERVICE_PORT_METRICS": "9400",
    "RELAYGR_TELEMETRY_PORT": "tcp://10.0.0.4:9400",  # the name of a setting, but no port
}


def test_what_a_cluster_injects_for_its_services_stops_nobody() -> None:
    config = load_settings(environ={**INJECTED, "RELAYGR_HANDOVER_PORT": "9500"})
    assert {value.source for value in config.values} == {"default", "environment RELAYGR_HANDOVER_PORT"}
    assert config.settings.handover.port == 9500
    assert injected_names(INJECTED) == sorted(INJECTED)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RELAYGR_TELEMETRY_POTR", "9400"),
        ("RELAYGR_TRIGGER_PORT", "9400"),
        ("RELAYGR_WORKER_SERVICE_PORT", "high"),
        ("RELAYGR_TRIGGER_PORT_TCP", "tcp://10.0.0.2:9400"),
    ],
)
def test_what_only_resembles_that_is_still_a_mistake(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        load_settings(environ={name: value})


@pytest.mark.parametrize("given", ["file", "environment", "flag"])
def test_former_settings_are_accepted_with_a_warning_that_names_what_replaces_them(given: str, tmp_path: Path) -> None:
    file = tmp_path / "old.toml"
    old = '[kafka]\ncommit_interval_ms = 5\n[worker]\ndram_storage = "int8"\n[model]\nlayers = 3\n'
    file.write_text(old if given == "file" else "", encoding="utf-8")
    flags = {"kafka.commit_interval_ms": "5", "worker.dram_storage": "int8", "model.layers": "3"}
    environ = {f"RELAYGR_{key.replace('.', '_').upper()}": value for key, value in flags.items()}
    with pytest.warns(FutureWarning) as warned:
        loaded = load_settings(
            [file], flags if given == "flag" else {}, environ if given == "environment" else {}
        ).settings
    assert (loaded.kafka.commit_interval_ms, loaded.model.layers) == (5, 3)
    said = " ".join(str(each.message) for each in warned)
    assert "`kafka.commit_interval_ms` is no setting from the next release on: it is always 1000" in said
    assert "`worker.dram_storage` was removed and has no effect: copies in DRAM are exact" in said
    assert "`model.layers` is no setting from the next release on: config.json in the folder" in said
    assert "`relaygr model random` writes one" in said


@pytest.mark.parametrize(
    ("key", "other", "now"),
    [
        ("trigger.group", "t", "it is always trigger, behind `kafka.prefix`"),
        ("worker.group", "w", "it is always workers, behind `kafka.prefix`"),
        ("history.prefix", "h:", "it is always relaygr:history:; fleets that share a Redis have a DB"),
        ("worker.max_batch", "3", "it is always 8"),
    ],
)
def test_a_value_of_a_setting_that_is_a_constant_now_counts_for_one_release(key: str, other: str, now: str) -> None:
    section, name = key.split(".")
    with pytest.warns(FutureWarning, match=re.escape(f"`{key}` is no setting from the next release on: {now}")):
        loaded = load_settings([], {key: other}, {})
    assert str(getattr(getattr(loaded.settings, section), name)) == other


def test_there_are_no_more_settings_than_a_reader_bears() -> None:
    """Keys of [scenario.NAME] are none of them: they say what a fleet is made of (settings/scenarios.py)."""
    assert len(FIELDS) <= 86, "make a timing that nobody sets a constant with its derivation (section.py: doc)"


@pytest.mark.parametrize("key", sorted(RETIRED))
def test_each_former_setting_warns_and_is_checked(key: str) -> None:
    default = RETIRED[key].default
    given = ",".join(default) if isinstance(default, tuple) else str(default).lower()
    with pytest.warns(FutureWarning, match=re.escape(f"`{key}` is no setting from the next release on")):
        loaded = load_settings([], {}, {RETIRED[key].env: given})
    assert loaded.settings == Settings()
    assert key not in FIELDS
    assert key not in REMOVED
    if not isinstance(default, str | tuple):
        with pytest.warns(FutureWarning), pytest.raises(ConfigError, match=re.escape(f"`{key}`")):
            load_settings([], {}, {RETIRED[key].env: "many"})


def test_one_section_has_the_tls_files_of_all_connections_that_use_tls() -> None:
    tls = {"tls.ca": "ca", "tls.certificate": "me", "tls.key": "key"}
    environ = {"RELAYGR_TLS_KEY_PASSWORD": PASSWORD}
    brokers = load_settings([], tls | {"kafka.security_protocol": "SSL"}, environ).settings
    assert (brokers.kafka.tls_ca, brokers.kafka.tls_certificate, brokers.kafka.tls_key) == ("ca", "me", "key")
    assert brokers.kafka.tls_key_password == PASSWORD
    assert brokers.history == Settings().history
    store = load_settings([], tls | {"history.store": "rediss://there:1/0"}, environ).settings
    assert (store.history.tls_ca, store.history.tls_certificate, store.history.tls_key) == ("ca", "me", "key")
    assert store.history.tls_key_password == PASSWORD
    assert store.kafka == Settings().kafka
    worker = load_settings([], {"tls.ca": "ca", "handover.tls_certificate": "worker"}, {}).settings.handover
    assert (worker.tls_ca, worker.tls_certificate, worker.tls_key) == ("ca", "worker", "")
    assert PASSWORD not in repr(brokers) + repr(store)


def test_former_tls_settings_go_before_those_of_all_connections() -> None:
    flags = {"tls.ca": "ca", "tls.certificate": "me", "tls.key": "key", "kafka.security_protocol": "SSL"}
    former = {"kafka.tls_ca": "brokers", "kafka.tls_certificate": "mine"}
    with pytest.warns(FutureWarning) as warned:
        kafka = load_settings([], flags | former, {}).settings.kafka
    said = " ".join(str(each.message) for each in warned)
    assert "`kafka.tls_ca` is no setting from the next release on: `tls.ca` is for brokers and the history" in said
    assert (kafka.tls_ca, kafka.tls_certificate, kafka.tls_key) == ("brokers", "mine", "")


def test_the_operators_settings_are_few() -> None:
    assert len(FIELDS) <= 90


@pytest.mark.parametrize(
    ("given", "networks"), [("a , b", ("a", "b")), ("a,", ("a", "")), (" ", ()), ("one", ("one",))]
)
@pytest.mark.parametrize("by", ["environment", "flag", "file"])
def test_a_list_may_be_given_as_text_with_commas(
    by: str, given: str, networks: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "list.toml"
    file.write_text(f'[handover]\nnetworks = "{given}"\n' if by == "file" else "", encoding="utf-8")
    environ = {"RELAYGR_HANDOVER_NETWORKS": given} if by == "environment" else {}
    loaded = load_settings([file], {"handover.networks": given} if by == "flag" else {}, environ)
    assert loaded.settings.handover.networks == networks


def test_a_list_is_a_list_in_a_file_and_holds_text_alone(tmp_path: Path) -> None:
    file = tmp_path / "list.toml"
    file.write_text('[handover]\nnetworks = ["a, b", "c"]\n', encoding="utf-8")
    assert load_settings([file], {}, {}).settings.handover.networks == ("a, b", "c")
    file.write_text("[handover]\nnetworks = [1]\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"`handover\.networks` = \[1\]"):
        load_settings([file], {}, {})
