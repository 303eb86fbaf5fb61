"""Recordings: what a model answered to a batch at one step, as a safetensors file.

The file has each tensor of inputs and outputs under its place, such as `inputs[0]['user']`. Its metadata has one key,
`headrace`: a checksum of eight hexadecimal digits, a space, and JSON of the other fields and of the structure around
the tensors. The checksum is the CRC-32C of that JSON and then of the tensors' bytes, in the order of their names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import crc32c
import torch

from headrace.kernels.module_walk import is_a
from headrace.schemas.errors import ConfigError, CorruptionError, HeadraceError
from headrace.schemas.extras import install_command

__all__ = ["Flattened", "Recording", "RecordingName", "difference", "flatten"]

_FORMAT = 1  # ON DISK: never renumber
_NAME = re.compile(r"(?P<model>[A-Za-z0-9._~-]+)-(?P<epoch>[0-9]{8,})-(?P<step>[0-9]{12,})\.safetensors")


@dataclass(frozen=True, slots=True)
class RecordingName:
    """The name of a recording's file; `model` is its name there, see `of`. Recordings of a model sort by their step."""

    model: str
    epoch: int
    step: int

    @classmethod
    def of(cls, model: str, epoch: int, step: int) -> Self:
        """Return the name of a model's recording; characters that a path may not have are replaced in it."""
        in_path = re.sub(r"[^A-Za-z0-9._-]", "_", model)
        if in_path != model:  # two models never share a name
            in_path += f"~{crc32c.crc32c(model.encode()):08x}"
        return cls(in_path, epoch, step)

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """Return what `str` has written; None for another file's name."""
        match = _NAME.fullmatch(name)
        return None if match is None else cls(match["model"], int(match["epoch"]), int(match["step"]))

    def __str__(self) -> str:
        return f"{self.model}-{self.epoch:08}-{self.step:012}.safetensors"


@dataclass(frozen=True, slots=True)
class Flattened:
    """Tensors on the CPU by their place, and as JSON the structure that they were in."""

    structure: Any
    tensors: dict[str, torch.Tensor]

    def build(self) -> Any:
        """Return the structure again, with these tensors."""
        return _build(self.structure, self.tensors)


def flatten(value: Any, place: str) -> Flattened:
    """Copy tensors in lists, tuples, dicts and TorchRec's containers to the CPU; `place` names the whole in messages.

    Raises:
        ConfigError: Something in there is neither of these nor a number, a text, a bool or None; the message says what.
    """
    tensors: dict[str, torch.Tensor] = {}
    return Flattened(_flatten(value, place, tensors), tensors)


