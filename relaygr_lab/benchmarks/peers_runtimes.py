"""How each peer prepares a row and runs it once. Imports a runtime only where it is asked for.

A prepared row is a `Run`: each call does the work on the next copy of the prefix KV, and returns the outputs in the
order of peers_stu.py. Runtimes read a row's tensors in place: it must live as long as its `Run`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from peers_stu import STU, Parts, Prefill, Score, Shape, diagonal, seen

Run = Callable[[], list[torch.Tensor]]

#: Opset 18 has LayerNormalization and everything else that the layers are exported to.
OPSET: Final = 18


class UnsupportedRowError(Exception):
    """The runtime has no such row, and the message says why."""


@dataclass(frozen=True)
class Row:
    """What is computed, and on what: x (rows, D), and copies of the prefix KV, none of which is cached at its turn.

    `copies` is [()] for a prefill. `folder` is for what a runtime writes.
    """

    module: Score | Prefill
    x: torch.Tensor
    copies: list[tuple[torch.Tensor, ...]]
    folder: Path

    @property
    def half(self) -> bool:
        return self.x.dtype == torch.bfloat16


def build(path: Path, copies: int, folder: Path) -> Row:
    """The row in a file that the bench wrote (PeersBench.row in peers.py), with `copies` copies of its prefix KV."""
    found: dict[str, Any] = torch.load(path)
    layers = [STU(Shape(**found["shape"]), weights) for weights in found["layers"]]
    kv: list[torch.Tensor] = found["kv"]
    module = Score(layers, found["head"]) if kv else Prefill(layers)
    together: list[tuple[torch.Tensor, ...]] = (
        [tuple(part.clone() for part in kv) for _ in range(copies)] if kv else [()]
    )
    return Row(module, found["x"], together, folder)


def version(package: str) -> str:
    return importlib.metadata.version(package)


def eager(row: Row) -> Run:
    copies = itertools.cycle(row.copies)

    def run() -> list[torch.Tensor]:
        out = row.module(row.x, *next(copies))
        return [out] if isinstance(out, torch.Tensor) else list(out)

    return run


def compiled(row: Row) -> Run:
    """Each layer is compiled for the row's shapes: a layer's code is made once for all layers.

    A prefill compiles its blocks, with any number of columns: the whole layer of a long prefill compiles for minutes.
    """
    torch.compiler.reset()
    if isinstance(row.module, Score):
        row.module.step = torch.compile(STU.score, dynamic=False)
    else:
        row.module.parts = Parts(
            project=torch.compile(STU.project, dynamic=False), finish=torch.compile(STU.finish, dynamic=False),
            seen=torch.compile(seen, dynamic=True), diagonal=torch.compile(diagonal, dynamic=False),
        )  # fmt: skip
    return eager(row)


def onnxruntime(row: Row) -> Run:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    try:
        session = ort.InferenceSession(str(exported(row)), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        if row.half:
            raise UnsupportedRowError(f"no bfloat16: {str(error).splitlines()[0].split(' : ')[-1][:60]}") from error
        raise
    names, results = ([each.name for each in side] for side in (session.get_inputs(), session.get_outputs()))
    bindings = []
    for copy in row.copies:
        binding = session.io_binding()
        for name, part in zip(names, (row.x, *copy), strict=True):
            element = 16 if row.half else 1  # TensorProto.BFLOAT16, TensorProto.FLOAT
            binding.bind_input(name, "cpu", 0, element, list(part.shape), part.data_ptr())
        for name in results:
            binding.bind_output(name, "cpu")
        bindings.append(binding)
    turns = itertools.cycle(bindings)

    def run() -> list[torch.Tensor]:
        binding = next(turns)
        session.run_with_iobinding(binding)
        return [torch.utils.dlpack.from_dlpack(value._ortvalue.to_dlpack()) for value in binding.get_outputs()]

    return run


def openvino(row: Row) -> Run:
    import numpy as np
    import openvino as ov

    core = ov.Core()
    if row.half and "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        raise UnsupportedRowError("no bfloat16 on this processor")
    element = ov.Type.bf16 if row.half else ov.Type.f32
    model = core.compile_model(
        core.read_model(exported(row)), "CPU",
        {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY",
         "INFERENCE_PRECISION_HINT": "bf16" if row.half else "f32"},
    )  # fmt: skip

    def tensor(part: torch.Tensor) -> Any:
        flat = part.view(torch.int16).numpy().view(np.uint16) if row.half else part.numpy()
        return ov.Tensor(flat, list(part.shape), element) if row.half else ov.Tensor(flat, shared_memory=True)

    requests = []
    for copy in row.copies:
        request = model.create_infer_request()
        for index, part in enumerate((row.x, *copy)):
            request.set_input_tensor(index, tensor(part))
        requests.append(request)
    turns = itertools.cycle(requests)

    def result(part: Any) -> torch.Tensor:
        if part.element_type == ov.Type.bf16:
            return torch.from_numpy(part.data.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(part.data)

    def run() -> list[torch.Tensor]:
        request = next(turns)
        request.infer(share_outputs=True)
        return [result(part) for part in request.output_tensors]

    return run


def exported(row: Row) -> Path:
    """The row as an ONNX file, its weights inside."""
    path = row.folder / "model.onnx"
    with warnings.catch_warnings(), contextlib.redirect_stdout(None):
        warnings.simplefilter("ignore")
        torch.onnx.export(
            row.module.eval(),
            (row.x, *row.copies[0]),
            path,
            dynamo=False,
            opset_version=OPSET,
            do_constant_folding=True,
        )
    return path
