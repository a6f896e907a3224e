"""onnxruntime's GroupQueryAttention, where `onnx` and `onnxruntime` are installed; else nothing.

The operator wants heads inside a row, (B, n, H · d), so it gets its own copies of the inputs before the
clock runs, and its outputs are read back the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

from torch import Tensor

Run = Callable[[], object]
NAME = "onnxruntime GQA"


def installed() -> bool:
    """True if both packages are there."""
    return find_spec("onnxruntime") is not None and find_spec("onnx") is not None


def prefill(q: Tensor, k: Tensor, v: Tensor, threads: int) -> dict[str, Run]:
    """Causal self-attention over (B, H, n, d), nothing in the cache before."""
    if not installed():
        return {}
    return {NAME: _run(q, k, v, k[:, :, :0], v[:, :, :0], threads)}


def decode(q: Tensor, k: Tensor, v: Tensor, threads: int) -> dict[str, Run]:
    """One query per row; all keys but the last are in the cache, as the operator wants it."""
    if not installed():
        return {}
    last, before = slice(-1, None), slice(0, -1)
    return {NAME: _run(q, k[:, :, last], v[:, :, last], k[:, :, before], v[:, :, before], threads)}


def _run(q: Tensor, k: Tensor, v: Tensor, past_k: Tensor, past_v: Tensor, threads: int) -> Run:
    import numpy as np
    import torch

    session = _session(q.shape[1], k.shape[1], q.shape[3], threads)
    total = past_k.shape[2] + k.shape[2]

    def rows(t: Tensor) -> Any:
        return t.transpose(1, 2).flatten(2).contiguous().numpy()

    feed = {
        "query": rows(q),
        "key": rows(k),
        "value": rows(v),
        "past_key": past_k.contiguous().numpy(),
        "past_value": past_v.contiguous().numpy(),
        "seqlens_k": np.full(q.shape[0], total - 1, np.int32),
        "total_sequence_length": np.array(total, np.int32),
    }

    def run() -> Tensor:
        out = torch.from_numpy(session.run(["output"], feed)[0])
        return out.unflatten(-1, (q.shape[1], -1)).transpose(1, 2)

    return run


@cache
def _session(Hq: int, Hkv: int, d: int, threads: int) -> Any:
    import onnxruntime
    from onnx import TensorProto, helper

    f32, i32 = TensorProto.FLOAT, TensorProto.INT32
    inputs = {
        "query": (f32, ["B", "n", Hq * d]),
        "key": (f32, ["B", "n", Hkv * d]),
        "value": (f32, ["B", "n", Hkv * d]),
        "past_key": (f32, ["B", Hkv, "past", d]),
        "past_value": (f32, ["B", Hkv, "past", d]),
        "seqlens_k": (i32, ["B"]),
        "total_sequence_length": (i32, []),
    }
    outputs = {
        "output": (f32, ["B", "n", Hq * d]),
        "present_key": (f32, ["B", Hkv, "total", d]),
        "present_value": (f32, ["B", Hkv, "total", d]),
    }
    node = helper.make_node(
        "GroupQueryAttention",
        list(inputs),
        list(outputs),
        domain="com.microsoft",
        num_heads=Hq,
        kv_num_heads=Hkv,
    )

    def infos(of: dict[str, tuple[int, list[Any]]]) -> list[Any]:
        return [helper.make_tensor_value_info(name, *what) for name, what in of.items()]

    graph = helper.make_graph([node], "attention", infos(inputs), infos(outputs))
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # Its threads would go on spinning on the cores of whoever has the next turn.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