def _flatten(value: Any, place: str, tensors: dict[str, torch.Tensor]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return {"value": value}
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.is_complex() or is_a(value, "DTensor"):
            what = f"{type(value).__name__} of {value.dtype} and {value.layout}"
            raise ConfigError(f"{place}: {what} cannot be recorded: give a plain tensor that is whole on this rank")
        copied = value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        tensors[place] = copied.as_subclass(torch.Tensor)
        return {"tensor": place}
    if type(value) in (list, tuple):
        kind = type(value).__name__
        return {kind: [_flatten(each, f"{place}[{number}]", tensors) for number, each in enumerate(value)]}
    if type(value) is dict:
        if others := [key for key in value if type(key) is not str]:
            raise ConfigError(f"{place}: key {others[0]!r} of a dict is no text")
        return {"dict": {key: _flatten(each, f"{place}[{key!r}]", tensors) for key, each in value.items()}}
    if is_a(value, "Awaitable"):  # what sharded modules of TorchRec return
        return _flatten(value.wait(), place, tensors)
    if is_a(value, "KeyedJaggedTensor"):
        if value.variable_stride_per_key() or value.inverse_indices_or_none() is not None:
            raise ConfigError(f"{place}: a KeyedJaggedTensor with a batch size per feature cannot be recorded")
        parts = {"values": value.values(), "lengths": value.lengths(), "weights": value.weights_or_none()}
        return {"kjt": {"keys": list(value.keys()), "stride": value.stride(), **_parts(parts, place, tensors)}}
    if is_a(value, "JaggedTensor"):
        parts = {"values": value.values(), "lengths": value.lengths(), "weights": value.weights_or_none()}
        return {"jagged": _parts(parts, place, tensors)}
    if is_a(value, "KeyedTensor"):
        widths = [int(width) for width in value.length_per_key()]
        parts = {"values": value.values()}
        known = {"keys": list(value.keys()), "widths": widths, "key_dim": int(value.key_dim())}
        return {"keyed": {**known, **_parts(parts, place, tensors)}}
    raise ConfigError(
        f"{place}: {type(value).__name__} cannot be recorded: give tensors, KeyedJaggedTensor, JaggedTensor or "
        "KeyedTensor in lists, tuples and dicts"
    )


def _parts(parts: dict[str, torch.Tensor | None], place: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: _flatten(part, f"{place}.{name}", tensors) for name, part in parts.items()}


def _build(node: Any, tensors: dict[str, torch.Tensor]) -> Any:
    ((kind, content),) = node.items()
    if kind == "value":
        return content
    if kind == "tensor":
        return tensors[content]
    if kind == "list":
        return [_build(each, tensors) for each in content]
    if kind == "tuple":
        return tuple(_build(each, tensors) for each in content)
    if kind == "dict":
        return {key: _build(each, tensors) for key, each in content.items()}
    try:
        from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
    except ImportError as exc:
        raise ConfigError("the recording has tensors of TorchRec, which is not installed here") from exc
    built = {name: _build(part, tensors) if isinstance(part, dict) else part for name, part in content.items()}
    if kind == "kjt":
        return KeyedJaggedTensor(**built)
    if kind == "jagged":
        return JaggedTensor(**built)
    if kind == "keyed":
        keys, widths, dim = built["keys"], built["widths"], built["key_dim"]
        return KeyedTensor(keys=keys, length_per_key=widths, values=built["values"], key_dim=dim)
    raise KeyError(kind)


def difference(a: Flattened, b: Flattened) -> tuple[float, bool, str]:
    """Return the largest absolute difference of two values' tensors, whether all bits are equal, and the place of it.

    It is infinite where structure, type, shape or anything but the tensors' values differs, or one value is NaN.
    """
    if a.structure != b.structure:
        return float("inf"), False, f"structure {json.dumps(b.structure)} instead of {json.dumps(a.structure)}"
    largest, is_equal, worst = 0.0, True, ""
    for place, ours in a.tensors.items():
        theirs = b.tensors[place]
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            what = f"{list(theirs.shape)} {theirs.dtype} instead of {list(ours.shape)} {ours.dtype}"
            return float("inf"), False, f"{place}: {what}"
        if torch.equal(_bytes_of(ours), _bytes_of(theirs)):
            continue
        gaps = (ours.double() - theirs.double()).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
        if ours.is_floating_point():
            gaps[(ours == theirs) | (ours.isnan() & theirs.isnan())] = 0.0
        gap = float(gaps.max())
        if is_equal or gap > largest:
            largest, worst = gap, place
        is_equal = False
    return largest, is_equal, worst


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """A batch and what the model answered in eval mode, with the rows and dense parameters of exactly one step.

    Attributes:
        run, model, epoch, step: Of which training.
        time_us: The trainer's wall clock then, microseconds since 1970.
        inputs: What the model is called with: the arguments, if it is a tuple.
        outputs: What it returned.
    """

    run: str
    model: str
    epoch: int
    step: int
    time_us: int
    inputs: Flattened
    outputs: Flattened

    @property
    def name(self) -> RecordingName:
        """The name of the file."""
        return RecordingName.of(self.model, self.epoch, self.step)

    @property
    def size_bytes(self) -> int:
        """Memory of the tensors."""
        return sum(tensor.nbytes for each in (self.inputs, self.outputs) for tensor in each.tensors.values())

    def encode(self) -> bytes:
        """Return the file; raise ConfigError if `safetensors` is not installed."""
        try:
            from safetensors.torch import save
        except ImportError as exc:
            raise ConfigError(f"recordings need {install_command('recordings')}") from exc
        tensors = {**self.inputs.tensors, **self.outputs.tensors}
        told: dict[str, Any] = {name: getattr(self, name) for name in _FIELDS}
        told |= {"format": _FORMAT, "inputs": self.inputs.structure, "outputs": self.outputs.structure}
        text = json.dumps(told)
        # In one value: the library writes several in any order.
        return save(tensors, {"headrace": f"{_checksum(text, tensors)} {text}"})

    @classmethod
    def decode(cls, data: bytes, where: str) -> Recording:
        """Return the recording that is in a file.

        Raises:
            CorruptionError: The file, named `where`, is torn, altered or another kind of file.
            ConfigError: `safetensors` is not installed, or a later build wrote the file.
        """
        try:
            from safetensors import SafetensorError
            from safetensors.torch import load
        except ImportError as exc:
            raise ConfigError(f"recordings need {install_command('recordings')}") from exc
        try:
            tensors = load(data)
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
            checksum, _, text = header["headrace"].partition(" ")
            is_intact = checksum == _checksum(text, tensors)
            told = json.loads(text)
            number = told["format"]
            if [type(told[name]) for name in _FIELDS] != [str, str, int, int, int]:
                raise ValueError("a field of a wrong type")
            if is_intact and number == _FORMAT:
                inputs, outputs = (_part(told[part], tensors) for part in ("inputs", "outputs"))
                return cls(**{name: told[name] for name in _FIELDS}, inputs=inputs, outputs=outputs)
        except HeadraceError:
            raise
        except (SafetensorError, ValueError, KeyError, RecursionError, TypeError, AttributeError) as exc:
            raise CorruptionError(f"{where}: torn, or no recording: {type(exc).__name__}: {exc}") from exc
        if not is_intact:
            raise CorruptionError(f"{where}: its bytes are not those that were recorded: the checksum differs")
        raise ConfigError(f"{where}: a recording of format {number}, and this build reads {_FORMAT}: update it")


_FIELDS = ("run", "model", "epoch", "step", "time_us")


def _part(structure: Any, tensors: dict[str, torch.Tensor]) -> Flattened:
    return Flattened(structure, {place: tensors[place] for place in _places(structure)})


def _places(node: Any) -> Iterator[str]:
    if isinstance(node, list):
        for each in node:
            yield from _places(each)
    elif isinstance(node, dict):
        for key, each in node.items():
            if key == "tensor" and isinstance(each, str):
                yield each
            elif key != "value":
                yield from _places(each)


def _checksum(text: str, tensors: dict[str, torch.Tensor]) -> str:
    checksum = crc32c.crc32c(text.encode())
    for place in sorted(tensors):
        checksum = crc32c.crc32c(_bytes_of(tensors[place]).numpy().data, checksum)
    return f"{checksum:08x}"
