"""DlrmHSTU: its mathematics against the formulas in float64, what is imported, and what is served."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from relaygr_stream import settings
from relaygr_stream.cli.main import main
from relaygr_stream.errors import ConfigError, InputError, ModelError
from relaygr_stream.models.api import Tokens
from relaygr_stream.models.check.probe import Probe, RequestBounds
from relaygr_stream.models.check.run import check_model
from relaygr_stream.models.dlrm.model import DlrmHSTU
from relaygr_stream.models.importer.dlrm_arrays import format_dlrm_table, run_dlrm_conformance
from relaygr_stream.models.importer.dlrm_hstu import ANCHOR, Choices, Imported, describe, import_checkpoint, model_of
from relaygr_stream.models.importer.sources import read_tensors
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.models.loading import load_any_checkpoint, load_checkpoint, load_model
from relaygr_stream.models.reference_arrays import ReferenceArrays
from relaygr_stream.wire.features import FeatureSchema
from tests.unit.models.naive_dlrm import LAYERS, PRE, Shape, arrays_of, state_dict

CPU = torch.device("cpu")
USERS = "_embedding_collection.embeddings.user_id.weight"
SHAPE = Shape()
CHOICES = Choices(heads=SHAPE.heads)
GROWS = Choices(heads=SHAPE.heads, scale_tokens=100, times="constant", positions="start", min_tokens=0)
BOUNDS = RequestBounds(prefix=120, suffix=16, candidates=20, items=SHAPE.items, max_stale=9)
#: A folder with the reference's own arrays, dlrm_hstu_*.npz, which are not in this repository.
ARRAYS = os.environ.get("RELAYGR_DLRM_ARRAYS", "")


def compare(path: Path, arrays: dict[str, Any]) -> Any:
    np.savez(path, **arrays)
    return run_dlrm_conformance(ReferenceArrays(path), torch.float32, "auto")


@pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        Shape(layers=1, heads=1, linear=16, qk=16, dim=32, actions=(1, 2, 4, 8, 512), tasks=2, min_uih=0),
        Shape(group_norm=True, positions=9, times=13, heads=2, fixed=300),
    ],
    ids=["small", "two tasks", "group norm and short tables"],
)
def test_every_array_is_what_the_formulas_say(tmp_path: Path, shape: Shape) -> None:
    results = compare(tmp_path / "dlrm.npz", arrays_of(shape))
    assert {one.name: one.requests for one in results} == {"alone": 5, "fixed": 5, "fixed_triton": 5, "incremental": 1}
    assert all(one.conforms for one in results), format_dlrm_table(results)
    assert all(len(one.deviations) == 9 for one in results)


@pytest.fixture(scope="module")
def small() -> dict[str, Any]:
    return arrays_of(SHAPE)


@pytest.mark.parametrize(
    "name", ["preprocessed", "encoded", "layer1", "k0", "v1", "user", "item", "logits", "predictions"]
)
def test_a_deviation_in_any_array_is_found(tmp_path: Path, name: str, small: dict[str, Any]) -> None:
    off = small[f"out/fixed/long/{name}"].copy()
    off.flat[-1] += 3e-5 * max(1, np.abs(off).max())
    fewer = {key: value for key, value in small.items() if not key.startswith(("out/alone/", "out/fixed_triton/"))}
    found = compare(tmp_path / "off.npz", {**fewer, f"out/fixed/long/{name}": off})
    assert {one.name: one.conforms for one in found} == {"fixed": False, "incremental": True}


def test_arrays_that_the_model_has_not_are_refused_by_name(tmp_path: Path) -> None:
    arrays = arrays_of(SHAPE)
    with pytest.raises(InputError, match="the model has no array 'gates'"):
        compare(tmp_path / "other.npz", arrays | {"out/alone/one/gates": np.ones(3)})
    with pytest.raises(InputError, match=r"`in/one/cand_query_time` is missing"):
        compare(tmp_path / "less.npz", {key: value for key, value in arrays.items() if key != "in/one/cand_query_time"})
    with pytest.raises(InputError, match="`meta/config` is not a JSON object"):
        compare(tmp_path / "list.npz", arrays | {"meta/config": np.array("[]")})


def test_the_command_compares_such_a_file_and_says_whether_it_conforms(tmp_path: Path) -> None:
    arrays = arrays_of(SHAPE)
    np.savez(tmp_path / "good.npz", **arrays)  # type: ignore[arg-type]
    arrays["out/alone/one/logits"][0] = np.nan
    np.savez(tmp_path / "bad.npz", **arrays)  # type: ignore[arg-type]
    good, bad, half = (
        CliRunner().invoke(main, ["model", "conformance", str(tmp_path / name), *more])
        for name, *more in (("good.npz",), ("bad.npz",), ("good.npz", "--dtype", "bfloat16"))
    )
    assert (good.exit_code, bad.exit_code, half.exit_code) == (0, 1, 1), good.output + bad.output
    assert "compared in float32" in half.stderr


@pytest.mark.skipif(not ARRAYS, reason="RELAYGR_DLRM_ARRAYS names no folder with dlrm_hstu_*.npz")
def test_the_arrays_of_the_reference_itself() -> None:
    files = sorted(Path(ARRAYS).glob("dlrm_hstu*.npz"))
    assert files
    for file in files:
        results = run_dlrm_conformance(ReferenceArrays(file), torch.float32, "auto")
        assert all(one.conforms for one in results), f"{file}\n{format_dlrm_table(results)}"


# ---- importing ----


def tensors(seed: int = 0, shape: Shape = SHAPE) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value) for name, value in state_dict(shape, seed).items()}


def imported(choices: Choices = CHOICES, **changes: torch.Tensor) -> Imported:
    return model_of(Path("x.pt"), tensors() | changes, choices)


def as_state_dict(folder: Path) -> Path:
    torch.save(tensors(), folder / "plain.pt")
    return folder / "plain.pt"


def as_training_state(folder: Path) -> Path:
    wrapped = {
        f"module._orig_mod.{name.replace('_stu_module.', '_stu_module._orig_mod.')}": v for name, v in tensors().items()
    }
    torch.save(
        {"epoch": 3, "model": wrapped, "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}}}, folder / "t.ckpt"
    )
    return folder / "t.ckpt"


def as_safetensors(folder: Path) -> Path:
    save_file(
        {f"_dmp_wrapped_module.{name}": value.contiguous() for name, value in tensors().items()},
        folder / "a.safetensors",
    )
    return folder / "a.safetensors"


def as_distributed(folder: Path) -> Path:
    from torch.distributed.checkpoint.state_dict_saver import save as save_distributed  # a second

    save_distributed({"app": {"model": tensors()}, "step": 7}, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


def as_dlrm_v3(folder: Path) -> Path:
    """Dense weights in one file, tables in a distributed checkpoint beside it, as DLRMv3's training saves them."""
    (folder / "v3").mkdir()
    dense = {f"module.{name}": value for name, value in tensors().items() if "embedding_collection" not in name}
    sparse = {f"module.{name}": value for name, value in tensors().items() if "embedding_collection" in name}
    torch.save(
        {"dense_dict": dense, "global_step": {"train": 1}, "sparse_tensor_keys": set(sparse)},
        folder / "v3" / "non_sparse.ckpt",
    )
    from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

    save_distributed({"sparse_dict": sparse}, checkpoint_id=folder / "v3" / "sparse", no_dist=True)
    return folder / "v3"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("save", [as_state_dict, as_training_state, as_safetensors, as_distributed, as_dlrm_v3])
def test_every_form_of_a_checkpoint_is_the_same_model(tmp_path: Path, save: Any) -> None:
    made = import_checkpoint(save(tmp_path), tmp_path / "out", CHOICES)
    served = load_any_checkpoint(tmp_path / "out")
    assert isinstance(served, DlrmHSTU)
    assert served.version == made.model.version == imported().model.version
    assert made.left_out == ()


class Runs:
    """Something that a pickle may ask for: a call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder / "ran"),)


def test_no_checkpoint_runs_code(tmp_path: Path) -> None:
    torch.save({"model": Runs(tmp_path)}, tmp_path / "evil.pt")
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / ".metadata").write_bytes(pickle.dumps(Runs(tmp_path)))
    for path in (tmp_path / "evil.pt", tmp_path / "evil"):
        with pytest.raises(ModelError, match="mkdir"):
            read_tensors(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_is_no_state_dict_is_refused_with_what_to_do(tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 2)
    torch.save(layer, tmp_path / "module.pt")
    torch.jit.save(torch.jit.script(layer), tmp_path / "script.pt")
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    (tmp_path / "text.pt").write_text("hello")
    for name, words in {
        "module": r"GLOBAL torch\.nn.*of a whole model, `\.state_dict\(\)`",
        "script": r"TorchScript.*torch\.jit\.load\(FILE\)\.state_dict\(\)",
        "list": r"a list without named tensors; write one by torch\.save\(model\.state_dict\(\), FILE\)",
        "text": "neither has written it; write one by",
    }.items():
        with pytest.raises(ModelError, match=words):
            read_tensors(tmp_path / f"{name}.pt")


def test_a_file_is_read_by_what_is_in_it_and_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    file = as_safetensors(tmp_path)
    found = read_tensors(file)
    if file.is_dir():
        (file,) = file.iterdir()
    (tmp_path / "named.pt").write_bytes(file.read_bytes())
    assert read_tensors(tmp_path / "named.pt").keys() == found.keys()
    (tmp_path / "both").mkdir()
    for name in ("a", "b"):
        (tmp_path / "both" / f"{name}.safetensors").write_bytes(file.read_bytes())
    with pytest.raises(ModelError, match=r"b\.safetensors: `.*` is in another file of the folder, too"):
        read_tensors(tmp_path / "both")


@pytest.mark.filterwarnings("ignore")
def test_a_distributed_checkpoint_that_lost_a_file_is_refused_by_name(tmp_path: Path) -> None:
    folder = as_distributed(tmp_path)
    next(folder.glob("*.distcp")).unlink()
    with pytest.raises(ModelError, match=r"distcp: `app\.model\..*` cannot be read: No such file"):
        read_tensors(folder)


@pytest.mark.parametrize(
    ("change", "choices", "words"),
    [
        ({}, Choices(heads=4), "--heads 4 does not divide"),
        ({}, Choices(heads=3, tasks=("a", "b")), "the head has 1 tasks"),
        ({}, Choices(heads=3, item_table="video_id"), "no table `video_id`; it has item_id, item_category_id, user_id"),
        ({}, Choices(heads=3, time_last_row=70), "time_last_row = 70 is behind the table of 70 rows"),
        ({f"{PRE}_batched_contextual_linear_weights": torch.ones(2, 7, 12)}, CHOICES, "of 2 contextual tokens"),
        ({"_hstu_transducer._other.weight": torch.ones(1)}, CHOICES, "`_hstu_transducer._other.weight` is a part that"),
        ({f"ema.{ANCHOR}": torch.ones(1)}, CHOICES, "found under"),
        ({"_item_embedding_mlp.3.bias": torch.full((12,), torch.nan)}, CHOICES, r"mlp\.3\.bias` contains"),
        ({"_item_embedding_mlp.3.bias": torch.ones(11)}, CHOICES, r"`_item_embedding_mlp\.3\.bias` has shape \(11,\)"),
        ({f"{LAYERS}7._uvqk_beta": torch.ones(96)}, CHOICES, rf"`{LAYERS}2\._input_norm_weight` is missing"),
        ({f"{LAYERS}{'9' * 5000}._uvqk_beta": torch.ones(96)}, CHOICES, "is a part that is not served"),
        ({USERS: torch.ones(0, 12)}, CHOICES, rf"`{USERS}` has shape \(0, 12\), expected at least 1"),
        ({USERS: torch.ones(12)}, CHOICES, rf"`{USERS}` has shape \(12,\), expected 2 dimensions"),
        ({USERS: torch.eye(12).to_sparse()}, CHOICES, rf"`{USERS}` is torch.sparse_coo, expected a dense tensor"),
        ({USERS: torch.ones(9, 12, device="meta")}, CHOICES, rf"`{USERS}` is on the device meta"),
        ({USERS: torch.ones(9, 7, dtype=torch.complex64)}, CHOICES, "torch.complex64, expected a floating type"),
        ({f"{PRE}_action_encoder._combined_action_weights": torch.ones(4) / 2}, CHOICES, "expected whole ones"),
        ({f"{PRE}_action_encoder._combined_action_weights": torch.tensor([1, 2, 4])}, CHOICES, "3 action weights"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(change: dict[str, torch.Tensor], choices: Choices, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        imported(choices, **change)


def test_an_action_beyond_the_wire_and_a_task_named_twice_are_refused(tmp_path: Path) -> None:
    name = f"{PRE}_action_encoder._combined_action_weights"
    torch.save(tensors() | {name: torch.tensor([1, 2, 4, 256])}, tmp_path / "wide.pt")
    with pytest.raises(ModelError, match="an action on the wire is 0…255"):
        import_checkpoint(tmp_path / "wide.pt", tmp_path / "out", CHOICES)
    with pytest.raises(ConfigError, match="a name stands there twice"):
        import_checkpoint(tmp_path / "wide.pt", tmp_path / "out", Choices(heads=3, tasks=("a", "a")))


def test_senders_read_the_schema_in_the_folder(tmp_path: Path) -> None:
    made = import_checkpoint(as_state_dict(tmp_path), tmp_path / "out", CHOICES)
    assert FeatureSchema.read(tmp_path / "out" / "config.json") == made.model.features
    file = tmp_path / "out" / "config.json"
    file.write_text(file.read_text().replace("uih_timestamp", "uih_time"))
    with pytest.raises(ModelError, match="`features` are not those"):
        load_any_checkpoint(tmp_path / "out")


def test_other_checkpoints_and_folders_are_refused(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "other.pt")
    with pytest.raises(ModelError, match=r"which every DlrmHSTU has, is missing.*has 1 tensors, the first is `weight`"):
        import_checkpoint(tmp_path / "other.pt", tmp_path / "out", CHOICES)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ModelError, match="is there already and not an empty folder"):
        import_checkpoint(as_state_dict(tmp_path), tmp_path, CHOICES)
    import_checkpoint(as_state_dict(tmp_path), tmp_path / "out", CHOICES)
    with pytest.raises(ModelError, match="a dlrm-hstu; expected a hstu"):
        load_checkpoint(tmp_path / "out")


def test_the_import_says_what_ties_prefix_kv_to_one_request(tmp_path: Path) -> None:
    words = ["model", "import", "dlrm-hstu", str(as_state_dict(tmp_path)), str(tmp_path / "out"), "--heads", "3"]
    said = CliRunner().invoke(main, words)
    assert said.exit_code == 0, said.output
    for reason in ("positions count from the end", "relative to the query", "N of the scale", "under 20 tokens"):
        assert reason in said.output
    assert "valid for the request that was announced, and no other one" in said.output
    assert not imported().model.incremental
    grows = imported(GROWS)
    assert grows.model.incremental
    assert "served incrementally" in describe(grows)
    assert "query_time (user)" not in describe(grows)


def test_equal_rows_of_a_table_are_no_dependence() -> None:
    """As the reference's mode `incremental`: rows 2.. of the position table are alike."""
    level, still = torch.ones(40, 12), torch.ones(70, 12)
    made = imported(
        Choices(heads=3, scale_tokens=64, min_tokens=0),
        **{
            "_hstu_transducer._positional_encoder._position_embeddings_weight": level,
            "_hstu_transducer._positional_encoder._timestamp_embeddings_weight": still,
        },
    )
    assert (made.model.config.positions, made.model.config.times) == ("none", "constant")
    assert made.model.incremental


# ---- serving ----


@pytest.mark.parametrize(
    ("choices", "dtype"),
    [
        (CHOICES, torch.float32),
        (CHOICES, torch.bfloat16),
        (Choices(heads=3, scale_tokens=100), torch.float32),
        (GROWS, torch.float32),
        (Choices(heads=3, scale_tokens=100, times="gap", positions="start", min_tokens=0), torch.float32),
        (Choices(heads=3, scale_tokens=100, times="constant", positions="none", min_tokens=20), torch.bfloat16),
    ],
    ids=["of the request", "of the request, bfloat16", "constant N", "constant times", "gaps", "gate, bfloat16"],
)
@pytest.mark.stack
def test_an_imported_model_keeps_the_protocol(tmp_path: Path, choices: Choices, dtype: torch.dtype) -> None:
    import_checkpoint(as_state_dict(tmp_path), tmp_path / "out", choices)
    model = settings.Model(checkpoint=str(tmp_path / "out"))
    said: list[str] = []
    probe = Probe(
        lambda wanted: load_model(model, settings.Relay(), device=CPU, dtype=wanted), CPU, dtype, BOUNDS, seed=1
    )
    assert check_model(probe, said.append), "\n".join(said)


def test_prefix_kv_of_one_request_are_not_continued() -> None:
    model = imported().model
    probe = Probe(lambda dtype: model, CPU, torch.float32, BOUNDS, seed=0)
    region = probe.prefix(probe.history(30), slack=9)
    with pytest.raises(ModelError, match="positions count from the end"):
        model.prefill(region, probe.behaviours(3))
    with pytest.raises(ModelError, match="no suffix"):
        model.score([probe.ranking(region, probe.behaviours(3), probe.candidates(4))])


def test_kernels_with_one_scale_do_not_serve_a_scale_of_each_request() -> None:
    with pytest.raises(ModelError, match=r'worker\.kernels = "amx", but N is each request'):
        imported().model.place(CPU, torch.float32, "amx")


def test_an_id_outside_its_table_is_counted_and_shares_a_row() -> None:
    model = imported(GROWS).model
    probe = Probe(lambda dtype: model, CPU, torch.float32, BOUNDS, seed=0)
    region = probe.prefix(probe.history(5))
    before = model.unknown_items
    known, unknown = (probe.score(region, Tokens.zeros(0, model.features), np.array([3 + far])) for far in (0, 6000))
    assert known.shape == unknown.shape == (1, 1)
    assert model.unknown_items - before == 1


def test_the_state_of_a_prefix_survives_every_type() -> None:
    model = imported().model
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model.place(CPU, dtype)
        probe = Probe(lambda _, model=model: model, CPU, torch.float32, BOUNDS, seed=3)  # type: ignore[misc]
        history = probe.history(9)
        region = KVRegion.new(model.layout, 9)
        model.prefill(region, history)
        (stated,) = model._stated_of([probe.ranking(region, probe.none, probe.candidates(2))])
        assert stated == model.embedding.stated_in(history)
